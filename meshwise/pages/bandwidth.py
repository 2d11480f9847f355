"""Draw and list what ml_perf_model's comm_bench.ipynb does: latency, bus and algorithm bandwidth of
collectives, their fits with turning points, and uneven all-to-alls predicted by each rule.

In: prices, and uneven exchanges judged by them (``fit.uneven``). Out: files of the notebook's names
and tables. Green dashed lines are at the notebook's turning points: where times begin to rise, and
where bandwidth is within 5 % of its largest.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwise.fit.laws import turning_points
from meshwise.fit.uneven import Judged
from meshwise.pages import charts, svg
from meshwise.pages.charts import PlotLine
from meshwise.pages.table import Table, grouped, listed, percent, span
from meshwise.prices import name_of, times_of
from meshwise.prices.laws import Floats, sigmoid_s
from meshwise.prices.uneven import bus_factor
from meshwise.spec import Collective, Costs, Curve
from meshwise.stats import histogram
from meshwise.units import format_bytes, format_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = "message size"


class MeasuredCurve(NamedTuple):
    """A collective's curve with all measured points, those that are no knots included: ascending
    bytes and seconds. ``bus``: bus over algorithm bandwidth."""

    name: str
    curve: Curve
    x_bytes: Floats
    time_s: Floats
    bus: float

    @property
    def p90(self) -> float | None:
        """The error of 9 of 10 points left out of the fit, if there were any."""
        held_out = self.curve.held_out
        return held_out.p90 if held_out.num_points else None

    @property
    def busbw(self) -> Floats:
        return self.bus * self.x_bytes / self.time_s


def measured(costs: Costs) -> list[MeasuredCurve]:
    """Return the curves of collectives; words that all their names share are left out."""
    found = [
        (name_of(curve, costs.cluster).split(), curve, curve.like)
        for curve in costs.curves
        if isinstance(curve.like, Collective) and curve.like.kind != "send"
    ]
    shared = set.intersection(*(set(words) for words, *_ in found)) if len(found) > 1 else set()
    curves = []
    for words, curve, like in found:
        points = [*zip(curve.x_bytes, curve.time_s, strict=True)]
        points += [(one.x_bytes, one.time_s) for one in curve.no_knots]
        name = " ".join(word for word in words if word not in {*shared} - {like.kind})
        x, t = np.asarray(sorted(points)).T
        curves.append(MeasuredCurve(name, curve, x, t, bus_factor(like)))
    return curves


def turning(curve: Curve) -> tuple[float, ...]:
    """Return the bytes of both turning points of a collective's curve; none below 6 knots."""
    if not isinstance(curve.like, Collective) or len(curve.x_bytes) < 6:
        return ()
    x, t = np.asarray(curve.x_bytes), np.asarray(curve.time_s)
    return tuple(x[[*turning_points(t, bus_factor(curve.like) * x / t)]].tolist())


def _line(name: str, x: Floats, y: Floats, index: int, look: str, size: float = 4) -> PlotLine:
    return PlotLine(name, x.tolist(), y.tolist(), svg.colour(index), look, size)


