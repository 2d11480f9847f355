"""The phases of a step (``phases.json``): every rank's seconds by phase, and its spans."""

from collections.abc import Iterable
from statistics import fmean
from typing import Literal

from meshwise.spec.record import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Record

SCHEMA_VERSION = 1

Stream = Literal["compute", "communication", "messages"]
ADDENDS = (
    "forward_s",
    "backward_s",
    "optimizer_s",
    "exposed_communication_s",
    "bubble_s",
    "other_s",
)


class PhaseSpan(Record, kw_only=True):
    """A span of one rank's work; seconds since all ranks started. ``messages``: between pipeline
    stages. ``communication``: everything else between ranks."""

    rank: NonNegative
    stream: Stream
    name: str
    start_s: NonNegativeFloat
    end_s: NonNegativeFloat


class RankPhases(Record, kw_only=True):
    """Seconds of one rank; all but ``communication_s`` add up to the step.

    ``exposed_communication_s``: the rank communicates and computes nothing. ``forward_s``,
    ``backward_s`` and ``optimizer_s`` (with clipping) exclude this time. ``communication_s``: all
    communication, also beside computation. ``bubble_s``: waiting for a neighbour's message in a
    pipeline, and for ranks that end later.
    """

    rank: NonNegative
    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    optimizer_s: NonNegativeFloat
    exposed_communication_s: NonNegativeFloat
    bubble_s: NonNegativeFloat
    other_s: NonNegativeFloat
    communication_s: NonNegativeFloat


class Phases(Record, kw_only=True):
    """One step, from the common start to the end of the last rank. ``profiled_step_s``: the same
    under the profiler, which recorded the communication."""

    schema_version: Positive = SCHEMA_VERSION
    step_s: PositiveFloat
    profiled_step_s: PositiveFloat
    ranks: tuple[RankPhases, ...]
    spans: tuple[PhaseSpan, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """Return a sample's metrics. Each phase has its mean over ranks (``forward_s``; the means
        add up to the step) and its largest value (``largest_forward_s``)."""
        found: dict[str, float] = {}
        for name in (*ADDENDS, "communication_s"):
            values = [float(getattr(rank, name)) for rank in self.ranks]
            found |= {name: fmean(values), f"largest_{name}": max(values)}
        return found | {"phases_step_s": self.step_s}


Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint, ascending intervals that cover the same moments."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start:
            found.append((start, end))
    return found


def without(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Remove ``others`` from ``intervals``. Both are disjoint and ascending."""
    found, cuts, at = [], list(others), 0
    for start, end in intervals:
        while at < len(cuts) and cuts[at][1] <= start:
            at += 1
        number = at
        while number < len(cuts) and cuts[number][0] < end:
            if cuts[number][0] > start:
                found.append((start, cuts[number][0]))
            start = max(start, cuts[number][1])
            number += 1
        if start < end:
            found.append((start, end))
    return found


def within_s(intervals: Iterable[Interval], start: float, end: float) -> float:
    """Return the seconds of disjoint intervals between two moments."""
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in intervals)
