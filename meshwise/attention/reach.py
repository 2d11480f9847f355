"""Find the live rows, the keys that each query sees, and the layers until all tokens are connected.

In: a ``LongAttention``. Out: ``Rows``, ``Seen``, ``Path``. Torch-free.

The rows that an offset s keeps in a segment [low, high) are low + s, low + s + r, ... Queries that
attend the same segments in the same branches see the same keys, so keys are counted once for each
such group. Path lengths come from a search over all tokens at once; above 4096 tokens, from the
paper's formula (arXiv 2307.02486), log_a(N (a - 1) / w0).
"""

import itertools
import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from meshwise.attention.pattern import Branch, Ints, branches
from meshwise.spec.long_attention import LongAttention
from meshwise.spec.record import Record

MOST_TOKENS_SEARCHED = 4096  # for the path length
MOST_LAYERS = 200
MOST_STEPS = 2**28  # to count every query's keys; beyond, a sample is counted
NUM_SAMPLES = 2048


class Rows(Record, kw_only=True):
    """Counts of (query, head) rows. A row that some branch keeps is alive, any other is dead.
    ``first_dead``: (row, head). ``lost_token``: a token that no head keeps."""

    alive_share: float
    dead: int
    worst_head: int
    worst_head_dead: int
    first_dead: tuple[int, int] | None
    lost_token: int | None


class Seen(Record, kw_only=True):
    """Distinct keys that a query sees, per (query, head) row, dead rows included. ``share``: of all
    pairs, or all causal pairs; ``multiplicity``: branches that join a pair, of the pairs that any
    branch joins. Exact, or from ``num_rows`` rows spread over the sequence."""

    exact: bool
    num_rows: int
    least: int
    mean: float
    most: int
    share: float
    mean_multiplicity: float
    max_multiplicity: int


class Path(Record, kw_only=True):
    """Layers until every token knows every other (causal: every earlier one). A layer mixes heads
    and keeps what a token knew. ``layers`` is None if this never happens, or is not known.
    ``wall``: tokens before and after this position never meet, because no segment crosses it.
    ``gap``, if causal: this token never knows the one before it, because no segment of rate 1 holds
    both. ``final_share``: of pairs known in the end, after ``final_layers``; only if searched."""

    layers: int | None
    kind: Literal["exact", "about", "at least", "never", "not known"]
    wall: int | None = None
    gap: int | None = None
    final_share: float | None = None
    final_layers: int | None = None


def classes(op: LongAttention) -> dict[tuple[int | None, ...], list[int]]:
    """Group query heads by their offsets in all branches; heads of one class keep the same rows."""
    found: dict[tuple[int | None, ...], list[int]] = {}
    for head, told in enumerate(zip(*(b.offsets for b in branches(op)), strict=True)):
        found.setdefault(told, []).append(head)
    return found


def rows_of(op: LongAttention) -> Rows:
    """Count the rows that are alive; every row is looked at."""
    dead, worst, first = 0, (0, 0), None
    known = np.zeros(op.seq_len, dtype=bool)
    for told, heads in classes(op).items():
        kept = np.zeros(op.seq_len, dtype=bool)
        for branch, offset in zip(branches(op), told, strict=True):
            if offset is not None:
                whole = op.seq_len // branch.width * branch.width
                kept[:whole].reshape(-1, branch.width)[:, offset :: branch.rate] = True
                kept[whole:][offset :: branch.rate] = True
        known |= kept
        lost = op.seq_len - int(np.count_nonzero(kept))
        dead += lost * len(heads)
        if lost > worst[1]:
            worst = heads[0], lost
        if lost and first is None:
            first = int(np.argmin(kept)), heads[0]
    return Rows(
        alive_share=1 - dead / (op.seq_len * op.heads),
        dead=dead,
        worst_head=worst[0],
        worst_head_dead=worst[1],
        first_dead=first,
        lost_token=None if known.all() else int(np.argmin(known)),
    )


