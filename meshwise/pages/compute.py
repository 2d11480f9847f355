"""Tables of measured products, convolutions and attention, alone and beside a collective.

In: samples. Out: tables. Rates are FLOPs of the operation (``spec.op``) over the median time.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from meshwise.pages.spread import Reading, each, readings
from meshwise.pages.table import (
    Column,
    Table,
    columns,
    filled,
    flops,
    grouped,
    listed,
    percent,
    shown,
)
from meshwise.pages.tables import INTERVAL
from meshwise.spec import Attention, Case, Cluster, Convolution, Gemm, Overlap, Sample
from meshwise.spec.label import label, number_format, shape, variant
from meshwise.units import format_rate, format_seconds

Product = Gemm | Convolution
WORDS: dict[type[Product], tuple[str, str, str]] = {  # title, a column, what a row's shape is
    Gemm: (
        "Matrix products",
        "layout",
        "shape: m x n x k, 2mnk FLOPs; layout: t for an operand stored transposed",
    ),
    Convolution: (
        "Convolutions",
        "product",
        "shape: batch, channels x height x width -> channels, kernel /stride; a multiply-add is 2"
        " FLOPs",
    ),
}
DEFAULT = "torch's choice"
CONVENTION = {
    False: "FLOPs: two products over pairs of query and key, causal counted half, a window by the "
    "pairs it leaves; backward 2.5 x forward (flash-attention's count).",
    True: "FLOPs: two products over exactly the pairs of query and key that the mask leaves; "
    "backward 2.5 x forward.",
}


def mode(case: Case, *, backend: bool = True) -> str:
    """Return the words that tell rows of one shape apart: ``cold``, ``warm, compiled, triton``."""
    compiled = "compiled" if case.lowering == "compiled" else ""
    return ", ".join(filter(None, (case.regime, compiled, case.backend if backend else "")))


def products(
    samples: Iterable[Sample], cluster: Cluster, kind: type[Product] = Gemm
) -> list[Table]:
    """Make a table for each mode, in the order measured. Its legend names each dtype's best."""
    by_mode = grouped(readings(samples, kind), lambda one: mode(one.case))
    return [_products(name, found, cluster) for name, found in by_mode.items()]


def _products(name: str, found: Sequence[Reading], cluster: Cluster) -> Table:
    def of_peak(one: Reading) -> float | None:
        peak = cluster.device.peak_flops.get(one.op.dtype)
        return one.flops_per_s / peak if peak else None

    best = []
    for dtype, same in grouped(found, lambda one: number_format(one.op)).items():
        one = max(same, key=lambda one: one.flops_per_s)
        rate = f"{shape(one.op)} {variant(one.op)}, {flops(one.flops_per_s)}"
        of = "" if of_peak(one) is None else f", {percent(of_peak(one))} of peak"
        best.append(f"Best {dtype}: {rate}{of}.")
    noted = f"±: half of the {INTERVAL}, relative."
    last: tuple[Column, ...] = (
        ("±", lambda one: f"{100 * (one.high_s - one.low_s) / 2 / one.median_s:.1f} %"),
        ("slowest", "slowest"),
    )
    if found[0].case.regime == "sustained":
        noted = "MHz, W: medians over time of the slowest rank's clock and of the highest power."
        clock, power = _over_time("sm_clock_mhz", min), _over_time("power_w", max)
        last = ("MHz (min)", clock), ("W (max)", power)
    title, way, words = WORDS[type(found[0].op)]
    return listed(
        f"{title}, {name}",
        found,
        ("shape", lambda one: shape(one.op)),
        ("dtype", lambda one: number_format(one.op)),
        (way, lambda one: variant(one.op)),
        ("median", "median_s", format_seconds),
        ("rate", "flops_per_s", flops),
        ("of peak", of_peak, percent),
        ("bandwidth", lambda one: format_rate(one.bytes_per_s, "B/s")),
        ("times", "num_times"),
        *last,
        legend=(
            *best,
            noted,
            f"{words}; bandwidth: operands and result once, over the median; of peak: of the "
            "datasheet's dense rate for the dtype, where it is known.",
        ),
        left=3,
    )


def _over_time(metric: str, end: Callable[..., float]) -> Callable[[Reading], str | None]:
    """Show the median of a metric and, in brackets, its least or largest value."""

    def show(one: Reading) -> str | None:
        values = each(one.sample.metrics, metric)
        return f"{median(values):.0f} ({end(values):.0f})" if values else None

    return show


class Contest(NamedTuple):
    """One shape of attention in one mode: ``readings[back end][direction]``.

    ``exact``: count only the FLOPs of pairs that the mask keeps.
    """

    op: Attention
    mode: str
    readings: dict[str, dict[str, Reading]]
    exact: bool

    def rate(self, backend: str, direction: str) -> float | None:
        one = self.readings[backend].get(direction)
        return one and (one.op.exact_flops if self.exact else one.op.flops) / one.median_s

    def won(self, backend: str) -> str:
        """Name the directions in which a back end is the fastest of several named ones."""
        won = []
        for direction in ("forward", "backward"):
            rates = {name: self.rate(name, direction) for name in self.readings if name}
            known = {name: rate for name, rate in rates.items() if rate}
            if len(known) > 1 and backend == max(known, key=known.__getitem__):
                won.append(direction)
        return "both" if len(won) == 2 else "".join(won)


