"""Draw charts. In: plain values. Out: ``svg.Figure``.

The charts are curves over sizes, a roofline, groups of bars, and a matrix of rates between ranks.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import log10
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshwise.pages import svg
from meshwise.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
_MOST_GROUPS = 12  # of bars, in one figure
_MOST_MARKS = 40  # on one line


class PlotLine(NamedTuple):
    """A line of ``y`` over ``x``. ``look``: matplotlib's code for marks and dashes. Without a
    ``name`` it is not in the legend."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    look: str = "-"
    size: float = 4


def curves(caption: str, found: Sequence[PlotLine], unit: str, **labels: str) -> svg.Figure:
    """Draw lines over sizes in bytes on log axes. ``unit``: ``s``, or the unit of a rate."""
    return svg.draw(caption, lines(found, unit, (), **labels))


def lines(found: Sequence[PlotLine], unit: str, marks: Sequence[float], **labels: str) -> svg.Paint:
    """Return what paints ``curves``. ``marks``: sizes with a green dashed line."""

    def paint(axes: "Axes") -> None:
        for one in found:
            look: Any = {"color": one.colour, "markersize": one.size, "label": one.name or None}
            plain = len(one.x) > _MOST_MARKS and "-" in one.look
            axes.plot(one.x, one.y, "-" if plain else one.look, **look)
        for x in marks:
            axes.axvline(x, color="green", linestyle="--", linewidth=1)
        axes.set(xscale="log", yscale="log", **{"xlabel": "size"} | labels)
        svg.byte_ticks(axes.xaxis, *_ends([*marks, *(x for one in found for x in one.x)]))
        low, high = _widened(y for one in found for y in one.y)
        if unit == "s":
            low, high = low / 1.5, high * 1.5
            inside = [value for value in svg.decades(low, high) if low <= value <= high]
            axes.set_yticks(inside, labels=list(map(format_seconds, inside)))
            axes.set_ylim(low, high)
        else:
            svg.rate_ticks(axes.yaxis, low, high, unit)
        axes.legend(loc="upper left" if unit == "s" else "lower right")

    return paint


def _ends(values: Iterable[float]) -> Point:
    ordered = sorted(values)
    return ordered[0], ordered[-1]


def _widened(values: Iterable[float]) -> Point:
    """Return the least and largest value, at least a factor of 4 apart: two 1-2-5 ticks fit."""
    low, high = _ends(values)
    factor = max(1.0, (4 * low / high) ** 0.5)
    return low / factor, high * factor


def roofline(
    caption: str,
    series: Mapping[str, Sequence[Point]],
    roofs: Mapping[str, float],
    bytes_per_s: float | None,
) -> svg.Figure:
    """Draw FLOP/s over FLOPs per byte. The best point of each series is ringed. ``roofs``: peaks in
    FLOP/s by name; below the ridge, the memory rate is the roof."""
    points = [point for same in series.values() for point in same]
    x_low, x_high = _widened(x for x, _ in points)
    y_low, y_high = _widened([*(y for _, y in points), *roofs.values()])

    def paint(axes: "Axes") -> None:
        for index, (name, same) in enumerate(series.items()):
            look: Any = {"color": svg.colour(index)}
            axes.plot(*zip(*_apart(same), strict=True), "o", label=name, **look)
            best = max(same, key=lambda point: point[1])
            axes.plot(*best, "o", markersize=9, fillstyle="none", **look)
        wide = np.geomspace(x_low / 1.5, x_high * 1.5, 100)
        for name, peak in roofs.items():
            roof = np.minimum(wide * bytes_per_s, peak) if bytes_per_s else np.full(100, peak)
            axes.plot(wide, roof, **svg.DASHED)
            look = {"ha": "right", "va": "bottom", "color": svg.MUTED, "fontsize": 8}
            axes.annotate(name, (wide[-1], peak), **look)
        axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte")
        svg.rate_ticks(axes.xaxis, x_low, x_high, "")
        svg.rate_ticks(axes.yaxis, y_low, y_high, "FLOP/s")
        axes.set(xlim=(x_low / 1.5, x_high * 1.5), ylim=(y_low / 1.5, y_high * 1.6))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

    return svg.draw(caption, paint, width=8.8)


def _apart(points: Iterable[Point]) -> list[Point]:
    """Leave out points that would lie on another on log axes: within 2 %."""
    return list({(round(50 * log10(x)), round(50 * log10(y))): (x, y) for x, y in points}.values())


def bars(
    what: str,
    values: Mapping[str, Mapping[str, float]],
    show: Callable[[float], str],
    mark: float | None = None,
) -> svg.Figure:
    """Draw ``values[group][series]`` as horizontal bars, with the value at each bar's end."""
    shown = dict(list(values.items())[:_MOST_GROUPS])
    names = list(dict.fromkeys(name for group in shown.values() for name in group))
    thick = 0.8 / len(names)
    top = max(value for group in shown.values() for value in group.values())

    def paint(axes: "Axes") -> None:
        for index, name in enumerate(names):
            rows = [row for row, group in enumerate(shown.values()) if name in group]
            x = [group[name] for group in shown.values() if name in group]
            y = [row + thick * (index - (len(names) - 1) / 2) for row in rows]
            axes.barh(y, x, height=0.9 * thick, color=svg.colour(index), label=name)
            for at, value in zip(y, x, strict=True):
                axes.annotate(f" {show(value)}", (value, at), va="center", fontsize=7)
        if mark is not None:
            axes.axvline(mark, **svg.DASHED)
        axes.set_yticks(range(len(shown)), list(shown))
        axes.set(xlim=(0, 1.18 * top), ylim=(len(shown) - 0.5, -0.5))
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.grid(visible=False)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

    left_out = len(values) - len(shown)
    note = f"; the first {len(shown)} of {len(values)} in the table" if left_out else ""
    height = 0.5 + len(shown) * (0.15 + 0.17 * len(names))
    return svg.draw(f"{what}{note}.", paint, width=8.8, height=max(height, 1.2))


def matrix(
    caption: str,
    values: Mapping[tuple[int, int], float],
    show: Callable[[float], str],
    odd: Collection[tuple[int, ...]] = (),
) -> svg.Figure:
    """Draw a cell for each pair (from, to) of ranks, darker for larger values; ring ``odd``."""
    ranks = sorted({rank for pair in values for rank in pair})
    most = max(values.values(), default=0) or 1

    def paint(axes: "Axes") -> None:
        for (first, last), value in values.items():
            x, y = ranks.index(last), ranks.index(first)
            look: Any = {"facecolor": svg.colour(0), "alpha": 0.1 + 0.6 * value / most}
            ring: Any = (
                {"edgecolor": svg.SERIES[8], "linewidth": 2.5} if (first, last) in odd else {}
            )
            box = axes.broken_barh(
                [(x - 0.46, 0.92)], (y - 0.46, 0.92), **{"linewidth": 0, **look, **ring}
            )
            svg.tip(box, f"{first} to {last}: {show(value)}")
            axes.annotate(show(value), (x, y), ha="center", va="center", fontsize=8)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(len(ranks)), labels=list(map(str, ranks)))
        axes.set(xlabel="to", ylabel="from")
        axes.invert_yaxis()
        axes.set_aspect("equal")
        axes.grid(visible=False)

    side = 1.2 + 0.42 * len(ranks)
    return svg.draw(caption, paint, width=max(side, 4.4), height=side)
