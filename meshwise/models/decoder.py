"""Read weights, matrix products, attention and messages of a model off its graph.

In: a model and the microbatch. Out: the operation records that are measured, and the messages that
one rank sends. A weight W[n,k] multiplies m = microbatch_size * seq_len rows: 2mnk FLOPs. Experts
are one grouped product over all m * top_k rows.
"""

import dataclasses
from collections import Counter
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwise.models import families, placement
from meshwise.models.families.experts import room
from meshwise.models.graph import Graph, Node, module_shape, operation
from meshwise.models.shard import shard
from meshwise.spec import (
    DTYPE_BYTES,
    AnyModel,
    Attention,
    Collective,
    Decoder,
    Gemm,
    LanguageModel,
    LayerKind,
    Layout,
    Workload,
    layer_kinds,
)
from meshwise.spec.op import Direction, Dtype

# It gets no gradient: training adjusts it by the load of the experts. FSDP2 sees it as state beside
# the parameters, transformers as a buffer. Published parameter counts include it.
ROUTER_BIAS = "router.bias"
BEGIN = ("embed.", "positions.", "stem")  # prefixes of weights before the layers
_AXES = ("tp", "sp", "pp", "ep")


class Weight(NamedTuple):
    """A parameter or a state. ``unit``: its FSDP2 unit, such as ``layers.3`` or ``root``."""

    name: str
    shape: tuple[int, ...]
    unit: str

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class Product(NamedTuple):
    """A forward product of one rank. ``count``: how often it runs in one forward pass. ``part``:
    layer or head."""

    name: str
    part: str
    gemm: Gemm
    count: int  # type: ignore[assignment]  # not tuple's method


class Exchange(NamedTuple):
    name: str
    collective: Collective


def weights(model: AnyModel) -> list[Weight]:
    """Return every weight in module order; a tied weight comes once. Experts are stacked:
    [experts, n, k]."""
    graph, kinds = _one_of_each(model)
    units: dict[LayerKind, list[tuple[str, tuple[int, ...]]]] = {kind: [] for kind in kinds}
    found, layers = [], ((index, kind) for index, kind in enumerate(layer_kinds(model, 1)))
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
    before = sum(weight.name.startswith(BEGIN) for weight in found)
    return [*found[:before], *stacked, *found[before:]]


def stage_weights(model: AnyModel, layers: range) -> list[Weight]:
    """Return the weights of a pipeline stage with these layers. The first stage also has the
    weights before all layers, the last stage those after them."""

    def is_in(weight: Weight) -> bool:
        if weight.unit != "root":
            return int(weight.unit.removeprefix("layers.")) in layers
        at_start = weight.name.startswith(BEGIN)
        return layers.start == 0 if at_start else layers.stop == model.layers

    return list(filter(is_in, weights(model)))


def published_parameters(model: LanguageModel) -> int:
    """Count parameters as they are published: the routers' score biases included."""
    return sum(weight.num_elements for weight in weights(model))


def stream_shape(model: AnyModel, rows: int, seq_len: int, layer: int) -> tuple[int, ...]:
    """Return the shape of the input of layer ``layer``, or of the last layer's output if it equals
    the number of layers, for ``rows`` sequences or images."""
    graph = _alone(model, min(layer, model.layers - 1))
    name = "stage.in" if layer < model.layers else graph.nodes[-1].outputs[0]
    sizes = {**graph.sizes, "batch": rows, "seq": seq_len}
    return tuple(sizes[dim] for dim in graph.tensors[name].dims)


@lru_cache(maxsize=256)
def _alone(model: AnyModel, layer: int) -> Graph:
    kinds = layer_kinds(model, 1, range(layer, layer + 1))
    return families.forward(model, 1, 1, "fp32", layers=kinds, first=False, last=False)


@lru_cache(maxsize=256)
def _one_of_each(model: AnyModel, *, between: bool = False) -> tuple[Graph, tuple[LayerKind, ...]]:
    """Return a graph with one layer of each kind in the model, for one token, and these kinds. The
    graph has embedding and head, unless it lies ``between`` other stages."""
    kinds, ends = tuple(sorted(set(layer_kinds(model, 1)))), not between
    return families.forward(model, 1, 1, "fp32", layers=kinds, first=ends, last=ends), kinds


def _sizes(graph: Graph, batch: int, seq: int) -> dict[str, int]:
    """Return the extents of a graph's dims for this batch and sequence length."""
    sizes = {**graph.sizes, "batch": batch, "seq": seq}
    return {**sizes, "room": room(sizes)} if "experts" in sizes else sizes


def _tokens(microbatch_size: int, seq_len: int) -> int:
    """Count a microbatch's tokens. A size below 1 raises a ValueError that names it."""
    for name, value in {"microbatch_size": microbatch_size, "seq_len": seq_len}.items():
        if value < 1:
            raise ValueError(f"{name} = {value}: must be >= 1")
    return microbatch_size * seq_len


