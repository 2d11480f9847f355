"""Add up a training step from the costs of its stages: its time and its memory.

In: the action table of a schedule, and the cost of each action (``stage``). Without a pipeline the
table has one row, so the same sums price all layouts.

Time: ``schedule.simulate`` runs the table. A rank's optimizer starts when its actions and their
data-parallel traffic have ended. If the rank holds one end of a tied embedding, it also waits for
the gradient of the other end. The rank that ends last sets the step time.

Memory of a rank: resident bytes, plus the bytes that the actions of its row leave alive, plus the
bytes that the current action adds while it runs. After all actions come the second gradient of a
tied embedding, and then what the optimizer allocates.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwise import schedule
from meshwise.schedule import Action, Kind, Name, Span, Table
from meshwise.search.simulate import (
    ROLES,
    WAITING,
    WEIGHTS,
    Amounts,
    Charge,
    Errors,
    Live,
    Peak,
    Spent,
    add,
    add_all,
)
from meshwise.search.stage import StageCost
from meshwise.spec.layout import SPLIT

BUBBLE, SCRATCH = "pipeline bubble", "optimizer scratch"
_UNKNOWN = Live({}, {})
Hop = tuple[int, int]  # the stage that sends, and the one that receives


class Element(NamedTuple):
    """Actions of equal cost. ``place``: 0, 1 or 2 for a stage's first, middle or last microbatch;
    with fewer microbatches there are fewer places."""

    stage: int
    kind: Kind
    place: int


class Timetable(NamedTuple):
    """A schedule's table, prepared for summing. ``held``: the stages of each rank. ``of_action``:
    indices into ``elements``; a split B has two, I and W. ``rows``: the elements of each rank in
    order. ``before``: the previous element of the same stage, else -1. ``sent`` and ``coming`` have
    a value per element and one after the last: the number of results sent before the element, and
    whether the next action's input is being received."""

    table: Table
    held: tuple[tuple[int, ...], ...]
    elements: tuple[Element, ...]
    of_action: dict[Action, tuple[int, ...]]
    rows: tuple[np.ndarray, ...]
    before: tuple[np.ndarray, ...]
    sent: tuple[np.ndarray, ...]
    coming: tuple[np.ndarray, ...]


class StepOnPaper(NamedTuple):
    """A step on paper. ``spent``: by element of the timetable. The rest by rank: its actions, when
    their data-parallel traffic is ``over``, when the optimizer is ``ready`` to start, and when it
    ends (``finish``)."""

    spent: list[Spent]
    spans: list[list[Span]]
    over: list[float]
    ready: list[float]
    finish: list[float]


class StepTime(NamedTuple):
    """The step time of the rank that ends last. ``parts`` add up to ``time_s``. ``errors``: the
    possible errors, of hidden work too."""

    time_s: float
    rank: int
    parts: Amounts
    errors: Errors


