"""The figures of a measure run, an operator each: samples in, named ``svg.Figure`` out.

Names are fit for files (``collectives-all_reduce-4-busbw``). What was not measured has no figure.
Times are medians over iterations of the largest over ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshwise.pages import collectives, compute, svg
from meshwise.pages.collectives import Series
from meshwise.pages.spread import Reading, readings
from meshwise.pages.table import flops
from meshwise.spec import DTYPE_BYTES, Cluster, Convolution, Gemm, Overlap, RunInfo, Sample
from meshwise.spec.label import label, number_format, shape, variant
from meshwise.spec.op import Dtype
from meshwise.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Named = tuple[str, svg.Figure]

_MOST_GROUPS = 12  # of bars, in one figure


def figures(
    info: RunInfo,
    samples: Iterable[Sample],
    *,
    reference: Iterable[Sample] = (),
    reference_name: str = "reference",
    exact: bool = False,
) -> list[Named]:
    """Every figure that the samples give. ``reference``: samples of another run, whose collectives
    stand beside those of the same kind and group, as imported logs of nccl-tests do."""
    done = [sample for sample in samples if sample.status == "ok"]
    found = collectives.series(done)
    others = collectives.series(sample for sample in reference if sample.status == "ok")
    if collectives.are_fsdp_units(info):
        return list(_fsdp(found))
    return [
        *_products(done, info.cluster, Gemm),
        *_products(done, info.cluster, Convolution),
        *_attention(done, exact),
        *_overlap(done),
        *_collectives(found, others, reference_name),
        *_pairs(found),
    ]


def _collectives(
    found: Sequence[Series], others: Sequence[Series], reference_name: str
) -> Iterable[Named]:
    """Time and busbw over size, two figures a kind and group; a line a mode."""
    for kind, group in dict.fromkeys((one.op.kind, one.group) for one in found):
        ours = [one for one in found if (one.op.kind, one.group) == (kind, group)]
        theirs = [one for one in others if _where(one) == _where(ours[0])]
        curves = [_curve(one.mode, one, "o-", 4) for one in ours]
        curves += [_curve(f"{reference_name}, {one.mode}", one, "x", 7) for one in theirs]
        curves = [curve for curve in curves if len(curve.sizes) > 1]
        if not curves or kind == "send":
            continue
        place = group.replace(" ", "_").replace(",", "")
        for quantity in ("time", "busbw"):
            caption = f"{kind}, {group}: {quantity} over size."
            drawn = svg.draw(caption, _lines(curves, quantity))
            yield f"collectives-{kind}-{place}-{quantity}", drawn


def _where(one: Series) -> tuple[object, ...]:
    """The kind and its ranks: what a reference must share."""
    return one.op.kind, one.op.group_size, one.op.group_stride, one.op.ranks


class _Curve(NamedTuple):
    """Median times and bus bandwidths over sizes, and how they are drawn."""

    name: str
    look: str
    marker: int
    sizes: list[int]
    time: list[float]
    busbw: list[float]


def _curve(name: str, one: Series, look: str, marker: int) -> _Curve:
    """Read a series; messages of no bytes have no place on the axis."""
    known = [(each.op.size_bytes, each.op.bus_factor, each.median_s) for each in one.readings]
    known = [point for point in known if point[0]]
    times_s = [time_s for _, _, time_s in known]
    rates = [size * factor / time_s for size, factor, time_s in known]
    return _Curve(name, look, marker, [size for size, _, _ in known], times_s, rates)


def _lines(curves: Sequence[_Curve], quantity: str) -> Callable[["Axes"], None]:
    def paint(axes: "Axes") -> None:
        everything: list[float] = []
        for index, one in enumerate(curves):
            y = one.time if quantity == "time" else one.busbw
            look: Any = {"label": one.name, "color": svg.colour(index), "markersize": one.marker}
            axes.plot(one.sizes, y, one.look, **look)
            everything += y
        axes.set(xscale="log", yscale="log", xlabel="size", ylabel=quantity)
        svg.byte_ticks(axes.xaxis, *_ends(size for one in curves for size in one.sizes))
        low, high = _widened(*_ends(everything))
        if quantity == "busbw":
            svg.rate_ticks(axes.yaxis, low, high, "B/s")
        else:
            low, high = low / 1.5, high * 1.5
            inside = [value for value in svg.decades(low, high) if low <= value <= high]
            axes.set_yticks(inside, labels=list(map(format_seconds, inside)))
            axes.set_ylim(low, high)
        axes.legend(loc="upper left" if quantity == "time" else "lower right")

    return paint


def _widened(low: float, high: float) -> tuple[float, float]:
    """Widen a range to a factor of 4 or more, so that two of the ticks 1, 2, 5 fit."""
    factor = max(1.0, (4 * low / high) ** 0.5)
    return low / factor, high * factor


def _products(
    samples: Sequence[Sample], cluster: Cluster, kind: type[compute.Product]
) -> Iterable[Named]:
    """FLOP/s over FLOPs a byte, a series for each dtype and mode, under the datasheet's roofs."""
    found = readings(samples, kind)
    if not found:
        return
    known = cluster.device.peak_flops
    roofs = {one.op.dtype: known[one.op.dtype] for one in found if one.op.dtype in known}
    dashed = " Dashed: datasheet." if roofs else ""
    caption = f"{compute.WORDS[kind][0]}: rate over arithmetic intensity; ringed: the best.{dashed}"
    paint = _roofline(found, roofs, cluster.device.peak_memory_bytes_per_s)
    yield kind.__name__.lower(), svg.draw(caption, paint, width=8.8)


