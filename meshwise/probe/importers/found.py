"""What an importer finds in a file, and how its rows become samples.

In: rows, each a case with the time that the file printed. Out: one ``Sample`` a case. Rows of the
same case are one sample with all their times; nothing is averaged, and the repetition is a warning.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from meshwise.spec import Case, Sample
from meshwise.spec.op import Dtype

DTYPES: dict[str, Dtype] = {
    "float": "fp32", "float32": "fp32", "fp32": "fp32", "double": "fp64", "float64": "fp64",
    "half": "fp16", "float16": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16",
}  # fmt: skip


class Row(NamedTuple):
    """One printed measurement. ``where``: ``line 17``. ``fault``: why its time cannot be used."""

    where: str
    case: Case
    time_s: float
    metrics: dict[str, float | tuple[float, ...]] = {}
    fault: str = ""
    rank_times_s: tuple[float, ...] = ()  # of each rank, where they are printed


class Found(NamedTuple):
    """What one file holds. ``device`` is its name, empty where the file does not say.

    ``size_kind`` and ``time_kind`` say what the file's size and time mean; a sample's size is
    always nccl-tests' one.
    """

    tool: str
    size_kind: str
    time_kind: str
    num_hosts: int
    world_size: int | None  # None: the file does not say
    device: str
    samples: tuple[Sample, ...]
    warnings: tuple[str, ...]
    facts: dict[str, Any]


def samples_of(rows: Iterable[Row]) -> tuple[tuple[Sample, ...], list[str]]:
    """The rows as samples, in order, and a warning for each case that comes more than once."""
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row.case.id, []).append(row)
    warnings = [
        f"duplicated: {', '.join(row.where for row in same)} are of one case and became one sample"
        for same in by_case.values()
        if len(same) > 1
    ]
    return tuple(_sample(case_id, same) for case_id, same in by_case.items()), warnings


def _sample(case_id: str, rows: list[Row]) -> Sample:
    good = [row for row in rows if not row.fault and 0 < row.time_s < math.inf]
    used = good or rows
    metrics = used[0].metrics
    if len(used) > 1:  # one value a time, in the order of the times
        metrics = {
            name: tuple(value for row in used if isinstance(value := row.metrics[name], float))
            for name in metrics
            if all(name in row.metrics for row in used)
        }
    of_ranks = zip(*(row.rank_times_s for row in good), strict=True) if good else ()
    return Sample(
        case_id=case_id,
        case=rows[0].case,
        status="ok" if good else "error",
        reason="" if good else rows[0].fault or f"the printed time is {rows[0].time_s:g} s",
        times_s=tuple(row.time_s for row in good),
        rank_times_s=tuple(of_ranks),
        metrics=metrics,
    )
