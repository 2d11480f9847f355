"""Exact types of what attention is told, where no torch is needed: patterns, shards."""

import numpy as np
import pytest

from meshwise.attention.shards import Shards, contiguous, loss_weight, of_lengths, positions, zigzag
from meshwise.spec import Dilation, LongAttention

BRANCH = {"segment_lengths": (8,), "dilation_rates": (1,)}
SIZES = {"batch": 1, "seq_len": 8, "heads": 2, "kv_heads": 1, "head_dim": 4}


@pytest.mark.parametrize(
    "given",
    [
        {"segment_lengths": (0.7,)},
        {"segment_lengths": (8.0,)},
        {"segment_lengths": (True,)},
        {"segment_lengths": 8},
        {"segment_lengths": "8"},
        {"segment_lengths": {8}},
        {"segment_lengths": None},
        {"segment_lengths": (np.float32(8),)},
        {"dilation_rates": ("1",)},
        {"dilation_rates": (1.5,)},
        {"offsets": 1},
        {"offsets": "modulo"},
        {"offset_heads": None},
        {"mixture": True},
    ],
)
def test_a_dilation_of_other_types_is_refused_by_name(given):
    refused(lambda: Dilation(**BRANCH | given), *given)


@pytest.mark.parametrize(
    "given",
    [
        {"batch": "1"},
        {"seq_len": 8.0},
        {"heads": True},
        {"kv_heads": None},
        {"causal": "no"},
        {"causal": 1},
        {"window": 2.5, "causal": True},
        {"window": True, "causal": True},
        {"dilation": (8, 1)},
        {"way": 3},
        {"dtype": "float"},
    ],
)
def test_an_operation_of_other_types_is_refused_by_name(given):
    refused(lambda: LongAttention(**SIZES | given), next(iter(given)))


def test_lists_of_a_dilation_become_tuples_so_that_it_can_be_looked_up():
    listed = Dilation(segment_lengths=[8, 16], dilation_rates=[1, 2])
    plain = Dilation(segment_lengths=(8, 16), dilation_rates=(1, 2))
    assert listed == plain and hash(listed) == hash(plain)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: contiguous("8", 2), "seq_len"),
        (lambda: contiguous(8.0, 2), "seq_len"),
        (lambda: contiguous(8, True), "ranks"),
        (lambda: contiguous(8, 2.0), "ranks"),
        (lambda: contiguous(-1, 2), "seq_len"),
        (lambda: contiguous(8, 0), "ranks"),
        (lambda: zigzag(None, 2), "seq_len"),
        (lambda: zigzag(8, 1.5), "ranks"),
        (lambda: of_lengths([4.0, 4]), "lengths"),
        (lambda: of_lengths([True, 4]), "lengths"),
        (lambda: of_lengths(8), "lengths"),
        (lambda: of_lengths("44"), "lengths"),
        (lambda: of_lengths([]), "lengths"),
        (lambda: of_lengths([4, -1]), "lengths"),
        (lambda: positions([(0, 4)], 0), "shards"),
        (lambda: positions(Shards((((0.5, 4),),)), 0), "shards"),
        (lambda: positions(contiguous(8, 2), 2), "rank"),
        (lambda: positions(contiguous(8, 2), -1), "rank"),
        (lambda: positions(contiguous(8, 2), 0.0), "rank"),
        (lambda: loss_weight(contiguous(8, 2), "0"), "rank"),
    ],
)
def test_helpers_of_shards_refuse_other_types_by_name(call, field):
    refused(call, field)


def refused(call, field):
    with pytest.raises(ValueError, match=rf"\b{field} = ") as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 293
