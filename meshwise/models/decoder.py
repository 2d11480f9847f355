"""What a model asks of one rank: its weights, matrix products, attention and messages.

In: a ``Decoder`` or a GPT (``Model``), the microbatch, the degree of tensor parallelism. Out: the
records that are measured. A weight W[n,k] multiplies m = microbatch_size * seq_len rows, 2mnk
FLOPs; tensor parallelism divides n of the first and k of the second product of a pair (Megatron,
arXiv:1909.08053), the latent projections of MLA and the router stay whole. Experts are one grouped
product over all m * top_k rows.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwise.models import families
from meshwise.models.graph import Graph, module_shape, operation
from meshwise.models.shard import TP_DIMS
from meshwise.spec import (
    DTYPE_BYTES,
    Attention,
    Collective,
    Decoder,
    Experts,
    Gemm,
    LanguageModel,
    Model,
)  # fmt: skip
from meshwise.spec.op import Direction, Dtype

NamedShape = tuple[str, tuple[int, ...]]
Shapes = Iterator[NamedShape]

# No gradient reaches it (training nudges it from the load of the experts), so it is state beside
# the parameters to FSDP2 and a buffer to transformers; published counts include it.
ROUTER_BIAS = "router.bias"
FEED_FORWARD = ("gate", "up", "down")


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
    graph, one = _one_layer(model), "layers.0."
    every = [(tensor.name, module_shape(tensor, graph.sizes)) for tensor in graph.parameters()]
    layer = [(name.removeprefix(one), shape) for name, shape in every if name.startswith(one)]
    found = []
    for name, shape in every:
        if not name.startswith(one):
            found.append(Weight(name, shape, "root"))
        elif name == f"{one}{layer[0][0]}":  # all layers in the place of the one
            for index in range(model.layers):
                unit = f"layers.{index}"
                held = _layer(model, index, layer)
                found += [Weight(f"{unit}.{part}", of, unit) for part, of in held]
    return found


def num_parameters(model: LanguageModel) -> int:
    """As published: the routers' score biases included."""
    return sum(weight.num_elements for weight in weights(model))


def _one_layer(model: LanguageModel) -> Graph:
    """The model without experts, for one token, also of one that is only listed."""
    one = replace(model, experts=None, layers=1)
    if isinstance(one, Decoder):
        one = replace(one, more_weights=(), not_computed="")
    return families.forward(one, 1, 1, "fp32")