@lru_cache(maxsize=128)
def timetable(name: Name, pp: int, stages_per_rank: int, num_microbatches: int) -> Timetable:
    """Build the timetable of a schedule."""
    table = schedule.table(name, pp, stages_per_rank, num_microbatches)
    halves: tuple[Kind, ...] = ("I", "W") if name in SPLIT else ("B",)
    index: dict[Element, int] = {}
    of_action: dict[Action, tuple[int, ...]] = {}
    rows, before, moving = [], [], []
    held = tuple(schedule.stages_of(name, rank, pp, stages_per_rank) for rank in range(pp))
    for mine, row in zip(held, table, strict=True):
        parts = [(stage, halves if kind == "B" else (kind,)) for kind, stage, _ in row]
        counts = np.asarray([len(kinds) for _, kinds in parts])
        turns: dict[tuple[int, Kind], list[int]] = {}
        for at, each in enumerate((stage, kind) for stage, kinds in parts for kind in kinds):
            turns.setdefault(each, []).append(at)
        numbers, earlier = np.empty(counts.sum(), int), np.full(counts.sum(), -1)
        for each, here in turns.items():
            some = [Element(*each, place) for place in range(min(3, len(here)))]
            first, *others = [index.setdefault(element, len(index)) for element in some]
            numbers[here] = [first, *others[:1] * (len(here) - 2), *others[-1:]]
        for stage in mine:
            here = sorted(at for each, some in turns.items() if each[0] == stage for at in some)
            earlier[here[1:]] = numbers[here[:-1]]
        needs, sends = (
            {
                (kind, stage): stage + way in range(pp * stages_per_rank)
                and stage + way not in mine
                for stage in mine
                for kind, way in (("F", step), ("B", -step), ("I", -step))
            }
            for step in (-1, 1)
        )
        sent = np.cumsum([0, *[sends.get(action[:2], False) for action in row]])
        coming = [*[needs.get(action[:2], False) for action in row[1:]], False]
        beside = np.repeat([sent[:-1], coming], counts, axis=1)
        listed, ends = numbers.tolist(), np.cumsum(counts).tolist()
        starts = [0, *ends[:-1]]
        for action, start, end in zip(row, starts, ends, strict=True):
            of_action[action] = tuple(listed[start:end])
        rows.append(numbers)
        before.append(earlier)
        moving.append(np.append(beside, [[sent[-1]], [0]], axis=1))
    sending, arriving = zip(*moving, strict=True)
    return Timetable(
        table, held, tuple(index), of_action, tuple(rows), tuple(before), sending, arriving
    )


def course(
    stages: Sequence[StageCost],
    times: Timetable,
    hops: Mapping[Hop, Charge],
    exchange: Charge | None,
) -> StepOnPaper:
    """Run a step's actions on paper. ``hops``: the price of each message between neighbouring
    stages on different ranks. ``exchange``: the price of sending the gradients of a tied embedding
    between the first and the last stage."""
    spent = [stages[stage].actions[kind][place][0] for stage, kind, place in times.elements]
    of_action, seconds = times.of_action, [of.time_s for of in spent]

    def duration(action: Action) -> float:
        return sum([seconds[number] for number in of_action[action]])

    spans = schedule.simulate(times.table, duration, lambda *hop: hops[hop].time_s)
    held = times.held
    over = [_traffic_ends(row, times, spent) for row in spans]
    ready = list(over)
    if exchange is not None:
        ends = [rank for rank, mine in enumerate(held) if {0, len(stages) - 1} & set(mine)]
        both_s = max(over[rank] for rank in ends) + exchange.time_s
        ready = [both_s if rank in ends else at for rank, at in enumerate(over)]
    finish = [
        at + sum(stages[stage].optimizer.time_s for stage in mine)
        for at, mine in zip(ready, held, strict=True)
    ]
    return StepOnPaper(spent, spans, over, ready, finish)


def step_time(
    stages: Sequence[StageCost],
    times: Timetable,
    hops: Mapping[Hop, Charge],
    exchange: Charge | None,
) -> StepTime:
    """Return the step's seconds; arguments as of ``course``."""
    spent, spans, over, ready, finish = course(stages, times, hops, exchange)
    rank = finish.index(max(finish))

    parts, errors = Amounts(), Errors()
    done = [(spent[number], count) for number, count in Counter(times.rows[rank].tolist()).items()]
    for cost, count in done + [(stages[stage].optimizer, 1) for stage in times.held[rank]]:
        add_all(parts, cost.parts, count)
        add_all(errors, cost.errors, count)
    clock = 0.0
    for (kind, stage, _), start_s, end_s in spans[rank]:
        sender = stage + (-1 if kind == "F" else 1)
        _wait(start_s - clock, hops.get((sender, stage)), parts, errors)
        clock = end_s
    add(parts, WAITING, over[rank] - clock)
    _wait(ready[rank] - over[rank], exchange, parts, errors)
    return StepTime(finish[rank], rank, parts, errors)


def _traffic_ends(row: Sequence[Span], times: Timetable, spent: Sequence[Spent]) -> float:
    """Return when a rank's actions and their queued data-parallel traffic have ended."""
    queued_s = clock = 0.0
    for action, start_s, end_s in row:
        queued_s -= start_s - clock
        for number in times.of_action[action]:
            of = spent[number]
            queued_s = max(of.lag_s, max(queued_s, 0.0) + of.traffic_s - of.served_s)
        clock = end_s
    return clock + max(queued_s, 0.0)


