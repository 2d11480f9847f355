"""The tables of nccl-tests (and rccl-tests), however they were written, as samples.

size = max(send, receive) of a rank, that is n * count for all_gather, reduce_scatter, all_to_all,
gather and scatter; algbw = size/t; busbw = algbw * factor (nccl-tests, doc/PERFORMANCE.md).
nccl-tests rounds counts down to 16 bytes a rank, so the smallest sizes print as 0. Such rows count
in the footer's mean over all rows and both placements, but are not samples.

Old versions do not name the collective. It follows from count, redop, root and busbw/algbw. If
several collectives fit, the file's name decides.
"""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from msgspec.structs import replace

from meshwise.probe.importers.found import (
    DTYPES,
    KINDS,
    Doubts,
    Found,
    Printed,
    check_one_run,
    found_of,
    is_number,
    kind_named,
    refusal,
    short,
    warnings_about,
)
from meshwise.probe.importers.suspicion import in_one_unit, warnings_of
from meshwise.spec import Case, Collective
from meshwise.spec.op import DTYPE_BYTES, REDUCING, ROOTED, WHOLE, CollectiveKind, Regime

SIZE_KIND = "the larger of a rank's send and receive buffer (nccl-tests' size), kept"
PLACES = ("out of place", "in place")
PRINTED = ("time", "algbw", "busbw")  # what every placement of a row has
TIME_KIND = "mean over the iterations of one loop, and over ranks unless -a said otherwise"

_KINDS = {word: kind for word, kind in KINDS.items() if kind not in ("all_to_all_v", "send")}
# Largest allowed error of a sum, if ``error`` is printed instead of ``#wrong`` (DeltaMaxValue).
_MOST_ERROR = {"fp16": 1e-2, "bf16": 1e-2, "fp32": 1e-5, "fp64": 1e-12}


Ranks = tuple[tuple[int, int, str, str], ...]  # (rank, group, host, device)


class Line(NamedTuple):
    """A printed row: its left columns, and each placement's printed values by column name."""

    where: str
    size_bytes: int
    count: int  # type: ignore[assignment]  # not tuple's method
    type: str
    redop: str
    root: int
    values: dict[bool, dict[str, str]]  # by in_place


class Section(NamedTuple):
    """One table: its ranks, what was run, its rows and its footer."""

    program: str
    ranks: Ranks
    regime: Regime
    lines: list[Line]
    average: float | None
    version: str
    nccl: str


def read(sections: Sequence[Section], name: str, doubts: Doubts) -> Found:
    """Return the samples, warnings and facts of the tables of one file. ``name``: the file's, which
    may tell the collective."""
    sections = [
        section._replace(ranks=_listed_ranks(section.ranks, doubts))
        for section in sections
        if section.lines
    ]
    if not sections:
        raise refusal(doubts)
    _check_alike(sections)
    tables, facts = [], []
    for section in sections:
        kind, word = _kind(section, name)
        if word:
            told = "of the tables lacks its collective, which the file's name has"
            doubts[told].append(f"{kind} ({word})")
        tables.append(in_one_unit(list(_rows(section, kind, doubts)), doubts))
        mean = fmean(
            float(half["busbw"]) for line in section.lines for half in line.values.values()
        )
        if section.average is not None and abs(mean - section.average) > 0.01:
            told = "footers differ from the mean busbw of their rows"
            doubts[told].append(f"{section.average} beside {mean:.4f} ({kind})")
        facts.append(
            {
                "collective": kind,
                "rows": len(section.lines),
                "size_0_rows": [
                    {"where": line.where, "count": line.count}
                    | {PLACES[place].replace(" ", "_"): half for place, half in line.values.items()}
                    for line in section.lines
                    if not line.size_bytes
                ],
                "average_bus_bandwidth": section.average,
                "average_of_rows": mean,
            }
        )
    everyone = {(rank, host, device) for s in sections for rank, _, host, device in s.ranks}
    devices = sorted({device for _, _, device in everyone})
    if len(devices) > 1:
        raise ValueError(f"devices differ ({', '.join(devices)}); ranks must be of one kind")
    warnings = warnings_about(doubts)
    if not any(tables):
        raise ValueError(f"no row has a counterpart here: {'; '.join(warnings)}")
    return found_of(
        (row for rows in tables for row in rows),
        (*warnings, *warnings_of(tables)),
        tool=f"nccl-tests {sections[-1].version}".strip(),
        size_kind=SIZE_KIND,
        time_kind=TIME_KIND,
        num_hosts=len({host for _, host, _ in everyone}),
        world_size=len({rank for rank, _, _ in everyone}),
        device=devices[0],
        facts={"tables": facts, "nccl": _nccl_version(sections[-1].nccl)},
    )


def _check_alike(sections: Sequence[Section]) -> None:
    """Check that all tables are of one machine and one version: they become one run directory."""
    places = [section.lines[0].where for section in sections]
    told = [
        {"nccl-library": s.nccl, "nccl-tests version": s.version, "number of ranks": len(s.ranks)}
        for s in sections
    ]
    known = [{what: value for what, value in each.items() if value} for each in told]
    check_one_run(zip(places, known, strict=True))
    hosts = [{host for _, _, host, _ in section.ranks} for section in sections]
    for place, other in zip(places, hosts, strict=True):
        if other != hosts[0]:
            raise ValueError(f"{places[0]} and {place} are of different hosts; split the file")


