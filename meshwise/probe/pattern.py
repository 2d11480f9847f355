"""Data that show where every element of a collective's result came from.

Element ``i`` of rank ``r`` is a small whole number, f(r, i), which every dtype holds exactly, even
summed over the ranks. Other ranks, shifted indices and swapped parts give different numbers, so the
check finds a result that is permuted, stale or partly written.

``pieces`` says which elements of which ranks make up a rank's result. It defines each collective
without any communication. A graph holds many calls, and in place each sum is the next call's
source. After k calls all_reduce gives n^(k-1) times the sum over n ranks; reduce and reduce_scatter
give the own element plus k times the others'. max and min of the same ranks stay what they are;
prod has powers of 2 as elements, which no dtype rounds.
"""

import math
from itertools import repeat
from typing import NamedTuple

import torch

from meshwise.spec import DTYPE_BYTES, Collective
from meshwise.spec.op import REDUCING, ROOTED

_PRIMES = (251, 127, 61, 31, 13, 7, 3)  # the largest prime with exact sums is used
_EXACT = {  # exact up to here; other dtypes 2^20
    torch.bfloat16: 2**8, torch.float16: 2**11, torch.float8_e4m3fn: 2**4,
    torch.int8: 2**7 - 1, torch.uint8: 2**7 - 1,
}  # fmt: skip
_MOST_DOUBLED = {  # the largest power of 2; other dtypes 127
    torch.int8: 6, torch.uint8: 7, torch.int32: 30, torch.int64: 62, torch.float16: 15,
}  # fmt: skip
_NEUTRAL = {"prod": 1.0, "max": -math.inf, "min": math.inf}
_CHUNK = 2**24
POISON = -1  # never a correct element


class PatternPiece(NamedTuple):
    """``length`` elements of the result from ``at`` on. They are the sum (or what ``redop`` says)
    over ``sources`` (ranks of the group) of their elements from ``start`` on, each multiplied by
    its ``times`` (default 1)."""

    at: int
    length: int
    sources: tuple[int, ...]
    start: int = 0
    times: tuple[float, ...] = ()
    redop: str = "sum"