def products(
    model: LanguageModel, microbatch_size: int, seq_len: int, *, dtype: Dtype = "bf16"
) -> list[Product]:
    """Return the forward products of one device. Products of equal name and shape come once, with
    a count. Weights fused on one input (qkv, gate_up) are one product. fp8 is scaled per tensor."""
    tokens, (graph, kinds) = _tokens(microbatch_size, seq_len), _one_of_each(model)
    layers, sizes = Counter(layer_kinds(model, 1)), _sizes(graph, microbatch_size, seq_len)
    if "top_k" in sizes and "capacity" not in sizes:
        sizes["room"] = tokens * sizes["top_k"]  # no padding between experts
    scaling: Any = "tensor" if dtype == "fp8" else "none"
    by_layer: dict[tuple[int, str], Gemm] = {}
    for node in graph.nodes:
        tensors = [graph.tensors[name] for name in (*node.inputs, *node.outputs)]
        if node.kind == "gemm" and tensors[0].role == "activation":
            op = operation(node, tensors[:-1], tensors[-1:], sizes)
            assert isinstance(op, Gemm)
            place = (node.layer if node.part == "layer" else -1, _called(node, graph))
            beside = by_layer[place].n if place in by_layer else 0
            by_layer[place] = replace(op, n=op.n + beside)
    found: dict[str, Product] = {}
    for (layer, name), op in by_layer.items():
        gemm = replace(op, dtype=dtype, scaling=scaling)
        count = layers[kinds[layer]] if layer >= 0 else 1
        before = found[name].count if name in found else 0
        found[name] = Product(name, "layer" if layer >= 0 else "head", gemm, before + count)
    return list(found.values())


def _called(node: Node, graph: Graph) -> str:
    """Name a product. q, k and v share one name; gate and up share one."""
    own = ".".join(node.name.split(".")[2:]) or "vocab"
    if own in ("q", "k", "v") and "layers.0.k.weight" in graph.tensors:
        return "qkv"
    *outer, last = own.split(".")
    at = node.name.removesuffix(last)
    gated = last in ("gate", "up") and f"{at}gate.weight" in graph.tensors
    return "_".join([*outer, "gate_up" if gated else last])


def passes(forward: Gemm) -> tuple[Gemm, Gemm, Gemm]:
    """Return the products of a forward y = x W^T, in Primus' order: forward (m,n,k), weight
    gradient dW = dy^T x (n,k,m), input gradient dx = dy W (m,k,n). In a grouped weight gradient
    the groups divide k, the rows."""
    m, n, k = forward.m, forward.n, forward.k
    wgrad = replace(forward, m=n, n=k, k=m, trans_a=True, trans_b=False)
    return forward, wgrad, replace(forward, m=m, n=k, k=n, trans_b=False)


def attention(
    model: LanguageModel,
    microbatch_size: int,
    seq_len: int,
    *,
    dtype: Dtype = "bf16",
    direction: Direction = "forward",
) -> Attention:
    """Return the causal attention of one layer on one device. MLA trains with as many k and v
    heads as q heads; its k is wider than its v."""
    _tokens(microbatch_size, seq_len)
    graph, _ = _one_of_each(model)
    node = next(node for node in graph.nodes if node.kind == "attention")
    op = operation(node, [graph.tensors[name] for name in node.inputs], [], graph.sizes)
    assert isinstance(op, Attention)
    size: dict[str, Any] = {"batch": microbatch_size, "q_len": seq_len, "kv_len": seq_len}
    return replace(op, **size, direction=direction, dtype=dtype)


def attentions(
    model: LanguageModel, microbatch_size: int, seq_len: int, *, dtype: Dtype = "bf16"
) -> list[Attention]:
    """Return the distinct attentions of the layers: one for each window."""
    whole = attention(model, microbatch_size, seq_len, dtype=dtype)
    windows = dict.fromkeys(kind.window for kind in layer_kinds(model, seq_len))
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
    """Return the largest message of each kind in one microbatch: of tensor parallelism (with
    sequence parallelism an all-gather and a reduce-scatter replace the all-reduce), to the next
    pipeline stage, and to the experts. A degree of 1 sends no messages, and ep sends none in a
    model without experts."""
    listed = model  # messages are known even for models that no module computes
    if isinstance(model, Decoder):
        listed = replace(model, not_computed="", more_weights=())
    ep, _ = ep if model.experts else 1, _tokens(microbatch_size, seq_len)
    plain = Layout(tp=tp, dp=ep, ep=ep, microbatch_size=microbatch_size)
    workload = Workload(global_batch_size=plain.microbatch_rows, seq_len=seq_len)
    graph, _ = _one_of_each(model, between=True)
    graph = dataclasses.replace(graph, sizes=_sizes(graph, microbatch_size, seq_len))
    elements = {"pp.send_recv": (prod(stream_shape(model, microbatch_size, seq_len, 0)), 2)}
    for axis in ("tp", "sp") if tp > 1 else ("tp",):
        layout = replace(plain, sequence_parallel=axis == "sp")
        placement.check(listed, workload, layout)
        for _, tasks in shard(graph, tp, layout.placed, ep).tasks:
            for task in tasks:
                if isinstance(op := task.op, Collective) and task.writes:  # no counts of rows
                    name = f"{'ep' if op.kind == 'all_to_all' else axis}.{op.kind}"
                    size = op.size_bytes // DTYPE_BYTES[op.dtype]
                    elements[name] = max(elements.get(name, (0, 0)), (size, op.group_size))
    found = []
    for name in sorted(elements, key=lambda name: (_AXES.index(name[:2]), name)):
        kind: Any = name[3:]
        each, ranks = elements[name]
        row = graph.sizes["hidden"] * (ranks if kind == "all_to_all" else 1)  # whole rows per rank
        size_bytes = -(-each // row) * row * DTYPE_BYTES[dtype]
        op = Collective(kind=kind, size_bytes=size_bytes, group_size=ranks, dtype=dtype)
        found.append(Exchange(name, op))
    return found
