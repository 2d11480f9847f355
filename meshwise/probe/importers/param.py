"""PARAM comms' text, as rows. Columns are found by the header's names. The last column of newer
versions, TotalTime, is always 0.0; older versions lack it and name columns differently.

total-size is the output for all_gather, the input for reduce_scatter, else a rank's output: always
nccl-tests' size. Percentiles are over ranks, of each rank's mean; algbw comes from p50. ``args.z``
1 waits for every call (blocking), 0 issues all of them and waits once (pipelined).

all_to_allv without split lists is even. One fork prints a table of batch, tables and dimension
(``B,T0-T1-..,D``), the uneven exchange of embedding tables (moderato/param, comms.py with a file of
bench params). Rank i computes its T_i tables for the whole batch and needs all tables for its share
of the batch. Its input has B * T_i * D elements. Its output has (B/n) * sum(T) * D, and the printed
size is that of the output. CSVs of the fork hold means over ranks, and their bandwidths may have
0.0004 added by their writer.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from meshwise.probe.cases.sizes import MOST_RANKS, TABLES, embedding_splits, uneven
from meshwise.probe.importers.csv_table import Form, Line
from meshwise.probe.importers.found import (
    DTYPES,
    Doubts,
    Found,
    LeftOut,
    Printed,
    check_one_run,
    found_of,
    is_number,
    kind_named,
    lines_of,
    number,
    readable,
    refusal,
    seconds,
    short,
    strange_units,
    warnings_about,
    whole,
)
from meshwise.probe.importers.suspicion import warnings_of
from meshwise.spec import Case, Collective
from meshwise.spec.op import DTYPE_BYTES, IN_PLACE_ONLY, WHOLE, CollectiveKind, Dtype, Regime

SIZE_KIND = (
    "PARAM's total-size: the output of all_gather, the input of reduce_scatter, else a rank's "
    "output, which is nccl-tests' size; of a table of batch, tables and dimension the output, "
    "replaced by the most that a rank sends or receives"
)
TIME_KIND = "median over ranks of each rank's mean"

_KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "broadcast",
    "reduce",
)  # fmt: skip
_LISTS = ("all_gather", "reduce_scatter")  # torch's calls on lists of tensors copy
_CELL = re.compile(r"(?:total-size|size) \([^()]{0,20}\)|\S+")
_SIZE = re.compile(r"(?:total-)?size \(")
_TIME = re.compile(r"(?:ping)?(?:Latency|Time)\(us\):p50")
_UNITS = {"(B)", "(us)", "(GB/s)"}
_WRONG = re.compile(r"-bytes (\w+)\] Wrong value at \[")
_SETTINGS = {  # equal in all lines of a run
    "world_size": re.compile(r"'?world_size'?: ([1-9]\d{0,6})\b"),
    "args.z": re.compile(r"args\.z: (\d)"),
    "backend": re.compile(r"\bbackend: (\w+)"),
    "data_types": re.compile(r"\bdata_types?: \[?'?(\w+)"),
}
# ranks other than 0 may print theirs too
_START = re.compile(r"environment: \{(?!.*'global_rank': [1-9]).*'world_size'")
_NAMED = re.compile(r"COMMS-RES-(\w+)-(float\d+|bfloat16|double|half|float|u?int\d+)\S*")


class Setting(NamedTuple):
    """The settings above a log's tables. ``where``: the line that gives the number of ranks."""

    where: str
    ranks: int
    world_size: int
    regime: Regime
    backend: str
    dtype: str
    collective: str = ""
    pairs: tuple[tuple[int, int], ...] = ()  # (source, destination) for pt2pt


_Row = tuple[list[str], list[str], Setting]  # cells, columns


def read(text: str) -> Found:
    """Read the tables of a log, or of several in one file, with equally many ranks and each with
    its own settings."""
    rows, doubts = list[Printed](), Doubts()
    settings = [_read_run(lines, rows, doubts) for lines in _runs(text)]
    check_one_run((s.where, {"world_size": s.world_size, "backend": s.backend}) for s in settings)
    if not rows and doubts:
        raise refusal(doubts)
    if not rows:
        why = "; ".join(doubts.skipped) or "was the run cut off?"
        raise ValueError(f"no rows of PARAM that are read here: {why}")
    return found_of(
        rows,
        [*warnings_about(doubts, rows), *warnings_of([rows])],
        tool="PARAM comms",
        size_kind=SIZE_KIND,
        time_kind=TIME_KIND,
        world_size=settings[0].world_size,
        facts={"backend": settings[0].backend, "rows": len(rows), "runs": len(settings)},
    )


def _runs(text: str) -> list[list[tuple[str, str]]]:
    """Return the lines of each run. A run begins where rank 0 prints its environment."""
    lines = list(lines_of(text))
    starts = [number for number, (_, line) in enumerate(lines) if _START.search(line)]
    for where, line in lines[: starts[0] if starts else 0]:
        if line.lstrip().startswith("COMMS-RES"):
            raise ValueError(
                f"{where} is a row above any line with world_size: the end of another log? split "
                "the file"
            )
    parts = [lines[a:b] for a, b in pairwise([0, *starts[1:], len(lines)])]
    return [part for part in parts if any("COMMS-RES" in line for _, line in part)]


