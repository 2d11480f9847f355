"""Message sizes as users write them."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.probe.cases.sizes import parse_shapes, parse_sizes

MiB = 2**20


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8..64:x2", (8, 16, 32, 64)),
        ("8..64", (8, 16, 32, 64)),
        ("8..100:x2", (8, 16, 32, 64)),  # the end only where a step meets it
        ("1K..64K:x4", (1024, 4096, 16384, 65536)),
        ("10..40:x1.5", (10, 15, 22, 33)),
        ("1..4:x1.1", (1, 2, 3, 4)),  # a step goes on by a byte at least
        ("1M..3M:+1M", (MiB, 2 * MiB, 3 * MiB)),
        ("64K,1M", (65536, MiB)),
        ("1M,64K,64KiB", (65536, MiB)),
        ("8..16:x2,1MB", (8, 16, 10**6)),
        ("5..5", (5,)),
    ],
)
def test_known_answers(text, sizes):
    assert parse_sizes(text) == sizes


def test_the_usual_sweep_of_nccl_tests():
    assert parse_sizes("8..8G:x2") == tuple(2**power for power in range(3, 34))


@given(
    low=st.integers(1, 10**6),
    reach=st.integers(0, 10**7),
    step=st.one_of(
        st.integers(11, 80).map(lambda tenths: f"x{tenths / 10}"),
        st.integers(10**5, 10**9).map(lambda added: f"+{added}"),
    ),
)
def test_a_range_ascends_within_its_bounds(low, reach, step):
    high = low + reach
    found = parse_sizes(f"{low}..{high}:{step}")
    assert found[0] == low and found[-1] <= high
    assert all(a < b for a, b in itertools.pairwise(found))
    factor, added = (float(step[1:]), 0) if step[0] == "x" else (1.0, int(step[1:]))
    for a, b in [*itertools.pairwise(found), (found[-1], high + 1)]:
        assert b <= max(a * factor, a + added) + 1 or b == high + 1
    assert max(found[-1] * factor, found[-1] + added) + 1 > high  # one more would be beyond


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=8))
def test_a_list_is_sorted_and_each_size_comes_once(sizes):
    assert parse_sizes(",".join(map(str, sizes))) == tuple(sorted(set(sizes)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64..8", r"sizes = '64..8': a range is LOW..HIGH:xFACTOR or LOW..HIGH:\+BYTES"),
        ("0..8", "1 <= LOW <= HIGH"),
        ("8..64:x1", "a factor above 1"),
        ("8..64:x0.5", "a factor above 1"),
        ("8..64:2", "a range is"),
        ("8..64:xtwo", "a range is"),
        ("8..64:+0", "a range is"),
        ("8..64:+x", "sizes = 'x': is not understood; write it like 8, 64K"),
        ("0", "sizes = '0': every size must be 1 byte to 1024T"),
        ("8,,16", "sizes = '8,,16': a size is missing"),
        ("many", "sizes = 'many': is not understood"),
        ("8..", "sizes = '': is not understood"),
        ("", "sizes = '': a size is missing"),
        ("-8", "sizes = '-8': is not understood"),
    ],
)
def test_what_is_not_understood_is_named_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_sizes(text)
    assert "\n" not in str(error.value)


def test_shapes_of_products_are_numbers_and_ranges():
    assert parse_shapes(["4096,512,64"]) == [(4096, 512, 64)]
    found = parse_shapes(["4096:8192:2048,16,8", "0:3:1,1,0:512:256"])
    assert found == [(4096, 16, 8), (6144, 16, 8), (1, 1, 256), (2, 1, 256)]
    assert len(parse_shapes(["1:101:1,1:101:1,7"])) == 10_000
    assert parse_shapes([]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4096,4096", "must be M,N,K"),
        ("4096,4096,0", "'0' must be a number >= 1 or START:STOP:STEP"),
        ("4096,4096,x", "'x' must be"),
        ("", "'' must be"),
        ("64:64:1,1,1", "'64:64:1' must be"),
        ("64:128:0,1,1", "'64:128:0' must be"),
        ("0:128:0,1,1", "'0:128:0' must be"),
        ("64:128,1,1", "'64:128' must be"),
        ("-1,1,1", "'-1' must be"),
        ("9999999999999,1,1", "must be"),
        ("1:102:1,1:101:1,7", "10,100 shapes, must be <= 10,000"),
        ("1:999999999999:1,1:999999999999:1,1:999999999999:1", "shapes, must be <= 10,000"),
    ],
)
def test_a_wrong_shape_is_named_in_one_line(text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_shapes([text])
    assert "shape = " in str(error.value) and "\n" not in str(error.value)
