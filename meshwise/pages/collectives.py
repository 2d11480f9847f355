"""Tables of measured collectives: nccl-tests' columns, where the time goes, pairs.

``time``, ``algbw``, ``busbw``, ``count``, ``type``, ``redop`` and ``root`` as nccl-tests defines
them (doc/PERFORMANCE.md); ``time`` is the mean over iterations of the largest time over ranks.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import numpy as np

from meshwise.pages.spread import slowest, split
from meshwise.pages.table import Table
from meshwise.pages.tables import ABSENT
from meshwise.spec import DTYPE_BYTES, Case, Collective, RunInfo, Sample
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
    """The measured collectives of all samples, by kind, group, mode and dtype."""
    pairs = [(s.case.op, s) for s in samples if isinstance(s.case.op, Collective) and s.times_s]
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


def tables(samples: Sequence[Sample]) -> list[Table]:
    """Every table that the collectives among ``samples`` give."""
    found = series(samples)
    pairs = [one for one in found if _is_pair(one)]
    others = [one for one in found if not _is_pair(one)]
    shown = [_nccl_tests(one) for one in others]
    if others:
        shown[-1] = shown[-1]._replace(legend=_legend(others))
    parts = _parts(others)
    return shown + ([parts] if parts.rows else []) + pair_matrices(pairs)


def _is_pair(one: Series) -> bool:
    return one.op.kind == "send" and len(one.op.ranks) == 2


def _nccl_tests(one: Series) -> Table:
    reducing = one.op.kind in _REDUCING
    rows = tuple(_row(one, sample, reducing) for sample in one.samples)
    redop = ("redop",) if reducing else ()
    columns = (
        "size(B)", "count", "type", *redop, "root", "time(us)", "algbw", "busbw", "#wrong",
        "p50", "p95", "slowest rank",
    )  # fmt: skip
    return Table(f"{one.op.kind}, {one.group}, {one.mode}", columns, rows, left=0)


def _row(one: Series, sample: Sample, reducing: bool) -> tuple[str, ...]:
    op = sample.case.op
    assert isinstance(op, Collective)
    mean_s = float(np.mean(sample.times_s))
    p50_s, p95_s = np.quantile(sample.times_s, (0.5, 0.95))
    wrong = sample.metrics.get("wrong")
    count = op.size_bytes // one.itemsize // (op.group_size if op.kind in _PER_RANK else 1)
    return (
        str(op.size_bytes),
        ABSENT if op.splits else str(count),
        _NCCL_TYPES[op.dtype],
        *(("sum",) if reducing else ()),
        "0" if op.kind in ROOTED else "-1",
        _us(mean_s),
        f"{op.size_bytes / mean_s / 1e9:.2f}",
        f"{op.size_bytes * op.bus_factor / mean_s / 1e9:.2f}",
        f"{wrong:.0f}" if isinstance(wrong, float | int) else ABSENT,
        _us(float(p50_s)),
        _us(float(p95_s)),
        slowest(sample),
    )


def _us(time_s: float) -> str:
    time_us = 1e6 * time_s
    return f"{time_us:.{2 if time_us < 1e4 else 1 if time_us < 1e6 else 0}f}"


def _legend(found: Sequence[Series]) -> tuple[str, ...]:
    regimes = dict.fromkeys(one.case.regime for one in found)
    modes = "; ".join(f"{regime}: {REGIMES[regime]}" for regime in regimes)
    lines = [
        "time: mean over iterations of the largest over ranks, p50 and p95 its quantiles; algbw "
        "and busbw in GB/s of 1e9 bytes.",
        BUS_LEGEND,
        f"{modes[0].upper()}{modes[1:]}.",
    ]
    if any("wrong" in sample.metrics for one in found for sample in one.samples):
        lines.append("#wrong: elements of a checked call that differ from what they must be.")
    return tuple(lines)


def _parts(found: Sequence[Series]) -> Table:
    """Launch floor, transfer and waiting of every series that has the times of single ranks."""
    rows = []
    for one in found:
        smallest = split(one.samples[0])
        has_floor = smallest is not None and one.op.size_bytes <= _FLOOR_BYTES
        floor_s = smallest.transfer_s if smallest is not None and has_floor else None
        for sample in one.samples:
            op, times = sample.case.op, split(sample)
            if times is None or not isinstance(op, Collective):
                continue
            over_s = None if floor_s is None else max(0.0, times.transfer_s - floor_s)
            rows.append(
                (
                    op.kind,
                    one.group,
                    one.mode,
                    format_bytes(op.size_bytes),
                    *(ABSENT if value is None else _us(value) for value in (floor_s, over_s)),
                    _us(times.waiting_s),
                )
            )
    columns = ("collective", "group", "mode", "size", "floor(us)", "transfer(us)", "waiting(us)")
    legend = (
        "Medians over iterations. floor: the smallest time over ranks of the series' smallest "
        f"message, unless that is above {format_bytes(_FLOOR_BYTES)}; transfer: the smallest over "
        "ranks, less the floor; waiting for peers: the largest less the smallest over ranks.",
    )
    return Table("Where the time of collectives goes", columns, tuple(rows), legend, left=3)


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
    """From every rank to every other, one pair at a time; a table for each size and mode."""
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
