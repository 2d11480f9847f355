"""Sizes of uneven all-to-alls. In: the bytes from each rank to each. Out: the size of the even
exchange that should take as long, as nccl-tests counts sizes: the part that a rank keeps included.

    busiest     n/(n-1) times the most that one rank sends to, or receives from, others
    sum         all bytes over n, as if they were shared evenly
    max_of_max  the most that one rank sends to, or receives from, others
    max_of_sum  the most that one rank sends to and receives from others together

The last three are ml_perf_model's (``get_adjusted_size`` of comm_bench.ipynb), which has them for
tables of batch, tables and dimension. They are not on one scale: an even exchange of S bytes counts
as S, (n-1)/n S and 2(n-1)/n S. ``busiest`` is ``max_of_max`` on the scale of S. Prices use it.
"""

from typing import get_args

import msgspec

from meshwise.spec import Collective
from meshwise.spec.costs import SizeRule

RULES: tuple[SizeRule, ...] = get_args(SizeRule)


def even_bytes(op: Collective, rule: SizeRule = "busiest") -> int:
    """Return the size in bytes by a rule, rounded up. Collectives without splits keep theirs. A
    ValueError names the rules that there are."""
    if rule not in RULES:
        raise ValueError(f"rule = {rule!r}: must be one of {', '.join(RULES)}")
    n = op.group_size
    if not op.splits:
        return op.size_bytes
    if rule == "sum":
        return -(-sum(sum(row) for row in op.splits) // n)
    if rule == "max_of_sum":
        pairs = enumerate(zip(op.splits, zip(*op.splits, strict=True), strict=True))
        return max(int(sum(row) + sum(column) - 2 * row[i]) for i, (row, column) in pairs)
    return op.bytes if rule == "max_of_max" else -(-n * op.bytes // max(n - 1, 1))


def as_even(op: Collective, rule: SizeRule = "busiest") -> Collective:
    """Return the even all_to_all_v whose size a rule gives, rounded up to whole bytes a pair."""
    n = op.group_size
    part = -(-even_bytes(op, rule) // n)
    return msgspec.structs.replace(op, size_bytes=n * part, splits=((part,) * n,) * n)


def is_uneven(op: Collective) -> bool:
    """Return whether ranks send each other different numbers of bytes."""
    pairs = {part for i, row in enumerate(op.splits) for j, part in enumerate(row) if i != j}
    return len(pairs) > 1


def bus_factor(op: Collective) -> float:
    """Return the bus over the algorithm bandwidth of a price's curve: uneven exchanges are on it as
    even ones."""
    return (op.group_size - 1) / op.group_size if op.splits else op.bus_factor
