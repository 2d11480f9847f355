"""Share out what ranks send, so that the busiest sends as briefly as possible: an exact max-flow.

In: bytes by the set of ranks that own them, and what each rank can send a second. Any owner may
send any part of its bytes. Out: the smallest possible maximum time z and a set S of ranks that
cannot do better, or how much each owner sends of each set.

By max-flow min-cut z is the maximum, over sets S, of (bytes owned only within S) / (rate of S).
Dinkelbach's iteration finds it: route what fits in z; if something does not fit, the ranks that the
search has seen are all full and set the next z. ``shares`` then fixes what S sends and balances the
rest without S in the same way, so that no rank is busier than its own surroundings demand.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Owners = frozenset[int]


class _Class(NamedTuple):
    """Bytes that any of ``owners`` may send; ``key``: their number in the caller's mapping."""

    owners: tuple[int, ...]
    size: int
    key: int


class _Balance(NamedTuple):
    load: Fraction
    tight: Owners
    sent: list[dict[int, Fraction]]  # of each class, by rank


def balance(
    owned: Mapping[Owners, int], capacity: Mapping[int, float] | None = None
) -> tuple[Fraction, Owners]:
    """Return the smallest maximum of (bytes sent / capacity), and ranks that cannot do better.

    Without ``capacity`` every rank has 1, and the load is in bytes.
    """
    solved = [_balanced(part, capacity) for part in _apart(_classes(owned))]
    best = max(solved, key=lambda found: found.load)
    return best.load, best.tight


def shares(
    owned: Mapping[Owners, int], capacity: Mapping[int, float] | None = None
) -> dict[Owners, dict[int, Fraction]]:
    """The bytes that each owner sends of each set."""
    keys = list(owned)
    sent: list[dict[int, Fraction]] = [{} for _ in keys]
    queue = deque(_apart(_classes(owned)))
    while queue:
        classes = queue.popleft()
        found = _balanced(classes, capacity)
        rest = []
        for each, part in zip(classes, found.sent, strict=True):
            if found.tight.issuperset(each.owners):
                sent[each.key].update(part)
            else:
                owners = tuple(rank for rank in each.owners if rank not in found.tight)
                rest.append(each._replace(owners=owners))
        queue.extend(_apart(rest))
    return dict(zip(keys, sent, strict=True))


def _classes(owned: Mapping[Owners, int]) -> list[_Class]:
    sizes = enumerate(owned.items())
    return [_Class(tuple(sorted(owners)), size, key) for key, (owners, size) in sizes if size]


def _apart(classes: Iterable[_Class]) -> Iterator[list[_Class]]:
    """Split classes into groups that share no rank, even through others; each is balanced alone."""
    groups: dict[int, tuple[list[_Class], set[int]]] = {}
    for each in classes:
        joined: tuple[list[_Class], set[int]] = [], set()
        for group in {id(g): g for rank in each.owners if (g := groups.get(rank))}.values():
            small, large = sorted((joined, group), key=lambda g: len(g[1]))
            large[0].extend(small[0])
            large[1].update(small[1])
            joined = large
        joined[0].append(each)
        joined[1].update(each.owners)
        groups.update(dict.fromkeys(joined[1], joined))
    for group in {id(g): g for g in groups.values()}.values():
        yield sorted(group[0], key=lambda each: (len(each.owners), each.owners, each.key))


def _balanced(classes: Sequence[_Class], capacity: Mapping[int, float] | None) -> _Balance:
    """Dinkelbach's iteration, in whole numbers: sizes times ``down``, capacities times ``up``."""
    ranks = sorted({rank for each in classes for rank in each.owners})
    exact = {rank: Fraction(capacity[rank]) if capacity else Fraction(1) for rank in ranks}
    unit = lcm(*(rate.denominator for rate in exact.values()))
    rates = {rank: int(rate * unit) for rank, rate in exact.items()}
    tight = frozenset(ranks)
    while True:
        within = sum(each.size for each in classes if tight.issuperset(each.owners))
        load = Fraction(within, sum(rates[rank] for rank in tight))
        up, down = load.numerator, load.denominator
        sent, over = _routed(
            [each._replace(size=each.size * down) for each in classes],
            {rank: rate * up for rank, rate in rates.items()},
        )
        if not over:
            split = [{rank: Fraction(n, down) for rank, n in part.items() if n} for part in sent]
            return _Balance(load * unit, tight, split)
        tight = over


def _routed(classes: Sequence[_Class], room: dict[int, int]) -> tuple[list[dict[int, int]], Owners]:
    """Fill the ranks' room class by class. Return what is sent, and ranks short of room, if any."""
    sent: list[dict[int, int]] = [{} for _ in classes]
    takers: dict[int, dict[int, None]] = {rank: {} for rank in room}  # classes that a rank sends
    for start, each in enumerate(classes):
        left = each.size
        while left:
            path, seen = _path(start, classes, takers, room)
            if not path:
                return sent, seen
            left -= _push(path, sent, takers, room, left)
    return sent, frozenset()


_Path = list[tuple[int, int]]  # (class, rank): the rank takes bytes of the class


def _path(
    start: int,
    classes: Sequence[_Class],
    takers: Mapping[int, Mapping[int, None]],
    room: Mapping[int, int],
) -> tuple[_Path, Owners]:
    """Find the shortest path to a rank with room, moving others' bytes on; and the ranks seen."""
    came: dict[int, tuple[int, int | None]] = dict.fromkeys(classes[start].owners, (start, None))
    queue, asked = deque(came), {start}
    while queue:
        rank = queue.popleft()
        if room[rank]:
            path: _Path = []
            at: int | None = rank
            while at is not None:
                number, before = came[at]
                path.append((number, at))
                at = before
            return path[::-1], frozenset(came)
        for number in takers[rank]:
            if number not in asked:
                asked.add(number)
                for other in classes[number].owners:
                    if other not in came:
                        came[other] = number, rank
                        queue.append(other)
    return [], frozenset(came)


def _push(
    path: _Path,
    sent: list[dict[int, int]],
    takers: dict[int, dict[int, None]],
    room: dict[int, int],
    left: int,
) -> int:
    """Send as much along the path as every link of it allows; return the amount."""
    last = path[-1][1]
    moved = [sent[number][path[i][1]] for i, (number, _) in enumerate(path[1:])]
    amount = min(left, room[last], *moved)
    for i, (number, rank) in enumerate(path):
        sent[number][rank] = sent[number].get(rank, 0) + amount
        takers[rank][number] = None
        if i:
            before = path[i - 1][1]
            sent[number][before] -= amount
            if not sent[number][before]:
                del takers[before][number]
    room[last] -= amount
    return amount


def assigned(cost: npt.NDArray[np.int64]) -> list[int]:
    """Assign a column to each row, so that the sum of the costs is least."""
    from scipy.optimize import linear_sum_assignment

    columns: list[int] = linear_sum_assignment(cost)[1].tolist()
    return columns
