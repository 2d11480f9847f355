"""Tables of measured products, convolutions and attention, alone and beside a collective.

Samples in, tables out. Rates are FLOPs of the operation (``spec.op``) over the median time.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from meshwise.pages.metrics import each
from meshwise.pages.spread import slowest
from meshwise.pages.table import Table, filled
from meshwise.pages.tables import ABSENT, INTERVAL, percent, shown
from meshwise.spec import Attention, Case, Cluster, Convolution, Gemm, Overlap, Sample
from meshwise.spec.label import label, number_format, shape, variant
from meshwise.stats import median_interval
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
    by_mode: dict[str, list[tuple[Product, Sample]]] = {}
    for sample in samples:
        if isinstance(sample.case.op, kind):
            by_mode.setdefault(mode(sample.case), []).append((sample.case.op, sample))
    return [_products(name, found, cluster) for name, found in by_mode.items()]


def _products(name: str, found: Sequence[tuple[Product, Sample]], cluster: Cluster) -> Table:
    sustained = found[0][1].case.regime == "sustained"
    rows = tuple(_product(op, sample, cluster, sustained) for op, sample in found)
    spread = ("MHz (min)", "W (max)") if sustained else ("±", "slowest")
    title, way, words = WORDS[type(found[0][0])]
    columns = ("shape", "dtype", way, "median", "rate", "of peak", "bandwidth", "times")
    legend = [*_best(found, cluster)]
    legend.append(
        "MHz, W: medians over time of the slowest rank's clock and of the highest power."
        if sustained
        else f"±: half of the {INTERVAL}, relative."
    )
    legend.append(
        f"{words}; bandwidth: operands and result once, over the median; of peak: of the "
        "datasheet's dense rate for the dtype, where it is known."
    )
    return Table(f"{title}, {name}", (*columns, *spread), rows, tuple(legend), left=3)


def _product(op: Product, sample: Sample, cluster: Cluster, sustained: bool) -> tuple[str, ...]:
    middle_s, low_s, high_s = median_interval(sample.times_s)
    rate = op.flops / middle_s
    cells = (
        shape(op),
        number_format(op),
        variant(op),
        format_seconds(middle_s),
        format_rate(rate, "FLOP/s"),
        percent(_of_peak(rate, op, cluster)),
        format_rate(op.bytes / middle_s, "B/s"),
        str(len(sample.times_s)),
    )
    if not sustained:
        return (*cells, f"{100 * (high_s - low_s) / 2 / middle_s:.1f} %", slowest(sample))
    clocks_mhz, power_w = (sorted(each(sample.metrics, x)) for x in ("sm_clock_mhz", "power_w"))
    clock = f"{_middle(clocks_mhz):.0f} ({clocks_mhz[0]:.0f})" if clocks_mhz else ABSENT
    power = f"{_middle(power_w):.0f} ({power_w[-1]:.0f})" if power_w else ABSENT
    return (*cells, clock, power)


def _middle(values: Sequence[float]) -> float:
    return median_interval(values)[0]


def _of_peak(rate: float, op: Product, cluster: Cluster) -> float | None:
    peak = cluster.device.peak_flops.get(op.dtype)
    return rate / peak if peak else None


def _best(found: Sequence[tuple[Product, Sample]], cluster: Cluster) -> Iterable[str]:
    """A line a dtype: its fastest shape."""
    best: dict[str, tuple[float, Product]] = {}
    for op, sample in found:
        rate = op.flops / _middle(sample.times_s)
        if rate > best.get(number_format(op), (0.0, op))[0]:
            best[number_format(op)] = rate, op
    for name, (rate, op) in best.items():
        share = _of_peak(rate, op, cluster)
        of_peak = "" if share is None else f", {percent(share)} of peak"
        yield f"Best {name}: {shape(op)} {variant(op)}, {format_rate(rate, 'FLOP/s')}{of_peak}."


class Contest(NamedTuple):
    """One shape of attention in one mode: ``rates[back end][direction]`` in FLOP/s."""

    op: Attention
    mode: str
    samples: dict[str, dict[str, Sample]]
    exact: bool

    def rate(self, backend: str, direction: str) -> float | None:
        sample = self.samples[backend].get(direction)
        if sample is None:
            return None
        op = sample.case.op
        assert isinstance(op, Attention)
        flops = op.exact_flops if self.exact else op.flops
        return flops / median_interval(sample.times_s)[0]

    def fastest(self, direction: str) -> str | None:
        """The fastest back end that was asked for by name; None when fewer than two were."""
        rates = {name: self.rate(name, direction) for name in self.samples if name}
        known = {name: rate for name, rate in rates.items() if rate is not None}
        return max(known, key=lambda name: known[name]) if len(known) > 1 else None


def contests(samples: Iterable[Sample], *, exact: bool = False) -> list[Contest]:
    """Every shape and mode with the back ends that were measured on it."""
    found: dict[tuple[Attention, str], Contest] = {}
    for sample in samples:
        op = sample.case.op
        if isinstance(op, Attention) and sample.times_s:
            of_shape = msgspec.structs.replace(op, direction="forward")
            name = mode(sample.case, backend=False)
            contest = found.setdefault((of_shape, name), Contest(of_shape, name, {}, exact))
            contest.samples.setdefault(sample.case.backend, {})[op.direction] = sample
    return list(found.values())


def attention(samples: Iterable[Sample], *, exact: bool = False) -> list[Table]:
    """One table a mode: per shape the back ends under each other, the fastest named.

    ``exact`` counts the FLOPs of the pairs that the mask leaves.
    """
    by_mode: dict[str, list[tuple[str, ...]]] = {}
    for contest in contests(samples, exact=exact):
        by_mode.setdefault(contest.mode, []).extend(_contest(contest))
    columns = ("shape", "back end", "forward", "rate", "backward", "rate", "fastest")
    legend = (f"Times: medians. {CONVENTION[exact]}",)
    return [
        Table(f"Attention, {name}", columns, tuple(rows), legend, left=2)
        for name, rows in by_mode.items()
    ]


def _contest(contest: Contest) -> list[tuple[str, ...]]:
    directions = ("forward", "backward")
    winners = {direction: contest.fastest(direction) for direction in directions}
    rows: list[tuple[str, ...]] = []
    for backend, measured in contest.samples.items():
        cells = [shape(contest.op) if not rows else "", backend or DEFAULT]
        for direction in directions:
            rate = contest.rate(backend, direction)
            if rate is None:
                cells += [ABSENT] * 2
                continue
            time_s = median_interval(measured[direction].times_s)[0]
            cells += [format_seconds(time_s), format_rate(rate, "FLOP/s")]
        won = [direction for direction in directions if winners[direction] == backend]
        rows.append((*cells, "both" if len(won) == 2 else "".join(won)))
    return rows


_COVERED = ("compute_covered", "collective_covered")


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


def slowdown(sample: Sample) -> Slowdown:
    """Read a sample of ``Overlap``: its times are the compute's beside collectives."""

    def metric(name: str) -> float | None:
        values = each(sample.metrics, name)
        return _middle(values) if values else None

    return Slowdown(
        metric("compute_alone_s"),
        _middle(sample.times_s),
        metric("collective_alone_s"),
        metric("collective_beside_s"),
        any(covered is not None and covered < 1 for covered in map(metric, _COVERED)),
    )


