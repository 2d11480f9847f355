"""Follow one operation from the model to the plan: what it is, what it costs, where that is from.

A node of the graph (``layers.0.up``) becomes tasks on every rank, forward and backward; each
task is an operation record with a price; the block it lies in corrects the price; the plan adds
it up once a microbatch.
"""

from meshwise.models import apply, graph
from meshwise.prices import Estimate, Prices
from meshwise.search.predict import blocks_of
from meshwise.spec import Costs, Op, Plan, Record
from meshwise.spec.record import NonNegativeFloat, Positive


class Explained(Record, kw_only=True):
    """One task of a rank. ``seconds`` = ``price_s`` * ``factor`` * ``times`` in a step."""

    task: str
    phase: str
    op: Op
    price_s: NonNegativeFloat
    source: str
    relative_error: NonNegativeFloat
    factor: NonNegativeFloat
    times: Positive
    seconds: NonNegativeFloat


def explain(plan: Plan, costs: Costs, node: str) -> tuple[Explained, ...]:
    """The tasks of ``node`` in ``plan``'s step; an unknown node is a ValueError that lists some."""
    layout = plan.layout
    whole = graph(plan.model, layout.microbatch_size, plan.workload.seq_len, plan.dtype)
    known = [n.name for n in whole.nodes if n.phase == "forward"]
    if node not in known:
        some = ", ".join(name for name in known if name.startswith("layers.0")) or ", ".join(known)
        raise ValueError(f"no operation {node!r} in {plan.model.name}; for example {some}")
    prices = Prices(costs)
    factors = {
        key: prices.factor(block)[0]
        for key, block in blocks_of(plan.model, plan.workload, layout, plan.dtype).items()
    }
    rows: list[Explained] = []
    for task in apply(whole, layout, plan.dtype).tasks:
        if not task.name.startswith(f"{node}.") and task.name != node:
            continue
        if task.name in (row.task for row in rows):  # the same in every microbatch
            continue
        estimate: Estimate = prices.estimate(task.op)
        factor = factors.get((task.part, task.phase), 1.0)
        times = layout.num_microbatches
        rows.append(
            Explained(
                task=task.name,
                phase=task.phase,
                op=task.op,
                price_s=estimate.time_s,
                source=estimate.source,
                relative_error=estimate.error,
                factor=factor,
                times=times,
                seconds=estimate.time_s * factor * times,
            )
        )
    return tuple(rows)