def _read_run(lines: list[tuple[str, str]], rows: list[Printed], doubts: Doubts) -> Setting:
    """Add the rows of one run to ``rows``; return the settings as they are at its end."""
    setting, columns = _setting(lines), list[str]()
    printed: list[tuple[str, _Row]] = []
    wrong: dict[str, str] = {}  # kinds that failed PARAM's own check, and where
    for where, line in lines:
        if told := re.search(r"collective=(\w+), src_ranks=(\S+), dst_ranks=(.+)$", line):
            setting = setting._replace(collective=told[1], pairs=_pairs(told[2], told[3]))
        if told := re.search(r"groupSize ([1-9]\d{0,6})\b", line):
            setting = setting._replace(ranks=int(told[1]))
            if setting.ranks > setting.world_size:
                raise ValueError(
                    f"{where} has a group of {setting.ranks} ranks, {setting.where} world_size "
                    f"{setting.world_size}: logs of two runs? split the file"
                )
        if (told := _WRONG.search(line)) and (kind := kind_named(told[1])):
            wrong[kind] = f"wrong elements: PARAM's check failed at {where}"
        if not line.lstrip().startswith("COMMS-RES"):
            continue
        cells = _CELL.findall(line)
        if "size (" in line:
            columns = cells[1:]
            if strange := ", ".join(sorted(strange_units(line, _UNITS))):
                raise ValueError(f"{where}: {strange} is not a unit of PARAM")
            continue
        printed.append((where, (cells, columns, setting)))
    for row in readable(printed, _read_row, doubts):
        assert isinstance(row.case.op, Collective)
        fault = wrong.get(row.case.op.kind, "")
        rows.append(row._replace(fault=fault, wrong=bool(fault)))
    return setting


def _setting(lines: list[tuple[str, str]]) -> Setting:
    told = [
        (where, {what: match[1]})
        for where, line in lines
        for what, pattern in _SETTINGS.items()
        if (match := pattern.search(line))
    ]
    check_one_run(told)
    first = {w: (value, at) for at, facts in reversed(told) for w, value in facts.items()}
    if missing := [what for what in ("world_size", "args.z") if what not in first]:
        raise ValueError(f"PARAM's line with {missing[0]} is missing; import the whole log")
    world, where = first["world_size"]
    return Setting(
        where=where,
        ranks=int(world),
        world_size=int(world),
        regime="blocking" if first["args.z"][0] == "1" else "pipelined",
        backend=first.get("backend", ("", ""))[0],
        dtype=first.get("data_types", ("float32", ""))[0],
    )


def _pairs(sources: str, destinations: str) -> tuple[tuple[int, int], ...]:
    numbers = [
        [int(n) for n in re.findall(r"\b\d{1,7}\b", text)] for text in (sources, destinations)
    ]
    return tuple(zip(*numbers, strict=False))


def _read_row(where: str, row: _Row) -> Printed:
    cells, columns, setting = row
    if cells[0].startswith("COMMS-RES-QUANT"):
        raise LeftOut("COMMS-RES-QUANT: a quantised collective is not one of ours")
    named = _NAMED.fullmatch(cells[0])
    collective, dtype = (named[1], named[2]) if named else (setting.collective, setting.dtype)
    if len(cells) > 3 and TABLES.fullmatch(cells[2]):
        times_us = [seconds(cell, "latency") for cell in cells[3].split("-")]
        rates = [[number(x, "bandwidth") for x in cell.split("-")] for cell in cells[4:6]]
        size_bytes = whole(cells[1], "size")
        made = _table_row(where, cells[2], size_bytes, [times_us, *rates], setting.regime)
        if made.case.world_size != setting.world_size:
            ranks = f"{made.case.world_size} ranks"
            raise ValueError(f"a table of {ranks}, but {setting.where} has {setting.world_size}")
        return made
    kind = "send" if collective == "pt2pt" else kind_named(collective)
    if kind is None or kind not in (*_KINDS, "send"):
        raise LeftOut(f"{collective}: no counterpart here, or its size may be of a rank or of all")
    if dtype not in DTYPES:
        raise LeftOut(f"{dtype}: no counterpart here")
    if len(cells) != len(columns) + 1:
        raise ValueError(f"{len(cells)} values under {len(columns) + 1} columns")
    printed = dict(zip(reversed(columns), reversed(cells), strict=False))  # the first p75 of two
    size_bytes = whole(_named(printed, _SIZE, "total-size (B)"), "size")
    if size_bytes == 0:
        raise LeftOut("size 0: no time of a message")
    op = _operation(kind, DTYPES[dtype], size_bytes, setting)
    time = _named(printed, _TIME, "Latency(us):p50")
    if (elements := printed.get("nElementsPerRank")) is not None:
        part_bytes = whole(elements, "nElementsPerRank") * DTYPE_BYTES[op.dtype]
        if part_bytes * (1 if kind in WHOLE else op.group_size) != size_bytes:
            raise ValueError(f"nElementsPerRank does not agree with the size: {collective}")
    backend = "list" if collective in _LISTS else ""
    busbw = printed.get("BusBW(GB/s)", "")
    return Printed(
        where=where,
        case=Case(op=op, regime=setting.regime, backend=backend, world_size=setting.world_size),
        time_s=seconds(time, "p50", 1e-6),
        metrics=_metrics(printed),
        printed=(time, busbw) if is_number(busbw) else ("", ""),
        series=f"{op.kind} {op.dtype} {backend}".rstrip(),
    )


