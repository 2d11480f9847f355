"""Compute and a collective at once: how much slower is each than alone?

In: an ``Overlap`` case. Out: the times of the compute while collectives run, and metrics:

    compute_alone_s, collective_alone_s, collective_beside_s   medians
    compute_slowdown, collective_slowdown                      beside / alone, of medians
    compute_covered, collective_covered                        share of the timed calls that ended
                                                               while the other work still ran
    alone_mhz, beside_mhz, alone_w, beside_w                   the least clock and power of all
                                                               devices after the compute's calls

The timing loop measures each alone, then each beside the other, and then all four again, so that
drifting clocks affect all. Before each timed call, enough of the other work is started to outlast
it, on its own stream (on a CPU in its own thread). The timed call waits until the first piece of
the other work is done and the next has begun. Otherwise, timed work that fills the device could
keep the other out. Collectives run at high priority, as FSDP2's do. The number of pieces follows
from the gathered times of each alone, so all ranks issue equally many collectives. If ``covered``
is below 1, some calls ended alone, and the slowdown is understated.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import Any

import msgspec
import torch

from meshwise import timing, torch_private
from meshwise.probe import collectives, operators
from meshwise.probe.block import Blocks
from meshwise.probe.work import Call, Work
from meshwise.ranks import Ranks
from meshwise.spec import Block, Case, DeviceState, Overlap
from meshwise.timing import Timed

_OUTLAST = 4.0  # the other work lasts this many times a timed call alone
_ROUNDS = 2
_LEAD_CYCLES = 40_000  # some 20 us of device clock, until the other work's next piece has begun


def build(
    case: Case, groups: collectives.Groups, blocks: Blocks, settings: contextlib.ExitStack
) -> Work:
    """Build a case. ``Case.backend`` is the collective's. ``settings``: see ``operators.build``."""
    op = case.op
    assert isinstance(op, Overlap)
    alone = msgspec.structs.replace(case, op=op.compute, backend="")
    if isinstance(op.compute, Block):
        work = blocks.build(alone)
        assert work.prepare is not None
        compute: Call = functools.partial(_both, work.prepare, *work.calls)
    else:
        (compute, *_) = operators.build(alone, groups.ranks.device, settings).calls
    other = collectives.build(msgspec.structs.replace(case, op=op.collective), groups)
    (collective,) = other.calls
    own_measure = functools.partial(measure, compute, collective, groups.ranks)
    return Work(calls=(compute, collective), check=other.check, measure=own_measure)


def measure(
    compute: Call,
    collective: Call,
    ranks: Ranks,
    max_seconds: float,
    then: Callable[[Call], None] | None = None,
) -> Timed:
    """Measure. All ranks must call this together. ``max_seconds`` is for each of the four
    measurements. ``then`` gets a collective beside compute, to check its result there too."""
    share_s = max_seconds / _ROUNDS
    take = functools.partial(timing.measure, ranks=ranks, regime="warm", max_seconds=share_s)
    alone: tuple[list[Timed], list[Timed]] = ([], [])
    beside: tuple[list[Timed], list[Timed]] = ([], [])
    covered: tuple[list[bool], list[bool]] = ([], [])
    on_cuda = ranks.device.type == "cuda"
    lanes = [torch.cuda.Stream(ranks.device, priority) for priority in (0, -1)] if on_cuda else []
    for _ in range(_ROUNDS):
        alone[0].append(take([compute], distributed=False))
        alone[1].append(take([collective], distributed=True))
        once_s = (_median(alone[0]), _median(alone[1]))

        # one piece more than needed: the first is over before the timed call
        pieces = 1 + math.ceil(_OUTLAST * once_s[0] / once_s[1])
        others = _Others(collective, pieces, ranks, lanes[-1] if lanes else None)
        calls = [functools.partial(_both, compute, others.note)]
        beside[0].append(take(calls, distributed=False, prepare=others.start))
        covered[0].extend(others.finish())

        # an untimed collective before the timed one lines up the ranks
        pieces = 1 + math.ceil(2 * _OUTLAST * once_s[1] / once_s[0])
        others = _Others(compute, pieces, ranks, lanes[0] if lanes else None)
        calls = [functools.partial(_both, collective, others.note)]
        prepare = functools.partial(_both, others.start, collective)
        look = then and functools.partial(_started_before, others.start, then)
        with torch.cuda.stream(lanes[-1]) if lanes else contextlib.nullcontext():
            beside[1].append(take(calls, distributed=True, prepare=prepare, then=look))
        covered[1].extend(others.finish())
    metrics: dict[str, float | tuple[float, ...]] = {"collective_beside_s": _median(beside[1])}
    for i, name in enumerate(("compute", "collective")):
        metrics[f"{name}_alone_s"] = _median(alone[i])
        metrics[f"{name}_slowdown"] = _median(beside[i]) / _median(alone[i])
        metrics[f"{name}_covered"] = min(ranks.gather(sum(covered[i]) / len(covered[i])))
    for name, rounds in (("alone", alone[0]), ("beside", beside[0])):
        states = [state for timed in rounds for state in timed.after]
        metrics |= {f"{name}_mhz": float(x) for x in [_least(states, "sm_clock_mhz")] if x}
        metrics |= {f"{name}_w": float(x) for x in [_least(states, "power_w")] if x}
    return _joined(beside[0], metrics)


