"""Tables of measured products, convolutions and attention, alone and beside a collective.

Samples in, tables out. Rates are FLOPs of the operation (``spec.op``) over the median time.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from meshwise.pages.spread import Reading, each, readings
from meshwise.pages.table import (
    ABSENT,
    Column,
    Table,
    columns,
    filled,
    flops,
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
    """``cold``, ``warm, compiled, triton``: what sets rows apart that have the same shape."""
    compiled = "compiled" if case.lowering == "compiled" else ""
    return ", ".join(filter(None, (case.regime, compiled, case.backend if backend else "")))


def products(
    samples: Iterable[Sample], cluster: Cluster, kind: type[Product] = Gemm
) -> list[Table]:
    """One table a mode, in the order measured; the best shape of each dtype below it."""
    by_mode: dict[str, list[Reading]] = {}
    for one in readings(samples, kind):
        by_mode.setdefault(mode(one.case), []).append(one)
    return [_products(name, found, cluster) for name, found in by_mode.items()]


def _products(name: str, found: Sequence[Reading], cluster: Cluster) -> Table:
    def of_peak(one: Reading) -> float | None:
        peak = cluster.device.peak_flops.get(one.op.dtype)
        return one.flops_per_s / peak if peak else None

    best = []
    for dtype in dict.fromkeys(number_format(one.op) for one in found):
        same = (one for one in found if number_format(one.op) == dtype)
        one = max(same, key=lambda one: one.flops_per_s)
        of = "" if of_peak(one) is None else f", {percent(of_peak(one))} of peak"
        named = f"{shape(one.op)} {variant(one.op)}"
        best.append(f"Best {dtype}: {named}, {flops(one.flops_per_s)}{of}.")
    noted = f"±: half of the {INTERVAL}, relative."
    last: tuple[Column, ...] = (("±", _half_interval), ("slowest", lambda one: one.slowest))
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
        *columns(format_seconds, {"median": "median_s"}),
        *columns(flops, {"rate": "flops_per_s"}),
        *columns(percent, {"of peak": of_peak}),
        ("bandwidth", lambda one: format_rate(one.bytes_per_s, "B/s")),
        ("times", lambda one: str(len(one.sample.times_s))),
        *last,
        legend=(
            *best,
            noted,
            f"{words}; bandwidth: operands and result once, over the median; of peak: of the "
            "datasheet's dense rate for the dtype, where it is known.",
        ),
        left=3,
    )


def _half_interval(one: Reading) -> str:
    return f"{100 * (one.high_s - one.low_s) / 2 / one.median_s:.1f} %"


def _over_time(metric: str, end: Callable[[Sequence[float]], float]) -> Callable[[Reading], str]:
    """Show the median of a metric, and in brackets its least or largest value."""

    def show(one: Reading) -> str:
        values = each(one.sample.metrics, metric)
        return f"{median(values):.0f} ({end(values):.0f})" if values else ABSENT

    return show


class Contest(NamedTuple):
    """One shape of attention in one mode: ``rates[back end][direction]`` in FLOP/s."""

    op: Attention
    mode: str
    readings: dict[str, dict[str, Reading]]
    exact: bool

    def rate(self, backend: str, direction: str) -> float | None:
        one = self.readings[backend].get(direction)
        if one is None:
            return None
        return one.op.exact_flops / one.median_s if self.exact else one.flops_per_s

    def fastest(self, direction: str) -> str | None:
        """The fastest back end that was asked for by name; None when fewer than two were."""
        rates = {name: self.rate(name, direction) for name in self.readings if name}
        known = {name: rate for name, rate in rates.items() if rate is not None}
        return max(known, key=lambda name: known[name]) if len(known) > 1 else None


def contests(samples: Iterable[Sample], *, exact: bool = False) -> list[Contest]:
    """Every shape and mode with the back ends that were measured on it."""
    found: dict[tuple[Attention, str], Contest] = {}
    for one in readings(samples, Attention):
        of_shape = msgspec.structs.replace(one.op, direction="forward")
        name = mode(one.case, backend=False)
        contest = found.setdefault((of_shape, name), Contest(of_shape, name, {}, exact))
        contest.readings.setdefault(one.case.backend, {})[one.op.direction] = one
    return list(found.values())


def attention(samples: Iterable[Sample], *, exact: bool = False) -> list[Table]:
    """One table a mode: per shape the back ends under each other, the fastest named.

    ``exact`` counts the FLOPs of the pairs that the mask leaves.
    """
    by_mode: dict[str, list[tuple[str, ...]]] = {}
    for contest in contests(samples, exact=exact):
        by_mode.setdefault(contest.mode, []).extend(_contest(contest))
    heads = ("shape", "back end", "forward", "rate", "backward", "rate", "fastest")
    legend = (f"Times: medians. {CONVENTION[exact]}",)
    return [
        Table(f"Attention, {name}", heads, tuple(rows), legend, left=2)
        for name, rows in by_mode.items()
    ]


def _contest(contest: Contest) -> list[tuple[str, ...]]:
    winners = {direction: contest.fastest(direction) for direction in ("forward", "backward")}
    rows: list[tuple[str, ...]] = []
    for backend, measured in contest.readings.items():
        cells = [shape(contest.op) if not rows else "", backend or DEFAULT]
        for direction in winners:
            rate = contest.rate(backend, direction)
            time_s = None if rate is None else measured[direction].median_s
            cells += [shown(time_s, format_seconds), shown(rate, flops)]
        won = [direction for direction, winner in winners.items() if winner == backend]
        rows.append((*cells, "both" if len(won) == 2 else "".join(won)))
    return rows


class Slowdown(NamedTuple):
    """Seconds of each side of an overlap, alone and beside the other; None if not measured.

    ``ended_alone``: the other work ended before some timed calls did.
    """

    compute_alone_s: float | None
    compute_beside_s: float
    collective_alone_s: float | None
    collective_beside_s: float | None
    ended_alone: bool

    @property
    def of_compute(self) -> float | None:
        return self.compute_beside_s / self.compute_alone_s if self.compute_alone_s else None

    @property
    def of_collective(self) -> float | None:
        if not self.collective_alone_s or not self.collective_beside_s:
            return None
        return self.collective_beside_s / self.collective_alone_s


def slowdown(one: Reading) -> Slowdown:
    """Read a sample of ``Overlap``: its times are the compute's beside collectives."""

    def metric(name: str) -> float | None:
        values = each(one.sample.metrics, name)
        return median(values) if values else None

    covered = map(metric, ("compute_covered", "collective_covered"))
    return Slowdown(
        metric("compute_alone_s"),
        one.median_s,
        metric("collective_alone_s"),
        metric("collective_beside_s"),
        any(share is not None and share < 1 for share in covered),
    )


