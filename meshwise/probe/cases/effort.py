"""Estimate how long a case is measured, and how long that takes in all. No torch.

A case takes its set-up, then as many iterations as its time allows. The rates are those of a slow
device of each kind; the sweep corrects the estimates by measured durations.
"""

from meshwise.models import block_ops
from meshwise.spec import (
    Attention,
    Block,
    Case,
    Cluster,
    Collective,
    LongAttention,
    Op,
    Overlap,
    Resharding,
    Step,
)

_RATES = {  # FLOP/s, memory bytes/s, wire bytes/s, launch, collective latency
    "cuda": (2e14, 2e12, 1e11, 2e-5, 5e-5),
    "cpu": (2e10, 4e9, 4e8, 3e-5, 5e-4),
}
_ON_CPUS = ("", "flash", "math", "flex", "gloo")  # back ends
COMPILE_S = 20.0
SETUP_S = 0.05
ITERATIONS = (6, 100)  # the fewest that give a confidence interval, and the timing loop's cap
SUSTAIN_S = 10.0
FOREVER_S = 1e9
_IN_A_ROW = 20  # about as many calls are timed as one


def max_seconds(case: Case, sustain_s: float = SUSTAIN_S) -> float:
    """Return the most seconds of timed iterations. Blocks get more: they correct whole plans."""
    if case.regime == "sustained":
        return sustain_s
    return 1.0 if isinstance(case.op, Block) else 0.4


def settle_s(case: Case, device_kind: str) -> float:
    """Return untimed seconds before a case, so that GPU blocks run at the clocks of a long job."""
    return 0.5 if isinstance(case.op, Block) and device_kind == "cuda" else 0.0


def min_iterations(case: Case) -> int:
    """Return the fewest iterations: single calls of a collective vary a lot and need more."""
    calls = isinstance(case.op, Collective) and case.regime in ("warm", "blocking")
    return 20 if calls else 1


def estimate_s(
    case: Case,
    cluster: Cluster,
    sustain_s: float = SUSTAIN_S,
    iterations: int | None = None,
    warmup: int = 0,
) -> float:
    """Return the rough seconds to measure ``case``, with set-up and compilation. ``iterations``:
    exactly so many instead of as many as its time allows; after ``warmup`` calls."""
    op = case.op
    assert not isinstance(op, Step | Resharding | LongAttention), "not for sweeps"
    on_gpu = case.regime == "graph" or case.backend not in _ON_CPUS
    if cluster.device.kind == "cpu" and on_gpu:
        return SETUP_S  # such a case is skipped
    parts: tuple[Op, ...] = (op,)
    if isinstance(op, Block):
        parts = block_ops(op)
    elif isinstance(op, Overlap):  # each alone, then each beside the other
        parts = 2 * (op.compute, op.collective)
    once = sum(_once_s(part, cluster) for part in parts)
    if isinstance(op, Block | Attention) and op.direction == "backward":
        once *= 1.5  # each iteration does an untimed forward first
    fewest, most = ITERATIONS
    longest = max_seconds(case, sustain_s) * (4 if isinstance(op, Overlap) else 1)
    timed = min(max(longest, fewest * once), most * once)
    compiling = case.lowering == "compiled" and isinstance(op, Block) and op.direction == "forward"
    if iterations is not None:
        timed = iterations * once * (_IN_A_ROW if case.regime in ("graph", "pipelined") else 1)
    timed = longest if case.regime == "sustained" else timed + warmup * once
    timed += settle_s(case, cluster.device.kind)
    return SETUP_S + 3 * once + timed + (COMPILE_S if compiling else 0.0)


def _once_s(op: Op, cluster: Cluster) -> float:
    assert not isinstance(op, Block | Overlap)
    flops, memory, wire, launch, latency = _RATES[cluster.device.kind]
    if isinstance(op, Collective):
        return latency + op.bytes / wire
    return launch + op.flops / flops + op.bytes / memory
