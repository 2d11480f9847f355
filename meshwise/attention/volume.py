"""Count the bytes that dense attention moves between ranks, and choose its way.

Torch-free.

P ranks have L rows each; q and k are the bytes of one row of all query or key heads, wide: in the
accumulators' dtype. A rank receives, at most, forward | backward:

    heads        (P-1) L (2q + 2k) / P      the same: the gradient in, dq, dk and dv back
    gather       (P-1) L 2k                 the same, and (P-1) L 2k of partial dk, dv, wide
    ring         (P-1) L 2k                 the same, and (P-1) L 2k of dk, dv, wide
    ring_heads   heads among u consecutive ranks, ring over P/u groups of u L rows and 1/u heads

A ring does not pass on rows that no later rank attends.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwise.attention.pieces import Mask, MaskPiece, local_pieces
from meshwise.attention.shards import Interval, Shards
from meshwise.prices import Prices
from meshwise.spec import Attention, Collective
from meshwise.spec.long_attention import LongAttention

NONE: Interval = (0, 0)
DENSE_WAYS = ("heads", "ring_heads", "ring", "gather")  # in order of preference
SLICE_BYTES = 2**24  # of a rank's q, k and v, from which they are sent in slices
MOST_IMBALANCE = 1.25  # of pairs, max / mean: up to this a ring with fewer bytes wins


class HeadShare(NamedTuple):
    """The query heads [q_start, q_stop) of a rank, and the key heads that these need."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


class RingHops(NamedTuple):
    """Rows that move around the ring. ``keys[t][s]``: local rows of shard s that hop t moves from
    s+t-1 to s+t. ``grads[t][s]``: rows of their gradients that s+t sends after step t, to s+t+1, or
    to s if t = ``last[s]``, the last step that attends shard s."""

    keys: tuple[tuple[Interval, ...], ...]
    grads: tuple[tuple[Interval, ...], ...]
    last: tuple[int, ...]

    def held(self, member: int, step: int) -> Interval:
        """Rows that reach a member, of the shard ``step`` before its own."""
        return self.keys[step][(member - step) % len(self.last)]

    def made(self, member: int, step: int) -> Interval:
        """Rows of the same shard whose gradients the member sends."""
        shard = (member - step) % len(self.last)
        return self.grads[step][shard] if step <= self.last[shard] else NONE

    def expected(self, member: int, step: int) -> dict[int, int]:
        """Count the gradient rows that reach a member after a step, by sender."""
        size, grads, found = len(self.last), self.grads[step], dict[int, int]()
        before = (member - step - 1) % size
        if step < self.last[before]:
            found[(member - 1) % size] = _len(grads[before])
        if step == self.last[member]:
            found[(member + step) % size] = _len(grads[member])
        return found


class Slice(NamedTuple):
    """The query and key heads [first, last) of each rank of a group, in one exchange."""

    queries: Sequence[tuple[int, int]]
    keys: Sequence[tuple[int, int]]


class Traffic(NamedTuple):
    """Messages of one collective, in bytes, among ``size`` ranks ``stride`` apart; none to self."""

    kind: Literal["all_to_all", "all_gather", "send_recv"]
    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    size: int
    stride: int = 1


