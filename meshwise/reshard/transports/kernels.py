"""Triton kernels: copy tiles and hash them in one pass; let GPUs meet without their hosts.

A table has one line per tile: address to read, address to write, bytes from row to row of either,
rows, words of a row, and the number of the hash (all int64). ``tiles.hashes`` defines the hash.
Addresses may be a peer's memory. A grid of few programs leaves multiprocessors to others.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwise.reshard.tiles import A, B

_A, _B = tl.constexpr(A), tl.constexpr(B)
_ROWS, _WORDS = 8, 256  # of a block: rows of 2 KiB of 8-byte words
_WARPS = 8
_COLUMNS = tl.constexpr(7)

_TYPES = {
    1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64,
    torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16, torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5,
    torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}  # fmt: skip
_BITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}

Word = int | torch.dtype  # bytes to copy unchanged, or a dtype


@triton.jit
def _weighed(word, place):  # type: ignore[no-untyped-def]
    y = place * _A  # signed numbers: a logical shift needs a mask
    m = (y ^ ((y >> 32) & 0xFFFFFFFF)) * _B
    weight = (m ^ ((m >> 29) & 0x7FFFFFFFF)) | 1
    return weight * (1 + (word ^ ((word >> 31) & 0x1FFFFFFFF)))


@triton.jit  # type: ignore[untyped-decorator]
def _tiles(  # type: ignore[no-untyped-def]
    table, sums, chosen, refused, count,
    READ: tl.constexpr, WRITE: tl.constexpr, BITS: tl.constexpr, SIZES: tl.constexpr,
    STORES: tl.constexpr, SUMS: tl.constexpr, CHOOSES: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    word = tl.arange(0, WORDS)[None, :]
    count = tl.where(tl.load(refused) == 0, count, 0)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        line = table + tile * _COLUMNS
        read = tl.load(line).to(tl.pointer_type(READ))
        write = tl.load(line + 1).to(tl.pointer_type(WRITE))
        read_step = tl.load(line + 2) // SIZES[0]
        write_step = tl.load(line + 3) // SIZES[1]
        rows = tl.load(line + 4).to(tl.int32)
        width = tl.load(line + 5).to(tl.int32)
        if CHOOSES:
            rows *= tl.load(chosen + tl.load(line + 6))
        total = tl.zeros([ROWS, WORDS], tl.int64)
        for first in range(0, rows, ROWS):
            for left in range(0, width, WORDS):
                r, w = first + row, left + word
                held = (r < rows) & (w < width)
                values = tl.load(read + r * read_step + w, mask=held, other=0)
                if READ != WRITE:
                    values = values.to(WRITE)
                if STORES:
                    tl.store(write + r * write_step + w, values, mask=held)
                if SUMS:
                    bits = values.to(BITS, bitcast=True).to(tl.int64)
                    total += tl.where(held, _weighed(bits, (r * width + w).to(tl.int64)), 0)
        if SUMS and rows > 0:
            tl.store(sums + tl.load(line + 6), tl.sum(tl.sum(total, 1), 0))


def copier(
    table: Tensor,
    read: Word,
    write: Word,
    sums: Tensor | None,
    programs: int,
    refused: Tensor,
    stores: bool = True,
    chosen: Tensor | None = None,
) -> Callable[[], object]:
    """Make a launch that copies the tiles of ``table`` [n, 7] and writes their hashes into
    ``sums``. With ``chosen`` (int32, by number of the hash) it takes only tiles that are 1. Nothing
    is touched if ``refused`` (int32) is not 0 at the launch."""
    sizes = tuple(word if isinstance(word, int) else word.itemsize for word in (read, write))
    count = len(table)

    def launch() -> None:
        _tiles[(min(count, programs),)](
            table, table if sums is None else sums, table if chosen is None else chosen,
            refused, count,
            READ=_TYPES[read], WRITE=_TYPES[write], BITS=_BITS[sizes[1]], SIZES=sizes,
            STORES=stores, SUMS=sums is not None, CHOOSES=chosen is not None,
            ROWS=_ROWS, WORDS=_WORDS, num_warps=_WARPS,
        )  # fmt: skip

    return launch


@triton.jit  # type: ignore[untyped-decorator]
def _meet(  # type: ignore[no-untyped-def]
    far, near, count, epoch, value, total, stop, LANES: tl.constexpr
):
    lane = tl.arange(0, LANES)
    there = lane < count
    number = tl.load(epoch) + 1
    tl.store(epoch, number)
    said = (number << 32) | tl.load(value).to(tl.int64)
    turn = number & 1  # two boxes: a fast rank must not overwrite what a slow one has yet to read
    mailbox = tl.load(far + lane, mask=there, other=0).to(tl.pointer_type(tl.int64)) + turn
    tl.atomic_xchg(mailbox, said, mask=there, sem="release", scope="sys")
    heard = tl.full([LANES], 0, tl.int64)
    behind = tl.sum(there.to(tl.int32), 0)
    while behind > 0:
        heard = tl.atomic_add(
            near + 2 * lane + turn,
            tl.full([LANES], 0, tl.int64),
            mask=there,
            sem="acquire",
            scope="sys",
        )
        behind = tl.sum((there & ((heard >> 32) < number)).to(tl.int32), 0)
        behind = tl.where(tl.load(stop, volatile=True) == 0, behind, 0)
    spoken = tl.where(there, heard & 0xFFFFFFFF, 0)
    tl.store(total, (tl.sum(spoken, 0) + tl.load(value).to(tl.int64)).to(tl.int32))


def meeting(
    far: Tensor, near: Tensor, count: int, epoch: Tensor, value: Tensor, total: Tensor, stop: Tensor
) -> Callable[[], object]:
    """Make a launch that waits until ``count`` peers have come here as often as this rank has.

    ``far``: the address of this rank's mailbox on each peer. ``near``: the peers' mailboxes here,
    in the same order, two each. Both are int64; the number of addresses is a power of two.
    ``total`` becomes the sum of all ranks' ``value`` (int32). ``stop``: pinned host memory; once it
    is not 0 nobody waits.
    """

    def launch() -> None:
        _meet[(1,)](far, near, count, epoch, value, total, stop, LANES=len(far), num_warps=1)

    return launch