def _nccl_version(code: str) -> str | None:
    """Return the version of a code: 22809 is 2.28.9."""
    if not re.fullmatch("[0-9]{4,6}", code):
        return None
    number = int(code)
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _listed_ranks(ranks: Ranks, doubts: Doubts) -> Ranks:
    """List each rank once, in order. If a few ranks of a single group are missing from the list,
    fill each in with host and device of the rank before it."""
    by_rank = {entry[0]: entry for entry in reversed(ranks)}
    if not by_rank:
        raise ValueError("the list of devices is missing; import the whole log")
    if len(set(ranks)) > len(by_rank):
        raise ValueError("the list of devices has a rank twice: logs of two runs? split the file")
    missing = max(by_rank) + 1 - len(by_rank)
    if missing > len(by_rank):
        raise ValueError(f"the list of devices lacks {missing} ranks; import the whole log")
    if missing == 0 or len({group for _, group, _, _ in ranks}) > 1:
        return tuple(by_rank[rank] for rank in sorted(by_rank))
    last, whole = by_rank[min(by_rank)], []
    for rank in range(max(by_rank) + 1):
        last = by_rank.get(rank, (rank, *last[1:]))
        whole.append(last)
    lost = [f"rank {rank}" for rank, *_ in whole if rank not in by_rank]
    doubts["ranks are not in the list of devices and are taken as there"] = lost
    return tuple(whole)


def _group(section: Section) -> tuple[int, int]:
    """Return size and stride of the groups, which all run at once."""
    members = sorted(rank for rank, group, _, _ in section.ranks if group == section.ranks[0][1])
    steps = {b - a for a, b in pairwise(members)}
    if len(steps) > 1:
        raise ValueError(f"group of ranks {members}: not evenly spaced, so it has no stride")
    return len(members), next(iter(steps), 1)


def _kind(section: Section, name: str) -> tuple[CollectiveKind, str]:
    """Return the collective, and the word of the file's name if only that tells it."""
    program = section.program.rpartition("/")[2].removesuffix("_perf")
    if program:
        named = kind_named(program)
        if named is None or named not in _KINDS.values():
            raise ValueError(f"{program} is no collective that measure import knows")
        return named, ""
    possible = _possible(section)
    if len(possible) == 1:
        return possible[0], ""
    words = [word for word in _KINDS if word in re.sub("[_-]", "", name.lower())]
    word = max(words, key=len, default="")
    kind = _KINDS.get(word)
    if kind is None or (possible and kind not in possible):
        raise ValueError(
            f"does not say which collective it measured ({' or '.join(possible) or 'none'} "
            "by its columns); name it in the file's name, as all_gather.log"
        )
    return kind, word


def _possible(section: Section) -> list[CollectiveKind]:
    """List the collectives that fit count, redop, root and the ratio of the bandwidths."""
    ranks = _group(section)[0]
    line = max(section.lines, key=lambda line: line.size_bytes)
    half = next(iter(line.values.values()))
    if ranks < 2 or line.type not in DTYPES or not float(half["algbw"]):
        return []
    whole = line.size_bytes == line.count * DTYPE_BYTES[DTYPES[line.type]] * ranks
    ratio = float(half["busbw"]) / float(half["algbw"])
    return [
        kind
        for kind in _KINDS.values()
        if (kind not in WHOLE) == whole
        and (kind in ROOTED) == (line.root >= 0)
        and (kind == "send_recv" or (kind in REDUCING) == (line.redop not in ("", "none")))
        and abs(ratio - Collective(kind=kind, size_bytes=1, group_size=ranks).bus_factor) < 0.02
    ]


def _rows(section: Section, kind: CollectiveKind, doubts: Doubts) -> Iterator[Printed]:
    """Yield a row for each placement. Sizes of 0 and rows without a counterpart become doubts."""
    size, stride = _group(section)
    for line in section.lines:
        dtype = DTYPES.get(line.type)
        what, where = "rows have no counterpart here", line.where
        if line.size_bytes == 0:
            what = "rows of size 0 are kept for the footer's mean and are no samples"
        elif dtype is None:
            where = f"type {line.type} at {line.where}"
        elif line.redop not in ("", "none", "sum"):
            where = f"redop {line.redop} at {line.where}"
        else:
            op = Collective(
                kind=kind,
                size_bytes=line.size_bytes,
                group_size=size,
                group_stride=stride,
                dtype=dtype,
            )
            for in_place, half in line.values.items():
                yield _placed(section, line, replace(op, in_place=in_place), half)
            continue
        doubts[what].append(where)


def _placed(section: Section, line: Line, op: Collective, half: dict[str, str]) -> Printed:
    metrics: dict[str, float | tuple[float, ...]] = {
        "printed_algbw_bytes_per_s": float(half["algbw"]) * 1e9,
        "printed_busbw_bytes_per_s": float(half["busbw"]) * 1e9,
    }
    if is_number(wrong := half.get("#wrong", "N/A")):
        metrics["wrong"] = float(wrong)
    times_us = half.get("times_us", "").split()
    if times_us and all(map(is_number, times_us)):
        metrics["iterations_s"] = tuple(float(time_us) * 1e-6 for time_us in times_us)
    fault = f"{float(wrong):g} wrong elements" if metrics.get("wrong") else ""
    if (error := half.get("error", "N/A")) != "N/A":
        off = float(error) if is_number(error) else math.inf
        if off <= _MOST_ERROR[op.dtype]:
            metrics["largest_error"] = off
        else:
            fault = f"a wrong element, off by {short(error)}"
    place = PLACES[op.in_place]
    return Printed(
        where=f"{line.where} {place}",
        case=Case(
            op=op,
            regime=section.regime,
            backend="nccl",  # called directly, without torch
            world_size=len(section.ranks),
        ),
        time_s=float(half["time"]) * 1e-6,
        metrics=metrics,
        fault=fault,
        wrong=bool(fault),
        printed=(half["time"], half["busbw"]),
        series=f"{op.kind} {place}",
    )
