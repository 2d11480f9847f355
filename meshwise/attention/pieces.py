"""Cut masked attention into few blocks that stock kernels can do.

In: intervals [start, stop) of query and of key positions. Out: pieces. A piece is a rectangle
without a mask (``full``), a square with its lower triangle (``causal``) or a square with its upper
triangle (``anti``), both with their diagonal. ``anti`` becomes causal if the rows of q, k and v are
reversed. Together the pieces hold every attended pair once. Torch-free.

    causal       x <= p
    window W     p - W < x <= p: queries are cut every W, so that each cut sees one triangle of its
                 own keys and one of the W keys before
    documents    p and x lie in one document, [starts[i], starts[i+1])
"""

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from meshwise.attention.shards import Interval


class Mask(NamedTuple):
    """``documents``: where each packed document starts; empty for one document."""

    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] = ()


Kind = Literal["full", "causal", "anti"]


class MaskPiece(NamedTuple):
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: Kind

    @property
    def pairs(self) -> int:
        rows, columns = self.q_stop - self.q_start, self.k_stop - self.k_start
        return rows * columns if self.kind == "full" else rows * (rows + 1) // 2

    def shift(self, q: int, k: int) -> "MaskPiece":
        return MaskPiece(self[0] + q, self[1] + q, self[2] + k, self[3] + k, self.kind)


def between(mask: Mask, queries: Interval, keys: Interval) -> list[MaskPiece]:
    """The pieces of one interval of queries and one of keys, in global positions."""
    found = []
    for first, last in _documents(mask, queries, keys):
        a, b = max(queries[0], first), min(queries[1], last)
        c, d = max(keys[0], first), min(keys[1], last)
        if a >= b or c >= d:
            continue
        if not mask.causal:
            found.append(MaskPiece(a, b, c, d, "full"))
        elif mask.window is None or mask.window >= b - c:
            found += _below(a, b, c, d)
        else:
            found += _band(a, b, c, d, mask.window)
    return found


@functools.lru_cache(4096)
def local_pieces(
    mask: Mask, queries: tuple[Interval, ...], keys: tuple[Interval, ...]
) -> tuple[MaskPiece, ...]:
    """Return the pieces of all intervals of one rank and all of another, in local rows."""
    plain = mask.causal and mask.window is None and mask.documents in ((), (0,))
    if plain and queries == keys and list(keys) == sorted(keys):
        rows = sum(b - a for a, b in keys)  # ascending rows see the rows before: one triangle
        return (MaskPiece(0, rows, 0, rows, "causal"),) if rows else ()
    found: list[MaskPiece] = []
    for (a, b), q_row in _with_rows(queries):
        for (c, d), k_row in _with_rows(keys):
            found += (p.shift(q_row - a, k_row - c) for p in between(mask, (a, b), (c, d)))
    return tuple(_joined(found))


@functools.lru_cache(4096)
def batches(pieces: tuple[MaskPiece, ...]) -> tuple[tuple[MaskPiece, ...], ...]:
    """Group pieces of equal size and kind that share no row; each group is one call."""
    found: dict[tuple[int, int, str], list[list[MaskPiece]]] = {}
    for piece in sorted(pieces):
        shape = (piece.q_stop - piece.q_start, piece.k_stop - piece.k_start, piece.kind)
        open_ones = found.setdefault(shape, [])
        for batch in open_ones:
            if piece.q_start >= batch[-1].q_stop and piece.k_start >= batch[-1].k_stop:
                batch.append(piece)
                break
        else:
            open_ones.append([piece])
    return tuple(tuple(batch) for each in found.values() for batch in each)


def _documents(mask: Mask, queries: Interval, keys: Interval) -> Iterator[Interval]:
    """The documents that reach into both intervals."""
    first, last = max(queries[0], keys[0]), min(queries[1], keys[1])
    if not mask.documents:
        yield min(queries[0], keys[0]), max(queries[1], keys[1])
        return
    starts = mask.documents
    low = bisect.bisect_right(starts, min(first, last - 1)) - 1
    high = bisect.bisect_right(starts, max(first, last - 1))
    for at in range(low, high):
        start = starts[at] if at >= 0 else min(queries[0], keys[0])
        stop = starts[at + 1] if at + 1 < len(starts) else max(queries[1], keys[1])
        yield start, stop


def _below(a: int, b: int, c: int, d: int) -> Iterator[MaskPiece]:
    """Yield the pieces of x <= p for p in [a, b), x in [c, d)."""
    a, d = max(a, c), min(d, b)  # queries before all keys, and keys after all queries, see nothing
    if a >= b or c >= d:
        return
    if d <= a + 1:
        yield MaskPiece(a, b, c, d, "full")
        return
    if c < a:
        yield MaskPiece(a, b, c, a, "full")
    yield MaskPiece(a, d, a, d, "causal")
    if d < b:
        yield MaskPiece(d, b, a, d, "full")


def _above(a: int, b: int, c: int, d: int, reach: int) -> Iterator[MaskPiece]:
    """Yield the pieces of x >= p - reach: ``_below``, seen from the end of the sequence."""
    for q0, q1, k0, k1, kind in _below(1 - b, 1 - a, 1 - d - reach, 1 - c - reach):
        turned: Kind = "anti" if kind == "causal" else "full"
        yield MaskPiece(1 - q1, 1 - q0, 1 - k1 - reach, 1 - k0 - reach, turned)


def _band(a: int, b: int, c: int, d: int, window: int) -> Iterator[MaskPiece]:
    a, b = max(a, c), min(b, d + window - 1)
    for start in range(a, b, window):
        stop = min(start + window, b)
        yield from _below(start, stop, max(c, start), d)
        if c < min(d, start):
            yield from _above(start, stop, c, min(d, start), window - 1)


def _with_rows(intervals: tuple[Interval, ...]) -> Iterable[tuple[Interval, int]]:
    """Each interval with the local row of its start."""
    starts = itertools.accumulate((b - a for a, b in intervals), initial=0)
    return zip(intervals, starts, strict=False)


def _joined(pieces: list[MaskPiece]) -> list[MaskPiece]:
    """Join full pieces that lie side by side."""
    full = [p for p in pieces if p.kind == "full"]
    full = _turned(_chained(_turned(_chained(full))))
    return sorted(full + [p for p in pieces if p.kind != "full"])


def _turned(pieces: list[MaskPiece]) -> list[MaskPiece]:
    return [MaskPiece(c, d, a, b, kind) for a, b, c, d, kind in pieces]


def _chained(pieces: list[MaskPiece]) -> list[MaskPiece]:
    """Join pieces with the same first interval and adjacent second intervals."""
    found: list[MaskPiece] = []
    for piece in sorted(pieces):
        if found and found[-1][:2] == piece[:2] and found[-1].k_stop == piece.k_start:
            found[-1] = found[-1]._replace(k_stop=piece.k_stop)
        else:
            found.append(piece)
    return found
