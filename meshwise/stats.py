"""Statistics of repeated timings: intervals without an assumed distribution, verdicts, changes.

The median's interval comes from order statistics (Hahn & Meeker, Statistical Intervals, 5.2): the
k-th smallest and k-th largest value, with k the largest number for which Binomial(n, 1/2) leaves at
most 2.5 % below it. It treats all times as independent.

A comparison has launches on each side, and removes no outlier. A side's time is the geometric mean
of its launches' medians. Its error is that of a hierarchical bootstrap which draws launches and
keeps the times of each: drawing these too counts their variation twice (Davison & Hinkley 1997,
3.8). For a mean that needs no drawing: the variance of the n log medians, over n. The interval of
the ratio's logarithm is the error times t, with Welch's degrees of freedom, of n - 1 a side.

A single launch does not show how far launches are apart. ``LAUNCH_SPREAD`` is assumed, and to its
square the variance of the launch's log times is added: where these vary, launches do.

Changes in a series are found by binary segmentation (Vostrikova 1981): the split with the largest
CUSUM, kept if fewer than 1 % of random orders of the same values have a larger one.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

FEWEST = 6  # values that a 95 % interval of a median needs
THRESHOLD = 0.01
LAUNCH_SPREAD = 0.1  # standard deviation of launches' log medians, where there is one launch
MOST_RATIO = 1e6  # and 1e-6: ends of an interval that says nothing
GMAE_FLOOR = 4e-4  # half a unit of the third decimal that PARAM prints
ERROR_EDGES = (
    0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0
)  # fmt: skip
_RESAMPLES = 1000

Verdict = Literal["same", "faster", "slower", "unclear"]
Launches = Sequence[Sequence[float]]  # of each the times, in the order of measurement


class MedianRatio(NamedTuple):
    """A comparison. ``a``, ``b``: times. ``ratio``: b/a, with its 99 % interval."""

    a: float
    b: float
    ratio: float
    low: float
    high: float
    verdict: Verdict


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval, for independent values. Fewer than 6 values give
    their range."""
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


def tamed_mean(values: Sequence[float]) -> float:
    """Return the mean after the largest and the smallest twentieth of the values, at least one of
    each from three on, are set to the next (Winsor): one outlier hardly moves it. Of three to five
    values, one that is over twice the median or under half of it is left out first."""
    ordered = np.sort(np.asarray(values, float))
    middle = np.median(ordered)
    near = ordered[(ordered >= middle / 2) & (ordered <= 2 * middle)]
    if 2 <= len(near) == len(ordered) - 1 < FEWEST - 1:
        ordered = near
    n = len(ordered)
    k = max(1, n // 20) if n > 2 else 0
    return float(np.clip(ordered, ordered[k], ordered[n - 1 - k]).mean())


def compare(a: Launches, b: Launches, *, threshold: float = THRESHOLD) -> MedianRatio:
    """Tell whether ``b`` is faster than ``a``. Times must be in the order of measurement.

    ``same``: the interval is within the threshold of 1. ``slower``: it is above 1, and the ratio is
    beyond the threshold; ``faster``: the same of a/b. ``unclear``: neither, or a side has fewer
    than 6 times.
    """
    from scipy.special import stdtrit

    (log_a, of_a), (log_b, of_b) = map(_side, (a, b))
    parts = [(of_a, len(a)), (of_b, len(b))]
    variance, apart = of_a + of_b, sum(x**2 / (n - 1) for x, n in parts if n > 1)
    freedom = variance**2 / apart if apart else math.inf
    most = math.log(MOST_RATIO)
    half = min(float(stdtrit(min(freedom, 1e6), 0.995)) * math.sqrt(variance), most)
    change, limit = log_b - log_a, math.log1p(threshold)
    verdict: Verdict = "unclear"
    if min(sum(map(len, side)) for side in (a, b)) < FEWEST:
        pass
    elif abs(change) + half <= limit:
        verdict = "same"
    elif abs(change) > max(half, limit):
        verdict = "faster" if change < 0 else "slower"
    ratio, low, high = np.exp(np.clip([change, change - half, change + half], -most, most))
    return MedianRatio(
        math.exp(log_a), math.exp(log_b), float(ratio), float(low), float(high), verdict
    )


def _side(launches: Launches) -> tuple[float, float]:
    """Return the mean of the launches' log medians, and its variance."""
    logs = np.log([np.median(times) for times in launches])
    if len(logs) > 1:
        return float(logs.mean()), float(logs.var(ddof=1)) / len(logs)
    return float(logs[0]), LAUNCH_SPREAD**2 + float(np.log(launches[0]).var())


def changes(values: Sequence[float], *, threshold: float = THRESHOLD) -> list[int]:
    """Return the places where a new level of positive values begins. Both levels have at least two
    values, and their medians differ by more than ``threshold``."""
    return _split(np.log(np.asarray(values, float)), 0, math.log1p(threshold))


def _split(logs: np.ndarray, begin: int, limit: float) -> list[int]:
    n = len(logs)
    if n < 4:
        return []
    first = np.arange(2, n - 1)  # length of the first part
    scale = np.sqrt(n / (first * (n - first)))
    centred = logs - logs.mean()

    def cusum(rows: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.abs(np.cumsum(rows, axis=-1)[..., first - 1]) * scale
        return found

    orders = np.random.default_rng(0).permuted(np.tile(centred, (_RESAMPLES - 1, 1)), axis=1)
    found = cusum(centred)
    larger = (cusum(orders).max(axis=1) >= found.max() * (1 - 1e-9)).sum()
    at = int(first[found.argmax()])
    step = abs(float(np.median(logs[at:]) - np.median(logs[:at])))
    if (larger + 1) / _RESAMPLES >= 0.01 or step <= limit:
        return []
    before, after = logs[:at], logs[at:]
    return [*_split(before, begin, limit), begin + at, *_split(after, begin + at, limit)]


def share_interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Clopper & Pearson 1934): the shares for which ``count``
    or more, and ``count`` or fewer, of ``total`` independent trials have a chance of 2.5 %."""
    from scipy.special import betaincinv

    low = float(betaincinv(count, total - count + 1, 0.025)) if count else 0.0
    high = float(betaincinv(count + 1, total - count, 0.975)) if count < total else 1.0
    return low, high


def geometric_mean(values: Sequence[float]) -> float:
    """Return exp(mean(log)), the right average of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def gmae(errors: Sequence[float] | np.ndarray) -> float:
    """Return ml_perf_model's geometric mean of absolute relative errors: exp(mean(log(|e| +
    4e-4))). The 4e-4 keeps an error of 0 from making the mean 0, and is in the result."""
    if not len(errors):
        raise ValueError("GMAE of no errors; predict at least one")
    return float(np.exp(np.log(np.abs(errors) + GMAE_FLOOR).mean()))


def histogram(
    errors: Sequence[float] | np.ndarray, edges: Sequence[float] = ERROR_EDGES
) -> dict[tuple[float, float], float]:
    """Return the share of absolute errors in each half-open bin [low, high). Errors beyond the last
    edge are in none, so that shares then add up to less than 1."""
    sizes, count = np.abs(errors), max(len(errors), 1)
    return {
        (low, high): int(((sizes >= low) & (sizes < high)).sum()) / count
        for low, high in pairwise(edges)
    }
