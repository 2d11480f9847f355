"""Pipeline schedules as action tables: the engine executes them, the search simulates them.

A table lists each rank's actions in order: F forward, B backward of one microbatch on one stage.

    gpipe   all forwards, then all backwards (Huang et al. 2019)
    1f1b    min(P - p, m) forwards ahead, then one backward for each forward (PipeDream-flush,
            Narayanan et al. 2021): rank p keeps at most P - p microbatches alive
Both take (m + P - 1)(f + b) when the stages are equal: the bubble is the same, the memory is not.
"""

from typing import Literal, NamedTuple


class Action(NamedTuple):
    kind: Literal["F", "B"]
    stage: int
    microbatch: int


class Span(NamedTuple):
    """An action with its start and end."""

    action: Action
    start_s: float
    end_s: float


Table = tuple[tuple[Action, ...], ...]


def gpipe(num_stages: int, num_microbatches: int) -> Table:
    """One row of actions for each rank; stage p runs on rank p."""
    _check(num_stages, num_microbatches)
    return tuple(
        tuple(Action(kind, stage, m) for kind in ("F", "B") for m in range(num_microbatches))
        for stage in range(num_stages)
    )


def one_f_one_b(num_stages: int, num_microbatches: int) -> Table:
    """As ``gpipe``, but a backward follows each forward once the pipeline is full."""
    _check(num_stages, num_microbatches)
    rows = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage, num_microbatches)
        row = [Action("F", stage, m) for m in range(ahead)]
        for m in range(num_microbatches):
            row.append(Action("B", stage, m))
            if m + ahead < num_microbatches:
                row.append(Action("F", stage, m + ahead))
        rows.append(tuple(row))
    return tuple(rows)


def _check(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"a schedule needs stages and microbatches, not {num_stages} and {num_microbatches}"
        )


def simulate(table: Table, forward_s: float = 1.0, backward_s: float = 2.0) -> list[list[Span]]:
    """Start and end of each action when ranks do their rows in order and data takes no time.

    F(s, m) needs F(s-1, m); B(s, m) needs F(s, m) and B(s+1, m). A row that waits for something
    that never comes is a ValueError naming the action.
    """
    last_stage = max(action.stage for row in table for action in row)
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in table]
    clock = [0.0] * len(table)
    position = [0] * len(table)
    while any(position[rank] < len(row) for rank, row in enumerate(table)):
        moved = False
        for rank, row in enumerate(table):
            while position[rank] < len(row):
                action = row[position[rank]]
                needs = _needs(action, last_stage)
                if any(need not in ended for need in needs):
                    break
                start = max([clock[rank], *(ended[need] for need in needs)])
                clock[rank] = start + (forward_s if action.kind == "F" else backward_s)
                ended[action] = clock[rank]
                spans[rank].append(Span(action, start, clock[rank]))
                position[rank] += 1
                moved = True
        if not moved:
            stuck = [
                row[position[rank]] for rank, row in enumerate(table) if position[rank] < len(row)
            ]
            raise ValueError(f"the schedule deadlocks at {', '.join(map(str, stuck))}")
    return spans


def _needs(action: Action, last_stage: int) -> list[Action]:
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    after = [Action("B", stage + 1, microbatch)] if stage < last_stage else []
    return [Action("F", stage, microbatch), *after]


def end_time(spans: list[list[Span]]) -> float:
    return max(row[-1].end_s for row in spans)


def peak_in_flight(table: Table) -> list[int]:
    """For each rank, the most microbatches whose forward is done and whose backward is not."""
    peaks = []
    for row in table:
        alive = peak = 0
        for action in row:
            alive += 1 if action.kind == "F" else -1
            peak = max(peak, alive)
        peaks.append(peak)
    return peaks