def _wait(idle_s: float, came: Charge | None, parts: Amounts, errors: Errors) -> None:
    """Book idle time: as transfer up to the transfer's own time, the rest as pipeline bubble."""
    if idle_s > 0:
        assert came is not None, "a rank waits only for others"
        on_its_way = min(idle_s, came.time_s)
        add(parts, came.part, on_its_way)
        share = on_its_way / came.time_s if on_its_way else 0.0
        add(errors, (came.group, came.part), came.error_s * share)
        add(parts, BUBBLE, idle_s - on_its_way)


def peak_memory(
    stages: Sequence[StageCost | None],
    times: Timetable,
    moving_bytes: float,
    exchange_bytes: float,
    most_sent: int = 1,
) -> tuple[int, Peak]:
    """Return the rank with the largest peak, and the peak. Ranks with a stage that is None are
    skipped.

    ``moving_bytes``: a tensor sent between stages. ``most_sent``: the most sent results that a rank
    holds. ``exchange_bytes``: a tied embedding's second gradient, held after all actions.
    """
    lives = [
        cost.actions[kind][place][1] if (cost := stages[stage]) else _UNKNOWN
        for stage, kind, place in times.elements
    ]
    rise = np.asarray([sum(live.rise.values()) for live in lives])
    weights = np.asarray([live.left.get(WEIGHTS, 0.0) for live in lives] + [0.0])  # -1: none yet
    left = np.asarray([sum(live.left.values()) for live in lives]) - weights[:-1]
    moving = [
        np.minimum(sent, most_sent) + coming
        for sent, coming in zip(times.sent, times.coming, strict=True)
    ]
    peaks = []
    for rank, (row, before) in enumerate(zip(times.rows, times.before, strict=True)):
        mine = [cost for stage in times.held[rank] if (cost := stages[stage])]
        if len(mine) < len(times.held[rank]):
            continue
        # Bytes that actions leave add up. A stage's gathered weights replace its earlier ones.
        after = np.cumsum(left[row] + weights[row] - weights[before])
        during = np.append(0.0, after[:-1]) - weights[before] + rise[row]
        beside = moving_bytes * moving[rank]
        scratch = sum(cost.scratch for cost in mine)
        beside[-1] = max(beside[-1] + exchange_bytes, scratch)  # messages have ended
        everything = np.append(during, after[-1]) + beside
        at = int(everything.argmax())
        resident = sum(sum(cost.resident.values()) for cost in mine)
        in_update = at == len(row) and beside[-1] == scratch
        role = SCRATCH if in_update else ROLES["communication"]
        peaks.append((resident + float(everything[at]), rank, at, role, float(beside[at])))
    _, rank, at, role, size = max(peaks, key=lambda peak: peak[0])
    parts = _parts_at(stages, times, lives, rank, at)
    add(parts, role, size)
    return rank, Peak(sum(parts.values()), parts)


def _parts_at(
    stages: Sequence[StageCost | None], times: Timetable, lives: list[Live], rank: int, at: int
) -> Amounts:
    """Return bytes by role at the peak of the ``at``-th element of a row, or after the last
    element."""
    row = times.rows[rank].tolist()
    stage_of = {number: times.elements[number].stage for number in row}
    weights = {stage_of[number]: lives[number].left.get(WEIGHTS, 0.0) for number in row[:at]}
    parts = Amounts()
    for stage in times.held[rank]:
        cost = stages[stage]
        assert cost is not None
        add_all(parts, {role: float(size) for role, size in cost.resident.items()})
    for number, count in Counter(row[:at]).items():
        add_all(parts, lives[number].left | {WEIGHTS: 0.0}, count)
    for number in row[at : at + 1]:
        weights.pop(stage_of[number], None)
        add_all(parts, lives[number].rise)
    add(parts, WEIGHTS, sum(weights.values()))
    return parts
