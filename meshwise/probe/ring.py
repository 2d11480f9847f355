"""Measures ring attention on all ranks: a case after the other, every finished one on disk.

In: a ``RingRequest`` as JSON. Out: one ``Sample`` a case in the run directory, written by rank 0.
The world is cut into rings of ``case.world_size`` consecutive ranks, and all rings work at once,
each on a batch of its own; an iteration takes as long as its slowest rank in any ring. ``times_s``
are of forward and backward, or of the forward alone if the operation says so.

Metrics, a number a rank where the name says bytes: ``sent_bytes``, ``received_bytes`` and
``collectives`` of one iteration, ``peak_bytes`` and ``reserved_bytes`` of the device while it was
timed; ``forward_rank_times_s``, rank 0's iterations, then rank 1's, and so on; ``muted_times_s``,
the same computation with local stand-ins for transfers; ``transfer_times_s``, the transfers of one
iteration back to back and nothing else; ``world_size``; and what the request knows already.

A case that lacks memory or is refused leaves a sample, and the others follow (``loop``). If only
some ranks of a ring failed, transfers may be under way that nobody ends, so the job ends too, after
the case is on disk.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

from meshwise import files, timing
from meshwise.attention.dense import ring_attention
from meshwise.attention.dilated import dilated_attention
from meshwise.attention.shards import Shards
from meshwise.attention.wire import Wire
from meshwise.prices import Prices
from meshwise.probe.cases.ring import shards_of
from meshwise.probe.loop import Failed, Metrics, Outcome, measure_all, outcome, together
from meshwise.probe.work import Call, torch_dtype
from meshwise.ranks import Ranks
from meshwise.spec import Case, Costs, LongAttention, Record
from meshwise.spec.record import NonNegative, Positive

T = TypeVar("T")
KERNEL = "MESHWISE_ATTENTION"
_FOREVER_S = 1e9  # the number of iterations decides
_UNTIMED = 3  # the first call, and two of the timing loop


class RingRequest(Record, kw_only=True):
    """``known``: of each case, the metrics known before it runs, and its strategy. ``trace``: where
    ranks leave a Chrome trace of the first case, as PATH_rank0.json."""

    cases: tuple[Case, ...]
    known: tuple[tuple[dict[str, tuple[float, ...]], str], ...]
    run_dir: str
    warmup: NonNegative = 3
    iterations: Positive = 10
    costs: Costs | None = None
    trace: str = ""


class RankRing(NamedTuple):
    """This rank's ring. The wire's rank is the place in it."""

    wire: Wire
    shards: Shards
    ranks: Ranks

    @property
    def alone(self) -> bool:
        return self.wire.size == 1


class Rings:
    """The groups of ranks, made once for each size; all ranks must ask for the same in turn."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.groups: dict[int, Any] = {}

    def ring(self, op: LongAttention, size: int) -> RankRing:
        if size not in self.groups:
            self.groups[size] = self._group(size)
        return RankRing(Wire(self.groups[size]), shards_of(op, size), self.ranks)

    def _group(self, size: int) -> Any:
        if self.ranks.control is None:
            return None
        timeout, found = timedelta(seconds=self.ranks.timeout_s), None
        for first in range(0, self.ranks.world_size, size):
            members = list(range(first, first + size))
            made = dist.new_group(members, backend=self.ranks.backend, timeout=timeout)
            found = made if self.ranks.rank in members else found
        return found


def agreed(ring: RankRing, work: Callable[[], T]) -> T:
    """This rank's result of ``work``; what fails on one rank raises Failed on all."""
    return together(ring.ranks, work, transfers=not ring.alone)


def attention(op: LongAttention, ring: RankRing, prices: Prices | None, **more: Any) -> Any:
    """The function of this rank's q, k, v."""
    more |= {"wire": ring.wire, "causal": op.causal, "shards": ring.shards, "prices": prices}
    if op.dilation is None:
        way = "auto" if ring.alone else op.way  # alone there is nothing to exchange, in any way
        return functools.partial(ring_attention, way=way, window=op.window, **more)
    return functools.partial(dilated_attention, dilation=op.dilation, way=op.way, **more)


def measure_ranks(ranks: Ranks, request: bytes) -> None:
    """Every rank calls this with the same request."""
    asked = msgspec.json.decode(request, type=RingRequest)
    bench = _Bench(ranks, asked)
    measure = functools.partial(_measure, bench)
    measure_all(ranks, asked.run_dir, asked.cases, measure, estimate_s=_flops)


def _flops(case: Case) -> float:
    """The work of a case, by which the rest of a run is estimated from what was measured."""
    assert isinstance(case.op, LongAttention)
    return case.op.flops


class _Bench:
    """Holds what cases share."""

    def __init__(self, ranks: Ranks, asked: RingRequest) -> None:
        self.ranks, self.asked, self.trace = ranks, asked, asked.trace
        self.rings = Rings(ranks)
        self.prices = None if asked.costs is None else Prices(asked.costs)
        ids = [case.id for case in asked.cases]
        self.known = dict(zip(ids, asked.known, strict=True))


def _measure(bench: _Bench, case: Case) -> Outcome:
    figures, strategy = bench.known[case.id]
    known: Metrics = {**figures, "world_size": float(bench.ranks.world_size)}

    def times() -> tuple[timing.Timed, Metrics, str]:
        return *_times(bench, case), strategy

    with kernel(case.backend):
        found = outcome(case, times, known)
    timing.free(bench.ranks.device)
    return found


