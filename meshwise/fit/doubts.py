"""Doubts about prices that look wrong but need not be, one sentence each. Nothing is repaired here;
a price that looks wrong as a whole keeps its doubt (``Price.doubt``).

constant    every size took the same time
untested    too few sizes to leave one out, so the interval is 100 %
units       100 times as long as the data sheet says, or as short; without a data sheet 300 times
            what the other curves of its kind say; a layer 100 times what its operations say:
            milliseconds for microseconds, as a rule
falling     a larger size took less than a third of a smaller one's time; where hosts set the time,
            stored profiles have up to 2.3 times
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import median
from typing import TypeVar

import msgspec
import numpy as np

from meshwise.fit.factors import usual_host_s
from meshwise.fit.sheet import over_measured, points
from meshwise.prices import Datasheet, Prices, name_of, times_of
from meshwise.prices.laws import KnotTimes
from meshwise.spec import Costs, Curve, Factor, Surface
from meshwise.spec.label import label
from meshwise.spec.run import Case
from meshwise.units import format_bytes, format_seconds

Priced = TypeVar("Priced", Curve, Surface)
OFF_SHEET, OFF_OTHERS, FALLING = 100.0, 300.0, 3.0  # factors


def doubted(costs: Costs) -> Costs:
    """Return curves and surfaces with the doubt of each that is constant, or in other units, as a
    whole."""
    said = doubts(costs)

    def marked(price: Priced) -> Priced:
        name = name_of(price, costs.cluster)
        whole = (one for one in said if one.startswith((f"{name}: constant", f"{name}: all ")))
        return msgspec.structs.replace(price, doubt=next(whole, ""))

    return msgspec.structs.replace(
        costs,
        curves=tuple(map(marked, costs.curves)),
        surfaces=tuple(map(marked, costs.surfaces)),
    )


def doubts(costs: Costs) -> list[str]:
    """Return the doubts about prices, by the name of each."""
    prices: list[Curve | Surface] = [*costs.curves, *costs.surfaces]
    named = [(name_of(price, costs.cluster), price) for price in prices]
    curves = [(name, price) for name, price in named if isinstance(price, Curve)]
    few = [f"{name} ({len(of.x_bytes)})" for name, of in curves if not of.held_out.num_points]
    found = [
        f"{name}: constant, all {len(of.time_s)} sizes took {format_seconds(of.time_s[0])}"
        for name, of in named
        if len(of.time_s) > 2 and math.isclose(max(of.time_s), min(of.time_s))
    ]
    if few:
        found.append(f"too few sizes to test, so the interval is 100 %: {', '.join(few)}")
    found += falling(costs)
    laws = [(of, times_of(of)) for of in costs.curves]
    for name, price in named:
        if told := over_measured(price, Datasheet(costs.cluster.specified)):
            ratios = {
                label(Case(op=op)): 1 / ratio for op, ratio in zip(points(price), told, strict=True)
            }
            found += _off(name, ratios, OFF_SHEET, "its data sheet says")
        elif isinstance(price, Curve):
            ratios = dict(
                _over_others(price, [(of, times) for of, times in laws if of is not price])
            )
            found += _off(name, ratios, OFF_OTHERS, "others of its kind")
    prices_of = Prices(costs)
    for factor in costs.factors:
        ratios = dict(_over_usual(factor, prices_of))
        found += _off(name_of(factor, costs.cluster), ratios, OFF_SHEET, "its operations say")
    return found


def falling(costs: Costs) -> list[str]:
    """Name the curves that fall as sizes rise, each with the two sizes that say it most."""
    found = []
    for curve in costs.curves:
        time_s = np.asarray(curve.time_s)
        most_s = np.maximum.accumulate(time_s)
        low = int(np.argmax(most_s / time_s))
        high = int(np.argmax(time_s[: low + 1]))
        if most_s[low] <= FALLING * time_s[low]:
            continue
        more, less = (
            f"{format_bytes(curve.x_bytes[i])} took {format_seconds(time_s[i])}"
            for i in (high, low)
        )
        with suppress(ValueError):  # a group that the cluster cannot have
            name = name_of(curve, costs.cluster)
            fix = "measure these sizes anew: meshwise measure profile && meshwise calibrate"
            found.append(f"{name}: {more}, but {less}; {fix}")
    return found


def _over_usual(factor: Factor, prices: Prices) -> Iterator[tuple[str, float]]:
    """Yield each size with the larger of two: its ratio, and its host's seconds over usual ones."""
    usual_s = usual_host_s(factor.like, prices)
    sizes = zip(factor.activation_elements, factor.host_s, factor.ratio, strict=True)
    for elements, host_s, ratio in sizes:
        yield f"{elements:g} elements", max(ratio, host_s / usual_s if usual_s else 0.0)


def _off(name: str, ratios: dict[str, float], limit: float, than: str) -> Iterator[str]:
    """Yield a doubt about all points if their median is off, else about each that is."""
    if not ratios:
        return
    middle = median(ratios.values())
    if not 1 / limit < middle < limit:
        ratios = {f"all {len(ratios)} points": middle}
    for at, ratio in ratios.items():
        if not 1 / limit < ratio < limit:
            yield f"{name}: {at}: {ratio:.4g} times what {than}, are the units right?"


def _over_others(
    price: Curve, others: Sequence[tuple[Curve, KnotTimes]]
) -> Iterator[tuple[str, float]]:
    """Yield each knot with its time over the median of what other curves of its kind say there."""
    x = np.asarray(price.x_bytes)
    if alike := [times(x) for other, times in others if type(other.like) is type(price.like)]:
        for op, ratio in zip(points(price), price.time_s / np.median(alike, axis=0), strict=True):
            yield label(Case(op=op)), float(ratio)
