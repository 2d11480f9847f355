"""From two layouts to the moves between them, each destination element exactly once.

Every destination piece is cut along the edges of the source pieces that overlap it. A cell has
one set of owners; it is taken from the destination rank itself if it is an owner (no wire bytes,
so wire bytes are minimal), else from a rank of the same host, else from the owner that has sent
least so far. Neighbouring cells of one sender are merged again. Pure and deterministic: all
ranks that plan the same layouts get the same list.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from meshwise.reshard.regions import Box, Layout, Piece


class Move(NamedTuple):
    """``source`` sends the logical ``box``: ``read`` of its buffer becomes ``write`` of another."""

    source: int
    destination: int
    box: Box
    read: Box
    write: Box

    @property
    def is_local(self) -> bool:
        return self.source == self.destination


def transfer_list(
    source: Layout, destination: Layout, host_of: Callable[[int], int] = lambda rank: 0
) -> tuple[Move, ...]:
    """The moves that fill ``destination``; what no source piece holds is a ValueError."""
    sent: dict[int, int] = {}
    moves: list[Move] = []
    for piece in destination:
        taken = []
        for cell in cells(piece.box, source):
            owners = [p for p in source if cell.intersect(p.box) == cell]
            if not owners:
                raise ValueError(
                    f"no source rank holds indices {cell.low} to {cell.high}, which rank "
                    f"{piece.rank} needs; do the layouts describe the same logical tensor?"
                )
            owner = min(owners, key=lambda p: _cost(p.rank, piece.rank, sent, host_of))
            if owner.rank != piece.rank:
                sent[owner.rank] = sent.get(owner.rank, 0) + cell.num_elements
            taken.append((owner, cell))
        moves += _merged(piece, taken)
    return tuple(moves)


def _cost(
    owner: int, needer: int, sent: dict[int, int], host_of: Callable[[int], int]
) -> tuple[bool, bool, int, int]:
    return (owner != needer, host_of(owner) != host_of(needer), sent.get(owner, 0), owner)


def cells(box: Box, source: Layout) -> Iterator[Box]:
    """``box`` cut along every edge of the source pieces that overlap it, in row-major order."""
    overlaps = [overlap for piece in source if (overlap := box.intersect(piece.box))]
    ranges = []
    for dim in range(len(box.low)):
        edges = {box.low[dim], box.high[dim]}
        edges.update(overlap.low[dim] for overlap in overlaps)
        edges.update(overlap.high[dim] for overlap in overlaps)
        ranges.append(list(itertools.pairwise(sorted(edges))))
    for ranges_of_cell in itertools.product(*ranges):
        yield Box(
            tuple(low for low, _ in ranges_of_cell), tuple(high for _, high in ranges_of_cell)
        )


def _merged(piece: Piece, taken: list[tuple[Piece, Box]]) -> list[Move]:
    """Join neighbours of one sender that are neighbours in both buffers, dim by dim."""
    groups: dict[Piece, list[Box]] = {}
    for owner, cell in taken:
        groups.setdefault(owner, []).append(cell)
    moves = []
    for owner, boxes in groups.items():
        for dim in reversed(range(len(piece.box.low))):
            boxes = _joined(boxes, dim)
        moves += [
            Move(owner.rank, piece.rank, box, owner.local(box), piece.local(box)) for box in boxes
        ]
    return moves


def _joined(boxes: list[Box], dim: int) -> list[Box]:
    """Boxes that differ only in ``dim`` and touch there become one."""
    joined: list[Box] = []
    for box in sorted(boxes, key=lambda b: (_without(b, dim), b.low[dim])):
        previous = joined[-1] if joined else None
        touches = previous is not None and previous.high[dim] == box.low[dim]
        if previous is not None and touches and _without(previous, dim) == _without(box, dim):
            high = (*previous.high[:dim], box.high[dim], *previous.high[dim + 1 :])
            joined[-1] = Box(previous.low, high)
        else:
            joined.append(box)
    return joined


def _without(box: Box, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.low[:dim] + box.low[dim + 1 :], box.high[:dim] + box.high[dim + 1 :]
