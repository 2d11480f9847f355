"""Blocks of a model as training runs them: a layer, or a language model's head with its loss.

A block is the first layer of its form, or the head, of the module of ``nn``. It is in the case's
dtype, with plain weights, as compute sees them under FSDP2. ``parallel`` splits it over tp, cp and
ep as the case says, and all groups of ranks work at once. Its products are in fp8, and it is
compiled, as ``parallel`` does: the layer, or only the loss of the head. All experts get equally
many rows. Images are channels last, as between layers.

Forward is timed while it saves for backward; dropping its graph is not timed. Backward is timed
alone, from gradients that are None, after an untimed forward. What it recomputes is in its time.

``saved_bytes`` of a rank is what one forward keeps for backward: the distinct storages of all
tensors that autograd saves, with the block's input if it is saved, without the parameters and the
targets. The rule is the same on every device and lowering. (The allocator's count would be wrong:
compiled code keeps what it saved last until the next forward.)
"""

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor, nn

from meshwise.engine import step
from meshwise.models import stream_shape
from meshwise.nn import build
from meshwise.nn.stage import Layer, causal
from meshwise.parallel import fp8, mesh, tensor
from meshwise.parallel.apply import Lowering, fill, loss_context, loss_function, lower
from meshwise.parallel.mesh import MeshPlace
from meshwise.probe.work import Unavailable, Work, torch_dtype
from meshwise.ranks import Ranks
from meshwise.spec import Block, Case, LanguageModel, Layout, layer_kinds
from meshwise.timing import randn


class Blocks:
    """Holds this rank's places, and the last block, which forward and backward cases share."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.places: dict[Layout, MeshPlace] = {}
        self.held: tuple[Case, _Built] | None = None

    def build(self, case: Case) -> Work:
        assert isinstance(case.op, Block)
        op = msgspec.structs.replace(case.op, direction="backward")  # the one that may recompute
        either = msgspec.structs.replace(case, op=op)
        if self.held is None or self.held[0] != either:
            self.release()
            if case.lowering == "compiled":
                torch.compiler.reset()  # torch compiles one function for at most eight shapes
            self.held = either, _Built(op, case.lowering, self._place(op), self.ranks.device)
        return self.held[1].work(case.op.direction)

    def release(self) -> None:
        """Forget the last block. Drop its graph first, as compiled code is freed late."""
        if self.held is not None:
            self.held[1].drop()
        self.held = None

    def _place(self, op: Block) -> MeshPlace | None:
        """Return this rank's place in the group that shares a block, as if it were the only one."""
        alone, ranks = op.layout, self.ranks.world_size
        if alone.num_devices == 1:
            return None
        if ranks % alone.num_devices:
            raise Unavailable(f"{alone.num_devices} ranks share the block, {ranks} are no multiple")
        of_all = Layout(dp=ranks // (op.tp * op.cp), tp=op.tp, cp=op.cp, ep=op.ep)
        if of_all not in self.places:
            self.places[of_all] = mesh.build(of_all, self.ranks.device.type)
        return self.places[of_all]._replace(layout=alone)


class _Built:
    """A module on its device, its inputs, and the graph of its last forward."""

    def __init__(
        self, op: Block, lowering: Lowering, place: MeshPlace | None, device: torch.device
    ) -> None:
        self.layout = Layout() if place is None else place.layout
        self.module = module = _module(op, place, device)
        into, out = _shapes(op)
        self.x = _activation(into, op.kept_dtype, device, seed=0).requires_grad_()
        self.y: Tensor | None = None
        self.constants: list[Tensor] = [*module.parameters()]
        self.gradient: Tensor | None = None  # None for a loss: it is 1
        if op.part == "layer":
            assert isinstance(module, Layer)
            if op.dtype == "fp8":
                fp8.use_fp8(module)
            lower(module, op.recompute, self.layout, lowering)
            self.compute: Callable[[Tensor], Tensor] = module
            self.gradient = _activation(out, op.kept_dtype, device, seed=1)
        else:
            assert isinstance(op.model, LanguageModel)
            loss = loss_function(self.layout, lowering, place and place.mesh["tp"])
            size = (op.microbatch_size, op.seq_len // op.cp)
            targets = torch.randint(op.model.vocab, size, device=device)
            self.constants.append(targets)
            self.compute = lambda x: loss(module(x), targets)

    def work(self, direction: str) -> Work:
        forward = direction == "forward"
        return Work(
            calls=(self.forward if forward else self.backward,),
            prepare=self.drop if forward else self.restart,
            metrics=lambda: {"saved_bytes": float(self.saved_bytes())},
        )

    def drop(self) -> None:
        self.y = None

    def forward(self) -> None:
        with loss_context(self.layout):
            self.y = self.compute(self.x)

    def restart(self) -> None:
        self.drop()
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None
        self.forward()

    def backward(self) -> None:
        assert self.y is not None
        with loss_context(self.layout):
            self.y.backward(self.gradient)

    def saved_bytes(self) -> int:
        self.drop()
        known = {_storage(constant).data_ptr() for constant in self.constants}
        found: dict[int, int] = {}

        def pack(saved: Tensor) -> Tensor:
            storage = _storage(saved)
            found[storage.data_ptr()] = storage.nbytes()
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            self.forward()
        self.drop()
        return sum(size for address, size in found.items() if address not in known)


def _module(op: Block, place: MeshPlace | None, device: torch.device) -> nn.Module:
    index = _layer(op)
    attend = causal if place is None else step.attention(op.seq_len, place)
    with torch.device("meta"):
        model = build(op.model, range(index, index + 1), attend=attend, routing="balanced")
    if place is not None:
        tensor.cut_model(model, place)
    name = "head" if op.part == "head" else f"layers.{index}"
    module = model.get_submodule(name)
    fill(model, module, name, 0, device, torch_dtype(op.kept_dtype))
    return module


def _layer(op: Block) -> int:
    """Return the index of the first layer of the block's form; of a head, the last."""
    names = [kind.name for kind in layer_kinds(op.model, op.seq_len)]
    if op.part == "head":
        return len(names) - 1
    return names.index(op.form) if op.form else 0


def _shapes(op: Block) -> tuple[tuple[int, ...], ...]:
    """Return one rank's shapes of the input and of a layer's output."""
    index, rows = _layer(op), op.microbatch_size
    positions = op.seq_len // op.cp // (op.tp if op.sequence_parallel else 1)
    into, out = (stream_shape(op.model, rows, positions, at) for at in (index, index + 1))
    return into, out


def _activation(shape: tuple[int, ...], dtype: str, device: torch.device, seed: int) -> Tensor:
    """Make a random activation: [rows, positions, hidden], or images, channels last."""
    if len(shape) == 3:
        return randn(shape, torch_dtype(dtype), device, seed)
    rows, channels, *size = shape
    return randn((rows, *size, channels), torch_dtype(dtype), device, seed).permute(0, 3, 1, 2)


def _storage(held: Tensor) -> torch.UntypedStorage:
    """Return the memory behind a tensor, also if it is a DTensor or its collective still runs."""
    while hasattr(held, "__tensor_flatten__"):
        (name, *_), _ = held.__tensor_flatten__()
        held = getattr(held, name)
    return held.untyped_storage()