@contextlib.contextmanager
def kernel(name: str) -> Iterator[None]:
    """Attention by this kernel, or by the fastest one unless the user's environment names it."""
    before = os.environ.get(KERNEL)
    if name:
        os.environ[KERNEL] = name
    try:
        yield
    finally:
        if name:
            os.environ.pop(KERNEL)
            os.environ.update({} if before is None else {KERNEL: before})


def _times(bench: _Bench, case: Case) -> tuple[timing.Timed, Metrics]:
    op = case.op
    assert isinstance(op, LongAttention)
    ring = bench.rings.ring(op, case.world_size)
    timed, metrics, log = _computed(bench, case, op, ring)
    if log and (transfers := _transfers(bench, case, ring, log)) is not None:
        metrics["transfer_times_s"] = transfers
    return timed, metrics


def _computed(
    bench: _Bench, case: Case, op: LongAttention, ring: RankRing
) -> tuple[timing.Timed, Metrics, list[tuple[list[int], list[int]]]]:
    """The times with and without transfers, and what was transferred in one iteration."""
    ranks, wire = bench.ranks, ring.wire
    ahead, step = agreed(ring, lambda: _calls(op, ring, bench.prices))
    log: list[tuple[list[int], list[int]]] = []
    metrics = agreed(ring, lambda: _counted(step, ring, log))
    for _ in range(bench.asked.warmup - _UNTIMED):
        step()
    forward = _timed(bench, case, ahead)
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)
    timed = _timed(bench, case, step) if op.direction == "backward" else forward
    metrics |= {"forward_rank_times_s": sum(forward.rank_times_s, ())} | _peak(ranks)
    if log:
        wire.muted = True
        try:
            metrics["muted_times_s"] = _timed(bench, case, step).times_s
        finally:
            wire.muted = False
    if bench.trace:
        _trace(step, ranks, bench.trace)
        bench.trace = ""
    return timed, metrics, log


def _calls(op: LongAttention, ring: RankRing, prices: Prices | None) -> tuple[Call, Call]:
    """The forward, and what an iteration does; inputs from fixed seeds, other ones on each rank."""
    device, dtype = ring.ranks.device, torch_dtype(op.dtype)
    length, seed = ring.shards.lengths[ring.wire.rank], 4 * ring.ranks.rank
    rows = {"q": op.heads, "k": op.kv_heads, "v": op.kv_heads, "grad": op.heads}
    *inputs, grad = (
        timing.randn((op.batch, length, heads, op.head_dim), dtype, device, seed + at)
        for at, heads in enumerate(rows.values())
    )
    forward = functools.partial(attention(op, ring, prices), *inputs)
    if op.direction == "forward":
        return forward, forward
    for tensor in inputs:
        tensor.requires_grad_()
    return forward, lambda: torch.autograd.grad(forward(), inputs, grad)


def _counted(step: Call, ring: RankRing, log: list[tuple[list[int], list[int]]]) -> Metrics:
    """One iteration, the first: connects, finds out whether memory suffices, counts."""
    wire = ring.wire
    wire.log = log
    before = wire.sent_bytes, wire.received_bytes, wire.collectives
    step()
    ring.ranks.synchronize("the first call")
    wire.log = None
    counts = (wire.sent_bytes, wire.received_bytes, wire.collectives)
    mine = [float(after - then) for after, then in zip(counts, before, strict=True)]
    each = zip(*ring.ranks.gather(mine), strict=True)
    return dict(zip(("sent_bytes", "received_bytes", "collectives"), map(tuple, each), strict=True))


def _timed(bench: _Bench, case: Case, call: Call) -> timing.Timed:
    count = bench.asked.iterations
    return timing.measure(
        [call], ranks=bench.ranks, regime=case.regime, distributed=case.world_size > 1,
        max_iterations=count, min_iterations=count, max_seconds=_FOREVER_S,
    )  # fmt: skip


def _peak(ranks: Ranks) -> Metrics:
    """Return the peak memory; a CPU has no count of it."""
    if ranks.device.type != "cuda":
        return {}
    mine = torch.cuda.max_memory_allocated(ranks.device), torch.cuda.max_memory_reserved()
    peaks, reserved = zip(*ranks.gather(mine), strict=True)
    return {
        "peak_bytes": tuple(map(float, peaks)), "reserved_bytes": tuple(map(float, reserved)),
    }  # fmt: skip


def _transfers(
    bench: _Bench, case: Case, ring: RankRing, log: list[tuple[list[int], list[int]]]
) -> tuple[float, ...] | None:
    """Times of one iteration's transfers, from empty memory; None where that lacks memory."""
    wire = Wire(ring.wire.group)
    try:
        most = max(sum(send) for send, _ in log)
        bytes_ = agreed(
            ring, lambda: torch.empty(most, dtype=torch.uint8, device=ring.ranks.device)
        )

        def replay() -> None:
            for send, receive in log:
                wire.exchange(bytes_[: sum(send)], send, receive)()

        return _timed(bench, case, replay).times_s
    except (Failed, torch.OutOfMemoryError):
        return None


def _trace(call: Call, ranks: Ranks, path: str) -> None:
    """One iteration as a Chrome trace of this rank."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if ranks.device.type == "cuda" else []
    with profile(activities=kinds) as profiler:
        call()
        ranks.synchronize("a traced call")
    with files.replacing(f"{path}_rank{ranks.rank}.json") as file:
        profiler.export_chrome_trace(file.name)