def _named(printed: dict[str, str], pattern: re.Pattern[str], column: str) -> str:
    """Return the first value whose column matches."""
    found = [value for name, value in printed.items() if pattern.match(name)]
    if not found:
        raise ValueError(f"the header above it has no column {column}")
    return found[-1]


def _operation(kind: CollectiveKind, dtype: Dtype, size_bytes: int, setting: Setting) -> Collective:
    n = setting.ranks
    if kind == "send":
        if not setting.pairs:
            raise LeftOut("pt2pt without src_ranks and dst_ranks: between which ranks?")
        first = setting.pairs[0]
        alone: tuple[int, ...] = first if len(setting.pairs) == 1 else ()
        return Collective(
            kind=kind,
            size_bytes=size_bytes,
            group_size=2,
            group_stride=abs(first[1] - first[0]),
            dtype=dtype,
            ranks=alone,
        )
    if kind == "all_to_all_v":
        if n > MOST_RANKS:
            raise LeftOut(f"all_to_allv of more than {MOST_RANKS} ranks")
        if size_bytes % n:
            raise ValueError(f"all_to_allv of {size_bytes} B is not divisible by {n} ranks")
        return uneven(((size_bytes // n,) * n,) * n, n, dtype)
    in_place = kind in IN_PLACE_ONLY
    return Collective(
        kind=kind, size_bytes=size_bytes, group_size=n, dtype=dtype, in_place=in_place
    )


def _metrics(printed: dict[str, str]) -> dict[str, float | tuple[float, ...]]:
    names = {
        "p75": ("p75_s", 1e-6),
        "p95": ("p95_s", 1e-6),
        "Min": ("min_s", 1e-6),
        "Max": ("max_s", 1e-6),
        "AlgBW(GB/s)": ("printed_algbw_bytes_per_s", 1e9),
        "BusBW(GB/s)": ("printed_busbw_bytes_per_s", 1e9),
        "pingPongLatency(us):p50": ("ping_pong_s", 1e-6),
        "avgUniBW(GB/s)": ("printed_one_way_bytes_per_s", 1e9),
        "avgBiBW(GB/s)": ("printed_two_way_bytes_per_s", 1e9),
    }
    return {
        key: float(printed[column]) * unit
        for column, (key, unit) in names.items()
        if is_number(printed.get(column, ""))  # with one rank some are N/A
    }


# ---- tables of batch, tables and dimension


def _table_row(
    where: str,
    btd: str,
    size_bytes: int,
    per_rank: Sequence[Sequence[float]],
    regime: Regime = "blocking",
) -> Printed:
    """Make a row. ``per_rank``: times in us, then bandwidths in GB/s; of each rank, or a mean."""
    matrix = embedding_splits(btd, "btd")
    received = sum(line[0] for line in matrix)
    if size_bytes != received:
        raise ValueError(f"size = {size_bytes}, but {short(btd)} gives an output of {received} B")
    n, times_s = len(matrix), tuple(time * 1e-6 for time in per_rank[0])
    names = ("printed_algbw_bytes_per_s", "printed_busbw_bytes_per_s")
    printed = {
        name: tuple(rate * 1e9 for rate in rates) if len(rates) > 1 else rates[0] * 1e9
        for name, rates in zip(names, per_rank[1:], strict=False)
    }
    return Printed(
        where=where,
        case=Case(op=uneven(matrix, n, "fp32"), regime=regime, world_size=n),
        time_s=max(times_s),
        metrics={"output_bytes": float(size_bytes), **printed},
        rank_times_s=times_s if len(times_s) == n else (),
    )


def _csv_row(where: str, line: Line, _: str) -> list[Printed]:
    time_us = seconds(line["latency_us"], "latency_us")
    rates = [[number(line[c], c)] for c in ("algbw_gbps", "busbw_gbps") if c in line]
    size_bytes = whole(line["size_bytes"], "size_bytes")
    return [_table_row(where, line["btd"], size_bytes, [[time_us], *rates])]


FORM = Form(
    name="btd",
    tool="PARAM comms, table of batch, tables and dimension",
    columns=frozenset({"btd", "size_bytes", "latency_us"}),
    size_kind="the output of a rank; ours is the most that a rank sends or receives",
    time_kind="mean over ranks",
    read=_csv_row,
    ranks="number of ranks",
)
