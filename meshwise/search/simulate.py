"""Run a rank's program on paper: when each task ends, and how many bytes live at each moment.

Time: a task starts when its stream is free and everything it reads has been written; the
optimizer waits for all streams. On devices whose communication uses the same processors as the
mathematics (CPUs), both streams are one.

Memory: a buffer lives from its first writer to its last reader in issue order, on top of what is
resident. The peak is reported by role.
"""

from collections.abc import Callable
from typing import NamedTuple

from meshwise.models import Program, Task


class Timeline(NamedTuple):
    """``parts``: seconds of the compute stream by what it did; idle time is exposed traffic."""

    time_s: float
    parts: dict[str, float]


class Peak(NamedTuple):
    total_bytes: float
    parts: dict[str, float]


WAITING = "data-parallel communication (exposed)"


def run_program(
    program: Program,
    time_of: Callable[[Task], float],
    part_of: Callable[[Task], str],
    one_stream: bool,
) -> Timeline:
    """Finish time of the step and where the compute stream's time went; parts add up to it."""
    free = {"compute": 0.0, "dp": 0.0}
    written: dict[str, float] = {}
    parts: dict[str, float] = {}
    for task in program.tasks:
        stream = "compute" if one_stream else task.stream
        start = max(free[stream], *(written.get(name, 0.0) for name in task.reads), 0.0)
        if task.phase == "optimizer":
            start = max(start, *free.values())
        duration = time_of(task)
        if stream == "compute":
            _add(parts, WAITING, start - free[stream])
            _add(parts, WAITING if task.stream == "dp" else part_of(task), duration)
        free[stream] = start + duration
        for name in task.writes:
            written[name] = free[stream]
    end = max(free.values())
    _add(parts, WAITING, end - free["compute"])
    return Timeline(end, parts)


def _add(parts: dict[str, float], name: str, amount: float) -> None:
    if amount > 0:
        parts[name] = parts.get(name, 0.0) + amount


def peak_memory(program: Program, scale: Callable[[str], float]) -> Peak:
    """The largest sum of live bytes; ``scale`` corrects a buffer's counted size by its name."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, task in enumerate(program.tasks):
        for name in task.writes:
            first.setdefault(name, index)
            last[name] = index
        for name in task.reads:
            last[name] = index
    ends: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in program.kept:
            ends.setdefault(index, []).append(name)
    live: dict[str, float] = dict.fromkeys(program.resident_bytes, 0.0) | program.resident_bytes
    best = Peak(sum(live.values()), dict(live))
    for index, task in enumerate(program.tasks):
        for name in task.writes:
            if first[name] == index:
                _change(live, program, name, scale(name))
        total = sum(live.values())
        if total > best.total_bytes:
            best = Peak(total, dict(live))
        for name in ends.get(index, ()):
            if name in first:
                _change(live, program, name, -scale(name))
    return best


def _change(live: dict[str, float], program: Program, name: str, factor: float) -> None:
    buffer = program.buffers[name]
    role = ROLES[buffer.role]
    live[role] = live.get(role, 0.0) + factor * buffer.num_bytes


ROLES = {
    "activation": "activations",
    "weights": "gathered weights",
    "gradient": "gradients",
    "communication": "communication buffers",
}
