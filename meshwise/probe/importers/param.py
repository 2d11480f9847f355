"""PARAM comms' text, as rows. Columns are found by the header's names: today's last column,
TotalTime, is always 0.0, and older versions have neither it nor today's words.

total-size is the output for all_gather, the input for reduce_scatter, else a rank's output: always
nccl-tests' size. Percentiles are over ranks, of each rank's mean; algbw comes from p50. ``args.z``
1 waits for every call (blocking), 0 issues all of them and waits once (pipelined).

all_to_allv without split lists is even. The table that one fork prints for batch, tables and
dimension (``B,T0-T1-..,D``) is read as an uneven one, see ``tables_all_to_all``.
"""

import re
from typing import NamedTuple

from meshwise.probe.importers import tables_all_to_all
from meshwise.probe.importers.found import DTYPES, Found, Row, samples_of
from meshwise.probe.importers.suspicion import Printed, warnings_of
from meshwise.spec import Case, Collective
from meshwise.spec.op import DTYPE_BYTES, CollectiveKind
from meshwise.spec.run import Regime

SIZE_KIND = (
    "PARAM's total-size: the output of all_gather, the input of reduce_scatter, else a rank's "
    "output, which is nccl-tests' size; of a table of batch, tables and dimension the output, "
    "replaced by the most that a rank sends or receives"
)
TIME_KIND = "median over ranks of each rank's mean"

_KINDS: dict[str, CollectiveKind] = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "all_gather_base": "all_gather",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_base": "reduce_scatter",
    "all_to_all": "all_to_all", "all_to_all_single": "all_to_all",
    "all_to_allv": "all_to_all_v", "broadcast": "broadcast", "reduce": "reduce", "pt2pt": "send",
}  # fmt: skip
_IN_PLACE = ("all_reduce", "broadcast", "reduce")  # as torch has them
_LISTS = ("all_gather", "reduce_scatter")  # torch's calls on lists of tensors, which copy
_PER_PEER = ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v")
_CELL = re.compile(r"(?:total-size|size) \([^)]*\)|\S+")
_NAMED = re.compile(r"COMMS-RES-(\w+)-(float\d+|bfloat16|double|half|float|u?int\d+)\S*")


class Setting(NamedTuple):
    """What the log says above its tables."""

    ranks: int
    world_size: int
    regime: Regime
    backend: str
    collective: str
    pairs: tuple[tuple[int, int], ...]  # of pt2pt: source and destination
    dtype: str


def read(text: str, name: str) -> Found:
    """The tables of a log; ``name`` is the file's, for messages."""
    setting = _setting(text, name)
    columns: list[str] = []
    rows: list[tuple[Row, Printed | None]] = []
    skipped: dict[str, int] = {}
    units = ""
    for number, line in enumerate(text.splitlines(), 1):
        if told := re.search(r"collective=(\w+), src_ranks=(\S+), dst_ranks=(.+)$", line):
            setting = setting._replace(collective=told[1], pairs=_pairs(told[2], told[3]))
        if told := re.search(r"groupSize (\d+)", line):
            setting = setting._replace(ranks=int(told[1]))
        if not line.lstrip().startswith("COMMS-RES"):
            continue
        cells = _CELL.findall(line)
        if re.search(r"COMMS-RES.*size \(", line):
            columns = cells[1:]
            units = _same_units(units, line, f"{name}: line {number}")
            continue
        row = _read_row(cells, columns, setting, f"{name}: line {number}")
        if isinstance(row, str):
            skipped[row] = skipped.get(row, 0) + 1
        else:
            rows.append(row)
    if not rows:
        why = "; ".join(skipped) or "was the run cut off?"
        raise ValueError(f"{name}: no rows of PARAM that are read here: {why}")
    samples, doubled = samples_of(row for row, _ in rows)
    warnings = [f"{count} rows left out: {why}" for why, count in skipped.items()]
    return Found(
        tool="PARAM comms",
        size_kind=SIZE_KIND,
        time_kind=TIME_KIND,
        num_hosts=1,
        world_size=setting.world_size,
        device="",
        samples=samples,
        warnings=(*warnings, *_suspicious(rows, name), *doubled),
        facts={"backend": setting.backend, "rows": len(rows)},
    )


def _setting(text: str, name: str) -> Setting:
    world = re.search(r"'?world_size'?: (\d+)", text)
    blocking = re.search(r"args\.z: (\d)", text)
    if world is None:
        raise ValueError(f"{name}: PARAM's line with world_size is missing; import the whole log")
    if blocking is None:
        raise ValueError(f"{name}: PARAM's line with args.z is missing; import the whole log")
    backend = re.search(r"backend: (\w+)", text)
    dtype = re.search(r"data_types?: \[?'?(\w+)", text)
    return Setting(
        ranks=int(world[1]),
        world_size=int(world[1]),
        regime="blocking" if blocking[1] == "1" else "pipelined",
        backend=backend[1] if backend else "",
        collective="",
        pairs=(),
        dtype=dtype[1] if dtype else "float32",
    )