def seen_of(op: LongAttention) -> Seen:
    """Count the distinct keys of every row, or of ``NUM_SAMPLES`` if all take too long."""
    found, told = branches(op), classes(op)
    n = op.seq_len
    everything = np.arange(n)
    exact = op.window is not None or n * len(told) <= 2**20
    if exact and op.window is None:
        groups, _ = _groups(found, next(iter(told)), everything)
        exact = len(groups) * n * len(told) <= MOST_STEPS
    if not exact:
        strata = np.linspace(0, n, min(n, max(16, NUM_SAMPLES // len(told))) + 1)
        jitter = np.random.default_rng(0).random(len(strata) - 1)
        everything = (strata[:-1] + jitter * np.diff(strata)).astype(np.int64)
    least, most, highest = n, 0, 0
    distinct = attended = 0
    for offs, heads in told.items():
        keys, pairs, top = _keys(op, found, offs, everything)
        least, most = min(least, int(keys.min())), max(most, int(keys.max()))
        highest = max(highest, top)
        distinct += len(heads) * int(keys.sum())
        attended += len(heads) * pairs
    num_rows = len(everything) * op.heads
    possible = op.heads * int((everything + 1).sum() if op.causal else len(everything) * n)
    return Seen(
        exact=exact,
        num_rows=num_rows if exact else len(everything) * len(told),
        least=least,
        mean=distinct / num_rows,
        most=most,
        share=distinct / possible,
        mean_multiplicity=attended / distinct if distinct else 0.0,
        max_multiplicity=highest,
    )


def _groups(
    found: tuple[Branch, ...], offs: tuple[int | None, ...], positions: Ints
) -> tuple[Ints, Ints]:
    """Group queries that attend the same segments in the same branches and so see the same keys.
    Return the index of each group's first query, and the group of each position."""
    key = np.zeros(len(positions), dtype=np.int64)
    for branch, offset in zip(found, offs, strict=True):
        if offset is not None:
            kept = positions % branch.width % branch.rate == offset
            segment = np.where(kept, positions // branch.width + 1, 0)
            key = key * (int(segment.max(initial=0)) + 1) + segment
            key = np.unique(key, return_inverse=True)[1].astype(np.int64)  # to keep it small
    first, index = np.unique(key, return_index=True, return_inverse=True)[1:]
    return first.astype(np.int64), index.astype(np.int64)


def _keys(
    op: LongAttention, found: tuple[Branch, ...], offs: tuple[int | None, ...], positions: Ints
) -> tuple[Ints, int, int]:
    """Return distinct keys per position, all pairs with multiplicity, the highest multiplicity."""
    if op.window is not None:
        keys = np.minimum(positions + 1, op.window)
        return keys, int(keys.sum()), 1
    first, index = _groups(found, offs, positions)
    order = np.argsort(index, kind="stable")
    ends = np.cumsum(np.bincount(index)).tolist()
    keys, pairs, highest = np.zeros(len(positions), dtype=np.int64), 0, 0
    counts = np.zeros(op.seq_len, dtype=np.uint16)
    for query, (begin, end) in zip(
        positions[first].tolist(), itertools.pairwise([0, *ends]), strict=True
    ):
        low, high = _count(counts, found, offs, query)
        if low < high:
            members = order[begin:end]
            last = positions[members] - low if op.causal else np.full(end - begin, high - low - 1)
            seen = counts[low : low + int(last.max()) + 1]
            keys[members] = np.cumsum(seen > 0, dtype=np.int64)[last]
            pairs += int(np.cumsum(seen, dtype=np.int64)[last].sum())
            highest = max(highest, int(seen.max()))
            counts[low:high] = 0
    return keys, pairs, highest


def _count(
    counts: npt.NDArray[np.uint16], found: tuple[Branch, ...], offs: tuple[int | None, ...],
    query: int,
) -> tuple[int, int]:  # fmt: skip
    """Count the branches that join the query with each key; return the range of those keys."""
    low = high = query
    for branch, offset in zip(found, offs, strict=True):
        if offset is not None and query % branch.width % branch.rate == offset:
            begin = query // branch.width * branch.width
            end = min(begin + branch.width, len(counts))
            counts[begin + offset : end : branch.rate] += 1
            low, high = min(low, begin), max(high, end)
    return low, high


def path_of(op: LongAttention, rows: Rows) -> Path:
    """Search sequences up to ``MOST_TOKENS_SEARCHED``. For longer ones use the paper's formula
    log_a(N (a - 1) / w0), if segment lengths grow by a factor a from w0 and it is not causal."""
    n = op.seq_len
    if n == 1:
        return Path(layers=0, kind="exact")
    if op.dilation is None:
        steps = (op.window or n) - 1
        if not steps:
            return Path(layers=None, kind="never", wall=1, gap=1 if op.causal else None)
        return Path(layers=-(-(n - 1) // steps), kind="exact")
    if n <= MOST_TOKENS_SEARCHED:
        return _searched(op)
    wall, gap = _borders(op)
    if wall or gap or rows.lost_token is not None:
        return Path(layers=None, kind="never", wall=wall, gap=gap)
    widths = sorted(op.dilation.segment_lengths)
    factor = widths[1] / widths[0] if len(widths) > 1 else 1.0
    grows = all(
        math.isclose(b / a, factor) or (b >= n and b / a < factor)  # the last may be cut to N
        for a, b in itertools.pairwise(widths)
    )
    if not op.causal and factor > 1 and grows:
        layers = math.log(n * (factor - 1) / widths[0], factor)
        return Path(layers=max(1, math.ceil(layers - 1e-9)), kind="about")
    return Path(layers=None, kind="not known")


def _borders(op: LongAttention) -> tuple[int | None, int | None]:
    """Return ``wall`` and ``gap``: the first position where all segments end, and all of rate 1."""
    found = branches(op)
    wall = math.lcm(*(branch.width for branch in found))
    gap = math.lcm(*(branch.width for branch in found if branch.rate == 1))
    n = op.seq_len
    return wall if wall < n else None, gap if op.causal and gap < n else None


def _searched(op: LongAttention) -> Path:
    """Search over all tokens at once: bit x of row p says that p knows x. All rows of one phase of
    a segment attend each other, whichever head keeps them."""
    n = op.seq_len
    everything = np.tri(n, dtype=bool) if op.causal else np.ones((n, n), bool)
    target, known = _packed(everything), _packed(np.eye(n, dtype=bool))
    together = [
        slice(low + offset, min(low + branch.width, n), branch.rate)
        for branch in branches(op)
        for offset in {s for s in branch.offsets if s is not None}
        for low in range(0, n, branch.width)
        if low + offset + branch.rate < min(low + branch.width, n)  # two rows or more
    ]
    join = np.bitwise_or.accumulate if op.causal else np.bitwise_or.reduce
    for layer in range(1, MOST_LAYERS + 1):
        after = known.copy()
        for rows in together:
            after[rows] |= join(known[rows], axis=0)
        if np.array_equal(after, target):
            return Path(layers=layer, kind="exact", final_share=1.0, final_layers=layer)
        if np.array_equal(after, known):
            wall, gap = _borders(op)
            ones = int(np.unpackbits(known.view(np.uint8)).sum())
            return Path(
                layers=None,
                kind="never",
                wall=wall,
                gap=gap,
                final_share=ones / int(everything.sum()),
                final_layers=layer - 1,
            )
        known = after
    return Path(layers=MOST_LAYERS + 1, kind="at least")


def _packed(bits: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
    """Pack the columns as bits, 64 in a word."""
    wide = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 64)))
    return np.packbits(wide, axis=1).view(np.uint64)
