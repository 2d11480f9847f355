"""The figures of the report: records in, ``svg.Figure`` out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from meshwise import schedule, timeline
from meshwise.pages import charts, svg
from meshwise.pages.charts import Line
from meshwise.pages.steps import Outcome, StepResult
from meshwise.prices import curve_s, name_of, shape_op
from meshwise.spec import Collective, Convolution, Costs, Curve, Elementwise, Gemm, Part, Plan
from meshwise.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Quantity = Literal["time", "memory"]
_SHOW = {"time": format_seconds, "memory": format_bytes}
_BASE = {"time": 1000, "memory": 1024}
_NAME = {"time": "step time", "memory": "peak memory"}


def against(results: Sequence[StepResult], quantity: Quantity) -> svg.Figure | None:
    """Predicted over measured, one point a run, with the prediction's interval and y = x."""
    points: list[tuple[str, Outcome]] = [
        (result.plan.layout.name, outcome)
        for result in results
        if (outcome := getattr(result, quantity)) is not None and outcome.predicted is not None
    ]
    if not points:
        return None
    top = 1.12 * max(max(outcome.high or 0.0, outcome.measured) for _, outcome in points)

    def paint(axes: "Axes") -> None:
        axes.plot([0, top], [0, top], color=svg.MUTED, linestyle=(0, (4, 3)), linewidth=1)
        names = list(dict.fromkeys(name for name, _ in points))
        labelled = set()
        for name, o in points:
            assert o.predicted is not None and o.low is not None and o.high is not None
            spread = [[max(0.0, o.predicted - o.low)], [max(0.0, o.high - o.predicted)]]
            axes.errorbar(
                o.measured, o.predicted, yerr=spread, fmt="o", capsize=3, markersize=6,
                color=svg.colour(names.index(name)), label=None if name in labelled else name,
            )  # fmt: skip
            labelled.add(name)
        axes.set(xlim=(0, top), ylim=(0, top), xlabel="measured", ylabel="predicted")
        for axis in (axes.xaxis, axes.yaxis):
            svg.linear_ticks(axis, top, _SHOW[quantity], _BASE[quantity])
        axes.legend(loc="best")

    return svg.draw(
        f"Predicted against measured {_NAME[quantity]}; on the dashed line they are equal, bars "
        "are the prediction's interval.",
        paint,
    )


class _Bar(NamedTuple):
    name: str
    parts: tuple[Part, ...]
    measured: float | None


def breakdown(
    plan: Plan | None, results: Sequence[StepResult], quantity: Quantity
) -> svg.Figure | None:
    """Predicted parts of each run as one bar, with a mark where the measurement ended."""
    bars = _bars(plan, results, quantity)
    if not bars:
        return None
    names = list(dict.fromkeys(part.name for bar in bars for part in bar.parts if part.value > 0))

    def paint(axes: "Axes") -> None:
        for index, name in enumerate(names):
            for row, bar in enumerate(bars):
                before = [names.index(p.name) < index for p in bar.parts]
                left = sum(p.value for p, is_left in zip(bar.parts, before, strict=True) if is_left)
                width = sum(p.value for p in bar.parts if p.name == name)
                axes.barh(
                    row, width, left=left, height=0.55, color=svg.colour(index),
                    alpha=1.0 if index < len(svg.SERIES) else 0.5,
                    label=name if row == 0 else None,
                )  # fmt: skip
        marked = [(bar.measured, row) for row, bar in enumerate(bars) if bar.measured is not None]
        if marked:
            x, y = zip(*marked, strict=True)
            axes.plot(x, y, "D", color=svg.INK, markersize=6, label="measured", zorder=3)
        axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        svg.linear_ticks(axes.xaxis, axes.get_xlim()[1], _SHOW[quantity], _BASE[quantity])
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.5 / len(bars) - 0.1), ncols=3)

    rows = -(-(len(names) + 1) // 3)
    return svg.draw(
        f"Predicted {_NAME[quantity]} by part; a diamond marks what was measured.",
        paint,
        width=8.8,
        height=0.8 + 0.42 * len(bars) + 0.2 * rows,
    )


def _bars(plan: Plan | None, results: Sequence[StepResult], quantity: Quantity) -> list[_Bar]:
    """Every run with a prediction; without one, the plan's best five layouts."""
    found = []
    for result in results:
        if result.plan.prediction is None:
            continue
        outcome: Outcome | None = getattr(result, quantity)
        measured = None if outcome is None else outcome.measured
        parts = getattr(result.plan.prediction, f"{quantity}_parts")
        found.append(_Bar(result.plan.layout.name, parts, measured))
    if not found and plan is not None and plan.prediction is not None:
        best = [(plan.layout, plan.prediction)]
        best += [(rival.layout, rival.prediction) for rival in plan.runners_up[:4]]
        found = [
            _Bar(layout.name, getattr(prediction, f"{quantity}_parts"), None)
            for layout, prediction in best
        ]
    return found


def pipeline(plan: Plan | None) -> svg.Figure | None:
    """Show when each pipeline rank works, for as many microbatches as show the rhythm."""
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
    """Bandwidth over size, one figure a kind, one colour a group."""
    kinds: dict[str, list[Curve]] = {}
    for curve in costs.curves:
        if isinstance(curve.like, Collective):
            kinds.setdefault(curve.like.kind, []).append(curve)
    return [
        charts.curves(
            f"{kind}: busbw (solid, as fitted), algbw (dotted), points as measured.",
            [line for index, curve in enumerate(of_kind) for line in _rates(costs, curve, index)],
            "B/s",
            title=kind,
        )
        for kind, of_kind in kinds.items()
    ]


def memory_bound(costs: Costs) -> svg.Figure | None:
    """Bytes per second of copies and other memory-bound work, over bytes read and written."""
    found = [curve for curve in costs.curves if isinstance(curve.like, Elementwise)]
    lines = [line for index, curve in enumerate(found) for line in _rates(costs, curve, index)]
    caption = "Memory-bound work: bytes a second, as fitted and as measured."
    labels = {"title": "memory", "xlabel": "bytes read and written"}
    return charts.curves(caption, lines, "B/s", **labels) if lines else None


def _rates(costs: Costs, curve: Curve, index: int) -> list[Line]:
    """Points as measured, a line as fitted; of a collective busbw and, dotted, algbw."""
    like, colour, name = curve.like, svg.colour(index), name_of(curve, costs.cluster)
    x, times_s = np.asarray(curve.x_bytes), np.asarray(curve.time_s)
    fine = np.geomspace(x[0], x[-1], 60)
    fitted = fine / np.asarray([curve_s(curve, at) for at in fine])
    factor = like.bus_factor if isinstance(like, Collective) else 1.0
    lines = [Line("", list(x), list(factor * x / times_s), colour, "o")]
    if isinstance(like, Collective):
        name = name.removeprefix(f"{like.kind} ")
        lines.append(Line("", list(fine), list(fitted), colour, ":"))
    return [*lines, Line(name, list(fine), list(factor * fitted), colour)]


def rates(costs: Costs) -> svg.Figure | None:
    """A roofline: FLOP/s of every measured product and attention over FLOPs per byte."""
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
