"""A training step from the costs of its stages: how long it takes, and how much memory it needs.

In: a schedule's action table and what each action costs (``stage``). Without a pipeline the table
has one row, so that all layouts are priced by the same sums.

Time: the table is run on paper (``schedule.simulate``). A rank is ready when its actions and the
data-parallel traffic behind them have ended, and, if it holds one end of a tied embedding, when
it has the gradient of the other; then its optimizer runs. The rank that ends last is the step.

Memory of a rank: what is resident, and above it what the actions of its row leave alive, free and,
while they run, rise to.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
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
    Live,
    Peak,
    Spent,
    add,
)
from meshwise.search.stage import StageCost
from meshwise.spec.layout import SPLIT

BUBBLE = "pipeline bubble"


class Element(NamedTuple):
    """An action as far as costs differ: of a stage's first, middle or last microbatch (0, 1, 2,
    or as many as there are)."""

    stage: int
    kind: Kind
    place: int


class Timetable(NamedTuple):
    """``of_action``: indices into ``elements``, of I and W for a B where backward is split;
    ``rows``: those of each rank in order; ``before``: of the same stage before it, else -1;
    of what is on its way beside it, and behind the last: how many results were ``sent`` before,
    and whether what the next action needs is ``coming``."""

    table: Table
    elements: tuple[Element, ...]
    of_action: dict[Action, tuple[int, ...]]
    rows: tuple[np.ndarray, ...]
    before: tuple[np.ndarray, ...]
    sent: tuple[np.ndarray, ...]
    coming: tuple[np.ndarray, ...]


class Step(NamedTuple):
    """Of the rank that ends last: ``parts`` add up to ``time_s``; ``errors`` by group of prices."""

    time_s: float
    rank: int
    parts: Amounts
    errors: Amounts


@lru_cache(maxsize=128)
def timetable(name: Name, pp: int, stages_per_rank: int, num_microbatches: int) -> Timetable:
    """The table of a schedule with its actions told apart."""
    table = schedule.table(name, pp, stages_per_rank, num_microbatches)
    whole: tuple[Kind, ...] = ("I", "W") if name in SPLIT else ("B",)
    turns = Counter[tuple[int, Kind]]()
    index: dict[Element, int] = {}
    of_action, rows, before, moving = {}, [], [], []
    homes = {action.stage: rank for rank, row in enumerate(table) for action in row}
    for rank, row in enumerate(table):
        numbers: list[int] = []
        latest: dict[int, int] = {}
        earlier: list[int] = []
        sent, beside = 0, list[tuple[int, int]]()
        for action, following in zip_longest(row, row[1:]):
            coming = following is not None and _crosses(following, homes, rank, back=False)
            kinds = whole if action.kind == "B" else (action.kind,)
            for kind in kinds:
                turn = turns[action.stage, kind]
                turns[action.stage, kind] += 1
                final = turn == num_microbatches - 1
                place = min(2, turn) if final else min(1, turn)
                element = Element(action.stage, kind, place)
                numbers.append(index.setdefault(element, len(index)))
                earlier.append(latest.get(action.stage, -1))
                latest[action.stage] = numbers[-1]
                beside.append((sent, int(coming)))
            sent += _crosses(action, homes, rank, back=True)
            of_action[action] = tuple(numbers[-len(kinds) :])
        rows.append(np.asarray(numbers))
        before.append(np.asarray(earlier))
        moving.append(np.asarray([*beside, (sent, 0)]).T)
    sending, arriving = zip(*moving, strict=True)
    return Timetable(table, tuple(index), of_action, tuple(rows), tuple(before), sending, arriving)


def _crosses(action: Action, homes: dict[int, int], rank: int, *, back: bool) -> bool:
    """Whether an action needs something of another rank, or sends it something (``back``)."""
    if action.kind == "W":
        return False
    other = action.stage + (1 if (action.kind == "F") == back else -1)
    return homes.get(other, rank) != rank


def step_time(
    stages: Sequence[StageCost],
    times: Timetable,
    hops: Sequence[Charge | None],
    exchange: Charge | None,
) -> Step:
    """The step's seconds. ``hops[s]``: moving a tensor between stages s and s + 1, None where they
    are on one rank or s is the last; ``exchange``: likewise the gradients of a tied embedding
    between the first stage and the last."""
    spent = [stages[stage].actions[kind][place][0] for stage, kind, place in times.elements]
    duration = {
        action: sum([spent[number].time_s for number in numbers])
        for action, numbers in times.of_action.items()
    }
    hop_s = [hop.time_s if hop else 0.0 for hop in hops]
    spans = schedule.simulate(times.table, duration.__getitem__, hop_s.__getitem__)
    held = [sorted({action.stage for action in row}) for row in times.table]
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
    rank = finish.index(max(finish))

    parts, errors = Amounts(), Amounts()
    done = [(spent[number], count) for number, count in Counter(times.rows[rank].tolist()).items()]
    for cost, count in done + [(stages[stage].optimizer, 1) for stage in held[rank]]:
        _add_all(parts, cost.parts, count)
        _add_all(errors, cost.errors, count)
    clock = 0.0
    for (kind, stage, _), start_s, end_s in spans[rank]:
        _wait(start_s - clock, hops[stage - 1 if kind == "F" else stage], parts, errors)
        clock = end_s
    add(parts, WAITING, over[rank] - clock)
    _wait(ready[rank] - over[rank], exchange, parts, errors)
    return Step(finish[rank], rank, parts, errors)


def _traffic_ends(row: Sequence[Span], times: Timetable, spent: Sequence[Spent]) -> float:
    """When the actions of a rank and their data-parallel traffic, in a queue, have ended."""
    traffic_ends = 0.0
    for action, clock, _ in row:
        for number in times.of_action[action]:
            clock += spent[number].time_s
            queued = traffic_ends + spent[number].traffic_s
            traffic_ends = max(queued, clock + spent[number].lag_s)
    return max(traffic_ends, row[-1].end_s)


def _wait(idle_s: float, came: Charge | None, parts: Amounts, errors: Amounts) -> None:
    """Time until something came from another rank: as much as its way takes, then bubble."""
    if idle_s > 0:
        assert came is not None, "a rank waits only for others"
        on_its_way = min(idle_s, came.time_s)
        add(parts, came.part, on_its_way)
        add(errors, came.group, came.error_s * (on_its_way / came.time_s if on_its_way else 0.0))
        add(parts, BUBBLE, idle_s - on_its_way)


def peak_memory(
    stages: Sequence[StageCost],
    times: Timetable,
    moving_bytes: float,
    exchange_bytes: float,
    most_sent: int = 1,
) -> tuple[int, Peak]:
    """The rank with the largest peak, and that peak.

    ``moving_bytes``: of a tensor on its way between stages, ``most_sent``: how many results are
    held because they were sent; ``exchange_bytes``: the other gradient of a tied embedding, once
    all actions are done.
    """
    lives = [stages[stage].actions[kind][place][1] for stage, kind, place in times.elements]
    rise = np.asarray([sum(live.rise.values()) for live in lives])
    weights = np.asarray([live.left.get(WEIGHTS, 0.0) for live in lives] + [0.0])  # -1: none yet
    left = np.asarray([sum(live.left.values()) for live in lives]) - weights[:-1]
    moving = [
        np.minimum(sent, most_sent) + coming
        for sent, coming in zip(times.sent, times.coming, strict=True)
    ]
    peaks = []
    for rank, (row, before) in enumerate(zip(times.rows, times.before, strict=True)):
        # What actions leave adds up, but a stage's gathered weights replace those it had.
        after = np.cumsum(left[row] + weights[row] - weights[before])
        during = np.append(0.0, after[:-1]) - weights[before] + rise[row]
        everything = np.append(during, after[-1] + exchange_bytes)
        everything += moving_bytes * moving[rank]
        at = int(everything.argmax())
        mine = {times.elements[number].stage for number in row.tolist()}
        resident = sum(sum(stages[stage].resident.values()) for stage in mine)
        peaks.append((resident + float(everything[at]), rank, at))
    _, rank, at = max(peaks, key=lambda peak: peak[0])
    parts = _parts_at(stages, times, lives, rank, at)
    if at == len(times.rows[rank]):
        add(parts, ROLES["communication"], exchange_bytes)
    add(parts, ROLES["communication"], moving_bytes * int(moving[rank][at]))
    return rank, Peak(sum(parts.values()), parts)


def _parts_at(
    stages: Sequence[StageCost], times: Timetable, lives: list[Live], rank: int, at: int
) -> Amounts:
    """Bytes by role at the worst moment of the ``at``-th element of a row, or after the last."""
    row = times.rows[rank].tolist()
    stage_of = {number: times.elements[number].stage for number in row}
    weights = {stage_of[number]: lives[number].left.get(WEIGHTS, 0.0) for number in row[:at]}
    parts = Amounts()
    for stage in set(stage_of.values()):
        _add_all(parts, {role: float(size) for role, size in stages[stage].resident.items()})
    for number, count in Counter(row[:at]).items():
        _add_all(parts, lives[number].left | {WEIGHTS: 0.0}, count)
    for number in row[at : at + 1]:
        weights.pop(stage_of[number], None)
        _add_all(parts, lives[number].rise)
    add(parts, WEIGHTS, sum(weights.values()))
    return parts


def _add_all(amounts: Amounts, more: Amounts, count: int = 1) -> None:
    for name, amount in more.items():
        add(amounts, name, count * amount)
