"""Pipeline schedules as action tables: the engine executes them, the search simulates them.

In: a schedule's name, the number of pipeline ranks ``pp``, of stages on each, of microbatches. Out:
one row of actions for each rank, in the order in which the rank runs them.

    F  forward of one microbatch through one stage      B  its whole backward
    I  backward to the stage's input only               W  backward to its weights only
After I the previous stage can continue; W can wait and fill a bubble. Schedules in ``SPLIT`` use
I and W (and B if there is no bubble to fill), the others only B.

    none                     one stage: F and B of each microbatch in turn
    gpipe                    all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)
    1f1b                     rank p runs pp - 1 - p forwards first, then F and B in turn: at most
                             pp - p microbatches are alive (PipeDream-flush, Narayanan et al. 2020,
                             arXiv:2006.09503)
    interleaved_1f1b         several stages on a rank; microbatches form rounds, and each round
                             passes all stages before the next round (Megatron-LM, Narayanan et al.
                             2021, arXiv:2104.04473)
    looped_bfs               several stages on a rank; all microbatches pass one stage before the
                             next (Breadth-First Pipeline Parallelism, Lamy-Poirier 2022,
                             arXiv:2211.05953)
    interleaved_zero_bubble  like interleaved_1f1b with fewer forwards ahead; each W on rank p
                             comes p backwards late (Zero Bubble, Qi et al. 2023, arXiv:2401.10241)
    zbv                      two stages on a rank, placed as a V: rank 0 has the first and the last
                             (Zero Bubble's section 6)
    dualpipev                the same V, with F of one stage beside B of the other, so that each
                             hides the other's communication (DualPipe, DeepSeek-V3 2024,
                             arXiv:2412.19437, cut in half by Qi et al. 2025). In a table the two
                             follow each other.
Orders are those of torch.distributed.pipelining. If a rank's share of the model takes time 1 in
forward and 2 in backward, in equal stages, m microbatches take
    3 m + (pp - 1) (1 if SPLIT else 3) / stages_per_rank
if m >= pp (zbv: 2 pp - 1). For 4 ranks, 8 microbatches and 2 stages per rank (if there may be
several): 33 (gpipe, 1f1b), 28.5 (interleaved_1f1b, looped_bfs) and 25.5 (all in ``SPLIT``).
"""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple, cast, get_args

from meshwise.spec.layout import V_SHAPED, ScheduleName, rank_of

Kind = Literal["F", "B", "I", "W"]
Name = ScheduleName
_SINGLE: frozenset[Name] = frozenset({"none", "gpipe", "1f1b"})  # one stage on a rank
_IN_ROUNDS: frozenset[Name] = frozenset({"interleaved_1f1b", "interleaved_zero_bubble"})


class Action(NamedTuple):
    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} on stage {self.stage}"


class Span(NamedTuple):
    """An action with its start and end."""

    action: Action
    start_s: float
    end_s: float


MOST_ACTIONS = 2**18  # forwards over all stages; they are listed and simulated one by one

Table = tuple[tuple[Action, ...], ...]
_Key = tuple[Kind, int, int]  # equals its Action, and is created much faster
_Phases = list[tuple[int, str]]  # see _in_phases


@lru_cache(maxsize=128)
def table(name: Name, pp: int, stages_per_rank: int, num_microbatches: int) -> Table:
    """Return a row of actions per pipeline rank. Raises a ValueError with ``check``'s reason."""
    if reason := check(name, pp, stages_per_rank, num_microbatches):
        raise ValueError(reason)
    return tuple(row(name, pp, rank, stages_per_rank, num_microbatches) for rank in range(pp))


def row(
    name: Name, pp: int, rank: int, stages_per_rank: int, num_microbatches: int
) -> tuple[Action, ...]:
    """Return the actions of one pipeline rank."""
    stages = stages_of(name, rank, pp, stages_per_rank)
    return tuple(_row(name, pp, rank, stages, num_microbatches))


def enough(name: Name, pp: int, num_microbatches: int) -> int:
    """Return how many microbatches show all states of a rank that ``num_microbatches`` show; more
    only repeat states. A state: each stage's live microbatches, and whether it has gradients."""
    return num_microbatches if name in ("gpipe", "looped_bfs") else min(num_microbatches, 4 * pp)


