"""Rows that ranks need of each other: fetched, later returned, many tensors in one exchange.

In: for every rank the ascending ids (position * heads + head) of the rows that it needs, of a
tensor [B, tokens * heads, D] in contiguous shards. ``fetch`` brings [B, ids, D] of every tensor;
``give_back`` takes as much and brings each rank what the others made of its rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwise.attention.pattern import Ints
from meshwise.attention.rows import Part, Places, places, take
from meshwise.attention.shards import Shards
from meshwise.attention.wire import Wire


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


def parts(each: Fetch, arrived: Tensor) -> list[Part]:
    """Cut what came back into parts for ``rows.total``: several ranks may have had a row."""
    pieces = arrived.split(list(each.sent), dim=1)
    return [Part(x, at) for x, at in zip(pieces, each.places, strict=True) if x.shape[1]]


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
