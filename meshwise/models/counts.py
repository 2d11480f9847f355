"""Count parameters, FLOPs by convention and activations saved for backward. No device is needed."""

from collections import Counter
from functools import cache, lru_cache
from typing import Literal

from meshwise.models import decoder, families
from meshwise.models.backward import training_step
from meshwise.models.decoder import ROUTER_BIAS, weights
from meshwise.models.eager_cpu import on_cpu
from meshwise.models.graph import Device, Graph, num_bytes, operation
from meshwise.spec import (
    AnyModel,
    LanguageModel,
    LayerKind,
    Model,
    Shaped,
    WideResNet,
    Workload,
    layer_kinds,
)
from meshwise.spec.layout import Recompute

Convention = Literal["torchtitan", "megatron", "alpa"]


def num_parameters(model: AnyModel) -> int:
    """Count the parameters of the module in ``nn/``, a tied weight once."""
    return sum(
        weight.num_elements for weight in weights(model) if not weight.name.endswith(ROUTER_BIAS)
    )


def step_flops(model: AnyModel, workload: Workload, convention: Convention = "torchtitan") -> float:
    """Return the FLOPs of one training step (forward and backward), as each project counts them.

    torchtitan: tokens * (6 (N - lookups) + 12 L h s). Attention is not halved. s is the window if a
    layer has a shorter one. Only the experts that a token uses count. A tied head is a product, so
    N includes it; tables of embeddings and positions are lookups. megatron: the same with causal
    attention halved. alpa: 72 B s h^2 L (1 + s/6h) + 6 B s h V (Alpa's util.py; no biases, no
    norms, a feed-forward of 4h). Images: three times the forward products under any convention;
    this includes the gradient of the images, which is never needed.
    """
    if isinstance(model, WideResNet):
        return 3.0 * forward_flops(model, workload.global_batch_size)
    h, s = model.hidden, workload.seq_len
    if convention == "alpa":
        b = workload.global_batch_size
        return 72 * b * s * h**2 * model.layers * (1 + s / (6 * h)) + 6 * b * s * h * model.vocab
    windows = Counter(kind.window for kind in layer_kinds(model, s))
    share = 0.5 if convention == "megatron" else 1
    keys = sum(n * (share * s if w is None else min(share * s, w)) for w, n in windows.items())
    return workload.tokens * (6 * active_parameters(model) + 6 * keys * attention_width(model))


def forward_flops(model: WideResNet, images: int) -> int:
    """Count the FLOPs of convolutions and head; a multiply-add counts as two."""
    return images * _products(families.forward(model, 1, 1, "fp32"))


@cache
def layer_flops(model: AnyModel, seq_len: int, kind: LayerKind) -> int:
    """Count the FLOPs of a layer's products and attention, forward, of one sequence or image."""
    one = families.forward(model, 1, seq_len, "fp32", layers=(kind,), first=False, last=False)
    return _products(one)


def _products(graph: Graph) -> int:
    flops = 0
    for node in graph.nodes:
        read, written = ([graph.tensors[x] for x in of] for of in (node.inputs, node.outputs))
        op = operation(node, read, written, graph.sizes)
        flops += op.flops if isinstance(op, Shaped) else 0
    return flops


def attention_width(model: LanguageModel) -> int:
    """Return the elements of a token's keys and values over all query heads: 2h for most models."""
    op = decoder.attention(model, 1, 1)
    return op.heads * (op.head_dim + op.value_dim)


def active_parameters(model: LanguageModel) -> int:
    """Count the parameters that one token is multiplied with: only its own experts, no lookups."""
    total, sizes = 0, families.forward(model, 1, 1, "fp32", layers=()).sizes
    for weight in decoder.weights(model):
        if weight.name == "positions.weight" or weight.name.endswith(ROUTER_BIAS):
            continue
        if weight.name == "embed.weight" and not (isinstance(model, Model) or model.tied):
            continue
        used = weight.num_elements
        if ".experts." in weight.name:
            used = used * sizes["top_k"] // sizes["choices"]
        total += used
    return total


@lru_cache(maxsize=1024)
def saved_activation_bytes(
    model: AnyModel,
    batch: int,
    seq: int,
    dtype: str,
    recompute: tuple[Recompute, ...] = (),
    device: Device = "cuda",
) -> dict[str, int]:
    """Return the bytes, by part, that the forward pass saves for backward and recomputation in
    eager mode on one ``device``. ``recompute``: one word per layer."""
    forward = families.forward(model, batch, seq, dtype)
    graph = training_step(on_cpu(forward) if device == "cpu" else forward, recompute)
    part_of = {
        out: node.part for node in graph.nodes if node.phase == "forward" for out in node.outputs
    }
    later = [node for node in graph.nodes if node.phase in ("recompute", "backward")]
    read = {graph.bases.get(name, name) for node in later for name in node.inputs}
    saved: dict[str, int] = {}
    for name in sorted(read & part_of.keys()):
        part = part_of[name]
        saved[part] = saved.get(part, 0) + num_bytes(graph.tensors[name], graph.sizes)
    return saved
