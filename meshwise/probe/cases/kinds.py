"""Element-wise work by its kind, as models' eager graphs have it. No torch.

A kind is timed as its largest work that one kernel does on whole tensors: a norm, an activation,
the sum or the product of two equal tensors, a cast, the softmax of the loss, a lookup. The smaller
sizes have fewer rows of the same width, down to the least work of the kind; tables shrink with
their tokens. Other forms of a kind, as the sum over rows that is a bias's gradient, are priced by
its curve as well. Other kinds are priced as copies.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwise.models.graph import Graph, Node, Tensor, operation
from meshwise.prices.key import ONE_KERNEL
from meshwise.spec import Elementwise

SIZES = 4
FALL = 1 / 64  # the share of the least size, or less
ALONE = (
    "add", "mul", "cast", "gelu", "silu", "layer_norm", "rms_norm", "cross_entropy", "embedding",
)  # fmt: skip


class Kernel(NamedTuple):
    """A node that can run alone, with the dims of its rows and of their width."""

    graph: Graph
    node: Node
    rows: tuple[str, ...]
    width: tuple[str, ...]
    dtype: str

    def op(self, share: float) -> Elementwise:
        """Return the operation of a ``share`` of the rows, at least of one."""
        sizes = dict(self.graph.sizes)
        rows = max(1, round(share * prod(sizes[dim] for dim in self.rows)))
        sizes |= {**dict.fromkeys(self.rows, 1), self.rows[0]: rows}
        if self.node.kind == "embedding":
            sizes["vocab"] = max(1, round(share * sizes["vocab"]))
        op = operation(self.node, *tensors(self.graph, self.node), sizes)
        about: dict[str, Any] = {"direction": "forward"} if self.node.kind in ONE_KERNEL else {}
        width = prod(sizes[dim] for dim in self.width)
        return replace(op, rows=rows, width=width, dtype=self.dtype, **about)  # type: ignore


def by_kind(graphs: Iterable[Graph]) -> Iterator[Elementwise]:
    """Yield the operations of each kind, forward and backward: the largest first, then the least,
    since between them a curve holds."""
    largest: dict[tuple[str, str], tuple[int, Kernel]] = {}
    least: dict[tuple[str, str], int] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.kind not in ALONE:
                continue
            op = operation(node, *tensors(graph, node), graph.sizes)
            assert isinstance(op, Elementwise)
            key = op.kind, "" if op.kind in ONE_KERNEL else op.direction
            least[key] = min(op.bytes, least.get(key, op.bytes))
            if (kernel := _kernel(graph, node)) and op.bytes > largest.get(key, (0,))[0]:
                largest[key] = op.bytes, kernel
    for of, (most, kernel) in largest.items():
        fall = min(least[of] / most, FALL)
        shares = [fall ** (nth / (SIZES - 1)) for nth in (0, SIZES - 1, *range(1, SIZES - 1))]
        yield from dict.fromkeys(map(kernel.op, shares))


def tensors(graph: Graph, node: Node) -> tuple[list[Tensor], list[Tensor]]:
    return [graph.tensors[x] for x in node.inputs], [graph.tensors[y] for y in node.outputs]


def _kernel(graph: Graph, node: Node) -> Kernel | None:
    """Return the kernel of a node; None if its kernel is not that of its kind on whole tensors."""
    inputs, (result, *_) = tensors(graph, node)
    if node.kind == "embedding":
        (tokens,) = (each for each in inputs if each.role == "index")
        return Kernel(graph, node, tokens.dims, result.dims[-1:], result.dtype)
    first, width = inputs[0], result.dims[-1:]
    if node.kind.endswith("_norm"):
        width = next(each.dims for each in inputs if each.role == "parameter")
        inputs = [first]
    operands = 2 if node.kind in ("add", "mul") else 1
    if any(each.dims != result.dims for each in inputs) or len(inputs) < operands:
        return None
    rows = result.dims[: -len(width)]
    return Kernel(graph, node, rows, width, first.dtype) if rows else None
