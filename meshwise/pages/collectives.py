"""Tables of measured collectives: nccl-tests' columns, where the time goes, pairs, FSDP's units.

``time``, ``algbw``, ``busbw``, ``count``, ``type``, ``redop`` and ``root`` have nccl-tests'
meanings (doc/PERFORMANCE.md). ``time`` is the mean over iterations of the largest time over ranks;
in an imported file it is the time that the file gives.
"""

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from meshwise.models.fsdp import nccl_tests_command
from meshwise.pages import outliers
from meshwise.pages.spread import Reading, number, reading, readings, split
from meshwise.pages.table import ABSENT, Column, Table, filled, grouped, listed
from meshwise.spec import DTYPE_BYTES, Case, Collective, Derived, RunInfo, Sample
from meshwise.spec.label import uneven
from meshwise.spec.op import ROOTED, WHOLE_NUMBERS
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
    **{name: name for name in WHOLE_NUMBERS},
}
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_PER_RANK = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_FSDP = ("all_gather", "reduce_scatter", "all_reduce")  # in this order
ODD_LINK = 0.15  # more time than the other pairs, as `measure health` judges
_FLOOR_BYTES = 64 * 2**10  # if the smallest message is larger, it does not show the launch floor


class Series(NamedTuple):
    """Readings of one collective that differ in size only, the smallest first."""

    op: Collective
    case: Case
    readings: tuple[Reading, ...]

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
        redop = "" if self.op.redop == "sum" else self.op.redop
        root = f"root {self.op.root}" if self.op.root else ""
        return ", ".join(filter(None, (self.case.regime, self.case.backend, place, redop, root)))

    @property
    def is_pair(self) -> bool:
        return self.op.kind == "send" and len(self.op.ranks) == 2


def series(samples: Iterable[Sample]) -> list[Series]:
    """Return the measured collectives by kind, group, mode and dtype. Groups of one rank are left
    out: they move nothing."""

    def alike(one: Reading) -> tuple[Any, ...]:
        op, case = one.op, one.case
        group = (op.kind, op.group_size, op.group_stride, op.ranks, case.world_size)
        return (*group, case.regime, case.backend, op.in_place, op.dtype, op.redop, op.root)

    found = [one for one in readings(samples, Collective) if one.op.group_size > 1]
    found.sort(key=lambda one: (alike(one), one.op.size_bytes))
    same = grouped(found, alike).values()
    return [Series(each[0].op, each[0].case, tuple(each)) for each in same]


def are_fsdp_units(info: RunInfo) -> bool:
    """Return whether a run's collectives are FSDP's units. Only the run's name tells."""
    return "-measure-fsdp" in info.run_id


def tables(samples: Sequence[Sample], info: RunInfo | None = None) -> list[Table]:
    """Make every table of the collectives among ``samples``. ``info``: of an imported run it says
    what the times mean."""
    found = series(samples)
    others = [one for one in found if not one.is_pair]
    shown = [_nccl_tests(one) for one in others]
    if others:
        last = shown[-1]
        shown[-1] = last._replace(legend=(*last.legend, *_legend(others, info)))
    return [*shown, *filled(_parts(others)), *pair_matrices(found)]


def _nccl_tests(one: Series) -> Table:
    average = np.mean([each.busbw for each in one.readings]) / 1e9
    op = one.op
    redop: tuple[Column, ...] = (
        (("redop", lambda each: each.op.redop),) if op.kind in _REDUCING else ()
    )
    root: tuple[Column, ...] = (
        ("root", lambda each: each.op.root if each.op.kind in ROOTED else -1),
    )
    return listed(
        f"{op.kind}, {one.group}, {one.mode}",
        one.readings,
        ("size(B)", "op.size_bytes"),
        ("of a rank(B)" if op.splits else "count", _count),
        ("type", lambda each: _NCCL_TYPES[each.op.dtype]),
        *redop,
        *(() if op.splits else root),
        ("time(us)", "mean_s", _us),
        ("algbw", lambda each: f"{each.algbw / 1e9:.2f}"),
        ("busbw", lambda each: f"{each.busbw / 1e9:.2f}"),
        ("#wrong", lambda each: number(each.sample.metrics, "wrong"), "{:.0f}".format),
        ("p50(us)", lambda each: _quantile(each, 0.5), _us),
        ("p95(us)", lambda each: _quantile(each, 0.95), _us),
        ("slowest rank", "slowest"),
        legend=(f"# Avg bus bandwidth    : {average:g}",),
        left=0,
    )


