"""Follow one operation from the model to the plan: its tasks, their prices, the prices' sources.

A node of the model's graph (``layers.0.up``) is in one stage. It becomes tasks on every rank of
the stage: forward, backward and recomputed. Each task is an operation record with a price. The
factor of its block corrects the price, and the plan adds it up once per microbatch.
"""

import msgspec

from meshwise.models import program_of
from meshwise.prices import Prices
from meshwise.search.charges import corrections, hooks_of
from meshwise.search.stage import StageKind, blocks_in, graph_of, kinds_of, pieces_of
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
    """Return the tasks of ``node`` in a step of ``plan``. An unknown node raises a ValueError that
    lists some nodes."""
    kind, local = _find(plan, node)
    recipe = msgspec.structs.replace(costs.recipe, attention=plan.recipe.attention)
    prices = Prices(msgspec.structs.replace(costs, recipe=recipe), datasheet=True)
    once = msgspec.structs.replace(kind.layout, num_microbatches=1)
    hooks = hooks_of(kind.layout, prices)
    blocks = blocks_in(kind, plan)
    correct = corrections(blocks, pieces_of(kind), prices, hooks, kind.recompute)
    rows: list[Explained] = []
    for task in program_of(graph_of(kind, plan), once, plan.dtype, split=kind.split).tasks:
        if not task.name.startswith(f"{local}.") and task.name != local:
            continue
        price, times = prices.estimate(task.op), plan.layout.num_microbatches
        factor, _ = correct.of(task, price)
        rows.append(
            Explained(
                task=node + task.name.removeprefix(local), phase=task.phase, op=task.op,
                price_s=price.time_s, source=price.source, relative_error=price.error,
                factor=factor, times=times, seconds=price.time_s * factor * times,
            )
        )  # fmt: skip
    return tuple(rows)


def _find(plan: Plan, node: str) -> tuple[StageKind, str]:
    """Find the stage that holds ``node``, and the node's name there: stages count layers from 0."""
    examples: list[str] = []
    kinds = kinds_of(plan.model, plan.workload.seq_len, plan.layout)
    for kind, stage in zip(kinds, plan.stages, strict=True):
        for known in graph_of(kind, plan).nodes:
            if known.phase != "forward":
                continue
            local = f"layers.{known.layer}."
            name = known.name
            if known.part == "layer":
                name = f"layers.{known.layer + stage.first_layer}.{name.removeprefix(local)}"
            if name == node:
                return kind, known.name
            examples += [name] if name.startswith("layers.0.") else []
    raise ValueError(
        f"no operation {node!r} in {plan.model.name}; for example {', '.join(examples)}"
    )
