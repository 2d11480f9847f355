"""Copies between strided views, as boxes of the two tensors that are viewed.

A ``Strided`` view says where the elements of a tensor lie in a storage. A copy pairs the elements
of two views of equal sizes. ``pairs`` cuts it into parts that are a box of either tensor, dims
possibly in another order, as ``narrow``, ``chunk``, ``select``, ``t``, ``view`` and slices with a
step make them.
"""

from collections.abc import Iterator, Sequence
from math import prod
from operator import add
from typing import NamedTuple

MOST_PARTS = 1 << 16  # of one copy: slices with a step are an index each


class Strided(NamedTuple):
    """Offset, sizes and strides in elements of a storage."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def narrowed(self, low: Sequence[int], sizes: Sequence[int]) -> "Strided":
        """Return the part of these sizes that begins at ``low`` in every dim."""
        by = sum(a * b for a, b in zip(low, self.strides, strict=True))
        return Strided(self.offset + by, tuple(sizes), self.strides)


class Region(NamedTuple):
    """A box of a tensor. ``dims``: of the tensor, for each dim of the pair's common order."""

    low: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: tuple[int, ...]


def contiguous(sizes: Sequence[int]) -> Strided:
    """Return a dense row-major view from the storage's start."""
    return Strided(0, tuple(sizes), tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes))))


def flattened(index: Sequence[int], shape: Sequence[int], leading: int) -> tuple[int, ...]:
    """Return an index of a tensor whose first ``leading`` + 1 dims count as one."""
    rows = 0
    for at, size in zip(index[: leading + 1], shape[: leading + 1], strict=True):
        rows = rows * size + at
    return (rows, *index[leading + 1 :])


Two = tuple[Strided, Strided]


def pairs(
    to: Strided, whole_to: Strided, of: Strided, whole_of: Strided
) -> Iterator[tuple[Region, Region]]:
    """Yield the boxes of both tensors (``whole_to``, ``whole_of``) that a copy pairs.

    ValueError if a view is no set of boxes, or of too many.
    """
    for each in _split(_merged((to, of)), (whole_to, whole_of), [MOST_PARTS]):
        yield _part(each[0], whole_to), _part(each[1], whole_of)


def through(two: Two, whole: Strided, copy: Two) -> Iterator[Two]:
    """Follow a copy by the copy that filled its source: yield where its parts come from.

    ``two``: the copy, whose second view is of a tensor ``whole``. ``copy``: into a part of that
    tensor, of another one.
    """
    for to, of in _split(_merged(two), (None, whole), [MOST_PARTS]):
        asked = _part(of, whole)
        for into, source in _split(_merged(copy), (whole, None), [MOST_PARTS]):
            there = _part(into, whole)
            low = [*map(max, asked.low, there.low)]
            ends = map(min, map(add, asked.low, asked.sizes), map(add, there.low, there.sizes))
            sizes = [end - first for first, end in zip(low, ends, strict=True)]
            if min(sizes, default=1) < 1:
                continue
            strides = dict(zip(there.dims, source.strides, strict=True))
            by = [
                (at - begin) * strides.get(dim, 0)
                for dim, (at, begin) in enumerate(zip(low, there.low, strict=True))
            ]
            kept = tuple(sizes[dim] for dim in asked.dims)
            start = [low[dim] - asked.low[dim] for dim in asked.dims]
            yield (
                to.narrowed(start, kept),
                Strided(
                    source.offset + sum(by), kept, tuple(strides.get(d, 0) for d in asked.dims)
                ),
            )


def _merged(views: Two) -> Two:
    """Merge neighbouring dims that are one run in both views; drop dims of 1."""
    kept: list[tuple[int, int, int]] = []  # size, and both strides
    for size, *strides in zip(views[0].sizes, views[0].strides, views[1].strides, strict=True):
        if size == 1:
            continue
        if kept and all(a == b * size for a, b in zip(kept[-1][1:], strides, strict=True)):
            size *= kept.pop()[0]
        kept.append((size, strides[0], strides[1]))
    sizes = tuple(size for size, _, _ in kept)
    return (
        Strided(views[0].offset, sizes, tuple(stride for _, stride, _ in kept)),
        Strided(views[1].offset, sizes, tuple(stride for _, _, stride in kept)),
    )


def _split(
    views: Two, wholes: tuple[Strided | None, Strided | None], left: list[int]
) -> Iterator[Two]:
    """Split dims until each lies along one dim of either tensor, inside its bounds."""
    for view, whole in zip(views, wholes, strict=True):
        for dim in range(len(view.sizes) if whole else 0):
            assert whole is not None
            if parts := _parts(view, dim, whole):
                for part in parts:
                    yield from _split(_cut(views, dim, *part), wholes, left)
                return
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"it is copied in more than {MOST_PARTS} pieces")
    yield views


def _parts(view: Strided, dim: int, whole: Strided) -> list[tuple[int, int, int]]:
    """Return how to cut a dim that does not lie along one of the tensor: the first index, how many
    in a row, and how often these; nothing if it does lie so."""
    size, along = view.sizes[dim], _along(view.strides[dim], whole)
    if along is None:  # a step, or one element for all
        if size > MOST_PARTS:
            raise ValueError(f"it is copied in more than {MOST_PARTS} pieces")
        return [(index, 1, 1) for index in range(size)]
    row = whole.sizes[along]
    room = row - _place(view.offset, whole)[along]
    if size <= room:
        return []
    first = room if room < row else 0
    times, rest = divmod(size - first, row)
    parts = [(0, first, 1), (first, row, times), (size - rest, rest, 1)]
    return [part for part in parts if part[1] and part[2]]


def _cut(views: Two, dim: int, low: int, size: int, times: int) -> Two:
    """Return part of a dim of both views: ``times`` rows of ``size`` indices, from ``low`` on."""

    def of(view: Strided) -> Strided:
        stride = view.strides[dim]
        new = [(times, stride * size), (size, stride)]
        new = [each for each in new if each[0] > 1]
        return Strided(
            view.offset + low * stride,
            (*view.sizes[:dim], *(each for each, _ in new), *view.sizes[dim + 1 :]),
            (*view.strides[:dim], *(each for _, each in new), *view.strides[dim + 1 :]),
        )

    return of(views[0]), of(views[1])


def _along(stride: int, whole: Strided) -> int | None:
    """Return the dim of the tensor with this stride."""
    dims = zip(whole.sizes, whole.strides, strict=True)
    return next((dim for dim, each in enumerate(dims) if each[0] > 1 and each[1] == stride), None)


def _place(offset: int, whole: Strided) -> tuple[int, ...]:
    """Return the index in every dim of the tensor's element at this offset of its storage."""
    left, low = offset - whole.offset, [0] * len(whole.sizes)
    for dim in sorted(range(len(low)), key=lambda dim: -whole.strides[dim]):
        if whole.sizes[dim] > 1:
            low[dim], left = divmod(left, whole.strides[dim])
    if left or any(not 0 <= at < size for at, size in zip(low, whole.sizes, strict=True)):
        raise ValueError("it is copied to or from outside its tensor")
    return tuple(low)


def _part(view: Strided, whole: Strided) -> Region:
    dims = tuple(along for stride in view.strides if (along := _along(stride, whole)) is not None)
    assert len(set(dims)) == len(view.sizes), (view, whole)
    sizes = [1] * len(whole.sizes)
    for dim, size in zip(dims, view.sizes, strict=True):
        sizes[dim] = size
    return Region(_place(view.offset, whole), tuple(sizes), dims)
