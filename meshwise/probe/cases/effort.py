"""Estimate how long a case is measured, and how long that takes in all. No torch.

A case takes its set-up, then as many iterations as its time allows. The rates are those of a slow
device of each kind; the sweep corrects the estimates by measured durations.
"""

from collections.abc import Callable, Collection, Sequence

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
COMPILE_S = 4.0  # stored profiles of H200: 0.5 to 4.4 s a block, one 8 s
SETUP_S = 0.05
ITERATIONS = (6, 100)  # the fewest that give a confidence interval, and the timing loop's cap
SUSTAIN_S = 10.0
FOREVER_S = 1e9
_BATCH = ((64 * 2**20, 20), (2**30, 10))  # (largest size, calls in a graph)
_LARGE_BATCH = 4
LARGE = 0.2  # of the time left: a case that takes more waits
AHEAD = 24  # cases that may go before one that waits
_ALIKE = ("kind", "part", "direction", "product", "group_size", "tp")


def max_seconds(case: Case, sustain_s: float = SUSTAIN_S) -> float:
    """Return the most seconds of timed iterations. Blocks get more: they correct whole plans."""
    if case.regime == "sustained":
        return sustain_s
    return 1.0 if isinstance(case.op, Block) else 0.4


def settle_s(case: Case, device_kind: str) -> float:
    """Return untimed seconds before a case, so that GPU blocks run at the clocks of a long job."""
    return 0.5 if isinstance(case.op, Block) and device_kind == "cuda" else 0.0


def min_iterations(case: Case) -> int:
    """Return the fewest iterations: single calls of a collective vary a lot and need more, large
    ones fewer."""
    if not isinstance(case.op, Collective) or case.regime not in ("warm", "blocking"):
        return 1
    return 20 if case.op.bytes <= 2**24 else 8


def batch(op: Op) -> int:
    """Return how many calls are timed as one, in regimes that do so: of collectives, fewer for
    large messages."""
    if not isinstance(op, Collective):
        return 1
    return next((calls for limit, calls in _BATCH if op.size_bytes <= limit), _LARGE_BATCH)


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
    if isinstance(op, Overlap):  # each alone, then each beside the other
        parts = 2 * (op.compute, op.collective)
    once = sum(_once_s(part, cluster) for part in parts)
    if isinstance(op, Block | Attention) and op.direction == "backward":
        once *= 1.5  # each iteration does an untimed forward first
    fewest, most = ITERATIONS
    longest = max_seconds(case, sustain_s) * (4 if isinstance(op, Overlap) else 1)
    fewest = max(fewest, min_iterations(case))
    timed = min(max(longest, fewest * once), most * once)
    first = isinstance(op, Block) and (op.direction == "forward" or op.recompute != "none")
    compiling = case.lowering == "compiled" and first
    if iterations is not None:
        timed = iterations * once * (batch(op) if case.regime in ("graph", "pipelined") else 1)
    timed = longest if case.regime == "sustained" else timed + warmup * once
    timed += settle_s(case, cluster.device.kind)
    return SETUP_S + 3 * once + timed + (COMPILE_S if compiling else 0.0)


def _once_s(op: Op, cluster: Cluster) -> float:
    assert not isinstance(op, Overlap)
    if isinstance(op, Block):
        return sum(_once_s(part, cluster) for part in block_ops(op))
    flops, memory, wire, launch, latency = _RATES[cluster.device.kind]
    if isinstance(op, Collective):
        return latency + op.bytes / wire
    return launch + op.flops / flops + op.bytes / memory


def category(case: Case) -> tuple[object, ...]:
    """Return what cases share if a price of one is a first price of the others."""
    op = case.op
    order = (getattr(op, "trans_a", None), getattr(op, "trans_b", None))
    fields = (getattr(op, field, None) for field in _ALIKE)
    return (type(op).__name__, *fields, *order, case.lowering, case.regime, case.backend)


def next_of(
    todo: Sequence[Case],
    seconds: Callable[[Case], float],
    left_s: float,
    seen: Collection[tuple[object, ...]],
) -> int | None:
    """Return the index of the case to measure next: the first one that fits in ``left_s`` seconds.
    One that takes over a fifth of them waits behind smaller ones of categories not ``seen``, if
    they come soon. Return None if none fits."""
    large = None
    for index, case in enumerate(todo):
        if large is not None and index > large + AHEAD:
            break
        about_s = seconds(case)
        if about_s <= LARGE * left_s and (large is None or category(case) not in seen):
            return index
        if about_s <= left_s and large is None:
            large = index
    return large
