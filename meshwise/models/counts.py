"""Counts that need no device: parameters, FLOPs by convention, activations saved for backward."""

from typing import Literal

from meshwise.models import gpt
from meshwise.models.backward import training_step
from meshwise.models.graph import num_bytes, num_elements
from meshwise.spec import Model, Workload
from meshwise.spec.layout import Recompute

Convention = Literal["torchtitan", "megatron", "alpa"]


def num_parameters(model: Model) -> int:
    """Exact count of the module in ``nn/``, a tied weight once."""
    graph = gpt.forward(model, 1, 1, "fp32")
    return sum(num_elements(tensor, graph.sizes) for tensor in graph.parameters())


def step_flops(model: Model, workload: Workload, convention: Convention = "torchtitan") -> float:
    """FLOPs of one training step (forward and backward), as each project counts them.

    torchtitan: tokens * (6 (N - lookups) + 12 L h s), attention not halved; the tied head is a
    product and stays in N, the position table is a lookup and leaves it.
    megatron: the same with causal attention halved. alpa: 72 B s h^2 L (1 + s/6h) + 6 B s h V
    (Alpa's util.py; no biases, no norms; a feed-forward of 4h assumed).
    """
    h, s, layers = model.hidden, workload.seq_len, model.layers
    if convention == "alpa":
        b = workload.global_batch_size
        return 72 * b * s * h**2 * layers * (1 + s / (6 * h)) + 6 * b * s * h * model.vocab
    products = num_parameters(model) - model.max_seq_len * h
    attention = 12 * layers * h * s * (0.5 if convention == "megatron" else 1)
    return workload.tokens * (6 * products + attention)


def saved_activation_bytes(
    model: Model, batch: int, seq: int, dtype: str, recompute: tuple[Recompute, ...] = ()
) -> dict[str, int]:
    """Bytes that backward, and what it recomputes (one word a layer), read of the forward pass,
    by part, on one device in eager mode."""
    graph = training_step(gpt.forward(model, batch, seq, dtype), recompute)
    part_of = {
        out: node.part for node in graph.nodes if node.phase == "forward" for out in node.outputs
    }
    later = [node for node in graph.nodes if node.phase in ("recompute", "backward")]
    read = {name for node in later for name in node.inputs}
    saved: dict[str, int] = {}
    for name in sorted(read & part_of.keys()):
        part = part_of[name]
        saved[part] = saved.get(part, 0) + num_bytes(graph.tensors[name], graph.sizes)
    return saved