def contests(samples: Iterable[Sample], *, exact: bool = False) -> list[Contest]:
    """Return every shape and mode with the back ends that were measured for it."""
    found: dict[tuple[Attention, str], Contest] = {}
    for one in readings(samples, Attention):
        of_shape = msgspec.structs.replace(one.op, direction="forward")
        name = mode(one.case, backend=False)
        contest = found.setdefault((of_shape, name), Contest(of_shape, name, {}, exact))
        contest.readings.setdefault(one.case.backend, {})[one.op.direction] = one
    return list(found.values())


def attention(samples: Iterable[Sample], *, exact: bool = False) -> list[Table]:
    """Make a table for each mode: one row per shape and back end, with the fastest named."""

    def cells(direction: str) -> tuple[Column, Column]:
        time = f"readings.{direction}.median_s"
        return (direction, time, format_seconds), ("rate", f"rates.{direction}", flops)

    tables = []
    for name, same in grouped(contests(samples, exact=exact), lambda one: one.mode).items():
        rows = [
            {
                "shape": "" if number else shape(contest.op),
                "back end": backend or DEFAULT,
                "readings": measured,
                "rates": {direction: contest.rate(backend, direction) for direction in measured},
                "fastest": contest.won(backend),
            }
            for contest in same
            for number, (backend, measured) in enumerate(contest.readings.items())
        ]
        heads = columns(str, {"shape": "shape", "back end": "back end"})
        directions = (*cells("forward"), *cells("backward"))
        fastest: Column = ("fastest", "fastest")
        legend = (f"Times: medians. {CONVENTION[exact]}",)
        title = f"Attention, {name}"
        tables.append(listed(title, rows, *heads, *directions, fastest, legend=legend, left=2))
    return tables


class OverlapSide(NamedTuple):
    """One side of an overlap: median seconds alone and beside the other; None: not measured."""

    alone_s: float | None
    beside_s: float | None

    @property
    def slowdown(self) -> float | None:
        return self.beside_s / self.alone_s if self.alone_s and self.beside_s else None


def sides(one: Reading) -> tuple[OverlapSide, OverlapSide]:
    """Return the compute and the collective side of an ``Overlap``; its times are the compute's."""
    names = ("compute_alone_s", "collective_alone_s", "collective_beside_s")
    metrics = (each(one.sample.metrics, name) for name in names)
    compute_s, alone_s, beside_s = (median(values) if values else None for values in metrics)
    return OverlapSide(compute_s, one.median_s), OverlapSide(alone_s, beside_s)


def overlaps(samples: Iterable[Sample]) -> list[Table]:
    """Show each side alone, beside the other, and the ratio."""
    found = []
    for one in readings(samples, Overlap):
        # a covered share below 1: the other work ended before some timed calls did
        covered = (each(one.sample.metrics, f"{it}_covered") for it in ("compute", "collective"))
        ended = any(values and median(values) < 1 for values in covered)
        alone, beside = (each(one.sample.metrics, f"{of}_mhz") for of in ("alone", "beside"))
        faster = beside[0] / alone[0] if alone and beside else None
        found.append((one.op, *sides(one), ended, faster))
    ratio = "{:.2f} x".format
    marked = ("* some timed calls ended alone: slowdowns are at least these.",)
    at_one_clock: Column = (
        "at one clock",
        lambda row: row[1].slowdown * row[4] if row[1].slowdown and row[4] else None,
        ratio,
    )
    clocks = any(row[4] for row in found)
    table = listed(
        "Compute beside collectives",
        found,
        ("compute", lambda row: label(Case(op=row[0].compute))),
        ("collective", lambda row: label(Case(op=row[0].collective))),
        ("compute:\nalone", lambda row: row[1].alone_s, format_seconds),
        ("beside", lambda row: row[1].beside_s, format_seconds),
        ("slowdown", lambda row: row[1].slowdown, ratio),
        *([at_one_clock] if clocks else []),
        ("collective:\nalone", lambda row: row[2].alone_s, format_seconds),
        ("beside", lambda row: row[2].beside_s, format_seconds),
        ("slowdown", lambda row: shown(row[2].slowdown, ratio) + " *" * row[3]),
        legend=(
            "Medians. slowdown = beside/alone, both measured in turns: 1.00 x would be overlap for "
            "nothing.",
            *marked * any(row[3] for row in found),
            *("at one clock: slowdown x SM clock beside/alone, so without the power cap's part.",)
            * clocks,
        ),
        left=2,
    )
    return filled(table)