def check(name: Name, pp: int, stages_per_rank: int, num_microbatches: int) -> str | None:
    """Return why the schedule cannot take these numbers, with the fix; None if it can."""
    if name not in get_args(Name):
        return f"schedule must be one of {', '.join(get_args(Name))}, not {name}"
    if min(pp, stages_per_rank, num_microbatches) < 1:
        return (
            "a schedule needs pipeline ranks, stages on each and microbatches, at least 1 of all, "
            f"not {pp}, {stages_per_rank} and {num_microbatches}"
        )
    if name == "none" and pp != 1:
        return f"schedule none is for one pipeline rank, not {pp}: choose 1f1b"
    if name in _SINGLE and stages_per_rank != 1:
        return f"{name} runs 1 stage on a rank, not {stages_per_rank}: choose interleaved_1f1b"
    if name in V_SHAPED and stages_per_rank != 2:
        return f"{name} runs 2 stages on a rank, not {stages_per_rank}: set stages_per_rank to 2"
    if name not in _SINGLE and stages_per_rank == 1:
        return f"{name} runs 2 or more stages on a rank, not 1: choose 1f1b"
    if (actions := pp * stages_per_rank * num_microbatches) > MOST_ACTIONS:
        return (
            f"{pp} x {stages_per_rank} stages and {num_microbatches} microbatches are {actions} "
            f"forwards, more than {MOST_ACTIONS}: choose larger microbatches"
        )
    rounds = _num_rounds(pp, num_microbatches)
    if name in _IN_ROUNDS and num_microbatches % rounds:
        return (
            f"{name} runs {num_microbatches} // {pp} = {rounds} rounds of equal size, which "
            f"{num_microbatches} microbatches do not give: choose {rounds * pp} or "
            f"{(rounds + 1) * pp}"
        )
    if name == "dualpipev" and num_microbatches < 2 * pp:
        return (
            f"dualpipev needs as many microbatches as stages, not {num_microbatches} for "
            f"{2 * pp}: choose {2 * pp} microbatches or more, or zbv"
        )
    return None


