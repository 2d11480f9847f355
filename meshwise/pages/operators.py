"""The figures of a measure run, an operator each: samples in, named ``svg.Figure`` out.

Names are fit for files (``collectives-all_reduce-4-busbw``). What was not measured has no figure.
Times are medians over iterations of the largest over ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwise.pages import collectives, compute, svg
from meshwise.pages.collectives import Series
from meshwise.spec import Cluster, Collective, Convolution, Gemm, Overlap, RunInfo, Sample
from meshwise.spec.label import label, number_format, shape, variant
from meshwise.spec.op import Dtype
from meshwise.stats import median_interval
from meshwise.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Named = tuple[str, svg.Figure]

_DASHES = (0, (4, 3))
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
        lines = [("", one) for one in found if (one.op.kind, one.group) == (kind, group)]
        lines += [(f"{reference_name}, ", one) for one in others if _same(one, lines[0][1])]
        curves = [(f"{name}{one.mode}", *_curve(one)) for name, one in lines]
        curves = [curve for curve in curves if len(curve[1]) > 1]
        if not curves or kind == "send":
            continue
        place = group.replace(" ", "_").replace(",", "")
        for quantity in ("time", "busbw"):
            caption = f"{kind}, {group}: {quantity} over size."
            paint = _lines(curves, quantity, sum(not name for name, _ in lines))
            yield f"collectives-{kind}-{place}-{quantity}", svg.draw(caption, paint)


def _same(one: Series, other: Series) -> bool:
    """Whether both are the same kind over as many neighbouring ranks."""
    key = (one.op.kind, one.op.group_size, one.op.group_stride, one.op.ranks)
    return key == (other.op.kind, other.op.group_size, other.op.group_stride, other.op.ranks)


def _curve(one: Series) -> tuple[list[int], list[float], list[float]]:
    """Sizes, median times, bus bandwidths; messages of no bytes have no place on the axis."""
    points = []
    for sample in one.samples:
        op = sample.case.op
        assert isinstance(op, Collective)
        if op.size_bytes:
            time_s = median_interval(sample.times_s)[0]
            points.append((op.size_bytes, time_s, op.size_bytes * op.bus_factor / time_s))
    sizes, times_s, rates = (list(values) for values in zip(*points, strict=True) or ((),) * 3)
    return sizes, times_s, rates


def _lines(
    curves: Sequence[tuple[str, list[int], list[float], list[float]]], quantity: str, ours: int
) -> Callable[["Axes"], None]:
    """Ours as lines, the reference's as crosses."""

    def paint(axes: "Axes") -> None:
        everything: list[float] = []
        for index, (name, sizes, times_s, rates) in enumerate(curves):
            y = times_s if quantity == "time" else rates
            style, size = ("o-", 4) if index < ours else ("x", 7)
            axes.plot(sizes, y, style, label=name, color=svg.colour(index), markersize=size)
            everything += y
        axes.set(xscale="log", yscale="log", xlabel="size", ylabel=quantity)
        ends = [size for _, sizes, _, _ in curves for size in sizes]
        svg.byte_ticks(axes.xaxis, min(ends), max(ends))
        low, high = _widened(min(everything), max(everything))
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


class _Product(NamedTuple):
    """A point of the roofline: FLOPs a byte, FLOP/s."""

    intensity: float
    rate: float
    op: compute.Product


def _products(
    samples: Sequence[Sample], cluster: Cluster, kind: type[compute.Product]
) -> Iterable[Named]:
    """FLOP/s over FLOPs a byte, a series for each dtype and mode, under the datasheet's roofs."""
    points: dict[str, list[_Product]] = {}
    for sample in samples:
        op = sample.case.op
        if isinstance(op, kind):
            name = f"{number_format(op)}, {compute.mode(sample.case)}"
            rate = op.flops / median_interval(sample.times_s)[0]
            points.setdefault(name, []).append(_Product(op.flops / op.bytes, rate, op))
    if not points:
        return
    known = cluster.device.peak_flops
    dtypes = dict.fromkeys(point.op.dtype for series in points.values() for point in series)
    roofs = {dtype: known[dtype] for dtype in dtypes if dtype in known}
    dashed = " Dashed: datasheet." if roofs else ""
    caption = f"{compute.WORDS[kind][0]}: rate over arithmetic intensity; ringed: the best.{dashed}"
    paint = _roofline(points, roofs, cluster.device.peak_memory_bytes_per_s)
    yield kind.__name__.lower(), svg.draw(caption, paint, width=8.8)


