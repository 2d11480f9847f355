"""Tables of prices: what was measured, by which law, and how far off on points left out."""

from collections.abc import Callable, Sequence
from typing import Any

from meshwise.fit import off_sheet
from meshwise.pages.table import Column, Table, filled, flops, listed, percent, span
from meshwise.prices import TOO_NOISY, name_of
from meshwise.spec import (
    Case,
    Costs,
    Curve,
    Factor,
    HeldOut,
    Spread,
    Surface,
)
from meshwise.spec.label import label
from meshwise.units import format_bytes, format_rate, format_seconds


def _left_out(curves: Sequence[Curve], name: Callable[[Curve], str]) -> list[str]:
    """Name the points that curves leave out, and the curves that are too noisy."""
    found = [
        f"{name(curve)}: {format_bytes(point.x_bytes)} is no knot, {point.reason}."
        for curve in curves
        for point in curve.no_knots
    ]
    return found + _too_noisy(curves, name)


def _too_noisy(prices: Sequence[Curve | Surface | Factor], name: Callable[[Any], str]) -> list[str]:
    noisy = [f"{name(price)}: {TOO_NOISY}." for price in prices if price.held_out.noisy]
    return noisy + [price.doubt for price in prices if price.doubt]


def namer(prices: Costs) -> Callable[[Any], str]:
    """Return what names a price of these."""

    def name(price: Any) -> str:
        try:
            return name_of(price, prices.cluster)
        except ValueError:  # as Prices leaves it out
            return f"{label(Case(op=price.like))}: needs a larger cluster"

    return name


def doubts(prices: Costs) -> list[str]:
    """Say which prices are too noisy or look wrong."""
    return _too_noisy((*prices.curves, *prices.surfaces, *prices.factors), namer(prices))


def of(prices: Costs) -> list[Table]:
    """Show every price with its error on points left out of the fit."""
    name = namer(prices)
    curves = listed(
        "Time against bytes",
        prices.curves,
        ("price", name),
        ("law", "law"),
        ("points", lambda curve: len(curve.x_bytes)),
        ("measured sizes", lambda curve: span(curve.x_bytes, format_bytes)),
        ("smallest", lambda curve: curve.time_s[0], format_seconds),
        ("beyond", lambda c: c.end_s_per_byte or None, lambda beta: format_rate(1 / beta, "B/s")),
        *_errors(lambda curve: curve.held_out),
        legend=(
            "Errors are |predicted/measured - 1| of every second point, predicted by the others; "
            "– if there are too few. Laws are corrected to pass through the measured points. "
            "smallest: the time of the smallest size; beyond: the rate at which times rise beyond "
            "the largest. A collective's name says how many ranks are in each tier of links, and "
            "list where torch copies from or to a list of tensors; its bytes are nccl-tests' size.",
            *_left_out(prices.curves, name),
        ),
        left=2,
    )
    surfaces = listed(
        "Matrix products and attention",
        prices.surfaces,
        ("price", name),
        ("shapes", lambda surface: len(surface.shapes)),
        ("floor", "floor_s", format_seconds),
        ("best rate", "flops_per_s", flops),
        *_errors(lambda surface: surface.held_out),
        legend=(
            "A shape that was not measured takes the utilisation of its nearest neighbours.",
            *(f"{name(one)}: left out: {', '.join(one.no_shapes)}" for one in prices.surfaces
              if one.no_shapes),
            *_too_noisy(prices.surfaces, name),
        ),
    )  # fmt: skip
    found = filled(curves, surfaces, _by_data_sheet(prices))
    blocks = _blocks(prices.factors, name)
    return [*found, blocks, *filled(_slowdowns(prices)), *_spread(prices.spread)]


def _blocks(factors: Sequence[Factor], name: Callable[[Any], str]) -> Table:
    if not factors:
        return Table("No block was measured; plans add operations up as they are.", (), ())
    return listed(
        "Blocks: what the sum of their operations' prices leaves out",
        factors,
        ("block", name),
        ("sizes", lambda factor: len(factor.ratio)),
        ("launch", lambda factor: span(filter(None, factor.host_s), format_seconds)),
        ("fusion", lambda factor: span(factor.ratio, "{:.2f}".format)),
        ("saved bytes", lambda factor: span(factor.saved_ratio, "{:.2f}".format)),
        *_errors(lambda factor: factor.held_out),
        legend=(
            "launch: the host's time, which bounds small blocks. fusion: the device's time over "
            "that sum, also for clocks and gaps. saved bytes: those kept for backward, as the "
            "allocator counts them, over the operations'. All three correct every plan with the "
            "block.",
            *_too_noisy(factors, name),
        ),
    )


def _spread(of: Spread | None) -> list[Table]:
    if of is None:
        return []
    said = f"lasting {percent(of.lasting)}, from call to call {percent(of.passing)}"
    return [Table(f"Ranks differ in their times (standard deviations): {said}.", (), ())]


def _slowdowns(prices: Costs) -> Table:
    return listed(
        "Work beside collectives",
        prices.slowdowns,
        ("work", lambda of: type(of.like.compute).__name__.lower()),
        ("direction", lambda of: getattr(of.like.compute, "direction", "")),
        ("collective", lambda of: of.like.collective.kind),
        ("work takes", "compute", "{:.2f} x".format),
        ("collective takes", "collective", "{:.2f} x".format),
        left=3,
    )


def _by_data_sheet(prices: Costs) -> Table:
    """Show how far the data sheet alone is off; no row if it has none of these prices."""
    off = off_sheet(prices)
    return listed(
        "The data sheet alone at the measured points: predicted/measured - 1",
        off if any(one.median is not None for one in off) else (),
        ("price", "price"),
        ("points", "num_points"),
        ("median", "median", lambda error: percent(error, sign=True)),
        ("worst", "worst", lambda error: percent(error, sign=True)),
        legend=("What a plan would rest on without these measurements.",),
    )


def _errors(held_out: Callable[[Any], HeldOut]) -> tuple[Column, ...]:
    def median(price: Any) -> float | None:
        return held_out(price).median if held_out(price).num_points else None

    def p90(price: Any) -> float | None:
        return held_out(price).p90 if held_out(price).num_points else None

    return ("median error", median, percent), ("p90 error", p90, percent)
