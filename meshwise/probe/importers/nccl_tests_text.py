"""The text of nccl-tests (and rccl-tests), as tables.

Columns are found by the header line, since redop, root, per-iteration columns and the name of the
last column (``error``, ``#wrong``) differ between versions. Values are read from the end of a row,
since redop and root may be blank. Other programs' lines between the rows are skipped. Patterns are
bounded, because matching a long word would take time quadratic in its length.
"""

import re
from itertools import pairwise
from typing import NamedTuple

from meshwise.probe.importers.found import (
    Doubts,
    Found,
    is_number,
    line_at,
    lines_of,
    readable,
    strange_units,
    whole,
)
from meshwise.probe.importers.nccl_tests import PRINTED, Line, Section, read
from meshwise.spec import Regime

HEADER = re.compile(r"^#?[ \t]*(size[ \t]+count[ \t]+type\b.*)$", re.MULTILINE)
_UNITS = re.compile(r"^#?[ \t]*\([kKMG]?i?B\)[ \t]+\(\w+\).*$", re.MULTILINE)
_RANK = re.compile(
    r"Rank +(\d{1,7}) (?:Group +(\d{1,7}) )?Pid +\d+ on +(\S+) "
    r"device +\d+ \[[^]\n]{0,80}\] (.+)"
)
_DATA = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w*\s")
_COMMON = {"(B)", "(elements)", "(us)", "(GB/s)", "(%)"}


class _Half(NamedTuple):
    """The columns of one placement, the first of which is time. ``num``: how many placements a row
    has, out of place first."""

    names: list[str]
    num: int
    timestamp: bool


def read_text(text: str, name: str) -> Found:
    """Read the tables of a log. ``name``: the file's."""
    _check_units(text)
    starts = [match.start() for match in re.finditer(r"^# nThread", text, re.MULTILINE)] or [0]
    _check_whole(text, starts)
    doubts = Doubts()
    bounds = zip([0, *starts], starts, [*starts[1:], len(text)], strict=False)
    sections = [
        _section(text[before:start], text[start:end], text.count("\n", 0, start), doubts)
        for before, start, end in bounds
        if HEADER.search(text, start, end)
    ]
    return read(sections, name, doubts)


def _check_whole(text: str, starts: list[int]) -> None:
    """Check that each table has settings (``# nThread``) above it, else it is of a torn log."""
    headers = [match.start() for match in HEADER.finditer(text)]
    for start, end in pairwise([0, *starts, len(text)]):
        inside = [at for at in headers if start <= at < end]
        above = start == 0 and starts[0] > 0
        if len(inside) > (0 if above else 1):
            raise ValueError(
                f"the table at {line_at(text, inside[-1])} has no settings (# nThread) above it: "
                "part of another log? split the file"
            )


def _check_units(text: str) -> None:
    lines = [strange_units(line, _COMMON) for line in _UNITS.findall(text)]
    strange = ", ".join(sorted(set().union(*lines)))
    if strange and not all(lines):
        raise ValueError(f"mixed units, {strange} in some of its tables; split the file")
    if strange:
        raise ValueError(f"{strange} is not a unit of nccl-tests")


def _section(before: str, text: str, first_line: int, doubts: Doubts) -> Section:
    """Read one run. ``before`` ends with what the program prints above its settings."""
    header = HEADER.search(text)
    assert header is not None  # by the caller
    programs = re.findall(r"Collective test starting: (\S+)", before)
    versions = re.findall(r"nccl-tests version (\S+)", before)
    libraries = re.findall(r"nccl-library=(\d+)", before)
    blocking, graph = "Blocking Enabled" in text, re.search(r"graph: [1-9]", text)
    regime: Regime = "graph" if graph else "blocking" if blocking else "pipelined"
    footer = re.search(r"^#\s*Avg bus bandwidth\s*:\s*(\S+)", text, re.MULTILINE)
    columns = header[1].split()
    rows = ((where, line) for where, line in lines_of(text, first_line) if _DATA.match(line))
    return Section(
        program=programs[-1] if programs else "",
        ranks=tuple(
            (int(rank), int(group or 0), host, device.strip())
            for rank, group, host, device in _RANK.findall(text)
        ),
        regime=regime,
        lines=list(readable(rows, lambda where, line: _row(where, line, _half(columns)), doubts)),
        average=float(footer[1]) if footer and is_number(footer[1]) else None,
        version=versions[-1] if versions else "",
        nccl=libraries[-1] if libraries else "",
    )


def _half(columns: list[str]) -> _Half:
    """Find the columns of a placement in the header's."""
    timestamp = columns[-1] == "timestamp"
    columns = columns[: len(columns) - timestamp]
    times = [i for i, column in enumerate(columns) if column in ("time", "cputime")]
    halves = [columns[a:b] for a, b in zip(times, [*times[1:], None], strict=False)]
    if not halves:
        raise ValueError("the header has no column time")
    if missing := ", ".join(sorted({"algbw", "busbw"} - set(halves[0]))):
        raise ValueError(f"the header has no column {missing}")
    if len(halves) > 2 or any(half != halves[0] for half in halves):
        raise ValueError("the header's columns out of place and in place differ")
    return _Half(["time", *halves[0][1:]], len(halves), timestamp)


def _cells(line: str) -> list[str]:
    """Return the words of a line before NCCL's own log: ``host:12:34 [0] NCCL INFO ..``."""
    cells = line.split()
    at = cells.index("NCCL") - 2 if "NCCL" in cells else len(cells)
    return cells[: max(at, 0)]


def _row(where: str, line: str, half: _Half) -> Line:
    """Read a row's values by name, from its end."""
    cells = _cells(line)
    cells = cells[: len(cells) - 2 * half.timestamp]  # a date and a time of day
    placements, width = (False, True)[: half.num], len(half.names)
    fixed = 3  # size, count and type; redop and root may be blank
    if half.num == 2 and len(cells) in range(fixed + width, fixed + width + 3):
        placements = (True,)  # out of place was not run
    start = len(cells) - width * len(placements)
    if not fixed <= start <= fixed + 2:
        raise ValueError(f"{len(cells)} values, is it cut off?")
    values = {}
    for i, in_place in enumerate(placements):
        values[in_place] = dict(zip(half.names, cells[start + i * width :], strict=False))
        if not all(is_number(values[in_place][name]) for name in PRINTED):
            raise ValueError("time, algbw or busbw is not a number")
    left = cells[fixed:start]
    root = next((int(cell) for cell in left if re.fullmatch(r"-?\d{1,7}", cell)), -1)
    redop = next((cell for cell in left if cell[0].isalpha()), "")
    size_bytes, count = whole(cells[0], "size"), whole(cells[1], "count")
    return Line(where, size_bytes, count, cells[2], redop, root, values)
