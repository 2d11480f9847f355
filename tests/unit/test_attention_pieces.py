"""Pieces of a mask against the mask written out pair by pair."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.attention import volume
from meshwise.attention.pieces import Mask, batches, between, local_pieces
from meshwise.attention.shards import Shards, contiguous, of_lengths, positions, zigzag
from meshwise.prices import Prices
from meshwise.spec.long_attention import LongAttention
from tests.sample_records import priced

MOST = 40


def allowed(mask: Mask, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The definition: which query positions attend which key positions."""
    p, x = np.meshgrid(queries, keys, indexing="ij")
    found = np.ones(p.shape, bool)
    if mask.causal:
        found &= x <= p
    if mask.window is not None:
        found &= x > p - mask.window
    starts = np.array(mask.documents, int)
    return found & (np.searchsorted(starts, p, "right") == np.searchsorted(starts, x, "right"))


def counted(pieces, rows: int, columns: int) -> np.ndarray:
    """How often the pieces hold each pair."""
    times = np.zeros((rows, columns), int)
    for a, b, c, d, kind in pieces:
        block = np.ones((b - a, d - c), int)
        if kind != "full":
            assert b - a == d - c
            block = np.tril(block) if kind == "causal" else np.triu(block)
        times[a:b, c:d] += block
    return times


intervals = st.tuples(st.integers(0, MOST), st.integers(0, MOST)).map(lambda x: (min(x), max(x)))
masks = st.builds(
    lambda causal, window, documents: Mask(causal, window if causal else None, documents),
    st.booleans(),
    st.none() | st.integers(1, MOST + 5),
    st.sets(st.integers(0, MOST), max_size=5).map(lambda x: tuple(sorted(x))),
)


@st.composite
def sharded(draw) -> Shards:
    """Every token on some rank, in runs of any order and length."""
    cuts = sorted(draw(st.sets(st.integers(1, MOST - 1), max_size=6)))
    runs = draw(st.permutations(list(zip([0, *cuts], [*cuts, MOST], strict=True))))
    ranks = draw(st.integers(1, 4))
    where = [draw(st.integers(0, ranks - 1)) for _ in runs]
    return Shards(
        tuple(tuple(r for r, at in zip(runs, where, strict=True) if at == rank)
              for rank in range(ranks))
    )  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(masks, intervals, intervals)
def test_pieces_hold_every_allowed_pair_once(mask, queries, keys):
    times = counted(between(mask, queries, keys), MOST, MOST)
    expected = np.zeros((MOST, MOST), bool)
    a, b = (np.arange(*each) for each in (queries, keys))
    expected[np.ix_(a, b)] = allowed(mask, a, b)
    assert (times == expected).all()


@settings(max_examples=200, deadline=None)
@given(masks, sharded())
def test_local_pieces_hold_every_allowed_pair_of_two_ranks_once(mask, shards):
    for i, mine in enumerate(shards.intervals):
        for j, theirs in enumerate(shards.intervals):
            q, k = positions(shards, i), positions(shards, j)
            pieces = local_pieces(mask, mine, theirs)
            assert (counted(pieces, len(q), len(k)) == allowed(mask, q, k)).all()
            assert sum(p.pairs for p in pieces) == allowed(mask, q, k).sum()


@settings(max_examples=200, deadline=None)
@given(masks, intervals, intervals)
def test_batches_hold_each_piece_once_and_pieces_of_a_batch_share_no_row(mask, queries, keys):
    pieces = tuple(between(mask, queries, keys))
    found = batches(pieces)
    assert sorted(p for batch in found for p in batch) == sorted(pieces)
    for batch in found:
        assert len({(p.q_stop - p.q_start, p.k_stop - p.k_start, p.kind) for p in batch}) == 1
        for first, last in ((0, 1), (2, 3)):
            rows = [row for p in batch for row in range(p[first], p[last])]
            assert len(rows) == len(set(rows))


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (Mask(), 1),
        (Mask(causal=True), 1),
        (Mask(causal=True, window=64), 2),
        (Mask(documents=tuple(range(0, 4096, 128))), 1),
        (Mask(causal=True, documents=tuple(range(0, 4096, 128))), 1),
    ],
)  # fmt: skip
def test_many_equal_windows_and_documents_are_few_calls(mask, most):
    assert len(batches(local_pieces(mask, ((0, 4096),), ((0, 4096),)))) == most


