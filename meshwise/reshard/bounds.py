"""How fast any plan that moves one layout to another could be: exact lower bounds.

An atom is a cell of the destination cut along the source's edges; it has owners and a needer,
and costs wire bytes only if the needer is no owner.

    ingress   max over ranks r of (bytes r needs and does not own) / rate in
    egress    the least z such that every atom can be sent, split at will, by its owners, each
              busy for at most z. By max-flow min-cut it is the largest, over sets S of ranks,
              of (bytes owned within S only) / (sum of rates out of S); found by Dinkelbach's
              iteration in exact arithmetic: route what fits in z, and where something does not
              fit the cut names the set that sets the next z.

No transfer ends before the larger of the two (unicast, full duplex).
"""

from collections import deque
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from meshwise.reshard.regions import Layout
from meshwise.reshard.transfer import Move, cells

Owners = frozenset[int]


class Bounds(NamedTuple):
    """Seconds; ``binding`` says which bound is the larger, ``ranks`` who sets it."""

    ingress_s: float
    egress_s: float
    binding: str
    ranks: tuple[int, ...]

    @property
    def time_s(self) -> float:
        return max(self.ingress_s, self.egress_s)


def lower_bounds(
    pairs: Iterable[tuple[Layout, Layout, int]],
    *,
    bytes_per_s_in: int,
    bytes_per_s_out: int,
) -> Bounds:
    """Bounds for many tensors at once, each (source, destination, bytes per element)."""
    needed: dict[int, int] = {}
    owned: dict[Owners, int] = {}
    for source, destination, itemsize in pairs:
        for piece in destination:
            for cell in cells(piece.box, source):
                owners = frozenset(p.rank for p in source if cell.intersect(p.box) == cell)
                if piece.rank in owners:
                    continue
                size = cell.num_elements * itemsize
                needed[piece.rank] = needed.get(piece.rank, 0) + size
                owned[owners] = owned.get(owners, 0) + size
    if not needed:
        return Bounds(0.0, 0.0, "nothing to move", ())
    receiver = max(needed, key=lambda rank: (needed[rank], -rank))
    ingress_s = needed[receiver] / bytes_per_s_in
    busiest, senders = balance(owned)
    egress_s = float(busiest) / bytes_per_s_out
    if egress_s > ingress_s:
        return Bounds(ingress_s, egress_s, "egress", tuple(sorted(senders)))
    return Bounds(ingress_s, egress_s, "ingress", (receiver,))


def planned(moves: Iterable[tuple[Move, int]]) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes that a plan sends out of and into every rank, from (move, bytes per element)."""
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for move, itemsize in moves:
        if not move.is_local:
            size = move.box.num_elements * itemsize
            sent[move.source] = sent.get(move.source, 0) + size
            received[move.destination] = received.get(move.destination, 0) + size
    return sent, received


def balance(owned: Mapping[Owners, int]) -> tuple[Fraction, Owners]:
    """The least possible largest load when bytes with owners may be split among them, and a set
    of ranks that cannot do better."""
    ranks = frozenset().union(*owned)
    tight, load = ranks, Fraction(sum(owned.values()), len(ranks))
    while True:
        within = _overloaded(owned, load)
        if not within:
            return load, tight
        tight = within
        load = Fraction(sum(size for owners, size in owned.items() if owners <= tight), len(tight))


def _overloaded(owned: Mapping[Owners, int], load: Fraction) -> Owners:
    """Route bytes to owners of capacity ``load``; the ranks of the cut, empty when all fits."""
    flow: dict[Owners, dict[int, Fraction]] = {owners: {} for owners in owned}
    carried: dict[int, Fraction] = {}
    for owners, size in owned.items():
        left = Fraction(size)
        while left:
            path, reached = _augment(owners, flow, carried, load)
            if path is None:
                return frozenset(reached)
            left -= _push(path, flow, carried, load, left)
    return frozenset()


Path = list[tuple[Owners, int]]  # the bytes of ``Owners`` go to a rank, whose own bytes move on


def _augment(
    start: Owners,
    flow: dict[Owners, dict[int, Fraction]],
    carried: dict[int, Fraction],
    load: Fraction,
) -> tuple[Path | None, set[int]]:
    """The shortest way to a rank with room, moving others' bytes out of the way; or whom it saw."""
    came: dict[int, tuple[Owners, int | None]] = dict.fromkeys(sorted(start), (start, None))
    queue = deque(came)
    while queue:
        rank = queue.popleft()
        if carried.get(rank, Fraction(0)) < load:
            path: Path = []
            at: int | None = rank
            while at is not None:
                owners, before = came[at]
                path.append((owners, at))
                at = before
            return path[::-1], set(came)
        for owners, to in flow.items():
            if to.get(rank):
                for other in sorted(owners - came.keys()):
                    came[other] = (owners, rank)
                    queue.append(other)
    return None, set(came)


def _push(
    path: Path,
    flow: dict[Owners, dict[int, Fraction]],
    carried: dict[int, Fraction],
    load: Fraction,
    left: Fraction,
) -> Fraction:
    """Send as much along the path as every link of it allows; the amount."""
    last = path[-1][1]
    moved = [flow[owners][path[i][1]] for i, (owners, _) in enumerate(path[1:])]
    amount = min(left, load - carried.get(last, Fraction(0)), *moved)
    for i, (owners, rank) in enumerate(path):
        flow[owners][rank] = flow[owners].get(rank, Fraction(0)) + amount
        if i:
            flow[owners][path[i - 1][1]] -= amount
    carried[last] = carried.get(last, Fraction(0)) + amount
    return amount
