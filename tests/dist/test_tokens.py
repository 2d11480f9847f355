"""Batches of a token file: the same under every layout, from any step on."""

import itertools

import numpy as np
import pytest
import torch

import meshwise

pytestmark = pytest.mark.dist


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    return path


def steps(file, n, **options):
    found = itertools.islice(meshwise.tokens(file, seq_len=5, global_batch_size=4, **options), n)
    return [(inputs, targets) for inputs, targets in found]


def test_batches_are_windows_of_the_file_and_the_same_for_any_number_of_ranks(file):
    alone = steps(file, 3, seed=7)
    for inputs, targets in alone:
        assert inputs.shape == targets.shape == (4, 5) and inputs.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)  # the file counts up
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(5))
    shared = [steps(file, 3, seed=7, rank=rank, world_size=2) for rank in range(2)]
    for whole, *parts in zip(alone, *shared, strict=True):
        assert torch.equal(whole[0], torch.cat([inputs for inputs, _ in parts]))
    assert not torch.equal(alone[0][0], alone[1][0])
    assert not torch.equal(alone[0][0], steps(file, 1, seed=8)[0][0])


def test_batches_go_on_where_they_ended(file):
    for before, after in zip(steps(file, 5)[2:], steps(file, 3, start_step=2), strict=True):
        assert torch.equal(before[0], after[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 3}, "world_size = 3: must divide global_batch_size = 4"),
        ({"rank": 2, "world_size": 2}, "rank = 2: must be >= 0 and < world_size = 2"),
        ({"start_step": -1}, "start_step = -1: must be >= 0"),
        (
            {"seq_len": 1000},
            "holds 1000 tokens, but one sequence needs 1001; use a longer file or a shorter seq",
        ),
    ],
)
def test_shares_that_do_not_fit_are_refused(file, options, message):
    with pytest.raises(ValueError, match=message):
        meshwise.tokens(file, **({"seq_len": 5, "global_batch_size": 4} | options))


def test_a_file_that_is_not_there_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        meshwise.tokens(tmp_path / "none.bin", seq_len=5, global_batch_size=4)
