"""Draw the figures of the report. In: records. Out: ``svg.Figure``."""

import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshwise import schedule, timeline
from meshwise.pages import charts, svg
from meshwise.pages.charts import PlotLine
from meshwise.pages.spread import each
from meshwise.pages.steps import PHASE_NAMES, MeasuredQuantity, StepResult
from meshwise.pages.table import grouped, interval, span
from meshwise.prices import name_of, shape_op, times_of
from meshwise.prices.uneven import bus_factor
from meshwise.spec import (
    Cluster,
    Collective,
    Convolution,
    Costs,
    Curve,
    Elementwise,
    Gemm,
    Layout,
    Part,
    Plan,
    Tier,
)
from meshwise.spec.phases import ADDENDS, PhaseSpan
from meshwise.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Quantity = Literal["time", "memory"]
_SHOW: dict[Quantity, Callable[[float], str]] = {"time": format_seconds, "memory": format_bytes}
_BASE: dict[Quantity, int] = {"time": 1000, "memory": 1024}
_NAME: dict[Quantity, str] = {"time": "step time", "memory": "peak memory"}
_MOST = 24  # rows of a figure
_PHASE = {  # of a step's predicted parts, by what their names begin or end with
    "forward": "forward", "backward": "backward", "recompute": "backward",
    "optimizer": "optimizer", "pipeline bubble": "bubble", "pipeline transfer": "exposed",
    "gradient sums": "exposed", "tied embedding": "exposed", "copies to and from": "exposed",
}  # fmt: skip
BAD = svg.SERIES[8]


def against(results: Sequence[StepResult]) -> svg.Figure | None:
    """Draw a row for each run and a panel for each quantity: the prediction with its interval, and
    a diamond for what was measured, red outside the interval."""
    rows = [one for one in results if one.time and one.time.predicted is not None][-_MOST:]
    panels: list[Quantity] = ["time"]
    panels += ["memory"] * any(one.memory and one.memory.predicted for one in rows)
    if not rows:
        return None

    def panel(quantity: Quantity) -> svg.Paint:
        show = _SHOW[quantity]

        def paint(axes: "Axes") -> None:
            top = 0.0
            for at, run in enumerate(rows):
                one: MeasuredQuantity | None = getattr(run, quantity)
                if one is None or one.predicted is None or one.low is None or one.high is None:
                    continue
                told = f"{show(one.predicted)} ({interval(one.low, one.high, show)})"
                tip = f"{run.plan.layout.name}: predicted {told}, measured {show(one.measured)}"
                bar = axes.barh(at, one.high - one.low, left=one.low, height=0.5, color=svg.GRID)
                (mark,) = axes.plot(one.predicted, at, "|", color=svg.colour(0), markersize=11,
                                    markeredgewidth=2.5)  # fmt: skip
                colour = BAD if one.within is False else svg.INK
                (diamond,) = axes.plot(one.measured, at, "D", color=colour, markersize=5)
                for artist in (bar[0], mark, diamond):
                    svg.tip(artist, tip)
                top = max(top, one.high, one.measured)
            names = [run.plan.layout.name if quantity == "time" else "" for run in rows]
            axes.set_yticks(range(len(rows)), names)
            axes.set(xlim=(0, 1.06 * top), ylim=(len(rows) - 0.4, -0.6), title=_NAME[quantity])
            axes.grid(axis="y", visible=False)
            svg.linear_ticks(axes.xaxis, 1.06 * top, show, _BASE[quantity])

        return paint

    return svg.draw(
        "Bars: the interval told before the run, blue: the prediction, diamonds: as measured, red "
        "outside the interval.",
        *map(panel, panels),
        width=8.8,
        height=0.8 + 0.27 * len(rows),
    )


def breakdown(plan: Plan | None, results: Sequence[StepResult]) -> svg.Figure | None:
    """Draw the phases of each run's step: predicted above, measured below where it was profiled;
    else a mark at what was measured. Without runs draw the plan's best five layouts."""
    bars: list[tuple[str, dict[str, float]]] = []
    marks: list[tuple[float, int]] = []
    for one in [run for run in results if run.time and run.plan.prediction][-_MOST:]:
        assert one.time is not None and one.plan.prediction is not None
        bars.append((one.plan.layout.name, phases_of(one.plan.prediction.time_parts)))
        if "phases_step_s" in one.metrics:
            found = (each(one.metrics, name)[0] for name in ADDENDS)
            bars.append(("measured", dict(zip(PHASE_NAMES, found, strict=True))))
        else:
            marks.append((one.time.measured, len(bars) - 1))
    if not bars and plan is not None and plan.prediction is not None:
        told = [(plan.layout, plan.prediction)]
        told += [(rival.layout, rival.prediction) for rival in plan.runners_up[:4]]
        bars = [(layout.name, phases_of(of.time_parts)) for layout, of in told]
    if not bars:
        return None
    names = [name for name in PHASE_NAMES if any(of.get(name) for _, of in bars)]
    how = (
        "predicted, below it as measured" if any(n == "measured" for n, _ in bars) else "predicted"
    )
    note = "; a diamond marks what was measured" * bool(marks)
    caption = (
        f"A step's phases, {how}{note}. Predicted: the rank that ends last; measured: the mean of "
        "ranks. Exposed: communication that no work hides."
    )
    return _stacked(caption, bars, names, "time", marks)


