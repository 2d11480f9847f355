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
    assert (found.verdict, found.interval) == (verdict, "95 %")
    assert found.low <= factor <= found.high


def autoregressive(rng, rho: float, n: int) -> np.ndarray:
    """AR(1) of unit variance."""
    steps = rng.standard_normal(n) * np.sqrt(1 - rho**2)
    steps[0] = rng.standard_normal()
    for i in range(1, n):
        steps[i] += rho * steps[i - 1]
    return steps


def share(verdicts: set[str], *, rho: float, change: float, sigma: float, n: int, trials: int):
    """How often two launches of AR(1) steps, the second slower by ``change``, are called so."""
    rng, found = np.random.default_rng(3), 0
    for _ in range(trials):
        a, b = (np.exp(sigma * autoregressive(rng, rho, n)) for _ in range(2))
        found += stats.compare(a, (1 + change) * b).verdict in verdicts
    return found / trials


def allowed(rate: float, trials: int) -> float:
    """What a rate is exceeded by once in 10,000: four sigma of the binomial."""
    return rate + 4 * (rate * (1 - rate) / trials) ** 0.5


@pytest.mark.parametrize("sigma", [0.02, 0.2])  # of 20 % the tolerance is next to nothing
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_unchanged_code_is_seldom_called_changed(rho, sigma):
    """A Mann-Whitney test beside an interval of independent times says so of 60 % at rho = 0.9."""
    trials, n = 300, 20 if rho == 0.5 else 50
    wrong = share({"faster", "slower"}, rho=rho, change=0.0, sigma=sigma, n=n, trials=trials)
    assert wrong <= allowed(0.05, trials)


@pytest.mark.parametrize("sigma", [0.005, 0.01])
@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_a_change_within_the_tolerance_is_no_change(rho, sigma):
    """+0.5 % was slower in 32 % of trials."""
    trials = 200
    wrong = share({"faster", "slower"}, rho=rho, change=0.005, sigma=sigma, n=50, trials=trials)
    assert wrong <= allowed(0.05, trials)


@pytest.mark.parametrize(
    ("rho", "n", "least"), [(0.0, 20, 0.95), (0.5, 20, 0.75), (0.5, 50, 0.95), (0.9, 200, 0.85)]
)
def test_a_change_of_five_percent_is_found(rho, n, least):
    trials = 100
    found = share({"slower"}, rho=rho, change=0.05, sigma=0.01, n=n, trials=trials)
    assert found >= least - 4 * (least * (1 - least) / trials) ** 0.5


@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_the_interval_of_a_ratio_covers_it(rho):
    rng, hits, trials = np.random.default_rng(4), 0, 200
    for _ in range(trials):
        a, b = (np.exp(0.02 * autoregressive(rng, rho, 60)) for _ in range(2))
        found = stats.compare(a, 1.3 * b)
        hits += found.low <= 1.3 <= found.high
    assert hits / trials >= 0.95 - 4 * (0.95 * 0.05 / trials) ** 0.5


def test_a_comparison_is_symmetric_repeats_and_needs_no_unit():
    rng = np.random.default_rng(5)
    a, b = (autoregressive(rng, 0.7, 40) / 50 + 1 for _ in range(2))
    there, back = stats.compare(a, b), stats.compare(b, a)
    assert there == stats.compare(a, b)
    assert there.low == pytest.approx(1 / back.high) and there.high == pytest.approx(1 / back.low)
    scaled = stats.compare(1e-6 * a, 1e-6 * b)
    assert scaled[:3] == pytest.approx(there[:3]) and scaled.verdict == there.verdict
    outlier = a.copy()
    outlier[3] = 1e6
    assert stats.compare(a, outlier).high < 1.2  # the median and ranks do not feel it


@pytest.mark.parametrize(("n", "verdict"), [(2, "unclear"), (5, "unclear"), (6, "slower")])
def test_below_six_values_nothing_is_claimed(n, verdict):
    found = stats.compare([1.0] * n, [2.0] * n)
    assert (found.verdict, found.interval) == (verdict, "range" if n < 6 else "95 %")
    spread = stats.compare([1.0, 1.1], [2.0, 2.2])
    assert (spread.low, spread.high) == (2.0 / 1.1, 2.2)
    assert stats.compare([1.0] * n, [1.001] * n).verdict == "same"


def test_a_drift_is_no_reason_to_overlook_a_factor_of_two():
    a, b = ([scale * (1 + i / 1000) for i in range(12)] for scale in (1.0, 2.0))
    assert stats.compare(a, b).verdict == "slower"
    assert stats.compare(a, a).verdict == "unclear"  # where will it end?
