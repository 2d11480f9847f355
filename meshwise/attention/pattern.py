"""Cut dilated attention into tasks, one segment of one branch for one query head, and share them.

In: a ``LongAttention`` with a ``Dilation``. Out: ``Tasks``, the rows of each task. Each row of a
task attends all (causal: all earlier) rows of it. The rows share one phase, so the causal mask is
the plain lower triangle. Definition: ``spec.long_attention``.

A branch whose segments span ranks goes one way. ``gather`` and ``ring``: queries stay, and keys and
values of their segment come, all at once or from one rank after another. ``heads``: a rank takes
whole tasks of some heads with their queries, and returns the results. The ids of the rows that a
rank needs, position * heads + head, ascend. Shards are contiguous, so the ids are in the order of
the holding ranks. Torch-free.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwise.attention.shards import Shards
from meshwise.spec.long_attention import LongAttention, offsets

Ints = npt.NDArray[np.int64]


class Branch(NamedTuple):
    """``offsets``: of each query head, None if it has no part; ``width``: at most seq_len."""

    number: int
    width: int
    rate: int
    offsets: tuple[int | None, ...]


class Tasks(NamedTuple):
    """Tasks with equally many rows: ``head`` [heads], ``position`` [segments, heads, rows]."""

    branch: Branch
    head: Ints
    position: Ints


def branches(op: LongAttention) -> tuple[Branch, ...]:
    """List the branches of an operation. Dense attention is one branch of one segment."""
    if op.dilation is None:
        return (Branch(0, op.seq_len, 1, (0,) * op.heads),)
    pairs = zip(op.dilation.segment_lengths, op.dilation.dilation_rates, strict=True)
    return tuple(
        Branch(i, min(w, op.seq_len), r, tuple(offsets(op.dilation, i, op.heads, op.kv_heads)))
        for i, (w, r) in enumerate(pairs)
    )


def tasks(branch: Branch, seq_len: int, start: int = 0, stop: int | None = None) -> Iterator[Tasks]:
    """Cut a branch into tasks whose segments begin in [start, stop); the last may be short."""
    width, rate = branch.width, branch.rate
    begins = np.arange(-(-start // width) * width, seq_len if stop is None else stop, width)
    short = begins + width > seq_len
    for at, length in ((begins[~short], width), (begins[short], seq_len % width)):
        if not len(at):
            continue
        rows = [0 if s is None else len(range(s, length, rate)) for s in branch.offsets]
        for count in sorted({*rows} - {0}):
            heads = np.array([h for h, n in enumerate(rows) if n == count])
            first = np.array([branch.offsets[h] for h in heads], dtype=np.int64)
            position = at[:, None, None] + first[:, None] + rate * np.arange(count)
            yield Tasks(branch, heads, position)


def is_local(branch: Branch, shards: Shards) -> bool:
    """Whether every segment lies in one shard."""
    borders = np.cumsum([0, *shards.lengths])
    return bool(np.all((borders % branch.width == 0) | (borders >= shards.seq_len)))


# ---- branches whose segments span ranks


class Needs(NamedTuple):
    """Ids of the rows that a rank lacks: ``keys[round][rank]`` of key-value heads,
    ``queries[rank]`` of query heads. By ``heads``: of all rows that the rank works with."""

    keys: list[list[Ints]]
    queries: list[Ints]


class TaskGroup(NamedTuple):
    """Tasks of one rank with equally many queries and keys: ids [tasks, rows], ``head`` [tasks]."""

    head: Ints
    queries: Ints
    keys: Ints
    causal: bool


def needs(op: LongAttention, branch: Branch, shards: Shards, way: str) -> Needs:
    ranks = len(shards.lengths)
    none: Ints = np.zeros(0, np.int64)
    if way == "heads":
        queries: list[list[Ints]] = [[] for _ in range(ranks)]
        keys: list[list[Ints]] = [[] for _ in range(ranks)]
        for every in tasks(branch, op.seq_len):
            owner = owners(branch, every, shards)
            for rank in np.unique(owner):
                mine = owner == rank
                for found, ids in zip((queries, keys), _ids(op, every), strict=True):
                    found[rank].append(ids[mine].ravel())
        return Needs([[_sorted(of) for of in keys]], [_sorted(of) for of in queries])
    rounds: list[list[list[Ints]]] = [
        [[] for _ in range(ranks)] for _ in range(ranks - 1 if way == "ring" else 1)
    ]
    for every in tasks(branch, op.seq_len):
        holder, (_, ids) = holders(shards, every.position), _ids(op, every)
        for rank in range(ranks):
            for each, remote in zip(rounds, _remote(op, holder, rank, ranks, way), strict=True):
                each[rank].append(ids[remote])
    return Needs([[_sorted(of) for of in each] for each in rounds], [none] * ranks)


def calls(
    op: LongAttention, branch: Branch, shards: Shards, way: str, rank: int
) -> list[list[TaskGroup]]:
    """List what ``rank`` computes, round by round. The first round needs no rows of other ranks; by
    ``heads`` it is the only round and needs all."""
    if way == "heads":
        own = []
        for every in tasks(branch, op.seq_len):
            mine = owners(branch, every, shards) == rank
            query, key = _ids(op, every)
            own.append(TaskGroup(_heads(every)[mine], query[mine], key[mine], op.causal))
        return [[call for call in own if len(call.head)]]
    ranks = len(shards.lengths)
    rounds: list[list[TaskGroup]] = [[] for _ in range(ranks if way == "ring" else 2)]
    for every in tasks(branch, op.seq_len):
        holder = holders(shards, every.position)
        here = holder == rank
        rounds[0] += _grouped(op, every, here, here, op.causal)
        for each, there in zip(rounds[1:], _remote(op, holder, rank, ranks, way), strict=True):
            each += _grouped(op, every, here, there, False)
    return rounds


def holders(shards: Shards, position: Ints) -> Ints:
    """The rank that holds each position."""
    found: Ints = np.searchsorted(np.cumsum(shards.lengths), position, side="right")
    return found


def owners(branch: Branch, every: Tasks, shards: Shards) -> Ints:
    """Return the rank that takes each task [segments, heads], by ``heads``. The heads of a segment
    are dealt, in order, to the ranks that hold it."""
    segment = every.position[:, 0, 0] // branch.width * branch.width
    first = holders(shards, segment)
    last = holders(shards, np.minimum(segment + branch.width, shards.seq_len) - 1)
    active = [h for h, s in enumerate(branch.offsets) if s is not None]
    turn = np.searchsorted(active, every.head)
    found: Ints = first[:, None] + turn * (last - first + 1)[:, None] // len(active)
    return found


def _remote(op: LongAttention, holder: Ints, rank: int, ranks: int, way: str) -> Iterator[Ints]:
    """Yield for each round a mask [segments, heads, rows] of the remote rows that this rank's
    queries attend: all in one round, or for the ring one source rank per round."""
    concerned = (holder == rank).any(-1, keepdims=True)
    remote: Ints = concerned & (holder < rank if op.causal else holder != rank)
    if way != "ring":
        yield remote
        return
    for i in range(1, ranks):
        yield remote & ((rank - holder) % ranks == i)


def _grouped(
    op: LongAttention, every: Tasks, here: Ints, there: Ints, causal: bool
) -> Iterator[TaskGroup]:
    """Group tasks with equally many rows in ``here`` and ``there`` [segments, heads, rows]."""
    queries, keys = _ids(op, every)
    num_here, num_there = here.sum(-1), there.sum(-1)
    sizes = np.stack([num_here, num_there], -1).reshape(-1, 2)
    for count_here, count_there in np.unique(sizes, axis=0).tolist():
        if count_here and count_there:
            at = (num_here == count_here) & (num_there == count_there)
            yield TaskGroup(
                _heads(every)[at],
                queries[at][here[at]].reshape(-1, count_here),
                keys[at][there[at]].reshape(-1, count_there),
                causal,
            )


def _ids(op: LongAttention, every: Tasks) -> tuple[Ints, Ints]:
    """Ids of the tasks' rows, as queries and as keys."""
    key_head = every.head * op.kv_heads // op.heads
    queries = every.position * op.heads + every.head[:, None]
    return queries, every.position * op.kv_heads + key_head[:, None]


def _heads(every: Tasks) -> Ints:
    found: Ints = np.broadcast_to(every.head, every.position.shape[:2])
    return found


def _sorted(of: list[Ints]) -> Ints:
    return np.unique(np.concatenate(of)) if of else np.zeros(0, np.int64)
