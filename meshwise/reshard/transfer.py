"""Plan the moves from what ranks hold to what they shall hold, each element exactly once.

In: the source's and the destination's holdings. Out: a ``Transfer``: who sends which box of which
tensor to whom. Tensors are cut into atoms (``atoms``). A rank copies the atoms that it already
holds, so bytes on the wire are minimal; ``senders`` chooses who sends the others. Neighbours that
one rank sends to another are merged again. Pure and deterministic: all ranks that plan the same
holdings get the same moves, and ``digest`` tells whether they did. ``plan`` returns a plan only
after ``check`` has proved that it covers the destination.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwise.reshard.atoms import Atoms, cuts, weighed
from meshwise.reshard.flow import assigned
from meshwise.reshard.holdings import ITEMSIZES, HeldTensor, Holdings
from meshwise.reshard.regions import Box, Layout, Piece, narrowed
from meshwise.reshard.senders import Hop, Links, Multicast, choose

PEER_BYTES_PER_S = 373e9  # one H200's peer copies, benchmarks/2026-11-21-moving-weights

_FLOATS = {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8_e5m2"}  # what convert may round
Rate = Callable[[int], float]


class Move(NamedTuple):
    """``source`` sends the logical ``box``, from ``read`` of its buffer to ``write`` of another.

    ``taken`` and ``put`` name the two buffers, as ``Piece.buffer`` does.
    """

    source: int
    destination: int
    box: Box
    read: Box
    write: Box
    taken: str = ""
    put: str = ""

    @property
    def is_local(self) -> bool:
        return self.source == self.destination


class Named(NamedTuple):
    """A move of the tensor with this number."""

    tensor: int
    move: Move


class Transfer(NamedTuple):
    """``names`` of the tensors, bytes of their elements on the wire (the destination's), and the
    dtypes of both sides.

    The moves of a stage are in the order of the tensors and independent of each other. A second
    stage begins when the first has ended. In it ranks pass on what they received, so it reads the
    destination's buffers. ``unused``: source tensors that the destination does not hold.
    """

    names: tuple[str, ...]
    itemsizes: tuple[int, ...]
    dtypes: tuple[tuple[str, str], ...]
    stages: tuple[tuple[Named, ...], ...]
    unused: tuple[str, ...] = ()


def transfer_plan(
    source: Holdings,
    destination: Holdings,
    *,
    host_of: Callable[[int], int] = lambda rank: 0,
    bytes_per_s_out: Rate | None = None,
    bytes_per_s_between_hosts: Rate | None = None,
    multicast: Multicast = "auto",
    convert: bool = False,
    only: Sequence[str] = (),
) -> Transfer:
    """Plan the moves that fill the destination. ValueError lists all that does not fit.

    A rank that needs the same box twice receives it once and copies it in the second stage, unless
    ``multicast`` is "never". ``only``: patterns (``fnmatch``) of the tensors to move.
    """
    names = _selected(destination, only)
    _check_same(names, source, destination, convert)
    pairs = [(source[name].layout, destination[name].layout) for name in names]
    itemsizes = [ITEMSIZES[destination[name].dtype] for name in names]
    within = _positive(bytes_per_s_out or (lambda rank: PEER_BYTES_PER_S))
    between = _positive(bytes_per_s_between_hosts) if bytes_per_s_between_hosts else within
    links = Links(host_of, within, between)
    transfer = Transfer(
        tuple(names),
        tuple(itemsizes),
        tuple((source[name].dtype, destination[name].dtype) for name in names),
        _stages(pairs, itemsizes, links, multicast, names),
        tuple(sorted(name for name in source if name not in destination and fits(name, only))),
    )
    check(transfer, destination)
    return transfer


def transfer_list(
    source: Layout, destination: Layout, host_of: Callable[[int], int] = lambda rank: 0
) -> tuple[Move, ...]:
    """Return one tensor's moves, in one stage. ValueError if no source piece holds an index."""
    links = Links(host_of, lambda rank: 1.0, lambda rank: 1.0)
    (stage,) = _stages([(source, destination)], [1], links, "never", [])
    return tuple(move for _, move in stage)


def _positive(rate: Rate) -> Rate:
    def checked(rank: int) -> float:
        if not 0 < (found := rate(rank)) < inf:
            raise ValueError(f"bytes_per_s of rank {rank} = {found}: must be above 0 and finite")
        return found

    return checked


def fits(name: str, only: Sequence[str]) -> bool:
    """Whether a tensor is to be moved."""
    return not only or any(fnmatchcase(name, pattern) for pattern in only)


def _selected(destination: Holdings, only: Sequence[str]) -> list[str]:
    if isinstance(only, str):
        raise ValueError(f"only = {only!r}: must be a list of patterns, [{only!r}]")
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in destination):
            near = _nearest(pattern, destination)
            raise ValueError(f"only = {pattern!r}: matches no tensor of the destination{near}")
    return sorted(name for name in destination if fits(name, only))


