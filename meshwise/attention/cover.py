"""Count what a pattern of attention covers and must move, before it runs. Torch-free.

In: a ``LongAttention`` and its ``Shards``. Out: a ``Cover``. The rows that an offset s keeps in a
segment [low, high) are the progression low + s, low + s + r, ... So everything is counted piece by
piece, never pair by pair:

    n(x)      = ceil((x - low - s) / r)        rows kept in [low, x)
    pairs     = sum over pieces [a, b) of a rank: (n(b) - n(a)) n(high); causal: sum of n(a)+1..n(b)
    U(g, j)   = keys outside rank j that a query inside it attends, with a head that uses KV head g
    bound_j   = 2 batch head_dim e sum_g |U(g, j)|         owner computes: only K and V move
    gather_j  = the same for one branch alone
    heads_j   = batch head_dim e (q + 2 kv rows of other ranks, for j's heads; out rows of j's own
                queries, for other ranks' heads) + log-sum-exps of these out rows. The ranks of a
                segment swap tokens for whole heads, dealt in order, and out comes back

Bytes are what a rank receives in the forward. A key that several branches need counts once in the
bound, and once in each branch's gather.
"""

import functools
import itertools
from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from meshwise.attention import volume
from meshwise.attention.pattern import Branch, Ints, branches
from meshwise.attention.reach import Path, Rows, Seen, path_of, rows_of, seen_of
from meshwise.attention.shards import Shards
from meshwise.spec.long_attention import LongAttention
from meshwise.spec.record import Record

MOST_ROUND = 256  # ranks of a ring whose messages are counted


class BranchCover(Record, kw_only=True):
    """Counts of one branch; bytes are what each rank receives. ``ranks``: the most that share a
    segment. ``world_bytes``: if all ranks gathered all kept rows, as torchscale does."""

    segment_length: int
    dilation_rate: int
    pairs: int
    local: bool
    ranks: int
    gather_bytes: tuple[int, ...]
    heads_bytes: tuple[int, ...]
    world_bytes: tuple[int, ...]


class Cover(Record, kw_only=True):
    """Counts of an operation. ``target_bytes``: bytes into the busiest rank, each branch by the
    cheaper of gather and heads, dense attention by its cheapest way; may be below ``bound_bytes``.
    ``dense_*``: for dense attention, with the operation's window; None if not counted."""

    op: LongAttention
    lengths: tuple[int, ...]
    rows: Rows
    seen: Seen
    path: Path
    pairs: int
    share_of_dense: float
    flops: int
    kv_bytes: tuple[int, ...]
    out_bytes: tuple[int, ...]
    rank_pairs: tuple[int, ...]
    imbalance: float
    bound_bytes: tuple[int, ...]
    branches: tuple[BranchCover, ...]
    target_bytes: int
    dense_gather_bytes: int
    dense_heads_bytes: int
    dense_ring_bytes: int | None


def of(op: LongAttention, shards: Shards) -> Cover:
    """Count what ``op`` covers and costs on the ranks of ``shards``."""
    if shards.seq_len != op.seq_len:
        raise ValueError(
            f"shards: hold {shards.seq_len} tokens; must hold op.seq_len = {op.seq_len}"
        )
    whole, ranks = replace(op, dilation=None, window=None), len(shards.lengths)
    ways = ("gather", "heads", "ring")[: 2 + (ranks <= MOST_ROUND)]
    counted = op if op.dilation is None else whole
    dense = {way: volume.dense_bytes(counted, shards, way)[0] for way in ways}
    found: tuple[BranchCover, ...]
    if op.dilation is None:
        each = BranchCover(
            segment_length=op.seq_len, dilation_rate=1, pairs=op.pairs, local=ranks == 1,
            ranks=ranks, gather_bytes=dense["gather"], heads_bytes=dense["heads"],
            world_bytes=dense["gather"],
        )  # fmt: skip
        found = (each,)
        target_bytes = min(map(max, dense.values()))
    else:
        found = tuple(_branch(op, branch, shards) for branch in branches(op))
        target_bytes = sum(min(max(b.gather_bytes), max(b.heads_bytes)) for b in found)
    rank_pairs, rows, row = pairs_of_ranks(op, shards), rows_of(op), op.row_bytes
    return Cover(
        op=op,
        lengths=shards.lengths,
        rows=rows,
        seen=seen_of(op),
        path=path_of(op, rows),
        pairs=op.pairs,
        share_of_dense=op.pairs / whole.pairs,
        flops=op.flops,
        kv_bytes=tuple(2 * n * row * op.kv_heads for n in shards.lengths),
        out_bytes=tuple(n * row * op.heads for n in shards.lengths),
        rank_pairs=rank_pairs,
        imbalance=max(rank_pairs) * len(rank_pairs) / sum(rank_pairs) if sum(rank_pairs) else 1.0,
        bound_bytes=bound_bytes(op, shards),
        branches=found,
        target_bytes=target_bytes,
        dense_gather_bytes=max(dense["gather"]),
        dense_heads_bytes=max(dense["heads"]),
        dense_ring_bytes=max(dense["ring"]) if "ring" in dense else None,
    )


