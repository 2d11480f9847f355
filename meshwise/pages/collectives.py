"""Tables of measured collectives: nccl-tests' columns, where the time goes, pairs.

``time``, ``algbw``, ``busbw``, ``count``, ``type``, ``redop`` and ``root`` as nccl-tests defines
them (doc/PERFORMANCE.md); ``time`` is the mean over iterations of the largest time over ranks, or
what an imported file's time is.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import numpy as np

from meshwise.pages.spread import slowest, split
from meshwise.pages.table import Table
from meshwise.pages.tables import ABSENT
from meshwise.spec import DTYPE_BYTES, Case, Collective, RunInfo, Sample
from meshwise.spec.label import uneven
from meshwise.spec.op import ROOTED
from meshwise.stats import median_interval
from meshwise.units import format_bytes

BUS_LEGEND = (
    "algbw = size/time. busbw = algbw x what each rank must send: 2(n-1)/n for all_reduce, (n-1)/n "
    "for all_gather, reduce_scatter, all_to_all, gather and scatter, 1 for broadcast, reduce and "
    "sends, so that it compares with a link. For all_to_all_v size is the most that one rank sends "
    "or receives, and busbw the most that it sends to or receives from others, over time."
)
REGIMES = {
    "warm": "each call timed by itself, on the same buffers",
    "cold": "each call timed by itself, its buffers not in the cache",
    "graph": "one call of many in a replayed CUDA graph",
    "blocking": "the host waits for each call, on its own clock",
    "pipelined": "one call of many in a row",
    "sustained": "one call of many in a row, for seconds",
}
_NCCL_TYPES = {
    "fp64": "double",
    "fp32": "float",
    "tf32": "float",
    "bf16": "bfloat16",
    "fp16": "half",
    "fp8": "f8e4m3",
}
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_PER_RANK = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_FLOOR_BYTES = 64 * 2**10  # a larger smallest message has no launch floor to speak of


class Series(NamedTuple):
    """Samples of one collective that differ in size only, the smallest first."""

    op: Collective
    case: Case
    samples: tuple[Sample, ...]

    @property
    def group(self) -> str:
        op, at_once = self.op, self.case.world_size // self.op.group_size
        if op.ranks:
            return f"ranks {', '.join(map(str, op.ranks))} alone"
        apart = f" {op.group_stride} apart" if op.group_stride > 1 else ""
        return (f"{at_once} groups of " if at_once > 1 else "") + f"{op.group_size} ranks{apart}"

    @property
    def mode(self) -> str:
        place = "in place" if self.op.in_place else ""
        return ", ".join(filter(None, (self.case.regime, self.case.backend, place)))

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.op.dtype]


def series(samples: Iterable[Sample]) -> list[Series]:
    """The measured collectives of all samples, by kind, group, mode and dtype. A group of one rank
    moves nothing, so it is left out."""
    pairs = [(s.case.op, s) for s in samples if isinstance(s.case.op, Collective) and s.times_s]
    pairs = [(op, sample) for op, sample in pairs if op.group_size > 1]
    pairs.sort(key=lambda pair: (_series_key(*pair), pair[0].size_bytes))
    found = []
    for _, same in groupby(pairs, key=lambda pair: _series_key(*pair)):
        members = tuple(same)
        op, first = members[0]
        found.append(Series(op, first.case, tuple(sample for _, sample in members)))
    return found


def _series_key(op: Collective, sample: Sample) -> tuple[Any, ...]:
    case = sample.case
    group = (op.kind, op.group_size, op.group_stride, op.ranks, case.world_size)
    return (*group, case.regime, case.backend, op.in_place, op.dtype)


def are_fsdp_units(info: RunInfo) -> bool:
    """Whether the collectives of a run are FSDP's units: nothing else tells them apart."""
    return "-measure-fsdp" in info.run_id


def tables(samples: Sequence[Sample], info: RunInfo | None = None) -> list[Table]:
    """Every table that the collectives among ``samples`` give. ``info`` says what the times of an
    imported run are."""
    found = series(samples)
    pairs = [one for one in found if _is_pair(one)]
    others = [one for one in found if not _is_pair(one)]
    shown = [_nccl_tests(one) for one in others]
    if others:
        last = shown[-1]
        shown[-1] = last._replace(legend=(*last.legend, *_legend(others, info)))
    parts = _parts(others)
    return shown + ([parts] if parts.rows else []) + pair_matrices(pairs)


