"""Dilated attention cut into tasks: one segment of one branch, for one query head.

In: a ``LongAttention`` with a ``Dilation``. Out: ``Tasks``, which rows each task attends with; all
rows of a task attend all (causal: all earlier) rows of it. Since a task's rows share one phase,
causal within it is the plain lower triangle. Torch-free. Definition: ``spec.long_attention``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwise.attention.shards import Shards
from meshwise.spec.long_attention import LongAttention, offsets

Ints = npt.NDArray[np.int64]


class Branch(NamedTuple):
    """``offsets`` of the query heads, None where one has no part. ``width``: at most seq_len."""

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
    """Dense attention is one branch of one segment."""
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