def _pairs(sources: str, destinations: str) -> tuple[tuple[int, int], ...]:
    numbers = [[int(n) for n in re.findall(r"\d+", text)] for text in (sources, destinations)]
    return tuple(zip(*numbers, strict=False))


def _same_units(before: str, line: str, where: str) -> str:
    """The units of a header line; others than before, or than PARAM's, are refused."""
    units = " ".join(sorted(set(re.findall(r"\([^)]+\)", line))))
    if before and units != before:
        raise ValueError(f"{where}: mixed units, {before} before and {units} here; split the file")
    if strange := set(units.split()) - {"(B)", "(us)", "(us):", "(GB/s)"}:
        raise ValueError(f"{where}: {', '.join(sorted(strange))} is not a unit of PARAM")
    return units


def _read_row(
    cells: list[str], columns: list[str], setting: Setting, where: str
) -> tuple[Row, Printed | None] | str:
    """A row with what was printed beside its time, or why it is left out."""
    if cells[0].startswith("COMMS-RES-QUANT"):
        return "COMMS-RES-QUANT: a quantised collective is not one of ours"
    named = _NAMED.fullmatch(cells[0])
    collective, dtype = (named[1], named[2]) if named else (setting.collective, setting.dtype)
    place = where.rpartition(": ")[2]
    if len(cells) > 2 and tables_all_to_all.PATTERN.fullmatch(cells[2]):
        per_rank = [[float(x) for x in cell.split("-")] for cell in cells[3:6]]
        uneven = tables_all_to_all.row(
            cells[2], int(cells[1]), per_rank, place, where, setting.regime
        )
        return uneven, None
    if collective not in _KINDS:
        return f"{collective}: no counterpart here, or its size may be of a rank or of all"
    if dtype not in DTYPES:
        return f"{dtype}: no counterpart here"
    if len(cells) != len(columns) + 1:
        return f"{len(cells)} values under {len(columns) + 1} columns"
    printed = dict(zip(reversed(columns), reversed(cells), strict=False))  # the first p75 of two
    size_bytes = int(next(v for c, v in printed.items() if re.search(r"size \(", c)))
    if size_bytes == 0:
        return "size 0: no time of a message"
    op = _operation(collective, DTYPES[dtype], size_bytes, setting)
    if isinstance(op, str):
        return op
    time = next(
        v for c, v in printed.items() if re.match(r"(?:ping)?(?:Latency|Time)\(us\):p50", c)
    )
    backend = "list" if collective in _LISTS else ""
    case = Case(op=op, regime=setting.regime, backend=backend, world_size=setting.world_size)
    row = Row(where=place, case=case, time_s=float(time) * 1e-6, metrics=_metrics(printed))
    expected = op.size_bytes * op.bus_factor if op.kind != "send" else 0
    seen = Printed(place, size_bytes, time, row.time_s, printed.get("BusBW(GB/s)", ""), expected)
    elements = printed.get("nElementsPerRank")
    if elements is not None and not _agrees(op, int(elements)):
        return f"nElementsPerRank does not agree with the size: {collective}"
    return row, seen if seen.busbw else None


def _operation(collective: str, dtype: str, size_bytes: int, setting: Setting) -> Collective | str:
    kind, n = _KINDS[collective], setting.ranks
    if kind == "send":
        if not setting.pairs:
            return "pt2pt without src_ranks and dst_ranks: between which ranks?"
        first = setting.pairs[0]
        alone: tuple[int, ...] = first if len(setting.pairs) == 1 else ()
        return Collective(
            kind=kind,
            size_bytes=size_bytes,
            group_size=2,
            group_stride=abs(first[1] - first[0]),
            dtype=dtype,  # type: ignore[arg-type]
            ranks=alone,
        )
    if kind == "all_to_all_v" and size_bytes % n:
        return f"all_to_allv of {size_bytes} B is not divisible by {n} ranks"
    even = ((size_bytes // n,) * n,) * n if kind == "all_to_all_v" else ()
    return Collective(
        kind=kind,
        size_bytes=size_bytes,
        group_size=n,
        dtype=dtype,  # type: ignore[arg-type]
        in_place=kind in _IN_PLACE,
        splits=even,
    )


def _agrees(op: Collective, elements: int) -> bool:
    parts = op.group_size if op.kind in _PER_PEER else 1
    return elements * parts * DTYPE_BYTES[op.dtype] == op.size_bytes


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
        if column in printed
    }


def _suspicious(rows: list[tuple[Row, Printed | None]], name: str) -> list[str]:
    series: dict[str, list[Printed]] = {}
    for row, printed in rows:
        op = row.case.op
        assert isinstance(op, Collective)
        title = f"{op.kind} {op.dtype} {row.case.backend}".rstrip()
        if printed is not None:
            series.setdefault(title, []).append(printed)
    return [text for title, one in series.items() for text in warnings_of(title, one, name)]
