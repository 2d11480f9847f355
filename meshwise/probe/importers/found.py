"""Turn the rows that an importer finds in a file into samples.

In: rows, each a case with the time that the file printed. Out: one ``Sample`` for each case. Rows
of the same case become one sample with all their times, or an error if one had a wrong result.
Nothing is averaged, and a warning tells of the repetition. A row that cannot be read is left out
with a warning. A file with no readable row is a ValueError. Errors do not name the file, since
``importers.read`` does.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_args

from meshwise.spec import Case, Sample
from meshwise.spec.op import CollectiveKind, Dtype
from meshwise.spec.run import MOST_S

DTYPES: dict[str, Dtype] = {
    "float": "fp32", "float32": "fp32", "fp32": "fp32", "double": "fp64", "float64": "fp64",
    "half": "fp16", "float16": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16",
}  # fmt: skip
KINDS: dict[str, CollectiveKind] = {k.replace("_", ""): k for k in get_args(CollectiveKind)}
UNREAD = "rows cannot be read"
T = TypeVar("T")
R = TypeVar("R")


class Printed(NamedTuple):
    """One printed measurement. ``where``: as ``line 17``. ``fault``: why its time cannot be used.
    ``wrong``: its result was wrong, so the case is an error even if other rows are right.
    ``printed``: time and busbw in the file's digits, for ``suspicion``. ``series``: a name shared
    by rows of a table that differ only in size."""

    where: str
    case: Case
    time_s: float
    metrics: dict[str, float | tuple[float, ...]] = {}
    fault: str = ""
    rank_times_s: tuple[float, ...] = ()  # one for each rank, if printed
    wrong: bool = False
    printed: tuple[str, str] = ("", "")
    series: str = ""


class Found(NamedTuple):
    """The contents of one file. ``device``: its name, empty if the file does not say.

    ``size_kind`` and ``time_kind`` say what the file's size and time mean. A sample's size is
    always the one of nccl-tests.
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


class LeftOut(Exception):
    """A valid row that has no counterpart here."""


class Doubts(defaultdict[str, list[str]]):
    """Doubts about a file, each with its places. ``skipped``: why valid rows are left out."""

    def __init__(self) -> None:
        super().__init__(list)
        self.skipped = Counter[str]()


_MOST = 1e15  # larger than any time, size in GB or rate


def is_number(text: str) -> bool:
    try:
        return abs(float(text)) < _MOST  # False for nan
    except ValueError:
        return False


def number(text: str, field: str) -> float:
    if not is_number(text):
        raise ValueError(f"{field} = {short(text)!r}: must be a number")
    return float(text)


def seconds(text: str, field: str, unit_s: float = 1.0) -> float:
    if (time_s := number(text, field) * unit_s) < 1 / MOST_S:
        raise ValueError(f"{field} = {short(text)!r}: a time must be > 0")
    return time_s


def whole(text: str, field: str, least: int = 0) -> int:
    """Parse a whole number of at most 18 digits, so that it fits 64 bits."""
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < least:
        raise ValueError(f"{field} = {short(text)!r}: must be a whole number >= {least}")
    return int(text)


def short(text: str) -> str:
    """Shorten a text for a message."""
    return text if len(text) <= 60 else f"{text[:60]}..."


def kind_named(text: str) -> CollectiveKind | None:
    """Return the collective that other tools spell AllReduce, alltoall, all_gather_base."""
    return KINDS.get(re.sub("_(base|single)$|[^a-z]", "", text.lower()))


def lines_of(text: str, before: int = 0) -> Iterator[tuple[str, str]]:
    """Yield each line with its place, ``line 17``. ``before``: how many lines came before."""
    for number, line in enumerate(text.split("\n"), before + 1):
        yield f"line {number}", line


def line_at(text: str, position: int) -> str:
    """Name the line at a position, as ``lines_of`` does."""
    return f"line {text.count(chr(10), 0, position) + 1}"


def readable(
    rows: Iterable[tuple[str, T]], read: Callable[[str, T], R], doubts: Doubts
) -> Iterator[R]:
    """Yield what ``read`` makes of each row and its place. A row that it cannot read is a doubt."""
    for where, row in rows:
        try:
            yield read(where, row)
        except LeftOut as why:
            doubts.skipped[str(why)] += 1
        except KeyError as error:
            doubts[UNREAD].append(f"{where}: {error} is missing")
        except (AttributeError, TypeError, ValueError) as error:
            doubts[UNREAD].append(f"{where}: {error}")


def strange_units(line: str, known: set[str]) -> set[str]:
    """Return the units of a header, as ``(ms)``, that the tool's tables do not have."""
    return set(re.findall(r"\([^() ]{1,20}\)", line)) - known


def check_one_run(told: Iterable[tuple[str, Mapping[str, object]]]) -> None:
    """Raise a ValueError that names both places if two places of the file contradict each other. A
    file holds one run, or several by one version on one machine."""
    first: dict[str, tuple[object, str]] = {}
    for where, facts in told:
        for what, value in facts.items():
            known, at = first.setdefault(what, (value, where))
            if known != value:
                a, b = known or "not told", value or "not told"
                raise ValueError(
                    f"{what} is {a} at {at} and {b} at {where}: logs of two runs? split the file"
                )


def warning(places: Sequence[str], what: str) -> list[str]:
    """Return a warning that counts and lists places: ``2 rows cannot be read: ...``, if any."""
    return [f"{len(places)} {what}: {listed(places)}"] if places else []


def warnings_about(doubts: Doubts, rows: Iterable[Printed] = ()) -> list[str]:
    """Return a warning for each doubt, and one for the rows that have a fault."""
    skipped = [f"{count} times {why}" for why, count in doubts.skipped.items()]
    told = [f"{doubts.skipped.total()} rows left out: {listed(skipped)}"] * bool(skipped)
    told += [text for what, places in doubts.items() for text in warning(places, what)]
    return told + warning([f"{r.where}: {r.fault}" for r in rows if r.fault], "rows cannot be used")


def refusal(doubts: Doubts) -> ValueError:
    """Return the error for a file of which no row can be read."""
    if not (unread := doubts[UNREAD]):
        return ValueError("has a header and no rows; was the run cut off?")
    others = f"; nor can the other {len(unread) - 1}" if len(unread) > 1 else ""
    return ValueError(f"no row can be read: {unread[0]}{others}")


def listed(texts: Sequence[str]) -> str:
    """Join the first four texts, for a warning that gives their count before."""
    return "; ".join([*texts[:4], *(["..."] if len(texts) > 4 else [])])


def found_of(rows: Iterable[Printed], warnings: Sequence[str], **told: Any) -> Found:
    """Turn the rows into samples, in order, with a warning if some have the same case. ``told``:
    the other fields of ``Found``."""
    by_case: dict[str, list[Printed]] = {}
    for row in rows:
        by_case.setdefault(row.case.id, []).append(row)
    doubled = [
        f"{len(same)} times from {same[0].where} on" for same in by_case.values() if len(same) > 1
    ]
    said = f"duplicated: {len(doubled)} cases are repeated and keep all times: {listed(doubled)}"
    samples = tuple(_sample(case_id, same) for case_id, same in by_case.items())
    return Found(samples=samples, warnings=(*warnings, *[said] * bool(doubled)), **told)


def _sample(case_id: str, rows: list[Printed]) -> Sample:
    wrong = [row for row in rows if row.wrong]
    good = [] if wrong else [r for r in rows if not r.fault and 1 / MOST_S <= r.time_s <= MOST_S]
    used = good or wrong or rows
    metrics = used[0].metrics
    if len(used) > 1:  # one value for each time, in the same order
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
