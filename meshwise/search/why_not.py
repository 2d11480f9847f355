"""Say why a layout that the user names is not the plan: not legal, too large, or slower.

In: a plan, its prices and the layout. Out: ``WhyNot``. The layout is predicted like any other. Its
parts of time and memory stand beside those of the plan, so that their differences add up to the
difference of the two steps.
"""

from collections.abc import Sequence

from meshwise.prices import Prices
from meshwise.search.predict import memory_of, predict
from meshwise.search.space import (
    OUTSIDE,
    cannot_run,
    check,
    nothing_gained,
    recipe_obstacle,
)
from meshwise.search.within import ANY, Space
from meshwise.spec import Costs, Difference, Layout, Part, Plan, WhyNot


def why_not(
    plan: Plan,
    costs: Costs,
    layout: Layout,
    *,
    measured_only: bool = False,
    within: Space = ANY,
) -> WhyNot:
    """Compare ``layout`` with the plan's. ``costs``, ``within``: the prices that the plan was made
    from, and the space that was searched. A plan without a prediction raises a ValueError."""
    told = plan.prediction
    if told is None:
        raise ValueError("Plan.prediction is None: the plan was not priced; meshwise plan does")
    model, workload = plan.model, plan.workload
    if obstacle := _obstacle(plan, costs, layout):
        return WhyNot(layout=layout, obstacle=obstacle)
    prices = Prices(costs, datasheet=not measured_only)
    try:
        other = predict(model, workload, layout, prices)
    except ValueError as missing:
        return WhyNot(layout=layout, obstacle=str(missing))
    rank, peak = memory_of(model, workload, layout, prices)
    limit = costs.cluster.usable_bytes
    missing_bytes, host = max(0.0, peak.total_bytes - limit), costs.cluster.num_devices_per_host
    is_inside = within.has(layout, host) and within.has_cut(model, workload.seq_len, layout)
    return WhyNot(
        layout=layout,
        misfit=peak.shortfall(rank, limit) if missing_bytes else "",
        missing_bytes=missing_bytes,
        untried=nothing_gained(layout, host) or ("" if is_inside else f"it is {OUTSIDE}"),
        step_time_s=other.step_time_s,
        error_s=told.difference_error_s(other),
        time=_differences(told.time_parts, other.time_parts),
        memory=_differences(told.memory_parts, other.memory_parts),
    )


def _obstacle(plan: Plan, costs: Costs, layout: Layout) -> str:
    """Return why the layout cannot be planned for the plan's devices and batch; "" if it can."""
    workload, due = plan.workload, plan.layout.num_devices
    batch = workload.global_batch_size
    if layout.num_devices != due:
        return f"it is for {layout.num_devices} devices, and the plan for {due}"
    if layout.batch_size != batch:
        return (
            f"dp * microbatch_size * num_microbatches is {layout.batch_size}, and "
            f"global_batch_size is {batch}"
        )
    try:
        check(plan.model, workload, layout)
    except ValueError as error:
        return str(error)
    of_recipe = recipe_obstacle(plan.model, workload.seq_len, layout, costs)
    return cannot_run(layout, plan.model, costs) or of_recipe or ""


def _differences(chosen: Sequence[Part], named: Sequence[Part]) -> tuple[Difference, ...]:
    here, there = ({part.name: part.value for part in parts} for parts in (chosen, named))
    found = [
        Difference(part=name, chosen=here.get(name, 0.0), named=there.get(name, 0.0))
        for name in here | there
    ]
    return tuple(sorted(found, key=lambda of: -abs(of.more)))
