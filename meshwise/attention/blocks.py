"""Attention of a rank's queries to one set of keys, piece by piece.

In: q [B, H, Lq, D], k and v [B, Hkv, Lk, D], and the ``pieces`` that the mask leaves, in their
rows. Out: out and lse, merged with the result of earlier keys; or gradients, added to those of
other keys. Pieces of one size are stacked along the batch for one kernel call. A single piece needs
no accumulators.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.attention.kernels import attend, attend_backward
from meshwise.attention.merge import SoFar, Softmax, merge, nothing, opened, wide
from meshwise.attention.pieces import MaskPiece, batches


def attend_pieces(
    q: Tensor, k: Tensor, v: Tensor, pieces: tuple[MaskPiece, ...], scale: float,
    so_far: Softmax | None = None,
) -> Softmax:  # fmt: skip
    """Return the softmax over these keys and those of ``so_far``, which may be overwritten."""
    if so_far is None and len(pieces) == 1 and pieces[0][:2] == (0, q.shape[2]):
        _, _, first, last, kind = pieces[0]
        return _attend(q, k[:, :, first:last], v[:, :, first:last], kind, scale)
    so_far = nothing(q.shape, q.device) if so_far is None else opened(so_far)
    for batch in batches(pieces):
        at, key_at = _places(batch)
        part, lse = _attend(
            _stacked(q, at), _stacked(k, key_at), _stacked(v, key_at), batch[0].kind, scale
        )
        rows = SoFar(*(_rows(x, at) for x in so_far))
        merge(rows, part.view_as(rows.out), lse.view_as(rows.most))
        for x, of in zip(so_far, rows, strict=True):
            _put_back(x, at, of)
    return so_far


def add_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    pieces: tuple[MaskPiece, ...], scale: float, totals: Sequence[Tensor],
) -> None:  # fmt: skip
    """Add dq, dk, dv of these keys to ``totals``. ``grad``, ``out`` and ``lse`` belong to q's whole
    softmax, over these keys and all others."""
    for batch in batches(pieces):
        at, key_at = _places(batch)
        parts = _attend_backward(
            _stacked(grad, at), _stacked(q, at), _stacked(k, key_at), _stacked(v, key_at),
            _stacked(out, at), _stacked(lse, at), batch[0].kind, scale,
        )  # fmt: skip
        for total, part, place in zip(totals, parts, (at, key_at, key_at), strict=True):
            rows = _rows(total, place)
            rows.add_(part.reshape(rows.shape))
            _put_back(total, place, rows)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    pieces: tuple[MaskPiece, ...], scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return dq, dk, dv if q attends these keys only."""
    if len(pieces) == 1 and pieces[0][:4] == (0, q.shape[2], 0, k.shape[2]):
        return _attend_backward(grad, q, k, v, out, lse, pieces[0].kind, scale)
    totals = [zeros_of(x) for x in (q, k, v)]
    add_gradients(grad, q, k, v, out, lse, pieces, scale, totals)
    return tuple(x.to(q.dtype) for x in totals)


def zeros_of(x: Tensor) -> Tensor:
    """Make a zero accumulator of x's shape."""
    return torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device)


def _attend(q: Tensor, k: Tensor, v: Tensor, kind: str, scale: float) -> tuple[Tensor, Tensor]:
    if kind != "anti":
        return attend(q, k, v, causal=kind == "causal", scale=scale)
    out, lse = attend(q.flip(2), k.flip(2), v.flip(2), causal=True, scale=scale)
    return out.flip(2), lse.flip(2)


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kind: str,
    scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    given = (grad, q, k, v, out, lse)
    if kind != "anti":
        return attend_backward(*given, causal=kind == "causal", scale=scale)
    turned = attend_backward(*(x.flip(2) for x in given), causal=True, scale=scale)
    return tuple(x.flip(2) for x in turned)


# ---- rows [start, start + count) for each of many starts

Places = tuple[tuple[int, ...], int]


def _places(batch: Sequence[MaskPiece]) -> tuple[Places, Places]:
    first = batch[0]
    return (
        (tuple(p.q_start for p in batch), first.q_stop - first.q_start),
        (tuple(p.k_start for p in batch), first.k_stop - first.k_start),
    )


def _step(starts: tuple[int, ...]) -> int | None:
    steps = {b - a for a, b in itertools.pairwise(starts)}
    return steps.pop() if len(steps) == 1 else None


def _rows(x: Tensor, places: Places) -> Tensor:
    """x [B, H, L, ...] as [B, starts, H, count, ...]; a view where the starts are regular."""
    starts, count = places
    if len(starts) == 1:
        return x[:, :, starts[0] : starts[0] + count].unsqueeze(1)
    if (step := _step(starts)) is not None:
        part = x[:, :, starts[0] : starts[-1] + count]
        return part.unfold(2, count, step).movedim(-1, 3).transpose(1, 2)
    picked: Tensor = x.index_select(2, _index(places, x.device)).unflatten(2, (-1, count))
    return picked.transpose(1, 2)


def _stacked(x: Tensor, places: Places) -> Tensor:
    """Return the rows as [B * starts, H, count, ...]."""
    rows = _rows(x, places)
    return rows.squeeze(1) if rows.shape[1] == 1 else rows.flatten(0, 1)


def _put_back(x: Tensor, places: Places, rows: Tensor) -> None:
    """Write ``rows`` back into x if ``_rows`` returned a copy."""
    starts, _ = places
    if len(starts) > 1 and _step(starts) is None:
        x.index_copy_(2, _index(places, x.device), rows.transpose(1, 2).flatten(2, 3))


@functools.lru_cache(256)
def _index(places: Places, device: Any) -> Tensor:
    starts, count = places
    each = torch.tensor(starts, device="cpu").unsqueeze(1) + torch.arange(count, device="cpu")
    return each.flatten().to(device)