# ---- segments, cut where ranks change


class RankRuns(NamedTuple):
    """Pieces [start, stop) of ``rank`` in the segment [low, high); arrays, in order."""

    start: Ints
    stop: Ints
    low: Ints
    high: Ints
    rank: Ints

    def kept(self, offset: int, rate: int) -> tuple[Ints, Ints, Ints]:
        """Return n(start), n(stop) and n(high)."""
        before, to, whole = (
            np.maximum(0, -((self.low + offset - x) // rate))
            for x in (self.start, self.stop, self.high)
        )
        return before, to, whole

    @property
    def num_ranks(self) -> Ints:
        """The number of ranks that share the segment of each piece."""
        pairs = np.unique(np.stack([self.low, self.rank]), axis=1)
        lows, counts = np.unique(pairs[0], return_counts=True)
        return np.asarray(counts[np.searchsorted(lows, self.low)], dtype=np.int64)


def cuts(width: int, shards: Shards) -> RankRuns:
    """Cut the sequence where segments of ``width`` or ranks end."""
    seq_len = shards.seq_len
    held = sorted((a, b, rank) for rank, own in enumerate(shards.intervals) for a, b in own)
    firsts = np.array([a for a, b, _ in held if b > a], dtype=np.int64)
    ranks = np.array([rank for a, b, rank in held if b > a], dtype=np.int64)
    borders = np.unique(np.concatenate([np.arange(0, seq_len, width), firsts, [seq_len]]))
    start, stop = borders[:-1], borders[1:]
    low = start // width * width
    rank = ranks[np.searchsorted(firsts, start, side="right") - 1]
    return RankRuns(start, stop, low, np.minimum(low + width, seq_len), rank)


def pairs_of_ranks(op: LongAttention, shards: Shards) -> tuple[int, ...]:
    """Attended pairs of each rank's own queries, over all heads, with multiplicity."""
    if op.window is not None:
        upto = functools.partial(_window_pairs, op.window)
        return tuple(op.heads * sum(upto(b) - upto(a) for a, b in own) for own in shards.intervals)
    total = np.zeros(len(shards.intervals), dtype=np.int64)
    for branch in branches(op):
        pieces = cuts(branch.width, shards)
        np.add.at(total, pieces.rank, _pairs(op, branch, pieces))
    return tuple(total.tolist())


def _pairs(op: LongAttention, branch: Branch, pieces: RankRuns) -> Ints:
    """Attended pairs of each piece's queries in all heads."""
    found = np.zeros(len(pieces.rank), dtype=np.int64)
    for offset, num_heads in Counter(branch.offsets).items():
        if offset is not None:
            before, to, whole = pieces.kept(offset, branch.rate)
            causal = (to * (to + 1) - before * (before + 1)) // 2
            found += num_heads * (causal if op.causal else (to - before) * whole)
    return found


def _window_pairs(window: int, stop: int) -> int:
    """Count the pairs of the queries before ``stop``, in one head."""
    most = min(stop, window)
    return most * (most + 1) // 2 + (stop - most) * most


def _branch(op: LongAttention, branch: Branch, shards: Shards) -> BranchCover:
    """Count one dilated branch alone. Shards are contiguous."""
    pieces, ranks = cuts(branch.width, shards), len(shards.intervals)
    kept = np.zeros(ranks, dtype=np.int64)  # rows of K
    for _, offset in {(h * op.kv_heads // op.heads, s) for h, s in enumerate(branch.offsets)}:
        if offset is not None:
            before, to, _ = pieces.kept(offset, branch.rate)
            np.add.at(kept, pieces.rank, to - before)
    sharers = pieces.num_ranks
    local = int(sharers.max()) == 1
    gather, heads = _moved(op, branch, RankRuns(*(each[sharers > 1] for each in pieces)), ranks)
    world = (0 if local else 2 * op.row_bytes) * (kept.sum() - kept)
    return BranchCover(
        segment_length=branch.width,
        dilation_rate=branch.rate,
        pairs=int(_pairs(op, branch, pieces).sum()),
        local=local,
        ranks=int(sharers.max()),
        gather_bytes=tuple(gather.tolist()),
        heads_bytes=tuple(heads.tolist()),
        world_bytes=tuple(world.tolist()),
    )


def _moved(op: LongAttention, branch: Branch, shared: RankRuns, ranks: int) -> tuple[Ints, Ints]:
    """Bytes into each rank by gather, by heads. ``shared``: pieces of segments on several ranks."""
    row, lse = op.row_bytes, op.lse_bytes
    low, segment = np.unique(shared.low, return_inverse=True)
    first, last = np.full(len(low), ranks), np.zeros(len(low), dtype=np.int64)
    np.minimum.at(first, segment, shared.rank)
    np.maximum.at(last, segment, shared.rank)
    gather, heads = np.zeros((2, ranks), dtype=np.int64)
    takers: dict[tuple[int, int], list[Ints]] = {}  # ranks that already have these rows of K
    active = [(h, s) for h, s in enumerate(branch.offsets) if s is not None]
    for turn, (head, offset) in enumerate(active):
        before, to, whole = shared.kept(offset, branch.rate)
        own = to - before
        owner = (first + turn * (last - first + 1) // len(active))[segment]
        away = owner != shared.rank
        np.add.at(heads, owner[away], row * own[away])
        np.add.at(heads, shared.rank[away], (row + lse) * own[away])
        had = takers.setdefault((head * op.kv_heads // op.heads, offset), [])
        if not had:
            others = np.where(own > 0, before if op.causal else whole - own, 0)
            np.add.at(gather, shared.rank, 2 * row * others)
        new = away & np.all([owner != each for each in had], axis=0)
        np.add.at(heads, owner[new], 2 * row * own[new])
        had.append(owner)
    return gather, heads


# ---- the lower bound


def bound_bytes(op: LongAttention, shards: Shards) -> tuple[int, ...]:
    """Bytes of K and V that each rank must receive if it computes its own queries; exact."""
    groups, found = op.heads // op.kv_heads, branches(op)
    patterns = Counter(  # per KV head: the offsets of its query heads, branch by branch
        tuple(frozenset(b.offsets[g * groups : (g + 1) * groups]) for b in found)
        for g in range(op.kv_heads)
    )
    shared = [_shared_pieces(each, shards) for each in found]
    needed = np.zeros(op.seq_len, dtype=bool)
    total = []
    for rank, own in enumerate(shards.intervals):
        rows = 0
        for pattern, num_kv_heads in patterns.items():
            if op.window is not None:
                for start, stop in own:
                    needed[max(0, start - op.window + 1) : stop] = True
            else:
                for branch, kept, pieces in zip(found, pattern, shared, strict=True):
                    _mark(needed, pieces[rank], branch.rate, kept, op.causal)
            for start, stop in own:
                needed[start:stop] = False
            rows += num_kv_heads * int(np.count_nonzero(needed))
            needed[:] = False
        total.append(2 * op.row_bytes * rows)
    return tuple(total)


def _shared_pieces(branch: Branch, shards: Shards) -> list[list[list[int]]]:
    """Return each rank's pieces [start, stop, low, high] in segments that it shares with others."""
    pieces = cuts(branch.width, shards)
    of_rank: list[list[list[int]]] = [[] for _ in shards.intervals]
    table = np.stack([*pieces[:4], pieces.rank], axis=1)[pieces.num_ranks > 1]
    for *piece, rank in table.tolist():
        of_rank[rank].append(piece)
    return of_rank


def _mark(
    needed: npt.NDArray[np.bool_], pieces: list[list[int]], rate: int,
    kept: frozenset[int | None], causal: bool,
) -> None:  # fmt: skip
    for (start, stop, low, high), offset in itertools.product(pieces, kept):
        if offset is None:
            continue
        first = low + offset
        num_before = max(0, -((first - start) // rate))
        num_to = max(0, -((first - stop) // rate))
        if num_to > num_before:  # the rank has a query there
            needed[first : first + (num_to - 1) * rate + 1 if causal else high : rate] = True
