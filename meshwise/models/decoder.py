"""What a model asks of one rank: its weights, matrix products, attention and messages.

In: a ``Decoder`` or a GPT (``Model``), the microbatch, the degree of tensor parallelism. Out: the
records that are measured. A weight W[n,k] multiplies m = microbatch_size * seq_len rows, 2mnk
FLOPs; tensor parallelism divides n of the first and k of the second product of a pair (Megatron,
arXiv:1909.08053), the latent projections of MLA and the router stay whole. Experts are one grouped
product over all m * top_k rows.
"""

from collections import Counter
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwise.models import families
from meshwise.models.graph import Graph, Node, module_shape, operation
from meshwise.models.placement import DIMS
from meshwise.spec import (
    DTYPE_BYTES,
    Attention,
    Collective,
    Decoder,
    Gemm,
    LanguageModel,
    LayerKind,
    layer_kinds,
)
from meshwise.spec.op import Direction, Dtype

# No gradient reaches it (training nudges it from the load of the experts), so it is state beside
# the parameters to FSDP2 and a buffer to transformers; published counts include it.
ROUTER_BIAS = "router.bias"


class Weight(NamedTuple):
    """``unit``: of FSDP2, ``layers.3`` or ``root``."""

    name: str
    shape: tuple[int, ...]
    unit: str

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class Product(NamedTuple):
    """A forward product of one rank; ``count``: how many such in one pass through the model.
    ``part``: layer or head."""

    name: str
    part: str
    gemm: Gemm
    count: int  # type: ignore[assignment]  # not tuple's method


class Exchange(NamedTuple):
    name: str
    collective: Collective


def weights(model: LanguageModel) -> list[Weight]:
    """Every weight in module order, a tied one once. Experts are stacked, [experts, n, k]."""
    graph, kinds = _one_of_each(model)
    units: dict[str, list[tuple[str, tuple[int, ...]]]] = {kind: [] for kind in kinds}
    found, layers = [], ((index, kind) for index, kind in enumerate(layer_kinds(model)))
    for tensor in graph.tensors.values():
        if tensor.role in ("parameter", "state"):
            parts, shape = tensor.name.split(".", 2), module_shape(tensor, graph.sizes)
            if parts[0] == "layers":
                units[kinds[int(parts[1])]].append((parts[2], shape))
            else:
                found.append(Weight(tensor.name, shape, "root"))
    stacked = [
        Weight(f"layers.{index}.{name}", shape, f"layers.{index}")
        for index, kind in layers
        for name, shape in units[kind]
    ]
    before = sum(weight.name.startswith(("embed.", "positions.")) for weight in found)
    return [*found[:before], *stacked, *found[before:]]


def num_parameters(model: LanguageModel) -> int:
    """As published: the routers' score biases included."""
    return sum(weight.num_elements for weight in weights(model))


def _one_of_each(model: LanguageModel) -> tuple[Graph, tuple[LayerKind, ...]]:
    """The graph of one layer of each kind that the model has, for one token; and these kinds."""
    kinds = tuple(sorted(set(layer_kinds(model))))
    return families.forward(model, 1, 1, "fp32", layers=kinds), kinds


