"""Statistics of repeated timings: intervals without an assumed distribution, four verdicts.

Comparisons remove no outlier. The median's interval comes from order statistics (Hahn & Meeker,
Statistical Intervals, 5.2): the k-th smallest and k-th largest value, with k the largest number
for which Binomial(n, 1/2) leaves at most 2.5 % below it. It treats all times as independent.

A comparison does not, since a step takes about as long as the one before. The lag-1 autocorrelation
r of the ranks, with its bias removed (Kendall 1954: r = rho - (1 + 4 rho)/n), gives the number of
independent times that n times are worth: m = n (1 - rho)/(1 + rho). The median's standard error
comes from a stationary bootstrap (Politis & Romano 1994). Its block length is the best one for an
AR(1) series (Politis & White 2004): (2 rho/(1 - rho^2))^(2/3) n^(1/3). Block ends cut off some
correlation; the share that an AR(1) series loses this way is added back. The interval of the
ratio's logarithm is that error times t with m - 1 degrees of freedom, at least 1.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

FEWEST = 6  # values that a 95 % interval of a median needs
TOLERANCE = 0.01
GMAE_FLOOR = 4e-4  # half a unit of the third decimal that PARAM prints
ERROR_EDGES = (
    0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0
)  # fmt: skip
_RESAMPLES = 1000

Verdict = Literal["same", "faster", "slower", "unclear"]


class MedianRatio(NamedTuple):
    """A comparison. ``ratio`` = median(b)/median(a); below 1, b is faster. ``low`` to ``high``: its
    95 % interval or, for fewer than 6 values, the range of ratios of single values."""

    ratio: float
    low: float
    high: float
    interval: Literal["95 %", "range"]
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


def compare(a: Sequence[float], b: Sequence[float], *, tolerance: float = TOLERANCE) -> MedianRatio:
    """Tell whether ``b`` is faster than ``a`` by more than ``tolerance``.

    Values must be in the order of measurement.

    ``same``: the interval is within the tolerance of 1. ``faster``, ``slower``: it is beyond. Fewer
    than 6 values are never faster or slower.
    """
    sides = [np.asarray(values, float) for values in (a, b)]
    ratio = median_interval(b)[0] / median_interval(a)[0]
    few = min(len(a), len(b)) < FEWEST
    low, high = (min(b) / max(a), max(b) / min(a)) if few else _interval(ratio, *sides)
    verdict: Verdict = "unclear"
    if 1 - tolerance <= low and high <= 1 + tolerance:
        verdict = "same"
    elif not few and (high < 1 - tolerance or low > 1 + tolerance):
        verdict = "faster" if ratio < 1 else "slower"
    return MedianRatio(ratio, low, high, "range" if few else "95 %", verdict)


def _interval(ratio: float, *sides: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of the medians."""
    from scipy.special import stdtrit

    rho = [_autocorrelation(values) for values in sides]
    independent = min(len(x) * (1 - r) / (1 + r) for x, r in zip(sides, rho, strict=True))
    variance = sum(_variance(x, r) for x, r in zip(sides, rho, strict=True))
    factor = math.exp(stdtrit(max(independent - 1, 1.0), 0.975) * math.sqrt(variance))
    return ratio / factor, ratio * factor


def _autocorrelation(values: np.ndarray) -> float:
    """Return rho of the AR(1) series with the same rank correlation; 0 if all values are equal."""
    n = len(values)
    if values.min() == values.max():
        return 0.0
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # ties share a rank
    ranks -= ranks.mean()
    r = 2 * math.sin(math.pi / 6 * float(ranks[1:] @ ranks[:-1] / (ranks @ ranks)))  # Pearson 1907
    return min(max((n * r + 1) / (n - 4), 0.0), 0.99)


def _variance(values: np.ndarray, rho: float) -> float:
    """Return the variance of the median's logarithm, by a stationary bootstrap. Its seed is fixed,
    so a comparison is reproducible."""
    n, rng, medians = len(values), np.random.default_rng(0), list[float]()
    block = min(max((2 * rho / (1 - rho**2)) ** (2 / 3) * n ** (1 / 3), 1.0), n / 3)
    shape = max(1, min(_RESAMPLES, 2**20 // n)), n
    while len(medians) < _RESAMPLES:
        begins = rng.random(shape) < 1 / block
        begins[:, 0] = True
        since = np.maximum.accumulate(np.where(begins, np.arange(n), 0), axis=1)
        start = np.take_along_axis(rng.integers(0, n, shape), since, axis=1)
        drawn = values[(start + np.arange(n) - since) % n]
        medians += np.median(drawn, axis=1).tolist()
    kept = rho * (1 - 1 / block)  # correlation that blocks keep
    lost: float = (1 + rho) / (1 - rho) * (1 - kept) / (1 + kept)
    return lost * float(np.log(medians).var())


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
