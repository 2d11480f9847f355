"""The only timing loop: how long does a piece of work take, and how certain is that?

In: callables that do the same work on rotated buffers. Out: ``Timed``, every iteration's time:
``times_s[i]`` is the largest over ranks (a synchronous job runs at its slowest rank's speed),
``rank_times_s[r][i]`` each rank's own. On a GPU a pair of events brackets each iteration, and the
host waits once per chunk. On a CPU ``perf_counter`` brackets each iteration.

Regimes: ``warm`` repeats ``calls[0]`` on the same buffers. ``cold`` rotates through ``calls`` and
before each call overwrites a buffer larger than the cache. ``graph`` replays a CUDA graph of
``batch`` calls of ``calls[0]``; ``pipelined`` makes as many calls in a row; in both, a time is one
call's share. ``blocking`` waits on the host after each call and uses the host's clock.
``sustained`` calls for seconds without a pause, times a tenth of a second at once, and records
clocks and power. In the warm regime a kernel shorter than its launch takes as long as its launch:
eager code pays the same. After each chunk of iterations all ranks gather all times, so that they
decide together when to stop: when the median's interval (``stats.median_interval``) is narrow
enough, or at a cap. The gather is also the barrier before the next chunk, whose first, untimed
iteration brings the ranks into step.
"""

import functools
import gc
import itertools
import math
import re
import time
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from meshwise import provenance
from meshwise.ranks import Ranks
from meshwise.spec import DeviceState, Regime
from meshwise.stats import median_interval

METHOD_VERSION = 1

_CHUNK = 10
_BUSY_S = 0.1  # after a chunk this long, the pause does not show in the power cap's average
REGIMES: tuple[Regime, ...] = typing.get_args(Regime)
IN_A_ROW = ("graph", "pipelined")  # an iteration is several calls
_CUDA_FLUSH_BYTES = 256 * 2**20
_CPU_FLUSH_BYTES = 64 * 2**20  # twice the last-level cache of usual hosts

T = TypeVar("T")


class Timed(NamedTuple):
    times_s: tuple[float, ...]
    rank_times_s: tuple[tuple[float, ...], ...]
    before: tuple[DeviceState, ...]
    after: tuple[DeviceState, ...]
    metrics: dict[str, float | tuple[float, ...]] = {}


class Stop(NamedTuple):
    """When to stop. ``relative_interval``: the width of the median's interval over the median."""

    max_iterations: int
    max_seconds: float
    relative_interval: float
    min_iterations: int = 1

    def next_chunk(self, times_s: Sequence[float], elapsed_s: float, first: int = 2) -> int:
        """Return how many iterations to time next: ``first`` at the start, 0 if they suffice."""
        done = len(times_s)
        if done == 0:
            return min(first, self.max_iterations)
        median, low, high = median_interval(times_s)
        # a call longer than the whole allowance is timed twice, any other at least five times
        least = min(2 if median > self.max_seconds else 5, self.max_iterations)
        if done < least:
            return least - done
        narrow = high - low <= self.relative_interval * median and done >= self.min_iterations
        if narrow or done >= self.max_iterations or elapsed_s >= self.max_seconds:
            return 0
        affordable = int((self.max_seconds - elapsed_s) / max(median, 1e-9))
        return max(1, min(_CHUNK, self.max_iterations - done, affordable))


