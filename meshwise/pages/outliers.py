"""Find keys that are slower than their peers, or than before. In: times by key. Out: ``Slow``.

Every series is cut into quarters, in the order of measurement, and each quarter has its median. A
key is slow if all of its quarters exceed the reference by more than a limit. The limit is the
larger of a floor and a multiple of the robust sigma (1.4826 MAD) of the reference's quarters. So it
grows with the machine's noise, including drift within a measurement.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np

K = TypeVar("K", bound=Hashable)
QUARTERS = 4
PEER_SIGMAS = 6.0
PAST_SIGMAS = 3.0
_ENOUGH = 4  # the fewest keys whose changes have a meaningful scatter


class Slow(NamedTuple):
    """A slow key. ``excess``: time over ``reference_s``, minus 1. ``limit``: the allowed excess."""

    excess: float
    limit: float
    reference_s: float


def than_peers(
    times_s: Mapping[K, Sequence[float]], floor: float, *, alike: bool = True
) -> dict[K, Slow]:
    """Find the keys that are slower than the median of the others. With two keys the slower one is
    found, though either may be at fault. ``alike``: differences between the others are noise."""
    cut = np.array([quarters(series) for series in times_s.values()])
    found = {}
    for place, (key, series) in enumerate(times_s.items()):
        others = np.delete(cut, place, axis=0)
        if not len(others):
            continue
        limit = max(floor, PEER_SIGMAS * scatter(others, alike=alike))
        if (cut[place] / np.median(others, axis=0)).min() - 1 > limit:
            reference_s = median(median(times_s[other]) for other in times_s if other != key)
            found[key] = Slow(median(series) / reference_s - 1, limit, reference_s)
    return found


def than_before(
    times_s: Mapping[K, Sequence[float]], runs: Sequence[Mapping[K, Sequence[float]]], floor: float
) -> dict[K, Slow]:
    """Find the keys that are slower than the median of earlier runs. The limit is at least three
    times the spread of these runs and, with four keys or more, three sigma of the keys' changes."""
    past = {key: [run[key] for run in runs if key in run] for key in times_s}
    past = {key: series for key, series in past.items() if series}
    medians = {key: [median(series) for series in past[key]] for key in past}
    reference = {key: median(medians[key]) for key in past}
    changes = np.array([median(times_s[key]) / reference[key] for key in past])
    apart = PAST_SIGMAS * _robust_sigma(changes) if len(changes) >= _ENOUGH else 0.0
    found = {}
    for key, reference_s in reference.items():
        noise = max(scatter(np.array([quarters(series)])) for series in past[key])
        spread = (max(medians[key]) - min(medians[key])) / reference_s
        limit = max(floor, apart, PAST_SIGMAS * noise, 3 * spread)
        if min(quarters(times_s[key])) / reference_s - 1 > limit:
            found[key] = Slow(median(times_s[key]) / reference_s - 1, limit, reference_s)
    return found


def quarters(times_s: Sequence[float]) -> list[float]:
    """Return the medians of four consecutive parts; parts share values if there are under four."""
    n = len(times_s)
    starts = [part * n // QUARTERS for part in range(QUARTERS + 1)]
    parts = itertools.pairwise(starts)
    return [median(times_s[start : max(end, start + 1)]) for start, end in parts]


def scatter(cut: np.ndarray, *, alike: bool = True) -> float:
    """Return the robust relative sigma of quarters [key, quarter]. Several keys are compared with
    their common median of each quarter, which removes drift that they share. One key, or keys that
    are not alike, are compared with their own median."""
    about_own = len(cut) == 1 or not alike
    return _robust_sigma(cut / np.median(cut, axis=1 if about_own else 0, keepdims=True))


def _robust_sigma(values: np.ndarray) -> float:
    middle = np.median(values)
    return 1.4826 * float(np.median(np.abs(values / middle - 1)))