def pieces(op: Collective, here: int, calls: int = 1) -> list[PatternPiece]:
    """Return the result that the group's rank ``here`` must hold after ``calls`` calls, if any."""
    n, size = op.group_size, DTYPE_BYTES[op.dtype]
    total, everybody = op.size_bytes // size, tuple(range(op.group_size))
    part = total // n
    is_root = here == op.root
    if (op.kind in ("reduce", "gather") and not is_root) or (op.kind == "send" and here < n - 1):
        return []
    if op.kind in ("all_reduce", "reduce"):
        return [PatternPiece(0, total, everybody, 0, _times(op, here, calls), op.redop)]
    if op.kind in ("all_gather", "gather"):
        return [PatternPiece(rank * part, part, (rank,)) for rank in everybody]
    if op.kind == "reduce_scatter":
        times = _times(op, here, calls)
        return [PatternPiece(0, part, everybody, here * part, times, op.redop)]
    if op.kind == "scatter":
        return [PatternPiece(0, part, (op.root,), here * part)]
    if op.kind == "all_to_all":
        return [PatternPiece(rank * part, part, (rank,), here * part) for rank in everybody]
    if op.kind == "all_to_all_v":
        found, at = [], 0
        for rank, row in enumerate(op.splits):
            found.append(PatternPiece(at, row[here] // size, (rank,), sum(row[:here]) // size))
            at += row[here] // size
        return found
    source = op.root if op.kind in (*ROOTED, "send") else (here - 1) % n
    return [PatternPiece(0, total, (source,))]


def _times(op: Collective, here: int, calls: int) -> tuple[float, ...]:
    """Return how often rank ``here``'s sum contains each rank's element after ``calls`` calls."""
    if not op.in_place or op.redop != "sum":
        return ()
    if op.kind == "all_reduce":
        return (float(op.group_size) ** (calls - 1),) * op.group_size
    return tuple(1 if rank == here else calls for rank in range(op.group_size))


def num_summed(op: Collective, calls: int = 1) -> int:
    """Count a sum's elements; for all_reduce after two calls, since later ones only multiply it."""
    if op.kind not in REDUCING or op.redop not in ("sum", "avg"):
        return 1
    if not op.in_place or calls == 1:
        return op.group_size
    return op.group_size**2 if op.kind == "all_reduce" else 1 + calls * (op.group_size - 1)


def tolerance(op: Collective, dtype: torch.dtype, calls: int = 1) -> float | None:
    """Return the relative error that rounding may cause. It is 0 if the dtype holds all sums, up to
    a factor of a power of 2, and None if rounding, or whole numbers that wrap, could hide any
    error."""
    n, is_float, again = op.group_size, dtype.is_floating_point, op.in_place and calls > 1
    unknown = (
        num_summed(op, calls) > _EXACT.get(dtype, 2**20)
        or (again and op.redop in ("prod", "avg"))
        or (again and op.redop == "sum" and op.kind == "all_reduce" and not is_float)
        or (op.redop == "prod" and n > _MOST_DOUBLED.get(dtype, 127))
        or (op.redop == "avg" and is_float and n & (n - 1) != 0)
    )
    if unknown:
        return None
    if (
        op.redop != "sum"
        or calls == 1
        or op.kind != "all_reduce"
        or not op.in_place
        or n & (n - 1) == 0
    ):
        return 0.0
    most = (1 + torch.finfo(dtype).eps / 2) ** (calls * (n - 1)) - 1  # as no term is negative
    return most if most < 1 else None


def fill(tensor: torch.Tensor, rank: int, num_summed: int, redop: str = "sum") -> None:
    """Fill a flat tensor with ``rank``'s source. ``num_summed``: how many such will be summed."""
    for at in range(0, len(tensor), _CHUNK):
        part = tensor[at : at + _CHUNK]
        part.copy_(_values(part, rank, at, num_summed, redop))


def num_wrong(
    result: torch.Tensor, wanted: list[PatternPiece], num_summed: int, tolerance: float = 0.0
) -> int:
    """Count the elements of a flat result that differ from the pieces."""
    wrong = 0
    for piece in wanted:
        for done in range(0, piece.length, _CHUNK):
            length = min(_CHUNK, piece.length - done)
            part = result[piece.at + done :][:length]
            neutral = _NEUTRAL.get(piece.redop, 0.0)
            right = torch.full((length,), neutral, dtype=torch.float64, device=part.device)
            for rank, times in zip(piece.sources, piece.times or repeat(1.0), strict=False):
                start = piece.start + done
                values = _values(part, rank, start, num_summed, piece.redop).double()
                right = _reduced(piece.redop, right, times * values)
            if piece.redop == "avg":  # of whole numbers rounded down
                right /= len(piece.sources)
            off = part != right.to(part.dtype)  # both are infinite beyond the dtype's range
            if tolerance:
                off &= ~((part.double() - right).abs() <= tolerance * right)
            wrong += int(off.sum())
    return wrong


def _reduced(redop: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if redop in ("max", "min"):
        return torch.maximum(one, other) if redop == "max" else torch.minimum(one, other)
    return one * other if redop == "prod" else one + other


def _values(like: torch.Tensor, rank: int, start: int, num_summed: int, redop: str) -> torch.Tensor:
    """Return f(rank, start), f(rank, start + 1), ... as int64, one for each element of ``like``."""
    most = _EXACT.get(like.dtype, 2**20) // num_summed
    prime = next((prime for prime in _PRIMES if prime - 1 <= most), 2)
    index = torch.arange(start, start + len(like), device=like.device)
    index ^= index >> 7
    values = (index * 48271 + 65537 * (rank + 1)) % prime  # primes, as is ``prime``
    if redop == "prod":
        return 1 + (values % 7 < 3) * (index % 3 > 0)
    if num_summed > 1:  # make some 0 on all ranks, or sums over all residues are much alike
        values *= index % 3 > 0
    return values
