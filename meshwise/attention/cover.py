"""What a pattern of attention covers and must move, before anything runs. Torch-free.

In: a ``LongAttention`` and its ``Shards``. Out: a ``Cover``. Rows that an offset s keeps in a
segment [low, high) are the progression low + s, low + s + r, ...; so all is counted piece by piece,
and never pair by pair:

    n(x)      = ceil((x - low - s) / r)        rows kept in [low, x)
    pairs     = sum over pieces [a, b) of a rank: (n(b) - n(a)) n(high); causal: sum of n(a)+1..n(b)
    U(g, j)   = keys outside rank j that a query inside it attends, with a head that uses KV head g
    bound_j   = 2 batch head_dim e sum_g |U(g, j)|         owner computes: only K and V move
    gather_j  = 2 batch head_dim e (rows kept in j's segments outside j), a branch
    heads_j   = batch head_dim e ((q + 2 kv rows of others) / m + q rows of its own (1 - 1/m)):
                tokens for heads among the m ranks of a segment, and out back, heads shared evenly

Bytes are those that reach a rank in the forward, without log-sum-exps. Keys that branches have in
common count once in the bound and in each branch's gather.
"""

import functools
import itertools
from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwise.attention.reach import (
    Branch,
    Path,
    Rows,
    Seen,
    branches,
    path_of,
    rows_of,
    seen_of,
)
from meshwise.attention.shards import Shards
from meshwise.spec.long_attention import LongAttention
from meshwise.spec.op import DTYPE_BYTES
from meshwise.spec.record import Record

Ints = npt.NDArray[np.int64]


class BranchCover(Record, kw_only=True):
    """One branch; bytes that reach each rank. ``ranks``: most that share a segment.
    ``world_bytes``: if all ranks gathered all kept rows, as torchscale does."""

    segment_length: int
    dilation_rate: int
    pairs: int
    local: bool
    ranks: int
    gather_bytes: tuple[int, ...]
    heads_bytes: tuple[int, ...]
    world_bytes: tuple[int, ...]


class Cover(Record, kw_only=True):
    """All that ``of`` finds. ``target_bytes``: the cheaper of gather and heads for each branch, of
    the rank that receives most; a bound of the schedule, which may lie below the owner's."""

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


