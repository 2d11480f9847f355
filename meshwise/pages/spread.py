"""Read one sample: its figures, its metrics, its slowest rank, and waiting between ranks."""

from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import Any, NamedTuple

from meshwise.pages import table
from meshwise.pages.table import ABSENT
from meshwise.spec import Case, Collective, Overlap, Sample
from meshwise.stats import median_interval

Metrics = Mapping[str, float | tuple[float, ...]]


def each(metrics: Metrics, name: str) -> tuple[float, ...]:
    """Return all values of a metric; () if it is missing."""
    value = metrics.get(name, ())
    return value if isinstance(value, tuple) else (value,)


def number(metrics: Metrics, name: str) -> float | None:
    """Return the first value of a metric; None if it is missing."""
    return next(iter(each(metrics, name)), None)


class Reading(NamedTuple):
    """A sample that has times, with the figures that its tables show. Rates use the median time;
    those of collectives use the mean, as in nccl-tests."""

    sample: Sample
    op: Any
    median_s: float
    low_s: float
    high_s: float

    @property
    def case(self) -> Case:
        return self.sample.case

    @property
    def interval(self) -> str:
        return table.interval(self.low_s, self.high_s)

    @property
    def num_times(self) -> int:
        return len(self.sample.times_s)

    @property
    def mean_s(self) -> float:
        return fmean(self.sample.times_s)

    @property
    def flops_per_s(self) -> float:
        return float(self.op.flops / self.median_s)

    @property
    def bytes_per_s(self) -> float:
        return float(self.op.bytes / self.median_s)

    @property
    def algbw(self) -> float:
        return float(self.op.size_bytes / self.mean_s)

    @property
    def busbw(self) -> float:
        return float(self.op.size_bytes * self.op.bus_factor / self.mean_s)

    @property
    def slowest(self) -> str:
        return slowest(self.sample)


def reading(sample: Sample) -> Reading | None:
    """Read a sample; None if it has no times."""
    times_s = sample.times_s
    return Reading(sample, sample.case.op, *median_interval(times_s)) if times_s else None


def readings(samples: Iterable[Sample], kind: type) -> list[Reading]:
    """Read the samples of a kind of operation that have times."""
    return [
        read
        for sample in samples
        if isinstance(sample.case.op, kind) and (read := reading(sample)) is not None
    ]


class Split(NamedTuple):
    """Parts of the median over iterations of the largest time over ranks, which add up to it.

    The last rank to start waits for no other: its time, the smallest, is the transfer. The others
    take longer because they wait. If several groups work at once, the transfer is the fastest
    group's and the waiting is the slowest group's. The rest is how much longer the slowest group's
    transfer took.
    """

    transfer_s: float
    waiting_s: float
    other_groups_s: float | None  # None if there is one group


def members(case: Case) -> list[tuple[int, ...]]:
    """Return the groups of ranks that worked together; without a collective each rank is one."""
    op = case.op.collective if isinstance(case.op, Overlap) else case.op
    if not isinstance(op, Collective):
        return [(rank,) for rank in range(case.world_size)]
    if op.ranks:
        return [op.ranks]
    size, stride = op.group_size, op.group_stride
    last = case.world_size - (size - 1) * stride
    starts = [rank for rank in range(last) if rank // stride % size == 0]
    return [tuple(start + i * stride for i in range(size)) for start in starts]


def split(sample: Sample) -> Split | None:
    """Split the time of a collective; None without the times of single ranks."""
    ends = []  # smallest and largest times of each group, iteration by iteration
    for group in members(sample.case):
        if max(group) < len(sample.rank_times_s):
            times = list(zip(*(sample.rank_times_s[rank] for rank in group), strict=True))
            ends.append((list(map(min, times)), list(map(max, times))))
    if not ends or not ends[0][0]:
        return None
    whole_s = median(sample.times_s)
    least_s = median(map(min, zip(*(smallest for smallest, _ in ends), strict=True)))
    if len(ends) == 1:
        return Split(least_s, whole_s - least_s, None)
    first_s, last_s = max(((median(a), median(b)) for a, b in ends), key=lambda pair: pair[1])
    return Split(least_s, last_s - first_s, whole_s - least_s - (last_s - first_s))


def slowest(sample: Sample) -> str:
    """Name the rank with the largest median, and by how much it exceeds the fastest rank of its
    group, or of all ranks if each works alone."""
    groups = members(sample.case)
    if all(len(group) == 1 for group in groups):
        groups = [tuple(rank for group in groups for rank in group)]
    medians = {
        rank: median(times_s)
        for rank, times_s in enumerate(sample.rank_times_s)
        if times_s and any(rank in group for group in groups)
    }
    if len(medians) < 2:
        return ABSENT
    rank = max(medians, key=lambda rank: medians[rank])
    (peers,) = (group for group in groups if rank in group)
    fastest_s = min(medians[peer] for peer in peers if peer in medians)
    return f"{rank} (+{100 * (medians[rank] / fastest_s - 1):.0f} %)"
