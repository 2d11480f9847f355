"""Plan how the ranks of a group share one attention: the way of each branch, and what it moves.

In: the operation, its shards, prices if there are any. Out: an ``AttentionPlan``, the same on all
ranks. A dilated branch whose segments lie inside shards is ``local`` and moves nothing. Any other
branch takes the cheapest way: by the prices of its transfers, or without prices by the bytes into
the busiest rank, plus ``ROUND_BYTES`` per round of messages. Dense attention: ``volume``.
Torch-free.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from meshwise.attention import pattern, volume
from meshwise.attention.shards import Shards, contiguous, zigzag
from meshwise.prices import Prices
from meshwise.spec import Collective, LongAttention

SPARSE_WAYS = ("gather", "heads", "ring")
ROUND_BYTES = 2**20  # what a further round costs besides its bytes, if nothing was measured


class BranchPlan(NamedTuple):
    """``way``: local, gather, heads, ring or ring_heads. Bytes are what each rank receives from
    others; the backward's exclude the forward's. ``time_s``: of the transfers alone, if priced."""

    way: str
    received_bytes: tuple[int, ...]
    backward_received_bytes: tuple[int, ...]
    time_s: float | None
    why: str


class AttentionPlan(NamedTuple):
    op: LongAttention
    shards: Shards
    branches: tuple[BranchPlan, ...]

    @property
    def ways(self) -> tuple[str, ...]:
        return tuple(branch.way for branch in self.branches)

    def received_bytes(self, direction: str = "forward") -> tuple[int, ...]:
        """Return the bytes each rank receives; ``backward`` counts the forward too."""
        each = [branch.received_bytes for branch in self.branches]
        if direction == "backward":
            each += [branch.backward_received_bytes for branch in self.branches]
        return tuple(map(sum, zip(*each, strict=True)))

    def __str__(self) -> str:
        lines = [f"{len(self.shards.lengths)} ranks, {self.op.seq_len} tokens"]
        for at, branch in enumerate(self.branches):
            what = "dense"
            if (dilation := self.op.dilation) is not None:
                what = f"w {dilation.segment_lengths[at]} r {dilation.dilation_rates[at]}"
            most = max(branch.received_bytes), max(branch.backward_received_bytes)
            lines.append(
                f"{what}: {branch.way}, {most[0]} + {most[1]} bytes into the busiest rank"
                f" ({branch.why})"
            )
        return "\n".join(lines)


def exchange_plan(
    op: LongAttention, ranks: int, shards: Shards | None = None, prices: Prices | None = None
) -> AttentionPlan:
    """Plan all branches. ``shards``: by default contiguous or zigzag, as ``op.order`` says."""
    if shards is None:
        shards = (zigzag if op.order == "zigzag" else contiguous)(op.seq_len, ranks)
    if op.dilation is None:
        return AttentionPlan(op, shards, (_dense(op, shards, prices),))
    found = [_sparse(op, branch, shards, prices) for branch in pattern.branches(op)]
    return AttentionPlan(op, shards, tuple(found))


def _dense(op: LongAttention, shards: Shards, prices: Prices | None) -> BranchPlan:
    ranks = len(shards.lengths)
    zero = (0,) * ranks
    if ranks == 1:
        return BranchPlan("local", zero, zero, 0.0, "one rank")
    way: str = op.way
    why = "asked for"
    if way == "auto":
        way, why = volume.choose_dense(op, shards, prices), "priced" if prices else "by rule"
    volume.check_way(op, ranks, way)
    return BranchPlan(way, *volume.dense_bytes(op, shards, way), None, why)


def _sparse(
    op: LongAttention, branch: pattern.Branch, shards: Shards, prices: Prices | None
) -> BranchPlan:
    zero = (0,) * len(shards.lengths)
    if pattern.is_local(branch, shards):
        return BranchPlan("local", zero, zero, 0.0, "segments lie inside shards")
    if op.way == "ring_heads":
        raise ValueError("way = 'ring_heads': a dilated branch goes by gather, heads or ring")
    ways = SPARSE_WAYS if op.way == "auto" else (op.way,)
    tried = [_branch(op, branch, shards, way, prices) for way in ways]
    best = min(tried, key=lambda each: _cost(each, len(zero)))
    if op.way != "auto":
        return best._replace(why="asked for")
    rest = ", ".join(f"{one.way} {_most(one)}" for one in tried if one is not best)
    return best._replace(why=f"priced; {rest} bytes" if prices else f"least of all: {rest} bytes")


def _most(tried: BranchPlan) -> int:
    """Bytes into the busiest rank, forward and backward."""
    return max(tried.received_bytes) + max(tried.backward_received_bytes)


def _cost(tried: BranchPlan, ranks: int) -> float:
    if tried.time_s is not None:
        return tried.time_s
    rounds = ranks - 1 if tried.way == "ring" else 2 if tried.way == "heads" else 1
    return _most(tried) + rounds * ROUND_BYTES


def _branch(
    op: LongAttention, branch: pattern.Branch, shards: Shards, way: str, prices: Prices | None
) -> BranchPlan:
    """Count the bytes of a branch by one way. Forward: each rank receives keys and values; by
    ``heads`` also queries, for which it returns out and lse. Backward: by ``heads`` it receives the
    gradient, out and lse, and returns dq, dk and dv; by other ways dk and dv, in fp32."""
    keys, queries = (_messages(op, branch, shards, way, of) for of in ("keys", "queries"))
    row, wide, lse = op.row_bytes, op.wide_row_bytes, op.lse_bytes
    there = 2 * row * keys + row * queries, 2 * row * queries + lse * queries
    back = (row + lse) * queries, row * queries + (2 * row if way == "heads" else 2 * wide) * keys
    forward, backward = (
        tuple(map(int, a.sum(0) + b.sum(1))) for a, b in zip(there, back, strict=True)
    )
    time_s = None if prices is None else _time_s(there + back, way, prices)
    return BranchPlan(way, forward, backward, time_s, "")


def _time_s(messages: tuple[Any, ...], way: str, prices: Prices) -> float:
    """Seconds of all transfers: collectives, or ring shifts, of the busiest rank's bytes."""
    ranks, seconds = len(messages[0]), 0.0
    for each in messages:
        most = int(max(each.sum(0).max(), each.sum(1).max()))
        if most and way == "ring":
            shift = Collective(
                kind="send_recv", size_bytes=-(-most // (ranks - 1)), group_size=ranks
            )
            seconds += (ranks - 1) * prices.estimate(shift).time_s
        elif most:
            size = -(-most * ranks // (ranks - 1))
            swap = Collective(kind="all_to_all", size_bytes=size, group_size=ranks)
            seconds += prices.estimate(swap).time_s
    return seconds


@functools.lru_cache(maxsize=256)
def _messages(op: LongAttention, branch: pattern.Branch, shards: Shards, way: str, of: str) -> Any:
    """Count rows [from, to] of ``keys`` or ``queries`` that ranks send each other, per sequence."""
    found, ranks = pattern.needs(op, branch, shards, way), len(shards.lengths)
    heads = op.kv_heads if of == "keys" else op.heads
    counts = np.zeros((ranks, ranks), np.int64)
    for each in found.keys if of == "keys" else [found.queries]:
        for rank, ids in enumerate(each):
            counts[:, rank] += np.bincount(pattern.holders(shards, ids // heads), minlength=ranks)[
                :ranks
            ]
    np.fill_diagonal(counts, 0)
    return counts