def overlaps(samples: Iterable[Sample]) -> list[Table]:
    """Each side alone, beside the other, and the ratio."""
    found = [(one.op, slowdown(one)) for one in readings(samples, Overlap)]
    ratio = "{:.2f} x".format
    marked = ("* some timed calls ended alone: slowdowns are at least these.",)
    table = listed(
        "Compute beside collectives",
        found,
        ("compute", lambda row: label(Case(op=row[0].compute))),
        ("collective", lambda row: label(Case(op=row[0].collective))),
        *columns(format_seconds, {"compute:\nalone": lambda row: row[1].compute_alone_s}),
        *columns(format_seconds, {"beside": lambda row: row[1].compute_beside_s}),
        *columns(ratio, {"slowdown": lambda row: row[1].of_compute}),
        *columns(format_seconds, {"collective:\nalone": lambda row: row[1].collective_alone_s}),
        *columns(format_seconds, {"beside": lambda row: row[1].collective_beside_s}),
        (
            "slowdown",
            lambda row: shown(row[1].of_collective, "{:.2f} x".format) + " *" * row[1].ended_alone,
        ),
        legend=(
            "Medians. slowdown = beside/alone, both measured in turns: 1.00 x would be overlap for "
            "nothing.",
            *(marked if any(times.ended_alone for _, times in found) else ()),
        ),
        left=2,
    )
    return filled(table)
