"""Simulate a rank's program action by action: seconds, and bytes alive at each moment.

Time: a task starts when its stream is free and all buffers that it reads are written. A
data-parallel transfer also waits for the work before it in the program. Work and transfer slow each
other down (``Beside``). An action lasts as long as it uses the compute stream. Its traffic on the
data-parallel stream is noted, so that a schedule can add it up. The stream of context parallelism
is empty at the end of each attention. Copies to and from the host have a stream of their own. On
CPUs communication uses the same cores as compute, so there is one stream.

Memory: a buffer lives from its first writer to its last reader, in issue order, on top of resident
bytes. For each role of buffer an action has two figures: its peak above the bytes alive before it,
and the bytes that it leaves alive (or, if negative, frees). Bytes left by other microbatches'
actions add to both, so a schedule can be summed without its tasks. Microbatches share one copy of
gathered weights, so these count in full, not as a difference.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from meshwise.models import Loop, Program, Task
from meshwise.models.offload import ISSUED
from meshwise.prices.datasheet import Beside
from meshwise.spec import Op
from meshwise.units import format_bytes

Amounts = dict[str, float]
Errors = dict[tuple[str, str], float]  # seconds, by group of prices and part of the step
Name = TypeVar("Name", str, tuple[str, str])
WAITING, COPIES = "data-parallel communication (exposed)", "copies of weights and gradients"
SLOWED = "work slowed down by data-parallel communication"
SUMS = "gradient sums over tp"
SHARING = "context-parallel communication (exposed)"
TO_HOST = "copies to and from the host (exposed)"
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
    time counts as exposed traffic. ``errors``: of all streams. ``traffic_s``: of its data-parallel
    transfers if nothing runs beside them. Its last transfer ends ``lag_s`` after the action, or
    later if transfers of earlier actions are still queued. ``served_s``: the seconds of transfers
    that can pass during the action.
    """

    time_s: float
    parts: Amounts
    errors: Errors
    traffic_s: float
    lag_s: float
    served_s: float = 0.0


class Peak(NamedTuple):
    total_bytes: float
    parts: Amounts

    def shortfall(self, rank: int, limit: float) -> str:
        """Say how many bytes a rank lacks, and what most of its memory is."""
        name, size = max(self.parts.items(), key=lambda part: part[1])
        return (
            f"rank {rank} needs {format_bytes(math.ceil(self.total_bytes - limit))} more; its "
            f"largest part is {name} ({format_bytes(size)} of {format_bytes(self.total_bytes)})"
        )


class Live(NamedTuple):
    """Bytes by role above the bytes alive before an action: at its peak (``rise``) and after it
    (``left``). Gathered weights count in full."""

    rise: Amounts
    left: Amounts


def add(amounts: dict[Name, float], name: Name, amount: float) -> None:
    if amount:
        amounts[name] = amounts.get(name, 0.0) + amount


def add_all(amounts: dict[Name, float], more: dict[Name, float], count: int = 1) -> None:
    for name, amount in more.items():
        add(amounts, name, count * amount)


def run_program(
    program: Program, charge: Callable[[Task], Charge], beside: Beside | None
) -> tuple[list[Spent], Spent]:
    """Return the seconds of each action and of the optimizer. The tasks run in order. ``beside``:
    the speed of work while data-parallel traffic runs; None if all work shares one stream."""
    clocks = _Clocks(program, charge, beside)
    spent = [clocks.run(span.start, span.stop) for span in program.actions]
    clocks.queue.clear()  # the optimizer waits for all transfers
    return spent, clocks.run(program.actions[-1].stop, len(program.tasks))


class _Message:
    """A transfer of the data-parallel stream that has not ended: the seconds it needs alone, and
    the kind of its collective."""

    __slots__ = ("kind", "left_s", "writes")

    def __init__(self, left_s: float, task: Task) -> None:
        self.left_s, self.writes = left_s, task.writes
        self.kind: str = getattr(task.op, "kind", "")


