"""Draw the figures of a measure run, operator by operator. In: samples. Out: named ``svg.Figure``.

Names can be file names (``collectives-all_reduce-4-busbw``). Operators without times have no
figure. Times are medians over iterations of the largest over ranks.
"""

from collections.abc import Iterable, Sequence

from meshwise.pages import charts, collectives, compute, svg
from meshwise.pages.charts import PlotLine
from meshwise.pages.collectives import Series
from meshwise.pages.spread import readings
from meshwise.pages.table import flops, grouped
from meshwise.spec import DTYPE_BYTES, Cluster, Convolution, Gemm, Overlap, RunInfo, Sample
from meshwise.spec.label import label, number_format, shape, variant
from meshwise.units import format_count, format_seconds

Named = tuple[str, svg.Figure]


def figures(
    info: RunInfo,
    samples: Iterable[Sample],
    *,
    reference: Iterable[Sample] = (),
    reference_name: str = "reference",
    exact: bool = False,
) -> list[Named]:
    """Draw all figures of the samples.

    ``reference``: samples of another run, such as imported logs of nccl-tests. Its collectives are
    drawn beside those of the same kind and group.
    """
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
    ]


def _collectives(
    found: Sequence[Series], others: Sequence[Series], reference_name: str
) -> Iterable[Named]:
    """Draw time and busbw over size: two figures for a kind and group, a line for each mode."""
    alike = grouped(found, lambda one: (one.op.kind, one.group, one.op.in_place))
    for (kind, group, is_in_place), ours in alike.items():
        theirs = [one for one in others if _ranks(one) == _ranks(ours[0])]
        looks = [(one.mode, one, "o-", 4) for one in ours]
        looks += [(f"{reference_name}, {one.mode}", one, "x", 7) for one in theirs]
        looks = [look for look in looks if len(_points(look[1])) > 1]
        if not looks or kind == "send":
            continue
        place = group.replace(" ", "_").replace(",", "") + "-in_place" * is_in_place
        for column, (quantity, unit) in enumerate((("time", "s"), ("busbw", "B/s")), 1):
            lines = []
            for index, (name, one, look, width) in enumerate(looks):
                points = list(zip(*_points(one), strict=True))
                lines.append(
                    PlotLine(name, points[0], points[column], svg.colour(index), look, width)
                )
            caption = f"{kind}, {group}{', in place' * is_in_place}: {quantity} over size."
            drawn = charts.curves(caption, lines, unit, ylabel=quantity)
            yield f"collectives-{kind}-{place}-{quantity}", drawn


def _ranks(one: Series) -> tuple[object, ...]:
    """Return the kind of a collective and its ranks, which a reference must share."""
    return one.op.kind, one.op.group_size, one.op.group_stride, one.op.ranks


def _points(one: Series) -> list[tuple[float, float, float]]:
    """Return sizes, median times and bus bandwidths. Size 0 is dropped: axes are logarithmic."""
    sized = [(each.op.size_bytes, each.op.bus_factor, each.median_s) for each in one.readings]
    return [(size, time_s, size * factor / time_s) for size, factor, time_s in sized if size]


def _products(
    samples: Sequence[Sample], cluster: Cluster, kind: type[compute.Product]
) -> Iterable[Named]:
    """Draw FLOP/s over FLOPs per byte, by dtype and mode, under the datasheet's roofs."""
    found, known = readings(samples, kind), cluster.device.peak_flops
    if not found:
        return
    series = {}
    by_name = grouped(found, lambda one: f"{number_format(one.op)}, {compute.mode(one.case)}")
    for name, same in by_name.items():
        best = max(same, key=lambda one: one.flops_per_s)
        told = f"{name}\nbest {shape(best.op)} {variant(best.op)}"
        series[told] = [(float(one.op.flops / one.op.bytes), one.flops_per_s) for one in same]
    dtypes = dict.fromkeys(one.op.dtype for one in found if one.op.dtype in known)
    roofs = {f"{dtype} {flops(known[dtype])}": known[dtype] for dtype in dtypes}
    caption = f"{compute.WORDS[kind][0]}: rate over arithmetic intensity; ringed: the best."
    caption += " Dashed: datasheet." if roofs else ""
    bytes_per_s = cluster.device.peak_memory_bytes_per_s
    yield kind.__name__.lower(), charts.roofline(caption, series, roofs, bytes_per_s)


def _attention(samples: Sequence[Sample], exact: bool) -> Iterable[Named]:
    """Draw a figure for each mode and direction: a group of bars per shape, a bar per back end."""
    contests = compute.contests(samples, exact=exact)
    for mode, found in grouped(contests, lambda contest: contest.mode).items():
        for direction in ("forward", "backward"):
            rates: dict[str, dict[str, float]] = {}
            for one in found:
                for backend in one.readings:
                    if rate := one.rate(backend, direction):
                        name = backend or compute.DEFAULT
                        rates.setdefault(shape(one.op), {})[name] = rate
            if rates:
                bars = charts.bars(f"Attention {direction}, {mode}", rates, flops)
                yield f"attention-{direction}-{mode.replace(', ', '-')}", bars


def _overlap(samples: Sequence[Sample]) -> Iterable[Named]:
    """Draw two bars for each pair: the slowdown of the compute and of the collective."""
    rates: dict[str, dict[str, float]] = {}
    for one in readings(samples, Overlap):
        sides = zip(("compute", "collective"), compute.sides(one), strict=True)
        name = label(one.case).replace(" beside ", "\nbeside ")
        rates[name] = {side: it.slowdown for side, it in sides if it.slowdown is not None}
    if rates:
        what = "Slowdown of compute and collective beside each other"
        yield "overlap", charts.bars(what, rates, "{:.2f} x".format, mark=1.0)


def _fsdp(found: Sequence[Series]) -> Iterable[Named]:
    """Draw two bars for each unit, gather and reduce, named by the elements that a rank holds."""
    units: dict[tuple[str, str, int], dict[str, float]] = {}
    for one in found:
        if one.op.kind in ("all_gather", "reduce_scatter"):
            rank_bytes = DTYPE_BYTES[one.op.dtype] * one.op.group_size
            for each in one.readings:
                unit = one.group, one.mode, each.op.size_bytes // rank_bytes
                units.setdefault(unit, {})[one.op.kind] = each.median_s
    times_s = {
        f"{format_count(elements)} elements a rank\n{group}, {mode}": units[group, mode, elements]
        for group, mode, elements in sorted(units)
    }
    if times_s:
        what = "FSDP units: time to gather and to reduce"
        yield "fsdp", charts.bars(what, times_s, format_seconds)