def latency_bw(curves: Sequence[MeasuredCurve]) -> list[svg.Paint]:
    """Return three panels of all collectives: latency, bus bandwidth, algorithm bandwidth."""
    quantities = {
        "latency": [one.time_s for one in curves],
        "bus bandwidth": [one.busbw for one in curves],
        "algorithm bandwidth": [one.x_bytes / one.time_s for one in curves],
    }
    panels = []
    for what, values in quantities.items():
        lines = [
            _line(one.name, one.x_bytes, y, index, "osD^"[index // 10 % 4] + "-")
            for index, (one, y) in enumerate(zip(curves, values, strict=True))
        ]
        unit = "s" if what == "latency" else "B/s"
        panels.append(charts.lines(lines, unit, (), xlabel=SIZE, ylabel=what))
    return panels


def fits(curves: Sequence[MeasuredCurve]) -> Iterator[svg.Paint]:
    """Yield a panel for each collective: bus bandwidth as measured, by the law in use and by the
    sigmoid where one was found."""
    for one in curves:
        fine = np.geomspace(one.x_bytes[0], one.x_bytes[-1], 200)
        times_s = {one.curve.law: times_of(one.curve)(fine)}
        if law := one.curve.laws.get("sigmoid"):
            times_s["sigmoid"] = sigmoid_s(law.parameters, fine)
        lines = [_line("measured", one.x_bytes, one.busbw, 0, "o")]
        for name, look, index in zip(times_s, ("-", "--"), (1, 3), strict=False):
            rate = one.bus * fine / times_s[name]
            lines.append(_line(name.replace("_", "-"), fine, rate, index, look))
        words = {"title": one.name, "xlabel": SIZE, "ylabel": "bus bandwidth"}
        yield charts.lines(lines, "B/s", turning(one.curve), **words)


def a2a(judged: Sequence[Judged]) -> Iterator[svg.Paint]:
    """Yield two rows of panels for each category, a column for each rule: latency over size,
    measured and predicted; below, how many have which error."""
    for row in grouped(judged, lambda one: one.name).values():
        for one in row:
            order = np.argsort(one.size_bytes)
            x = one.size_bytes[order]
            lines = [
                _line("measured", x, one.measured_s[order], 0, "o", 2),
                _line("predicted", x, one.predicted_s[order], 1, "-"),
            ]
            words = {"title": f"{one.rule}: GMAE {percent(one.gmae)}", "ylabel": "latency"}
            yield charts.lines(lines, "s", turning(one.curve), xlabel=SIZE, **words)
        bins = [histogram(one.errors) for one in row]
        most = 100 * max(share for each in bins for share in each.values())
        yield from (_errors(each, 1.1 * most) for each in bins)


def _errors(bins: dict[tuple[float, float], float], top: float) -> svg.Paint:
    def paint(axes: "Axes") -> None:
        names = [f"{100 * low:.0f}" for low, _ in bins]
        axes.bar(names, [100 * part for part in bins.values()], color=svg.colour(0))
        axes.set(xlabel="error from ... (%)", ylabel="exchanges (%)", ylim=(0, top))
        axes.tick_params(axis="x", labelrotation=60)
        axes.grid(axis="x", visible=False)

    return paint


def pictures(costs: Costs, judged: Sequence[Judged]) -> dict[str, bytes]:
    """Return files by name: ``latency_bw.png``, ``fits.png`` and, if there are uneven exchanges,
    ``a2a.png`` and ``a2a.pdf``. A ValueError says if no collective has a price."""
    if not (curves := measured(costs)):
        raise ValueError("no collective was measured in these runs; name runs, or logs, of some")
    where, columns = costs.cluster.name, min(len(curves), 3)
    width, height = 5.0 * columns, 3.4 * -(-len(curves) // columns) + 0.5
    title = f"Bus bandwidth on {where}; green: turning points"
    found = {
        "latency_bw.png": svg.picture(
            f"Collectives on {where}", latency_bw(curves), columns=1, width=8, height=12
        ),
        "fits.png": svg.picture(
            title, [*fits(curves)], columns=columns, width=width, height=height
        ),
    }
    rows = dict.fromkeys(one.name for one in judged)
    title = f"Uneven all-to-alls on {where}: {'; '.join(rows)}"
    for form in ("png", "pdf") if judged else ():
        found[f"a2a.{form}"] = svg.picture(
            title, [*a2a(judged)], columns=len(judged) // len(rows), width=17,
            height=6.4 * len(rows), form=form,
        )  # fmt: skip
    return found


def tables(costs: Costs, judged: Sequence[Judged]) -> list[Table]:
    """List the fits, and the errors of each rule at uneven exchanges, if there are any."""
    fitted = listed(
        "Collectives", measured(costs), ("collective", "name"), ("law", "curve.law"),
        ("error", "p90", percent),
        ("turning points", lambda one: span(turning(one.curve), format_bytes)),
        ("most busbw", lambda one: format_rate(one.busbw.max(), "B/s")),
        legend=("error: of 9 of 10 points left out of the fit. Turning points: ml_perf_model's, "
                "green in the pictures.",),
        left=2,
    )  # fmt: skip
    by_rule = listed(
        "Uneven all-to-alls, predicted from even ones", judged,
        ("exchanges", "name"), ("size by", "rule"), ("law", "curve.law"),
        ("number", lambda one: len(one.errors)),
        *((name, name.lower(), percent) for name in ("GMAE", "mean", "std")),
        ("below 10 %", lambda one: (one.errors < 0.1).mean(), percent),
        legend=("of |predicted/measured - 1|; GMAE: exp(mean(log(error + 4e-4))).",), left=3,
    )  # fmt: skip
    return [fitted, by_rule] if judged else [fitted]