def _count(one: Reading) -> str:
    ranks = one.op.group_size if one.op.kind in _PER_RANK else 1
    return uneven(one.op) or str(one.op.size_bytes // DTYPE_BYTES[one.op.dtype] // ranks)


def _quantile(one: Reading, share: float) -> float | None:
    ordered = sorted(one.sample.times_s)
    at = share * (len(ordered) - 1)
    low, high = ordered[int(at)], ordered[ceil(at)]
    return low + at % 1 * (high - low) if len(ordered) > 1 else None


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
    if any("wrong" in each.sample.metrics for one in found for each in one.readings):
        lines.append(
            "#wrong: elements of a checked call that differ from what they must be; any at "
            "all makes the case an error."
        )
    return tuple(lines)


def _parts(found: Sequence[Series]) -> Table:
    """Show launch floor, transfer and waiting of every series that has each rank's times."""
    rows = []
    for one in found:
        parts = [(s.op, times) for s in one.readings if (times := split(s.sample)) is not None]
        has_floor = parts and one.op.size_bytes <= _FLOOR_BYTES
        floor_s = min(times.transfer_s for _, times in parts) if has_floor else None
        rows += [(one, op, floor_s, times) for op, times in parts]
    others: tuple[Column, ...] = ()
    legend: tuple[str, ...] = (
        "The parts of a row add up to its p50. floor + transfer: median over iterations of the "
        "smallest time over ranks, which the rank that comes last needs; floor: the least of that "
        "in the series, if it has a message of at most "
        f"{format_bytes(_FLOOR_BYTES)}, else transfer holds it; waiting for peers: the rest.",
    )
    if any(times.other_groups_s is not None for *_, times in rows):
        others = (("other\ngroups(us)", lambda row: row[3].other_groups_s, _us),)
        legend += (
            "Of several groups at once: floor and transfer are the fastest group's, waiting that "
            "within the slowest, other groups by how much its transfer is the longer.",
        )
    return listed(
        "Where the time of collectives goes",
        rows,
        ("collective", lambda row: f"{row[1].kind} {uneven(row[1])}".strip()),
        ("group", lambda row: row[0].group),
        ("mode", lambda row: row[0].mode),
        ("size(B)", lambda row: row[1].size_bytes),
        ("floor(us)", lambda row: row[2], _us),
        ("transfer(us)", lambda row: row[3].transfer_s - (row[2] or 0.0), _us),
        ("waiting(us)", lambda row: row[3].waiting_s, _us),
        *others,
        legend=legend,
        left=3,
    )


def pair_rates(found: Sequence[Series]) -> dict[tuple[str, int], dict[tuple[int, int], float]]:
    """Return bytes per second at the median time: (mode, size) -> (from, to) -> rate."""
    rates: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    for one in filter(lambda one: one.is_pair, found):
        for each in one.readings:
            of_size = rates.setdefault((one.mode, each.op.size_bytes), {})
            of_size[each.op.ranks] = each.op.size_bytes / each.median_s
    return rates


def sends(samples: Iterable[Sample]) -> list[Series]:
    """Return the messages between pairs."""
    return series(
        one for one in samples if isinstance(one.case.op, Collective) and one.case.op.kind == "send"
    )


def odd_pairs(found: Sequence[Series]) -> dict[tuple[int, ...], float]:
    """Return the pairs that are slower than the others of their size, and by which share."""
    times: dict[int, dict[tuple[int, ...], tuple[float, ...]]] = {}
    for one in found:
        for each in one.readings if one.is_pair else ():
            times.setdefault(each.op.size_bytes, {})[each.op.ranks] = each.sample.times_s
    largest = times[max(times)] if times else {}
    if len(largest) < 3:
        return {}
    return {pair: one.excess for pair, one in outliers.than_peers(largest, ODD_LINK).items()}


def pair_matrices(found: Sequence[Series]) -> list[Table]:
    """Show rates between pairs of ranks, one pair at a time; a table for each size and mode."""
    tables = []
    for (mode, size_bytes), rates in pair_rates(found).items():
        ranks = sorted({rank for pair in rates for rank in pair})
        rows = tuple(
            (str(a), *(f"{rates[a, b] / 1e9:.1f}" if (a, b) in rates else ABSENT for b in ranks))
            for a in ranks
        )
        title = f"Sends of {format_bytes(size_bytes)} between pairs of ranks, {mode}: GB/s"
        way = ("From the rank of the row to that of the column, no other pair at work; medians.",)
        tables.append(Table(title, ("from, to", *map(str, ranks)), rows, way))
    return tables


class UnitMessage(NamedTuple):
    """A message of FSDP units of equal size.

    ``arrangement``: model, number of ranks that share a unit (also the stride of a part's
    replicas), number of ranks. ``status``: the sample's. ``read``: its figures, if it has times.
    """

    arrangement: tuple[str, int, int]
    elements_per_rank: int
    units: str
    op: Collective
    regime: str
    status: str | None
    read: Reading | None


def _unit_message(model: str, units: str, case: Case, sample: Sample | None) -> UnitMessage:
    op = case.op
    assert isinstance(op, Collective)
    parts, shard = op.group_size, op.group_size
    if op.kind == "all_reduce":
        parts, shard = 1, op.group_stride
    elements = op.size_bytes // DTYPE_BYTES[op.dtype] // parts
    status, read = (sample.status, reading(sample)) if sample else (None, None)
    place = model, shard, case.world_size
    return UnitMessage(place, elements, units, op, case.regime, status, read)


def fsdp_tables(rows: Iterable[Derived], samples: Sequence[Sample]) -> list[Table]:
    """Make two tables for each model of ``measure fsdp``: its units' messages, and the nccl-tests
    commands that send the same.

    ``rows``: the units that each case stands for. A run directory does not keep them; without them
    the units have no names. Groups of one rank are left out: they move nothing. ``elements a
    rank``: the count in NCCL's traces. ``total``: nccl-tests' size, over all ranks of a group, or
    of one message for all_reduce.
    """
    known = {sample.case_id: sample for sample in samples}
    named = [(row.model, row.name, row.case) for row in rows]
    found = [
        _unit_message(model, units, case, known.get(case.id))
        for model, units, case in named or [("", ABSENT, sample.case) for sample in samples]
        if isinstance(case.op, Collective) and case.op.kind in _FSDP and case.op.group_size > 1
    ]
    found.sort(key=lambda one: (one.arrangement, one.elements_per_rank, _FSDP.index(one.op.kind)))
    of_model = grouped(found, lambda one: one.arrangement).values()
    return [table for same in of_model for table in (_units(same), _commands(same))]


def _units(messages: Sequence[UnitMessage]) -> Table:
    model, shard, world_size = messages[0].arrangement
    groups = world_size // shard
    many = f"{groups} groups of " if groups > 1 else ""
    ranks = f"{groups} replicas" if shard == 1 else f"{many}{shard} ranks"
    return listed(
        "FSDP units" + (f" of {model}" if model else "") + f", {ranks}",
        messages,
        ("units", "units"),
        ("collective", "op.kind"),
        ("type", "op.dtype"),
        ("mode", "regime"),
        ("elements a rank", "elements_per_rank"),
        ("total(B)", "op.size_bytes"),
        ("time(us)", lambda m: f"{1e6 * m.read.mean_s:.1f}" if m.read else m.status),
        ("busbw", lambda m: m.read and m.read.busbw / 1e9, "{:.2f}".format),
        legend=(
            "Units of equal size are one row. elements a rank: count as NCCL's traces print it, "
            "each weight's dim 0 divided among ranks and rounded up; total: nccl-tests' size; "
            "time: mean over iterations of the largest over ranks; busbw in GB/s.",
        ),
        left=4,
    )


def _commands(messages: Iterable[UnitMessage]) -> Table:
    rows = dict.fromkeys((one.units, one.op.kind, nccl_tests_command(one.op)) for one in messages)
    legend = ("Of one group alone; -b and -e are the total of its ranks.",)
    heads = ("units", "collective", "command")
    return Table("The same with nccl-tests", heads, tuple(rows), legend, left=3)
