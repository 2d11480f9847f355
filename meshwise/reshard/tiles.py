"""Cut moves into tiles: rows of equal length at addresses that both ends agree on.

In: moves, and how each buffer lies in its rank's memory. Out: a table with one line per tile, the
same on the sending and on the receiving rank: where its rows begin in either buffer, how far apart
they are, how many there are and how long. A tile holds at most ``TILE`` bytes. It is what a kernel
copies at once, what a hash covers, and what fills a message.

The hash of a tile is the sum, modulo 2^64, over its words of weight(place) * (1 + (word xor
word >> 31)), where weight(place) = (m xor m >> 29) or 1, m = (y xor y >> 32) * B and y = place * A.
Weights are odd and multiply a bijection of the word, so one wrong word always shows. So does the
same bit flipped in two words of eight bytes: the shift moves a flip of a high bit, such as a sign,
below bit 31, where no two weights of a tile are equal or opposite. Other damage escapes only by
chance, of 2^-64, or of 2^-33 if one bit alone is wrong in many words. The 1 tells zeros of
different lengths apart.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwise.reshard.regions import Box
from meshwise.reshard.transfer import Move

TILE = 64 * 2**10
ROW = 2 * 2**10  # bytes without a gap at both ends are cut into rows of this length
ALIGNMENT = 16  # bytes: where tiles begin in a message
WORD = 8  # bytes of the largest word

# odd, so that multiplying loses nothing; signed, as Triton's numbers are
A, B = -0x61C8864680B583EB, -0x3D4D51C2D82B14B1

Table = npt.NDArray[np.void]

COLUMNS = np.dtype(
    [
        ("source", "i4"),  # ranks
        ("destination", "i4"),
        ("tensor", "i4"),
        ("read", "i4"),  # numbers of the buffers, as ``number`` gives them
        ("write", "i4"),
        ("read_at", "i8"),  # bytes from the buffer's first element to the tile's
        ("write_at", "i8"),
        ("read_step", "i8"),  # bytes from row to row
        ("write_step", "i8"),
        ("rows", "i4"),
        ("width", "i4"),  # bytes of a row as it is written
        ("word", "i4"),  # bytes: 8, 4, 2 or 1 divides all of the above; 0: the dtype changes
    ]
)


class Memory(NamedTuple):
    """The memory of a rank's buffer: its shape, its strides in elements, the bytes of an element.

    ``alignment``: the largest power of two up to 8 that divides its address.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    alignment: int = WORD


class TileBuffer(NamedTuple):
    """A rank's tensor, in the model that is read (``side`` 0) or in the one that is written (1)."""

    side: int
    rank: int
    name: str


def buffers_of(move: Move, name: str, side: int) -> tuple[TileBuffer, TileBuffer]:
    """The buffers that a move of the tensor ``name`` reads and writes."""
    return (
        TileBuffer(side, move.source, move.taken or name),
        TileBuffer(1, move.destination, move.put or name),
    )


def tiles(
    moves: Iterable[tuple[int, Move]],
    memory: Mapping[TileBuffer, Memory],
    number: Mapping[TileBuffer, int],
    names: Sequence[str],
    *,
    side: int = 0,
    converted: frozenset[int] = frozenset(),
) -> Table:
    """Return the tiles of (number of the tensor, move)s, in their order.

    ``side`` 1: the moves read the destination, as when receivers pass on. ``converted``: tensors
    whose dtype changes on the way.
    """
    parts = [np.zeros(0, COLUMNS)]
    for tensor, move in moves:
        read, write = buffers_of(move, names[tensor], side)
        ends = memory[read], memory[write]
        for window in _windows(move, *ends):
            part = _cut(window, ends[0].itemsize, ends[1].itemsize)
            part["source"], part["destination"] = move.source, move.destination
            part["tensor"], part["read"], part["write"] = tensor, number[read], number[write]
            if tensor not in converted:
                part["word"] = _words(part, min(end.alignment for end in ends))
            parts.append(part)
    return np.concatenate(parts)


class _Window(NamedTuple):
    """``rows`` rows of ``width`` elements; offsets and steps in elements."""

    read: int
    write: int
    rows: int
    width: int
    read_step: int
    write_step: int


def _windows(move: Move, read: Memory, write: Memory) -> Iterator[_Window]:
    """Cut a move into as few windows as the two buffers allow."""
    starts, steps = [], []
    for box, memory in ((move.read, read), (move.write, write)):
        seen = _seen(memory, len(box.low))
        steps.append(seen)
        starts.append(sum(low * step for low, step in zip(box.low, seen, strict=True)))
    dims = _joined(move.box, *steps)
    if not dims or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))
    *outer, rows, (width, _, _) = [(1, 0, 0), *dims] if len(dims) == 1 else dims
    for place in itertools.product(*(range(extent) for extent, _, _ in outer)):
        offsets = [
            start + sum(i * dim[end] for i, dim in zip(place, outer, strict=True))
            for end, start in enumerate(starts, 1)
        ]
        yield _Window(offsets[0], offsets[1], rows[0], width, rows[1], rows[2])


