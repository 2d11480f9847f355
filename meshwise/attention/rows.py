"""Pick, mix and add up rows of a tensor [batch, rows, width] by index; fetch rows of other ranks.

On a GPU this takes kernels of one pass each (``row_kernels``). On a CPU, in fp64, and for more
parts than a kernel takes, it takes torch's own operations.

Ranks fetch rows from each other and later return results, many tensors in one exchange. For every
rank there are the ascending ids (position * heads + head) of the rows that it needs, of a tensor
[B, tokens * heads, D] in contiguous shards. ``fetch`` brings [B, ids, D] of each; ``give_back``
takes results of that shape and brings each rank those of its own rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwise.attention.merge import SoFar, merge, nothing, result, wide
from meshwise.attention.pattern import Ints
from meshwise.attention.shards import Shards
from meshwise.attention.wire import Wire

MOST_PARTS = 32  # of one kernel, which is compiled for their number


class View(NamedTuple):
    """Regularly spaced rows of tokens * heads. From token ``start`` on there are ``segments``
    segments of ``width`` tokens; each keeps ``rows`` tokens, ``rate`` apart, from ``phase`` on. Of
    each token it keeps ``heads`` heads, ``step`` apart, from ``first`` on."""

    start: int
    segments: int
    width: int
    rate: int
    phase: int
    rows: int
    first: int
    step: int
    heads: int


class Places(NamedTuple):
    """Places of a part's rows among ``size`` rows, tokens * ``heads``, each at most once: by a
    ``view`` or an index ``where``; with neither the part has all rows, in order. ``inverse``, for
    kernels: the part's row at each place, -1 for none."""

    size: int
    heads: int = 1
    view: View | None = None
    where: Tensor | None = None
    inverse: Tensor | None = None


class RowPart(NamedTuple):
    """``values`` [B, k, D] and, where parts are mixed, ``lse`` [B, k]."""

    values: Tensor
    places: Places
    lse: Tensor | None = None


def places(at: Tensor | View | None, tokens: int, heads: int, device: torch.device) -> Places:
    """Places of an index of int32, or of a view, among ``tokens`` * ``heads`` rows."""
    count = tokens * heads
    if at is None or at == View(0, 1, tokens, 1, 0, tokens, 0, 1, heads):
        return Places(count, heads)
    if isinstance(at, View):
        return Places(count, heads, at)
    inverse = None
    if device.type == "cuda":
        inverse = torch.full((count,), -1, dtype=torch.int32, device=device)
        inverse[at.flatten().long()] = torch.arange(at.numel(), dtype=torch.int32, device=device)
    return Places(count, heads, None, at.flatten(), inverse)


def select(x: Tensor, at: Tensor | View) -> Tensor:
    """Pick rows of x [B, tokens, heads, D] as [B * segments, heads, rows, D]."""
    if isinstance(at, Tensor):
        return take(x.flatten(1, 2), at).flatten(0, 1)
    tokens = x[:, at.start : at.start + at.segments * at.width]
    stop = at.first + at.step * (at.heads - 1) + 1
    of_heads = tokens.unflatten(1, (at.segments, at.width))[..., at.first : stop : at.step, :]
    kept: Tensor = of_heads[:, :, at.phase :: at.rate].flatten(0, 1).transpose(1, 2)
    return kept


def unselect(x: Tensor, at: Tensor | View, batch: int) -> Tensor:
    """Reshape [B * segments, heads, rows, D] to [B, k, D], in the order of ``places(at)``."""
    if isinstance(at, View):
        x = x.transpose(1, 2)
    return x.reshape(batch, -1, x.shape[-1])


def take(x: Tensor, index: Tensor) -> Tensor:
    """Pick rows of x [B, rows, ...] by an index of any shape, as [B, *index.shape, ...]."""
    if _fused(x) and x.dim() == 3:
        from meshwise.attention import row_kernels

        return row_kernels.take(x.contiguous(), index)
    found: Tensor = x.index_select(1, index.flatten()).unflatten(1, index.shape)
    return found


def combine(parts: Sequence[RowPart], like: Tensor) -> tuple[Tensor, Tensor]:
    """Mix parts by their log-sum-exp (``merge``). Return out, shape and dtype as ``like``
    [B, size, D], and lse [B, size]; rows that no part has are 0 and -inf."""
    if _fused(like, len(parts)):
        lse = like.new_empty(like.shape[:-1], dtype=torch.float32)
        return _mixed(parts, like, lse), lse
    so_far = nothing(like.shape, like.device)
    for part in parts:
        assert part.lse is not None
        if (index := _where(part)) is None:
            merge(so_far, part.values, part.lse)
            continue
        there = SoFar(*(x.index_select(1, index) for x in so_far))
        merge(there, part.values, part.lse)
        for x, rows in zip(so_far, there, strict=True):
            x.index_copy_(1, index.long(), rows)
    return result(so_far, like)


