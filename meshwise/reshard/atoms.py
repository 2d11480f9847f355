"""Cut a logical tensor wherever any rank's holdings begin or end, on either side.

In: a source and a destination layout. Out: atoms, the boxes of the common refinement. A rank holds,
or needs, an atom entirely or not at all. Layers of a model are laid out alike, so tensors whose
layouts differ only in the names of buffers are cut once.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from meshwise.reshard.regions import Box, Layout, narrowed


class Atom(NamedTuple):
    """Numbers of the source pieces that hold ``box`` and of the destination pieces that need it."""

    box: Box
    owners: tuple[int, ...]
    needers: tuple[int, ...]


class Atoms(NamedTuple):
    """The layouts of one tensor and its atoms. Tensors with equal layouts share the atoms."""

    source: Layout
    destination: Layout
    atoms: tuple[Atom, ...]


def cuts(
    pairs: Sequence[tuple[Layout, Layout]], names: Sequence[str] = ()
) -> tuple[list[Atoms], list[int]]:
    """Return the distinct cuts, and the number of the cut of each (source, destination).

    ValueError if a rank needs what no rank holds, with the tensor's name if ``names`` are given.
    """
    found: list[Atoms] = []
    known: dict[tuple[object, object], int] = {}
    keys: dict[int, object] = {}  # by identity: layouts are often shared
    kinds = []
    for number, (source, destination) in enumerate(pairs):
        for layout in (source, destination):
            if id(layout) not in keys:
                keys[id(layout)] = _unnamed(layout)
        key = keys[id(source)], keys[id(destination)]
        if key not in known:
            known[key] = len(found)
            found.append(Atoms(source, destination, tuple(_atoms(source, destination))))
            _check_held(found[-1], f"{names[number]}: " if names else "")
        kinds.append(known[key])
    return found, kinds


def weighed(kinds: Iterable[int], itemsizes: Iterable[int]) -> Counter[int]:
    """Sum, for each cut, the bytes of one element over all tensors of that cut."""
    found = Counter[int]()
    for kind, itemsize in zip(kinds, itemsizes, strict=True):
        found[kind] += itemsize
    return found


def _unnamed(layout: Layout) -> object:
    """Strip a layout of its buffers' names."""
    numbers: dict[str, int] = {}
    return tuple(
        (rank, box, offset, numbers.setdefault(buffer, len(numbers)))
        for rank, box, offset, buffer in layout
    )


def _check_held(cut: Atoms, prefix: str) -> None:
    for box, owners, needers in cut.atoms:
        if not owners:
            rank = cut.destination[needers[0]].rank
            raise ValueError(
                f"{prefix}no source rank holds indices {box.low} to {box.high}, which rank {rank} "
                "needs; do the layouts describe the same logical tensor?"
            )


def _atoms(source: Layout, destination: Layout) -> Iterator[Atom]:
    held = _by_box(source)
    needed = _by_box(destination)
    if not needed:
        return
    around = Box(
        tuple(map(min, zip(*(box.low for box in needed), strict=True))),
        tuple(map(max, zip(*(box.high for box in needed), strict=True))),
    )
    boxes = [*held, *needed]
    pieces = [*held.values(), *needed.values()]
    overlaps = [number for number, box in enumerate(boxes) if around.intersect(box)]
    for cell, inside in _cells(around, boxes, overlaps, len(held), 0):
        parts: tuple[list[int], list[int]] = [], []
        for number in inside:
            parts[number >= len(held)].extend(pieces[number])
        yield Atom(cell, tuple(sorted(parts[0])), tuple(sorted(parts[1])))


def _by_box(layout: Layout) -> dict[Box, list[int]]:
    """Group the numbers of pieces by box, without empty boxes; replicas have one box."""
    found: dict[Box, list[int]] = {}
    for number, piece in enumerate(layout):
        found.setdefault(piece.box, []).append(number)
    return {box: numbers for box, numbers in found.items() if box.num_elements}


def _cells(
    cell: Box, boxes: Sequence[Box], inside: list[int], num_held: int, dim: int
) -> Iterator[tuple[Box, list[int]]]:
    """Cut dim by dim, each slab only along the edges of boxes that reach into it. Boxes from
    ``num_held`` on are needed ones; a slab without any is left out. ``inside`` ascends."""
    if not inside or inside[-1] < num_held:
        return
    if dim == len(cell.low):
        yield cell, inside
        return
    low, high = cell.low[dim], cell.high[dim]
    spans = [(max(low, boxes[i].low[dim]), min(high, boxes[i].high[dim])) for i in inside]
    edges = sorted({edge for span in spans for edge in span})
    if len(edges) == 2 and edges == [low, high]:
        yield from _cells(cell, boxes, inside, num_held, dim + 1)
        return
    place = {edge: number for number, edge in enumerate(edges)}
    slabs: list[list[int]] = [[] for _ in edges[1:]]
    for i, (first, last) in zip(inside, spans, strict=True):
        for slab in range(place[first], place[last]):
            slabs[slab].append(i)
    for (first, last), numbers in zip(pairwise(edges), slabs, strict=True):
        yield from _cells(narrowed(cell, dim, first, last), boxes, numbers, num_held, dim + 1)