def overlaps(samples: Iterable[Sample]) -> list[Table]:
    """Each side alone, beside the other, and the ratio."""
    rows, alone = [], False
    for sample in samples:
        op = sample.case.op
        if isinstance(op, Overlap):
            sides = (label(Case(op=side)) for side in (op.compute, op.collective))
            times = slowdown(sample)
            compute = _side(times.compute_alone_s, times.compute_beside_s, times.of_compute)
            collective = _side(
                times.collective_alone_s, times.collective_beside_s, times.of_collective
            )
            alone |= times.ended_alone
            mark = " *" if times.ended_alone else ""
            rows.append((*sides, *compute, *collective[:2], collective[2] + mark))
    columns = (
        "compute", "collective",
        "compute:\nalone", "beside", "slowdown", "collective:\nalone", "beside", "slowdown",
    )  # fmt: skip
    legend = (
        "Medians. slowdown = beside/alone, both measured in turns: 1.00 x would be overlap for "
        "nothing.",
        *(("* some timed calls ended alone: slowdowns are at least these.",) * alone),
    )
    return filled(Table("Compute beside collectives", columns, tuple(rows), legend, left=2))


def _side(alone_s: float | None, beside_s: float | None, ratio: float | None) -> tuple[str, ...]:
    times = (shown(time_s, format_seconds) for time_s in (alone_s, beside_s))
    return (*times, shown(ratio, "{:.2f} x".format))
