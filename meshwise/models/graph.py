"""The operation graph of a model: named tensors with logical dims, nodes between them.

A graph is written once for the whole, unsharded problem. ``sizes`` gives every logical dim
(batch, seq, hidden, heads, head_dim, ffn, vocab, ...) its extent. Sharding divides extents, so
the operations of one rank follow from the same nodes: ``operation`` below builds the record that
is measured and priced. A matrix product is an einsum of named tensors. Dims that only the left
operand has are its rows m. Dims that only the right operand has are n. Dims that both have and the
result lacks are contracted: k. A convolution has images [batch, channels, height, width] and a
weight [out, in, kernel, kernel].
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple, get_args

from meshwise.spec import DTYPE_BYTES, Attention, Collective, Convolution, Elementwise, Gemm, Op
from meshwise.spec.op import ElementwiseKind

Device = Literal["cuda", "cpu"]
Phase = Literal["forward", "recompute", "backward", "optimizer"]


class Tensor(NamedTuple):
    """A tensor with named dims. ``role``: activation, parameter, gradient (of a parameter),
    index (integer input), constant (needs no gradient) or state (kept by training beside the
    parameters)."""

    name: str
    dims: tuple[str, ...]
    dtype: str
    role: str = "activation"


class Node(NamedTuple):
    """One operation. ``kind``: gemm, attention, convolution, an elementwise kind, or one that is
    priced as a copy (softmax, sort, move, relu). ``part``: embed, layer, head or optimizer.
    ``layer``: index of the layer. Three kinds launch no kernel: a ``view``, whose outputs share
    its input's memory; an ``exchange`` if no other rank holds experts; an ``average`` over one
    data rank. ``cheap``: selective recomputation recomputes it. ``room``: the part of the model
    that it belongs to when tp divides dims (convolutions, or a field of ``Cuts``). ``holds``:
    tensors read by another kernel of the same autograd node, freed only when this node ends.
    ``window``: an attention's window."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    part: str
    layer: int = 0
    phase: Phase = "forward"
    cheap: bool = False
    room: str = "stream"
    holds: tuple[str, ...] = ()
    window: int | None = None


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in dependency order: a tensor is written before it is read.

    Graphs compare and hash by identity, so that results derived from a graph can be cached.
    """

    sizes: Mapping[str, int]
    tensors: Mapping[str, Tensor]
    nodes: tuple[Node, ...]
    gradients: Mapping[str, str] = field(default_factory=dict)  # parameter -> its whole gradient

    @functools.cached_property
    def bases(self) -> Mapping[str, str]:
        """Return, for each view, the tensor whose memory it shares."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if node.kind in ("view", "exchange", "average"):
                base = found.get(node.inputs[0], node.inputs[0])
                found |= dict.fromkeys(node.outputs, base)
        return found

    def parameters(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors.values() if tensor.role == "parameter"]


BYTES = dict(DTYPE_BYTES, int64=8, int32=4, bool=1)
ELEMENTWISE = frozenset(get_args(ElementwiseKind))  # other kinds are priced as copies


def num_elements(tensor: Tensor, sizes: Mapping[str, int]) -> int:
    return prod([sizes[dim] for dim in tensor.dims])


FUSED = frozenset(
    {
        "heads", "kv_heads", "queries", "three", "head_dim", "qk", "kv", "value",
        "halves", "expert_ffn",
    }
)  # fmt: skip


