"""FLOPs and parameters of a case as Alpa's benchmark counts them (benchmark/alpa/util.py).

B batch, S sequence, L layers, H hidden, V vocabulary, E experts, G tokens of a dispatch group,
m = 8 (feed-forward to hidden in MoE). FLOPs of one iteration:

- GPT: f B S H^2 L (1 + S/6H) + 6 B S H V; f = 24 forward, 72 with backward, 96 if recomputed.
- MoE: g L/2 (dense + moe) + 6 B S H V; g = 1 forward, 3 with backward, 4 if recomputed;
  dense = B S H^2 (8 + 4m) + 4 B S^2 H;
  moe = 8 B S H^2 + 4 B S^2 H + 8m B S H^2 + 2 B S H E + 4 B S G + 8 B S H G.
- Wide-ResNet: its convolutions and head, times three, or times four if recomputed.

We differ from the source in two points. A forward pass of MoE has g = 1 (there 3). Rates are per
GPU of all hosts (there GPT's inference is divided by the GPUs of one host). As in the source, the
head counts 6 B S H V even in a forward pass.
"""

from typing import NamedTuple

from meshwise.models import counts as of_graph
from meshwise.spec import WideResNet
from meshwise.suites import layouts
from meshwise.suites.case import BenchmarkCase, GPTModelConfig, MoEModelConfig

_MOE_FFN = 8  # feed-forward to hidden


class Counts(NamedTuple):
    """FLOPs of an iteration of a case, and the parameters of its model."""

    flops: float
    parameters: int


def counts(case: BenchmarkCase, kind: str, images: WideResNet | None = None) -> Counts:
    """Count FLOPs and parameters of a case, in a suite of this ``kind`` (``suites.kind``).
    ``images``: the Wide-ResNet that runs, if it is not the case's."""
    config, batch = case.model_config, case.batch_size
    inference = kind.endswith("_inference")
    remat = case.parallel_args.use_remat and not inference
    if isinstance(config, GPTModelConfig):
        seq, hidden, layers, _, vocab = config
        vocab = 0 if kind == "gpt_no_embedding_inference" else vocab  # only the layers
        factor = 24 if inference else 96 if remat else 72
        flops = gpt_flops(batch, seq, layers, hidden, vocab, factor)
        return Counts(flops, gpt_parameters(layers, hidden, vocab))
    if isinstance(config, MoEModelConfig):
        seq, hidden, layers, _, vocab, experts, _ = config
        group = layouts.group_size(case)
        factor = 1 if inference else 4 if remat else 3
        flops = moe_flops(batch, seq, layers, hidden, vocab, experts, group, factor)
        return Counts(flops, moe_parameters(layers, hidden, vocab, experts))
    model = images or layouts.model(case)
    assert isinstance(model, WideResNet)
    flops = (4 if remat else 3) * of_graph.forward_flops(model, batch)
    return Counts(flops, of_graph.num_parameters(model))


def gpt_flops(batch: int, seq: int, layers: int, hidden: int, vocab: int, factor: int) -> float:
    """Count FLOPs. ``factor``: 24 forward, 72 with backward, 96 with everything recomputed."""
    inner = factor * batch * seq * hidden**2 * layers * (1 + seq / (6 * hidden))
    return inner + 6 * batch * seq * hidden * vocab


def gpt_parameters(layers: int, hidden: int, vocab: int) -> int:
    """Count L (12 H^2 + 11 H) + V (H + 1): without positions and last norm, qkv bias as H."""
    return layers * (12 * hidden**2 + 11 * hidden) + vocab * (hidden + 1)


def moe_flops(
    batch: int,
    seq: int,
    layers: int,
    hidden: int,
    vocab: int,
    experts: int,
    group: int,
    factor: int,
) -> float:
    """Count FLOPs. ``group``: tokens dispatched together. ``factor``: 1 forward, 3 with backward, 4
    with everything recomputed."""
    tokens = batch * seq
    attention = 8 * tokens * hidden**2 + 4 * tokens * seq * hidden
    dense = attention + 4 * _MOE_FFN * tokens * hidden**2
    chosen = 8 * _MOE_FFN * tokens * hidden**2  # two experts a token
    dispatch = 2 * tokens * hidden * experts + 4 * tokens * group + 8 * tokens * hidden * group
    moe = attention + chosen + dispatch
    return factor * layers / 2 * (dense + moe) + 6 * tokens * hidden * vocab


def moe_parameters(layers: int, hidden: int, vocab: int, experts: int) -> int:
    """Count parameters. Half of the layers have one feed-forward, half have ``experts``. There is
    no router, the qkv bias counts H, and embedding and head count V (H + 1)."""
    attention = 4 * hidden**2 + 6 * hidden
    ffn = 2 * _MOE_FFN * hidden**2 + (_MOE_FFN + 1) * hidden
    return layers * attention + layers * (1 + experts) * ffn // 2 + vocab * (hidden + 1)


def tflops(flops: float, time_s: float, num_devices: int) -> float:
    """Return TFLOP/s per device, over all devices of the run."""
    return flops / time_s / num_devices / 1e12
