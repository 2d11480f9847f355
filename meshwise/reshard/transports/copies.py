"""Copy many tiles at once and hash them on the way, on a CPU or a GPU.

In: lines with each tile's two addresses and the number of its hash. Out: a launch that does it all;
on a GPU it goes to the current stream, one kernel for each kind of word.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwise.reshard import tiles
from meshwise.reshard.tiles import Table
from meshwise.reshard.transports.lanes import Launch, chained

Addresses = npt.NDArray[np.int64]
Pair = tuple[torch.dtype, torch.dtype]

DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16,
    "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8,
    "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip


class Lines(NamedTuple):
    """``at`` [n, 7]: address read, address written, bytes from row to row of either, rows, bytes of
    a row as written, number of the hash. ``kind`` [n]: the word copied, 8, 4, 2 or 1 bytes; or -1 -
    i if the dtype changes as ``pairs[i]`` says."""

    at: Addresses
    kind: npt.NDArray[np.int32]
    pairs: Sequence[Pair]

    def some(self, at: slice | npt.NDArray[np.intp]) -> "Lines":
        return Lines(self.at[at], self.kind[at], self.pairs)


def lines(
    table: Table,
    read: Addresses,
    write: Addresses,
    pairs: Sequence[Pair],
    number: npt.NDArray[np.int64],
    *,
    packed: str = "",
) -> Lines:
    """Make lines. ``read``, ``write``: addresses of the tiles. ``pairs``: dtypes of each tensor.

    ``packed`` names the end, ``read`` or ``write``, that is a message. A message has no gaps
    between rows, and its dtype is the destination's.
    """
    steps = (table["width" if packed == end else f"{end}_step"] for end in ("read", "write"))
    columns = (read, write, *steps, table["rows"], table["width"], number)
    at = np.stack([np.asarray(column, np.int64) for column in columns], axis=1)
    kind = table["word"].copy()
    converted = kind == 0
    if packed == "read":  # the message is converted already
        kind[converted] = np.array([pairs[i][1].itemsize for i in table["tensor"][converted]])
    else:
        kind[converted] = -1 - table["tensor"][converted]
    return Lines(at, kind, pairs)


def copier(
    found: Lines,
    sums: Tensor | None,
    refused: Tensor,
    programs: int = 0,
    *,
    stores: bool = True,
    chosen: Tensor | None = None,
) -> Launch:
    """Make a launch that copies (``stores``) and hashes (``sums``, int64) the tiles; ``programs``:
    of a GPU's grid. ``chosen``: int32 by number of the hash, 0 for tiles to leave out at the
    launch. Nothing is touched if ``refused`` (int32, on the device that works) is not 0 then."""
    device = refused.device
    if device.type == "cpu":
        return _cpu(found, sums, refused, stores, chosen)
    from meshwise.reshard.transports import kernels

    launches = []
    for kind in np.unique(found.kind).tolist():
        mine = found.at[found.kind == kind].copy()
        read, write = (kind, kind) if kind > 0 else found.pairs[-1 - kind]
        mine[:, 5] //= write if kind > 0 else write.itemsize
        table = torch.from_numpy(mine).to(device)
        launches.append(kernels.copier(table, read, write, sums, programs, refused, stores, chosen))
    return chained(launches)


def _cpu(
    found: Lines, sums: Tensor | None, refused: Tensor, stores: bool, chosen: Tensor | None
) -> Launch:
    written = None if sums is None else sums.numpy()
    work = []
    for line, kind in zip(found.at.tolist(), found.kind.tolist(), strict=True):
        read, write, read_step, write_step, rows, width, number = line
        if kind > 0:
            shape, types = (rows, width // kind), (np.dtype(f"u{kind}"),) * 2
        else:
            before, after = found.pairs[-1 - kind]
            shape = (rows, width // after.itemsize)
            types = np.dtype(f"u{before.itemsize}"), np.dtype(f"u{after.itemsize}")
        taken = _seen(read, shape, read_step, types[0])
        put = _seen(write, shape, write_step, types[1]) if stores else None
        work.append((taken, put, None if kind > 0 else found.pairs[-1 - kind], number))

    def launch() -> None:
        if refused:
            return
        for taken, put, pair, number in work:
            if chosen is not None and not chosen[number]:
                continue
            values = taken if pair is None else _converted(taken, *pair)
            if put is not None:
                np.copyto(put, values)
            if written is not None:
                written[number] = tiles.hashes(values.reshape(-1))

    return launch


def _seen(
    address: int, shape: tuple[int, int], step: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """View memory as an array; the caller keeps it alive."""
    extent = (shape[0] - 1) * step + shape[1] * dtype.itemsize
    memory: Any = (ctypes.c_byte * extent).from_address(address)
    return np.ndarray(shape, dtype, memory, strides=(step, dtype.itemsize))


def _converted(
    words: npt.NDArray[Any], before: torch.dtype, after: torch.dtype
) -> npt.NDArray[Any]:
    values = torch.from_numpy(np.ascontiguousarray(words)).view(before).to(after)
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[after.itemsize]
    return values.view(bits).numpy()