def _both(first: Call, second: Call) -> None:
    first()
    second()


def _started_before(start: Call, then: Callable[[Call], None], call: Call) -> None:
    then(functools.partial(_both, start, call))


def _median(rounds: list[Timed]) -> float:
    return median(time_s for timed in rounds for time_s in timed.times_s)


def _least(states: Iterable[DeviceState], field: str) -> float | None:
    return min((x for state in states if (x := getattr(state, field)) is not None), default=None)


def _joined(rounds: list[Timed], metrics: dict[str, float | tuple[float, ...]]) -> Timed:
    each_rank = zip(*(timed.rank_times_s for timed in rounds), strict=True)
    return Timed(
        times_s=tuple(time_s for timed in rounds for time_s in timed.times_s),
        rank_times_s=tuple(tuple(time_s for own in parts for time_s in own) for parts in each_rank),
        before=rounds[0].before,
        after=rounds[-1].after,
        metrics=metrics,
    )


class _Others:
    """Runs the other work: on its own stream, or on a CPU in its own thread."""

    def __init__(
        self, call: Call, pieces: int, ranks: Ranks, stream: torch.cuda.Stream | None
    ) -> None:
        self.call, self.pieces, self.ranks, self.stream = call, pieces, ranks, stream
        self.mark, self.elapsed_s = timing.clock(ranks.device)
        self.noted: list[Any] = []  # when a timed call ended
        self.ended: list[Any] = []  # when the work that was started before it ended
        self.pool = None if stream is not None else ThreadPoolExecutor(max_workers=1)
        self.running: Future[None] | None = None

    def start(self) -> None:
        """Start all pieces, after those of the last call; continue when the first piece is done."""
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                self.call()
                begun = self.stream.record_event()
                self._rest()
            torch.cuda.current_stream().wait_event(begun)
            torch_private.sleep(_LEAD_CYCLES)
        elif self.pool is not None:
            self._join()
            under_way = threading.Event()
            self.running = self.pool.submit(self._run, under_way)
            under_way.wait()

    def note(self) -> None:
        self.noted.append(self.mark())

    def finish(self) -> list[bool]:
        """Wait for the rest; return for each timed call whether the other work outlasted it."""
        if self.pool is not None:
            self._join()
            self.pool.shutdown()
        elif self.ended:
            self.ranks.synchronize("the work beside it", self.ended[-1])
        both = zip(self.noted, self.ended, strict=True)
        return [self.elapsed_s(noted, ended) > 0 for noted, ended in both]

    def _run(self, under_way: threading.Event) -> None:
        try:
            self.call()
        finally:
            under_way.set()
        self._rest()

    def _rest(self) -> None:
        for _ in range(self.pieces - 1):
            self.call()
        self.ended.append(self.mark())

    def _join(self) -> None:
        if self.running is not None:
            self.running.result()
