"""Divide the time of a step: forward, backward, optimizer, exposed communication, bubble.

In: a rank's training. Out: a ``Phases`` of all ranks. Two steps run. The first has marks on the
compute stream (on a CPU: on the clock) between all actions of a rank. The second has the same marks
under torch's profiler, which records when kernels and collectives run. The profiler slows a step,
so the second step's times are mapped to the first's, piecewise linearly, mark by mark.

    exposed = moments when a collective runs and no computation of this rank does
    forward = its stretches between two marks, minus exposed time in them; likewise for backward
              and optimizer (clipping and update)
    bubble  = stretches that wait for a neighbour's message, including the time to send it; in a
              pipeline also waiting for ranks that reach the exchange of the tied weight's
              gradients, the clipping or the end later
    other   = the rest: before the first action and, without a pipeline, after the last
    forward + backward + optimizer + exposed + bubble + other = step

Clocks: all ranks start together, within microseconds on one host, and count from there.

On a CPU a collective runs from its call until gloo's thread is done. Computation is torch's
operators on the main thread, so Python's own time during a collective counts as exposed.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from torch.profiler import record_function

from meshwise import store, torch_private
from meshwise.engine import step
from meshwise.engine.frame import RankJob, no_pauses
from meshwise.ranks import Ranks
from meshwise.spec.phases import (
    ADDENDS,
    Interval,
    Phases,
    PhaseSpan,
    RankPhases,
    union,
    within_s,
    without,
)
from meshwise.timing import clock
from meshwise.tracing import events_of, profiled

MARK = "meshwise: mark"
PHASES = {"F": "forward_s", "B": "backward_s", "I": "backward_s", "W": "backward_s"}
PHASES |= {"clip": "optimizer_s", "optimizer": "optimizer_s"}
PHASES |= {"wait": "bubble_s", "exchange": "exposed_communication_s"}
MEETINGS = ("exchange", "clip")  # where ranks of a pipeline wait for each other
COMMUNICATES = re.compile(r"nccl|nvshmem|multimem|one_shot|two_shot|PtoP", re.IGNORECASE)


class NamedSpan(NamedTuple):
    name: str
    start_s: float
    end_s: float


class Trace(NamedTuple):
    """The profiler's findings, on its own clock. ``messages``: between stages."""

    marks: list[float]
    compute: list[Interval]
    communication: list[NamedSpan]
    messages: list[NamedSpan]


class Marked(NamedTuple):
    """The marks of a step, in seconds since the common start; the last is the end."""

    names: list[str]
    starts: list[float]

    def stretches(self) -> list[NamedSpan]:
        times = pairwise(self.starts)
        return [NamedSpan(name, a, b) for name, (a, b) in zip(self.names, times, strict=False)]


def record(job: RankJob, training: step.TrainingState, run_dir: Path) -> dict[str, float]:
    """Measure on the last batch; return the metrics. Rank 0 writes ``phases.json``."""
    job.say("two steps to see where the time goes")
    work = functools.partial(measure, job.ranks, training, len(training.inputs) - 1)
    measured = job.together("profiled steps", work)
    if job.ranks.rank == 0:
        store.write(run_dir / "phases.json", measured)
    return measured.metrics


def measure(ranks: Ranks, training: step.TrainingState, index: int) -> Phases:
    """Run two steps on batch ``index``; they train the model, too. All ranks return the same."""
    modules = [stage.module for stage in training.pipeline.stages.values()]
    piped = not all(module.first and module.last for module in modules)
    ranks.at("a step with marks")
    marked = _marked(ranks, training, index)
    ranks.at("a step under torch's profiler")
    seen = read(_profiled(ranks, training, index), ranks.device.type, piped=piped)
    assert len(seen.marks) == len(marked.names), (len(seen.marks), marked.names)
    profiled_s = seen.marks[-1] - seen.marks[0] + marked.starts[0]
    told = ranks.gather((marked, _rescaled(seen, marked), profiled_s))
    of_ranks = [(msgspec.convert(a, Marked), msgspec.convert(b, Trace)) for a, b, _ in told]
    step_s = max(mine.starts[-1] for mine, _ in of_ranks)
    latest = {name: max(_start(mine, name) for mine, _ in of_ranks) for name in MEETINGS}
    return Phases(
        step_s=step_s,
        profiled_step_s=max(profiled_s for *_, profiled_s in told),
        ranks=tuple(
            attributed(rank, *found, step_s=step_s, latest=latest, piped=piped)
            for rank, found in enumerate(of_ranks)
        ),
        spans=tuple(s for rank, found in enumerate(of_ranks) for s in _spans(rank, *found)),
    )


def _marked(ranks: Ranks, training: step.TrainingState, index: int) -> Marked:
    mark, elapsed_s = clock(ranks.device)
    marks: list[tuple[str, Any]] = []
    ranks.synchronize("the steps before")
    with no_pauses():
        ranks.start_together()
        zero = mark()
        step.run(training, index, mark=lambda name: marks.append((name, mark())))
        ranks.synchronize("a step with marks")
    return Marked([name for name, _ in marks], [elapsed_s(zero, at) for _, at in marks])


def _profiled(ranks: Ranks, training: step.TrainingState, index: int) -> list[dict[str, Any]]:
    """Return the events of one step. A mark on a GPU is an empty kernel: the host's annotations do
    not cover kernels that backward's threads launch."""

    def mark(_: str) -> None:
        if ranks.device.type == "cuda":
            torch_private.sleep(1)
            return
        with record_function(MARK):
            pass

    with profiled(ranks.device.type) as profiler:
        ranks.start_together()
        step.run(training, index, mark=mark)
        ranks.synchronize("a step under torch's profiler")
    return events_of(profiler)