def stages_of(name: Name, rank: int, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the stages of a pipeline rank in ascending order."""
    return tuple(s for s in range(pp * stages_per_rank) if rank_of(name, s, pp) == rank)


def _row(name: Name, pp: int, rank: int, stages: tuple[int, ...], m: int) -> list[Action]:
    """List the actions of a rank with these stages, for m microbatches."""
    hops = pp - 1 - rank  # to the last rank
    match name:
        case "gpipe":
            return _in_phases([(m, "F0"), (m, "B0")], stages)
        case "none" | "1f1b":
            ahead = min(hops, m)
            return _in_phases([(ahead, "F0"), (m - ahead, "F0 B0"), (ahead, "B0")], stages)
        case "looped_bfs":
            forwards = [Action("F", stage, i) for stage in stages for i in range(m)]
            return forwards + [action._replace(kind="B") for action in reversed(forwards)]
        case "interleaved_1f1b":
            return _in_rounds(pp, stages, m, ahead=2 * hops, late=None)
        case "interleaved_zero_bubble":
            return _in_rounds(pp, stages, m, ahead=hops, late=rank)
        case "zbv":
            # The phases need 2 * pp - 1 microbatches: those beyond m are removed again.
            row = _in_phases(_zbv(hops, rank, max(m, 2 * pp - 1) - pp), stages)
            return [action for action in row if action.microbatch < m]
        case "dualpipev":
            return _in_phases(_dualpipev(hops, rank, m - 2 * pp), stages)


def _in_rounds(
    pp: int, stages: tuple[int, ...], num_microbatches: int, *, ahead: int, late: int | None
) -> list[Action]:
    """List the actions of rounds of about pp microbatches. Each round passes all stages in turn.

    The rank runs ``ahead`` more forwards than the last rank before it alternates forward and
    backward. Backwards are whole, or I with each W ``late`` turns after its I.
    """
    size = num_microbatches // _num_rounds(pp, num_microbatches)
    rounds = [range(first, first + size) for first in range(0, num_microbatches, size)]
    forwards = [Action("F", stage, m) for ms in rounds for stage in stages for m in ms]
    backwards = [Action("B", stage, m) for ms in rounds for stage in stages[::-1] for m in ms]
    weights: list[Action | None] = []
    if late is not None:
        weights = [None] * late + [action._replace(kind="W") for action in backwards]
        backwards = [action._replace(kind="I") for action in backwards]
    ahead += (len(stages) - 1) * size
    turns = zip_longest(forwards[ahead:], backwards, weights)
    return forwards[:ahead] + [action for turn in turns for action in turn if action]


def _num_rounds(pp: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // pp)


def _zbv(hops: int, rank: int, steady: int) -> _Phases:
    """Return the phases: fill, first backwards on the way back, steady, drain with W in bubbles."""
    return [
        (2 * hops + 1, "F0"),
        (rank, "F1 F0"),
        (hops + 1, "F1 I1 W1"),
        (steady - hops, "F0 I0 W0 F1 I1 W1"),
        (hops, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (hops + 1, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    ]


def _dualpipev(hops: int, rank: int, surplus: int) -> _Phases:
    """Return the phases: fill, split backwards on the way back, steady, drain half split.

    ``surplus`` is the number of microbatches beyond one for each stage.
    """
    half, odd = divmod(rank + 1, 2)
    return [
        (2 * hops, "F0"),
        (rank + 1, "F0 F1"),
        (hops, "I1 W1 F1"),
        (surplus + rank + 1, "F0 B1 F1 B0"),
        (hops, "B1 F1 B0"),
        (half, "B1 B0"),
        (odd, "B1 I0"),
        (half, "I1 I0"),
        (hops, "W I0"),
        (rank + 1, "W"),
    ]


def _in_phases(phases: _Phases, stages: tuple[int, ...]) -> list[Action]:
    """Write out phases. Each is a number of repeats and letters; "F1" is F on the second stage.

    F takes the next microbatch of its stage, B and I the next one without a backward. W belongs to
    the oldest I that has no W yet, "W1" to the oldest of the second stage.
    """
    row: list[Action] = []
    unpaired: list[Action] = []  # I without W
    forwards, backwards = Counter[int](), Counter[int]()
    for times, letters in phases:
        for letter in letters.split() * times:
            kind = cast(Kind, letter[0])
            stage = stages[int(letter[1])] if letter[1:] else None
            if kind == "W":
                action = next(i for i in unpaired if stage in (None, i.stage))
                unpaired.remove(action)
                row.append(Action("W", action.stage, action.microbatch))
                continue
            assert stage is not None
            count = forwards if kind == "F" else backwards
            row.append(Action(kind, stage, count[stage]))
            count[stage] += 1
            if kind == "I":
                unpaired.append(row[-1])
    return row


def simulate(
    table: Table,
    duration: Callable[[Action], float],
    transfer: Callable[[int, int], float] = lambda here, there: 0.0,
) -> list[list[Span]]:
    """Return start and end of each action if ranks run their rows in order; linear in the actions.

    ``duration``: an action's seconds. ``transfer(s, t)``: seconds to send a tensor from stage s to
    its neighbour t. They delay the receiver, keep no rank busy, and are 0 between stages of one
    rank. F needs the F of the stage before. B and I need their own F, and the B or I of the
    stage after. W needs its own I. If a row waits forever, a ValueError names the action that it
    waits for.
    """
    place = {action.stage: rank for rank, row in enumerate(table) for action in row}
    last = max(place)

    def hop_s(here: int, there: int) -> float:
        return 0.0 if place.get(here) == place.get(there) else transfer(here, there)

    needs: dict[tuple[Kind, int], list[tuple[Kind, int, float]]] = {}  # what has to end, and hops
    for s in place:
        needs["F", s] = [("F", s - 1, hop_s(s - 1, s))] if s else []
        needs["B", s] = [("F", s, 0.0)]
        needs["B", s] += [("B", s + 1, hop_s(s + 1, s))] if s < last else []
        needs["I", s], needs["W", s] = needs["B", s], [("I", s, 0.0)]

    spans: list[list[Span]] = [[] for _ in table]
    ended: dict[_Key, float] = {}  # an I is a B, too: the stage before waits for either
    waiting: dict[_Key, list[int]] = {}  # ranks, by the action they wait for
    ready = list(range(len(table)))
    while ready:
        rank = ready.pop()
        row, done = table[rank], spans[rank]
        start = done[-1].end_s if done else 0.0
        while len(done) < len(row):
            kind, stage, m = action = row[len(done)]
            for what, where, away_s in needs[kind, stage]:
                if (at := ended.get((what, where, m))) is None:
                    waiting.setdefault((what, where, m), []).append(rank)
                    break
                start = max(start, at + away_s)
            else:
                end = start + duration(action)
                done.append(Span(action, start, end))
                for name in (action, ("B", stage, m)) if kind == "I" else (action,):
                    ended[name] = end
                    ready += waiting.pop(name, ())
                start = end
                continue
            break
    if waiting:
        stuck = [
            f"rank {rank} at {table[rank][len(spans[rank])]}, which waits for {Action(*need)}"
            for need, ranks in waiting.items()
            for rank in ranks
        ]
        raise ValueError(f"the schedule deadlocks: {'; '.join(stuck)}")
    return spans


def end_time(spans: list[list[Span]]) -> float:
    return max(row[-1].end_s for row in spans)