def total(parts: Sequence[RowPart], like: Tensor) -> Tensor:
    """Add parts up in fp32 or fp64. Return the sum, shape and dtype as ``like`` [B, size, D]."""
    if _fused(like, len(parts)):
        return _mixed(parts, like, None)
    out = torch.zeros(like.shape, dtype=wide(like.dtype), device=like.device)
    for part in parts:
        values = part.values.to(out.dtype)
        if (index := _where(part)) is None:
            out += values
        else:
            out.index_add_(1, index, values)
    return out.to(like.dtype)


def _fused(x: Tensor, parts: int = 1) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and 0 < parts <= MOST_PARTS


def _mixed(parts: Sequence[RowPart], like: Tensor, lse: Tensor | None) -> Tensor:
    from meshwise.attention import row_kernels

    values = tuple(part.values.contiguous() for part in parts)
    lses = tuple(part.lse.contiguous() for part in parts if part.lse is not None)
    _, heads, views, _, inverses = zip(*(part.places for part in parts), strict=True)
    out = like.new_empty(like.shape)
    row_kernels.mix(out, lse, values, lses, inverses, views, max(heads))
    return out


def _where(part: RowPart) -> Tensor | None:
    """The index of a part's rows; None: all, in order."""
    _, heads, view, where, _ = part.places
    return where if view is None else _index(view, heads, part.values.device)


@functools.lru_cache(64)
def _index(at: View, heads: int, device: torch.device) -> Tensor:
    numbers = functools.partial(torch.arange, dtype=torch.int32, device="cpu")
    segment, row = at.start + at.width * numbers(at.segments), at.phase + at.rate * numbers(at.rows)
    head = at.first + at.step * numbers(at.heads)
    index: Tensor = (segment[:, None, None] + row[:, None]) * heads + head
    return index.flatten().to(device)


# ---- rows of other ranks


class Fetch(NamedTuple):
    """``rows``: of this rank, to be sent, by destination; ``sent``, ``received``: how many, by
    rank; ``places``: for each rank, where the rows that it gives back belong."""

    rows: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    places: tuple[Places, ...]


def fetch_of(
    ids: Sequence[Ints], heads: int, shards: Shards, rank: int, device: torch.device
) -> Fetch:
    borders = np.cumsum([0, *shards.lengths]) * heads
    here = [each[slice(*np.searchsorted(each, borders[rank : rank + 2]))] for each in ids]
    index = [torch.from_numpy((each - borders[rank]).astype(np.int32)).to(device) for each in here]
    return Fetch(
        torch.cat(index),
        tuple(map(len, here)),
        tuple(np.diff(np.searchsorted(ids[rank], borders)).tolist()),
        tuple(places(each, shards.lengths[rank], heads, device) for each in index),
    )


def fetch(wire: Wire, wanted: Sequence[tuple[Fetch, Tensor]]) -> Callable[[], list[Tensor]]:
    """Start to fetch rows of tensors [B, rows, D] of one dtype and D; call the result for them."""
    taken = [take(x, each.rows) for each, x in wanted]
    return _exchange(wire, taken, [f.sent for f, _ in wanted], [f.received for f, _ in wanted])


def give_back(wire: Wire, made: Sequence[tuple[Fetch, Tensor]]) -> Callable[[], list[Tensor]]:
    """Send results back. Call the result for [B, sum(sent), D]: one row for each of ``rows``."""
    tensors = [x for _, x in made]
    return _exchange(wire, tensors, [f.received for f, _ in made], [f.sent for f, _ in made])


def returned_parts(each: Fetch, arrived: Tensor) -> list[RowPart]:
    """Cut returned rows into parts for ``total``: several ranks may return the same row."""
    pieces = arrived.split(list(each.sent), dim=1)
    return [RowPart(x, at) for x, at in zip(pieces, each.places, strict=True) if x.shape[1]]


def _exchange(
    wire: Wire,
    tensors: Sequence[Tensor],
    sent: Sequence[Sequence[int]],
    received: Sequence[Sequence[int]],
) -> Callable[[], list[Tensor]]:
    if not tensors:
        return lambda: []
    batch, _, width = tensors[0].shape
    pieces = [x.split(list(counts), dim=1) for x, counts in zip(tensors, sent, strict=True)]
    message = [of[rank].reshape(-1, width) for rank in range(wire.size) for of in pieces]
    arrived = wire.exchange(
        torch.cat(message),
        [batch * sum(of) for of in zip(*sent, strict=True)],
        [batch * sum(of) for of in zip(*received, strict=True)],
    )

    def unpack() -> list[Tensor]:
        sizes = [batch * of[rank] for rank in range(wire.size) for of in received]
        chunks = [x.view(batch, -1, width) for x in arrived().split(sizes)]
        return [torch.cat(chunks[i :: len(tensors)], dim=1) for i in range(len(tensors))]

    return unpack
