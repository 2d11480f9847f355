"""Data that show where every element of a collective's result came from.

Element ``i`` of rank ``r`` is a small whole number, f(r, i), that every dtype holds exactly, also
summed over the ranks. Neighbouring ranks, shifted indices and exchanged parts all give other
numbers, so a result that is permuted, stale or partly written is seen.

``pieces`` says of which elements of which ranks a rank's result is made; it is the definition of
each collective, written without any communication.
"""

from typing import NamedTuple

import torch

from meshwise.spec import DTYPE_BYTES, Collective
from meshwise.spec.op import ROOTED

_PRIMES = (251, 127, 61, 31, 13, 7, 3)  # of which the largest whose sums stay exact is taken
_EXACT = {torch.bfloat16: 2**8, torch.float16: 2**11}
_CHUNK = 2**24
POISON = -1  # never a right element


class Piece(NamedTuple):
    """``length`` elements of the result from ``at`` on: the sum over ``sources`` (ranks of the
    group) of their elements from ``start`` on."""

    at: int
    length: int
    sources: tuple[int, ...]
    start: int = 0


def pieces(op: Collective, here: int) -> list[Piece]:
    """What the group's rank ``here`` must hold in the end; nothing when it only sends."""
    n, size = op.group_size, DTYPE_BYTES[op.dtype]
    total, everybody = op.size_bytes // size, tuple(range(op.group_size))
    part = total // n
    if (op.kind in ("reduce", "gather") and here > 0) or (op.kind == "send" and here < n - 1):
        return []
    if op.kind in ("all_reduce", "reduce"):
        return [Piece(0, total, everybody)]
    if op.kind in ("all_gather", "gather"):
        return [Piece(rank * part, part, (rank,)) for rank in everybody]
    if op.kind == "reduce_scatter":
        return [Piece(0, part, everybody, here * part)]
    if op.kind == "scatter":
        return [Piece(0, part, (0,), here * part)]
    if op.kind == "all_to_all":
        return [Piece(rank * part, part, (rank,), here * part) for rank in everybody]
    if op.kind == "all_to_all_v":
        found, at = [], 0
        for rank, row in enumerate(op.splits):
            found.append(Piece(at, row[here] // size, (rank,), sum(row[:here]) // size))
            at += row[here] // size
        return found
    return [Piece(0, total, (0 if op.kind in (*ROOTED, "send") else (here - 1) % n,))]


def num_summed(op: Collective) -> int:
    """How many elements the collective adds up for one of its result."""
    return op.group_size if op.kind in ("all_reduce", "reduce", "reduce_scatter") else 1


def exact(op: Collective, dtype: torch.dtype) -> bool:
    """Whether sums over the group's ranks stay whole numbers that the dtype holds."""
    return num_summed(op) < _EXACT.get(dtype, 2**20)


def fill(tensor: torch.Tensor, rank: int, num_ranks: int) -> None:
    """Make a flat tensor rank ``rank``'s source, of which ``num_ranks`` will be added up."""
    for at in range(0, len(tensor), _CHUNK):
        part = tensor[at : at + _CHUNK]
        part.copy_(_values(part, rank, at, num_ranks))


def num_wrong(result: torch.Tensor, wanted: list[Piece], num_ranks: int) -> int:
    """How many elements of a flat result are not what the pieces say."""
    wrong = 0
    for piece in wanted:
        for done in range(0, piece.length, _CHUNK):
            length = min(_CHUNK, piece.length - done)
            part = result[piece.at + done :][:length]
            right = torch.zeros(length, dtype=torch.int64, device=part.device)
            for rank in piece.sources:
                right += _values(part, rank, piece.start + done, num_ranks)
            wrong += int((part != right.to(part.dtype)).sum())
    return wrong


def _values(like: torch.Tensor, rank: int, start: int, num_ranks: int) -> torch.Tensor:
    """f(rank, start), f(rank, start + 1), ... as int64, one for each element of ``like``."""
    most = _EXACT.get(like.dtype, 2**20) // num_ranks
    prime = next((prime for prime in _PRIMES if prime - 1 <= most), 2)
    index = torch.arange(start, start + len(like), device=like.device)
    return ((index ^ (index >> 7)) * 48271 + 65537 * (rank + 1)) % prime  # primes, as is ``prime``