def _roofline(
    found: Sequence[Reading], roofs: dict[Dtype, float], bandwidth: float | None
) -> Callable[["Axes"], None]:
    series: dict[str, list[Reading]] = {}
    for one in found:
        name = f"{number_format(one.op)}, {compute.mode(one.case)}"
        series.setdefault(name, []).append(one)
    x_low, x_high = _widened(*_ends(map(_intensity, found)))
    y_low, y_high = _widened(*_ends([*(one.flops_per_s for one in found), *roofs.values()]))

    def paint(axes: "Axes") -> None:
        for index, (name, same) in enumerate(series.items()):
            best = max(same, key=lambda one: one.flops_per_s)
            rates, text = [one.flops_per_s for one in same], f"{shape(best.op)} {variant(best.op)}"
            look: Any = {"color": svg.colour(index)}
            axes.plot(list(map(_intensity, same)), rates, "o", label=f"{name}\nbest {text}", **look)
            ring: Any = {"markersize": 9, "fillstyle": "none", **look}
            axes.plot(_intensity(best), best.flops_per_s, "o", **ring)
        wide = np.geomspace(x_low / 1.5, x_high * 1.5, 100)
        for dtype, peak in roofs.items():
            roof = np.minimum(wide * bandwidth, peak) if bandwidth else np.full(100, peak)
            axes.plot(wide, roof, **svg.DASHED)
            name, at = f"{dtype} {flops(peak)}", (wide[-1], peak)
            axes.annotate(name, at, ha="right", va="bottom", color=svg.MUTED, fontsize=8)
        axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte")
        svg.rate_ticks(axes.xaxis, x_low, x_high, "")
        svg.rate_ticks(axes.yaxis, y_low, y_high, "FLOP/s")
        axes.set(xlim=(x_low / 1.5, x_high * 1.5), ylim=(y_low / 1.5, y_high * 1.6))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

    return paint


def _intensity(one: Reading) -> float:
    return float(one.op.flops / one.op.bytes)


