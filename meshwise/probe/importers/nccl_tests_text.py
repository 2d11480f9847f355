"""The text of nccl-tests (and rccl-tests), as tables.

Columns are found by the header line, since redop, root, per-iteration columns and the name of the
last one (``error``, ``#wrong``) came and went; values are read from the end of a row, since redop
and root may be blank. Other programs' lines between the rows do not matter.
"""

import re

from meshwise.probe.importers.found import Found
from meshwise.probe.importers.nccl_tests import Line, Section, found_of, is_number
from meshwise.spec.run import Regime

HEADER = re.compile(r"^#?\s*(size\s+count\s.*time\s+algbw\s.*)$", re.MULTILINE)
_UNITS = re.compile(r"^#?\s*\([kKMG]?i?B\)\s+\(\w+\).*$", re.MULTILINE)
_RANK = re.compile(
    r"Rank\s+(\d+) (?:Group\s+(\d+) )?Pid\s+\d+ on\s+(\S+) device\s+\d+ \[.*?\] (.+)"
)
_DATA = re.compile(r"^\s*\d+\s+\d+\s+[a-z]\w*\s")
_NOISE = re.compile(r"\S+:\d+:\d+ \[\d+\] NCCL .*")


def read_text(text: str, name: str) -> Found:
    """The tables of a log; ``name`` is the file's, for messages."""
    _check_units(text, name)
    starts = [match.start() for match in re.finditer(r"^# nThread", text, re.MULTILINE)] or [0]
    bounds = zip([0, *starts], starts, [*starts[1:], len(text)], strict=False)
    sections = [
        _section(text[before:start], text[start:end], text.count("\n", 0, start))
        for before, start, end in bounds
        if HEADER.search(text, start, end)
    ]
    sections = [section for section in sections if section.lines]
    if not sections:
        raise ValueError(f"{name}: has nccl-tests' header but no rows; was the run cut off?")
    return found_of(sections, name)


def _check_units(text: str, name: str) -> None:
    lines = {" ".join(sorted(set(re.findall(r"\([^)]+\)", line)))) for line in _UNITS.findall(text)}
    if len(lines) > 1:
        raise ValueError(f"{name}: mixed units, {' and '.join(sorted(lines))}; split the file")
    for units in lines:
        strange = set(units.split()) - {"(B)", "(elements)", "(us)", "(GB/s)", "(%)"}
        if strange:
            raise ValueError(f"{name}: {', '.join(sorted(strange))} is not a unit of nccl-tests")


def _section(before: str, text: str, first_line: int) -> Section:
    """One run. ``before`` ends with what its program prints above its settings."""
    columns = HEADER.findall(text)[0].split()
    programs = re.findall(r"Collective test starting: (\S+)", before)
    versions = re.findall(r"nccl-tests version (\S+)", before)
    libraries = re.findall(r"nccl-library=(\d+)", before)
    blocking, graph = "Blocking Enabled" in text, re.search(r"graph: [1-9]", text)
    regime: Regime = "graph" if graph else "blocking" if blocking else "pipelined"
    footer = re.search(r"^#\s*Avg bus bandwidth\s*:\s*(\S+)", text, re.MULTILINE)
    rows = {
        f"line {number}": _row(_NOISE.sub("", line).split(), columns, f"line {number}")
        for number, line in enumerate(text.splitlines(), first_line + 1)
        if _DATA.match(line)
    }
    return Section(
        program=programs[-1] if programs else "",
        ranks=tuple(
            (int(rank), int(group or 0), host, device.strip())
            for rank, group, host, device in _RANK.findall(text)
        ),
        regime=regime,
        lines=[row for row in rows.values() if row is not None],
        average=float(footer[1]) if footer and is_number(footer[1]) else None,
        version=versions[-1] if versions else "",
        nccl=libraries[-1] if libraries else "",
        unread=tuple(where for where, row in rows.items() if row is None),
    )


def _row(cells: list[str], columns: list[str], where: str) -> Line | None:
    """Values by name, from the end. A row that is cut off is None."""
    if columns[-1] == "timestamp":
        columns, cells = columns[:-1], cells[:-2]  # a date and a time of day
    times = [i for i, column in enumerate(columns) if column in ("time", "cputime")]
    placements = (False, True)[: len(times)]
    width = (len(columns) - times[0]) // len(times)
    names = columns[times[0] : times[0] + width]
    fixed = 3  # size, count and type; redop and root may be blank
    if len(placements) == 2 and len(cells) in range(fixed + width, fixed + width + 3):
        placements = (True,)  # out of place was not run
    start = len(cells) - width * len(placements)
    if not fixed <= start <= fixed + 2:
        return None
    values = {}
    for number, in_place in enumerate(placements):
        half = cells[start + number * width :][:width]
        values[in_place] = dict(zip(names, half, strict=True))
        if not all(is_number(cell) for cell in half[:3]):
            return None
    left = cells[fixed:start]
    root = next((int(cell) for cell in left if re.fullmatch(r"-?\d+", cell)), -1)
    redop = next((cell for cell in left if cell[0].isalpha()), "")
    return Line(where, int(cells[0]), int(cells[1]), cells[2], redop, root, values)
