"""Intervals against simulation, verdicts on data whose answer is known."""

import numpy as np
import pytest

from meshwise import stats


def test_median_interval_covers_the_true_median_95_times_in_100():
    rng = np.random.default_rng(1)
    draws = rng.exponential(size=(2000, 25))
    hits = sum(low <= np.log(2) <= high for _, low, high in map(stats.median_interval, draws))
    assert 0.94 <= hits / len(draws) <= 0.99  # order statistics are conservative


@pytest.mark.parametrize(
    ("n", "expected"), [(6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (50, (18, 33))]
)
def test_median_interval_ranks_of_the_tables(n, expected):
    """Ranks tabulated in Conover, Practical Nonparametric Statistics, for 95 %."""
    _, low, high = stats.median_interval(range(1, n + 1))
    assert (low, high) == expected


def test_few_values_give_the_range_and_none_an_error():
    assert stats.median_interval([3.0, 1.0]) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="no values"):
        stats.median_interval([])


@pytest.mark.parametrize(("factor", "verdict"), [(0.9, "faster"), (1.1, "slower"), (1.0, "same")])
def test_verdicts(factor, verdict):
    rng = np.random.default_rng(2)
    a, b = (scale * (1 + 0.01 * rng.standard_normal(60)) for scale in (1.0, factor))
    found = stats.compare(a.tolist(), b.tolist())
    assert found.verdict == verdict
    assert found.low <= factor <= found.high


def test_three_against_three_is_never_significant():
    assert stats.compare([1, 1, 1], [2, 2, 2]).verdict == "unclear"
