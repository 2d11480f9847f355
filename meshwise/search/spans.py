"""Draw the predicted step of every rank, moment by moment, for ``timeline``.

One rank of each pipeline rank is drawn, as the others do the same. Actions, waiting and the end of
the step are those that the prediction adds up. Messages to other stages are drawn on the sender.
Of an action's own communication only the sum is known. It is drawn from the action's start, one
kind after another, though it is spread over the action.
"""

from collections.abc import Iterator

from meshwise.prices import Prices
from meshwise.schedule import Action
from meshwise.search.charges import MESSAGES
from meshwise.search.pipeline import course
from meshwise.search.predict import EXCHANGE, PricedStages, staged
from meshwise.search.simulate import SHARING, WAITING
from meshwise.spec import Costs, Plan
from meshwise.spec.phases import PhaseSpan, Stream

COMMUNICATION = (WAITING, SHARING, *MESSAGES)
OPTIMIZER = "optimizer"
Drawn = tuple[Stream, str, float, float]


def spans(plan: Plan, costs: Costs, *, measured_only: bool = False) -> list[PhaseSpan]:
    """Return what every pipeline rank does when in a step of ``plan``, in seconds from its start.
    ``costs``: the prices that the plan was made from."""
    layout = plan.layout
    priced = staged(plan.model, plan.workload, layout, Prices(costs, datasheet=not measured_only))
    found = []
    for pipeline_rank in range(layout.pp):
        rank = layout.devices_of(pipeline_rank)[0]
        found += [
            PhaseSpan(rank=rank, stream=stream, name=name, start_s=start_s, end_s=end_s)
            for stream, name, start_s, end_s in _of_rank(pipeline_rank, priced)
            if end_s > start_s
        ]
    return found


def _of_rank(rank: int, priced: PricedStages) -> Iterator[Drawn]:
    spent, rows, over, ready, finish = course(*priced)
    times = priced.times
    clock = 0.0
    for action, start_s, end_s in rows[rank]:
        name = f"{action.kind} {action.stage}.{action.microbatch}"
        yield "compute", name, start_s, end_s
        at = start_s
        for part in COMMUNICATION:
            took_s = sum(spent[number].parts.get(part, 0.0) for number in times.of_action[action])
            yield "communication", f"{part} in {name}", at, at + took_s
            at += took_s
        yield from _sent(action, name, end_s, priced)
        clock = end_s
    yield "communication", WAITING, clock, over[rank]
    if priced.exchange is not None and ready[rank] > over[rank]:
        yield "messages", EXCHANGE, ready[rank] - priced.exchange.time_s, ready[rank]
    yield "compute", OPTIMIZER, ready[rank], finish[rank]


def _sent(action: Action, name: str, end_s: float, priced: PricedStages) -> Iterator[Drawn]:
    """Yield the message that an action sends to the stage behind it (F) or before it (B, I)."""
    there = action.stage + (1 if action.kind == "F" else -1)
    hop = priced.hops.get((action.stage, there))
    if action.kind != "W" and hop is not None:
        yield "messages", f"{name} to stage {there}", end_s, end_s + hop.time_s
