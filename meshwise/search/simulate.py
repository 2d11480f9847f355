"""Simulate a rank's program action by action: seconds, and bytes alive at each moment.

Time: a task starts when its stream is free and all buffers that it reads are written. An action
lasts as long as it uses the compute stream. Its traffic on the data-parallel stream is noted, so
that a schedule can add it up. The stream of context parallelism is empty at the end of each
attention. On CPUs communication uses the same cores as compute, so there is one stream.

Memory: a buffer lives from its first writer to its last reader, in issue order, on top of resident
bytes. For each role of buffer an action has two figures: its peak above the bytes alive before it,
and the bytes that it leaves alive (or, if negative, frees). Bytes left by other microbatches'
actions add to both, so a schedule can be summed without its tasks. Microbatches share one copy of
gathered weights, so these count in full, not as a difference.
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
    """The price of a task: its seconds, the part of the step they count as, the group of prices it
    belongs to, and its possible error in seconds."""

    time_s: float
    part: str
    group: str
    error_s: float


class Spent(NamedTuple):
    """Seconds of an action. ``parts``: of the compute stream; they add up to ``time_s``, and idle
    time counts as exposed traffic. ``errors``: of all streams, by group of prices.

    ``traffic_s``: seconds of the data-parallel stream. It ends ``lag_s`` after the compute stream,
    or later if traffic of earlier actions delays it.
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
    """Bytes by role above the bytes alive before an action: at its peak (``rise``) and after it
    (``left``). Gathered weights count in full."""

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
    """Return the seconds of each action and of the optimizer. The tasks run in order."""
    clocks = _Clocks(program, charge, one_stream)
    spent = [clocks.run(span.start, span.stop) for span in program.actions]
    return spent, clocks.run(program.actions[-1].stop, len(program.tasks))


class _Clocks:
    """The clocks of a simulation: when each stream is free and when each buffer is written."""

    def __init__(
        self, program: Program, charge: Callable[[Task], Charge], one_stream: bool
    ) -> None:
        self.tasks, self.charge, self.one_stream = program.tasks, charge, one_stream
        self.loops = {loop.start: loop for loop in program.loops}
        self.free = {"compute": 0.0, "dp": 0.0, "cp": 0.0}
        self.written = dict[str, float]()
        self.shared = set[str]()  # buffers that received cp's messages
        self.brought = {x for t in program.tasks if t.stream != "compute" for x in t.writes}
        self.traffic_s = self.own_traffic_ends = 0.0  # of the current action

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
        """Run turns of a loop until the clocks repeat, relative to the compute stream. Then add all
        remaining turns at once."""
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
    """Changes of memory in a span of tasks, in order. Each allocates (``sign`` 1) or frees (-1) a
    ``buffer`` with this ``role``. ``loop``: the loop whose middle turns repeat the change (-1:
    none). ``whole``: the numbers of changes after which all buffers of a task are allocated."""

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
    """Return the memory changes of each span, for any buffer sizes and any number of loop turns.
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
        order, turns = list[int](), list[int]()  # tasks, and the loop if in a middle turn
        at = start
        while at < stop:
            # a loop's first turn, its middle turns at once, and its last: memory changes by equal
            # steps from turn to turn, so the peak is in one of these
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
    """Return the memory of each span, given the buffers' sizes and the turns of each loop."""
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