def of(op: LongAttention, shards: Shards) -> Cover:
    """What ``op`` covers and costs on the ranks of ``shards``."""
    if shards.seq_len != op.seq_len:
        raise ValueError(
            f"shards: hold {shards.seq_len} tokens; must hold op.seq_len = {op.seq_len}"
        )
    unit = 2 * op.batch * op.head_dim * DTYPE_BYTES[op.dtype]
    dense = LongAttention(
        batch=op.batch, seq_len=op.seq_len, heads=op.heads, kv_heads=op.kv_heads,
        head_dim=op.head_dim, causal=op.causal, direction=op.direction, dtype=op.dtype,
    )  # fmt: skip
    rank_pairs, rows = pairs_of_ranks(op, shards), rows_of(op)
    found = tuple(_branch(op, each, shards) for each in branches(op))
    whole = _branch(dense, branches(dense)[0], shards)
    return Cover(
        op=op,
        lengths=shards.lengths,
        rows=rows,
        seen=seen_of(op),
        path=path_of(op, rows),
        pairs=op.pairs,
        share_of_dense=op.pairs / dense.pairs,
        flops=op.flops,
        kv_bytes=tuple(n * unit * op.kv_heads for n in shards.lengths),
        out_bytes=tuple(n * unit // 2 * op.heads for n in shards.lengths),
        rank_pairs=rank_pairs,
        imbalance=max(rank_pairs) * len(rank_pairs) / sum(rank_pairs) if sum(rank_pairs) else 1.0,
        bound_bytes=bound_bytes(op, shards),
        branches=found,
        target_bytes=sum(min(max(b.gather_bytes), max(b.heads_bytes)) for b in found),
        dense_gather_bytes=max(whole.gather_bytes),
        dense_heads_bytes=max(whole.heads_bytes),
    )


# ---- segments, cut where ranks change


class Cuts(NamedTuple):
    """Pieces [start, stop) of ``rank`` in the segment [low, high); arrays, in order."""

    start: Ints
    stop: Ints
    low: Ints
    high: Ints
    rank: Ints

    def kept(self, offset: int, rate: int) -> tuple[Ints, Ints, Ints]:
        """n(start), n(stop), n(high)."""
        before, to, whole = (
            np.maximum(0, -((self.low + offset - x) // rate))
            for x in (self.start, self.stop, self.high)
        )
        return before, to, whole

    @property
    def num_ranks(self) -> Ints:
        """That share the segment of each piece."""
        pairs = np.unique(np.stack([self.low, self.rank]), axis=1)
        lows, counts = np.unique(pairs[0], return_counts=True)
        return np.asarray(counts[np.searchsorted(lows, self.low)], dtype=np.int64)


def cuts(width: int, shards: Shards) -> Cuts:
    """Where segments of ``width`` or ranks end."""
    seq_len = shards.seq_len
    held = sorted((a, b, rank) for rank, own in enumerate(shards.intervals) for a, b in own)
    firsts = np.array([a for a, b, _ in held if b > a], dtype=np.int64)
    ranks = np.array([rank for a, b, rank in held if b > a], dtype=np.int64)
    borders = np.unique(np.concatenate([np.arange(0, seq_len, width), firsts, [seq_len]]))
    start, stop = borders[:-1], borders[1:]
    low = start // width * width
    rank = ranks[np.searchsorted(firsts, start, side="right") - 1]
    return Cuts(start, stop, low, np.minimum(low + width, seq_len), rank)


def pairs_of_ranks(op: LongAttention, shards: Shards) -> tuple[int, ...]:
    """Attended pairs of each rank's own queries, over all heads, with multiplicity."""
    if op.window is not None:
        upto = functools.partial(_window_pairs, op.window)
        return tuple(op.heads * sum(upto(b) - upto(a) for a, b in own) for own in shards.intervals)
    total = np.zeros(len(shards.intervals), dtype=np.int64)
    for branch in branches(op):
        pieces = cuts(branch.width, shards)
        for offset, num_heads in Counter(branch.offsets).items():
            if offset is not None:
                before, to, whole = pieces.kept(offset, branch.rate)
                causal = to * (to + 1) // 2 - before * (before + 1) // 2
                found = causal if op.causal else (to - before) * whole
                np.add.at(total, pieces.rank, num_heads * found)
    return tuple(total.tolist())


def _window_pairs(window: int, stop: int) -> int:
    """Of the queries before ``stop``."""
    most = min(stop, window)
    return most * (most + 1) // 2 + (stop - most) * most


def _branch(op: LongAttention, branch: Branch, shards: Shards) -> BranchCover:
    """Gather, heads and the whole world's gather, of one branch by itself."""
    pieces = cuts(branch.width, shards)
    q_rows, kv_rows = np.zeros_like(pieces.start), np.zeros_like(pieces.start)
    groups = op.heads // op.kv_heads
    phases = {(h // groups, s) for h, s in enumerate(branch.offsets) if s is not None}
    num_kv = Counter(s for _, s in phases)
    pairs = 0
    for offset, num_heads in Counter(branch.offsets).items():
        if offset is not None:
            before, to, whole = pieces.kept(offset, branch.rate)
            q_rows += num_heads * (to - before)
            kv_rows += num_kv[offset] * (to - before)
            own = (to * (to + 1) - before * (before + 1)) // 2
            pairs += num_heads * int((own if op.causal else (to - before) * whole).sum())
    if op.window is not None:
        pairs = op.pairs
    sharers = pieces.num_ranks
    # other rows of the piece's segment that are not the rank's
    q_other, kv_other = (_others(pieces, rows) for rows in (q_rows, kv_rows))
    first = _first_of_rank(pieces)
    unit = op.batch * op.head_dim * DTYPE_BYTES[op.dtype]
    gather, heads, world = (np.zeros(len(shards.intervals)) for _ in range(3))
    np.add.at(gather, pieces.rank, 2 * kv_other * first)
    np.add.at(heads, pieces.rank, (q_other + 2 * kv_other) * first / sharers)
    np.add.at(heads, pieces.rank, q_rows * (1 - 1 / sharers))
    np.add.at(world, pieces.rank, 2 * kv_rows)
    local = not gather.any()
    world = 0 * world if local else world.sum() - world
    return BranchCover(
        segment_length=branch.width,
        dilation_rate=branch.rate,
        pairs=pairs,
        local=local,
        ranks=int(sharers.max()),
        gather_bytes=_bytes(gather, unit),
        heads_bytes=_bytes(0 * heads if local else heads, unit),
        world_bytes=_bytes(world, unit),
    )


def _others(pieces: Cuts, rows: Ints) -> Ints:
    """Rows of each piece's segment that are of other ranks."""

    def summed(keys: Ints) -> Ints:
        _, index = np.unique(keys, return_inverse=True)
        total = np.zeros(int(index.max()) + 1, dtype=np.int64)
        np.add.at(total, index, rows)
        return np.asarray(total[index], dtype=np.int64)

    num_ranks = int(pieces.rank.max()) + 1
    return summed(pieces.low) - summed(pieces.low * num_ranks + pieces.rank)


def _first_of_rank(pieces: Cuts) -> npt.NDArray[np.bool_]:
    """The first piece of its rank in its segment: what the others have counts once."""
    keys = pieces.low * (int(pieces.rank.max()) + 1) + pieces.rank
    is_first = np.zeros(len(keys), dtype=bool)
    is_first[np.unique(keys, return_index=True)[1]] = True
    return is_first


def _bytes(rows: npt.NDArray[np.float64], unit: int) -> tuple[int, ...]:
    return tuple(round(float(each) * unit) for each in rows)


# ---- the lower bound


def bound_bytes(op: LongAttention, shards: Shards) -> tuple[int, ...]:
    """K and V that must reach each rank if it computes its own queries; exact."""
    groups, found = op.heads // op.kv_heads, branches(op)
    patterns = Counter(  # of a KV head: the offsets of its query heads, branch by branch
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
        total.append(2 * op.batch * op.head_dim * DTYPE_BYTES[op.dtype] * rows)
    return tuple(total)


def _shared_pieces(branch: Branch, shards: Shards) -> list[list[list[int]]]:
    """Of each rank: [start, stop, low, high] of its pieces in segments that it shares."""
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
