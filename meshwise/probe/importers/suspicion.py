"""What makes printed measurements suspicious, as sentences.

In: a series, the rows of one table that differ in size alone, with what was printed beside the
time. Out: warnings: constant times, sizes that do not ascend, values printed with too few digits,
bandwidths that do not follow from size and time. Bandwidths in two units are a ValueError.
"""

import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

_SAME = 4  # rows in a row with one and the same time: two or three happen on a plateau
_TOLERANCE = 0.02
_UNITS = {8.0: "Gbit/s", 1 / 1.073741824: "GiB/s", 1000.0: "MB/s", 0.001: "TB/s"}


class Printed(NamedTuple):
    """One row as printed: texts, so that their digits can be counted. ``bus_bytes``: what busbw
    must be, times the seconds."""

    where: str
    size_bytes: int
    time: str
    time_s: float
    busbw: str
    bus_bytes: float


def warnings_of(name: str, series: Sequence[Printed], source: str) -> list[str]:
    """All that is suspicious about one series; ``name`` and ``source`` begin the sentences."""
    found = [*_constant(series), *_descending(series), *_quantised(series)]
    return [f"{name}: {text}" for text in [*found, *_unrelated(series, f"{source}: {name}")]]


def _constant(series: Sequence[Printed]) -> list[str]:
    runs = [list(run) for _, run in groupby(series, key=lambda row: row.time)]
    return [
        f"constant: {len(run)} sizes from {run[0].where} on have the time {run[0].time}"
        for run in runs
        if len(run) >= _SAME and len({row.size_bytes for row in run}) >= _SAME
    ]


def _descending(series: Sequence[Printed]) -> list[str]:
    return [
        f"not ascending: {later.size_bytes} B at {later.where} comes after {row.size_bytes} B"
        for row, later in pairwise(series)
        if later.size_bytes < row.size_bytes
    ]


def _quantised(series: Sequence[Printed]) -> list[str]:
    coarse = [row for row in series if _digits(row.time) < 3]
    rough = [row for row in series if _digits(row.busbw) < 2]
    found = []
    if coarse:
        found.append(f"quantised: {len(coarse)} times have fewer than three digits")
    if rough:
        found.append(
            f"quantised: {len(rough)} bandwidths have fewer than two digits; use the times"
        )
    return found


def _digits(text: str) -> int:
    """Significant digits as printed: ``0.05`` has one, ``18.30`` four."""
    mantissa = re.split("[eE]", text)[0]
    return len(re.sub(r"[^0-9]", "", mantissa).lstrip("0"))


def _unrelated(series: Sequence[Printed], source: str) -> list[str]:
    """Bandwidths that size and time do not give, beyond the rounding of both."""
    units: dict[str, str] = {}
    wrong = []
    for row in series:
        if _digits(row.busbw) < 3 or _digits(row.time) < 3 or not row.bus_bytes:
            continue
        ratio = float(row.busbw) * 1e9 * row.time_s / row.bus_bytes
        if abs(ratio - 1) <= _TOLERANCE:
            units.setdefault("GB/s", row.where)
            continue
        named = [unit for off, unit in _UNITS.items() if abs(ratio / off - 1) <= _TOLERANCE]
        for unit in named:
            units.setdefault(unit, row.where)
        wrong.append(f"{row.where} ({ratio:.3g} times)")
    if len(units) > 1:
        said = ", ".join(f"{unit} from {where}" for unit, where in units.items())
        raise ValueError(f"{source}: bandwidths in mixed units ({said}); split the file")
    if not wrong:
        return []
    shown = ", ".join(wrong[:4]) + (", ..." if len(wrong) > 4 else "")
    return [f"busbw does not follow from size and time in {len(wrong)} rows: {shown}"]
