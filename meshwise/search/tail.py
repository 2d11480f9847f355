"""Carry the spread of single ranks to the step, which waits for the slowest of them.

A rank's time in a step differs from the others' by a factor whose logarithm is normal with a
standard deviation s. Differences between devices last (``Spread.lasting``). The noise of single
calls is taken as independent, so that over a step of n calls of layers it averages out:

    s^2 = lasting^2 + passing^2 / n

The slowest of N ranks is below x if all are: P = Phi(log(x) / s)^N. Its quantile q is

    slowest(q, N) = exp(s Phi^-1(q^(1/N)))

Prices are times of the slowest of the R ranks that were measured; those of data sheets are of one.
So a step's computation takes slowest(q, N) / slowest(1/2, R) times what prices say. Messages take
as long as before. In a pipeline one slow stage holds up the others as long as it has microbatches
to do, so that all ranks count there, too: with few microbatches that is too much.
"""

import math
from statistics import NormalDist

from meshwise.prices import Prices
from meshwise.prices.datasheet import attainable
from meshwise.spec import AnyModel, Layout

_NORMAL = NormalDist()


def slowest(quantile: float, num_ranks: int, spread: float) -> float:
    """Return a quantile of the slowest of ``num_ranks`` ranks, over the median rank."""
    return math.exp(spread * _NORMAL.inv_cdf(quantile ** (1 / num_ranks)))


def tail(
    step_s: float, messages_s: float, model: AnyModel, layout: Layout, prices: Prices
) -> tuple[float, float]:
    """Return the p50 and the p95 of a step that prices say takes ``step_s``, ``messages_s`` of
    which pass messages."""
    costs = prices.costs
    known = costs.spread or attainable().spread
    calls = 2 * model.layers / layout.pp * layout.num_microbatches
    spread = math.hypot(known.lasting, known.passing / math.sqrt(calls))
    measured = 1 if prices.nothing_measured else costs.world_size
    usual = slowest(0.5, measured, spread)
    p50, p95 = (slowest(q, layout.num_devices, spread) / usual for q in (0.5, 0.95))
    return step_s + (step_s - messages_s) * (p50 - 1), step_s + (step_s - messages_s) * (p95 - 1)
