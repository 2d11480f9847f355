"""Measure ring attention on all ranks, one case after another, each saved when it is finished.

In: a ``RingRequest`` as JSON. Out: one ``Sample`` for each case in the run directory, written by
rank 0. The world is cut into rings of ``case.world_size`` consecutive ranks. All rings work at
once, each on its own batch; an iteration takes as long as the slowest rank of any ring. ``times_s``
are of forward and backward, or only of forward if the operation says so.

Metrics (bytes and ``collectives`` for each rank): ``sent_bytes``, ``received_bytes`` and
``collectives`` of one iteration; ``peak_bytes`` and ``reserved_bytes`` of the device during timing;
``forward_rank_times_s``, rank 0's iterations, then rank 1's, and so on; ``muted_times_s``, the same
computation with local stand-ins for transfers; ``transfer_times_s``, only the transfers of one
iteration, back to back; ``world_size``; and the figures that the request knows before.

A case that lacks memory or is refused leaves a sample, and the next cases run (``loop``). If only
some ranks of a ring fail, the others may wait in transfers that never end. So the job ends too,
after the case is on disk.
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
_FOREVER_S = 1e9  # only the number of iterations ends the timing
_UNTIMED = 3  # the first call, and two of the timing loop


class RingRequest(Record, kw_only=True):
    """Cases to measure. ``known``: each case's metrics known before it runs, and its strategy.
    ``trace``: the PATH of Chrome traces of the first case, as PATH_rank0.json."""

    cases: tuple[Case, ...]
    known: tuple[tuple[dict[str, tuple[float, ...]], str], ...]
    run_dir: str
    warmup: NonNegative = 3
    iterations: Positive = 10
    costs: Costs | None = None
    trace: str = ""


class RankRing(NamedTuple):
    """This rank's ring. ``wire.rank`` is its place in the ring."""

    wire: Wire
    shards: Shards
    ranks: Ranks

    @property
    def alone(self) -> bool:
        return self.wire.size == 1


class Rings:
    """The groups of ranks, made once for each size. All ranks must ask for sizes in one order."""

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
    """Return this rank's result of ``work``. A failure on one rank raises Failed on all."""
    return together(ring.ranks, work, transfers=not ring.alone)


def attention(op: LongAttention, ring: RankRing, prices: Prices | None, **more: Any) -> Any:
    """Return the attention function of this rank's q, k, v."""
    more |= {"wire": ring.wire, "causal": op.causal, "shards": ring.shards, "prices": prices}
    if op.dilation is None:
        way = "auto" if ring.alone else op.way  # alone there is nothing to exchange
        return functools.partial(ring_attention, way=way, window=op.window, **more)
    return functools.partial(dilated_attention, dilation=op.dilation, way=op.way, **more)


def measure_ranks(ranks: Ranks, request: bytes) -> None:
    """Measure the request. Every rank must call this with the same one."""
    asked = msgspec.json.decode(request, type=RingRequest)
    bench = _Bench(ranks, asked)
    measure = functools.partial(_measure, bench)
    measure_all(ranks, asked.run_dir, asked.cases, measure, estimate_s=_flops)


def _flops(case: Case) -> float:
    """Return a case's FLOPs, by which progress estimates the time of the remaining cases."""
    assert isinstance(case.op, LongAttention)
    return case.op.flops


class _Bench:
    """Holds the state that all cases share."""

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
    """Use this attention kernel. Without a name: the user's environment's, else the fastest."""
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
    """Return times, metrics (with times without transfers), and one iteration's transfers."""
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
    """Return the forward and the whole iteration. Each rank's inputs have their own fixed seeds."""
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
    """Run the first iteration: it connects, shows whether memory suffices, and counts bytes."""
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
    """Return the peak memory, or nothing on a CPU."""
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
    """Time one iteration's transfers, from uninitialised memory; None if memory is too small."""
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
    """Write a Chrome trace of one iteration on this rank."""
    from meshwise.tracing import profiled

    with profiled(ranks.device.type) as profiler:
        call()
        ranks.synchronize("a traced call")
    with files.replacing(f"{path}_rank{ranks.rank}.json") as file:
        profiler.export_chrome_trace(file.name)
