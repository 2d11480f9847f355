"""Coverage, paths and bytes of a pattern: against M[h,p,x] written out, and known figures."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.attention import cover, reach, shards
from meshwise.spec.long_attention import Dilation, LongAttention

FP16 = {"batch": 2, "heads": 12, "kv_heads": 12, "head_dim": 64, "dtype": "fp16"}
LARGE = {"batch": 1, "heads": 32, "kv_heads": 32, "head_dim": 128, "dtype": "bf16"}


def pattern(
    seq_len, segment_lengths, dilation_rates, causal=False, rule="mod", of="query", **sizes
):
    dilation = Dilation(
        segment_lengths=tuple(segment_lengths), dilation_rates=tuple(dilation_rates),
        offsets=rule, offset_heads=of,
    )  # fmt: skip
    return LongAttention(seq_len=seq_len, causal=causal, dilation=dilation, **(FP16 | sizes))


def grown(factor, last_rate=None):
    """2048 and 1, times the factor until the whole of 2^20 tokens."""
    widths, rates = [2048], [1]
    while widths[-1] * factor <= 2**20:
        widths.append(widths[-1] * factor)
        rates.append(rates[-1] * factor)
    if last_rate:
        widths.append(2**20)
        rates.append(last_rate)
    return widths, rates


SOURCE = ([2048, 4096, 8192], [1, 2, 4])
PAPER = ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])


def multiset(op):
    """M[h,p,x] from the definition; offsets by the rules' own words."""
    n, dilation = op.seq_len, op.dilation
    m = np.zeros((op.heads, n, n), dtype=int)
    p, x = np.arange(n)[:, None], np.arange(n)[None, :]
    if dilation is None:
        m[:] = 1 if op.window is None else p - x < op.window
    else:
        num = op.heads if dilation.offset_heads == "query" else op.kv_heads
        for i, (w, r) in enumerate(
            zip(dilation.segment_lengths, dilation.dilation_rates, strict=True)
        ):
            for head in range(op.heads):
                h = head if dilation.offset_heads == "query" else head // (op.heads // op.kv_heads)
                s = {"mod": h % r, "block": h // -(-num // r), "group": i % r}[dilation.offsets]
                if dilation.offsets == "group" and owner(num, dilation.num_branches)[h] != i:
                    continue
                same = (p // w == x // w) & (p % w % r == s) & (x % w % r == s)
                m[head] += same
    return m * (x <= p) if op.causal else m


def owner(heads, num_branches):
    """Of each head its branch in group mode; the last branches have one more."""
    sizes = [heads // num_branches] * num_branches
    for i in range(heads % num_branches):
        sizes[-1 - i] += 1
    return np.repeat(np.arange(num_branches), sizes)


@st.composite
def ops(draw):
    num = draw(st.integers(1, 3))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return pattern(
        draw(st.integers(1, 40)),
        draw(st.lists(st.integers(1, 45), min_size=num, max_size=num)),
        draw(st.lists(st.integers(1, 5), min_size=num, max_size=num)),
        causal=draw(st.booleans()),
        rule=draw(st.sampled_from(["mod", "block", "group"])),
        of=draw(st.sampled_from(["query", "kv"])),
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.sampled_from([1, 2])),
    )


@st.composite
def shared(draw):
    """An operation and who holds which tokens, ranks without any among them."""
    op = draw(ops())
    cuts = sorted(draw(st.lists(st.integers(0, op.seq_len), max_size=4)))
    ends = [0, *cuts, op.seq_len]
    return op, shards.of_lengths([b - a for a, b in itertools.pairwise(ends)])


@settings(max_examples=60)
@given(ops())
def test_rows_and_keys_are_those_of_the_definition(op):
    m = multiset(op)
    alive, keys = m.any(axis=2), (m > 0).sum(axis=2)
    rows, seen = reach.rows_of(op), reach.seen_of(op)
    dead = (~alive).sum(axis=1)
    assert rows.dead == dead.sum() and rows.worst_head_dead == dead.max()
    assert dead[rows.worst_head] == dead.max()
    assert rows.alive_share == pytest.approx(alive.mean())
    assert (rows.first_dead is None) == bool(alive.all())
    if rows.first_dead is not None:
        row, head = rows.first_dead
        assert not alive[head, row]
    lost = np.flatnonzero(~alive.any(axis=0))
    assert rows.lost_token == (lost[0] if len(lost) else None)
    assert seen.exact and seen.num_rows == keys.size
    assert (seen.least, seen.most) == (keys.min(), keys.max())
    assert seen.mean == pytest.approx(keys.mean())
    possible = op.heads * (np.tri(op.seq_len).sum() if op.causal else op.seq_len**2)
    assert seen.share == pytest.approx((m > 0).sum() / possible)
    assert seen.max_multiplicity == m.max()
    assert seen.mean_multiplicity == pytest.approx(m[m > 0].mean() if m.any() else 0)


@settings(max_examples=60)
@given(ops())
def test_the_path_length_is_that_of_a_matrix_power(op):
    one = multiset(op).any(axis=0) | np.eye(op.seq_len, dtype=bool)
    wanted = np.tri(op.seq_len, dtype=bool) if op.causal else np.ones_like(one)
    known, layers = np.eye(op.seq_len, dtype=bool), 0
    while (after := (one.astype(int) @ known) > 0).sum() > known.sum():
        known, layers = after, layers + 1
    path = reach.path_of(op, reach.rows_of(op))
    if (known == wanted).all():
        assert (path.kind, path.layers) == ("exact", layers)
    else:
        assert (path.kind, path.layers, path.final_layers) == ("never", None, layers)
        assert path.final_share == pytest.approx(known.sum() / wanted.sum())
        if path.gap is not None:
            assert op.causal and not known[path.gap, path.gap - 1]
        if path.wall is not None:
            assert not known[path.wall :, : path.wall].any()
            assert not known[: path.wall, path.wall :].any()


def remote(m, op, where, rank):
    """Remote (KV head, key) pairs that the rank's queries attend, counted on the whole of M."""
    mine = np.zeros(op.seq_len, dtype=bool)
    for a, b in where.intervals[rank]:
        mine[a:b] = True
    needed = (m[:, mine, :] > 0).any(axis=1) & ~mine
    return int(needed.reshape(op.kv_heads, -1, op.seq_len).any(axis=1).sum())


@settings(max_examples=60)
@given(shared())
def test_the_bound_and_the_work_of_every_rank_are_counted_pair_by_pair(drawn):
    op, where = drawn
    m = multiset(op)
    bound, work = cover.bound_bytes(op, where), cover.pairs_of_ranks(op, where)
    for rank in range(len(where.intervals)):
        assert bound[rank] == 2 * 2 * 64 * 2 * remote(m, op, where, rank)
        assert work[rank] == sum(m[:, a:b].sum() for a, b in where.intervals[rank])
    found = cover.of(op, where)
    assert sum(found.rank_pairs) == sum(b.pairs for b in found.branches) == m.sum()
    if op.causal:  # keys before the queries at most: what a gather brings covers it
        assert all(
            low <= sum(b.gather_bytes[rank] for b in found.branches)
            for rank, low in enumerate(bound)
        )


def segments(op, where, index):
    """Of one branch: the tokens of each segment that ranks share, the rank that holds each token,
    and [(head, KV head, offset)] of the heads with a part in it."""
    w, r = op.dilation.segment_lengths[index], op.dilation.dilation_rates[index]
    num = op.heads if op.dilation.offset_heads == "query" else op.kv_heads
    holder = np.repeat(np.arange(len(where.lengths)), where.lengths)
    taking = []
    for head in range(op.heads):
        kv = head * op.kv_heads // op.heads
        h = head if op.dilation.offset_heads == "query" else kv
        s = {"mod": h % r, "block": h // -(-num // r), "group": index % r}[op.dilation.offsets]
        if op.dilation.offsets != "group" or owner(num, op.dilation.num_branches)[h] == index:
            taking.append((head, kv, s))
    for low in range(0, op.seq_len, w):
        tokens = np.arange(low, min(low + w, op.seq_len))
        if holder[tokens[0]] != holder[tokens[-1]]:
            yield tokens, holder[tokens], taking, (tokens - low) % r


@settings(max_examples=40)
@given(shared())
def test_a_gather_brings_each_row_of_others_that_a_query_attends_once(drawn):
    op, where = drawn
    for index, found in enumerate(cover.of(op, where).branches):
        rows = [set() for _ in where.lengths]
        every = list(segments(op, where, index))
        for tokens, holder, taking, phase in every:
            for _, kv, s in taking:
                kept = list(zip(tokens[phase == s], holder[phase == s], strict=True))
                for (p, mine), (x, other) in itertools.product(kept, kept):
                    if mine != other and (x <= p or not op.causal):
                        rows[mine].add((kv, x))
        assert found.gather_bytes == tuple(2 * 2 * 64 * 2 * len(each) for each in rows)
        assert found.local is not bool(every)


@settings(max_examples=40)
@given(shared())
def test_by_heads_whole_heads_are_dealt_to_the_ranks_of_a_segment(drawn):
    op, where = drawn
    for index, found in enumerate(cover.of(op, where).branches):
        q_rows, kv_rows, out_rows = ([set() for _ in where.lengths] for _ in range(3))
        for tokens, holder, taking, phase in segments(op, where, index):
            sharers = range(holder[0], holder[-1] + 1)
            dealt = [sharers[i * len(sharers) // len(taking)] for i in range(len(taking))]
            for taker, (head, kv, s) in zip(dealt, taking, strict=True):
                for x, mine in zip(tokens[phase == s], holder[phase == s], strict=True):
                    if mine != taker:
                        q_rows[taker].add((head, x))
                        kv_rows[taker].add((kv, x))
                        out_rows[mine].add((head, x))
        row, lse = 2 * 64 * 2, 2 * 4
        assert found.heads_bytes == tuple(
            row * (len(q) + 2 * len(kv)) + (row + lse) * len(out)
            for q, kv, out in zip(q_rows, kv_rows, out_rows, strict=True)
        )


def evenly(found, published, divides):
    """Heads are shared evenly in what is published, also where some rank must take one more."""
    if divides:
        assert found / 1e6 == pytest.approx(published, rel=5e-3)
    else:
        assert published < found / 1e6 < 2 * published


@pytest.mark.parametrize(
    ("seq_len", "told", "sizes", "ranks", "bound", "world", "heads", "ring", "ulysses"),
    [
        (16384, SOURCE, {}, 2, 0, 0, 0, 50.3, 50.3),
        (16384, SOURCE, {}, 4, 6.29, 18.9, 6.29, 75.5, 37.7),
        (16384, SOURCE, {}, 8, 12.6, 66.1, 11.0, 88.1, 22.0),
        (32768, SOURCE, {}, 8, 6.29, 44.0, 6.29, 176, 44.0),
        (65536, SOURCE, {}, 2, 0, 0, 0, 201, 201),
        (65536, SOURCE, {}, 4, 0, 0, 0, 302, 151),
        (65536, SOURCE, {}, 8, 0, 0, 0, 352, 88.1),
        (32768, PAPER, {"batch": 1}, 8, 14.7, None, 8.13, 88.1, None),
        (2**20, grown(2), LARGE, 8, 50.3, None, 36.7, 15032, 3758),
        (2**20, grown(2), LARGE, 64, 100.7, None, 43.7, 16911, 528),
        (2**20, grown(4, 512), LARGE, 64, 83.9, None, 27.2, 16911, 528),
    ],
)
def test_bytes_into_a_rank_are_the_published_ones_in_megabytes(
    seq_len, told, sizes, ranks, bound, world, heads, ring, ulysses
):
    found = cover.of(pattern(seq_len, *told, **sizes), shards.contiguous(seq_len, ranks))
    of_all = collections.Counter()
    for branch in found.branches:
        of_all["heads"] += max(branch.heads_bytes)
        of_all["world"] += max(branch.world_bytes)
    near = {"rel": 5e-3}
    op = found.op
    assert max(found.bound_bytes) / 1e6 == pytest.approx(bound, **near)
    of_all["heads"] /= 1 + 4 / (4 * op.head_dim * 2)  # published without log-sum-exps
    evenly(of_all["heads"], heads, all(op.heads % each.ranks == 0 for each in found.branches))
    if world is not None:
        assert of_all["world"] / 1e6 == pytest.approx(world, **near)
    assert found.dense_gather_bytes == found.dense_ring_bytes
    assert found.dense_gather_bytes / 1e6 == pytest.approx(ring, **near)
    if ulysses is not None:
        evenly(found.dense_heads_bytes, ulysses, op.heads % ranks == 0)


@pytest.mark.parametrize(
    ("seq_len", "told", "ranks", "mean"),
    [(16384, SOURCE, 4, 3.15), (16384, SOURCE, 8, 6.29), (32768, PAPER, 8, 6.8)],
)
def test_causal_the_mean_bound_is_as_published(seq_len, told, ranks, mean):
    sizes = {"batch": 1} if told is PAPER else {}
    where = shards.contiguous(seq_len, ranks)
    whole = cover.bound_bytes(pattern(seq_len, *told, **sizes), where)
    causal = cover.bound_bytes(pattern(seq_len, *told, causal=True, **sizes), where)
    assert np.mean(causal) / 1e6 == pytest.approx(mean, rel=5e-3)
    assert np.mean(causal) * 2 == np.mean(whole) and max(causal) == max(whole)


@pytest.mark.parametrize(
    ("seq_len", "told", "sizes", "imbalance"),
    [
        (65536, SOURCE, {}, 1.00),
        (16384, SOURCE, {}, 1.25),
        (32768, PAPER, {}, 1.19),
        (2**20, grown(4), LARGE, 1.002),
    ],
)
def test_the_imbalance_of_causal_work_on_eight_ranks_is_as_published(
    seq_len, told, sizes, imbalance
):
    op = pattern(seq_len, *told, causal=True, **sizes)
    work = cover.pairs_of_ranks(op, shards.contiguous(seq_len, 8))
    assert max(work) / np.mean(work) == pytest.approx(imbalance, abs=5e-3)


def test_dense_causal_attention_is_uneven_in_a_row_and_even_in_a_zigzag():
    op = LongAttention(seq_len=4096, causal=True, **FP16)
    row = cover.of(op, shards.contiguous(4096, 8))
    assert row.imbalance == pytest.approx(1.875, abs=1e-3)
    turned = cover.of(op, shards.zigzag(4096, 8))
    assert turned.imbalance == 1.0
    assert row.share_of_dense == turned.share_of_dense == row.seen.share == 1.0
    assert row.path.layers == 1 and row.seen.max_multiplicity == 1
    # all keys before its last one, but those it holds
    unit = 2 * 2 * 12 * 64 * 2
    assert row.bound_bytes == tuple(unit * 512 * r for r in range(8))
    assert turned.bound_bytes == tuple(unit * (4096 - 256 * r - 512) for r in range(8))


def test_a_window_needs_the_keys_just_before_a_shard():
    op = LongAttention(seq_len=64, causal=True, window=5, **FP16)
    where = shards.contiguous(64, 4)
    found = cover.of(op, where)
    unit = 2 * 2 * 64 * 2 * 12
    assert found.bound_bytes == tuple(unit * n for n in (0, 4, 4, 4))
    assert found.dense_ring_bytes == found.target_bytes == unit * 4
    assert found.dense_gather_bytes == unit * 48 and found.dense_heads_bytes == 2 * unit * 12
    m = multiset(op)
    assert found.rank_pairs == tuple(m[:, 16 * r : 16 * r + 16].sum() for r in range(4))
    assert (found.seen.least, found.seen.most, found.path.layers) == (1, 5, 16)  # 63 / 4, up


def test_query_heads_that_share_keys_but_keep_other_rows_lose_what_sharing_saves():
    sizes = {"heads": 8, "kv_heads": 2}
    where = shards.contiguous(64, 4)
    by_query, by_kv, no_sharing = (
        sum(cover.bound_bytes(pattern(64, [64], [4], of=of, **(sizes | more)), where))
        for of, more in (("query", {}), ("kv", {}), ("query", {"kv_heads": 8}))
    )
    assert by_query == no_sharing == 4 * by_kv


def test_a_sample_of_queries_comes_near_the_count_of_all(monkeypatch):
    op = pattern(4096, [64, 256, 4096], [1, 2, 8], causal=True)
    exact = reach.seen_of(op)
    monkeypatch.setattr(reach, "MOST_STEPS", 0)
    sampled = reach.seen_of(op)
    assert exact.exact and not sampled.exact and sampled.num_rows < exact.num_rows / 10
    assert sampled.mean == pytest.approx(exact.mean, rel=0.05)
    assert sampled.share == pytest.approx(exact.share, rel=0.05)
    assert sampled.mean_multiplicity == pytest.approx(exact.mean_multiplicity, rel=0.05)
    assert exact.least <= sampled.least and sampled.most <= exact.most


def test_long_sequences_take_the_papers_formula_or_what_is_certain():
    def path(*told, **more):
        op = pattern(*told, **(LARGE | more))
        return reach.path_of(op, reach.rows_of(op))

    assert path(2**20, *grown(2)) == reach.Path(layers=9, kind="about")
    # 2048 tokens end every 2048: causally, token 2048 can never hear of its neighbour
    assert path(2**20, *grown(2), causal=True).gap == 2048
    assert path(2**16, *SOURCE).wall == 8192
    assert path(2**16, [64, 96, 2**16], [1, 2, 4]).kind == "not known"
    assert path(2**16, [2**16], [64]).kind == "never"  # 32 heads, 64 phases
    assert path(2**16, [48, 2**16], [1, 4], causal=True).gap == 48


def test_shards_of_another_sequence_are_refused():
    with pytest.raises(ValueError, match=r"shards: hold 32 tokens; must hold op.seq_len = 64"):
        cover.of(pattern(64, [8], [1]), shards.contiguous(32, 2))
