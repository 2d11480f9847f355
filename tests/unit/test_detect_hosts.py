"""Hosts that are unlike: the odd one out is named."""

import pytest

from meshwise.verbs.detect import refuse_unlike

USUAL, FEWER = "8 x NVIDIA H100 of 80 GiB, nvlink of 8", "7 x NVIDIA H100 of 80 GiB, pcie of 7"


def test_equal_hosts_are_taken():
    refuse_unlike([("a", USUAL), ("a", USUAL), ("b", USUAL)])


def test_the_odd_host_out_is_named_wherever_it_is():
    for at in range(3):
        told = [("a", USUAL), ("b", USUAL), ("c", USUAL)]
        told.insert(at, ("x", FEWER))
        with pytest.raises(ValueError, match=r"^x: 7 x .*; but a, b, c: 8 x ") as error:
            refuse_unlike(told)
        assert "leave the odd ones out" in str(error.value)
