"""Tables of measured products, convolutions and attention, alone and beside a collective.

Samples in, tables out. Rates are FLOPs of the operation (``spec.op``) over the median time.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from meshwise.pages.spread import Reading, each, readings
from meshwise.pages.table import Column, Table, filled, flops, grouped, listed, percent, shown
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
    """Name what sets rows of one shape apart: ``cold``, or ``warm, compiled, triton``."""
    compiled = "compiled" if case.lowering == "compiled" else ""
    return ", ".join(filter(None, (case.regime, compiled, case.backend if backend else "")))


def products(
    samples: Iterable[Sample], cluster: Cluster, kind: type[Product] = Gemm
) -> list[Table]:
    """Make a table for each mode, in the order measured; its legend names each dtype's best."""
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
    """One shape of attention in one mode: ``readings[back end][direction]``."""

    op: Attention
    mode: str
    readings: dict[str, dict[str, Reading]]
    exact: bool

    def time_s(self, backend: str, direction: str) -> float | None:
        one = self.readings[backend].get(direction)
        return one and one.median_s

    def rate(self, backend: str, direction: str) -> float | None:
        one = self.readings[backend].get(direction)
        return one and (one.op.exact_flops if self.exact else one.op.flops) / one.median_s

    def fastest(self, direction: str) -> str | None:
        """Return the fastest back end asked for by name; None if fewer than two were."""
        rates = {name: self.rate(name, direction) or 0.0 for name in self.readings if name}
        known = [name for name, rate in rates.items() if rate]
        return max(known, key=rates.__getitem__) if len(known) > 1 else None


def contests(samples: Iterable[Sample], *, exact: bool = False) -> list[Contest]:
    """Return every shape and mode with the back ends that were measured on it.

    ``exact`` counts the FLOPs of the pairs that the mask leaves.
    """
    found: dict[tuple[Attention, str], Contest] = {}
    for one in readings(samples, Attention):
        of_shape = msgspec.structs.replace(one.op, direction="forward")
        name = mode(one.case, backend=False)
        contest = found.setdefault((of_shape, name), Contest(of_shape, name, {}, exact))
        contest.readings.setdefault(one.case.backend, {})[one.op.direction] = one
    return list(found.values())


def attention(samples: Iterable[Sample], *, exact: bool = False) -> list[Table]:
    """Make a table for each mode: the back ends of a shape under each other, the fastest named."""
    found = contests(samples, exact=exact)
    return [
        listed(
            f"Attention, {name}",
            [(c, backend) for c in found if c.mode == name for backend in c.readings],
            (
                "shape",
                lambda row: shape(row[0].op) if row[1] == next(iter(row[0].readings)) else "",
            ),
            ("back end", lambda row: row[1] or DEFAULT),
            ("forward", lambda row: row[0].time_s(row[1], "forward"), format_seconds),
            ("rate", lambda row: row[0].rate(row[1], "forward"), flops),
            ("backward", lambda row: row[0].time_s(row[1], "backward"), format_seconds),
            ("rate", lambda row: row[0].rate(row[1], "backward"), flops),
            ("fastest", lambda row: _won(*row)),
            legend=(f"Times: medians. {CONVENTION[exact]}",),
            left=2,
        )
        for name in dict.fromkeys(contest.mode for contest in found)
    ]


def _won(contest: Contest, backend: str) -> str:
    won = [way for way in ("forward", "backward") if contest.fastest(way) == backend]
    return "both" if len(won) == 2 else "".join(won)


class Slowdown(NamedTuple):
    """Seconds of each side of an overlap, alone and beside the other; None if not measured.

    ``ended_alone``: the other work ended before some timed calls did.
    """

    op: Overlap
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
        one.op,
        metric("compute_alone_s"),
        one.median_s,
        metric("collective_alone_s"),
        metric("collective_beside_s"),
        any(share is not None and share < 1 for share in covered),
    )


def overlaps(samples: Iterable[Sample]) -> list[Table]:
    """Show each side alone, beside the other, and the ratio."""
    found = [slowdown(one) for one in readings(samples, Overlap)]
    ratio = "{:.2f} x".format
    marked = ("* some timed calls ended alone: slowdowns are at least these.",)
    table = listed(
        "Compute beside collectives",
        found,
        ("compute", lambda row: label(Case(op=row.op.compute))),
        ("collective", lambda row: label(Case(op=row.op.collective))),
        ("compute:\nalone", "compute_alone_s", format_seconds),
        ("beside", "compute_beside_s", format_seconds),
        ("slowdown", "of_compute", ratio),
        ("collective:\nalone", "collective_alone_s", format_seconds),
        ("beside", "collective_beside_s", format_seconds),
        ("slowdown", lambda row: shown(row.of_collective, ratio) + " *" * row.ended_alone),
        legend=(
            "Medians. slowdown = beside/alone, both measured in turns: 1.00 x would be overlap for "
            "nothing.",
            *(marked if any(row.ended_alone for row in found) else ()),
        ),
        left=2,
    )
    return filled(table)