def read(events: Iterable[dict[str, Any]], device_type: str, *, piped: bool) -> Trace:
    """Sort the events of torch's trace by kind. Its times are microseconds."""
    kind_of = _gpu_kind if device_type == "cuda" else _cpu_kind
    whole = [event for event in events if event.get("ph") == "X"]
    if device_type == "cpu":  # gloo's threads call torch's operators, too
        main = next(event["tid"] for event in whole if event["name"] == MARK)
        whole = [e for e in whole if e["tid"] == main or e["name"].startswith("gloo:")]
    found: dict[str, list[NamedSpan]] = {
        "mark": [],
        "compute": [],
        "communication": [],
        "message": [],
    }
    for event in whole:
        kind, name = kind_of(event)
        if kind in found:
            start_s = event["ts"] / 1e6
            found[kind].append(NamedSpan(name, start_s, start_s + event["dur"] / 1e6))
    if not piped:
        found["communication"] += found.pop("message")
    return Trace(
        marks=sorted(mark.start_s for mark in found["mark"]),
        compute=union((start, end) for _, start, end in found["compute"]),
        communication=found["communication"],
        messages=found.get("message", []),
    )


def _gpu_kind(event: dict[str, Any]) -> tuple[str, str]:
    """Return (kind, name) of an event on the device. NCCL's all-to-all and its messages have the
    same kernel name; an argument of the event tells them apart."""
    name, category = event["name"], event.get("cat")
    if category == "kernel" and "spin_kernel" in name:
        return "mark", ""
    if category in ("kernel", "gpu_memcpy") and COMMUNICATES.search(name):
        asked = event.get("args", {}).get("Collective name", "")
        collective = "SendRecv" not in name or "all_to_all" in asked
        return ("communication" if collective else "message"), asked.strip("_") or name
    copies = category == "gpu_memcpy" and "DtoD" in name
    return ("compute" if category in ("kernel", "gpu_memset") or copies else ""), name


def _cpu_kind(event: dict[str, Any]) -> tuple[str, str]:
    name = event["name"]
    if name == MARK:
        return "mark", ""
    if name.startswith("gloo:"):
        name = name.removeprefix("gloo:")
        return ("message" if name in ("send", "recv") else "communication"), name
    computes = name.startswith(("aten::", "CompiledFunction", "Torch-Compiled Region"))
    return ("compute" if computes else ""), name


def _rescaled(seen: Trace, marked: Marked) -> Trace:
    """Return the trace on the clock of the step that was not profiled."""

    def moved(times: list[float]) -> list[float]:
        return [float(t) for t in np.interp(times, seen.marks, marked.starts)]

    def named(spans: list[NamedSpan]) -> list[NamedSpan]:
        starts, ends = moved([s.start_s for s in spans]), moved([s.end_s for s in spans])
        found = [NamedSpan(s.name, a, b) for s, a, b in zip(spans, starts, ends, strict=True)]
        return [span for span in found if span.end_s > span.start_s]

    starts, ends = moved([a for a, _ in seen.compute]), moved([b for _, b in seen.compute])
    compute = union(zip(starts, ends, strict=True))
    return Trace(marked.starts, compute, named(seen.communication), named(seen.messages))


def _start(marked: Marked, name: str) -> float:
    return marked.starts[marked.names.index(name)] if name in marked.names else 0.0


def attributed(
    rank: int,
    marked: Marked,
    trace: Trace,
    *,
    step_s: float,
    latest: Mapping[str, float],
    piped: bool,
) -> RankPhases:
    """Divide one rank's seconds. ``latest``: when the last rank reaches each of ``MEETINGS``."""
    times = dict.fromkeys(ADDENDS, 0.0)
    communicates = union((start, end) for _, start, end in trace.communication)
    alone = without(communicates, trace.compute)
    for name, start, end in marked.stretches():
        phase = PHASES[name.split()[0]]
        if name == "wait":
            times["bubble_s"] += end - start
            continue
        met = max(start, min(end, latest[name])) if piped and name in MEETINGS else start
        idles = [(start, end)] if name == "exchange" else alone
        before_s, behind_s = within_s(idles, start, met), within_s(idles, met, end)
        times["bubble_s"] += before_s
        times["exposed_communication_s"] += behind_s
        times[phase] += end - start - before_s - behind_s
    times["bubble_s" if piped else "other_s"] += step_s - marked.starts[-1]
    times["other_s"] += marked.starts[0]
    times = {name: max(0.0, seconds) for name, seconds in times.items()}  # rounding
    return RankPhases(rank=rank, communication_s=within_s(communicates, 0.0, step_s), **times)


def _spans(rank: int, marked: Marked, trace: Trace) -> list[PhaseSpan]:
    """List the spans of a rank's work, without its waits."""
    streams = {
        "compute": [s for s in marked.stretches() if s.name != "wait" and s.end_s > s.start_s],
        "communication": trace.communication,
        "messages": trace.messages,
    }
    return [
        PhaseSpan(rank=rank, stream=stream, name=name, start_s=start, end_s=end)  # type: ignore[arg-type]
        for stream, spans in streams.items()
        for name, start, end in spans
    ]