def measure(
    calls: Sequence[Callable[[], object]],
    *,
    ranks: Ranks,
    regime: str,
    distributed: bool,
    max_iterations: int = 100,
    max_seconds: float = 1.0,
    relative_interval: float = 0.02,
    prepare: Callable[[], None] | None = None,
    settle_s: float = 0.0,
    batch: int = 1,
    min_iterations: int = 1,
    then: Callable[[Callable[[], object]], None] | None = None,
) -> Timed:
    """Time ``calls``, with ``prepare`` untimed before each. All ranks must call this together.

    ``distributed``: the calls communicate, so ranks must start each together. ``settle_s``: seconds
    of untimed calls first, since a device under its power cap slows down within half a second, to
    the clocks of a long job. ``batch``: calls in a graph, or in a row. ``min_iterations`` are timed
    even if the interval is narrow before. ``then`` is called with the timed function (the graph's
    replay, the calls in a row), to check that it did its work. A sustained measurement takes
    ``max_seconds``; its metrics are the ranks' lowest clock and highest power over time. If one
    rank runs out of memory, all raise ``torch.OutOfMemoryError``.
    """
    if regime not in REGIMES:
        raise ValueError(f"regime = {regime!r}: must be one of {', '.join(REGIMES)}")
    if regime == "graph" and ranks.device.type != "cuda":
        raise ValueError("regime = 'graph': needs a CUDA device; use warm or cold")
    assert calls and max_iterations >= 1
    if regime == "sustained":
        return _sustained(calls[0], ranks, max_seconds)
    stop = Stop(max_iterations, max_seconds, relative_interval, min_iterations)
    before = device_states(ranks)
    work = _agree(ranks, lambda: _timed(calls, ranks, regime, batch))
    together = batch if regime in IN_A_ROW else 1
    chunk = _agree(ranks, lambda: _chunk(work, ranks, regime, distributed, prepare, together))
    ranks.arrive("warm-up")
    times_s: list[float] = []
    rank_times_s: list[list[float]] = [[] for _ in range(ranks.world_size)]
    first = _settle(chunk, ranks, settle_s, max_iterations) if settle_s > 0 else 2
    started, elapsed_s = time.perf_counter(), 0.0
    while size := stop.next_chunk(times_s, elapsed_s, first):
        mine = _agree(ranks, functools.partial(chunk, size))
        replies = ranks.gather((mine, time.perf_counter() - started))
        elapsed_s = replies[0][1]  # rank 0's clock decides for all
        for own, (found, _) in zip(rank_times_s, replies, strict=True):
            own.extend(found)
        times_s = [max(iteration) for iteration in zip(*rank_times_s, strict=True)]
    after = device_states(ranks)
    if then is not None:
        then(work[0])
    return Timed(tuple(times_s), tuple(map(tuple, rank_times_s)), before, after)


def _settle(
    chunk: Callable[[int], list[float]], ranks: Ranks, settle_s: float, max_iterations: int
) -> int:
    """Run untimed for ``settle_s``. Return the chunk size that kept the device busy throughout."""
    size, elapsed_s, started = min(_CHUNK, max_iterations), 0.0, time.perf_counter()
    while elapsed_s < settle_s:
        _agree(ranks, functools.partial(chunk, size))
        before_s, elapsed_s = elapsed_s, ranks.gather(time.perf_counter() - started)[0]
        if elapsed_s - before_s < _BUSY_S:
            size = min(2 * size, max_iterations)
    return size


def randn(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> torch.Tensor:
    """Return normal values from a fixed seed. Zeros would draw less power and so run faster."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.float32 if dtype.itemsize == 1 else dtype  # fp8 cannot be drawn directly
    return torch.randn(*shape, dtype=drawn, device=device, generator=generator).to(dtype)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch, its libraries or Python says that memory ran out."""
    words = r"out of memory|can't allocate memory|not enough memory|ALLOC_FAILED"
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and re.search(words, str(error)) is not None
    )


def free(device: torch.device) -> None:
    """Return the memory of dropped tensors to the device. Call it when no error holds frames and
    their tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def clock(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return (mark, elapsed_s) for the time between marks. On a GPU, wait before ``elapsed_s``."""
    if device.type == "cuda":
        return _event, lambda start, end: float(start.elapsed_time(end)) / 1e3
    return time.perf_counter, lambda start, end: float(end - start)


def _agree(ranks: Ranks, work: Callable[[], T]) -> T:
    """Return this rank's result of ``work``. If one rank runs out of memory, all raise the error.

    This exchange also brings the ranks together before the next chunk.
    """

    def told(error: Exception) -> str | None:
        if not is_out_of_memory(error):
            return None
        return f"rank {ranks.rank}: {str(error).splitlines()[0]}"

    result, failures = ranks.together(work, told)
    if lacking := [text for text in failures if text]:
        raise torch.OutOfMemoryError("; ".join(lacking))
    return result


def _timed(
    calls: Sequence[Callable[[], object]], ranks: Ranks, regime: str, batch: int
) -> Sequence[Callable[[], object]]:
    """Return the functions that iterations call in turn."""
    if regime == "cold":
        return calls
    if regime == "graph":
        graph, _ = captured(functools.partial(_repeat, calls[0], batch), calls[0], times=3)
        return [graph.replay]
    if regime == "pipelined":
        return [functools.partial(_repeat, calls[0], batch)]
    if regime == "blocking":
        return [functools.partial(_wait_for, calls[0], ranks)]
    return calls[:1]


