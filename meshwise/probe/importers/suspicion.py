"""Warn of printed measurements that look suspicious.

In: the rows of each table of a file, with the digits that were printed. Out: one warning for each
kind of doubt: constant times, sizes that do not ascend, times printed with too few digits,
bandwidths that do not follow from size and time. Bandwidths with few digits are no doubt, as only
the times are used. Bandwidths in two units are a ValueError; a few times in another are left out.
"""

import re
from collections.abc import Sequence
from itertools import groupby, pairwise

from meshwise.probe.importers.found import Doubts, Printed, listed, warning
from meshwise.spec import Collective

_SAME = 4  # equal times in a row; two or three happen on a plateau
_TOLERANCE = 0.02
_FEW = 0.1  # of a table's rows
_UNITS = {8.0: "Gbit/s", 1 / 1.073741824: "GiB/s", 1000.0: "MB/s", 0.001: "TB/s"}

_Series = list[list[Printed]]  # each list: rows with ``printed`` that differ only in size


def warnings_of(tables: Sequence[Sequence[Printed]]) -> list[str]:
    """Return a warning for all that is suspicious in one file."""
    found: dict[tuple[object, ...], list[Printed]] = {}
    for number, rows in enumerate(tables):
        for row in rows:
            if row.printed[0]:
                key = number, row.series, _op(row).dtype
                found.setdefault(key, []).append(row)
    series = list(found.values())
    doubts = (_constant, _descending, _quantised)
    return [text for doubt in doubts for text in doubt(series)] + _unrelated(series)


def in_one_unit(rows: Sequence[Printed], doubts: Doubts) -> list[Printed]:
    """Return the rows of a table without those, if few, whose times are 1000 times what size and
    bandwidth say, or a 1000th of it: milliseconds among microseconds. They become doubts."""
    ratios = [_ratio(row) or 1.0 for row in rows]
    off = [any(abs(ratio / by - 1) <= _TOLERANCE for by in (1e3, 1e-3)) for ratio in ratios]
    if sum(off) > _FEW * len(rows):
        return list(rows)
    doubts["rows are left out, their times are in another unit"] += [
        f"{row.where}: {ratio:.4g} times what size and bandwidth say"
        for row, ratio, odd in zip(rows, ratios, off, strict=True)
        if odd
    ]
    return [row for row, odd in zip(rows, off, strict=True) if not odd]


def _ratio(row: Printed) -> float | None:
    """Return printed bandwidth times time over size; None if either has too few digits."""
    time, busbw = row.printed
    expected = _op(row).size_bytes * _op(row).bus_factor
    if min(_digits(time), _digits(busbw)) < 3 or not expected:
        return None
    return float(busbw) * 1e9 * row.time_s / expected


def _op(row: Printed) -> Collective:
    assert isinstance(row.case.op, Collective)
    return row.case.op


def _constant(series: _Series) -> list[str]:
    found = []
    for rows in series:
        for time, same in groupby(rows, key=lambda row: row.printed[0]):
            run = list(same)
            if len(run) >= _SAME and len({_op(row).size_bytes for row in run}) >= _SAME:
                where = f"{len(run)} sizes from {_line(run[0])} on"
                found.append(f"{where} have the time {time} ({run[0].series})")
    return [f"constant: {said}" for said in warning(found, "stretches")]


def _descending(series: _Series) -> list[str]:
    found = {
        f"{_op(later).size_bytes} B at {_line(later)} comes after {_op(row).size_bytes} B": None
        for rows in series
        for row, later in pairwise(rows)
        if _op(later).size_bytes < _op(row).size_bytes
    }  # a dict, as a line in and out of place gives the same text
    return [f"not ascending: {said}" for said in warning(list(found), "sizes")]


def _line(row: Printed) -> str:
    """Return ``line 17`` of ``line 17 in place``."""
    return " ".join(row.where.split()[:2])


def _quantised(series: _Series) -> list[str]:
    coarse = [row.series for rows in series for row in rows if _digits(row.printed[0]) < 3]
    total, names = sum(map(len, series)), listed(list(dict.fromkeys(coarse)))
    said = f"quantised: {len(coarse)} of {total} times have fewer than three digits: {names}"
    return [said] * bool(coarse)


def _digits(text: str) -> int:
    """Count significant digits as printed: ``0.05`` has one, ``18.30`` four."""
    mantissa = re.split("[eE]", text)[0]
    return len(re.sub(r"[^0-9]", "", mantissa).lstrip("0"))


def _unrelated(series: _Series) -> list[str]:
    """Warn of bandwidths that differ from size / time by more than rounding."""
    wrong = []
    for rows in series:
        units: dict[str, str] = {}
        for row in rows:
            if (ratio := _ratio(row)) is None:
                continue
            if abs(ratio - 1) <= _TOLERANCE:
                units.setdefault("GB/s", _line(row))
                continue
            for off, unit in _UNITS.items():
                if abs(ratio / off - 1) <= _TOLERANCE:
                    units.setdefault(unit, _line(row))
            wrong.append(f"{_line(row)} ({ratio:.3g} times, {row.series})")
        if len(units) > 1:
            said = ", ".join(f"{unit} from {where}" for unit, where in units.items())
            raise ValueError(
                f"{rows[0].series}: bandwidths in mixed units ({said}); split the file"
            )
    said = f"busbw does not follow from size and time in {len(wrong)} rows: {listed(wrong)}"
    return [said] * bool(wrong)