@pytest.mark.parametrize("rank", range(4))
def test_zigzag_ranks_need_one_call_for_each_other_rank(rank):
    shards = zigzag(64, 4)
    for other in range(4):
        pieces = local_pieces(Mask(causal=True), shards.intervals[rank], shards.intervals[other])
        assert len(pieces) == 1
        assert sum(p.pairs for p in pieces) == (16 * 17 // 2 if rank == other else 128)


def test_documents_before_the_first_start_are_one_document():
    pieces = between(Mask(documents=(5,)), (0, 8), (0, 8))
    assert sorted(p[:4] for p in pieces) == [(0, 5, 0, 5), (5, 8, 5, 8)]


def test_key_heads_go_where_their_query_heads_go():
    assert volume.shares(8, 2, 4) == ((0, 2, 0, 1), (2, 4, 0, 1), (4, 6, 1, 2), (6, 8, 1, 2))
    assert volume.shares(3, 3, 4) == ((0, 0, 0, 0), (0, 1, 0, 1), (1, 2, 1, 2), (2, 3, 2, 3))
    assert volume.shares(12, 3, 2) == ((0, 6, 0, 2), (6, 12, 1, 3))


def test_ring_heads_divides_by_the_most_ranks_that_divide_key_heads():
    assert [volume.heads_degree(kv, 8) for kv in (1, 2, 3, 4, 6, 8)] == [1, 2, 1, 4, 2, 4]


def long(**given) -> LongAttention:
    rest = {"batch": 2, "seq_len": 64, "heads": 8, "kv_heads": 8, "head_dim": 16} | given
    return LongAttention(**rest)


ROW = 2 * 16 * 2  # batch 2, 16 wide, 2 bytes


@pytest.mark.parametrize(
    ("way", "heads", "forward", "backward"),
    [  # rows of heads from others: q, k, v, out by 1/P of the heads; K and V of P-1 shards
        ("heads", 8, 4 * 16 * 8 * 3 // 4, 4 * 16 * 8 * 3 // 4),
        ("gather", 8, 2 * 16 * 8 * 3, 6 * 16 * 8 * 3),  # again, and of dK, dV twice as wide
        ("ring", 8, 2 * 16 * 8 * 3, 6 * 16 * 8 * 3),
        ("ring_heads", 6, 4 * 16 * 6 // 2 + 2 * 32 * 3, 4 * 16 * 6 // 2 + 6 * 32 * 3),  # 2 by 2
    ],
)
def test_bytes_of_full_attention_are_those_of_the_textbook(way, heads, forward, backward):
    op, shards = long(heads=heads, kv_heads=heads), contiguous(64, 4)
    moved = volume.dense_bytes(op, shards, way)
    assert moved == ((forward * ROW,) * 4, (backward * ROW,) * 4)


def test_a_causal_ring_takes_keys_only_to_ranks_that_attend_them():
    op = long(causal=True)
    received, _ = volume.dense_bytes(op, contiguous(64, 4), "ring")
    shard = 2 * 16 * 8 * ROW
    assert received == (0, shard, 2 * shard, 3 * shard)


def test_a_windowed_ring_takes_only_the_rows_before_the_shard():
    op = long(causal=True, window=5)
    received, backward = volume.dense_bytes(op, contiguous(64, 4), "ring")
    halo = 2 * 4 * 8 * ROW  # 4 rows of K and V
    assert received == (0, halo, halo, halo)
    assert backward == (2 * halo, 3 * halo, 3 * halo, halo)  # keys again, and fp32 gradients home


def test_documents_inside_shards_move_nothing_round_the_ring():
    op = long()
    moved = volume.dense_bytes(op, contiguous(64, 4), "ring", tuple(range(0, 64, 8)))
    assert moved == ((0,) * 4, (0,) * 4)
    assert volume.choose_dense(op, contiguous(64, 4), documents=tuple(range(0, 64, 8))) == "ring"


@pytest.mark.parametrize(
    ("given", "ranks", "way"),
    [
        ({}, 4, "heads"),
        ({"kv_heads": 2}, 4, "ring_heads"),
        ({"kv_heads": 1}, 4, "ring"),
        ({"heads": 6, "kv_heads": 6}, 4, "ring_heads"),
        ({"heads": 5, "kv_heads": 5}, 4, "ring"),
        ({"causal": True, "window": 4}, 4, "ring"),
        ({"causal": True, "window": 60}, 4, "heads"),
    ],
)
def test_without_prices_heads_are_divided_where_they_divide(given, ranks, way):
    assert volume.choose_dense(long(**given), contiguous(64, ranks)) == way


def test_uneven_shards_are_grouped_in_global_order():
    assert volume.grouped(zigzag(16, 4), 2).intervals == (((0, 4), (12, 16)), ((4, 12),))
    assert volume.grouped(of_lengths([3, 0, 5, 8]), 2).intervals == (((0, 3),), ((3, 16),))


def transfers_alone(**rates):
    """Prices of collectives, and none of attention."""
    return Prices(msgspec.structs.replace(priced(**rates).costs, surfaces=()))


def test_the_time_of_gather_is_that_of_its_collective_at_its_gathered_size():
    prices = transfers_alone(all_gather=1e9)
    gathered = 2 * 64 * 8 * ROW
    assert volume.time_s(long(), contiguous(64, 4), "gather", prices) == pytest.approx(
        1e-6 + gathered / 1e9
    )


def test_the_time_of_heads_is_that_of_an_exchange_there_and_one_back():
    sizes = 3 * 16 * 8 * ROW, 16 * 8 * ROW  # q, k, v of a rank, then out
    found = volume.time_s(long(), contiguous(64, 4), "heads", transfers_alone(all_to_all=1e9))
    assert found == pytest.approx(2e-6 + sum(sizes) / 1e9)


def test_where_compute_has_no_price_no_hop_is_hidden():
    hop = 2 * 16 * 8 * ROW
    found = volume.time_s(long(), contiguous(64, 4), "ring", transfers_alone(send_recv=1e9))
    assert found == pytest.approx(3 * (1e-6 + hop / 1e9))


def test_with_prices_the_fastest_way_is_chosen():
    shards = contiguous(64, 4)
    assert volume.choose_dense(long(), shards, priced(all_to_all=1e9, send_recv=1e12)) == "ring"
    assert volume.choose_dense(long(), shards, priced(all_to_all=1e12, send_recv=1e9)) == "heads"
    assert volume.choose_dense(long(), shards, priced(all_gather=1e9)) == "gather"


def test_a_ring_hides_its_hops_behind_balanced_work_only():
    op = long(batch=1, seq_len=2**15, causal=True, head_dim=64)
    prices = priced(all_to_all=2e11, send_recv=1e11)  # and COSTS has causal attention's price
    assert volume.choose_dense(op, zigzag(2**15, 4), prices) == "ring"
    assert volume.choose_dense(op, contiguous(2**15, 4), prices) == "heads"
