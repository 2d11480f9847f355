"""Rows of a tensor [batch, rows, width] picked, mixed and added up, by index; and fetched.

On a GPU by kernels of one pass each (``row_kernels``), elsewhere, in fp64, and for more parts than
a kernel takes, by torch's own.

What ranks need of each other is fetched, later returned, many tensors in one exchange: for every
rank there are the ascending ids (position * heads + head) of the rows that it needs, of a tensor
[B, tokens * heads, D] in contiguous shards. ``fetch`` brings [B, ids, D] of every tensor;
``give_back`` takes as much and brings each rank what the others made of its rows.
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
    """Some rows of tokens * heads: in each of ``segments`` segments of ``width`` tokens from
    ``start`` on, ``rows`` tokens ``rate`` apart from ``phase`` on; and ``heads`` heads ``step``
    apart from ``first`` on."""

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
    """The places of a part's rows among ``size`` rows, tokens * ``heads``, each at most once:
    a view of them, or ``where``; neither: it has all of them, in order. ``inverse``, for kernels:
    which row of the part belongs here, -1 for none."""

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
    """x [B, tokens, heads, D]: [B * segments, heads, rows, D]."""
    if isinstance(at, Tensor):
        return take(x.flatten(1, 2), at).flatten(0, 1)
    tokens = x[:, at.start : at.start + at.segments * at.width]
    stop = at.first + at.step * (at.heads - 1) + 1
    of_heads = tokens.unflatten(1, (at.segments, at.width))[..., at.first : stop : at.step, :]
    kept: Tensor = of_heads[:, :, at.phase :: at.rate].flatten(0, 1).transpose(1, 2)
    return kept


def unselect(x: Tensor, at: Tensor | View, batch: int) -> Tensor:
    """[B * segments, heads, rows, D] as [B, k, D], in the order of ``places(at)``."""
    if isinstance(at, View):
        x = x.transpose(1, 2)
    return x.reshape(batch, -1, x.shape[-1])


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, rows, ...], index of any shape: [B, *index.shape, ...]."""
    if _fused(x) and x.dim() == 3:
        from meshwise.attention import row_kernels

        return row_kernels.take(x.contiguous(), index)
    found: Tensor = x.index_select(1, index.flatten()).unflatten(1, index.shape)
    return found


def combine(parts: Sequence[RowPart], like: Tensor) -> tuple[Tensor, Tensor]:
    """Mixes parts by their log-sum-exp (``merge``): out as ``like`` [B, size, D], lse [B, size].
    Rows that no part has are 0 and -inf."""
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
    """Adds parts up, in fp32 or fp64: as ``like`` [B, size, D]."""
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
    """``rows``: of this rank that are sent, by destination; how many go to and come from each
    rank; ``places``: where what each of them returns belongs."""

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
    """Tensors of one dtype and width D, each [B, rows, D]; call for what arrived."""
    taken = [take(x, each.rows) for each, x in wanted]
    return _exchange(wire, taken, [f.sent for f, _ in wanted], [f.received for f, _ in wanted])


def give_back(wire: Wire, made: Sequence[tuple[Fetch, Tensor]]) -> Callable[[], list[Tensor]]:
    """[B, sum(sent), D] of each: of every one of ``rows``, what its destination made of it."""
    tensors = [x for _, x in made]
    return _exchange(wire, tensors, [f.received for f, _ in made], [f.sent for f, _ in made])


def returned_parts(each: Fetch, arrived: Tensor) -> list[RowPart]:
    """Cut what came back into parts for ``rows.total``: several ranks may have had a row."""
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
