"""Run a rank's program on paper, action by action: seconds, and bytes that live at each moment.

Time: a task starts when its stream is free and everything it reads has been written. An action
takes as long as it keeps the compute stream; what it leaves on the stream of data parallelism is
noted, so that a schedule can add it up. That of attention over ranks (cp) is empty at the end of
each attention. On devices whose communication uses the same processors as the mathematics (CPUs),
all streams are one.

Memory: a buffer lives from its first writer to its last reader in issue order, on top of what is
resident. Of an action this leaves two numbers for each role of buffer: how far it rises above what
lived before it, and what it leaves alive (or frees). Actions of other microbatches add to both
what they left, so a schedule can be walked without its tasks. Microbatches share one copy of
gathered weights: these count in full, not as a difference.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from meshwise.models import Loop, Program, Task

Amounts = dict[str, float]
WAITING, COPIES = "data-parallel communication (exposed)", "data-parallel copies"
SHARING = "context-parallel communication (exposed)"
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
    free = {"compute": 0.0, "dp": 0.0, "cp": 0.0}
    written, shared = dict[str, float](), set[str]()  # shared: what cp's messages brought
    loops = {loop.start: loop for loop in program.loops}
    traffic_s = own_traffic_ends = 0.0

    def step(task: Task, parts: Amounts, errors: Amounts) -> None:
        nonlocal traffic_s, own_traffic_ends
        time_s, part, group, error_s = charge(task)
        stream = "compute" if one_stream else task.stream
        ready = max([written.get(name, 0.0) for name in task.reads], default=0.0)
        start = max(free[stream], ready)
        if stream == "compute":
            late = SHARING if any(written[x] == ready for x in shared & {*task.reads}) else WAITING
            add(parts, late, start - free[stream])
            add(parts, part, time_s)
        elif stream == "cp":
            shared.update(task.writes)
        else:
            traffic_s += time_s
            own_traffic_ends = max(own_traffic_ends, ready) + time_s
        add(errors, group, error_s)
        free[stream] = start + time_s
        for name in task.writes:
            written[name] = free[stream]

    def repeat(loop: Loop, parts: Amounts, errors: Amounts) -> None:
        """Turn after turn until one leaves the clocks as the one before; then all others at once,
        since they would, too."""
        nonlocal traffic_s, own_traffic_ends
        tasks = program.tasks[loop.start : loop.stop]
        sends = not one_stream and any(task.stream == "dp" for task in tasks)
        left = loop.times
        before: tuple[float, ...] = (math.inf,)
        while left:
            turn, wrong, began_s, sent_s = Amounts(), Amounts(), free["compute"], traffic_s
            for task in tasks:
                step(task, turn, wrong)
            if loop.there in written:
                written[loop.here] = written[loop.there]
            arrived_s = written.get(loop.there, free["compute"])
            clocks = (free["dp"], own_traffic_ends, arrived_s)
            after = tuple([clock - free["compute"] for clock in clocks]) if sends else ()
            took_s, left = free["compute"] - began_s, left - 1
            alike = not sends or all(
                abs(a - b) <= 1e-12 * took_s for a, b in zip(after, before, strict=False)
            )
            turns, before = 1, after
            if alike:
                turns, left = 1 + left, 0
                free["compute"] += (turns - 1) * took_s
            if alike and sends:
                traffic_s += (turns - 1) * (traffic_s - sent_s)
                ends = [free["compute"] + clock for clock in after]
                free["dp"], own_traffic_ends, arrived_s = ends
                written[loop.here] = written[loop.there] = arrived_s
            for amounts, more in ((parts, turn), (errors, wrong)):
                for name, amount in more.items():
                    add(amounts, name, turns * amount)

    def run(start: int, stop: int) -> Spent:
        nonlocal traffic_s, own_traffic_ends
        begin = own_traffic_ends = free["compute"]
        traffic_s = 0.0
        parts, errors, at = Amounts(), Amounts(), start
        while at < stop:
            if at in loops:
                repeat(loops[at], parts, errors)
                at = loops[at].stop
            else:
                step(program.tasks[at], parts, errors)
                at += 1
        end = free["compute"]
        return Spent(end - begin, parts, errors, traffic_s, own_traffic_ends - end)

    actions = [run(span.start, span.stop) for span in program.actions]
    return actions, run(program.actions[-1].stop, len(program.tasks))


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
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, task in enumerate(program.tasks):
        for name in task.writes:
            first.setdefault(name, index)
            last[name] = index
        for name in task.reads:
            last[name] = index
    born: list[list[tuple[str, float]]] = [[] for _ in program.tasks]  # role and bytes
    gone: list[list[tuple[str, float]]] = [[] for _ in program.tasks]
    for name, index in first.items():
        buffer = program.buffers[name]
        role, size = ROLES[buffer.role], buffer.num_bytes * scale(name)
        born[index].append((role, size))
        if name not in program.kept:
            gone[last[name]].append((role, -size))
    loops = {loop.start: loop for loop in program.loops}
    live = Amounts()
    found = []
    for start, stop in spans:
        changes: list[tuple[str, float]] = []
        highest, worst, total = 0.0, 0, 0.0
        for turn in _turns(start, stop, loops):
            if isinstance(turn, Loop):  # its turns but the first and the last
                inside = range(turn.start, turn.stop)
                many = turn.times - 2
                more = [(r, many * x) for i in inside for r, x in (*born[i], *gone[i])]
                changes += more
                total += sum([size for _, size in more])
                continue
            for _, size in born[turn]:
                total += size
            changes += born[turn]
            if total > highest:
                highest, worst = total, len(changes)
            for _, size in gone[turn]:
                total += size
            changes += gone[turn]
        before = {role: size for role, size in live.items() if role != WEIGHTS}
        for role, size in changes[:worst]:
            live[role] = live.get(role, 0.0) + size
        best = dict(live)
        for role, size in changes[worst:]:
            live[role] = live.get(role, 0.0) + size
        found.append(Live(_difference(best, before), _difference(live, before)))
    return tuple(found)


def _turns(start: int, stop: int, loops: dict[int, Loop]) -> Iterator[int | Loop]:
    """Indices of tasks in the order they run; of a loop its first turn, itself, and its last: what
    lives grows or shrinks alike in each, so that it is most in one of these."""
    at = start
    while at < stop:
        if at not in loops:
            yield at
            at += 1
            continue
        loop = loops[at]
        inside = range(loop.start, loop.stop)
        yield from inside
        yield loop
        yield from inside
        at = loop.stop


def _difference(after: Amounts, before: Amounts) -> Amounts:
    return {role: after[role] - before.get(role, 0.0) for role in after}
