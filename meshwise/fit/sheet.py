"""The data sheet alone beside what was measured, at every knot and shape."""

from statistics import median

from meshwise.prices import Datasheet, name_of, shape_op
from meshwise.prices.datasheet import of_bytes
from meshwise.spec import Costs, Curve, Op, Record, Surface


class OffSheet(Record, kw_only=True):
    """predicted/measured - 1 of the data sheet at the ``num_points`` of a price: the median and the
    worst by size; None if it does not price them."""

    price: str
    num_points: int
    median: float | None
    worst: float | None


def off_sheet(costs: Costs) -> list[OffSheet]:
    """Return how far the data sheet is off at each curve, then at each surface."""
    sheet, found = Datasheet(costs.cluster.specified), list[OffSheet]()
    prices: list[Curve | Surface] = [*costs.curves, *costs.surfaces]
    for price in prices:
        try:
            name = name_of(price, costs.cluster)
        except ValueError:  # as Prices leaves it out
            continue
        off = [ratio - 1 for ratio in over_measured(price, sheet)]
        middle, worst = (median(off), max(off, key=abs)) if off else (None, None)
        count = len(price.time_s)
        found.append(OffSheet(price=name, num_points=count, median=middle, worst=worst))
    return found


def over_measured(price: Curve | Surface, sheet: Datasheet) -> list[float]:
    """Return the data sheet's time over the measured one at each of ``points``; nothing if it has
    no price."""
    try:
        told = [sheet.time_s(op)[0] for op in points(price)]
    except ValueError:
        return []
    return [one / measured for one, measured in zip(told, price.time_s, strict=True)]


def points(price: Curve | Surface) -> list[Op]:
    """Return the operations that were measured."""
    if isinstance(price, Surface):
        return [shape_op(price, shape) for shape in price.shapes]
    return [of_bytes(price.like, int(x)) for x in price.x_bytes]
