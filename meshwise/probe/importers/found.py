"""Turn the rows that an importer finds in a file into samples.

In: rows, each a case with the time that the file printed. Out: one ``Sample`` a case. Rows of the
same case are one sample with all their times, or an error if the result of one was wrong; nothing
is averaged, and the repetition is a warning.
A row that cannot be read is left out with a warning; a file without any other is a ValueError.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from meshwise.spec import Case, Sample
from meshwise.spec.op import Dtype

DTYPES: dict[str, Dtype] = {
    "float": "fp32", "float32": "fp32", "fp32": "fp32", "double": "fp64", "float64": "fp64",
    "half": "fp16", "float16": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16",
}  # fmt: skip


class Row(NamedTuple):
    """One printed measurement. ``where``: ``line 17``. ``fault``: why its time cannot be used;
    ``wrong``: since the result was, which other rows of the case do not mend."""

    where: str
    case: Case
    time_s: float
    metrics: dict[str, float | tuple[float, ...]] = {}
    fault: str = ""
    rank_times_s: tuple[float, ...] = ()  # of each rank, where they are printed
    wrong: bool = False


class Found(NamedTuple):
    """The contents of one file. ``device`` is its name, empty where the file does not say.

    ``size_kind`` and ``time_kind`` say what the file's size and time mean; a sample's size is
    always nccl-tests' one.
    """

    tool: str
    size_kind: str
    time_kind: str
    world_size: int | None  # None: the file does not say
    samples: tuple[Sample, ...]
    warnings: tuple[str, ...]
    facts: dict[str, Any]
    num_hosts: int = 1
    device: str = ""


_MOST = 1e15  # no time, size in GB or rate is beyond it


def is_number(text: str) -> bool:
    try:
        return abs(float(text)) < _MOST  # not so for nan
    except ValueError:
        return False


def number(text: str, field: str) -> float:
    if not is_number(text):
        raise ValueError(f"{field} = {short(text)!r}: must be a number")
    return float(text)


def seconds(text: str, field: str, unit_s: float = 1.0) -> float:
    if (time_s := number(text, field) * unit_s) <= 0:
        raise ValueError(f"{field} = {short(text)!r}: a time must be > 0")
    return time_s


def whole(text: str, field: str, least: int = 0) -> int:
    """A whole number that 64 bits hold."""
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < least:
        raise ValueError(f"{field} = {short(text)!r}: must be a whole number >= {least}")
    return int(text)


def short(text: str) -> str:
    """Fit for a message."""
    return text if len(text) <= 60 else f"{text[:60]}..."


def warning(places: Sequence[str], what: str) -> list[str]:
    """A warning that counts and lists places, ``2 rows cannot be read: ...``; none without any."""
    return [f"{len(places)} {what}: {listed(places)}"] if places else []


def left_out(unread: Sequence[str]) -> list[str]:
    return warning(unread, "rows cannot be read")


def refusal(name: str, unread: Sequence[str]) -> ValueError:
    """The error of a file none of whose rows can be read."""
    if not unread:
        return ValueError(f"{name}: has a header and no rows; was the run cut off?")
    others = f"; nor can the other {len(unread) - 1}" if len(unread) > 1 else ""
    return ValueError(f"{name}: no row can be read: {unread[0]}{others}")


def listed(texts: Sequence[str]) -> str:
    """The first four, for a warning; the count stands before it."""
    return "; ".join([*texts[:4], *(["..."] if len(texts) > 4 else [])])


def samples_of(rows: Iterable[Row]) -> tuple[tuple[Sample, ...], list[str]]:
    """The rows as samples, in order, and a warning if some are of the same case."""
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row.case.id, []).append(row)
    doubled = [
        f"{len(same)} times from {same[0].where} on" for same in by_case.values() if len(same) > 1
    ]
    said = f"duplicated: {len(doubled)} cases are repeated and keep all times: {listed(doubled)}"
    samples = tuple(_sample(case_id, same) for case_id, same in by_case.items())
    return samples, [said] if doubled else []


def _sample(case_id: str, rows: list[Row]) -> Sample:
    wrong = [row for row in rows if row.wrong]
    good = [] if wrong else [r for r in rows if not r.fault and 0 < r.time_s < math.inf]
    used = good or wrong or rows
    metrics = used[0].metrics
    if len(used) > 1:  # one value a time, in the order of the times
        metrics = {
            name: tuple(value for row in used if isinstance(value := row.metrics[name], float))
            for name in metrics
            if all(name in row.metrics for row in used)
        }
    same_ranks = len({len(row.rank_times_s) for row in good}) == 1
    of_ranks = zip(*(row.rank_times_s for row in good), strict=True) if same_ranks else ()
    return Sample(
        case_id=case_id,
        case=rows[0].case,
        status="ok" if good else "error",
        reason="" if good else used[0].fault or f"the printed time is {rows[0].time_s:g} s",
        times_s=tuple(row.time_s for row in good),
        rank_times_s=tuple(of_ranks),
        metrics=metrics,
    )