def _nearest(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, list(names), 1)
    return f"; the nearest name is {near[0]!r}" if near else ""


def _check_same(names: list[str], source: Holdings, destination: Holdings, convert: bool) -> None:
    found = []
    for name in names:
        if name not in source:
            found.append(f"{name}: the source has none{_nearest(name, source)}")
        else:
            found += _differences(name, source[name], destination[name], convert)
    if found:
        raise ValueError(f"{len(found)} tensors do not fit: " + "; ".join(found))


def _differences(
    name: str, source: HeldTensor, destination: HeldTensor, convert: bool
) -> Iterator[str]:
    if tuple(source.shape) != tuple(destination.shape):
        yield (
            f"{name}: shape {tuple(source.shape)} in the source, {tuple(destination.shape)} in the "
            "destination; describe the same model on both sides, without padding"
        )
    if unknown := sorted({source.dtype, destination.dtype} - ITEMSIZES.keys()):
        yield f"{name}: dtype {unknown[0]!r} is none of {', '.join(ITEMSIZES)}"
    elif (before := source.dtype) != (after := destination.dtype):
        told = f"{name}: dtype {before} in the source, {after} in the destination"
        if not convert:
            yield f"{told}; allow it by convert=True"
        elif not {before, after} <= _FLOATS:
            floats = ", ".join(sorted(_FLOATS))
            yield f"{told}; convert=True is for {floats}: give both sides the same"


def _stages(
    pairs: Sequence[tuple[Layout, Layout]],
    itemsizes: Sequence[int],
    links: Links,
    multicast: Multicast,
    names: Sequence[str],
) -> tuple[tuple[Named, ...], ...]:
    found, kinds = cuts(pairs, names)
    hops = choose(found, kinds, itemsizes, links, multicast)
    passed_on = [(destination, destination) for _, destination in pairs]
    cuts_again = [cut._replace(source=cut.destination) for cut in found]
    first = tuple(_moves(pairs, found, kinds, hops.shared, hops.own))
    second = tuple(_moves(passed_on, cuts_again, kinds, hops.second_shared, hops.second_own))
    return (first, second) if second else (first,)


_Part = tuple[int, int, Box, Box, Box]  # piece numbers, and a move's boxes


def _moves(
    pairs: Sequence[tuple[Layout, Layout]],
    found: Sequence[Atoms],
    kinds: Sequence[int],
    shared: Sequence[list[Hop]],
    own: Sequence[list[Hop]],
) -> Iterator[Named]:
    """Yield the moves of all tensors. Those of one kind and with the same senders share boxes."""
    known: dict[tuple[int, tuple[Hop, ...]], list[_Part]] = {}
    for tensor, ((source, destination), kind) in enumerate(zip(pairs, kinds, strict=True)):
        key = kind, tuple(own[tensor])
        if key not in known:
            known[key] = _merged(found[kind], [*shared[kind], *own[tensor]])
        for i, j, box, read, write in known[key]:
            a, b = source[i], destination[j]
            yield Named(tensor, Move(a.rank, b.rank, box, read, write, a.buffer, b.buffer))


def _merged(cut: Atoms, hops: Iterable[Hop]) -> list[_Part]:
    """Join boxes that are neighbours in the tensor and in both buffers, dim by dim."""
    groups: dict[object, list[Hop]] = {}
    for hop in hops:
        a, b = cut.source[hop.source], cut.destination[hop.destination]
        key = a.rank, a.buffer, _shift(a), b.rank, b.buffer, _shift(b)
        groups.setdefault(key, []).append(hop)
    parts = []
    for group in groups.values():
        i, j, _ = min(group, key=lambda hop: hop[1:])
        boxes = [hop.box for hop in group]
        for dim in reversed(range(len(boxes[0].low))):
            boxes = _joined(boxes, dim)
        a, b = cut.source[i], cut.destination[j]
        parts += [(i, j, box, a.local(box), b.local(box)) for box in boxes]
    return sorted(parts, key=lambda part: part[1:])


