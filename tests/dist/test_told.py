"""What other ranks say reaches this one's errors and memory within bounds."""

import pytest
import torch
from torch import distributed as dist

from meshwise.engine import frame
from meshwise.ranks import Ranks

pytestmark = pytest.mark.dist


class Place:
    groups = ()


def test_what_a_rank_ran_out_of_is_told_in_one_plain_line():
    ranks = Ranks(0, 0, 1, torch.device("cpu"), "gloo", store=dist.HashStore())
    ranks.case = "\x1b[2J" + "x" * 1000

    def work():
        raise MemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        frame.together(ranks, Place(), "the first step", work)
    said = str(caught.value)
    assert said.startswith("rank 0, the first step, ") and said.endswith("out of memory")
    assert said.isprintable() and len(said) <= 300


def too_much(ranks):
    """A value that is too deep, and one that is too long, of rank 1."""
    deep = []
    for _ in range(100):
        deep = [deep]
    said = []
    for value in (deep, "x" * 2**24):
        with pytest.raises(ValueError) as caught:
            ranks.gather(value if ranks.rank == 1 else 1)
        said.append(str(caught.value))
    return [*said, ranks.gather(ranks.rank)]


def test_what_ranks_gather_is_bounded_in_depth_and_size(gloo_ranks):
    first, second = gloo_ranks(2, too_much)
    assert first == second
    assert first[0].startswith("rank 1: what it gathers: line 1: ") and "64 levels" in first[0]
    assert first[1:] == ["rank 1 gathers 16777218 bytes, of at most 16777216; give less", [0, 1]]
