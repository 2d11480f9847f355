"""Draw the figures of the report. In: records. Out: ``svg.Figure``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshwise import schedule, timeline
from meshwise.pages import charts, svg
from meshwise.pages.charts import PlotLine
from meshwise.pages.steps import MeasuredQuantity, StepResult
from meshwise.pages.table import grouped
from meshwise.prices import name_of, shape_op, times_of
from meshwise.prices.uneven import bus_factor
from meshwise.spec import Collective, Convolution, Costs, Curve, Elementwise, Gemm, Part, Plan
from meshwise.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Quantity = Literal["time", "memory"]
_SHOW = {"time": format_seconds, "memory": format_bytes}
_BASE = {"time": 1000, "memory": 1024}
_NAME = {"time": "step time", "memory": "peak memory"}


def against(results: Sequence[StepResult], quantity: Quantity) -> svg.Figure | None:
    """Draw predicted over measured, a point for each run, with the prediction's interval."""
    points: list[tuple[str, MeasuredQuantity]] = [
        (result.plan.layout.name, measured)
        for result in results
        if (measured := getattr(result, quantity)) is not None and measured.predicted is not None
    ]
    if not points:
        return None
    top = 1.12 * max(max(one.high or 0.0, one.measured) for _, one in points)

    def paint(axes: "Axes") -> None:
        axes.plot([0, top], [0, top], **svg.DASHED)
        names = list(dict.fromkeys(name for name, _ in points))
        for number, (name, one) in enumerate(points):
            assert one.predicted is not None and one.low is not None and one.high is not None
            spread = [[max(0.0, one.predicted - one.low)], [max(0.0, one.high - one.predicted)]]
            first = all(name != earlier for earlier, _ in points[:number])
            axes.errorbar(
                one.measured, one.predicted, yerr=spread, fmt="o", capsize=3, markersize=6,
                color=svg.colour(names.index(name)), label=name if first else None,
            )  # fmt: skip
        axes.set(xlim=(0, top), ylim=(0, top), xlabel="measured", ylabel="predicted")
        for axis in (axes.xaxis, axes.yaxis):
            svg.linear_ticks(axis, top, _SHOW[quantity], _BASE[quantity])
        axes.legend(loc="best")

    return svg.draw(
        f"Predicted against measured {_NAME[quantity]}; on the dashed line they are equal, bars "
        "are the prediction's interval.",
        paint,
    )


def breakdown(
    plan: Plan | None, results: Sequence[StepResult], quantity: Quantity
) -> svg.Figure | None:
    """Draw the predicted parts of each run as a bar, with a mark at the measured value.

    If no run has a prediction, draw the plan's best five layouts.
    """
    told = [(r.plan.layout, r.plan.prediction, getattr(r, quantity)) for r in results]
    told = [one for one in told if one[1] is not None]
    if not told and plan is not None and plan.prediction is not None:
        told = [(plan.layout, plan.prediction, None)]
        told += [(rival.layout, rival.prediction, None) for rival in plan.runners_up[:4]]
    if not told:
        return None
    bars: list[tuple[Part, ...]] = [getattr(each, f"{quantity}_parts") for _, each, _ in told]
    names = list(dict.fromkeys(part.name for parts in bars for part in parts if part.value > 0))

    def paint(axes: "Axes") -> None:
        for index, name in enumerate(names):
            for row, parts in enumerate(bars):
                left = sum(p.value for p in parts if p.name in names[:index])
                width = sum(p.value for p in parts if p.name == name)
                axes.barh(
                    row, width, left=left, height=0.55, color=svg.colour(index),
                    alpha=1.0 if index < len(svg.SERIES) else 0.5,
                    label=name if row == 0 else None,
                )  # fmt: skip
        marked = [(one.measured, row) for row, (_, _, one) in enumerate(told) if one is not None]
        if marked:
            x, y = zip(*marked, strict=True)
            axes.plot(x, y, "D", color=svg.INK, markersize=6, label="measured", zorder=3)
        axes.set_yticks(range(len(bars)), [layout.name for layout, _, _ in told])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        svg.linear_ticks(axes.xaxis, axes.get_xlim()[1], _SHOW[quantity], _BASE[quantity])
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.5 / len(bars) - 0.1), ncols=3)

    return svg.draw(
        f"Predicted {_NAME[quantity]} by part; a diamond marks what was measured.",
        paint,
        width=8.8,
        height=0.8 + 0.42 * len(bars) + 0.2 * -(-(len(names) + 1) // 3),
    )


def pipeline(plan: Plan | None) -> svg.Figure | None:
    """Draw when each pipeline rank works, for enough microbatches to show the pattern."""
    if plan is None or plan.prediction is None or not plan.prediction.stage_times:
        return None
    layout, times = plan.layout, plan.prediction.stage_times
    count = min(layout.num_microbatches, 4 * layout.pp)
    table = schedule.table(layout.schedule, layout.pp, layout.stages_per_rank, count)
    spans = schedule.simulate(table, lambda action: times[action.stage].of_action(action.kind))
    end_s = schedule.end_time(spans)

    def paint(axes: "Axes") -> None:
        shown = list(dict.fromkeys(timeline.ACTIONS[each.kind] for row in table for each in row))
        labelled = set[str]()
        for rank, row in enumerate(spans):
            axes.broken_barh([(0, end_s)], (rank - 0.4, 0.8), color=svg.GRID)
            for action, start_s, action_end_s in row:
                name = timeline.ACTIONS[action.kind]
                axes.broken_barh(
                    [(start_s, action_end_s - start_s)], (rank - 0.4, 0.8),
                    facecolor=svg.colour(shown.index(name)), edgecolor=svg.GRID, linewidth=0.4,
                    alpha=1 - 0.5 * (action.stage // layout.pp) / layout.stages_per_rank,
                    label=None if name in labelled else name,
                )  # fmt: skip
                labelled.add(name)
        axes.set_yticks(range(layout.pp), [f"pp {rank}" for rank in range(layout.pp)])
        axes.set(xlim=(0, end_s), xlabel="seconds")
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.35), ncols=len(shown))

    return svg.draw(
        f"{layout.name}: who works when, {count} of {layout.num_microbatches} microbatches, each "
        "stage at its predicted times, transfers and reductions left out. Paler: a rank's later "
        "stages. Empty: the bubble.",
        paint,
        width=8.8,
        height=1.2 + 0.3 * layout.pp,
    )


