"""Triton kernels for rows by index: each reads its rows once and writes once.

Parts are visited in order, so sums are the same every time. ``_merge`` is ``merge.merge``, in fp64
too. ``_mix`` has all parts at once and uses fp32, which is faster. It finds the largest lse first,
then sums numerator and denominator alike, each with its rounding error (Kahan). If all values are
1, both are the same number and out is 1. Error, in units of 2^-24 of the largest value, for any
number of parts: 1 of each sum, 1 of rounding out, and of the weights e times the values' mean
distance from out; e < 4 + 2|x| is the error of the hardware's exp(x).
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

Tensors = tuple[Tensor, ...]
_ELEMENTS = 4096  # of a block
_VIEW = tl.constexpr(9)  # numbers in a view, as in ``rows.View``


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
def _row(  # type: ignore[no-untyped-def]
    KIND: tl.constexpr, part: tl.constexpr, inverses, views, at, inside, heads
):
    """Find the part's row for each place ``at``; -1 if there is none."""
    row = at
    if KIND == 1:
        row = tl.load(inverses[part] + at, mask=inside, other=-1).to(tl.int64)
    elif KIND == 2:  # the inverse of a View, computed
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
    return row


@triton.jit
def _weight(lse, most):  # type: ignore[no-untyped-def]
    """Return exp(lse - most), without inf - inf; 0 for a query that saw no key."""
    weight = tl.exp(tl.where(lse == most, 0.0, lse - most))
    return tl.where(lse == float("-inf"), 0.0, weight)


@triton.jit
def _plus(sums, more):  # type: ignore[no-untyped-def]
    """Return the sum and its rounding error."""
    grown = sums + more
    return grown, more - (grown - sums)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    out, most, share, part, part_lse, starts, heads, rows, OUT, STATE, PART, LSE,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(rows, BLOCK)
    number = tl.program_id(0).to(tl.int64)
    row = number % blocks * BLOCK + tl.arange(0, BLOCK)
    head, outer = number // blocks % heads, number // blocks // heads
    batch, start = outer // starts, outer % starts
    column = tl.arange(0, WIDTH)[None, :]
    inside = row < rows
    of = batch * STATE[0] + start * STATE[1] + head * STATE[2] + row * STATE[3]
    from_lse = batch * LSE[0] + start * LSE[1] + head * LSE[2] + row * LSE[3]
    into = (batch * OUT[0] + start * OUT[1] + head * OUT[2] + row * OUT[3])[:, None] + column
    source = (batch * PART[0] + start * PART[1] + head * PART[2] + row * PART[3])[:, None] + column
    seen = inside[:, None] & (column < D)
    lse = tl.load(part_lse + from_lse, mask=inside, other=float("-inf")).to(tl.float64)
    old = tl.load(most + of, mask=inside, other=float("-inf"))
    old_share = tl.load(share + of, mask=inside, other=0.0)
    before = tl.load(out + into, mask=seen, other=0.0)
    value = tl.load(part + source, mask=seen, other=0.0).to(tl.float64)
    # Several warps hold the same rows: one must not store what another has yet to load.
    tl.debug_barrier()
    more = tl.maximum(old, lse)
    added = _weight(lse, more)
    total = old_share * _weight(old, more) + added
    tl.store(most + of, more, mask=inside)
    tl.store(share + of, total, mask=inside)
    weight = added / tl.maximum(total, 1.0)
    tl.store(out + into, before + (value - before) * weight[:, None], mask=seen)


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
    share, share_lost = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, WIDTH), tl.float32)
    lost = tl.zeros((BLOCK, WIDTH), tl.float32)
    if MIXES:
        for part in tl.static_range(PARTS):
            row = _row(KINDS[part], part, inverses, views, at, inside, heads)
            place, has = batch * counts[part] + row, inside & (row >= 0)
            lse = tl.load(lses[part] + place, mask=has, other=float("-inf"))
            most = tl.maximum(most, lse)
    for part in tl.static_range(PARTS):
        row = _row(KINDS[part], part, inverses, views, at, inside, heads)
        place, has = batch * counts[part] + row, inside & (row >= 0)
        piece = tl.load(
            values[part] + place[:, None] * D + column,
            mask=has[:, None] & (column < D), other=0.0,
        ).to(tl.float32)  # fmt: skip
        if MIXES:
            lse = tl.load(lses[part] + place, mask=has, other=float("-inf"))
            weight = _weight(lse, most)
            share, share_lost = _plus(share, weight + share_lost)
            sums, lost = _plus(sums, piece * weight[:, None] + lost)
        else:
            sums += piece
    if MIXES:
        share = tl.maximum(share, 1.0)  # 0 where nothing was seen
        tl.store(out_lse + batch * rows + at, most + tl.log(share), mask=inside)
        inverse = tl.math.div_rn(tl.full((BLOCK,), 1.0, tl.float32), share)[:, None]
        quotient = sums * inverse
        left = tl.fma(-quotient, share[:, None], sums) + (lost - quotient * share_lost[:, None])
        sums = tl.fma(left, inverse, quotient)
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


def merge(so_far: Sequence[Tensor], part: Tensor, lse: Tensor) -> None:
    """Merge in place. Shapes [batch, starts, heads, rows] or [batch, rows]; out, part end in D."""
    if part.stride(-1) != 1:
        part = part.contiguous()
    at = (slice(None), *[None] * (5 - part.dim()))
    out, most, share, part, lse = (x[at] for x in (*so_far, part, lse))
    batch, starts, heads, rows, width = part.shape
    block, padded = _block(width)
    if part.numel():
        _merge[(batch * starts * heads * triton.cdiv(rows, block),)](
            out, most, share, part, lse, starts, heads, rows, out.stride()[:4], most.stride(),
            part.stride()[:4], lse.stride(), width, padded, block,
        )  # fmt: skip


def mix(
    out: Tensor, lse: Tensor | None, values: Tensors, lses: Tensors,
    inverses: Sequence[Tensor | None], views: Sequence[Sequence[int] | None], heads: int,
) -> None:  # fmt: skip
    """Write the mix of contiguous parts [B, k, D] and [B, k] into ``out`` [B, size, D] and ``lse``
    [B, size]; without ``lse`` write their sum. An inverse map, or a view of tokens * ``heads``,
    places a part's rows; a part with neither has all rows, in order."""
    kinds = tuple(
        1 if inverse is not None else 2 if view is not None else 0
        for inverse, view in zip(inverses, views, strict=True)
    )
    unused = values[0]
    block, padded = _block(out.shape[-1])
    _mix[triton.cdiv(out.shape[1], block), len(out)](
        values, values if lse is None else lses,
        tuple(unused if inverse is None else inverse for inverse in inverses),
        tuple(number for view in views for number in view or [1] * _VIEW.value),
        tuple(part.shape[1] for part in values), out, out if lse is None else lse, out.shape[1],
        heads, len(values), kinds, lse is not None, out.shape[-1], padded, block,
    )  # fmt: skip


def _block(width: int) -> tuple[int, int]:
    padded = triton.next_power_of_2(width)
    return max(1, _ELEMENTS // padded), padded
