"""Compare the times of a sample's ranks: who is slowest, and who waits for whom."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwise.pages.tables import ABSENT
from meshwise.spec import Case, Collective, Overlap, Sample
from meshwise.stats import median_interval


class Split(NamedTuple):
    """Parts of the median over iterations of the largest time over ranks, which add up to it.

    A rank that comes last waits for nobody, so its time, the smallest, is the transfer; the others'
    is longer by what they waited. Of several groups at once the transfer is the fastest's, the
    waiting the slowest's, and the rest lies between them: what that group took longer to transfer.
    """

    transfer_s: float
    waiting_s: float
    other_groups_s: float | None  # None: there is one group


def members(case: Case) -> list[tuple[int, ...]]:
    """The groups of ranks that worked together; without a collective every rank is one."""
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
    """None without the times of single ranks."""
    ends = []  # of each group: its smallest and its largest time, iteration by iteration
    for group in members(sample.case):
        if max(group) < len(sample.rank_times_s):
            each = list(zip(*(sample.rank_times_s[rank] for rank in group), strict=True))
            ends.append(([min(times_s) for times_s in each], [max(times_s) for times_s in each]))
    if not ends or not ends[0][0]:
        return None
    whole_s = _median(sample.times_s)
    least_s = _median([min(smallest) for smallest in zip(*(end[0] for end in ends), strict=True)])
    if len(ends) == 1:
        return Split(least_s, whole_s - least_s, None)
    first_s, last_s = max(((_median(a), _median(b)) for a, b in ends), key=lambda pair: pair[1])
    return Split(least_s, last_s - first_s, whole_s - least_s - (last_s - first_s))


def _median(values: Sequence[float]) -> float:
    return median_interval(values)[0]


def slowest(sample: Sample) -> str:
    """The rank with the largest median, and by how much it exceeds the fastest of its group; of all
    ranks where each works by itself."""
    groups = members(sample.case)
    if all(len(group) == 1 for group in groups):
        groups = [tuple(rank for group in groups for rank in group)]
    medians = {
        rank: _median(times_s)
        for rank, times_s in enumerate(sample.rank_times_s)
        if times_s and any(rank in group for group in groups)
    }
    if len(medians) < 2:
        return ABSENT
    rank = max(medians, key=lambda rank: medians[rank])
    (peers,) = (group for group in groups if rank in group)
    fastest_s = min(medians[peer] for peer in peers if peer in medians)
    return f"{rank} (+{100 * (medians[rank] / fastest_s - 1):.0f} %)"
