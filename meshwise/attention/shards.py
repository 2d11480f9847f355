"""Share the tokens of a sequence among ranks, with their positions, labels and weights.

A ``Shards`` lists for each rank the intervals [start, stop) of global positions that it holds, in
the order of its local rows. Torch-free.
"""

import itertools
import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from meshwise.spec.record import mistyped

Interval = tuple[int, int]


class Shards(NamedTuple):
    """``intervals[rank]``: its tokens, in local order. Together they cover [0, seq_len) once."""

    intervals: tuple[tuple[Interval, ...], ...]

    @property
    def seq_len(self) -> int:
        return sum(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sum(b - a for a, b in each) for each in self.intervals)


class _ShardTypes(TypedDict, total=False):
    """Types of the helpers' arguments."""

    seq_len: int
    ranks: int
    rank: int
    lengths: tuple[int, ...]
    shards: Shards


def _check(**given: Any) -> None:
    if found := mistyped(given, _ShardTypes):
        raise ValueError(f"{found[0]} = {reprlib.repr(given[found[0]])}: {found[1]}")


def contiguous(seq_len: int, ranks: int) -> Shards:
    """Give each rank one run; the first ranks get one more token if the length does not divide."""
    _check(seq_len=seq_len, ranks=ranks)
    if seq_len < 0 or ranks < 1:
        raise ValueError(f"seq_len = {seq_len}, ranks = {ranks}: must be 0 and 1 or more")
    return of_lengths([seq_len // ranks + (r < seq_len % ranks) for r in range(ranks)])


def of_lengths(lengths: Sequence[int]) -> Shards:
    """Give each rank one run of its length, which may be 0."""
    lengths = tuple(lengths) if isinstance(lengths, list) else lengths
    _check(lengths=lengths)
    if min(lengths, default=-1) < 0:
        raise ValueError(f"lengths = {list(lengths)}: must be 0 or more, one a rank")
    ends = np.cumsum([0, *lengths]).tolist()
    return Shards(tuple(((a, b),) for a, b in itertools.pairwise(ends)))


def zigzag(seq_len: int, ranks: int) -> Shards:
    """Give rank r chunks r and 2n-1-r of 2n: equal causal work. The first chunks may be longer."""
    _check(seq_len=seq_len, ranks=ranks)
    cuts = contiguous(seq_len, 2 * ranks).intervals
    return Shards(tuple((cuts[r][0], cuts[2 * ranks - 1 - r][0]) for r in range(ranks)))


def balanced(seq_len: int, ranks: int) -> Shards:
    """Share a sequence as training does: zigzag where it divides, else contiguous."""
    return (contiguous if seq_len % (2 * ranks) else zigzag)(seq_len, ranks)


def positions(shards: Shards, rank: int) -> npt.NDArray[np.int64]:
    """The global position of each local row: for rotary and learned positions."""
    _check(shards=shards, rank=rank)
    if not 0 <= rank < len(shards.intervals):
        raise ValueError(f"rank = {rank}: must be 0 to {len(shards.intervals) - 1}")
    return np.concatenate([np.arange(a, b) for a, b in shards.intervals[rank]] or [np.arange(0)])


def next_tokens(shards: Shards, rank: int) -> npt.NDArray[np.int64]:
    """Return the global position of each local row's label. The label is the next token, even if
    another rank holds it; the last token of the sequence has none, -1."""
    after = positions(shards, rank) + 1
    return np.where(after == shards.seq_len, -1, after)


def loss_weight(shards: Shards, rank: int) -> float:
    """The weight of this rank's mean loss in the mean over all tokens that have a label."""
    labels = int((next_tokens(shards, rank) >= 0).sum())
    return labels / max(1, shards.seq_len - 1)