def phases_of(parts: Iterable[Part]) -> dict[str, float]:
    """Return seconds by phase, as `run` measures them."""
    found = dict.fromkeys(PHASE_NAMES, 0.0)
    for part in parts:
        phase = next((of for begin, of in _PHASE.items() if part.name.startswith(begin)), "other")
        is_sent = "communication" in part.name and not part.name.startswith("work")
        found["exposed" if is_sent else phase] += part.value
    return found


def memory(plan: Plan | None, results: Sequence[StepResult]) -> svg.Figure | None:
    """Draw the predicted parts of each run's memory, or of the plan's best five layouts, and a mark
    at what was measured."""
    told = [(r.plan.layout, r.plan.prediction, r.memory) for r in results][-_MOST:]
    if not any(of for _, of, _ in told) and plan is not None and plan.prediction is not None:
        told = [(plan.layout, plan.prediction, None)]
        told += [(rival.layout, rival.prediction, None) for rival in plan.runners_up[:4]]
    known = [(layout, of, one) for layout, of, one in told if of is not None]
    bars = [(layout.name, {p.name: p.value for p in of.memory_parts}) for layout, of, _ in known]
    if not bars:
        return None
    marks = [(one.measured, at) for at, (_, _, one) in enumerate(known) if one is not None]
    names = list(dict.fromkeys(name for _, of in bars for name, value in of.items() if value > 0))
    note = "; a diamond marks what was measured" * bool(marks)
    return _stacked(f"Predicted peak memory by part{note}.", bars, names, "memory", marks)