class _Clocks:
    """The state of a simulation: when the compute stream is free, which data-parallel transfers are
    under way (the first in the queue moves, the others wait for it), which buffers these write, and
    when cp's transfers end."""

    def __init__(
        self, program: Program, charge: Callable[[Task], Charge], beside: Beside | None
    ) -> None:
        self.tasks, self.charge, self.beside = program.tasks, charge, beside
        self.loops = {loop.start: loop for loop in program.loops}
        self.now_s = 0.0
        self.free_s = {"cp": 0.0, "host": 0.0}  # when these streams are free
        self.queue: deque[_Message] = deque()
        self.coming: dict[str, _Message] = {}
        self.shared: dict[str, float] = {}  # buffers that these streams write, and when
        # of the current action; ``own_s``: what would be left of its transfers without earlier ones
        self.traffic_s = self.served_s = self.own_s = 0.0

    def run(self, start: int, stop: int) -> Spent:
        """Run an action: ``tasks[start:stop]``."""
        begin_s = self.now_s
        self.traffic_s = self.served_s = self.own_s = 0.0
        parts, errors, at = Amounts(), Errors(), start
        while at < stop:
            if at in self.loops:
                self._repeat(self.loops[at], parts, errors)
                at = self.loops[at].stop
            else:
                self._step(self.tasks[at], parts, errors)
                at += 1
        time_s = self.now_s - begin_s
        return Spent(time_s, parts, errors, self.traffic_s, self.own_s, self.served_s)

    def _step(self, task: Task, parts: Amounts, errors: Errors) -> None:
        time_s, part, group, error_s = self.charge(task)
        add(errors, (group, part), error_s)
        if self.beside is None:
            self.now_s += time_s
            add(parts, part, time_s)
        elif task.stream == "dp":
            message = _Message(time_s, task)
            self.queue.append(message)
            self.coming.update(dict.fromkeys(task.writes, message))
            self.traffic_s += time_s
            self.own_s += time_s
        elif task.stream in self.free_s:
            free_s = max(self.free_s[task.stream], self.now_s) + time_s
            self.free_s[task.stream] = free_s
            self.shared.update(dict.fromkeys(task.writes, free_s))
        else:
            if self.coming or self.shared:
                self._wait(task, parts)
            add(parts, part, time_s)
            if not self.queue:
                self.now_s += time_s
                self._serve(self.beside.speed(task.op, "")[1] * time_s)
                return
            begin_s = self.now_s
            self._compute(time_s, task.op)
            if (slowed_s := self.now_s - begin_s - time_s) > 1e-12 * self.now_s:
                add(parts, SLOWED, slowed_s)

    def _wait(self, task: Task, parts: Amounts) -> None:
        """Let transfers run until the task's inputs have arrived."""
        begin_s = self.now_s
        for name in task.reads if self.coming else ():
            while name in self.coming:
                self.now_s += self.queue[0].left_s
                self._arrived()
        add(parts, WAITING, self.now_s - begin_s)
        self._serve(self.now_s - begin_s)
        if self.shared:
            until_s = max([self.shared.get(name, 0.0) for name in task.reads], default=0.0)
            if (idle_s := until_s - self.now_s) > 0:
                add(parts, TO_HOST if self.shared.get(ISSUED) == until_s else SHARING, idle_s)
                self._compute(idle_s)

    def _compute(self, left_s: float, op: Op | None = None) -> None:
        """Work for ``left_s`` seconds, by default without slowing down transfers. An operation and
        the transfer that runs beside it slow each other down."""
        while self.queue and left_s:
            message = self.queue[0]
            work, transfer = self._speed(op, message.kind)
            arrives_s = message.left_s / transfer
            if arrives_s > left_s / work:
                message.left_s -= left_s / work * transfer
                arrives_s, left_s = left_s / work, 0.0
            else:
                left_s -= arrives_s * work
                self._arrived()
            self.now_s += arrives_s
            self._serve(transfer * arrives_s)
        self.now_s += left_s
        self._serve(self._speed(op)[1] * left_s)

    def _speed(self, op: Op | None, kind: str = "") -> tuple[float, float]:
        if op is None or self.beside is None:
            return 1.0, 1.0
        return self.beside.speed(op, kind)

    def _serve(self, served_s: float) -> None:
        self.served_s += served_s
        self.own_s = max(0.0, self.own_s - served_s)

    def _arrived(self) -> None:
        """End the transfer at the head of the queue."""
        message = self.queue.popleft()
        for name in message.writes:
            if self.coming.get(name) is message:
                del self.coming[name]

    def _repeat(self, loop: Loop, parts: Amounts, errors: Errors) -> None:
        """Run turns of a loop until the transfers under way repeat. Then add all remaining turns at
        once."""
        tasks, left = self.tasks[loop.start : loop.stop], loop.times
        before = self._under_way()
        while left:
            turn, wrong, began_s = Amounts(), Errors(), self.now_s
            sent_s, served_s, own_s = self.traffic_s, self.served_s, self.own_s
            for task in tasks:
                self._step(task, turn, wrong)
            if message := self.coming.get(loop.there):
                message.writes = (*message.writes, loop.here)
                self.coming[loop.here] = message
            else:
                self.coming.pop(loop.here, None)
            after = self._under_way()
            took_s, left, turns = self.now_s - began_s, left - 1, 1
            if _alike(after, before, took_s):
                turns, left = 1 + left, 0
                self.now_s += (turns - 1) * took_s
                self._later((turns - 1) * took_s)
                self.traffic_s += (turns - 1) * (self.traffic_s - sent_s)
                self.served_s += (turns - 1) * (self.served_s - served_s)
                self.own_s = max(0.0, self.own_s + (turns - 1) * (self.own_s - own_s))
            before = after
            add_all(parts, turn, turns)
            add_all(errors, wrong, turns)

    def _under_way(self) -> list[float]:
        """Return the seconds that each data-parallel transfer, and the copies to and from the host,
        still need."""
        copies_s = max(0.0, self.free_s["host"] - self.now_s)
        return [*[each.left_s for each in self.queue], copies_s]

    def _later(self, by_s: float) -> None:
        """Move the end of the copies to and from the host with the clock."""
        self.free_s["host"] += by_s
        if ISSUED in self.shared:
            self.shared[ISSUED] += by_s


