"""Statistics of repeated timings: intervals without assuming a distribution, four-valued verdicts.

No outlier is removed. The median's interval comes from order statistics (Hahn & Meeker,
Statistical Intervals, 5.2): the k-th smallest and k-th largest value, with k the largest number
for which Binomial(n, 1/2) leaves at most 2.5 % below it. Verdicts follow benchstat: a
Mann-Whitney U test says whether there is a difference, the interval of the ratio of medians says
how large.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Comparison(NamedTuple):
    """``ratio`` = median(b)/median(a) with its 95 % interval; below 1 means b is faster."""

    ratio: float
    low: float
    high: float
    p_value: float
    verdict: str  # same, faster, slower or unclear


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval; with fewer than 6 values the interval is the range."""
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        raise ValueError("median of no values; measure at least once")
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    below, k = 0.0, 0
    while k < n // 2:
        below += math.comb(n, k) / 2**n
        if below > 0.025:
            break
        k += 1
    return middle, ordered[max(k - 1, 0)], ordered[min(n - k, n - 1)]


def compare(a: Sequence[float], b: Sequence[float], *, tolerance: float = 0.01) -> Comparison:
    """Is ``b`` faster than ``a``? A change within ``tolerance`` of 1 counts as the same.

    Fewer than 4 values a side can never reach p < 0.05, so they give ``unclear``.
    """
    from scipy.stats import mannwhitneyu

    ratio = median_interval(b)[0] / median_interval(a)[0]
    low, high = _ratio_interval(np.asarray(a, float), np.asarray(b, float))
    p_value = float(mannwhitneyu(a, b).pvalue) if min(len(a), len(b)) >= 4 else 1.0
    if 1 - tolerance <= low and high <= 1 + tolerance:
        verdict = "same"
    elif p_value < 0.05 and high < 1:
        verdict = "faster"
    elif p_value < 0.05 and low > 1:
        verdict = "slower"
    else:
        verdict = "unclear"
    return Comparison(ratio, low, high, p_value, verdict)


def _ratio_interval(a: np.ndarray, b: np.ndarray, resamples: int = 2000) -> tuple[float, float]:
    """Percentile bootstrap (fixed seed, so that a comparison repeats) of median(b)/median(a)."""
    rng = np.random.default_rng(0)
    medians = [np.median(x[rng.integers(0, len(x), (resamples, len(x)))], axis=1) for x in (a, b)]
    low, high = np.quantile(medians[1] / medians[0], [0.025, 0.975])
    return float(low), float(high)


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean(log)); the right average of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))
