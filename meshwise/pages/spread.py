"""What the times of the single ranks say of a sample: who is slowest, and who waits for whom."""

from typing import NamedTuple

from meshwise.pages.tables import ABSENT
from meshwise.spec import Case, Collective, Overlap, Sample
from meshwise.stats import median_interval


class Split(NamedTuple):
    """Medians over iterations: of the smallest time over ranks, of the largest less the smallest.

    A rank that comes last waits for nobody, so its time is the transfer; the others' is longer by
    what they waited.
    """

    transfer_s: float
    waiting_s: float


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
    """Of the slowest group; None without the times of single ranks."""
    found = []
    for group in members(sample.case):
        if max(group) >= len(sample.rank_times_s):
            continue
        each = list(zip(*(sample.rank_times_s[rank] for rank in group), strict=True))
        if each:
            least_s = median_interval([min(times_s) for times_s in each])[0]
            waiting_s = median_interval([max(times_s) - min(times_s) for times_s in each])[0]
            found.append(Split(least_s, waiting_s))
    return max(found, key=sum, default=None)


def slowest(sample: Sample) -> str:
    """The rank with the largest median, and by how much it exceeds the fastest."""
    taking_part = [rank for group in members(sample.case) for rank in group]
    medians = {
        rank: median_interval(times_s)[0]
        for rank, times_s in enumerate(sample.rank_times_s)
        if rank in taking_part and times_s
    }
    if len(medians) < 2:
        return ABSENT
    rank = max(medians, key=lambda rank: medians[rank])
    return f"{rank} (+{100 * (medians[rank] / min(medians.values()) - 1):.0f} %)"