def collectives(costs: Costs) -> list[svg.Figure]:
    """Draw bandwidth over size: a figure for each kind, a colour for each group."""
    curves = [
        (curve.like.kind, curve) for curve in costs.curves if isinstance(curve.like, Collective)
    ]
    return [
        charts.curves(
            f"{kind}: busbw (solid, as fitted), algbw (dotted), points as measured.",
            [line for index, (_, curve) in enumerate(same) for line in _rates(costs, curve, index)],
            "B/s",
            title=kind,
        )
        for kind, same in grouped(curves, lambda each: each[0]).items()
    ]


def memory_bound(costs: Costs) -> svg.Figure | None:
    """Draw bytes per second of memory-bound work, over bytes read and written."""
    found = [curve for curve in costs.curves if isinstance(curve.like, Elementwise)]
    lines = [line for index, curve in enumerate(found) for line in _rates(costs, curve, index)]
    caption = "Memory-bound work: bytes a second, as fitted and as measured."
    labels = {"title": "memory", "xlabel": "bytes read and written"}
    return charts.curves(caption, lines, "B/s", **labels) if lines else None


def _rates(costs: Costs, curve: Curve, index: int) -> list[PlotLine]:
    """Return measured points and the fitted line; for a collective busbw and, dotted, algbw."""
    like, colour, name = curve.like, svg.colour(index), name_of(curve, costs.cluster)
    x, times_s = np.asarray(curve.x_bytes), np.asarray(curve.time_s)
    fine = np.geomspace(x[0], x[-1], 60)
    fitted = fine / times_of(curve)(fine)
    factor = bus_factor(like) if isinstance(like, Collective) else 1.0
    lines = [PlotLine("", list(x), list(factor * x / times_s), colour, "o")]
    if isinstance(like, Collective):
        name = name.removeprefix(f"{like.kind} ")
        lines.append(PlotLine("", list(fine), list(fitted), colour, ":"))
    return [*lines, PlotLine(name, list(fine), list(factor * fitted), colour)]


def rates(costs: Costs) -> svg.Figure | None:
    """Draw a roofline: FLOP/s of every measured product and attention over FLOPs per byte."""
    series: dict[str, list[tuple[float, float]]] = {}
    for surface in costs.surfaces:
        for shape, time_s in zip(surface.shapes, surface.time_s, strict=True):
            op = shape_op(surface, shape)
            name = "gemm"
            if not isinstance(op, Gemm):
                kind = type(op).__name__.lower()
                name = f"{kind} {op.product if isinstance(op, Convolution) else op.direction}"
            series.setdefault(name, []).append((op.flops / op.bytes, op.flops / time_s))
    if not series:
        return None
    best = max(rate for points in series.values() for _, rate in points)
    peak = costs.cluster.device.peak_flops.get(costs.dtype) or 0.0
    name = "copy rate, then " + ("datasheet peak" if peak >= best else "best measured")
    caption = "Matrix products and attention as measured, under their roofline; ringed: the best."
    bytes_per_s = max(surface.bytes_per_s for surface in costs.surfaces)
    return charts.roofline(caption, series, {name: max(best, peak)}, bytes_per_s)