def _alike(left: list[float], others: list[float], of_s: float) -> bool:
    """Whether the same transfers are under way, to a part in 10^12 of ``of_s``."""
    return len(left) == len(others) and all(
        abs(a - b) <= 1e-12 * of_s for a, b in zip(left, others, strict=True)
    )


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
        buffers, sign, loop, whole = list[int](), list[int](), list[int](), [0]
        at = start
        while at < stop:
            # a loop's first turn, its middle turns at once, and its last: memory changes by equal
            # steps from turn to turn, so the peak is in one of these
            later = [start for start in loops if at < start < stop]
            end = program.loops[loops[at]].stop if at in loops else min(later, default=stop)
            for turn in (-1, loops[at], -1) if at in loops else (-1,):
                for new, old in zip(born[at:end], gone[at:end], strict=True):
                    buffers += new
                    if turn < 0:
                        whole.append(len(buffers))
                    buffers += old
                    sign += [1] * len(new) + [-1] * len(old)
                    loop += [turn] * (len(new) + len(old))
            at = end
        found = [roles.setdefault(role_of[buffer], len(roles)) for buffer in buffers]
        return Changes(
            buffer=np.asarray(buffers, np.int32),
            role=np.asarray(found, np.int8),
            sign=np.asarray(sign, np.int8),
            loop=np.asarray(loop, np.int16),
            whole=np.asarray(whole),
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
        totals = np.concatenate(([0.0], np.cumsum(amounts)))[whole]
        at = whole[totals.argmax()]
        before = np.where(shared, 0.0, live)
        best = live + np.bincount(role[:at], amounts[:at], len(live)) - before
        live = live + np.bincount(role, amounts, len(live))
        rise, left = best.tolist(), (live - before).tolist()
        found.append(Live(*[dict(zip(of.roles, each, strict=True)) for each in (rise, left)]))
    return tuple(found)