def _is_pair(one: Series) -> bool:
    return one.op.kind == "send" and len(one.op.ranks) == 2


def _nccl_tests(one: Series) -> Table:
    reducing = one.op.kind in _REDUCING
    rows = tuple(_row(one, sample, reducing) for sample in one.samples)
    count = "of a rank(B)" if one.op.splits else "count"
    redop = ("redop",) if reducing else ()
    root = () if one.op.splits else ("root",)
    columns = (
        "size(B)", count, "type", *redop, *root, "time(us)", "algbw", "busbw", "#wrong",
        "p50(us)", "p95(us)", "slowest rank",
    )  # fmt: skip
    average = np.mean([_busbw(sample) for sample in one.samples]) / 1e9
    legend = (f"# Avg bus bandwidth    : {average:g}",)
    return Table(f"{one.op.kind}, {one.group}, {one.mode}", columns, rows, legend, left=0)


def _busbw(sample: Sample) -> float:
    """Bytes per second, by the mean time."""
    op = sample.case.op
    assert isinstance(op, Collective)
    return op.size_bytes * op.bus_factor / float(np.mean(sample.times_s))


def _row(one: Series, sample: Sample, reducing: bool) -> tuple[str, ...]:
    op = sample.case.op
    assert isinstance(op, Collective)
    mean_s = float(np.mean(sample.times_s))
    quantiles_s = np.quantile(sample.times_s, (0.5, 0.95))
    wrong = sample.metrics.get("wrong")
    count = op.size_bytes // one.itemsize // (op.group_size if op.kind in _PER_RANK else 1)
    return (
        str(op.size_bytes),
        uneven(op) or str(count),
        _NCCL_TYPES[op.dtype],
        *(("sum",) if reducing else ()),
        *(() if op.splits else ("0" if op.kind in ROOTED else "-1",)),
        _us(mean_s),
        f"{op.size_bytes / mean_s / 1e9:.2f}",
        f"{_busbw(sample) / 1e9:.2f}",
        f"{wrong:.0f}" if isinstance(wrong, float | int) else ABSENT,
        *(_us(float(q)) if len(sample.times_s) > 1 else ABSENT for q in quantiles_s),
        slowest(sample),
    )


def _us(time_s: float) -> str:
    time_us = 1e6 * time_s
    return f"{time_us:.{2 if time_us < 1e4 else 1 if time_us < 1e6 else 0}f}"


def _legend(found: Sequence[Series], info: RunInfo | None) -> tuple[str, ...]:
    regimes = dict.fromkeys(one.case.regime for one in found)
    modes = "; ".join(f"{regime}: {REGIMES[regime]}" for regime in regimes)
    imported = info.provenance.get("imported") if info is not None else None
    times = (
        f"time, as {imported['tool']} gives it: {imported['time_kind']}; p50, p95 of several times"
        if imported
        else "time: mean over iterations of the largest over ranks, p50 and p95 its quantiles"
    )
    lines = [
        f"{times}; algbw and busbw in GB/s of 1e9 bytes.",
        "Avg bus bandwidth: plain mean over the rows, as nccl-tests prints it; it depends on which "
        "sizes were chosen.",
        BUS_LEGEND,
        f"{modes[0].upper()}{modes[1:]}.",
    ]
    if any(one.op.splits for one in found):
        lines.append(
            "of a rank: the least and the most that one sends or, where all send as much, "
            "receives, what it keeps included."
        )
    if any("wrong" in sample.metrics for one in found for sample in one.samples):
        lines.append(
            "#wrong: elements of a checked call that differ from what they must be; any at "
            "all makes the case an error."
        )
    return tuple(lines)