def _divided(graph: Graph, tp: int) -> dict[str, int]:
    """The sizes on one tp rank, without room between the rows of experts."""
    divided = {dim for dims in DIMS.values() for dim in dims}
    local = {dim: n // tp if dim in divided else n for dim, n in graph.sizes.items()}
    return local | {"room": graph.sizes["top_k"]} if "top_k" in local else local


def products(
    model: LanguageModel,
    microbatch_size: int,
    seq_len: int,
    *,
    tp: int = 1,
    dtype: Dtype = "bf16",
) -> list[Product]:
    """The forward products of one rank, those of equal name and shape once with their count.

    What reads one input and is divided alike is one product. fp8 is scaled by tensor. A size that
    tp does not divide is a ValueError that names it.
    """
    _check(model, tp=tp, microbatch_size=microbatch_size, seq_len=seq_len)
    graph, kinds = _one_of_each(model)
    local, layers = _divided(graph, tp), Counter(layer_kinds(model))
    scaling: Any = "tensor" if dtype == "fp8" else "none"
    by_layer: dict[tuple[int, str], Gemm] = {}
    for node in graph.nodes:
        tensors = [graph.tensors[name] for name in (*node.inputs, *node.outputs)]
        if node.kind == "gemm" and tensors[0].role == "activation":
            op = operation(node, tensors[:-1], tensors[-1:], local)
            assert isinstance(op, Gemm)
            place = (node.layer if node.part == "layer" else -1, _called(node, graph))
            beside = by_layer[place].n if place in by_layer else 0
            by_layer[place] = replace(op, n=op.n + beside)
    found: dict[str, Product] = {}
    for (layer, name), op in by_layer.items():
        rows = op.m * microbatch_size * seq_len
        gemm = replace(op, m=rows, dtype=dtype, scaling=scaling)
        count = layers[kinds[layer]] if layer >= 0 else 1
        before = found[name].count if name in found else 0
        found[name] = Product(name, "layer" if layer >= 0 else "head", gemm, before + count)
    return list(found.values())


def _called(node: Node, graph: Graph) -> str:
    """A product's name; q, k and v have one, and so have gate and up."""
    own = ".".join(node.name.split(".")[2:]) or "vocab"
    if own in ("q", "k", "v") and "layers.0.k.weight" in graph.tensors:
        return "qkv"
    *outer, last = own.split(".")
    at = node.name.removesuffix(last)
    gated = last in ("gate", "up") and f"{at}gate.weight" in graph.tensors
    return "_".join([*outer, "gate_up" if gated else last])


def passes(forward: Gemm) -> tuple[Gemm, Gemm, Gemm]:
    """Forward y = x W^T, weight gradient dW = dy^T x, input gradient dx = dy W: (m,n,k), (n,k,m),
    (m,k,n), in Primus' order. A grouped weight gradient divides its k, the rows, by group."""
    m, n, k = forward.m, forward.n, forward.k
    wgrad = replace(forward, m=n, n=k, k=m, trans_a=True, trans_b=False)
    return forward, wgrad, replace(forward, m=m, n=k, k=n, trans_b=False)


def attention(
    model: LanguageModel,
    microbatch_size: int,
    seq_len: int,
    *,
    tp: int = 1,
    dtype: Dtype = "bf16",
    direction: Direction = "forward",
) -> Attention:
    """The causal attention of one layer on one rank, over all tokens. MLA trains with as many k and
    v as q heads, k wider than v."""
    _check(model, tp=tp, microbatch_size=microbatch_size, seq_len=seq_len)
    graph, _ = _one_of_each(model)
    node = next(node for node in graph.nodes if node.kind == "attention")
    op = operation(node, [graph.tensors[name] for name in node.inputs], [], _divided(graph, tp))
    assert isinstance(op, Attention)
    size: dict[str, Any] = {"batch": microbatch_size, "q_len": seq_len, "kv_len": seq_len}
    return replace(op, **size, direction=direction, dtype=dtype)


def attentions(
    model: LanguageModel, microbatch_size: int, seq_len: int, *, dtype: Dtype = "bf16"
) -> list[Attention]:
    """What differs of the layers' attention: those with a window see fewer keys."""
    whole = attention(model, microbatch_size, seq_len, dtype=dtype)
    windows = model.windows(seq_len) if isinstance(model, Decoder) else [None]
    return [replace(whole, window=window) for window in windows]


def exchanges(
    model: LanguageModel,
    microbatch_size: int,
    seq_len: int,
    *,
    tp: int,
    ep: int = 1,
    dtype: Dtype = "bf16",
) -> list[Exchange]:
    """The messages of one microbatch, each kind once: of tensor parallelism (with sequence
    parallelism a gather and a scatter in place of the all-reduce), to the next pipeline stage, and
    to the experts. A degree of 1 and, in a model without experts, ep send nothing."""
    _check(model, tp=tp, microbatch_size=microbatch_size, seq_len=seq_len, ep=ep)
    if seq_len % tp:
        raise ValueError(f"seq_len = {seq_len}: must be divisible by tp = {tp}")
    size, tokens = DTYPE_BYTES[dtype], microbatch_size * seq_len

    def exchange(axis: str, kind: Any, rows: int, ranks: int) -> Exchange:
        size_bytes = rows * model.hidden * size
        collective = Collective(kind=kind, size_bytes=size_bytes, group_size=ranks, dtype=dtype)
        return Exchange(f"{axis}.{kind}", collective)

    found = []
    if tp > 1:
        found.append(exchange("tp", "all_reduce", tokens, tp))
        found.append(exchange("sp", "all_gather", tokens, tp))
        found.append(exchange("sp", "reduce_scatter", tokens, tp))
    found.append(exchange("pp", "send_recv", tokens, 2))
    moe = model.experts
    if moe and ep > 1:
        rows = -(-tokens * moe.top_k // ep) * ep
        found.append(exchange("ep", "all_to_all", rows, ep))
    return found


def _check(model: LanguageModel, *, tp: int, ep: int = 1, **sizes: int) -> None:
    """Name the first size that is not positive or that a degree does not divide."""
    for name, value in {"tp": tp, "ep": ep, **sizes}.items():
        if value < 1:
            raise ValueError(f"{name} = {value}: must be >= 1")
    moe = model.experts
    divided: list[tuple[Any, str, str, int]] = [(model, "heads", "tp", tp)]
    if isinstance(model, Decoder) and model.mla is None:
        divided.append((model, "kv_heads", "tp", tp))
    if not all(map(model.has_experts, range(model.layers))):
        divided.append((model, "ffn", "tp", tp))
    if moe:
        divided += [(moe, "ffn", "tp", tp), (moe, "shared_ffn", "tp", tp)]
        divided.append((moe, "num_experts", "ep", ep))
    for record, field, axis, degree in [*divided, (model, "vocab", "tp", tp)]:
        if getattr(record, field) % degree:
            record.fail(field, f"must be divisible by {axis} = {degree}")