def _divided(graph: Graph, tp: int) -> dict[str, int]:
    """The sizes on one tp rank."""
    return {dim: n // tp if dim in TP_DIMS else n for dim, n in graph.sizes.items()}


def _layer(model: LanguageModel, index: int, dense: list[NamedShape]) -> Shapes:
    """The weights of a layer: experts in the place of its feed-forward."""
    moe = model.experts if model.has_experts(index) else None
    experts = _experts(model, moe) if moe else None
    for name, shape in dense:
        if experts is None or name.split(".")[0] not in FEED_FORWARD:
            yield name, shape
        else:
            yield from experts  # all of them the first time, and then none
    if isinstance(model, Decoder):
        yield from ((name, (size,)) for name, size in model.more_weights)


def _linear(name: str, n: int, k: int, bias: bool, stacked: tuple[int, ...] = ()) -> Shapes:
    yield f"{name}.weight", (*stacked, n, k)
    if bias:
        yield f"{name}.bias", (*stacked, n)


def _feed_forward(model: Decoder, width: int, prefix: str = "") -> Shapes:
    if model.gated:
        yield from _linear(f"{prefix}gate", width, model.hidden, model.mlp_bias)
    yield from _linear(f"{prefix}up", width, model.hidden, model.mlp_bias)
    yield from _linear(f"{prefix}down", model.hidden, width, model.mlp_bias)


def _first_product(model: LanguageModel, width: int) -> tuple[str, int]:
    """Name and rows of what a feed-forward of this width multiplies its input by."""
    gated = isinstance(model, Decoder) and model.gated
    return ("gate_up", 2 * width) if gated else ("up", width)


def _stacked(moe: Experts, hidden: int, *, gated: bool, bias: bool) -> Shapes:
    yield from _linear("router", moe.num_experts, hidden, False)
    if moe.router_bias:
        yield ROUTER_BIAS, (moe.num_experts,)
    stacked = (moe.num_experts,)
    first, width = ("gate_up", 2 * moe.ffn) if gated else ("up", moe.ffn)
    yield from _linear(f"experts.{first}", width, hidden, bias, stacked)
    yield from _linear("experts.down", hidden, moe.ffn, bias, stacked)


def _experts(model: LanguageModel, moe: Experts) -> Shapes:
    if isinstance(model, Model):
        yield from _stacked(moe, model.hidden, gated=False, bias=True)
        return
    yield from _stacked(moe, model.hidden, gated=model.gated, bias=model.mlp_bias)
    if moe.shared_ffn:
        yield from _feed_forward(model, moe.shared_ffn, "shared.")
    if moe.shared_gate:
        yield from _linear("shared_gate", 1, model.hidden, False)


def products(
    model: LanguageModel,
    microbatch_size: int,
    seq_len: int,
    *,
    tp: int = 1,
    dtype: Dtype = "bf16",
) -> list[Product]:
    """The forward products of one rank, those of equal name and shape once with their count.

    fp8 is scaled by tensor. A size that tp does not divide is a ValueError that names it.
    """
    _check(model, tp=tp, microbatch_size=microbatch_size, seq_len=seq_len)
    rows = microbatch_size * seq_len
    found = []
    for name, n, k, count, groups, copies in _products(model, tp):
        part = "head" if name == "vocab" else "layer"
        scaling: Any = "tensor" if dtype == "fp8" else "none"
        gemm = Gemm(m=rows * copies, n=n, k=k, dtype=dtype, groups=groups, scaling=scaling)
        found.append(Product(name, part, gemm, count))
    return found


class _Shape(NamedTuple):
    """W[n,k], in ``layers`` layers; ``copies`` of each token go to ``groups`` experts."""

    name: str
    n: int
    k: int
    layers: int
    groups: int = 1
    copies: int = 1


def _products(model: LanguageModel, tp: int) -> Iterator[_Shape]:
    layers = sum(map(model.has_experts, range(model.layers)))
    for name, (n, k) in _dense_products(model, tp).items():
        if name == "vocab":
            yield from _expert_products(model, layers, tp)
            yield _Shape(name, n, k, 1)
        elif count := model.layers - layers * (name in ("gate_up", "up", "down")):
            yield _Shape(name, n, k, count)


def _dense_products(model: LanguageModel, tp: int) -> dict[str, tuple[int, int]]:
    """n and k of a layer's products and the head's, by name, read off the graph of the model
    without experts. What reads one input and is divided alike is one product."""
    graph = _one_layer(model)
    local = _divided(graph, tp)
    names = {"head": "vocab", "gate": "gate_up"}
    if "layers.0.k.weight" in graph.tensors:
        names |= dict.fromkeys("qkv", "qkv")
    if "layers.0.gate.weight" in graph.tensors:
        names["up"] = "gate_up"
    found: dict[str, tuple[int, int]] = {}
    for node in graph.nodes:
        if node.kind == "gemm":
            n, k = module_shape(graph.tensors[node.inputs[1]], local)
            own = node.name.rpartition(".")[2]
            name = names.get(own, own)
            found[name] = found.get(name, (0, k))[0] + n, k
    return found


def _expert_products(model: LanguageModel, layers: int, tp: int) -> Iterator[_Shape]:
    h, moe = model.hidden, model.experts
    if not moe or not layers:
        return
    yield _Shape("router", moe.num_experts, h, layers)
    spread = (layers, moe.num_experts, moe.top_k)
    first, width = _first_product(model, moe.ffn)
    yield _Shape(f"experts_{first}", width // tp, h, *spread)
    yield _Shape("experts_down", h, moe.ffn // tp, *spread)
    if moe.shared_ffn:
        first, width = _first_product(model, moe.shared_ffn)
        yield _Shape(f"shared_{first}", width // tp, h, layers)
        yield _Shape("shared_down", h, moe.shared_ffn // tp, layers)
    if moe.shared_gate:
        yield _Shape("shared_gate", 1, h, layers)


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
    graph = _one_layer(model)
    (node,) = [node for node in graph.nodes if node.kind == "attention"]
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
