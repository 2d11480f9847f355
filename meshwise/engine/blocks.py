"""Hash the data files of a checkpoint, and verify bytes when they are read.

In: a safetensors file and its ``Stored``. Out: its hashes; or the offsets of its tensors, and bytes
whose blocks were verified first; or all damage. The header is one block, and so is each 4 MiB after
it. A block's hash is the hash of its tiles' hashes, in order (``reshard.tiles``). Hashes show
damage, not forgery: whoever can write the files can also write the hashes.
"""

import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from meshwise import files
from meshwise.reshard import tiles
from meshwise.reshard.regions import Box, stretches
from meshwise.reshard.tiles import TILE
from meshwise.spec.checkpoint import Checkpoint, Damage, Stored
from meshwise.spec.record import NonNegative

BLOCK = 4 * 2**20
OFFSETS = "DCP_SHARDING_INFO"  # {name: {"saved_offsets": [...]}}, where torch's reader looks
FIX = "copy it again, or resume from the folder of an earlier checkpoint"
_MOST_HEADER = 10**8  # bytes: safetensors' own bound
_AT_ONCE = 4 * TILE  # fits in a core's cache while it is hashed
_DIGITS = 16  # of a hash

Bytes = npt.NDArray[np.uint8]


class StoredPart(NamedTuple):
    """A tensor's part in a file: bytes [first, last) after the header, the shape of its box, and
    the box's first index in the whole tensor."""

    first: int
    last: int
    shape: tuple[int, ...]
    low: tuple[int, ...]

    def pieces(self) -> Iterator[tuple[Box, int, int]]:
        """Yield boxes of the part, each within one block, with their bytes [first, last)."""
        if not self.last - self.first:
            return
        size = (self.last - self.first) // prod(self.shape)
        edges = range(self.first // BLOCK * BLOCK, self.last, BLOCK)
        for edge in edges:
            first, last = max(self.first, edge), min(self.last, edge + BLOCK)
            begin, end = (first - self.first) // size, (last - self.first) // size
            for box in stretches(self.shape, begin, end):
                yield box, first, (first := first + box.num_elements * size)


class DataFile:
    """A data file, mapped into memory. ``parts``: the place of each tensor. Raises a ValueError if
    it is not the file that was saved."""

    def __init__(self, path: Path, stored: Stored) -> None:
        self.path = path
        self._content, self._blocks = _map(path)
        if len(self._content) != stored.bytes:
            raise ValueError(f"{path} has {len(self._content)} bytes of {stored.bytes}; {FIX}")
        self._hashes = stored.hashes
        self._verified: set[int] = set()
        self.parts: dict[str, StoredPart] = {}
        self._verify(0)
        header = self._content[8 : self._blocks[0].stop].tobytes()
        try:
            self.parts = _read_header(header, len(self._content) - self._blocks[0].stop)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} has a damaged header ({error}); {FIX}") from None

    def read(self, first: int, last: int) -> Bytes:
        """Return bytes after the header. Verify the hashes of their blocks first."""
        for number in range(first // BLOCK, -(-last // BLOCK)):
            self._verify(number + 1)
        start = self._blocks[0].stop
        return self._content[start + first : start + last]

    def damage(self) -> Iterator[Damage]:
        """Yield every block that differs from what was saved."""
        for number, block in enumerate(self._blocks):
            if not self._is_right(number):
                yield Damage(
                    file=self.path.name,
                    reason="not as saved",
                    offset=block.start,
                    bytes=block.stop - block.start,
                    tensors=self._held(block),
                )

    def _verify(self, number: int) -> None:
        if number in self._verified or not self._hashes:
            return
        if not self._is_right(number):
            block = self._blocks[number]
            held = self._held(block) or ("its header",)
            more = f" and {len(held) - 1} more" if len(held) > 1 else ""
            raise ValueError(
                f"{self.path}: bytes {block.start} to {block.stop} ({held[0]}{more}) are not as "
                f"saved; {FIX}"
            )
        self._verified.add(number)

    def _is_right(self, number: int) -> bool:
        known = self._hashes[number * _DIGITS : (number + 1) * _DIGITS]
        return _hash(self._content[self._blocks[number]]) == known

    def _held(self, block: slice) -> tuple[str, ...]:
        start = self._blocks[0].stop
        first, last = block.start - start, block.stop - start
        return tuple(n for n, part in self.parts.items() if part.first < last and part.last > first)


def stored(path: Path) -> Stored:
    """Return the record of a file's current content."""
    content, blocks = _map(path)
    return Stored(bytes=len(content), hashes="".join(_hash(content[block]) for block in blocks))


def damage(folder: Path, record: Checkpoint, told: Callable[[int], None]) -> tuple[Damage, ...]:
    """Return all damage, file by file. ``told`` is called with each file's bytes when the file is
    done.

    Without hashes, only the files' presence, sizes and headers are checked.
    """

    def look(name: str) -> list[Damage]:
        path = folder / record.data / name
        try:
            file = DataFile(path, record.files[name])
            found = list(file.damage()) if record.files[name].hashes else []
        except ValueError as error:
            found = [Damage(file=name, reason=str(error).removeprefix(f"{path} "))]
        told(record.files[name].bytes)
        return found

    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as threads:
        return tuple(one for found in threads.map(look, record.files) for one in found)


def _map(path: Path) -> tuple[Bytes, list[slice]]:
    """Map a file's bytes; return them and the slices of its blocks."""
    with files.open_file(path) as file:
        if os.fstat(file.fileno()).st_size < 8:
            raise ValueError(f"{path} is cut off; {FIX}")
        # copy on write: torch wants writable memory
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    start = 8 + int(content[:8].view("<u8")[0])
    if start > min(len(content), _MOST_HEADER):
        raise ValueError(f"{path} has a damaged header ({start} bytes long); {FIX}")
    edges = [0, *range(start, len(content), BLOCK), len(content)]
    return content, [slice(*edge) for edge in itertools.pairwise(edges)]


def _hash(block: Bytes) -> str:
    whole = len(block) // TILE * TILE
    sums = [
        tiles.hashes(block[at : min(at + _AT_ONCE, whole)].view("<u8").reshape(-1, TILE // 8))
        for at in range(0, whole, _AT_ONCE)
    ]
    if rest := len(block) - whole:
        padded = np.zeros(-(-rest // 8), "<u8")
        padded.view(np.uint8)[:rest] = block[whole:]
        sums.append(tiles.hashes(padded)[None])
    return f"{int(tiles.hashes(np.concatenate(sums).view(np.uint64))) % 2**64:0{_DIGITS}x}"


class _Entry(msgspec.Struct):
    """A tensor in a safetensors header."""

    dtype: str
    shape: tuple[NonNegative, ...]
    data_offsets: tuple[NonNegative, NonNegative]


def _read_header(header: bytes, most: int) -> dict[str, StoredPart]:
    """Read each tensor's entry in a header; ``most``: the bytes after the header."""
    told = files.parse_json(header, "it", at_most=_MOST_HEADER)
    about = files.parse_json(told.pop("__metadata__")[OFFSETS], OFFSETS, at_most=_MOST_HEADER)
    found = {}
    for name, entry in msgspec.convert(told, dict[str, _Entry]).items():
        first, last = entry.data_offsets
        low = msgspec.convert(about[name]["saved_offsets"], tuple[NonNegative, ...])
        elements = prod(entry.shape)
        size = (last - first) // elements if elements else 1
        fits = first <= last <= most and size * elements == last - first
        if not fits or first % max(size, 1) or len(low) != len(entry.shape):
            raise ValueError(f"{name} lies at {first} to {last} of {most}")
        found[name] = StoredPart(first, last, entry.shape, low)
    return found