def _ends(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[0], ordered[-1]


def _attention(samples: Sequence[Sample], exact: bool) -> Iterable[Named]:
    """A group of bars for each shape, a bar for each back end; a figure for each direction."""
    found = compute.contests(samples, exact=exact)
    for mode in dict.fromkeys(contest.mode for contest in found):
        for direction in ("forward", "backward"):
            rates: dict[str, dict[str, float]] = {}
            for one in (contest for contest in found if contest.mode == mode):
                for backend in one.readings:
                    rate = one.rate(backend, direction)
                    if rate is not None:
                        of_shape = rates.setdefault(shape(one.op), {})
                        of_shape[backend or compute.DEFAULT] = rate
            if rates:
                bars = _bars(f"Attention {direction}, {mode}", rates, flops)
                yield f"attention-{direction}-{mode.replace(', ', '-')}", bars


def _overlap(samples: Sequence[Sample]) -> Iterable[Named]:
    """Two bars for each pair: the compute's slowdown, and the collective's."""
    rates: dict[str, dict[str, float]] = {}
    for one in readings(samples, Overlap):
        times = compute.slowdown(one)
        sides = {"compute": times.of_compute, "collective": times.of_collective}
        name = label(one.case).replace(" beside ", "\nbeside ")
        rates[name] = {side: ratio for side, ratio in sides.items() if ratio is not None}
    if rates:
        what = "Slowdown of compute and collective beside each other"
        yield "overlap", _bars(what, rates, "{:.2f} x".format, mark=1.0)


def _fsdp(found: Sequence[Series]) -> Iterable[Named]:
    """Two bars for each unit, named by the elements that a rank holds: to gather, to reduce."""
    units: dict[tuple[str, str, int], dict[str, float]] = {}
    for one in found:
        if one.op.kind in ("all_gather", "reduce_scatter"):
            rank_bytes = DTYPE_BYTES[one.op.dtype] * one.op.group_size
            for each in one.readings:
                unit = one.group, one.mode, each.op.size_bytes // rank_bytes
                units.setdefault(unit, {})[one.op.kind] = each.median_s
    times_s = {
        f"{format_count(elements)} elements a rank\n{group}, {mode}": of_unit
        for (group, mode, elements), of_unit in sorted(units.items(), key=lambda unit: unit[0])
    }
    if times_s:
        yield "fsdp", _bars("FSDP units: time to gather and to reduce", times_s, format_seconds)


def _bars(
    what: str,
    values: dict[str, dict[str, float]],
    show: Callable[[float], str],
    mark: float | None = None,
) -> svg.Figure:
    """``values[group][series]`` as horizontal bars, their values written behind them."""
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


def _pairs(found: Sequence[Series]) -> Iterable[Named]:
    """Every pair's rate, the darker the faster."""
    for (mode, size_bytes), rates in collectives.pair_rates(found).items():
        name = f"pairs-{format_bytes(size_bytes).replace(' ', '_')}-{mode.replace(', ', '-')}"
        what = f"Sends of {format_bytes(size_bytes)}, {mode}"
        caption = f"{what}: GB/s from the row's rank to the column's."
        ranks = sorted({rank for pair in rates for rank in pair})
        side = 1.2 + 0.42 * len(ranks)
        yield name, svg.draw(caption, _cells(rates, ranks), width=max(side, 4.4), height=side)


def _cells(rates: dict[tuple[int, int], float], ranks: Sequence[int]) -> Callable[["Axes"], None]:
    def paint(axes: "Axes") -> None:
        best = max(rates.values())
        for (first, last), rate in rates.items():
            x, y = ranks.index(last), ranks.index(first)
            look: Any = {
                "facecolor": svg.colour(0),
                "alpha": 0.1 + 0.6 * rate / best,
                "linewidth": 0,
            }
            axes.broken_barh([(x - 0.48, 0.96)], (y - 0.48, 0.96), **look)
            axes.annotate(f"{rate / 1e9:.0f}", (x, y), ha="center", va="center", fontsize=8)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(len(ranks)), labels=list(map(str, ranks)))
        axes.set(xlabel="to", ylabel="from")
        axes.invert_yaxis()
        axes.set_aspect("equal")
        axes.grid(visible=False)

    return paint
