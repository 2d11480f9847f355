"""The figures of a measure run, an operator each: samples in, named ``svg.Figure`` out.

Names are fit for files (``collectives-all_reduce-4-busbw``). What was not measured has no figure.
Times are medians over iterations of the largest over ranks.
"""

from collections.abc import Iterable, Sequence

from meshwise.pages import charts, collectives, compute, svg
from meshwise.pages.charts import Line
from meshwise.pages.collectives import Series
from meshwise.pages.spread import Reading, readings
from meshwise.pages.table import flops
from meshwise.spec import DTYPE_BYTES, Cluster, Convolution, Gemm, Overlap, RunInfo, Sample
from meshwise.spec.label import label, number_format, shape, variant
from meshwise.units import format_bytes, format_count, format_seconds

Named = tuple[str, svg.Figure]


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
        looks = [(one.mode, one, "o-", 4) for one in ours]
        looks += [(f"{reference_name}, {one.mode}", one, "x", 7) for one in theirs]
        looks = [look for look in looks if len(_sized(look[1])) > 1]
        if not looks or kind == "send":
            continue
        place = group.replace(" ", "_").replace(",", "")
        for quantity, unit in (("time", "s"), ("busbw", "B/s")):
            lines = [
                Line(name, *_points(one, quantity), svg.colour(index), look, size)
                for index, (name, one, look, size) in enumerate(looks)
            ]
            caption = f"{kind}, {group}: {quantity} over size."
            drawn = charts.curves(caption, lines, unit, ylabel=quantity)
            yield f"collectives-{kind}-{place}-{quantity}", drawn


def _where(one: Series) -> tuple[object, ...]:
    """The kind and its ranks: what a reference must share."""
    return one.op.kind, one.op.group_size, one.op.group_stride, one.op.ranks


def _sized(one: Series) -> list[Reading]:
    """The readings with a place on the axis, which messages of no bytes have not."""
    return [each for each in one.readings if each.op.size_bytes]


def _points(one: Series, quantity: str) -> tuple[list[float], list[float]]:
    """Sizes, and the median times or bus bandwidths."""
    found = _sized(one)
    sizes, times_s = [each.op.size_bytes for each in found], [each.median_s for each in found]
    if quantity == "time":
        return sizes, times_s
    return sizes, [each.op.size_bytes * each.op.bus_factor / each.median_s for each in found]


def _products(
    samples: Sequence[Sample], cluster: Cluster, kind: type[compute.Product]
) -> Iterable[Named]:
    """FLOP/s over FLOPs a byte, a series for each dtype and mode, under the datasheet's roofs."""
    found, known = readings(samples, kind), cluster.device.peak_flops
    if not found:
        return
    by_name: dict[str, list[Reading]] = {}
    for one in found:
        by_name.setdefault(f"{number_format(one.op)}, {compute.mode(one.case)}", []).append(one)
    series = {}
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
                bars = charts.bars(f"Attention {direction}, {mode}", rates, flops)
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
        yield "overlap", charts.bars(what, rates, "{:.2f} x".format, mark=1.0)


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
        yield (
            "fsdp",
            charts.bars("FSDP units: time to gather and to reduce", times_s, format_seconds),
        )


def _pairs(found: Sequence[Series]) -> Iterable[Named]:
    """Every pair's rate, the darker the faster."""
    for (mode, size_bytes), rates in collectives.pair_rates(found).items():
        name = f"pairs-{format_bytes(size_bytes).replace(' ', '_')}-{mode.replace(', ', '-')}"
        what = f"Sends of {format_bytes(size_bytes)}, {mode}"
        caption = f"{what}: GB/s from the row's rank to the column's."
        yield name, charts.matrix(caption, rates, lambda rate: f"{rate / 1e9:.0f}")
