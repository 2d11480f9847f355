"""Fit how much the ranks of a machine differ, from samples of work that each rank does alone.

``lasting``: how far a rank is from the others over all samples. Each sample gives a rank's distance
from the mean of the ranks' median times, in logarithms; a rank's is the median over the samples,
which no single odd sample moves. A few ranks say little of a spread, so the usual one
(``data/attainable.toml``) counts as ``_USUAL`` ranks more:

    lasting^2 = (_USUAL usual^2 + (ranks - 1) measured^2) / (_USUAL + ranks - 1)

``passing``: from call to call, of layers, else of any work: the median over samples and ranks of
1.4826 times the median distance from the median, which is the standard deviation of normal times.
"""

from collections.abc import Sequence

import numpy as np

from meshwise.prices.datasheet import attainable
from meshwise.spec import Block, Sample, Shaped, Spread

_USUAL, _LEAST = 4, 5  # ranks; timings of a sample


def fit_spread(samples: Sequence[Sample], num_ranks: int) -> Spread | None:
    """Return the spread of ``num_ranks`` ranks; None if there is one, or no such sample."""
    found = [
        (np.log([times_s[:least] for times_s in one.rank_times_s]), isinstance(one.case.op, Block))
        for one in samples
        if one.status == "ok" and len(one.rank_times_s) == num_ranks > 1 and _is_alone(one)
        if (least := min(map(len, one.rank_times_s))) >= _LEAST
    ]
    if not found:
        return None
    medians = np.array([np.median(times, axis=1) for times, _ in found])
    apart = np.median(medians - medians.mean(axis=1, keepdims=True), axis=0)
    usual, own = _USUAL * attainable().spread.lasting ** 2, (num_ranks - 1) * apart.var(ddof=1)
    blocks = [times for times, is_block in found if is_block] or [times for times, _ in found]
    calls = [np.abs(times - np.median(times, axis=1, keepdims=True)) for times in blocks]
    return Spread(
        lasting=float(np.sqrt((usual + own) / (_USUAL + num_ranks - 1))),
        passing=float(1.4826 * np.median([np.median(each, axis=1) for each in calls])),
    )


def _is_alone(sample: Sample) -> bool:
    op = sample.case.op
    return isinstance(op, Shaped) or (isinstance(op, Block) and not op.is_shared)