def _seen(memory: Memory, dims: int) -> tuple[int, ...]:
    """The strides of a buffer seen with that many dims: leading ones flattened, or of extent 1."""
    shape, stride = memory.shape, memory.stride
    while len(shape) > dims:
        if shape[0] > 1 and stride[0] != stride[1] * shape[1]:
            raise ValueError(f"a buffer of {shape} with strides {stride} is not contiguous")
        shape, stride = (shape[0] * shape[1], *shape[2:]), stride[1:]
    return (0,) * (dims - len(shape)) + tuple(stride)


Dim = tuple[int, int, int]  # extent, elements from one to the next in either buffer


def _joined(box: Box, read: Sequence[int], write: Sequence[int]) -> list[Dim]:
    """Return a box's dims without those of extent 1; neighbours without a gap become one."""
    dims: list[Dim] = []
    for dim in zip(box.shape, read, write, strict=True):
        if dim[0] == 1:
            continue
        if dims and dims[-1][1:] == (dim[0] * dim[1], dim[0] * dim[2]):
            dim = (dims.pop()[0] * dim[0], *dim[1:])
        dims.append(dim)
    return dims


def _cut(window: _Window, read_size: int, write_size: int) -> Table:
    """A window's tiles; offsets and steps in bytes."""
    rows, width, read_step, write_step = window[2:]
    rest = 0
    if rows == 1:  # without a gap: rows of the usual length, and a rest
        width, rest = ROW // write_size, width % (ROW // write_size)
        rows, read_step, write_step = window.width // width, width, width
    longest = TILE // write_size
    across = range(0, width, longest)
    each = max(1, longest // width)
    starts = [(row, at) for row in range(0, rows, each) for at in across]
    table = np.zeros(len(starts) + (rest > 0), COLUMNS)
    if starts:
        row, at = np.array(starts, np.int64).T
        whole = table[: len(starts)]
        whole["rows"] = np.minimum(each, rows - row)
        whole["width"] = np.minimum(longest, width - at) * write_size
        whole["read_at"], whole["write_at"] = row * read_step + at, row * write_step + at
        whole["read_step"], whole["write_step"] = read_step * read_size, write_step * write_size
    if rest:
        last = table[-1:]
        last["rows"], last["width"] = 1, rest * write_size
        last["read_at"], last["write_at"] = rows * read_step, rows * write_step
    table["read_at"] = (table["read_at"] + window.read) * read_size
    table["write_at"] = (table["write_at"] + window.write) * write_size
    return table


def _words(table: Table, alignment: int) -> npt.NDArray[np.int64]:
    """The bytes of the largest word that divides each tile at both ends."""
    powers = np.full(len(table), alignment, np.int64)
    for column in ("read_at", "write_at", "read_step", "write_step", "width"):
        powers |= table[column]
    return powers & -powers


def nbytes(table: Table) -> npt.NDArray[np.int64]:
    """Bytes of each tile as it is written."""
    size: npt.NDArray[np.int64] = table["rows"].astype(np.int64) * table["width"]
    return size


def packed(table: Table) -> npt.NDArray[np.int64]:
    """Return where each tile begins when packed one after the other; last, where all end."""
    padded = -(-nbytes(table) // ALIGNMENT) * ALIGNMENT
    return np.concatenate([[0], np.cumsum(padded)])


def parts(table: Table, count: int) -> list[slice]:
    """Cut a pair of ranks' tiles into ``count`` parts of about equal bytes, some perhaps empty."""
    end = packed(table)
    edges = np.searchsorted(end, np.arange(count + 1) * (end[-1] / count))
    edges[0], edges[-1] = 0, len(table)
    return [slice(first, last) for first, last in itertools.pairwise(edges.tolist())]


def alignment_of(address: int) -> int:
    return gcd(address, WORD)


def hashes(words: npt.NDArray[np.unsignedinteger[Any]]) -> npt.NDArray[np.int64]:
    """Hash each tile, given as a row of words: [..., words] to [...]."""
    wide = words.astype(np.uint64, copy=False)
    weights, total = _weights(words.shape[-1])
    mixed = wide >> np.uint64(31)
    mixed ^= wide
    mixed *= weights
    found: npt.NDArray[np.uint64] = mixed.sum(-1, dtype=np.uint64, initial=total)
    return found.astype(np.int64)


@functools.lru_cache(maxsize=8)
def _weights(count: int) -> tuple[npt.NDArray[np.uint64], np.uint64]:
    """The weights of the first ``count`` places, and their sum."""
    mixed = np.arange(count, dtype=np.uint64) * np.uint64(A % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(B % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(29))) | np.uint64(1)
    return mixed, mixed.sum(dtype=np.uint64)
