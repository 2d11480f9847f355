"""Run a rank's program on paper, action by action: seconds, and bytes that live at each moment.

Time: a task starts when its stream is free and everything it reads has been written. An action
takes as long as it keeps the compute stream; what it leaves on the other stream is noted, so that
a schedule can add it up. On devices whose communication uses the same processors as the
mathematics (CPUs), both streams are one.

Memory: a buffer lives from its first writer to its last reader in issue order, on top of what is
resident. Of an action this leaves two numbers for each role of buffer: how far it rises above what
lived before it, and what it leaves alive (or frees). Actions of other microbatches add to both
what they left, so a schedule can be walked without its tasks. Microbatches share one copy of
gathered weights: these count in full, not as a difference.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshwise.models import Program, Task

Amounts = dict[str, float]
WAITING, COPIES = "data-parallel communication (exposed)", "data-parallel copies"
WEIGHTS = "gathered weights"
ROLES = {
    "activation": "activations",
    "weights": WEIGHTS,
    "gradient": "gradients",
    "communication": "communication buffers",
}


class Charge(NamedTuple):
    """Price of a task: its seconds, what they are spent on, and by how many seconds the group of
    prices that it belongs to may err."""

    time_s: float
    part: str
    group: str
    error_s: float


class Spent(NamedTuple):
    """Seconds of the compute stream by what it did, which add up to ``time_s``; idle time is
    exposed traffic. ``errors``: seconds by group of prices, of either stream.

    ``traffic_s``: of the other stream; that ends ``lag_s`` after the compute stream does, or
    later when it began with traffic of earlier actions.
    """

    time_s: float
    parts: Amounts
    errors: Amounts
    traffic_s: float
    lag_s: float


class Peak(NamedTuple):
    total_bytes: float
    parts: Amounts


class Live(NamedTuple):
    """Bytes by role above what lived before: at an action's worst moment, and after it.

    Of gathered weights all bytes at these moments.
    """

    rise: Amounts
    left: Amounts


def add(amounts: Amounts, name: str, amount: float) -> None:
    if amount:
        amounts[name] = amounts.get(name, 0.0) + amount


def run_program(
    program: Program, charge: Callable[[Task], Charge], one_stream: bool
) -> tuple[list[Spent], Spent]:
    """Seconds of each action, and of the optimizer, when the tasks run in their order."""
    free = {"compute": 0.0, "dp": 0.0}
    written: dict[str, float] = {}

    def run(tasks: Sequence[Task]) -> Spent:
        begin = own_traffic_ends = free["compute"]
        parts, errors, traffic_s = Amounts(), Amounts(), 0.0
        for task in tasks:
            time_s, part, group, error_s = charge(task)
            stream = "compute" if one_stream else task.stream
            ready = max([0.0, *[written.get(name, 0.0) for name in task.reads]])
            start = max(free[stream], ready)
            if stream == "compute":
                add(parts, WAITING, start - free[stream])
                add(parts, part, time_s)
            else:
                traffic_s += time_s
                own_traffic_ends = max(own_traffic_ends, ready) + time_s
            add(errors, group, error_s)
            free[stream] = start + time_s
            for name in task.writes:
                written[name] = free[stream]
        end = free["compute"]
        return Spent(end - begin, parts, errors, traffic_s, own_traffic_ends - end)

    actions = [run(program.tasks[span.start : span.stop]) for span in program.actions]
    return actions, run(program.tasks[program.actions[-1].stop :])


def action_memory(program: Program, scale: Callable[[str], float]) -> tuple[Live, ...]:
    """What each action does to memory; ``scale`` corrects a buffer's counted size by its name."""
    return _walk(program, scale, [(span.start, span.stop) for span in program.actions])


def peak_memory(program: Program, scale: Callable[[str], float]) -> Peak:
    """The largest sum of live bytes of a program run by itself."""
    (whole,) = _walk(program, scale, [(0, len(program.tasks))])
    parts = {role: float(size) for role, size in program.resident_bytes.items()} | whole.rise
    return Peak(sum(parts.values()), parts)


def _walk(
    program: Program, scale: Callable[[str], float], spans: Sequence[tuple[int, int]]
) -> tuple[Live, ...]:
    last: dict[str, int] = {}
    born: list[list[str]] = []
    for index, task in enumerate(program.tasks):
        born.append([name for name in task.writes if name not in last])
        last.update(dict.fromkeys((*task.reads, *task.writes), index))
    ends: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in program.kept:
            ends.setdefault(index, []).append(name)
    alive: dict[str, tuple[str, float]] = {}  # role and bytes of each buffer
    live = Amounts()
    found = []
    for start, stop in spans:
        before = {role: size for role, size in live.items() if role != WEIGHTS}
        best, highest, total = dict(live), 0.0, 0.0
        for index in range(start, stop):
            for name in born[index]:
                buffer = program.buffers[name]
                role, size = alive[name] = ROLES[buffer.role], buffer.num_bytes * scale(name)
                add(live, role, size)
                total += size
            if total > highest:
                best, highest = dict(live), total
            for name in ends.get(index, ()):
                if name in alive:
                    role, size = alive.pop(name)
                    add(live, role, -size)
                    total -= size
        found.append(Live(_difference(best, before), _difference(live, before)))
    return tuple(found)


def _difference(after: Amounts, before: Amounts) -> Amounts:
    return {role: after[role] - before.get(role, 0.0) for role in after}
