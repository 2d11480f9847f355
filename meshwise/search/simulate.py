"""Run a rank's program on paper, action by action: seconds, and bytes alive at each moment.

Time: a task starts when its stream is free and everything it reads is written. An action lasts as
long as it keeps the compute stream; what it leaves on the data-parallel stream is noted, so that a
schedule can add it up. The stream of context parallelism is empty at the end of each attention. On
CPUs communication uses the same cores as compute, so all streams are one.

Memory: a buffer lives from its first writer to its last reader, in issue order, on top of what is
resident. For each role of buffer an action leaves two numbers: how far it rises above what lived
before it, and what it leaves alive or frees. Actions of other microbatches add what they left to
both, so a schedule can be walked without its tasks. Microbatches share one copy of gathered
weights, so these count in full, not as a difference.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from meshwise.models import Loop, Program, Task

Amounts = dict[str, float]
WAITING, COPIES = "data-parallel communication (exposed)", "copies of weights and gradients"
SUMS = "gradient sums over tp"
SHARING = "context-parallel communication (exposed)"
WEIGHTS = "gathered weights"
ROLES = {
    "activation": "activations",
    "weights": WEIGHTS,
    "gradient": "gradients",
    "communication": "communication buffers",
}


class Charge(NamedTuple):
    """The price of a task: its seconds, the part of the step they are spent on, the group its price
    belongs to, and by how many seconds that may err."""

    time_s: float
    part: str
    group: str
    error_s: float


class Spent(NamedTuple):
    """Seconds of the compute stream by part, which add up to ``time_s``; idle time is exposed
    traffic. ``errors``: seconds by group of prices, of all streams.

    ``traffic_s``: seconds of the data-parallel stream. It ends ``lag_s`` after the compute stream,
    or later when traffic of earlier actions delays it.
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
    """Bytes by role above what lived before the action: at its worst moment, and after it. Gathered
    weights count in full."""

    rise: Amounts
    left: Amounts


def add(amounts: Amounts, name: str, amount: float) -> None:
    if amount:
        amounts[name] = amounts.get(name, 0.0) + amount


def add_all(amounts: Amounts, more: Amounts, count: int = 1) -> None:
    for name, amount in more.items():
        add(amounts, name, count * amount)


def run_program(
    program: Program, charge: Callable[[Task], Charge], one_stream: bool
) -> tuple[list[Spent], Spent]:
    """Return the seconds of each action, and of the optimizer, when the tasks run in order."""
    clocks = _Clocks(program, charge, one_stream)
    spent = [clocks.run(span.start, span.stop) for span in program.actions]
    return spent, clocks.run(program.actions[-1].stop, len(program.tasks))


class _Clocks:
    """When each stream is free and each buffer is written, while a program runs on paper."""

    def __init__(
        self, program: Program, charge: Callable[[Task], Charge], one_stream: bool
    ) -> None:
        self.tasks, self.charge, self.one_stream = program.tasks, charge, one_stream
        self.loops = {loop.start: loop for loop in program.loops}
        self.free = {"compute": 0.0, "dp": 0.0, "cp": 0.0}
        self.written = dict[str, float]()
        self.shared = set[str]()  # buffers that cp's messages brought
        self.brought = {x for t in program.tasks if t.stream != "compute" for x in t.writes}
        self.traffic_s = self.own_traffic_ends = 0.0  # of the action that runs

    def run(self, start: int, stop: int) -> Spent:
        """Run an action: ``tasks[start:stop]``."""
        begin = self.own_traffic_ends = self.free["compute"]
        self.traffic_s = 0.0
        parts, errors, at = Amounts(), Amounts(), start
        while at < stop:
            if at in self.loops:
                self._repeat(self.loops[at], parts, errors)
                at = self.loops[at].stop
            else:
                self._step(self.tasks[at], parts, errors)
                at += 1
        end = self.free["compute"]
        return Spent(end - begin, parts, errors, self.traffic_s, self.own_traffic_ends - end)

    def _step(self, task: Task, parts: Amounts, errors: Amounts) -> None:
        time_s, part, group, error_s = self.charge(task)
        free, written = self.free, self.written
        stream = "compute" if self.one_stream else task.stream
        start = free[stream]
        if stream != "compute" or not self.brought.isdisjoint(task.reads):
            ready = max([written.get(name, 0.0) for name in task.reads], default=0.0)
            start = max(start, ready)
        if stream == "compute":
            if start > free[stream]:
                is_shared = any(written[x] == ready for x in self.shared & {*task.reads})
                add(parts, SHARING if is_shared else WAITING, start - free[stream])
            add(parts, part, time_s)
        elif stream == "cp":
            self.shared.update(task.writes)
        else:
            self.traffic_s += time_s
            self.own_traffic_ends = max(self.own_traffic_ends, ready) + time_s
        add(errors, group, error_s)
        free[stream] = start + time_s
        for name in task.writes:
            written[name] = free[stream]

    def _repeat(self, loop: Loop, parts: Amounts, errors: Amounts) -> None:
        """Run turns until one leaves the clocks as the turn before did; then add all remaining
        turns at once."""
        tasks, free, written = self.tasks[loop.start : loop.stop], self.free, self.written
        sends = not self.one_stream and any(task.stream == "dp" for task in tasks)
        left = loop.times
        before: tuple[float, ...] = (math.inf,)
        while left:
            turn, wrong, began_s, sent_s = Amounts(), Amounts(), free["compute"], self.traffic_s
            for task in tasks:
                self._step(task, turn, wrong)
            if loop.there in written:
                written[loop.here] = written[loop.there]
            arrived_s = written.get(loop.there, free["compute"])
            clocks = (free["dp"], self.own_traffic_ends, arrived_s)
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
                self.traffic_s += (turns - 1) * (self.traffic_s - sent_s)
                free["dp"], self.own_traffic_ends, arrived_s = [
                    free["compute"] + at for at in after
                ]
                written[loop.here] = written[loop.there] = arrived_s
            add_all(parts, turn, turns)
            add_all(errors, wrong, turns)


