"""The layout of a logical tensor: which index ranges each rank holds, and where in its buffer.

A ``Box`` is a range of indices in every dim, [low, high). A ``Piece`` says that a rank holds a box
of the logical tensor at an offset of its local buffer. A layout is a set of pieces. It describes
whole copies, slices, strided or packed slices (gate and up projections fused in one weight), uneven
chunks, replicas, and padding (no piece holds indices beyond the logical tensor). Two layouts of the
same logical shape can be intersected, whatever made them.
"""

import itertools
from collections.abc import Iterator, Sequence
from math import prod
from operator import add
from typing import NamedTuple


class Box(NamedTuple):
    """Indices [low, high) in every dim; a scalar has no dims and one element."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in zip(self.low, self.high, strict=True))

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """The common indices, or None when there are none."""
        low = tuple(map(max, self.low, other.low))
        high = tuple(map(min, self.high, other.high))
        return Box(low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None

    def shifted(self, by: Sequence[int]) -> "Box":
        low = tuple(index + b for index, b in zip(self.low, by, strict=True))
        high = tuple(index + b for index, b in zip(self.high, by, strict=True))
        return Box(low, high)


class Piece(NamedTuple):
    """``rank`` holds ``box`` of the logical tensor at ``offset`` of its local buffer.

    ``buffer`` names the rank's tensor, if its name is not the logical tensor's: a fused or stacked
    weight holds pieces of several logical tensors. If it has more dims than the logical tensor, its
    leading dims count as flattened; if fewer, it counts as having leading dims of 1.
    """

    rank: int
    box: Box
    offset: tuple[int, ...]
    buffer: str = ""

    def local(self, box: Box) -> Box:
        """The place of a part of this piece in the rank's buffer."""
        return box.shifted([o - low for o, low in zip(self.offset, self.box.low, strict=True)])


Layout = tuple[Piece, ...]


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def stretches(shape: Sequence[int], first: int, last: int) -> Iterator[Box]:
    """Yield the boxes that hold the elements [first, last), counted row by row, in their order."""
    if len(shape) < 2:
        yield Box((first,) * len(shape), (last,) * len(shape))
        return
    each = prod(shape[1:])
    while first < last:
        row, at = divmod(first, each)
        rows = (last - first) // each if at == 0 else 0
        if rows:
            yield Box((row, *(0 for _ in shape[1:])), (row + rows, *shape[1:]))
            first += rows * each
        else:
            end = min(last, (row + 1) * each)
            for box in stretches(shape[1:], at, at + end - first):
                yield Box((row, *box.low), (row + 1, *box.high))
            first = end


def replicated(shape: Sequence[int], ranks: Sequence[int]) -> Layout:
    """Every rank holds all of it."""
    return tuple(Piece(rank, whole(shape), (0,) * len(shape)) for rank in ranks)


def moved(
    layout: Layout, *, ranks: int = 0, offset: Sequence[int] = (), buffer: str | None = None
) -> Layout:
    """Return the same pieces, with ``ranks`` and ``offset`` added, in a buffer of this name.

    This puts fused weights together: move q, k and v one behind the other into one buffer.
    """
    return tuple(
        Piece(
            piece.rank + ranks,
            piece.box,
            tuple(map(add, piece.offset, offset)) if offset else piece.offset,
            piece.buffer if buffer is None else buffer,
        )
        for piece in layout
    )


def cropped(layout: Layout, dim: int, low: int, high: int) -> Layout:
    """Keep only the indices [low, high) of ``dim`` of the buffers."""
    kept = []
    for piece in layout:
        start = piece.offset[dim]
        first, last = max(low, start), min(high, start + piece.box.shape[dim])
        if first < last:
            shift = piece.box.low[dim] - start
            box = narrowed(piece.box, dim, first + shift, last + shift)
            offset = (*piece.offset[:dim], first - low, *piece.offset[dim + 1 :])
            kept.append(Piece(piece.rank, box, offset, piece.buffer))
    return tuple(kept)


def narrowed(box: Box, dim: int, low: int, high: int) -> Box:
    """Return ``box`` with [low, high) in ``dim``."""
    return Box(
        (*box.low[:dim], low, *box.low[dim + 1 :]), (*box.high[:dim], high, *box.high[dim + 1 :])
    )


def chunk_bounds(size: int, parts: int, which: int) -> tuple[int, int]:
    """[low, high) of one of torch.chunk's: ceil(size / parts) each, then the rest, then none."""
    each = -(-size // parts)
    return min(size, which * each), min(size, (which + 1) * each)


def chunks(size: int, parts: int) -> list[int]:
    """Return the sizes of all parts of torch.chunk."""
    bounds = (chunk_bounds(size, parts, which) for which in range(parts))
    return [high - low for low, high in bounds]


def chunk_of(box: Box, dim: int, parts: int, which: int) -> Box:
    """One of torch.chunk's parts of ``box`` in ``dim``, perhaps empty."""
    low, high = chunk_bounds(box.shape[dim], parts, which)
    return narrowed(box, dim, box.low[dim] + low, box.low[dim] + high)


def sharded(
    shape: Sequence[int],
    dim: int,
    ranks: Sequence[int],
    *,
    sizes: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
) -> Layout:
    """``dim`` cut into one range a rank, in the order of ``ranks``.

    ``sizes``: extents of the ranges (uneven chunks); by default those of torch.chunk.
    ``blocks``: ``dim`` is a concatenation of blocks of these extents and every block is cut by
    itself; a rank's buffer holds its parts one after the other. [n, n] is Megatron's stride 2
    (gate and up), [q, k, v] a packed attention projection.
    """
    size = shape[dim]
    blocks = [size] if blocks is None else list(blocks)
    if sum(blocks) != size:
        raise ValueError(f"blocks = {blocks}: must add up to the {size} indices of dim {dim}")
    if sizes is not None and (len(blocks) > 1 or sum(sizes) != size or len(sizes) != len(ranks)):
        raise ValueError(
            f"sizes = {list(sizes)}: must be one for each of {len(ranks)} ranks, add up to {size}, "
            "and go without blocks"
        )
    pieces, start = [], 0
    filled = dict.fromkeys(ranks, 0)
    for block in blocks:
        extents = list(sizes) if sizes is not None else chunks(block, len(ranks))
        edges = list(itertools.accumulate(extents, initial=start))
        for rank, low, high in zip(ranks, edges, edges[1:], strict=False):
            if low < high:
                offset = tuple(filled[rank] if d == dim else 0 for d in range(len(shape)))
                pieces.append(Piece(rank, narrowed(whole(shape), dim, low, high), offset))
                filled[rank] += high - low
        start += block
    return tuple(pieces)


def placed(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[int | None]
) -> Layout:
    """DTensor's layout: for each mesh axis the dim it shards, or None where it replicates.

    Ranks fill the mesh row by row. As in DTensor, an earlier axis cuts first and every cut is
    torch.chunk's, so the last ranks may hold less, or nothing.
    """
    if len(mesh_shape) != len(placements):
        raise ValueError(
            f"placements = {placements}: must be one for each of {len(mesh_shape)} axes"
        )
    pieces = []
    for rank, place in enumerate(itertools.product(*map(range, mesh_shape))):
        box = whole(shape)
        for axis, dim in enumerate(placements):
            if dim is not None:
                box = chunk_of(box, dim, mesh_shape[axis], place[axis])
        if all(box.shape[dim] for dim in placements if dim is not None):
            pieces.append(Piece(rank, box, (0,) * len(shape)))
    return tuple(pieces)
