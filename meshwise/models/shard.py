"""Tensor parallelism: a graph over tp ranks, read off the logical dims.

A node's sharded dim is the first of vocab, heads, ffn that any of its tensors has (a column- or
row-parallel product, a vocabulary-parallel lookup or loss); a node without them works on a slice
of seq under sequence parallelism, on the whole otherwise. A result that lacks the dim that its
inputs have is partial. What a consumer needs and what a producer left decide the collective:

    partial -> whole      all_reduce          partial -> seq slice   reduce_scatter
    sliced  -> whole      all_gather          whole   -> seq slice   nothing (a view)

so Megatron's f, g and their conjugates follow, forward and backward, from one rule. A stage's
input and the gradient of its result arrive as the residual stream lies: whole, or a slice of seq.

Ranks of an ep group hold different experts: an ``exchange`` sends rows to them, or back, by an
all-to-all, and sorts them beside it. A rank receives as many rows as it sends.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from meshwise.models.graph import (
    BYTES,
    Graph,
    Node,
    Tensor,
    elementwise,
    module_shape,
    num_bytes,
    num_elements,
    operation,
)
from meshwise.spec import EXPERT_ALIGNMENT, Collective, Layout, Op

TP_DIMS = ("vocab", "heads", "kv_heads", "ffn", "expert_ffn", "shared_ffn")
WHOLE, PARTIAL = "whole", "partial"
LOADS = "loads"  # an all-reduce of each expert's rows, over ranks that are not known here

# One kernel on one device; split by vocabulary, they leave a result between two kernels.
SPLIT_LOSS = {"loss.softmax": "shifted", "loss.softmax.grad": "exp"}


class Task(NamedTuple):
    """One operation of a rank. It starts when its stream is free and all it reads is written."""

    name: str
    op: Op
    stream: str  # compute or dp
    part: str  # embed, layer, head, optimizer, or dp for the traffic of data parallelism
    phase: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class Buffer(NamedTuple):
    num_bytes: int
    role: str  # activation, weights (gathered), gradient, communication


class Sharded(NamedTuple):
    """Every node's tasks on one tp rank (its collectives, then itself), and their buffers.

    ``shapes``: of this rank's part of each parameter, as in the module. ``partial``: the parameters
    whose gradients are parts of a sum over tp, which is taken when data parallelism reduces them.
    ``apart``: the parameters that ep divides.
    """

    tasks: tuple[tuple[Node, tuple[Task, ...]], ...]
    buffers: dict[str, Buffer]
    shapes: dict[str, tuple[int, ...]]
    partial: frozenset[str]
    apart: frozenset[str] = frozenset()


@lru_cache(maxsize=1024)
def shard(graph: Graph, tp: int, sequence_parallel: bool, ep: int = 1) -> Sharded:
    """The share of ``graph`` of one rank of so many tp ranks, in a group of ``ep``."""
    placements = _Placements(graph, tp, sequence_parallel, ep)
    nodes = [node for node in graph.nodes if node.phase != "optimizer"]
    tasks = tuple((node, tuple(placements.tasks(node))) for node in nodes)
    cut = {dim: -(-graph.sizes[dim] // tp) for dim in TP_DIMS if dim in graph.sizes}
    local = {**placements.sizes, **cut}
    shapes = {tensor.name: module_shape(tensor, local) for tensor in graph.parameters()}
    partial = frozenset(
        name
        for name, gradient in graph.gradients.items()
        if placements.placement.get(gradient) == PARTIAL
    )
    apart = frozenset(t.name for t in graph.parameters() if "experts" in t.dims and ep > 1)
    return Sharded(tasks, placements.buffers, shapes, partial, apart)


def check_divides(sizes: Mapping[str, int], layout: Layout, seq_len: int) -> str | None:
    """Why tensor parallelism of this degree cannot exist for these sizes, or None."""
    for dim in TP_DIMS:
        if sizes.get(dim, 0) % layout.tp:
            return f"tp = {layout.tp} does not divide {dim} = {sizes[dim]}"
    if sizes.get("experts", layout.ep) % layout.ep:
        return f"ep = {layout.ep} does not divide experts = {sizes['experts']}"
    if layout.sequence_parallel and seq_len % layout.tp:
        return f"tp = {layout.tp} does not divide seq = {seq_len}"
    return None


def graph_cuts(graph: Graph) -> dict[str, str]:
    """How tp cuts the weight of each product and lookup: col (what it makes), row (what it
    contracts), vocab or replicated; by the operation's name in its layer."""
    found = {}
    for node in graph.nodes:
        picks_bias = graph.tensors[node.inputs[0]].role == "constant"
        if node.kind not in ("gemm", "embedding") or picks_bias:
            continue
        weight, result = (graph.tensors[name].dims for name in (node.inputs[1], node.outputs[0]))
        (cut, *_) = [dim for dim in TP_DIMS if dim in weight] or [""]
        word = "vocab" if cut == "vocab" else "col" if cut in result else "row"
        found[node.name.removeprefix(f"layers.{node.layer}.")] = word if cut else "replicated"
    return found


