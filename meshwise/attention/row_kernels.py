"""Triton kernels for rows by index: each reads what it needs once and writes once.

Parts are visited in order, so that sums are the same every time.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwise.attention.rows import Part, View

_ELEMENTS = 4096  # of a block
_VIEW = tl.constexpr(len(View._fields))


@triton.jit  # type: ignore[untyped-decorator]
def _take(  # type: ignore[no-untyped-def]
    x, index, out, rows, count, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (at[:, None] < count) & (column < D)
    row = tl.load(index + at, mask=at < count, other=0).to(tl.int64)
    values = tl.load(x + (batch * rows + row[:, None]) * D + column, mask=inside)
    tl.store(out + (batch * count + at[:, None]) * D + column, values, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _mix(  # type: ignore[no-untyped-def]
    values, lses, inverses, views, counts, out, out_lse, rows, heads,
    PARTS: tl.constexpr, KINDS: tl.constexpr, MIXES: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)[None, :]
    inside = at < rows
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    share = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, WIDTH), tl.float32)
    for part in tl.static_range(PARTS):
        row = at
        if KINDS[part] == 1:
            row = tl.load(inverses[part] + at, mask=inside, other=-1).to(tl.int64)
        elif KINDS[part] == 2:  # the inverse of a View, computed
            token = (at // heads).to(tl.int32) - views[part * _VIEW]
            head = (at % heads).to(tl.int32) - views[part * _VIEW + 6]
            width, rate = views[part * _VIEW + 2], views[part * _VIEW + 3]
            segment = token // width
            place_in = token % width - views[part * _VIEW + 4]
            step, of = views[part * _VIEW + 7], views[part * _VIEW + 8]
            has_row = (token >= 0) & (segment < views[part * _VIEW + 1])
            has_row &= (place_in >= 0) & (place_in % rate == 0)
            has_row &= (head >= 0) & (head % step == 0) & (head // step < of)
            first = segment.to(tl.int64) * views[part * _VIEW + 5] + place_in // rate
            row = tl.where(has_row, first * of + head // step, -1)
        has = inside & (row >= 0)
        place = batch * counts[part] + row
        piece = tl.load(
            values[part] + place[:, None] * D + column,
            mask=has[:, None] & (column < D), other=0.0,
        ).to(tl.float32)  # fmt: skip
        if MIXES:
            lse = tl.load(lses[part] + place, mask=has, other=float("-inf"))
            more = tl.maximum(most, lse)
            safe = tl.where(more == float("-inf"), 0.0, more)
            kept, added = tl.exp(most - safe), tl.exp(lse - safe)
            most, share = more, share * kept + added
            sums = sums * kept[:, None] + piece * added[:, None]
        else:
            sums += piece
    if MIXES:
        alive = share > 0
        sums /= tl.where(alive, share, 1.0)[:, None]
        lse = tl.where(alive, most + tl.log(tl.where(alive, share, 1.0)), float("-inf"))
        tl.store(out_lse + batch * rows + at, lse, mask=inside)
    where = out + (batch * rows + at[:, None]) * D + column
    tl.store(where, sums.to(out.dtype.element_ty), mask=inside[:, None] & (column < D))


def take(x: Tensor, index: Tensor) -> Tensor:
    batch, rows, width = x.shape
    out = x.new_empty((batch, *index.shape, width))
    if out.numel():
        block, padded = _block(width)
        grid = (triton.cdiv(index.numel(), block), batch)
        _take[grid](x, index, out, rows, index.numel(), width, padded, block)
    return out


def combine(parts: Sequence[Part], shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    lse = like.new_empty(shape[:-1], dtype=torch.float32)
    return _mixed(parts, shape, like, lse), lse


def total(parts: Sequence[Part], shape: tuple[int, ...], like: Tensor) -> Tensor:
    return _mixed(parts, shape, like, None)


def _mixed(
    parts: Sequence[Part], shape: tuple[int, ...], like: Tensor, lse: Tensor | None
) -> Tensor:
    if not parts:
        if lse is not None:
            lse.fill_(-torch.inf)
        return like.new_zeros(shape)
    out = like.new_empty(shape)
    values = tuple(part.values.contiguous() for part in parts)
    lses = values if lse is None else tuple(_lse(part) for part in parts)
    inverses = tuple(
        held if part.places.inverse is None else part.places.inverse
        for part, held in zip(parts, values, strict=True)
    )
    views = [part.places.view or View(*[1] * len(View._fields)) for part in parts]
    block, padded = _block(shape[-1])
    grid = (triton.cdiv(shape[1], block), shape[0])
    _mix[grid](
        values, lses, inverses, tuple(number for view in views for number in view),
        tuple(held.shape[1] for held in values), out, out if lse is None else lse, shape[1],
        max(part.places.heads for part in parts), len(parts), tuple(map(_kind, parts)),
        lse is not None, shape[-1], padded, block,
    )  # fmt: skip
    return out


def _kind(part: Part) -> int:
    """0: all rows in order; 1: by a map; 2: by a view."""
    return 1 if part.places.inverse is not None else 2 if part.places.view is not None else 0


def _lse(part: Part) -> Tensor:
    assert part.lse is not None
    return part.lse.contiguous()


def _block(width: int) -> tuple[int, int]:
    padded = triton.next_power_of_2(width)
    return max(1, _ELEMENTS // padded), padded
