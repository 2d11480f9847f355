"""Blocks of a model as training runs them: a layer, or a language model's head with its loss.

The first layer of its form or the head of the module of ``nn``, in the case's dtype (plain weights,
as FSDP2 shows them to compute), split over tp by ``parallel`` where the case says so, all tp groups
at once;
compiled as ``parallel`` compiles it: the layer, and of the head the loss. Every expert gets as many
rows as another. Images arrive channels last, as one layer hands them to the next.

Forward is timed saving for backward, its graph dropped untimed. Backward is timed alone, from
gradients that are None, with an untimed forward before each.

``saved_bytes`` of a rank is what one forward keeps for backward: the distinct storages of all
tensors that autograd saves, the block's input included when it is saved, without the parameters
and the targets. The same rule holds on every device and lowering. (The allocator cannot be asked
instead: what compiled code saved last stays allocated until the next forward.)
"""

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor, nn

from meshwise.models import stream_shape
from meshwise.nn import build
from meshwise.parallel import mesh, tensor
from meshwise.parallel.apply import Lowering, fill, is_one_graph, loss_context, loss_function
from meshwise.parallel.mesh import MeshPlace
from meshwise.probe.work import Work, torch_dtype
from meshwise.ranks import Ranks
from meshwise.spec import Block, Case, LanguageModel, Layout, layer_kinds
from meshwise.timing import randn


class Blocks:
    """Holds places in tp groups, and the block built last: its forward and backward share it."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.places: dict[int, MeshPlace] = {}
        self.held: tuple[Case, _Built] | None = None

    def build(self, case: Case) -> Work:
        assert isinstance(case.op, Block)
        op = msgspec.structs.replace(case.op, direction="forward")
        either = msgspec.structs.replace(case, op=op)
        if self.held is None or self.held[0] != either:
            self.release()
            if case.lowering == "compiled":
                torch.compiler.reset()  # it refuses to compile one function for a ninth shape
            self.held = either, _Built(op, case.lowering, self._place(op), self.ranks.device)
        return self.held[1].work(case.op.direction)

    def release(self) -> None:
        """Forget the block built last and, compiled code being slow to go, its graph first."""
        if self.held is not None:
            self.held[1].drop()
        self.held = None

    def _place(self, op: Block) -> MeshPlace | None:
        """The place of this rank in its tp group, as if there were no other."""
        if op.tp > 1 and op.tp not in self.places:
            all_ranks = Layout(dp=self.ranks.world_size // op.tp, tp=op.tp)
            self.places[op.tp] = mesh.build(all_ranks, self.ranks.device.type)
        alone = Layout(tp=op.tp, sequence_parallel=op.sequence_parallel)
        return self.places[op.tp]._replace(layout=alone) if op.tp > 1 else None


class _Built:
    """A module on its device, its inputs, and the graph of its last forward."""

    def __init__(
        self, op: Block, lowering: Lowering, place: MeshPlace | None, device: torch.device
    ) -> None:
        self.layout = Layout() if place is None else place.layout
        self.module = module = _module(op, place, device)
        into, out = _shapes(op)
        self.x = _activation(into, op.dtype, device, seed=0).requires_grad_()
        self.y: Tensor | None = None
        self.constants: list[Tensor] = [*module.parameters()]
        self.gradient: Tensor | None = None  # of a loss it is 1
        if op.part == "layer":
            if lowering == "compiled":
                module.compile(fullgraph=is_one_graph(module, self.layout), dynamic=False)
            self.compute: Callable[[Tensor], Tensor] = module
            self.gradient = _activation(out, op.dtype, device, seed=1)
        else:
            assert isinstance(op.model, LanguageModel)
            loss = loss_function(self.layout, lowering, place and place.mesh["tp"])
            size = (op.microbatch_size, op.seq_len)
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
    with torch.device("meta"):
        model = build(op.model, range(index, index + 1), routing="balanced")
    if place is not None:
        tensor.apply(model, place)
    name = "head" if op.part == "head" else f"layers.{index}"
    module = model.get_submodule(name)
    fill(model, module, name, 0, device, torch_dtype(op.dtype))
    return module


def _layer(op: Block) -> int:
    """The first layer of the block's form."""
    forms = [kind.form for kind in layer_kinds(op.model, op.seq_len)]
    return forms.index(op.form) if op.form else 0


def _shapes(op: Block) -> tuple[tuple[int, ...], ...]:
    """Shapes on one rank of a block's input and of a layer's output."""
    index, rows = _layer(op), op.microbatch_size
    positions = op.seq_len // op.tp if op.sequence_parallel else op.seq_len
    into, out = (stream_shape(op.model, rows, positions, at) for at in (index, index + 1))
    return into, out


def _activation(shape: tuple[int, ...], dtype: str, device: torch.device, seed: int) -> Tensor:
    """[rows, positions, hidden], or images, channels last."""
    if len(shape) == 3:
        return randn(shape, torch_dtype(dtype), device, seed)
    rows, channels, *size = shape
    return randn((rows, *size, channels), torch_dtype(dtype), device, seed).permute(0, 3, 1, 2)


def _storage(held: Tensor) -> torch.UntypedStorage:
    """The memory behind a tensor, through DTensor and tensors that are still on their way."""
    while hasattr(held, "__tensor_flatten__"):
        (name, *_), _ = held.__tensor_flatten__()
        held = getattr(held, name)
    return held.untyped_storage()