def _chunk(
    work: Sequence[Callable[[], object]],
    ranks: Ranks,
    regime: str,
    distributed: bool,
    prepare: Callable[[], None] | None,
    together: int,
) -> Callable[[int], list[float]]:
    """Return a function that runs one untimed and ``size`` timed iterations. One untimed iteration
    has run already. ``together``: calls in an iteration."""
    on_cuda = ranks.device.type == "cuda"
    flush = _cache_sized(ranks.device) if regime == "cold" else None
    # on a CPU the untimed part takes ranks different times; on a GPU it only fills the queue
    meet = distributed and not on_cuda and (flush is not None or prepare is not None)
    mark, elapsed_s = clock(torch.device("cpu") if regime == "blocking" else ranks.device)

    def run(size: int) -> list[float]:
        marks = []
        for i in range(size + 1):
            if prepare is not None:
                prepare()
            if flush is not None:
                flush.zero_()
            if meet:
                ranks.barrier("an iteration")
            start = mark()
            work[i % len(work)]()
            marks.append((start, mark()))
        ranks.synchronize("a chunk of timed iterations")
        return [elapsed_s(start, end) / together for start, end in marks[1:]]

    run(0)
    return functools.partial(_uncollected, run)


def _uncollected(run: Callable[[int], list[float]], size: int) -> list[float]:
    """Run without pauses of Python's garbage collector."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return run(size)
    finally:
        if enabled:
            gc.enable()


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def _wait_for(call: Callable[[], object], ranks: Ranks) -> None:
    call()
    ranks.synchronize("a call", poll_s=0.0)


def _sustained(call: Callable[[], object], ranks: Ranks, seconds: float) -> Timed:
    """Time chunks of calls in a row without a pause: the mean time of a call in each chunk."""
    mark, elapsed_s = clock(ranks.device)
    before = device_states(ranks)
    started = mark()
    _agree(ranks, lambda: _repeat(call, 3))
    marks = [mark()]
    ranks.synchronize("warm-up")
    once_s = max(ranks.gather(elapsed_s(started, marks[0]))) / 3
    size = max(1, round(_BUSY_S / once_s))
    states = []
    for chunk in range(max(2, math.ceil(seconds / (size * once_s)))):
        _repeat(call, size)
        marks.append(mark())
        states.append(provenance.device_state(ranks))  # while the device works
        if chunk:
            ranks.synchronize("sustained work", marks[-2])
    ranks.synchronize("sustained work")
    mine = [elapsed_s(a, b) / size for a, b in itertools.pairwise(marks)]
    per_rank = ranks.gather(mine)
    return Timed(
        times_s=tuple(max(chunk) for chunk in zip(*per_rank, strict=True)),
        rank_times_s=tuple(map(tuple, per_rank)),
        before=before,
        after=device_states(ranks),
        metrics=_extremes(ranks.gather(states)),
    )


def _extremes(states: list[Any]) -> dict[str, float | tuple[float, ...]]:
    """Return the lowest clock and the highest power of all ranks, over time, if known."""
    found: dict[str, float | tuple[float, ...]] = {}
    for name, choose in (("sm_clock_mhz", min), ("power_w", max)):
        values = [[state[name] for state in chunk] for chunk in zip(*states, strict=True)]
        if all(value is not None for chunk in values for value in chunk):
            found[name] = tuple(float(choose(chunk)) for chunk in values)
    return found


def captured(
    work: Callable[[], T], call: Callable[[], object], times: int
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return ``work`` as a CUDA graph, and the result that a replay fills. First run ``call``
    eagerly ``times`` times on a side stream, as capture requires."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _repeat(call, times)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # other threads (NCCL's watchdog) may call CUDA during capture
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work()
    return graph, result


def _cache_sized(device: torch.device) -> torch.Tensor:
    """Return a buffer; overwriting it evicts all operands from the last-level cache."""
    size_bytes = _CPU_FLUSH_BYTES
    if device.type == "cuda":
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        size_bytes = max(_CUDA_FLUSH_BYTES, 2 * cache_bytes)
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def device_states(ranks: Ranks) -> tuple[DeviceState, ...]:
    """Return every rank's device state, in rank order."""
    replies = ranks.gather(provenance.device_state(ranks))
    return tuple(msgspec.convert(reply, DeviceState) for reply in replies)
