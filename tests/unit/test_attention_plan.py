"""The plan of a dilated attention: which way each branch goes, why, and what it moves."""

import msgspec
import pytest

from meshwise.attention import cover
from meshwise.attention.plan import exchange_plan
from meshwise.attention.shards import contiguous, of_lengths
from meshwise.prices import Prices
from meshwise.spec import Dilation, LongAttention
from tests.sample_records import priced

GEOMETRIC = Dilation(segment_lengths=(64, 256, 1024), dilation_rates=(1, 4, 16))


def op(**given) -> LongAttention:
    usual = {"batch": 1, "seq_len": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64}
    return LongAttention(**{**usual, "dilation": GEOMETRIC, **given})


def test_branches_inside_shards_move_nothing_and_the_rest_go_the_way_that_moves_least():
    long = Dilation(segment_lengths=(4096, 16384, 65536), dilation_rates=(1, 4, 16))
    found = exchange_plan(op(seq_len=65536, dilation=long), 4)
    assert found.ways == ("local", "local", "heads")
    # q, k, v in, out and 4-byte lses back: a rank's 16384 / 16 rows of 16 heads, a quarter stays
    rows = 16384 // 16 * 16 * 3 // 4
    assert set(found.received_bytes()) == {4 * rows * 64 * 2 + rows * 4}
    assert "gather" in str(found) and "heads" in str(found)


def test_uneven_shards_that_cut_segments_make_branches_travel():
    assert exchange_plan(op(), 2, of_lengths([512, 512])).ways[:2] == ("local", "local")
    assert "local" not in exchange_plan(op(), 2, of_lengths([500, 524])).ways


def test_prices_decide_where_they_are_given():
    swap_is_dear = priced(all_to_all=1e6, send_recv=1e11)
    assert exchange_plan(op(), 4, prices=swap_is_dear).ways == ("local", "local", "ring")
    shift_is_dear = priced(all_to_all=1e11, send_recv=1e6)
    found = exchange_plan(op(), 4, prices=shift_is_dear)
    assert found.ways[2] == "heads" and found.branches[2].time_s > 0
    assert "priced" in found.branches[2].why


def test_prices_without_what_is_sent_say_how_to_measure_it():
    costs = msgspec.structs.replace(priced(all_to_all=1.0).costs, curves=())
    with pytest.raises(ValueError, match="measure"):
        exchange_plan(op(), 4, prices=Prices(costs))


@pytest.mark.parametrize("way", ["gather", "ring"])
def test_keys_that_come_are_those_that_a_rank_lacks(way):
    alone = Dilation(segment_lengths=(1024,), dilation_rates=(4,))
    for causal in (True, False):
        asked = op(dilation=alone, way=way, causal=causal)
        shards = of_lengths([100, 424, 0, 500])
        assert exchange_plan(asked, 4, shards).received_bytes() == cover.bound_bytes(asked, shards)


def test_what_ranks_cannot_do_is_refused_by_name():
    with pytest.raises(ValueError, match="ring_heads"):
        exchange_plan(op(way="ring_heads"), 4)
    with pytest.raises(ValueError, match="ring_heads"):
        exchange_plan(op(dilation=None, way="ring_heads"), 2, contiguous(1024, 2))