def shares(heads: int, kv_heads: int, ranks: int) -> tuple[HeadShare, ...]:
    """Divide query heads among ranks; key heads are repeated where ranks divide their group."""
    group, found = heads // kv_heads, []
    for rank in range(ranks):
        a, b = rank * heads // ranks, (rank + 1) * heads // ranks
        found.append(HeadShare(a, b, a // group, -(-b // group) if b > a else a // group))
    return tuple(found)


def slices(op: LongAttention, degree: int, ranks: int) -> tuple[Slice, ...]:
    """Divide heads among ``degree`` ranks in one exchange, or several if there is much to send."""
    each, count = shares(op.heads, op.kv_heads, degree), 1
    q_heads, key_heads = op.heads // degree, op.kv_heads // degree
    size = op.seq_len * (op.heads + 2 * op.kv_heads) * op.row_bytes
    divides = op.kv_heads % ranks == 0 and degree == ranks
    if divides and size >= SLICE_BYTES * ranks:
        count = next((n for n in range(2, key_heads + 1) if key_heads % n == 0), 1)
    if count == 1:
        return (Slice([s[:2] for s in each], [s[2:] for s in each]),)
    q_heads, key_heads = q_heads // count, key_heads // count
    return tuple(
        Slice(
            [(s.q_start + i * q_heads, s.q_start + (i + 1) * q_heads) for s in each],
            [(s.k_start + i * key_heads, s.k_start + (i + 1) * key_heads) for s in each],
        )
        for i in range(count)
    )


def heads_degree(kv_heads: int, ranks: int) -> int:
    """u of ring_heads: the largest divisor of ranks and of kv_heads below ranks; 1 if none."""
    fits = (u for u in range(1, ranks) if ranks % u == 0 and kv_heads % u == 0)
    return max(fits, default=1)


def degree_of(way: str, kv_heads: int, ranks: int) -> int:
    """Return the number of ranks that divide the heads."""
    return {"heads": ranks, "ring_heads": heads_degree(kv_heads, ranks)}.get(way, 1)


def check_way(op: LongAttention, ranks: int, way: str) -> None:
    """Raise ValueError if these ranks cannot go this way."""
    if way == "ring_heads" and heads_degree(op.kv_heads, ranks) == 1:
        raise ValueError(
            f"way = 'ring_heads': {ranks} ranks cannot be divided into groups that divide "
            f"{op.kv_heads} key heads; use 'heads' or 'ring'"
        )


def grouped(shards: Shards, size: int) -> Shards:
    """The shards that each ``size`` consecutive ranks hold together, in global order."""
    if size == 1:
        return shards
    found = []
    for first in range(0, len(shards.intervals), size):
        merged: list[Interval] = []
        for a, b in sorted(itertools.chain(*shards.intervals[first : first + size])):
            if merged and merged[-1][1] == a:
                merged[-1] = (merged[-1][0], b)
            elif a < b:
                merged.append((a, b))
        found.append(tuple(merged))
    return Shards(tuple(found))


@functools.lru_cache(64)
def hops(mask: Mask, shards: Shards) -> RingHops:
    ranks, lengths = len(shards.lengths), shards.lengths
    needs = [
        [hull(step_pieces(mask, shards, s + t, t)) for s in range(ranks)] for t in range(ranks)
    ]
    last = tuple(max(t for t in range(ranks) if t == 0 or _len(needs[t][s])) for s in range(ranks))
    keys = list(itertools.accumulate(needs[:0:-1], _unions))[::-1]
    grads = list(itertools.accumulate(needs[1:], _unions))
    whole = tuple((0, n) for n in lengths)
    return RingHops((whole, *map(tuple, keys)), (whole, *map(tuple, grads)), last)


def step_pieces(mask: Mask, shards: Shards, rank: int, step: int) -> tuple[MaskPiece, ...]:
    """Pieces that ``rank`` attends at a ring step, in the shard ``step`` before its own."""
    ranks = len(shards.intervals)
    return local_pieces(
        mask, shards.intervals[rank % ranks], shards.intervals[(rank - step) % ranks]
    )


def hull(pieces: Sequence[MaskPiece]) -> Interval:
    """The keys of the pieces, from the first to the last."""
    if not pieces:
        return NONE
    return min(p.k_start for p in pieces), max(p.k_stop for p in pieces)


def dense_bytes(
    op: LongAttention, shards: Shards, way: str, documents: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes that each rank receives from others in the forward and in the backward alone; exact."""
    counted = []
    for moved in _transfers(op, shards, way, documents):
        total = np.zeros(len(shards.lengths), np.int64)
        for each in moved:
            np.add.at(total, each.target, each.bytes)
        counted.append(tuple(total.tolist()))
    return counted[0], counted[1]


def choose_dense(
    op: LongAttention, shards: Shards, prices: Prices | None = None, documents: tuple[int, ...] = ()
) -> str:
    """Choose the way of a forward and, if ``op.direction`` says so, of its backward.

    With prices it is the fastest way whose transfers are priced. Transfers of heads and gather add
    to the computation; hops of a ring hide behind it as far as attention is priced. Without prices
    it is heads if they divide, else ring_heads if key heads allow it, else ring. A window or
    documents make it ring if the ring receives less and the ranks' work is balanced.
    """
    ranks = len(shards.lengths)
    ways = [w for w in DENSE_WAYS if w != "ring_heads" or heads_degree(op.kv_heads, ranks) > 1]
    if prices is not None:
        priced = {}
        for way in ways:
            try:
                priced[way] = time_s(op, shards, way, prices, documents)
            except ValueError:  # a collective that was not measured
                continue
        if priced:
            return min(priced, key=lambda way: priced[way])
    if ranks <= op.kv_heads and op.heads % ranks == 0:
        found = "heads"
    else:
        found = "ring_heads" if "ring_heads" in ways else "ring"
    if op.window is None and not documents:
        return found
    work = [sum(each) for each in zip(*_pairs(op, shards, documents), strict=True)]
    balanced = max(work) * ranks <= MOST_IMBALANCE * sum(work)
    ring, other = (max(dense_bytes(op, shards, w, documents)[0]) for w in ("ring", found))
    return "ring" if balanced and ring < other else found


def time_s(
    op: LongAttention, shards: Shards, way: str, prices: Prices, documents: tuple[int, ...] = ()
) -> float:
    """Seconds of the transfers, and of the computation if attention is priced."""
    ranks, total = len(shards.lengths), 0.0
    degree = degree_of(way, op.kv_heads, ranks)
    each = -(-op.heads // degree) / op.heads  # of all heads, on the busiest rank
    virtual = grouped(shards, degree)
    steps = [max(pairs) * each for pairs in _pairs(op, virtual, documents)]
    directions = ("forward", "backward")[: 1 + (op.direction == "backward")]
    moved = _transfers(op, shards, way, documents)
    for direction, transfers in zip(directions, moved, strict=False):
        compute = [n * _pair_s(op, direction, prices) for n in steps]
        ring = [t for t in transfers if t.kind == "send_recv"]
        rest = [t for t in transfers if t.kind != "send_recv"]
        total += sum(_transfer_s(t, op, prices) for t in rest)
        if not ring:
            total += sum(compute)
            continue
        hop_s = [_transfer_s(t, op, prices) for t in ring]
        keys = hop_s[: len(hop_s) // (1 + (direction == "backward"))]
        grads = [0.0, 0.0, *hop_s[len(keys) :]]  # they leave a step after they are made
        total += sum(
            max(busy, k + g)
            for busy, k, g in itertools.zip_longest(compute, keys, grads, fillvalue=0.0)
        )
    return total


def _pairs(op: LongAttention, shards: Shards, documents: tuple[int, ...]) -> list[list[int]]:
    """Count query-key pairs of one head, by ring step and rank."""
    mask, ranks = Mask(op.causal, op.window, documents), len(shards.lengths)
    return [
        [sum(p.pairs for p in step_pieces(mask, shards, rank, step)) for rank in range(ranks)]
        for step in range(ranks)
    ]


def _pair_s(op: LongAttention, direction: str, prices: Prices) -> float:
    """Seconds of one pair in all heads, at the rate of attention over the whole sequence."""
    whole = Attention(
        batch=op.batch, q_len=op.seq_len, kv_len=op.seq_len, heads=op.heads, kv_heads=op.kv_heads,
        head_dim=op.head_dim, causal=op.causal, dtype=op.dtype,
        direction="forward" if direction == "forward" else "backward",
    )  # fmt: skip
    try:
        return prices.estimate(whole).time_s / whole.pairs
    except ValueError:  # not measured: no transfer is hidden
        return 0.0


def _transfer_s(each: Traffic, op: LongAttention, prices: Prices) -> float:
    if not each.bytes.any():
        return 0.0
    ranks = int(max(each.target.max(), each.source.max())) + 1
    most = max(
        int(np.bincount(ends, each.bytes, ranks).max()) for ends in (each.source, each.target)
    )
    if each.kind != "send_recv":
        most = -(-most * each.size // (each.size - 1))  # nccl-tests' size includes the own part
    called = Collective(
        kind=each.kind, size_bytes=most, group_size=each.size, group_stride=each.stride,
        dtype=op.dtype,
    )  # fmt: skip
    return prices.estimate(called).time_s


def _transfers(
    op: LongAttention, shards: Shards, way: str, documents: tuple[int, ...]
) -> tuple[list[Traffic], list[Traffic]]:
    """All messages of the forward and of the backward, in order."""
    ranks = len(shards.lengths)
    degree = degree_of(way, op.kv_heads, ranks)
    if ranks == 1:
        return [], []
    row, wide_row = op.row_bytes, op.wide_row_bytes
    mask = Mask(op.causal, op.window, documents)
    if way == "gather":
        return _for_gather(shards, mask, 2 * op.kv_heads * row, 2 * op.kv_heads * wide_row)
    forward: list[Traffic] = []
    backward: list[Traffic] = []
    if degree < ranks:
        kv = 2 * op.kv_heads // degree
        around = hops(mask, grouped(shards, degree))
        forward = _around(around.keys, around.last, degree, kv * row, home=False)
        backward = forward + _around(around.grads, around.last, degree, kv * wide_row, home=True)
    if degree > 1:
        share = [(s.q_stop - s.q_start, s.k_stop - s.k_start) for s in shares(
            op.heads, op.kv_heads, degree
        )] * (ranks // degree)  # fmt: skip
        q = np.array([q for q, _ in share]) * row
        qkv = q + 2 * np.array([k for _, k in share]) * row
        rows = np.array(shards.lengths)
        forward = [_among(degree, np.outer(rows, qkv)), *forward, _among(degree, np.outer(q, rows))]
        backward = [
            _among(degree, np.outer(rows, q)), *backward, _among(degree, np.outer(qkv, rows))
        ]  # fmt: skip
    return forward, backward


def _for_gather(
    shards: Shards, mask: Mask, row: int, wide_row: int
) -> tuple[list[Traffic], list[Traffic]]:
    """All ranks gather all K and V, in the backward again. Then each rank receives partial
    gradients of its shard from the ranks that attend it."""
    ranks = len(shards.lengths)
    rows = np.array(shards.lengths)
    every = _among(ranks, np.outer(rows * row, np.ones(ranks, np.int64)), "all_gather")
    seen = [[bool(step_pieces(mask, shards, i, i - j)) for j in range(ranks)] for i in range(ranks)]
    return [every], [every, _among(ranks, np.array(seen) * rows * wide_row)]


def _among(
    size: int,
    matrix: npt.NDArray[np.int64],
    kind: Literal["all_to_all", "all_gather"] = "all_to_all",
) -> Traffic:
    """``matrix[source, target]`` bytes, within groups of ``size`` consecutive ranks."""
    rank = np.arange(len(matrix))
    inside = rank[:, None] // size == rank // size
    source, target = np.nonzero(inside & (rank[:, None] != rank))
    return Traffic(kind, source, target, matrix[source, target], size)


def _around(
    rows: Sequence[Sequence[Interval]], last: Sequence[int], degree: int, row: int, *, home: bool
) -> list[Traffic]:
    """Hops 1, 2, ... of a ring of groups of ``degree`` ranks; ``home``: gradients, a step later."""
    groups, found = len(last), []
    for t in range(1, max(last) + 1):
        ends = []
        for s, interval in enumerate(rows[t]):
            if t > last[s]:
                continue
            source, target = s + t - (not home), s + t + home
            if home and t == last[s]:
                target = s
            ends.append((source % groups, target % groups, _len(interval) * row))
        a, b, n = (np.repeat(x, degree) for x in np.array(ends).T)
        member = np.tile(np.arange(degree), len(ends))
        found.append(
            Traffic("send_recv", a * degree + member, b * degree + member, n, groups, degree)
        )
    return found


def _len(interval: Interval) -> int:
    return interval[1] - interval[0]


def _unions(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Hulls of pairs of intervals; an empty interval is ignored."""
    return [
        a if not _len(b) else b if not _len(a) else (min(a[0], b[0]), max(a[1], b[1]))
        for a, b in zip(some, others, strict=True)
    ]
