"""Intervals against simulation, verdicts on data whose answer is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def launched(
    rng, n: int, *, apart: float, factor: float = 1.0, times: int = 20
) -> list[np.ndarray]:
    """``n`` launches whose medians are ``apart`` by chance, each of times that differ by 1 %."""
    centres = factor * np.exp(apart * rng.standard_normal(n))
    return [centre * np.exp(0.01 * rng.standard_normal(times)) for centre in centres]


def share(verdicts: set[str], n: int, *, apart: float, factor: float, trials: int = 300) -> float:
    rng, found = np.random.default_rng(3), 0
    for _ in range(trials):
        a, b = (launched(rng, n, apart=apart, factor=of) for of in (1.0, factor))
        found += stats.compare(a, b).verdict in verdicts
    return found / trials


@pytest.mark.parametrize(("factor", "verdict"), [(0.9, "faster"), (1.1, "slower"), (1.0, "same")])
def test_verdicts(factor, verdict):
    rng = np.random.default_rng(2)
    a, b = (launched(rng, 8, apart=0.002, factor=of) for of in (1.0, factor))
    found = stats.compare(a, b)
    assert found.verdict == verdict and found.low <= factor <= found.high
    assert found.ratio == pytest.approx(found.b / found.a)


@pytest.mark.parametrize("apart", [0.003, 0.02, 0.2])
@pytest.mark.parametrize("n", [2, 6, 12])
def test_launches_of_unchanged_code_are_seldom_called_different(n, apart):
    trials = 300
    wrong = share({"faster", "slower"}, n, apart=apart, factor=1.0, trials=trials)
    assert wrong <= 0.01 + 4 * (0.01 * 0.99 / trials) ** 0.5


@pytest.mark.parametrize(("n", "apart", "least"), [(6, 0.008, 0.95), (12, 0.015, 0.95)])
def test_a_slowdown_of_three_percent_is_found(n, apart, least):
    assert share({"slower"}, n, apart=apart, factor=1.03) >= least


def test_few_launches_say_unclear():
    """Also where launches are within 0.5 %, where twelve know."""
    known = [share({"slower", "same"}, n, apart=0.005, factor=1.02) for n in (1, 2, 3, 12)]
    assert known[0] == 0 and known[1] < 0.1 and known[2] < 0.5 and known[3] > 0.95


def test_one_launch_is_clear_only_far_beyond_what_launches_may_differ_by():
    a = [np.linspace(0.99, 1.01, 50)]
    found = {of: stats.compare(a, [of * a[0]]).verdict for of in (0.5, 0.8, 1.0, 1.3, 2.0)}
    assert list(found.values()) == ["faster", "unclear", "unclear", "unclear", "slower"]


def test_the_interval_covers_the_ratio_99_times_in_100():
    rng, hits, trials = np.random.default_rng(4), 0, 1000
    for _ in range(trials):
        a = launched(rng, 5, apart=0.03)
        b = launched(rng, 9, apart=0.01, factor=1.3)
        found = stats.compare(a, b)
        hits += found.low <= 1.3 <= found.high
    assert abs(hits / trials - 0.99) <= 4 * (0.99 * 0.01 / trials) ** 0.5


@given(
    sides=st.tuples(*[st.lists(st.lists(st.floats(0.5, 2), min_size=1, max_size=8), min_size=1,
                               max_size=5)] * 2),
    factor=st.sampled_from([0.1, 0.97, 1.0, 1.03, 10.0]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_is_faster_exactly_when_b_is_slower(sides, factor):
    """Both ways round, in any unit, and the same each time."""
    a, b = sides[0], [[factor * time for time in times] for times in sides[1]]
    there, back = stats.compare(a, b), stats.compare(b, a)
    assert there == stats.compare(a, b)
    turned = {"faster": "slower", "slower": "faster"}
    assert back.verdict == turned.get(there.verdict, there.verdict)
    assert 1 / back.ratio == pytest.approx(there.ratio, rel=1e-9)
    assert (1 / back.high, 1 / back.low) == pytest.approx((there.low, there.high), rel=1e-9)
    assert there.low <= there.ratio <= there.high
    small = stats.compare(*([[2**-20 * time for time in times] for times in of] for of in (a, b)))
    assert small.ratio == pytest.approx(there.ratio, rel=1e-9)


def test_one_outlier_in_a_launch_changes_nothing_and_no_spread_none_either():
    a = [[1.0, 1.1, 1.2, 1.3, 1.4]] * 6
    assert stats.compare(a, [*a[:5], [1.0, 1.1, 1.2, 1.3, 1e6]]).ratio == 1
    assert stats.compare([[1.0] * 3] * 2, [[1.5] * 3] * 2).verdict == "slower"


@pytest.mark.parametrize(("n", "verdict"), [(2, "unclear"), (5, "unclear"), (6, "slower")])
def test_below_six_times_a_side_nothing_is_claimed(n, verdict):
    assert stats.compare([[1.0] * n], [[2.0] * n]).verdict == verdict


def test_the_threshold_is_the_change_that_matters():
    rng = np.random.default_rng(5)
    a, b = (launched(rng, 12, apart=0.001, factor=of) for of in (1.0, 1.02))
    found = stats.compare(a, b)
    assert found.verdict == "slower"
    assert stats.compare(a, b, threshold=0.03).verdict == "same"
    inside = (found.ratio + found.high) / 2 - 1
    assert stats.compare(a, b, threshold=inside).verdict == "unclear"


class TestChanges:
    def level(self, rng, n, factor):
        return (factor * np.exp(0.01 * rng.standard_normal(n))).tolist()

    def test_places(self):
        rng = np.random.default_rng(6)
        parts = [self.level(rng, n, of) for n, of in ((20, 1.0), (15, 1.1), (15, 1.0))]
        assert stats.changes([x for part in parts for x in part]) == [20, 35]

    def test_a_series_without_one_seldom_has_one(self):
        rng, trials = np.random.default_rng(7), 300
        wrong = sum(
            bool(stats.changes(self.level(rng, 40, 1.0), threshold=1e-6)) for _ in range(trials)
        )
        assert wrong / trials <= 0.01 + 4 * (0.01 * 0.99 / trials) ** 0.5

    def test_one_odd_run_is_no_new_level(self):
        values = [1.0 + 0.001 * (i % 7) for i in range(30)]
        assert stats.changes([*values[:15], 1.5, *values[15:]]) == []

    @pytest.mark.parametrize(("n", "found"), [(0, []), (3, []), (9, []), (11, [5])])
    def test_eleven_runs_are_needed(self, n, found):
        assert stats.changes([1.0 + 0.001 * i for i in range(5)][:n] + [2.0] * (n - 5)) == found

    def test_the_threshold(self):
        values = [1.0, 1.001] * 10 + [1.02, 1.021] * 10
        assert stats.changes(values) == [20] and stats.changes(values, threshold=0.03) == []
