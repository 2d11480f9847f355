"""Choose who sends what: the own copy, else an owner on the same host, else the least busy owner.

In: the atoms of every tensor (``atoms``), and what each rank can send a second. Out: hops. A hop
takes a box from a numbered piece of one layout to a piece of another, in the first or second step.

Bytes that several ranks could send are shared so that the busiest rank is as little busy as
possible (``flow.shares``; within hosts and between them apart, because these are different links).
They are dealt in order of receivers, so that a receiver has few senders. If a sender's share ends
within an atom, the atom is cut along its outermost dim, unless a part falls below ``SPLIT``.

Several ranks of one host that need the same bytes can also receive a stripe each and pass it on in
a second step. n receivers of w bytes that one rank owns then wait for w + w (n - 1) / n instead of
n w. ``auto`` stripes the groups that bind, as long as both steps together get shorter. A rank that
needs the same bytes twice receives them once and copies them in the second step; stripes that
others pass on it receives twice.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from meshwise.reshard.atoms import Atoms, weighed
from meshwise.reshard.flow import Owners, balance, shares
from meshwise.reshard.regions import Box, narrowed

Multicast = Literal["auto", "never", "always"]

SPLIT = 2**20  # bytes
STEP_S = 30e-6  # a second step costs this besides its moves: all ranks meet once more


class Links(NamedTuple):
    """Bytes a second out of a rank, and into it: ``within`` its host and ``between`` hosts."""

    host_of: Callable[[int], int]
    within: Callable[[int], float]
    between: Callable[[int], float]

    def rate(self, is_apart: bool, rank: int) -> float:
        return (self.between if is_apart else self.within)(rank)


class Hop(NamedTuple):
    """A ``box`` that goes from one piece to another, by their numbers."""

    source: int
    destination: int
    box: Box


class Hops(NamedTuple):
    """``shared`` hops of each cut, ``own`` of each tensor; ``second_*``: of the second step."""

    shared: list[list[Hop]]
    own: list[list[Hop]]
    second_shared: list[list[Hop]]
    second_own: list[list[Hop]]


class _Group(NamedTuple):
    """Ranks of one host that need the same bytes, and the ranks that may send them."""

    senders: tuple[int, ...]
    needers: tuple[int, ...]
    is_apart: bool  # no sender is on their host


class _Want(NamedTuple):
    box: Box
    elements: int
    group: _Group
    pieces: dict[int, int]  # by sender
    needers: tuple[tuple[int, ...], ...]  # pieces of each needer, filled by the same bytes


class _Part(NamedTuple):
    tensor: int
    want: _Want
    box: Box
    needer: int  # which needer of its want
    size: int


def choose(
    cuts: Sequence[Atoms],
    kinds: Sequence[int],
    itemsizes: Sequence[int],
    links: Links,
    multicast: Multicast,
) -> Hops:
    """Choose the hops of all tensors; ``kinds``: the cut of each."""
    routes = [_wants(cut, links.host_of, multicast != "never") for cut in cuts]
    weights = weighed(kinds, itemsizes)
    groups = Counter[_Group]()
    for kind, (_, wants) in enumerate(routes):
        for want in wants:
            groups[want.group] += want.elements * weights[kind]
    striped = _striped(groups, links, multicast)
    hops = Hops([own for own, _ in routes], [[] for _ in kinds], [[] for _ in cuts],
                [[] for _ in kinds])  # fmt: skip
    loose = [_settle(wants, striped, hops, kind) for kind, (_, wants) in enumerate(routes)]
    parts = (
        _Part(tensor, want, want.box, 0, want.elements * itemsizes[tensor])
        for tensor, kind in enumerate(kinds)
        for want in loose[kind]
    )
    _deal(_first_receivers(parts, striped, hops), _shares(groups, striped, links), hops)
    return hops


def _wants(
    cut: Atoms, host_of: Callable[[int], int], pass_on: bool
) -> tuple[list[Hop], list[_Want]]:
    """List the copies within ranks, and what must come from other ranks."""
    own, wants = [], []
    for box, owners, needers in cut.atoms:
        held = {cut.source[number].rank: number for number in reversed(owners)}
        hosts: dict[int, list[list[int]]] = {}
        filled: dict[int, list[int]] = {}
        for number in needers:
            rank = cut.destination[number].rank
            if rank in held:
                own.append(Hop(held[rank], number, box))
            elif rank in filled and pass_on:
                filled[rank].append(number)
            else:
                filled[rank] = [number]
                hosts.setdefault(host_of(rank), []).append(filled[rank])
        for host, pieces in hosts.items():
            near = [rank for rank in held if host_of(rank) == host]
            senders = tuple(sorted(near or held))
            ranks = tuple(cut.destination[numbers[0]].rank for numbers in pieces)
            group = _Group(senders, ranks, not near)
            from_ = {rank: held[rank] for rank in senders}
            wants.append(_Want(box, box.num_elements, group, from_, tuple(map(tuple, pieces))))
    return own, wants


def _settle(
    wants: Iterable[_Want], striped: frozenset[_Group], hops: Hops, kind: int
) -> list[_Want]:
    """Add hops without a choice, the same for every tensor of a kind; return the other wants."""
    loose = []
    for want in wants:
        if want.group not in striped:
            for first, *others in want.needers:
                hops.second_shared[kind] += [Hop(first, other, want.box) for other in others]
                if len(want.pieces) == 1:
                    (piece,) = want.pieces.values()
                    hops.shared[kind].append(Hop(piece, first, want.box))
        if want.group in striped or len(want.pieces) > 1:
            loose.append(want)
    return loose


def _striped(groups: dict[_Group, int], links: Links, multicast: Multicast) -> frozenset[_Group]:
    """The groups that receive a stripe each."""
    several = frozenset(group for group in groups if len(group.needers) > 1)
    if multicast == "always":
        return several
    if multicast == "never" or not several:
        return frozenset()
    striped: frozenset[_Group] = frozenset()
    tried: list[tuple[float, int, frozenset[_Group]]] = []
    while True:
        time_s, binding = _price(groups, striped, links)
        tried.append((time_s, len(tried), striped))
        if not (more := several & binding - striped):
            break
        striped |= more
    tried.append((_price(groups, several, links)[0], len(tried), several))
    return min(tried)[2]


def _price(
    groups: dict[_Group, int], striped: frozenset[_Group], links: Links
) -> tuple[float, frozenset[_Group]]:
    """Return the seconds of both steps, and the groups that the first step waits for."""
    received: dict[tuple[bool, int], float] = defaultdict(int)
    passed: dict[int, float] = defaultdict(int)
    for group, size in groups.items():
        count = len(group.needers)
        for rank in group.needers:
            received[group.is_apart, rank] += size / count if group in striped else size
            if group in striped:
                passed[rank] += size - size / count
    ingress = {key: size / links.rate(*key) for key, size in received.items()}
    (is_slow, _), first_s = max(ingress.items(), key=lambda found: found[1])
    # stripes only reduce what comes from other hosts: within one, step two brings the rest
    binding = frozenset(group for group in groups if is_slow and group.is_apart)
    for is_apart, owned in _owned(groups, striped).items():
        load, tight = balance(owned, _capacity(owned, links, is_apart))
        if load > first_s:
            first_s = float(load)
            binding = frozenset(
                g for g in groups if g.is_apart == is_apart and tight.issuperset(g.senders)
            )
    second_s = max((size / links.within(rank) for rank, size in passed.items()), default=0.0)
    return first_s + second_s + STEP_S * bool(passed), binding


def _owned(groups: dict[_Group, int], striped: frozenset[_Group]) -> dict[bool, dict[Owners, int]]:
    """Bytes that leave their owners in the first step, within hosts and between them."""
    owned: dict[bool, dict[Owners, int]] = {}
    for group, size in groups.items():
        copies = 1 if group in striped else len(group.needers)
        part = owned.setdefault(group.is_apart, Counter())
        part[frozenset(group.senders)] += size * copies
    return owned


def _capacity(owned: dict[Owners, int], links: Links, is_apart: bool) -> dict[int, float]:
    return {rank: links.rate(is_apart, rank) for owners in owned for rank in owners}


_Senders = tuple[bool, tuple[int, ...]]
_Ends = list[tuple[int, int]]  # (rank, where its share ends)


def _shares(
    groups: dict[_Group, int], striped: frozenset[_Group], links: Links
) -> dict[_Senders, _Ends]:
    found: dict[_Senders, _Ends] = {}
    for is_apart, owned in _owned(groups, striped).items():
        sent = shares(owned, _capacity(owned, links, is_apart))
        for owners, part in sent.items():
            ranks = sorted(part)
            ends = map(round, accumulate(part[rank] for rank in ranks))
            found[is_apart, tuple(sorted(owners))] = list(zip(ranks, ends, strict=True))
    return found


def _first_receivers(
    parts: Iterable[_Part], striped: frozenset[_Group], hops: Hops
) -> Iterator[_Part]:
    """Yield the part of every needer, or of striped groups the stripes that the needers pass on."""
    stripes: dict[_Group, list[_Part]] = {}
    for part in parts:
        if part.want.group in striped:
            stripes.setdefault(part.want.group, []).append(part)
        else:
            yield part
            for needer in range(1, len(part.want.needers)):
                yield part._replace(needer=needer)
    for group, whole in stripes.items():
        count, total = len(group.needers), sum(part.size for part in whole)
        ends = [(needer, total * (needer + 1) // count) for needer in range(count)]
        for part, needer in _dealt(whole, ends, {}):
            yield part._replace(needer=needer)
            first = part.want.needers[needer][0]
            hops.second_own[part.tensor] += [
                Hop(first, piece, part.box)
                for pieces in part.want.needers
                for piece in pieces
                if piece != first
            ]


def _deal(parts: Iterable[_Part], ends: dict[_Senders, _Ends], hops: Hops) -> None:
    """Give every part to senders, in order of the receivers."""
    waiting: dict[_Senders, dict[int, list[_Part]]] = {}
    for part in parts:
        group = part.want.group
        receivers = waiting.setdefault((group.is_apart, group.senders), {})
        receivers.setdefault(group.needers[part.needer], []).append(part)
    debt: dict[int, int] = {}
    for senders in sorted(waiting):
        receivers = waiting.pop(senders)
        ordered = (part for rank in sorted(receivers) for part in receivers[rank])
        for part, rank in _dealt(ordered, ends[senders], debt):
            first = part.want.needers[part.needer][0]
            hops.own[part.tensor].append(Hop(part.want.pieces[rank], first, part.box))


def _dealt(
    parts: Iterable[_Part], ends: _Ends, debt: dict[int, int]
) -> Iterator[tuple[_Part, int]]:
    """Yield each part with the rank in whose share it lies, cut where that ends. A part that cannot
    be cut goes to the rank that is due most of it; ``debt``: bytes that ranks were denied so."""
    at = start = 0
    for part in parts:
        while True:
            while at < len(ends) - 1 and ends[at][1] <= start:
                at += 1
            room = ends[at][1] - start
            if part.size <= room or at == len(ends) - 1:
                yield part, ends[at][0]
                break
            if not (halves := _cut(part, room)):
                yield part, _most_due(start, part.size, ends[at:], debt)
                break
            yield halves[0], ends[at][0]
            start += halves[0].size
            part, at = halves[1], at + 1
        start += part.size


def _cut(part: _Part, room: int) -> tuple[_Part, _Part] | None:
    dim = next((d for d, extent in enumerate(part.box.shape) if extent > 1), None)
    if dim is None:
        return None
    low, high = part.box.low[dim], part.box.high[dim]
    row = part.size // (high - low)
    size = round(room / row) * row
    if min(size, part.size - size) < SPLIT:
        return None
    middle = low + size // row
    first, second = narrowed(part.box, dim, low, middle), narrowed(part.box, dim, middle, high)
    return part._replace(box=first, size=size), part._replace(box=second, size=part.size - size)


def _most_due(start: int, size: int, ends: Sequence[tuple[int, int]], debt: dict[int, int]) -> int:
    """Pick the rank that is most due ``size`` bytes from ``start``, which lie in several shares."""
    at = start
    due = {}
    for rank, end in ends:
        due[rank] = max(0, min(end, start + size) - at)
        at = max(at, end)
        if at >= start + size:
            break
    due[rank] += max(0, start + size - at)  # shares are rounded
    taker = max(due, key=lambda rank: (due[rank] + debt.get(rank, 0), -rank))
    for rank, share in due.items():
        debt[rank] = debt.get(rank, 0) + share - size * (rank == taker)
    return taker