def _roofline(
    points: dict[str, list[_Product]], roofs: dict[Dtype, float], bandwidth: float | None
) -> Callable[["Axes"], None]:
    every = [point for series in points.values() for point in series]
    x_low, x_high = _widened(*_ends(point.intensity for point in every))
    y_low, y_high = _widened(*_ends([*(point.rate for point in every), *roofs.values()]))

    def paint(axes: "Axes") -> None:
        for index, (name, series) in enumerate(points.items()):
            best = max(series, key=lambda point: point.rate)
            x, y, _ = zip(*series, strict=True)
            text = f"{name}\nbest {shape(best.op)} {variant(best.op)}"
            axes.plot(x, y, "o", color=svg.colour(index), label=text)
            axes.plot(
                best.intensity, best.rate, "o", color=svg.colour(index), markersize=9,
                fillstyle="none",
            )  # fmt: skip
        wide = np.geomspace(x_low / 1.5, x_high * 1.5, 100)
        for dtype, peak in roofs.items():
            roof = np.minimum(wide * bandwidth, peak) if bandwidth else np.full(100, peak)
            axes.plot(wide, roof, color=svg.MUTED, linestyle=_DASHES, linewidth=1)
            axes.annotate(
                f"{dtype} {format_rate(peak, 'FLOP/s')}", (wide[-1], peak), ha="right",
                va="bottom", color=svg.MUTED, fontsize=8,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte")
        svg.rate_ticks(axes.xaxis, x_low, x_high, "")
        svg.rate_ticks(axes.yaxis, y_low, y_high, "FLOP/s")
        axes.set(xlim=(x_low / 1.5, x_high * 1.5), ylim=(y_low / 1.5, y_high * 1.6))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

    return paint


def _ends(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[0], ordered[-1]


def _attention(samples: Sequence[Sample], exact: bool) -> Iterable[Named]:
    """A group of bars for each shape, a bar for each back end; a figure for each direction."""
    found = compute.contests(samples, exact=exact)
    modes = dict.fromkeys(contest.mode for contest in found)
    for mode in modes:
        for direction in ("forward", "backward"):
            rates = {
                shape(one.op): {
                    backend or compute.DEFAULT: rate
                    for backend in one.samples
                    if (rate := one.rate(backend, direction)) is not None
                }
                for one in found
                if one.mode == mode
            }
            rates = {name: of_shape for name, of_shape in rates.items() if of_shape}
            if rates:
                what = f"Attention {direction}, {mode}"
                name = f"attention-{direction}-{mode.replace(', ', '-')}"
                bars = _bars(what, rates, lambda rate: format_rate(rate, "FLOP/s"))
                yield name, bars


def _overlap(samples: Sequence[Sample]) -> Iterable[Named]:
    """Two bars for each pair: the compute's slowdown, and the collective's."""
    rates: dict[str, dict[str, float]] = {}
    for sample in samples:
        if isinstance(sample.case.op, Overlap):
            times = compute.slowdown(sample)
            sides = {"compute": times.of_compute, "collective": times.of_collective}
            name = label(sample.case).replace(" beside ", "\nbeside ")
            rates[name] = {side: ratio for side, ratio in sides.items() if ratio is not None}
    if rates:
        what = "Slowdown of compute and collective beside each other"
        yield "overlap", _bars(what, rates, lambda ratio: f"{ratio:.2f} x", mark=1.0)


def _fsdp(found: Sequence[Series]) -> Iterable[Named]:
    """Two bars for each unit: its all-gather and its reduce-scatter."""
    rates: dict[str, dict[str, float]] = {}
    for unit in collectives.fsdp_units(found):
        name = f"{format_count(unit.elements_per_rank)} elements a rank\n{unit.group}, {unit.mode}"
        sides = {"all_gather": unit.gather, "reduce_scatter": unit.reduce}
        rates[name] = {
            kind: median_interval(sample.times_s)[0]
            for kind, sample in sides.items()
            if sample is not None
        }
    if rates:
        yield "fsdp", _bars("FSDP units: time to gather and to reduce", rates, format_seconds)


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
            axes.axvline(mark, color=svg.MUTED, linestyle=_DASHES, linewidth=1)
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
            axes.broken_barh(
                [(x - 0.48, 0.96)], (y - 0.48, 0.96), facecolor=svg.colour(0),
                alpha=0.1 + 0.6 * rate / best, linewidth=0,
            )  # fmt: skip
            axes.annotate(f"{rate / 1e9:.0f}", (x, y), ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
        axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
        axes.set(xlabel="to", ylabel="from")
        axes.invert_yaxis()
        axes.set_aspect("equal")
        axes.grid(visible=False)

    return paint
