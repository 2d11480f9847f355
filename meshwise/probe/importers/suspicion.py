"""Warn of printed measurements that look suspicious.

In: the series of a file, each the rows of one table that differ in size alone, with what was
printed beside the time. Out: one warning for each kind of doubt: constant times, sizes that do not
ascend, times printed with too few digits, bandwidths that do not follow from size and time. The
digits of bandwidths are no matter: the times are used. Bandwidths in two units are a ValueError.
"""

import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from meshwise.probe.importers.found import listed, warning

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


Series = tuple[str, Sequence[Printed]]  # with its name


def warnings_of(series: Sequence[Series], source: str) -> list[str]:
    """All that is suspicious about the series of one file; ``source`` begins an error."""
    doubts = (_constant, _descending, _quantised)
    return [text for doubt in doubts for text in doubt(series)] + _unrelated(series, source)


def _constant(series: Sequence[Series]) -> list[str]:
    found = []
    for name, rows in series:
        for time, same in groupby(rows, key=lambda row: row.time):
            run = list(same)
            if len(run) >= _SAME and len({row.size_bytes for row in run}) >= _SAME:
                said = f"{len(run)} sizes from {run[0].where} on have the time {time} ({name})"
                found.append(said)
    return [f"constant: {said}" for said in warning(found, "stretches")]


def _descending(series: Sequence[Series]) -> list[str]:
    found = {
        f"{later.size_bytes} B at {later.where} comes after {row.size_bytes} B": None
        for _, rows in series
        for row, later in pairwise(rows)
        if later.size_bytes < row.size_bytes
    }  # in and out of place are of the same line
    return [f"not ascending: {said}" for said in warning(list(found), "sizes")]


def _quantised(series: Sequence[Series]) -> list[str]:
    coarse = [name for name, rows in series for row in rows if _digits(row.time) < 3]
    total, names = sum(len(rows) for _, rows in series), listed(list(dict.fromkeys(coarse)))
    said = f"quantised: {len(coarse)} of {total} times have fewer than three digits: {names}"
    return [said] * bool(coarse)


def _digits(text: str) -> int:
    """Significant digits as printed: ``0.05`` has one, ``18.30`` four."""
    mantissa = re.split("[eE]", text)[0]
    return len(re.sub(r"[^0-9]", "", mantissa).lstrip("0"))


def _unrelated(series: Sequence[Series], source: str) -> list[str]:
    """Bandwidths that size and time do not give, beyond the rounding of both."""
    wrong = []
    for name, rows in series:
        units: dict[str, str] = {}
        for row in rows:
            if _digits(row.busbw) < 3 or _digits(row.time) < 3 or not row.bus_bytes:
                continue
            ratio = float(row.busbw) * 1e9 * row.time_s / row.bus_bytes
            if abs(ratio - 1) <= _TOLERANCE:
                units.setdefault("GB/s", row.where)
                continue
            for off, unit in _UNITS.items():
                if abs(ratio / off - 1) <= _TOLERANCE:
                    units.setdefault(unit, row.where)
            wrong.append(f"{row.where} ({ratio:.3g} times, {name})")
        if len(units) > 1:
            said = ", ".join(f"{unit} from {where}" for unit, where in units.items())
            raise ValueError(
                f"{source}: {name}: bandwidths in mixed units ({said}); split the file"
            )
    said = f"busbw does not follow from size and time in {len(wrong)} rows: {listed(wrong)}"
    return [said] * bool(wrong)
