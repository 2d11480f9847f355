"""A step's timeline, measured or predicted, as a trace for Perfetto and chrome://tracing.

In: the spans of a measured step (``phases.json``) or of batches of inference, or a plan with its
prediction. Out: JSON in the Trace Event Format, the same for both: a process for each pipeline
rank, a thread for each stream of its ranks, times in microseconds. An action is named by kind,
stage and microbatch: ``F 0.3``. In inference the name includes the batch: ``F 0.3 of batch 2``.

A prediction shows one rank of each pipeline rank. Every action takes its stage's predicted time,
and transfers are left out. The rest of the predicted step follows the last action as one slice.
"""

import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwise import files, schedule
from meshwise.spec import Layout, Plan
from meshwise.spec.phases import PhaseSpan

REST = "communication and optimizer"
ACTIONS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward of weights"}
_NAME = re.compile(r"([FBIW]) (?P<stage>\d+)\.(?P<microbatch>\d+)(?: of batch (?P<batch>\d+))?")


def write(path: Path, layout: Layout, spans: Iterable[PhaseSpan]) -> Path:
    """Write the trace of spans and return its path."""
    return files.write_whole(path, json.dumps(trace(layout, spans)) + "\n")


def predicted(plan: Plan) -> list[PhaseSpan]:
    """Return the timeline that a plan predicts. Raises a ValueError if it was not priced.

    Without stage times, the parts of the predicted step follow one another.
    """
    told, layout = plan.prediction, plan.layout
    if told is None:
        raise ValueError("Plan.prediction is None: the plan was not priced; meshwise plan does")
    rows: list[list[tuple[str, float, float]]] = [[]]
    if times := told.stage_times:
        table = schedule.table(
            layout.schedule, layout.pp, layout.stages_per_rank, layout.num_microbatches
        )
        spans = schedule.simulate(table, lambda action: times[action.stage].of_action(action.kind))
        name = "{0.kind} {0.stage}.{0.microbatch}".format
        rows = [[(name(action), start, end) for action, start, end in row] for row in spans]
    else:
        ends = list(itertools.accumulate((part.value for part in told.time_parts), initial=0.0))
        names = [part.name for part in told.time_parts]
        rows = [list(zip(names, ends[:-1], ends[1:], strict=True))]
    for row in rows:
        last_s = row[-1][2] if row else 0.0
        if last_s < told.step_time_s:
            row.append((REST, last_s, told.step_time_s))
    return [
        PhaseSpan(
            rank=layout.devices_of(pipeline_rank)[0],
            stream="compute",
            name=name,
            start_s=start,
            end_s=end,
        )
        for pipeline_rank, row in enumerate(rows)
        for name, start, end in row
    ]


def trace(layout: Layout, spans: Iterable[PhaseSpan]) -> dict[str, Any]:
    """Return the trace as a JSON object. Slices of a thread must not overlap, so a stream with
    overlapping spans gets several threads."""
    threads: dict[tuple[int, str, int], int] = {}
    ends: dict[tuple[int, str], list[float]] = {}  # when each thread of a stream is free
    slices = []
    for span in sorted(spans, key=lambda span: (span.rank, span.stream, span.start_s)):
        lanes = ends.setdefault((span.rank, span.stream), [])
        lane = next((i for i, end_s in enumerate(lanes) if end_s <= span.start_s), len(lanes))
        lanes[lane : lane + 1] = [span.end_s]
        thread = threads.setdefault((span.rank, span.stream, lane), len(threads))
        slices.append(_slice(layout, span, thread))
    names = [_named("process_name", rank, 0, f"pipeline rank {rank}") for rank in range(layout.pp)]
    for (rank, stream, lane), thread in threads.items():
        label = f"rank {rank} {stream}" + (f" {lane + 1}" if lane else "")
        names.append(_named("thread_name", layout.pipeline_rank_of(rank), thread, label))
    return {"traceEvents": names + slices, "displayTimeUnit": "ms"}


def _slice(layout: Layout, span: PhaseSpan, thread: int) -> dict[str, Any]:
    found = _NAME.fullmatch(span.name) if span.stream == "compute" else None
    action = found.groupdict() if found else {}
    return {
        "name": span.name,
        "cat": ACTIONS[found[1]] if found else span.stream,
        "ph": "X",
        "pid": layout.pipeline_rank_of(span.rank),
        "tid": thread,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {"rank": span.rank} | {key: int(n) for key, n in action.items() if n is not None},
    }


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
