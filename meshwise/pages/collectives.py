"""Tables of measured collectives: nccl-tests' columns, where the time goes, pairs, FSDP's units.

``time``, ``algbw``, ``busbw``, ``count``, ``type``, ``redop`` and ``root`` as nccl-tests defines
them (doc/PERFORMANCE.md); ``time`` is the mean over iterations of the largest time over ranks, or
what an imported file's time is.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from meshwise.models.fsdp import nccl_tests_command
from meshwise.pages.spread import Reading, reading, readings, split
from meshwise.pages.table import ABSENT, Table, columns, filled, listed, shown
from meshwise.spec import DTYPE_BYTES, Case, Collective, Derived, RunInfo, Sample
from meshwise.spec.label import uneven
from meshwise.spec.op import ROOTED
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
_FSDP = ("all_gather", "reduce_scatter", "all_reduce")  # in this order
_FLOOR_BYTES = 64 * 2**10  # a larger smallest message has no launch floor to speak of


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
        return ", ".join(filter(None, (self.case.regime, self.case.backend, place)))

    @property
    def is_pair(self) -> bool:
        return self.op.kind == "send" and len(self.op.ranks) == 2


def series(samples: Iterable[Sample]) -> list[Series]:
    """The measured collectives of all samples, by kind, group, mode and dtype. A group of one rank
    moves nothing, so it is left out."""

    def alike(one: Reading) -> tuple[Any, ...]:
        op, case = one.op, one.case
        group = (op.kind, op.group_size, op.group_stride, op.ranks, case.world_size)
        return (*group, case.regime, case.backend, op.in_place, op.dtype)

    found = [one for one in readings(samples, Collective) if one.op.group_size > 1]
    found.sort(key=lambda one: (alike(one), one.op.size_bytes))
    groups = (tuple(same) for _, same in groupby(found, key=alike))
    return [Series(same[0].op, same[0].case, same) for same in groups]


def are_fsdp_units(info: RunInfo) -> bool:
    """Whether the collectives of a run are FSDP's units: nothing else tells them apart."""
    return "-measure-fsdp" in info.run_id


def tables(samples: Sequence[Sample], info: RunInfo | None = None) -> list[Table]:
    """Every table that the collectives among ``samples`` give. ``info`` says what the times of an
    imported run are."""
    found = series(samples)
    others = [one for one in found if not one.is_pair]
    shown = [_nccl_tests(one) for one in others]
    if others:
        last = shown[-1]
        shown[-1] = last._replace(legend=(*last.legend, *_legend(others, info)))
    return [*shown, *filled(_parts(others)), *pair_matrices(found)]


def _nccl_tests(one: Series) -> Table:
    average = np.mean([each.busbw for each in one.readings]) / 1e9
    redop = (("redop", lambda _: "sum"),) if one.op.kind in _REDUCING else ()
    root = () if one.op.splits else (("root", lambda _: "0" if one.op.kind in ROOTED else "-1"),)
    return listed(
        f"{one.op.kind}, {one.group}, {one.mode}",
        one.readings,
        ("size(B)", lambda each: str(each.op.size_bytes)),
        ("of a rank(B)" if one.op.splits else "count", _count),
        ("type", lambda each: _NCCL_TYPES[each.op.dtype]),
        *redop,
        *root,
        *columns(_us, {"time(us)": "mean_s"}),
        *columns(lambda per_s: f"{per_s / 1e9:.2f}", {"algbw": "algbw", "busbw": "busbw"}),
        ("#wrong", _wrong),
        ("p50(us)", lambda each: _quantile(each, 0.5)),
        ("p95(us)", lambda each: _quantile(each, 0.95)),
        *columns(str, {"slowest rank": "slowest"}),
        legend=(f"# Avg bus bandwidth    : {average:g}",),
        left=0,
    )


