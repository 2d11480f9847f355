"""A step's timeline, measured or predicted, as a trace that Perfetto and chrome://tracing open.

In: the spans of a measured step (``phases.json``), of batches of inference, or a plan with its
prediction. Out: JSON of the
Trace Event Format, the same of both: a process for each pipeline rank, a thread for each stream
of each of its ranks, times in microseconds. An action is named kind, stage and microbatch,
``F 0.3``, and in inference the batch: ``F 0.3 of batch 2``.

A prediction shows one rank of each pipeline rank, every action at its stage's predicted time,
transfers left out, and behind the last of them the rest of the predicted step in one piece.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwise import files, schedule
from meshwise.spec import Layout, Plan
from meshwise.spec.phases import Span

REST = "communication and optimizer"
ACTIONS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward of weights"}
_NAME = re.compile(r"([FBIW]) (?P<stage>\d+)\.(?P<microbatch>\d+)(?: of batch (?P<batch>\d+))?")


def write(path: Path, layout: Layout, spans: Iterable[Span]) -> Path:
    """Write the trace of spans; the path."""
    return files.write_whole(path, json.dumps(trace(layout, spans)) + "\n")


def predicted(plan: Plan) -> list[Span]:
    """The timeline that a plan predicts; ValueError if it was not priced."""
    prediction, layout = plan.prediction, plan.layout
    if prediction is None:
        raise ValueError("Plan.prediction is None: the plan was not priced; meshwise plan does")
    table = schedule.table(
        layout.schedule, layout.pp, layout.stages_per_rank, layout.num_microbatches
    )
    rows: list[list[tuple[str, float, float]]] = [[] for _ in table]
    if times := prediction.stage_times:
        spans = schedule.simulate(table, lambda action: times[action.stage].of_action(action.kind))
        rows = [[(_name(action), start, end) for action, start, end in row] for row in spans]
    else:
        rows = [_by_part(plan)]
    for row in rows:
        if row[-1][2] < prediction.step_time_s:
            row.append((REST, row[-1][2], prediction.step_time_s))
    return [
        Span(
            rank=layout.devices_of(pipeline_rank)[0],
            stream="compute",
            name=name,
            start_s=start,
            end_s=end,
        )
        for pipeline_rank, row in enumerate(rows)
        for name, start, end in row
    ]


def _by_part(plan: Plan) -> list[tuple[str, float, float]]:
    """Without a pipeline: the parts of the predicted time, one behind the other."""
    assert plan.prediction is not None
    found, clock = [], 0.0
    for part in plan.prediction.time_parts:
        found.append((part.name, clock, clock + part.value))
        clock += part.value
    return found or [(REST, 0.0, plan.prediction.step_time_s)]


def _name(action: schedule.Action) -> str:
    return f"{action.kind} {action.stage}.{action.microbatch}"


def trace(layout: Layout, spans: Iterable[Span]) -> dict[str, Any]:
    """The JSON object. Slices of one thread must not overlap: a stream that does several things at
    once gets a thread for each."""
    threads: dict[tuple[int, str, int], int] = {}
    ends: dict[tuple[int, str], list[float]] = {}  # of each thread of a stream
    slices = []
    for span in sorted(spans, key=lambda span: (span.rank, span.stream, span.start_s)):
        lanes = ends.setdefault((span.rank, span.stream), [])
        lane = next((i for i, end_s in enumerate(lanes) if end_s <= span.start_s), len(lanes))
        lanes[lane : lane + 1] = [span.end_s]
        thread = threads.setdefault((span.rank, span.stream, lane), len(threads))
        slices.append(_slice(layout, span, thread))
    names = [
        _named("process_name", number, 0, f"pipeline rank {number}") for number in range(layout.pp)
    ]
    for (rank, stream, lane), thread in threads.items():
        label = f"rank {rank} {stream}" + (f" {lane + 1}" if lane else "")
        names.append(_named("thread_name", layout.pipeline_rank_of(rank), thread, label))
    return {"traceEvents": names + slices, "displayTimeUnit": "ms"}


def _slice(layout: Layout, span: Span, thread: int) -> dict[str, Any]:
    action = _action(span)
    return {
        "name": span.name,
        "cat": action.pop("kind", span.stream),
        "ph": "X",
        "pid": layout.pipeline_rank_of(span.rank),
        "tid": thread,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {"rank": span.rank, **action},
    }


def _action(span: Span) -> dict[str, Any]:
    """What a name such as ``F 0.3`` says."""
    found = _NAME.fullmatch(span.name)
    if span.stream != "compute" or found is None:
        return {}
    numbers = {name: int(n) for name, n in found.groupdict().items() if n is not None}
    return {"kind": ACTIONS[found[1]], **numbers}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