def _shift(piece: Piece) -> tuple[int, ...]:
    return tuple(o - low for o, low in zip(piece.offset, piece.box.low, strict=True))


def _joined(boxes: list[Box], dim: int) -> list[Box]:
    """Join boxes that touch in ``dim`` and are equal in every other dim."""
    joined: list[Box] = []
    for box in sorted(boxes, key=lambda b: (_without(b, dim), b.low[dim])):
        previous = joined[-1] if joined else None
        touches = previous is not None and previous.high[dim] == box.low[dim]
        if previous is not None and touches and _without(previous, dim) == _without(box, dim):
            joined[-1] = narrowed(previous, dim, previous.low[dim], box.high[dim])
        else:
            joined.append(box)
    return joined


def _without(box: Box, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.low[:dim] + box.low[dim + 1 :], box.high[:dim] + box.high[dim + 1 :]


def loads(transfer: Transfer) -> list[npt.NDArray[np.int64]]:
    """Return for each stage the bytes by source and destination; copies are on the diagonal."""
    ends = (max(m.source, m.destination) for stage in transfer.stages for _, m in stage)
    ranks = 1 + max(ends, default=-1)
    elements: dict[Box, int] = {}  # layers share boxes
    found = []
    for stage in transfer.stages:
        rows = [[0] * ranks for _ in range(ranks)]
        for tensor, move in stage:
            if move.box not in elements:
                elements[move.box] = move.box.num_elements
            size = elements[move.box] * transfer.itemsizes[tensor]
            rows[move.source][move.destination] += size
        found.append(np.array(rows, np.int64).reshape(ranks, ranks))
    return found


def digest(transfer: Transfer) -> str:
    """Hash a plan. Two ranks have the same digest if, and only if, they made the same plan."""
    found = hashlib.sha256(repr(transfer._replace(stages=())).encode())
    for stage in transfer.stages:
        numbers: dict[object, int] = {}  # of boxes and names, in order of appearance
        words = array("q")
        for tensor, (source, destination, *rest) in stage:
            words.extend((tensor, source, destination))
            words.extend([numbers.setdefault(part, len(numbers)) for part in rest])
        found.update(words)
        found.update(repr((len(stage), list(numbers))).encode())
    return found.hexdigest()


Place = tuple[int, str]  # rank and buffer


def check(transfer: Transfer, destination: Holdings) -> None:
    """Prove that every element of the destination's tensors is written exactly once, with its own
    index, and that a second stage reads what the first has written."""
    _check_buffers(transfer.names, destination)
    written: list[dict[Place, list[Move]]] = [{} for _ in transfer.names]
    for number, stage in enumerate(transfer.stages):
        for tensor, move in stage if number else ():
            before = [m.write for m in written[tensor].get((move.source, move.taken), ())]
            held = sum(b.num_elements for box in before if (b := move.read.intersect(box)))
            if held != move.read.num_elements:
                raise ValueError(f"{transfer.names[tensor]}: {move} reads what is not yet written")
        for tensor, move in stage:
            written[tensor].setdefault((move.destination, move.put), []).append(move)
    proved: set[object] = set()
    for name, writes in zip(transfer.names, written, strict=True):
        pieces: dict[Place, list[Piece]] = {}
        for piece in destination[name].layout:
            pieces.setdefault((piece.rank, piece.buffer), []).append(piece)
        for place in pieces.keys() | writes.keys():
            parts, moves = pieces.get(place, []), writes.get(place, [])
            key = tuple((p.box, p.offset) for p in parts), tuple((m.box, m.write) for m in moves)
            if key not in proved and not _fills(moves, parts):
                raise ValueError(
                    f"{name}: the plan does not write rank {place[0]}'s {place[1] or name} "
                    "exactly once"
                )
            proved.add(key)


def _fills(moves: list[Move], pieces: list[Piece]) -> bool:
    """Whether moves do not overlap, lie within the pieces and fill them."""
    size = sum(piece.box.num_elements for piece in pieces)
    if size != sum(move.write.num_elements for move in moves):
        return False
    within = 0
    for move in moves:
        for piece in pieces:
            common = move.box.intersect(piece.box)
            if common and piece.local(move.box) == move.write:
                within += common.num_elements
    return within == size and _overlap([move.write for move in moves]) is None


def _check_buffers(names: Iterable[str], destination: Holdings) -> None:
    """Check the destination's own description: no two pieces overlap in a buffer."""
    held: dict[tuple[int, str, int], list[Piece]] = {}
    for name in names:
        for piece in destination[name].layout:
            place = piece.rank, piece.buffer or name, len(piece.offset)
            held.setdefault(place, []).append(piece)
    proved: set[object] = set()
    for (rank, buffer, _), pieces in held.items():
        key = tuple((piece.box, piece.offset) for piece in pieces)
        if len(pieces) > 1 and key not in proved:
            if found := _overlap([piece.local(piece.box) for piece in pieces]):
                raise ValueError(
                    f"the destination's buffer {buffer} of rank {rank} holds two pieces at "
                    f"{found.low} to {found.high}; give every piece its own offset"
                )
            proved.add(key)


def _overlap(boxes: list[Box]) -> Box | None:
    """Find an overlap of two boxes, by a sweep along the dim with the most distinct starts."""
    dims = range(len(boxes[0].low)) if boxes else ()
    dim = max(dims, key=lambda d: len({box.low[d] for box in boxes}), default=None)
    active: list[Box] = []
    for box in boxes if dim is None else sorted(boxes, key=lambda b: b.low[dim]):
        if dim is not None:
            active = [other for other in active if other.high[dim] > box.low[dim]]
        for other in active:
            if common := box.intersect(other):
                return common
        active.append(box)
    return None


def place(
    source: Holdings, destination: Holdings, *, groups: Sequence[Sequence[int]] | None = None
) -> tuple[int, ...]:
    """Choose the rank that takes each rank's part of the destination, so that the fewest bytes are
    sent: an assignment problem, solved exactly. Ranks that gain nothing stay.

    ``groups``: sets of ranks that may change places with each other; by default all ranks of the
    destination. A group may name ranks that hold nothing of the destination yet.
    """
    names = [name for name in destination if name in source]
    pairs = [(source[name].layout, destination[name].layout) for name in names]
    found, kinds = cuts(pairs, names)
    weights = weighed(kinds, (ITEMSIZES[destination[name].dtype] for name in names))
    own = sorted({piece.rank for cut in found for piece in cut.destination})
    groups = [own] if groups is None else groups
    members = [rank for group in groups for rank in group]
    if len(set(members)) < len(members):
        raise ValueError(f"groups = {groups}: a rank may be in one group only")
    holding = (piece.rank for cut in found for piece in cut.source)
    ranks = 1 + max([*holding, *own, *members], default=-1)
    kept = np.zeros((ranks, ranks), np.int64)
    for kind, cut in enumerate(found):
        for box, owners, needers in cut.atoms:
            holders = sorted({cut.source[number].rank for number in owners})
            roles = sorted({cut.destination[number].rank for number in needers})
            kept[np.ix_(holders, roles)] += box.num_elements * weights[kind]
    permutation = list(range(ranks))
    for group in map(list, groups):
        costs = -kept[np.ix_(group, group)].T * (len(group) + 1) - np.eye(len(group), dtype=int)
        for role, rank in zip(group, assigned(costs), strict=True):
            permutation[role] = group[rank]
    return tuple(permutation)


def renumbered(destination: Holdings, permutation: Sequence[int]) -> Holdings:
    """Return the holdings in which ``permutation[r]`` holds rank r's part."""
    known: dict[int, Layout] = {}
    found = {}
    for name, tensor in destination.items():
        layout = tensor.layout
        if id(layout) not in known:
            known[id(layout)] = tuple(p._replace(rank=permutation[p.rank]) for p in layout)
        padded = tuple(p._replace(rank=permutation[p.rank]) for p in tensor.padded)
        found[name] = tensor._replace(layout=known[id(layout)], padded=padded)
    return found
