"""The figures of the report: records in, ``svg.Figure`` out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from meshwise import schedule, timeline
from meshwise.pages import svg
from meshwise.pages.steps import Outcome, StepResult
from meshwise.prices import curve_s, name_of, shape_op
from meshwise.spec import (
    Block,
    Collective,
    Convolution,
    Costs,
    Curve,
    Elementwise,
    Gemm,
    Part,
    Plan,
)
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
    kinds: dict[str, list[_Rates]] = {}
    for curve in costs.curves:
        if isinstance(curve.like, Collective):
            kind, name = curve.like.kind, name_of(curve, costs.cluster)
            group = _Rates(name.removeprefix(f"{kind} "), curve, curve.like.bus_factor)
            kinds.setdefault(kind, []).append(group)
    return [
        _curves(f"{kind}: busbw (solid, as fitted), algbw (dotted), points as measured.", kind, of)
        for kind, of in kinds.items()
    ]


def memory_bound(costs: Costs) -> svg.Figure | None:
    """Bytes per second of copies and other memory-bound work, over bytes read and written."""
    curves = [
        _Rates(name_of(curve, costs.cluster), curve)
        for curve in costs.curves
        if isinstance(curve.like, Elementwise)
    ]
    caption = "Memory-bound work: bytes a second, as fitted and as measured."
    return _curves(caption, "memory", curves, "bytes read and written") if curves else None


class _Rates(NamedTuple):
    """A fitted curve as a line; ``bus_factor`` of a collective."""

    name: str
    curve: Curve
    bus_factor: float | None = None


def _curves(caption: str, title: str, found: Sequence[_Rates], x_name: str = "size") -> svg.Figure:
    """Points as measured, solid lines as fitted; of collectives algbw too, dotted."""

    def paint(axes: "Axes") -> None:
        ends: list[float] = []
        for index, (name, curve, bus_factor) in enumerate(found):
            x, t = np.asarray(curve.x_bytes), np.asarray(curve.time_s)
            fine = np.geomspace(x[0], x[-1], 60)
            fitted = np.asarray([curve_s(curve, at) for at in fine])
            factor, colour = bus_factor or 1.0, svg.colour(index)
            axes.plot(x, factor * x / t, "o", color=colour)
            axes.plot(fine, factor * fine / fitted, color=colour, label=name)
            ends += [*(factor * x / t)]
            if bus_factor is not None:
                axes.plot(fine, fine / fitted, color=colour, linestyle=":", linewidth=1)
                ends += [*(x / t)]
        axes.set(xscale="log", yscale="log", xlabel=x_name, title=title)
        sizes = [x for one in found for x in one.curve.x_bytes]
        svg.byte_ticks(axes.xaxis, min(sizes), max(sizes))
        svg.rate_ticks(axes.yaxis, min(ends), max(ends), "B/s")
        axes.legend(loc="lower right")

    return svg.draw(caption, paint)


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
    everything = [point for points in series.values() for point in points]
    bandwidth = max(surface.bytes_per_s for surface in costs.surfaces)
    peak = costs.cluster.device.peak_flops.get(costs.dtype)

    def paint(axes: "Axes") -> None:
        for index, (name, points) in enumerate(series.items()):
            x, y = zip(*points, strict=True)
            axes.plot(x, y, "o", color=svg.colour(index), label=name, alpha=0.75)
        x_low, x_high = min(x for x, _ in everything), max(x for x, _ in everything)
        top = max(max(y for _, y in everything), peak or 0.0)
        roof = np.geomspace(x_low, x_high, 100)
        ceiling = np.minimum(roof * bandwidth, top)
        label = "copy rate, then " + ("datasheet peak" if peak == top else "best measured")
        axes.plot(roof, ceiling, color=svg.MUTED, linestyle=(0, (4, 3)), linewidth=1, label=label)
        axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", title="products")
        low = min(min(y for _, y in everything), float(ceiling[0]))
        svg.rate_ticks(axes.xaxis, x_low, x_high, "")
        svg.rate_ticks(axes.yaxis, low, top, "FLOP/s")
        axes.legend(loc="lower right")

    return svg.draw("Matrix products and attention as measured, under their roofline.", paint)


def factors(costs: Costs) -> svg.Figure | None:
    """Measured over composed time of every kind of block, over its activation's elements."""
    if not costs.factors:
        return None
    kinds = list(dict.fromkeys(_kind(factor.like) for factor in costs.factors))
    degrees = list(dict.fromkeys(_degree(factor.like) for factor in costs.factors))

    def paint(axes: "Axes") -> None:
        axes.axhline(1, color=svg.MUTED, linestyle=(0, (4, 3)), linewidth=1)
        for factor in costs.factors:
            axes.plot(
                factor.activation_elements, factor.ratio, linewidth=1, markersize=6,
                marker="os^DvPX*"[degrees.index(_degree(factor.like)) % 8],
                color=svg.colour(kinds.index(_kind(factor.like))),
                label=name_of(factor, costs.cluster),
            )  # fmt: skip
        elements = [x for factor in costs.factors for x in factor.activation_elements]
        axes.set(xscale="log", title="blocks", xlabel="microbatch x seq x hidden")
        axes.set_ylabel("measured / composed")
        svg.rate_ticks(axes.xaxis, min(elements), max(elements), "")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05))

    return svg.draw(
        "Blocks: measured time over the sum of their operations' prices.",
        paint,
        width=8.8,
        height=max(3.2, 0.6 + 0.19 * len(costs.factors)),
    )


def _kind(block: Block) -> tuple[object, ...]:
    return type(block.model), block.part, block.direction


def _degree(block: Block) -> tuple[int, bool]:
    return block.tp, block.sequence_parallel