class _Placements:
    """Placement of every tensor over tp while the nodes are walked in order."""

    def __init__(self, graph: Graph, tp: int, sequence_parallel: bool, ep: int) -> None:
        self.graph, self.sizes, self.tp, self.ep = graph, dict(graph.sizes), tp, ep
        if "experts" in self.sizes:  # a rank has so many less, and less room between their rows
            self.sizes["experts"] //= ep
            gone = graph.sizes["experts"] - self.sizes["experts"]
            self.sizes["room"] -= EXPERT_ALIGNMENT * gone
        self.sequence_parallel = sequence_parallel
        self.shared_biases: set[str] = set()  # nodes of their gradients: parts of a sum
        self.placement: dict[str, str] = {}
        self.buffers: dict[str, Buffer] = {}
        self.version: dict[tuple[str, str], str] = {}  # (tensor, placement) -> buffer
        produced = {name for node in graph.nodes for name in node.outputs}
        for tensor in graph.tensors.values():
            if tensor.role == "activation" and tensor.name not in produced:
                self._define(tensor, tensor.name, self._dim_of([]))

    def tasks(self, node: Node) -> Iterator[Task]:
        if node.kind == "view" or (node.kind == "exchange" and self.ep == 1):
            yield from self._view(node)
            return
        names = (*node.inputs, *node.outputs)
        tensors = [self.graph.tensors[name] for name in names]
        dim = self._dim_at(node, tensors)
        reads = []
        for tensor in tensors[: len(node.inputs)]:
            if tensor.name in self.placement:  # it was written
                is_part = dim == PARTIAL == self.placement[tensor.name]
                wanted = dim if dim in tensor.dims or is_part else WHOLE
                yield from self._redistribute(node, tensor.name, wanted)
                reads.append(self.version[tensor.name, wanted])
        held = [name for name in node.holds if name in self.placement]
        reads += [self.version[name, self.placement[name]] for name in held]
        sizes = self._local(dim)
        inputs, outputs = tensors[: len(node.inputs)], tensors[len(node.inputs) :]
        contracted = any(dim in tensor.dims for tensor in inputs)
        if node.kind == "gemm" and node.whole:  # a bias enters a sum over ranks by its share
            self.shared_biases |= {f"{node.name}.bgrad"} if dim not in outputs[0].dims else set()
            self.shared_biases |= {f"{node.name}.wgrad"} if dim == PARTIAL else set()
        for tensor in outputs:
            is_partial = contracted or dim == PARTIAL
            lies = dim if dim in tensor.dims else PARTIAL if is_partial else WHOLE
            self._define(tensor, tensor.name, lies)
        if node.name in SPLIT_LOSS and dim == "vocab":
            between = f"{node.name}.{SPLIT_LOSS[node.name]}"
            size = num_bytes(outputs[0], sizes)
            self.buffers[between] = Buffer(size, "activation")
            direction = "backward" if node.phase == "backward" else "forward"
            op = elementwise("cross_entropy", size, size, direction)
            yield Task(between, op, "compute", node.part, node.phase, tuple(reads), (between,))
            reads.append(between)
        writes = tuple(tensor.name for tensor in outputs)
        if node.kind == "exchange":
            yield from self._exchange(node, inputs, reads, writes)
            return
        if node.kind == "balance" and node.phase != "backward":
            size, at = num_bytes(inputs[0], self.sizes), f"{node.name}.{LOADS}"
            loads = Collective(kind="all_reduce", size_bytes=size, group_size=1, dtype="fp64")
            yield Task(at, loads, "compute", node.part, node.phase, (reads[0],), ())
        whole = operation(node, inputs, outputs, sizes)
        yield Task(node.name, whole, "compute", node.part, node.phase, tuple(reads), writes)
        for tensor in outputs:
            if "positions" in tensor.dims and dim == "seq":  # each rank has rows of its own
                self.placement[tensor.name] = "seq"
                self.version[tensor.name, "seq"] = tensor.name
                yield from self._redistribute(node, tensor.name, WHOLE)
        for tensor in outputs:  # gathered for a product that is not redone, so gather it here
            before = (tensor.name.removesuffix(".again"), WHOLE)
            if node.phase == "recompute" and dim == "seq" and before in self.version:
                yield from self._redistribute(node, tensor.name, WHOLE)

    def _view(self, node: Node) -> Iterator[Task]:
        """Its outputs lie where its input does, in the same buffers."""
        x = node.inputs[0]
        if node.whole and self.placement[x] == "seq":
            yield from self._redistribute(node, x, WHOLE)
            self.placement[x] = WHOLE
        for name in node.outputs:
            self.placement[name] = self.placement[x]
            for (of, placement), buffer in list(self.version.items()):
                if of == x:
                    self.version[name, placement] = buffer

    def _exchange(
        self, node: Node, inputs: list[Tensor], reads: list[str], writes: tuple[str, ...]
    ) -> Iterator[Task]:
        """Rows to the ranks of their experts, or back: they are sorted there."""
        returns = node.name.removesuffix(".again").endswith(".combine")
        sorts_first = returns != (node.phase == "backward")
        rows, *counts = inputs
        size, between = num_bytes(rows, self.sizes), f"{node.name}.between"
        self.buffers[between] = Buffer(size, "communication")

        def task(name: str, op: Op, read: tuple[str, ...], written: tuple[str, ...]) -> Task:
            return Task(f"{node.name}.{name}", op, "compute", node.part, node.phase, read, written)

        direction = "backward" if node.phase == "backward" else "forward"
        move = elementwise("copy", size, size, direction)
        if counts and not returns:
            told = num_bytes(counts[0], self.sizes)
            yield task("counts", self._collective("all_to_all", told, "fp64"), (reads[1],), ())
        sent = self._collective("all_to_all", size, rows.dtype)
        names = ("move", "all_to_all") if sorts_first else ("all_to_all", "move")
        ops = (move, sent) if sorts_first else (sent, move)
        yield task(names[0], ops[0], tuple(reads), (between,))
        yield task(names[1], ops[1], (between,), writes)
        if direction == "backward":
            yield task("scale", elementwise("mul", size, size, direction), writes, ())

    def _collective(self, kind: str, size_bytes: int, dtype: str) -> Collective:
        """Over ep."""
        return Collective(
            kind=kind,  # type: ignore[arg-type]
            size_bytes=size_bytes,
            group_size=self.ep,
            group_stride=self.tp,
            dtype=dtype,  # type: ignore[arg-type]
        )

    def _dim_at(self, node: Node, tensors: list[Tensor]) -> str:
        """Return the dim of which a node works on a slice, or WHOLE; PARTIAL where it makes parts
        of a sum of what are parts of one."""
        dim = self._dim_of(tensors)
        if self.tp > 1 and self._is_part(node):
            return PARTIAL
        if dim != "seq":
            return dim
        is_constant = tensors[-1].role == "constant"
        gathered = node.phase == "backward" and (node.inputs[0], WHOLE) in self.version
        is_bias = tensors[-1].role == "gradient" and len(node.inputs) == 1 and gathered
        stays = node.whole or is_constant or is_bias or node.kind == "cross_entropy"
        return WHOLE if stays else dim

    def _is_part(self, node: Node) -> bool:
        """Whether the result is a part of a sum because what a node is linear in is one: all that
        an addition adds, a factor, rows that are moved, in backward the gradients that it reads.
        Each rank weighs the experts' balance with a share of its own."""
        backward = node.phase == "backward"
        if backward and (node.kind == "balance" or node.name in self.shared_biases):
            return True
        lies = {name: self.placement.get(name) for name in node.inputs}
        if node.kind == "mul":
            return PARTIAL in lies.values()
        if node.kind == "add":
            linear_in = list(lies)
        elif backward:
            linear_in = [name for name in lies if name.startswith("d.")] if node.whole else []
        elif node.kind == "gemm":
            linear_in = [name for name in node.inputs[2:] if name in self.placement]
        else:
            linear_in = [node.inputs[0]] if node.kind in ("move", "sum", "exchange") else []
        return {lies[name] for name in linear_in} == {PARTIAL}

    def _dim_of(self, tensors: list[Tensor]) -> str:
        if self.tp == 1:
            return WHOLE
        for dim in TP_DIMS:
            if any(dim in tensor.dims for tensor in tensors):
                return dim
        return "seq" if self.sequence_parallel else WHOLE

    def _local(self, dim: str) -> Mapping[str, int]:
        if dim in self.sizes:
            return {**self.sizes, dim: self.sizes[dim] // self.tp}
        return self.sizes

    def _define(self, tensor: Tensor, buffer: str, placement: str) -> None:
        local = num_elements(tensor, self._local(placement)) * BYTES[tensor.dtype]
        role = "gradient" if tensor.role == "gradient" else "activation"
        self.buffers[buffer] = Buffer(local, role)
        self.version[tensor.name, placement] = buffer
        self.placement[tensor.name] = placement

    def _whole_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of a whole tensor; a table of positions counts those of the sequence."""
        return num_bytes(tensor, {**self.sizes, "positions": self.sizes["seq"]})

    def _redistribute(self, node: Node, name: str, wanted: str) -> Iterator[Task]:
        if (name, wanted) in self.version:
            return
        tensor, have = self.graph.tensors[name], self.placement[name]
        if have == WHOLE:  # a slice of what is there already
            self.version[name, wanted] = self.version[name, WHOLE]
            return
        kind = (
            "all_gather"
            if have != PARTIAL
            else "all_reduce"
            if wanted == WHOLE
            else "reduce_scatter"
        )
        source = self.version[name, have]
        result = f"{name}@{wanted}"
        self._define(tensor, result, wanted)
        op = Collective(
            kind=kind,  # type: ignore[arg-type]
            size_bytes=self._whole_bytes(tensor),
            group_size=self.tp,
            dtype=tensor.dtype,  # type: ignore[arg-type]
        )
        yield Task(
            f"{node.name}.{kind}", op, "compute", node.part, node.phase, (source,), (result,)
        )