class Changes(NamedTuple):
    """Changes of memory in a span of tasks, in order: which ``buffer`` is born (``sign`` 1) or
    freed (-1), its ``role``, and the ``loop`` whose middle turns repeat the change (-1: none).
    ``whole``: after how many changes a task's buffers have all been born."""

    buffer: np.ndarray
    role: np.ndarray
    sign: np.ndarray
    loop: np.ndarray
    whole: np.ndarray


class Moments(NamedTuple):
    """The changes of each span of a program, and the roles of its buffers."""

    roles: tuple[str, ...]
    spans: tuple[Changes, ...]


def moments(program: Program, spans: Sequence[tuple[int, int]]) -> Moments:
    """Return how each span changes memory, for any buffer sizes and any number of loop turns.
    Buffers are numbered in the program's order."""
    number = {name: at for at, name in enumerate(program.buffers)}
    first, last = dict[str, int](), dict[str, int]()
    for index, task in enumerate(program.tasks):
        for name in task.writes:
            first.setdefault(name, index)
            last[name] = index
        for name in task.reads:
            last[name] = index
    born: list[list[int]] = [[] for _ in program.tasks]
    gone: list[list[int]] = [[] for _ in program.tasks]
    for name, index in first.items():
        born[index].append(number[name])
        if name not in program.kept:
            gone[last[name]].append(number[name])
    loops = {loop.start: at for at, loop in enumerate(program.loops)}
    role_of = [ROLES[buffer.role] for buffer in program.buffers.values()]
    roles: dict[str, int] = {}

    def changes(start: int, stop: int) -> Changes:
        order, turns = list[int](), list[int]()  # tasks, and in which loop's turns between
        at = start
        while at < stop:
            # of a loop its first turn, those between, and its last: what lives grows or shrinks
            # alike in each, so that it is most in one of these
            end = program.loops[loops[at]].stop if at in loops else at + 1
            inside = range(at, end)
            for turn in (-1, loops[at], -1) if at in loops else (-1,):
                order += inside
                turns += [turn] * len(inside)
            at = end
        buffers = [buffer for at in order for of in (born[at], gone[at]) for buffer in of]
        counts = np.asarray([(len(born[at]), len(gone[at])) for at in order], int).reshape(-1, 2)
        ends, loop = np.cumsum(counts).reshape(-1, 2)[:, 0], np.asarray(turns, int)
        found = [roles.setdefault(role_of[buffer], len(roles)) for buffer in buffers]
        return Changes(
            buffer=np.asarray(buffers, np.int32),
            role=np.asarray(found, np.int8),
            sign=np.repeat(np.tile(np.asarray([1, -1], np.int8), len(order)), counts.ravel()),
            loop=np.repeat(loop, counts.sum(axis=1)).astype(np.int16),
            whole=np.append(0, ends[loop < 0]),
        )

    found = tuple(changes(*span) for span in spans)
    return Moments(tuple(roles), found)


def memory(of: Moments, sizes: np.ndarray, times: Sequence[int]) -> tuple[Live, ...]:
    """Return how each span changes memory, given the buffers' sizes and the turns of each loop."""
    between = np.asarray([*times, 3]) - 2
    shared = np.asarray([role == WEIGHTS for role in of.roles])
    live = np.zeros(len(of.roles))
    found = []
    for buffer, role, sign, loop, whole in of.spans:
        amounts = sizes[buffer] * sign * between[loop]
        totals = np.append(0.0, np.cumsum(amounts))[whole]
        at = whole[totals.argmax()]
        before = np.where(shared, 0.0, live)
        best = live + np.bincount(role[:at], amounts[:at], len(live)) - before
        live = live + np.bincount(role, amounts, len(live))
        rise, left = best.tolist(), (live - before).tolist()
        found.append(Live(*[dict(zip(of.roles, each, strict=True)) for each in (rise, left)]))
    return tuple(found)