def module_shape(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return a parameter's shape in the module. Neighbouring dims of ``FUSED`` (heads, q|k|v,
    head_dim ...) are one dim there."""
    runs = itertools.groupby(tensor.dims, key=lambda dim: "" if dim in FUSED else dim)
    return tuple(prod(sizes[dim] for dim in dims) for _, dims in runs)


def num_bytes(tensor: Tensor, sizes: Mapping[str, int]) -> int:
    return num_elements(tensor, sizes) * BYTES[tensor.dtype]


@functools.lru_cache(maxsize=65536)
def gemm(
    m: int, n: int, k: int, dtype: str, trans_a: bool, trans_b: bool, groups: int, batched: bool
) -> Gemm:
    return Gemm(
        m=m, n=n, k=k, dtype=dtype, trans_a=trans_a, trans_b=trans_b,  # type: ignore[arg-type]
        groups=groups, batched=batched, scaling="tensor" if dtype == "fp8" else "none",
    )  # fmt: skip


@functools.lru_cache(maxsize=65536)
def elementwise(kind: str, read_bytes: int, write_bytes: int, direction: str) -> Elementwise:
    return Elementwise(
        kind=kind,  # type: ignore[arg-type]
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        direction=direction,  # type: ignore[arg-type]
    )


attention = functools.lru_cache(maxsize=4096)(Attention)
message = functools.lru_cache(maxsize=65536)(Collective)
convolution = functools.lru_cache(maxsize=65536)(Convolution)


def operation(
    node: Node, inputs: list[Tensor], outputs: list[Tensor], sizes: Mapping[str, int]
) -> Op:
    """Return the operation record of a node whose logical dims have the given (local) extents."""
    if node.kind == "gemm":
        left, right, result = inputs[0], inputs[1], outputs[0]
        shared = set(left.dims) & set(right.dims)
        # one weight per expert; each expert multiplies some of the rows
        grouped = sum("experts" in each.dims for each in (left, right, result)) == 1
        apart = shared | {"experts"} if grouped else shared
        m = prod([sizes[dim] for dim in left.dims if dim not in apart])
        n = prod([sizes[dim] for dim in right.dims if dim not in apart])
        k = prod([sizes[dim] for dim in shared])
        groups = sizes["experts"] if grouped else 1
        batched = groups > 1 and "capacity" in sizes
        # x[m,k] w[n,k]: the weight is stored transposed; dw = dy^T x contracts the rows, dx = dy w
        # does not; casts to fp8 are stored as in forward
        forward = node.phase != "backward" or left.dtype == "fp8"
        wgrad = node.name.endswith(".wgrad")
        return gemm(m, n, k, left.dtype, wgrad and not forward, forward, groups, batched)
    if node.kind == "convolution":
        return _convolution(node, inputs, outputs[0], sizes)
    direction = "backward" if node.phase == "backward" else "forward"
    if node.kind == "move":  # a second kernel sets padding rows to zero
        pads = "room" in outputs[0].dims and "room" not in inputs[0].dims
        moved = num_bytes(outputs[0], sizes) * (2 if pads or "capacity" in sizes else 1)
        return elementwise("copy", moved, moved, direction)
    if node.kind == "attention":
        q, v = inputs[0], inputs[0 if "three" in inputs[0].dims else 2]
        kv_heads = sizes["kv_heads" if "kv_heads" in sizes else "heads"]
        seq, width, width_v = sizes["seq"], sizes[q.dims[-1]], sizes[v.dims[-1]]
        return attention(
            batch=sizes["batch"], q_len=seq, kv_len=seq, kv_heads=kv_heads,
            heads=kv_heads * sizes.get("queries", 1), head_dim=width,
            head_dim_v=None if width_v == width else width_v, window=node.window,
            direction=direction, dtype=q.dtype,
        )  # fmt: skip
    read = sum(num_bytes(tensor, sizes) for tensor in inputs)
    written = sum(num_bytes(tensor, sizes) for tensor in outputs)
    kind = node.kind if node.kind in ELEMENTWISE else "copy"
    return elementwise(kind, read, written, direction)


def _convolution(
    node: Node, inputs: list[Tensor], result: Tensor, sizes: Mapping[str, int]
) -> Convolution:
    left, right = inputs
    if node.phase != "backward":
        x, y, weight, product = left, result, right, "forward"
    elif node.name.endswith(".wgrad"):
        x, y, weight, product = right, left, result, "wgrad"
    else:
        x, y, weight, product = result, left, right, "dgrad"
    batch, channels, height, width = (sizes[dim] for dim in x.dims)
    return convolution(
        batch=batch, in_channels=channels, out_channels=sizes[y.dims[1]], height=height,
        width=width, kernel=sizes[weight.dims[2]], stride=-(-height // sizes[y.dims[2]]),
        product=product, dtype=x.dtype,
    )  # fmt: skip