def _stacked(
    caption: str,
    bars: Sequence[tuple[str, dict[str, float]]],
    names: Sequence[str],
    quantity: Quantity,
    marks: Sequence[tuple[float, int]],
) -> svg.Figure:
    """Draw named bars of parts, and diamonds."""
    show = _SHOW[quantity]

    def paint(axes: "Axes") -> None:
        ends = [0.0] * len(bars)
        for index, name in enumerate(names):
            for row, (of, parts) in enumerate(bars):
                value = parts.get(name, 0.0)
                found = axes.barh(
                    row, value, left=ends[row], height=0.62, color=svg.colour(index),
                    alpha=1.0 if index < len(svg.SERIES) else 0.5, label=name if not row else None,
                )  # fmt: skip
                svg.tip(found[0], f"{of}: {name} {show(value)}")
                ends[row] += value
        if marks:
            x, y = zip(*marks, strict=True)
            axes.plot(x, y, "D", color=svg.INK, markersize=5, label="measured", zorder=3)
        axes.set_yticks(range(len(bars)), [name for name, _ in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        svg.linear_ticks(axes.xaxis, axes.get_xlim()[1], show, _BASE[quantity])
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

    height = 0.5 + max(0.27 * len(bars), 0.19 * (len(names) + 1))
    return svg.draw(caption, paint, width=8.8, height=height)


def pareto(plan: Plan | None, results: Sequence[StepResult]) -> svg.Figure | None:
    """Draw time against memory of all layouts that the plan keeps, their frontier, and runs."""
    if plan is None or plan.prediction is None or not plan.runners_up:
        return None
    kept = [(plan.layout, plan.prediction)]
    kept += [(one.layout, one.prediction) for one in plan.runners_up]
    points = [(of.peak_memory_bytes, of.step_time_s, layout.name) for layout, of in kept]
    ran = [
        (one.memory.measured, one.time.measured, one.plan.layout.name)
        for one in results
        if one.memory and one.time and one.mode == "train"
    ]
    front: list[tuple[float, float]] = []
    for size, time_s, _ in sorted(points):
        if not front or time_s < front[-1][1]:
            front.append((size, time_s))

    def paint(axes: "Axes") -> None:
        axes.step(*zip(*front, strict=True), where="post", **svg.DASHED)
        for number, (size, time_s, name) in enumerate(points):
            colour = svg.colour(1 if number == 0 else 0)
            (mark,) = axes.plot(size, time_s, "o", color=colour, markersize=8 if not number else 5)
            svg.tip(mark, f"{name}: predicted {format_seconds(time_s)}, {format_bytes(size)}")
        for size, time_s, name in ran:
            (mark,) = axes.plot(size, time_s, "D", color=svg.INK, markersize=4)
            svg.tip(mark, f"{name}: measured {format_seconds(time_s)}, {format_bytes(size)}")
        limit = plan.cluster.usable_bytes
        right = max(size for size, *_ in (*points, *ran))
        if limit < 1.5 * right:
            axes.axvline(limit, **svg.DASHED)
        top = max(time_s for _, time_s, _ in (*points, *ran))
        axes.set(xlim=(0, 1.08 * right), ylim=(0, 1.08 * top))
        axes.set(xlabel="peak memory of a device", ylabel="step")
        svg.linear_ticks(axes.xaxis, 1.08 * right, format_bytes, 1024)
        svg.linear_ticks(axes.yaxis, 1.08 * top, format_seconds, 1000)

    return svg.draw(
        f"Time and memory of the {len(points)} layouts that the plan keeps of "
        f"{plan.num_considered:,}, the chosen one large; dashed: no other is better in both. "
        + "Diamonds: as measured. " * bool(ran)
        + "Points name their layout.",
        paint,
    )  # fmt: skip


def series(results: Sequence[StepResult], runs: Mapping[str, Sequence[float]]) -> svg.Figure | None:
    """Draw each run's steps one after another. ``runs``: the times by run."""
    shown = [(one, runs[one.run_id]) for one in results if len(runs.get(one.run_id, ())) > 2][:9]
    if not shown:
        return None

    def panel(one: StepResult, times_s: Sequence[float]) -> svg.Paint:
        def paint(axes: "Axes") -> None:
            assert one.time is not None
            (line,) = axes.plot(range(1, len(times_s) + 1), times_s, "o-", color=svg.colour(0),
                                markersize=2.5, linewidth=0.9)  # fmt: skip
            svg.tip(line, f"{one.plan.layout.name}: {interval(min(times_s), max(times_s))}")
            axes.axhline(one.time.measured, **svg.DASHED)
            low, high = min(times_s), max(times_s)
            axes.set_ylim(min(0.97 * one.time.measured, low), max(1.03 * one.time.measured, high))
            axes.set_yticks((low, high), labels=list(map(format_seconds, (low, high))))
            axes.set_title(textwrap.shorten(one.plan.layout.name, 34, placeholder=" ..."))
            axes.set_xticks((1, len(times_s)))

        return paint

    columns = min(3, len(shown))
    return svg.draw(
        "Steps in the order in which they ran; dashed: the median.",
        *(panel(*each) for each in shown),
        columns=columns,
        width=8.8 if columns > 1 else 4.4,
        height=1.5 * -(-len(shown) // columns),
    )


def links(
    cluster: Cluster, rates: Mapping[tuple[int, int], float], odd: Collection[tuple[int, ...]]
) -> svg.Figure | None:
    """Draw the rate between every two devices: as measured, else paler as the cluster's file has
    it. ``odd``: pairs that are slower than their peers."""
    count = cluster.num_devices
    if not 1 < count <= _MOST:
        return None
    told = {
        (a, b): rate
        for a in range(count)
        for b in range(count)
        if a != b
        for rate in [_tier(cluster, a, b).bytes_per_s]
        if rate is not None
    }
    if not (found := {**told, **rates}):
        return None
    what = "as measured" if rates else "of the data sheet, or of `detect`"
    marked = "; ringed: slower than its peers" * bool(odd)
    caption = f"GB/s from the row's device to the column's, {what}{marked}."
    return charts.matrix(caption, found, lambda rate: f"{rate / 1e9:.3g}", odd)


def _tier(cluster: Cluster, a: int, b: int) -> Tier:
    """Return the innermost tier that reaches from one device to the other."""
    inside = (tier for tier in cluster.tiers if a // tier.num_devices == b // tier.num_devices)
    return next(inside, cluster.tiers[-1])


Box = tuple[int, str, int, float, float]  # pipeline rank, kind of action, stage, start, end


def pipeline(plan: Plan | None, spans: Sequence[PhaseSpan] = ()) -> svg.Figure | None:
    """Draw when each pipeline rank works, for enough microbatches to show the pattern. ``spans``: a
    step of the plan as measured, drawn whole below the whole predicted one."""
    if plan is None or plan.prediction is None or not plan.prediction.stage_times:
        return None
    layout, times = plan.layout, plan.prediction.stage_times
    count = layout.num_microbatches if spans else min(layout.num_microbatches, 4 * layout.pp)
    table = schedule.table(layout.schedule, layout.pp, layout.stages_per_rank, count)
    told = schedule.simulate(table, lambda action: times[action.stage].of_action(action.kind))
    boxes: list[Box] = [
        (rank, action.kind, action.stage, start_s, end_s)
        for rank, row in enumerate(told)
        for action, start_s, end_s in row
    ]
    panels = [("predicted", boxes)] + [("measured", _measured(layout, spans))] * bool(spans)
    end_s = max(box[-1] for _, each in panels for box in each)
    kinds = list(dict.fromkeys(box[1] for box in boxes))

    def panel(title: str, found: Sequence[Box]) -> svg.Paint:
        def paint(axes: "Axes") -> None:
            for rank in range(layout.pp):
                axes.broken_barh([(0, end_s)], (rank - 0.4, 0.8), color=svg.GRID)
            for (rank, kind, stage), same in grouped(found, lambda box: box[:3]).items():
                name, first = timeline.ACTIONS[kind], rank == min(box[0] for box in found)
                look = axes.broken_barh(
                    [(start_s, stop_s - start_s) for *_, start_s, stop_s in same],
                    (rank - 0.4, 0.8), edgecolor=svg.GRID, linewidth=0.4,
                    facecolor=svg.colour(kinds.index(kind)),
                    alpha=1 - 0.5 * (stage // layout.pp) / layout.stages_per_rank,
                    label=name if first and stage == min(box[2] for box in found) else None,
                )  # fmt: skip
                took = span((stop_s - start_s for *_, start_s, stop_s in same), format_seconds)
                svg.tip(look, f"pp {rank}, {name} of stage {stage}: {took} each")
            axes.set_yticks(range(layout.pp), [f"pp {rank}" for rank in range(layout.pp)])
            axes.set(xlim=(0, end_s), title=title if spans else "")
            svg.linear_ticks(axes.xaxis, end_s, format_seconds, 1000)
            axes.invert_yaxis()
            axes.grid(visible=False)
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

        return paint

    return svg.draw(
        f"{layout.name}: who works when, {count} of {layout.num_microbatches} microbatches, each "
        "stage at its predicted times, transfers and reductions left out. Paler: a rank's later "
        "stages. Empty: the bubble.",
        *(panel(*each) for each in panels),
        columns=1,
        width=8.8,
        height=(0.8 + 0.3 * layout.pp) * len(panels),
    )


def _measured(layout: Layout, spans: Sequence[PhaseSpan]) -> list[Box]:
    """Return the actions of the first rank of each pipeline rank."""
    first = {layout.devices_of(rank)[0]: rank for rank in range(layout.pp)}
    found = []
    for one in spans:
        name = re.fullmatch(r"([FBIW]) (\d+)\.\d+", one.name)
        if name and one.stream == "compute" and one.rank in first:
            found.append((first[one.rank], name[1], int(name[2]), one.start_s, one.end_s))
    return found


def collectives(costs: Costs) -> dict[str, svg.Figure]:
    """Draw bandwidth over size: a figure for each kind, in place or not, a colour for a group."""
    curves = [
        (curve.like.kind + ", in place" * curve.like.in_place, curve)
        for curve in costs.curves
        if isinstance(curve.like, Collective)
    ]
    return {
        kind.replace(", ", "-").replace(" ", "_"): charts.curves(
            f"{kind}: busbw (solid, as fitted), algbw (dotted), points as measured.",
            [line for index, (_, curve) in enumerate(same) for line in _rates(costs, curve, index)],
            "B/s",
            title=kind,
        )
        for kind, same in grouped(curves, lambda each: each[0]).items()
    }


def memory_bound(costs: Costs) -> svg.Figure | None:
    """Draw bytes per second of memory-bound work, over bytes read and written; of more than four
    kinds a bar for each, at its largest size."""
    found = [curve for curve in costs.curves if isinstance(curve.like, Elementwise)]
    if len(found) > 4:
        rates = {
            name_of(one, costs.cluster): {"rate": one.x_bytes[-1] / one.time_s[-1]} for one in found
        }
        best_first = sorted(rates.items(), key=lambda of: -of[1]["rate"])
        what = "Memory-bound work: bytes a second at the largest measured size"
        return charts.bars(what, dict(best_first), lambda rate: format_rate(rate, "B/s"))
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


def blocks(costs: Costs) -> svg.Figure | None:
    """Draw a bar for each block and direction: the device's time over the sum of its operations."""
    ratios: dict[str, dict[str, float]] = {}
    for factor in costs.factors:
        if filled := [ratio for ratio in factor.ratio if ratio]:
            name = name_of(factor, costs.cluster).replace(f" {factor.like.direction}", "")
            ratios.setdefault(name, {})[factor.like.direction] = median(filled)
    what = "Blocks: measured time over the sum of their operations, as fused and at real clocks"
    return charts.bars(what, ratios, "{:.2f} x".format, mark=1.0) if ratios else None


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