def _count(one: Reading) -> str:
    ranks = one.op.group_size if one.op.kind in _PER_RANK else 1
    return uneven(one.op) or str(one.op.size_bytes // DTYPE_BYTES[one.op.dtype] // ranks)


def _wrong(one: Reading) -> str:
    wrong = one.sample.metrics.get("wrong")
    return f"{wrong:.0f}" if isinstance(wrong, float | int) else ABSENT


def _quantile(one: Reading, share: float) -> str:
    times_s = one.sample.times_s
    return _us(float(np.quantile(times_s, share))) if len(times_s) > 1 else ABSENT


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
    """Launch floor, transfer and waiting of every series that has the times of single ranks."""
    rows, grouped = [], False
    for one in found:
        parts = [(s.op, times) for s in one.readings if (times := split(s.sample)) is not None]
        has_floor = parts and one.op.size_bytes <= _FLOOR_BYTES
        floor_s = min(times.transfer_s for _, times in parts) if has_floor else None
        for op, times in parts:
            transfer_s = times.transfer_s - (floor_s or 0.0)
            each_s = (floor_s, transfer_s, times.waiting_s, times.other_groups_s)
            kind = f"{op.kind} {uneven(op)}".strip()
            cells = (shown(part_s, _us) for part_s in each_s)
            rows.append((kind, one.group, one.mode, str(op.size_bytes), *cells))
            grouped |= times.other_groups_s is not None
    heads = ["collective", "group", "mode", "size(B)", "floor(us)", "transfer(us)", "waiting(us)"]
    legend = [
        "The parts of a row add up to its p50. floor + transfer: median over iterations of the "
        "smallest time over ranks, which the rank that comes last needs; floor: the least of that "
        "in the series, if it has a message of at most "
        f"{format_bytes(_FLOOR_BYTES)}, else transfer holds it; waiting for peers: the rest.",
    ]
    if grouped:
        heads.append("other\ngroups(us)")
        legend.append(
            "Of several groups at once: floor and transfer are the fastest group's, waiting that "
            "within the slowest, other groups by how much its transfer is the longer."
        )
    told = tuple(row[: len(heads)] for row in rows)
    return Table("Where the time of collectives goes", tuple(heads), told, tuple(legend), left=3)


def pair_rates(found: Sequence[Series]) -> dict[tuple[str, int], dict[tuple[int, int], float]]:
    """(mode, size) -> (from, to) -> bytes per second by the median time."""
    rates: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    for one in filter(lambda one: one.is_pair, found):
        for each in one.readings:
            of_size = rates.setdefault((one.mode, each.op.size_bytes), {})
            of_size[each.op.ranks] = each.op.size_bytes / each.median_s
    return rates


def pair_matrices(found: Sequence[Series]) -> list[Table]:
    """Rates from every rank to every other, one pair at a time; a table for each size and mode."""
    return [_matrix(*key, rates) for key, rates in pair_rates(found).items()]


def _matrix(mode: str, size_bytes: int, rates: dict[tuple[int, int], float]) -> Table:
    ranks = sorted({rank for pair in rates for rank in pair})
    rows = tuple(
        (str(a), *(f"{rates[a, b] / 1e9:.1f}" if (a, b) in rates else ABSENT for b in ranks))
        for a in ranks
    )
    title = f"Sends of {format_bytes(size_bytes)} between pairs of ranks, {mode}: GB/s"
    legend = ("From the rank of the row to that of the column, no other pair at work; medians.",)
    return Table(title, ("from, to", *map(str, ranks)), rows, legend)


class Message(NamedTuple):
    """A message of all units of equal size. ``status``: that of its sample; ``read``: its figures,
    if it has times."""

    model: str
    units: str
    op: Collective
    case: Case
    status: str | None
    read: Reading | None

    @property
    def shard(self) -> int:
        """Ranks among which a unit is cut; replicas of a part are that far apart."""
        return self.op.group_stride if self.op.kind == "all_reduce" else self.op.group_size

    @property
    def elements_per_rank(self) -> int:
        parts = 1 if self.op.kind == "all_reduce" else self.op.group_size
        return self.op.size_bytes // DTYPE_BYTES[self.op.dtype] // parts

    @property
    def arrangement(self) -> tuple[str, int, int]:
        return self.model, self.shard, self.case.world_size


def fsdp_tables(rows: Iterable[Derived], samples: Sequence[Sample]) -> list[Table]:
    """Tables of ``measure fsdp``, two for each model: the messages of its units, and nccl-tests'
    commands. ``rows``: which units each case is of, as a run directory does not keep it; without
    them the units have no names. A group of one rank moves nothing, so it is left out.

    ``elements a rank`` is the count that NCCL prints in its traces, ``total`` what nccl-tests calls
    size: of all ranks of a group together, of one message for all_reduce.
    """
    known = {sample.case_id: sample for sample in samples}
    named = [(row.model, row.name, row.case) for row in rows]
    found = []
    for model, units, case in named or [("", ABSENT, sample.case) for sample in samples]:
        op, sample = case.op, known.get(case.id)
        if isinstance(op, Collective) and op.kind in _FSDP and op.group_size > 1:
            status, read = (sample.status, reading(sample)) if sample else (None, None)
            found.append(Message(model, units, op, case, status, read))
    found.sort(key=lambda one: (one.arrangement, one.elements_per_rank, _FSDP.index(one.op.kind)))
    shown = []
    for (model, shard, world_size), same in groupby(found, key=lambda one: one.arrangement):
        members = list(same)
        shown += [_units(model, shard, world_size, members), _commands(members)]
    return shown


def _units(model: str, shard: int, world_size: int, messages: Iterable[Message]) -> Table:
    groups = world_size // shard
    title = "FSDP units" + (f" of {model}" if model else "")
    if shard == 1:
        title += f", {groups} replicas"
    else:
        title += f", {groups} groups of {shard} ranks" if groups > 1 else f", {shard} ranks"
    return listed(
        title,
        messages,
        *columns(str, "units"),
        *columns(str, {"collective": "op.kind", "type": "op.dtype", "mode": "case.regime"}),
        *columns(str, {"elements a rank": "elements_per_rank", "total(B)": "op.size_bytes"}),
        *columns(str, {"time(us)": lambda m: f"{1e6 * m.read.mean_s:.1f}" if m.read else m.status}),
        *columns("{:.2f}".format, {"busbw": lambda m: m.read and m.read.busbw / 1e9}),
        legend=(
            "Units of equal size are one row. elements a rank: count as NCCL's traces print it, "
            "each weight's dim 0 divided among ranks and rounded up; total: nccl-tests' size; "
            "time: mean over iterations of the largest over ranks; busbw in GB/s.",
        ),
        left=4,
    )


def _commands(messages: Iterable[Message]) -> Table:
    rows = dict.fromkeys((one.units, one.op.kind, nccl_tests_command(one.op)) for one in messages)
    legend = ("Of one group alone; -b and -e are the total of its ranks.",)
    heads = ("units", "collective", "command")
    return Table("The same with nccl-tests", heads, tuple(rows), legend, left=3)
