"""Prepare the part of a dilated attention that one rank computes, with its indices on the device.

In: the operation, shards, the way of each branch, the rank. Out: a ``Schedule``: the batches of
each round of each branch, and what is fetched before the round. A batch is one kernel call.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwise.attention import pattern
from meshwise.attention.kernels import MOST_ELEMENTS
from meshwise.attention.pattern import Ints
from meshwise.attention.rows import Fetch, Places, View, fetch_of, places
from meshwise.attention.shards import Shards
from meshwise.spec.long_attention import LongAttention

MOST_VIEWS = 2  # of a branch, read in place; more and smaller views cost more than a copy


class Batch(NamedTuple):
    """``query``, ``key``: indices [segments, heads, rows] into tokens * heads, or a view.
    ``shares``: gradients of k and v have one row per key head, not per query head."""

    query: Tensor | View
    key: Tensor | View
    causal: bool
    query_places: Places
    key_places: Places
    shares: bool


class RankBranch(NamedTuple):
    """``rounds[0]`` uses own rows, ``rounds[i + 1]`` the rows that ``keys[i]`` fetched. By heads
    ``rounds[0]`` uses what ``queries`` and ``keys[0]`` fetched. ``returned``: the places of own
    rows that other ranks computed."""

    number: int
    way: str
    rounds: list[list[Batch]]
    keys: list[Fetch]
    queries: Fetch
    returned: Places


class Schedule(NamedTuple):
    op: LongAttention
    branches: tuple[RankBranch, ...]

    @property
    def num_rounds(self) -> int:
        return max((len(branch.keys) for branch in self.branches), default=0)


@functools.lru_cache(maxsize=16)
def schedule(
    op: LongAttention, shards: Shards, ways: tuple[str, ...], rank: int, device: torch.device
) -> Schedule:
    make = _Make(op, shards, rank, device)
    found = [
        make.branch(branch, way) for branch, way in zip(pattern.branches(op), ways, strict=True)
    ]
    return Schedule(op, tuple(found))


class _Make(NamedTuple):
    op: LongAttention
    shards: Shards
    rank: int
    device: torch.device

    @property
    def tokens(self) -> int:
        return self.shards.lengths[self.rank]

    @property
    def start(self) -> int:
        return sum(self.shards.lengths[: self.rank])

    def branch(self, branch: pattern.Branch, way: str) -> RankBranch:
        nowhere = Places(self.tokens * self.op.heads)
        if way == "local":
            none = fetch_of([np.zeros(0, np.int64)] * len(self.shards.lengths), 1, self.shards,
                            self.rank, self.device)  # fmt: skip
            return RankBranch(branch.number, way, [list(self._local(branch))], [], none, nowhere)
        needs = pattern.needs(self.op, branch, self.shards, way)
        keys = [self._fetch(of, self.op.kv_heads) for of in needs.keys]
        queries = self._fetch(needs.queries, self.op.heads)
        calls = pattern.calls(self.op, branch, self.shards, way, self.rank)
        if way == "heads":
            here = needs.queries[self.rank], needs.keys[0][self.rank]
            rounds = [[self._away(call, *here) for call in calls[0]]]
            returned = places(queries.rows, self.tokens, self.op.heads, self.device)
            return RankBranch(branch.number, way, rounds, keys, queries, returned)
        rounds = [[self._own(call.head, call.queries, call.causal) for call in calls[0]]]
        for fetched, each in zip(needs.keys, calls[1:], strict=True):
            rounds.append([self._mixed(call, fetched[self.rank]) for call in each])
        return RankBranch(branch.number, way, rounds, keys, queries, nowhere)

    def _fetch(self, ids: list[Ints], heads: int) -> Fetch:
        return fetch_of(ids, heads, self.shards, self.rank, self.device)

    def _local(self, branch: pattern.Branch) -> Iterator[Batch]:
        end = self.start + self.tokens
        for each in pattern.tasks(branch, self.op.seq_len, self.start, end):
            views = self._views(branch, each)
            if views:
                yield from (self._viewed(view) for view in views)
            else:
                queries = each.position * self.op.heads + each.head[:, None]
                yield self._own(each.head, queries, self.op.causal)

    def _views(self, branch: pattern.Branch, each: pattern.Tasks) -> list[View]:
        """Express the tasks as views; empty if they are not regular, or need many. Segments are
        divided among views so that a kernel can index each."""
        segments, _, count = each.position.shape
        groups = self.op.heads // self.op.kv_heads
        begin = int(each.position[0, 0, 0]) // branch.width * branch.width
        width = min(branch.width, self.op.seq_len - begin)
        views = []
        for phase in sorted({branch.offsets[head] or 0 for head in each.head}):
            heads = [h for h in each.head.tolist() if branch.offsets[h] == phase]
            steps = set(np.diff(heads).tolist()) or {1}
            whole = steps == {1} and heads[0] % groups == 0 and len(heads) % groups == 0
            if len(steps) > 1 or not (groups == 1 or whole):
                return []
            segment = begin - self.start, segments, width
            views.append(
                View(*segment, branch.rate, phase, count, heads[0], steps.pop(), len(heads))
            )
        if len(views) > MOST_VIEWS:
            return []
        row = self.op.batch * self.op.heads * self.op.head_dim
        most = max(1, MOST_ELEMENTS // (width * row))
        return [
            view._replace(start=view.start + first * width, segments=min(most, segments - first))
            for view in views
            for first in range(0, segments, most)
        ]

    def _viewed(self, at: View) -> Batch:
        groups = self.op.heads // self.op.kv_heads
        key = at._replace(first=at.first // groups, heads=at.heads // groups)
        if groups == 1:
            key = at
        query_places = places(at, self.tokens, self.op.heads, self.device)
        key_places = places(key, self.tokens, self.op.kv_heads, self.device)
        return Batch(at, key, self.op.causal, query_places, key_places, True)

    def _own(self, head: Ints, queries: Ints, causal: bool) -> Batch:
        """Pair own queries with own keys; ``queries``: ids over the whole sequence."""
        local = queries - self.start * self.op.heads
        token = local // self.op.heads
        shared = np.broadcast_to((head * self.op.kv_heads // self.op.heads)[..., None], token.shape)
        query, key = self._index(local), self._index(token * self.op.kv_heads + shared)
        at = places(query, self.tokens, self.op.heads, self.device)
        return Batch(_tasks(query), _tasks(key), causal, at, at, False)

    def _mixed(self, call: pattern.TaskGroup, fetched: Ints) -> Batch:
        """Pair own queries with fetched keys."""
        query = self._index(call.queries - self.start * self.op.heads)
        key = self._index(np.searchsorted(fetched, call.keys))
        at = places(query, self.tokens, self.op.heads, self.device)
        return Batch(_tasks(query), _tasks(key), call.causal, at, Places(len(fetched)), True)

    def _away(self, call: pattern.TaskGroup, queries: Ints, keys: Ints) -> Batch:
        """Pair fetched queries with fetched keys."""
        query = self._index(np.searchsorted(queries, call.queries))
        key = self._index(np.searchsorted(keys, call.keys))
        at = places(query, len(queries), 1, self.device)
        return Batch(_tasks(query), _tasks(key), call.causal, at, Places(len(keys)), True)

    def _index(self, rows: Ints) -> Tensor:
        return torch.from_numpy(rows.astype(np.int32)).to(self.device)


def _tasks(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 3 else rows.unsqueeze(1)
