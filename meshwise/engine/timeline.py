"""What each rank did when, as a trace that Perfetto and chrome://tracing open.

In: spans of all ranks on one clock. Out: JSON of the Trace Event Format: a process for each
pipeline rank, a thread for each rank, times in microseconds.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from meshwise.spec import Layout


class Span(NamedTuple):
    """A rank's work on a microbatch in a stage; seconds since all ranks started."""

    rank: int
    stage: int
    batch: int
    microbatch: int
    start_s: float
    end_s: float


def trace(layout: Layout, spans: Iterable[Span]) -> dict[str, Any]:
    """The JSON object, with every rank and pipeline rank by name."""
    events: list[dict[str, Any]] = []
    for number in range(layout.pp):
        events.append(_name("process_name", number, 0, f"pipeline rank {number}"))
        for rank in layout.devices_of(number):
            events.append(_name("thread_name", number, rank, f"rank {rank}"))
    events += [
        {
            "name": f"stage {span.stage}, batch {span.batch}, microbatch {span.microbatch}",
            "cat": "forward",
            "ph": "X",
            "pid": layout.pipeline_rank_of(span.rank),
            "tid": span.rank,
            "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
        }
        for span in spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(path: Path, layout: Layout, spans: Iterable[Span]) -> None:
    path.write_text(json.dumps(trace(layout, spans)) + "\n")


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
