"""Shard a graph over tp ranks by its logical dims.

Each part of a model divides one dim (``placement``). A node divides that dim if any of its tensors
has it (a column- or row-parallel product, a vocabulary-parallel lookup or loss); otherwise every
rank computes it whole. A result is partial if it lacks the divided dim of its inputs. The placement
that a producer left and the one that a consumer needs decide the collective. Megatron's f, g and
their conjugates follow from this one rule, forward and backward. A stage's input and the gradient
of its result are placed like the residual stream.

Ranks of an ep group hold different experts. An ``exchange`` sends rows to them, or back, by an
all-to-all, and sorts the rows on the experts' side. A rank receives as many rows as it sends.

Ranks that share sequences (cp) have a part of the rows of every tensor, and whole weights.
``context`` plans the messages of their attention. tp divides each cp rank's part.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from meshwise.models import context
from meshwise.models.families.experts import arriving
from meshwise.models.graph import (
    BYTES,
    Device,
    Graph,
    Node,
    Tensor,
    elementwise,
    message,
    module_shape,
    num_bytes,
    num_elements,
    operation,
)
from meshwise.models.placement import DIMS, PARTIAL, ROWS, WHOLE, Cut, collective, has
from meshwise.spec import Attention, Collective, Cuts, Op

OVER_DATA = "over_data"  # an all-reduce over data ranks, which are not known here

# One kernel on one device. Split by vocabulary it becomes two, with a result in between.
SPLIT_LOSS = {"loss.softmax": "shifted", "loss.softmax.grad": "exp"}


class Task(Struct, frozen=True, gc=False):
    """One operation of a rank. It starts when its stream is free and all buffers that it reads are
    written."""

    name: str
    op: Op
    stream: str  # compute, dp or cp
    part: str  # embed, layer, head, optimizer, or dp for data-parallel traffic
    phase: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class Buffer(Struct, frozen=True, gc=False):
    num_bytes: int
    role: str  # activation, weights (gathered), gradient, communication


class Sharded(NamedTuple):
    """The tasks of each node on one tp rank (its collectives, then itself), and their buffers.

    ``shapes``: shape of this rank's part of each parameter, as in the module; ``whole``: of all of
    it. ``partial``: parameters whose gradients are partial sums over tp; ``DataParallel`` completes
    the sums.
    ``apart``: the experts' parameters, if ranks hold different experts.
    """

    tasks: tuple[tuple[Node, tuple[Task, ...]], ...]
    buffers: dict[str, Buffer]
    shapes: dict[str, tuple[int, ...]]
    whole: dict[str, tuple[int, ...]]
    partial: frozenset[str]
    apart: frozenset[str] = frozenset()


def shard(
    graph: Graph,
    tp: int,
    cuts: Cuts,
    ep: int = 1,
    cp: int = 1,
    cp_rank: int | None = None,
    device: Device = "cuda",
) -> Sharded:
    """Return one rank's share of ``graph``. The rank is one of ``tp`` ranks, in a group of ``ep``,
    and number ``cp_rank`` (by default the busiest) of ``cp`` ranks that share sequences."""
    walk = _Walk(graph, tp, cuts, ep, cp, cp_rank, device)
    tasks = tuple((node, tuple(walk.tasks(node))) for node in graph.nodes)
    shapes = {
        tensor.name: module_shape(tensor, walk.cut.local(walk.parameters.get(tensor.name, WHOLE)))
        for tensor in graph.parameters()
    }
    partial = frozenset(
        name
        for name, gradient in graph.gradients.items()
        if walk.placement.get(gradient) == PARTIAL
    )
    divided = walk.cut.expert_ranks > 1
    apart = frozenset(t.name for t in graph.parameters() if "experts" in t.dims and divided)
    whole = {tensor.name: module_shape(tensor, graph.sizes) for tensor in graph.parameters()}
    return Sharded(tasks, walk.buffers, shapes, whole, partial, apart)


class _Walk:
    """Walks the nodes in order and tracks each tensor's placement on the tp ranks."""

    def __init__(
        self,
        graph: Graph,
        tp: int,
        cuts: Cuts,
        ep: int,
        cp: int,
        cp_rank: int | None,
        device: Device,
    ) -> None:
        self.device: Device = device
        self.graph, self.tp, self.ep, self.cp, self.cp_rank = graph, tp, ep, cp, cp_rank
        self.cut = Cut(graph, tp, cuts, ep, cp)
        self.saved: dict[str, tuple[tuple[str, ...], ...]] = {}  # keyed by an attention's lse
        self.sizes = self.cut.sizes
        self.placement: dict[str, str] = {}
        self.parameters: dict[str, str] = {}  # the dim that each is cut by
        self.buffers: dict[str, Buffer] = {}
        self.version: dict[str, dict[str, str]] = defaultdict(dict)  # tensor: placement: buffer
        produced = {name for node in graph.nodes for name in node.outputs}
        for tensor in graph.tensors.values():
            if tensor.role == "activation" and tensor.name not in produced:
                self._define(tensor, tensor.name, self.cut.of("stream"))

    def tasks(self, node: Node) -> Iterator[Task]:
        if node.kind == "view" or (node.kind == "exchange" and self.cut.expert_ranks == 1):
            yield from self._view(node)
            return
        if node.kind == "average":
            yield from self._view(node)
            yield from self._averaged(node)
            return
        tensors = [self.graph.tensors[name] for name in (*node.inputs, *node.outputs)]
        dim = PARTIAL if self._is_part(node, tensors) else self.cut.dim(node.room, tensors)
        reads = []
        for tensor in tensors[: len(node.inputs)]:
            if tensor.name in self.placement:  # it was written
                wanted = self._wanted(tensor, dim)
                yield from self._redistribute(node, tensor.name, wanted)
                reads.append(self.version[tensor.name][wanted])
            elif tensor.role == "parameter" and has(tensor, dim):
                self.parameters[tensor.name] = WHOLE if self.cut.repeats(tensor, dim) else dim
        held = [name for name in node.holds if name in self.placement]
        reads += [self.version[name][self.placement[name]] for name in held]
        inputs, outputs = tensors[: len(node.inputs)], tensors[len(node.inputs) :]
        for tensor in outputs:
            self._define(tensor, tensor.name, self._lies(node, tensor, inputs, dim))
        yield from self._computed(node, inputs, outputs, dim, reads)
        for tensor in outputs:
            if node.phase == "recompute":
                yield from self._moved_again(node, tensor.name)
            if node.name == "loss":
                yield from self._redistribute(node, tensor.name, WHOLE)

    def _wanted(self, tensor: Tensor, dim: str) -> str:
        """Return the placement in which a node that divides ``dim`` needs an input."""
        lies = self.placement[tensor.name]
        is_local = tensor.role == "constant" and lies in ROWS  # counts of a rank's own tokens
        return dim if has(tensor, dim) or dim == PARTIAL == lies else lies if is_local else WHOLE

    def _lies(self, node: Node, tensor: Tensor, inputs: list[Tensor], dim: str) -> str:
        """Return the placement of a result of a node that divides ``dim``."""
        if has(tensor, dim):
            return dim
        if not any(has(read, dim) for read in inputs):
            return PARTIAL if dim == PARTIAL else WHOLE
        if dim in ROWS and (tensor.role == "constant" or node.kind == "mean"):
            return dim if tensor.role == "constant" else WHOLE  # each rank's own tokens
        own = "experts" in tensor.dims and self.cut.expert_ranks > self.ep
        return WHOLE if own else PARTIAL  # rows of other ranks came here

    def _computed(
        self, node: Node, inputs: list[Tensor], outputs: list[Tensor], dim: str, reads: list[str]
    ) -> Iterator[Task]:
        """Yield the tasks of a node whose inputs have the placement that it needs."""
        sizes, writes = self.cut.local(dim), tuple(tensor.name for tensor in outputs)

        def task(name: str, op: Op, written: tuple[str, ...]) -> Task:
            return Task(name, op, "compute", node.part, node.phase, tuple(reads), written)

        direction = "backward" if node.phase == "backward" else "forward"
        if node.name in SPLIT_LOSS and dim == "vocab":
            between = f"{node.name}.{SPLIT_LOSS[node.name]}"
            size = num_bytes(outputs[0], sizes)
            self.buffers[between] = Buffer(size, "activation")
            yield task(between, elementwise("cross_entropy", size, size, direction), (between,))
            reads.append(between)
        if node.kind == "exchange":
            yield from self._exchange(node, inputs, sizes, reads, writes)
            return
        if node.kind == "attention" and self.cp > 1:
            yield from self._shared(node, operation(node, inputs, outputs, sizes), reads, writes)
            return
        if node.kind == "balance" and node.phase != "backward":
            yield from self._loads(node, inputs[0], reads[0])
        yield task(node.name, operation(node, inputs, outputs, sizes), writes)
        for tensor in outputs:  # other ranks have this weight, too; rows not used here get 0
            if tensor.role == "gradient" and self.cut.repeats(tensor, dim):
                size = num_bytes(tensor, self.sizes)
                yield task(f"{node.name}.pad", elementwise("copy", size, size, direction), writes)

    def _shared(
        self, node: Node, op: Op, reads: list[str], writes: tuple[str, ...]
    ) -> Iterator[Task]:
        """Yield the tasks of an attention over ranks that share the sequences."""
        assert isinstance(op, Attention)
        own = context.share(op, self.cp, self.tp, self.cp_rank, self.device)
        if node.phase == "backward":
            saved = self.saved[node.inputs[-1]]
            made = context.backward(own, node.name, saved, reads[len(node.inputs) - 3], writes)
        else:
            made = context.forward(own, node.name, tuple(reads), writes)
            self.saved[node.outputs[-1]] = made.saved
        for name, size in made.sizes.items():
            role = "communication" if name in made.sent else "activation"
            self.buffers[name] = Buffer(size, role)
        for name, of, stream, read, written in made.steps:
            yield Task(name, of, stream, node.part, node.phase, read, written)

    def _loads(self, node: Node, counts: Tensor, read: str) -> Iterator[Task]:
        """Sum each expert's number of rows over all ranks with other tokens."""
        size, at = num_bytes(counts, self.sizes), f"{node.name}.{OVER_DATA}"
        loads = message(
            kind="all_reduce", size_bytes=size, group_size=1, dtype="fp64", in_place=True
        )
        over_tp = self.placement[counts.name] in ROWS
        for name, op in ((at, loads), (f"{at}.tp", replace(loads, group_size=self.tp))):
            if name == at or over_tp:
                yield Task(name, op, "compute", node.part, node.phase, (read,), ())

    def _averaged(self, node: Node) -> Iterator[Task]:
        """Average a tensor over all ranks with other images."""
        (name,), tensor = node.outputs, self.graph.tensors[node.outputs[0]]
        lies = self.placement[name]
        op = message(
            kind="all_reduce",
            size_bytes=num_bytes(tensor, self.cut.local(lies)),
            group_size=1,
            dtype=tensor.dtype,
            in_place=True,
        )
        read = (self.version[name][lies],)
        yield Task(f"{node.name}.{OVER_DATA}", op, "compute", node.part, node.phase, read, ())

    def _view(self, node: Node) -> Iterator[Task]:
        """Give the outputs of a view the placement and the buffers of its input."""
        x = node.inputs[0]
        if self.placement[x] != PARTIAL or node.room == "stream":
            tensors = [self.graph.tensors[name] for name in (x, *node.outputs)]
            wanted = self._wanted(tensors[0], self.cut.dim(node.room, tensors))
            yield from self._redistribute(node, x, wanted)
            self.placement[x] = wanted
        for name in node.outputs:
            self.placement[name] = self.placement[x]
            self.version[name] |= self.version[x]

    def _exchange(
        self,
        node: Node,
        inputs: list[Tensor],
        sizes: Mapping[str, int],
        reads: list[str],
        writes: tuple[str, ...],
    ) -> Iterator[Task]:
        """Send rows to the ranks of their experts, or back. The experts' ranks sort them by
        expert."""
        returns = node.name.removesuffix(".again").endswith(".combine")
        sorts_first = returns != (node.phase == "backward")
        rows, *counts = inputs
        size, between = num_bytes(rows, sizes), f"{node.name}.between"
        if "top_k" in rows.dims:  # plan for the rank that gets the most rows
            size = size * arriving(sizes) // (sizes["batch"] * sizes["seq"] * sizes["top_k"])
            for name in writes if not sorts_first else ():
                self.buffers[name] = replace(self.buffers[name], num_bytes=size)
        self.buffers[between] = Buffer(size, "communication")

        def task(name: str, op: Op, read: tuple[str, ...], written: tuple[str, ...]) -> Task:
            return Task(f"{node.name}.{name}", op, "compute", node.part, node.phase, read, written)

        direction = "backward" if node.phase == "backward" else "forward"
        move = elementwise("copy", size, size, direction)
        if counts and not returns:
            told = num_bytes(counts[0], self.sizes)
            yield task("counts", self._over_ep(told, "fp64"), (reads[1],), ())
        sent = self._over_ep(size, rows.dtype)
        names = ("move", "all_to_all") if sorts_first else ("all_to_all", "move")
        ops = (move, sent) if sorts_first else (sent, move)
        yield task(names[0], ops[0], tuple(reads), (between,))
        yield task(names[1], ops[1], (between,), writes)
        if direction == "backward":
            yield task("scale", elementwise("mul", size, size, direction), writes, ())

    def _over_ep(self, size_bytes: int, dtype: str) -> Collective:
        return message(
            kind="all_to_all",
            size_bytes=size_bytes,
            group_size=self.cut.expert_ranks,
            group_stride=self.tp if self.cut.expert_ranks == self.ep else 1,
            dtype=dtype,
        )

    def _is_part(self, node: Node, tensors: list[Tensor]) -> bool:
        """Return whether the result is a partial sum. It is if the node is linear in inputs that
        are partial: all terms of an addition, one factor, rows that are moved, and in backward the
        gradients that it reads. The backward of the experts' balance is also partial if weights
        are cut: each rank uses its own share."""
        if self.tp == 1:
            return False
        word, backward = self.cut.of(node.room), node.phase == "backward"
        is_cut = word in DIMS
        if is_cut and backward and node.kind == "balance":
            return True
        has_dim = self.cut.dim(node.room, tensors) != WHOLE
        if has_dim and word != WHOLE and node.room != "stream":
            return False
        lies = {name: self.placement.get(name) for name in node.inputs}
        if node.kind == "mul":
            return PARTIAL in lies.values()
        if node.kind == "add":
            linear_in = list(lies)
        elif backward:
            inside = node.room != "stream" and word != WHOLE
            linear_in = [name for name in lies if name.startswith("d.")] if inside else []
        elif node.kind == "gemm":
            linear_in = [name for name in node.inputs[2:] if name in self.placement]
        else:
            linear_in = [node.inputs[0]] if node.kind in ("move", "sum", "exchange") else []
        return {lies[name] for name in linear_in} == {PARTIAL}

    def _define(self, tensor: Tensor, buffer: str, placement: str) -> None:
        sizes = self.cut.local(placement)
        local = num_elements(tensor, sizes) * BYTES[tensor.dtype]
        role = "gradient" if tensor.role == "gradient" else "activation"
        if role == "gradient" and self.cut.repeats(tensor, placement):
            local, placement = num_bytes(tensor, self.sizes), PARTIAL
        self.buffers[buffer] = Buffer(local, role)
        self.version[tensor.name][placement] = buffer
        self.placement[tensor.name] = placement

    def _moved_again(self, node: Node, name: str) -> Iterator[Task]:
        """Redistribute a recomputed result as forward did: the collective's result was not kept."""
        for wanted in list(self.version[name.removesuffix(".again")]):
            yield from self._redistribute(node, name, wanted)

    def _redistribute(self, node: Node, name: str, wanted: str) -> Iterator[Task]:
        versions = self.version[name]
        if wanted in versions:
            return
        tensor, have = self.graph.tensors[name], self.placement[name]
        kind = collective(have, wanted)
        if kind is None:  # a slice of the tensor that is there already
            versions[wanted] = versions[have]
            return
        source, result = versions[have], f"{name}@{wanted}"
        size = num_bytes(tensor, self.cut.local(have) if kind == "all_to_all" else self.sizes)
        self._define(tensor, result, wanted)
        op = message(
            kind=kind,
            size_bytes=size,
            group_size=self.tp,
            dtype=tensor.dtype,
            in_place=kind == "all_reduce",
        )
        yield Task(
            f"{node.name}.{kind}", op, "compute", node.part, node.phase, (source,), (result,)
        )