def _parts(found: Sequence[Series]) -> Table:
    """Launch floor, transfer and waiting of every series that has the times of single ranks."""
    rows, grouped = [], False
    for one in found:
        parts = [(s.case.op, times) for s in one.samples if (times := split(s)) is not None]
        has_floor = parts and one.op.size_bytes <= _FLOOR_BYTES
        floor_s = min(times.transfer_s for _, times in parts) if has_floor else None
        for op, times in parts:
            assert isinstance(op, Collective)
            transfer_s = times.transfer_s - (floor_s or 0.0)
            shown_s = (floor_s, transfer_s, times.waiting_s, times.other_groups_s)
            cells = (ABSENT if part_s is None else _us(part_s) for part_s in shown_s)
            kind = f"{op.kind} {uneven(op)}".strip()
            rows.append((kind, one.group, one.mode, str(op.size_bytes), *cells))
            grouped |= times.other_groups_s is not None
    others = ("other\ngroups(us)",) * grouped
    columns = (
        "collective", "group", "mode", "size(B)",
        "floor(us)", "transfer(us)", "waiting(us)", *others,
    )  # fmt: skip
    legend = [
        "The parts of a row add up to its p50. floor + transfer: median over iterations of the "
        "smallest time over ranks, which the rank that comes last needs; floor: the least of that "
        "in the series, if it has a message of at most "
        f"{format_bytes(_FLOOR_BYTES)}, else transfer holds it; waiting for peers: the rest.",
    ]
    if grouped:
        legend.append(
            "Of several groups at once: floor and transfer are the fastest group's, waiting that "
            "within the slowest, other groups by how much its transfer is the longer."
        )
    shown = tuple(row[: len(columns)] for row in rows)
    return Table("Where the time of collectives goes", columns, shown, tuple(legend), left=3)


def pair_rates(found: Sequence[Series]) -> dict[tuple[str, int], dict[tuple[int, int], float]]:
    """(mode, size) -> (from, to) -> bytes per second by the median time."""
    rates: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    for one in found:
        for sample in one.samples:
            op = sample.case.op
            if isinstance(op, Collective) and _is_pair(one):
                first, last = op.ranks
                of_size = rates.setdefault((one.mode, op.size_bytes), {})
                of_size[first, last] = op.size_bytes / median_interval(sample.times_s)[0]
    return rates


def pair_matrices(found: Sequence[Series]) -> list[Table]:
    """Rates from every rank to every other, one pair at a time; a table for each size and mode."""
    return [_matrix(*key, rates) for key, rates in pair_rates(found).items()]


def _matrix(mode: str, size_bytes: int, rates: dict[tuple[int, int], float]) -> Table:
    ranks = sorted({rank for pair in rates for rank in pair})

    def cell(pair: tuple[int, int]) -> str:
        return f"{rates[pair] / 1e9:.1f}" if pair in rates else ABSENT

    rows = tuple((f"{a}", *(cell((a, b)) for b in ranks)) for a in ranks)
    title = f"Sends of {format_bytes(size_bytes)} between pairs of ranks, {mode}: GB/s"
    legend = ("From the rank of the row to that of the column, no other pair at work; medians.",)
    return Table(title, ("from, to", *map(str, ranks)), rows, legend)


class Unit(NamedTuple):
    """One message of FSDP: what a rank holds of a unit, gathered and reduced."""

    elements_per_rank: int
    group: str
    mode: str
    gather: Sample | None
    reduce: Sample | None


def fsdp_units(found: Sequence[Series]) -> list[Unit]:
    """All-gathers and reduce-scatters of the same elements of the same group, side by side."""
    sides: dict[tuple[str, str, int], tuple[list[Sample], list[Sample]]] = {}
    for one in found:
        if one.op.kind not in ("all_gather", "reduce_scatter"):
            continue
        for sample in one.samples:
            assert isinstance(sample.case.op, Collective)
            elements = sample.case.op.size_bytes // one.itemsize // one.op.group_size
            gathers, reduces = sides.setdefault((one.group, one.mode, elements), ([], []))
            (gathers if one.op.kind == "all_gather" else reduces).append(sample)
    return [
        Unit(elements, group, mode, gather, reduce)
        for (group, mode, elements), (gathers, reduces) in sorted(sides.items())
        for gather, reduce in zip_longest(gathers, reduces)
    ]
