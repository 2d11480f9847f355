"""Find how many devices a training needs: the fewest on which it fits, or the cheapest count that
meets a deadline. Or find the batch, or the back end of attention, with the most tokens a second, of
some that the user names.

Counts are those that divide a host, then whole hosts. Each is searched like any plan. A count is
not searched if the states of AdamW alone, three times the float32 parameters, are more than the
memory of all its devices: wherever they lie, every element lies somewhere.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from meshwise.models import kernels
from meshwise.search.find import NoLayout, find
from meshwise.search.goodput import goodput, state_bytes
from meshwise.search.space import divisors
from meshwise.spec import AnyModel, Cluster, Costs, DeviceCount, Plan, WhatIf, Workload
from meshwise.units import format_bytes, format_count, format_seconds

log = logging.getLogger("meshwise")
Tried = tuple[Plan | None, DeviceCount]
Compared = tuple[Plan, tuple[WhatIf, ...]]


def counts(cluster: Cluster) -> list[int]:
    """Return the counts of devices: the divisors of a host, then whole hosts."""
    host = cluster.num_devices_per_host
    return [*divisors(host), *range(2 * host, cluster.num_devices + 1, host)]


def fewest(
    model: AnyModel,
    workload: Workload,
    costs: Costs,
    *,
    failures: Mapping[str, float] | None = None,
    **how: Any,
) -> tuple[Plan, tuple[DeviceCount, ...]]:
    """Return the fastest plan on the fewest devices on which the model fits, and all counts up to
    it. If it fits on no count a NoLayout is raised. ``failures``: what was given of them
    (``goodput``), if they count; ``how``: options of ``find``."""
    tried = list[DeviceCount]()
    for plan, size in _tried(model, workload, costs, failures, how):
        tried.append(size)
        if plan is not None:
            return plan, tuple(tried)
    raise _too_small(model, costs.cluster, tried)


def cheapest(
    model: AnyModel,
    workload: Workload,
    costs: Costs,
    *,
    tokens: float,
    deadline_s: float,
    failures: Mapping[str, float] | None = None,
    **how: Any,
) -> tuple[Plan, tuple[DeviceCount, ...]]:
    """Return the plan that takes ``tokens`` (of images: so many) within ``deadline_s`` seconds in
    the fewest device hours, and all counts; further arguments as of ``fewest``. If none does, or
    fits, a ValueError says so."""
    found = [*_tried(model, workload, costs, failures, how)]
    sizes = tuple(size for _, size in found)
    planned = [(plan, size) for plan, size in found if plan is not None]
    if not planned:
        raise _too_small(model, costs.cluster, sizes)
    seconds = {size: size.seconds(tokens, workload) for _, size in planned}
    in_time = [(plan, size) for plan, size in planned if seconds[size] <= deadline_s]
    if not in_time:
        least = min(seconds, key=seconds.__getitem__)
        raise ValueError(
            f"deadline = {format_seconds(deadline_s)}: {format_count(tokens)} tokens take "
            f"{format_seconds(seconds[least])} on {least.num_devices} device(s), the fastest of up "
            f"to {costs.cluster.num_devices}; give more hosts with --hosts, or a later deadline"
        )
    plan, _ = min(in_time, key=lambda each: seconds[each[1]] * each[1].num_devices)
    return plan, sizes


def best_batch(
    model: AnyModel, workload: Workload, costs: Costs, sizes: Sequence[int], **how: Any
) -> Compared:
    """Return the plan of the batch that takes most tokens (or images) a second, and all batches,
    the best first. ``sizes``: their sequences in a step; ``how``: options of ``find``. If there is
    no plan of any of them a NoLayout is raised."""
    about = {str(size): (replace(workload, global_batch_size=size), costs) for size in sizes}
    return _best("batch of", model, about, how)


def best_attention(
    model: AnyModel, workload: Workload, costs: Costs, names: Sequence[str], **how: Any
) -> Compared:
    """Return the plan of the back end of attention that takes most tokens a second, and all
    ``names``, the best first; auto is the best if it ties with the fastest. A ValueError refuses
    one that cannot run the model; else as ``best_batch``."""
    recipes = {name: replace(costs.recipe, attention=name) for name in names}
    for recipe in recipes.values():
        kernels.check(recipe, costs.cluster.device.kind, costs.dtype, model)
    about = {name: (workload, replace(costs, recipe=of)) for name, of in recipes.items()}
    return _best("attention by", model, about, how, "auto")


def _best(
    what: str,
    model: AnyModel,
    about: Mapping[str, tuple[Workload, Costs]],
    how: dict[str, Any],
    plainest: str = "",
) -> Compared:
    """Search with each workload and prices. ``plainest``: the best of those that tie; without one
    steps are not alike, and none ties."""
    found, none = dict[str, Plan](), list[WhatIf]()
    for at, (change, with_these) in enumerate(about.items(), 1):
        log.info("%s %s, %d of %d", what, change, at, len(about))
        try:
            found[change] = find(model, *with_these, **how)
        except NoLayout as error:
            none.append(WhatIf(change=change, note=str(error)))
    if not found:
        raise NoLayout("; ".join(f"{what} {one.change}: {one.note}" for one in none))
    told = {change: plan.prediction for change, plan in found.items() if plan.prediction}
    ranked = sorted(told, key=lambda change: -told[change].tokens_per_s)
    if plainest in told and told[plainest].ties(told[ranked[0]]):
        ranked = sorted(ranked, key=lambda change: change != plainest)
    best, most = ranked[0], told[ranked[0]]
    shown = (
        WhatIf(
            change=change,
            layout=found[change].layout,
            step_time_s=told[change].step_time_s,
            tokens_per_s=told[change].tokens_per_s,
            faster=told[change].tokens_per_s / most.tokens_per_s,
            ties=bool(plainest) and change != best and told[change].ties(most),
        )
        for change in ranked
    )
    return found[best], (*shown, *none)


def _tried(
    model: AnyModel,
    workload: Workload,
    costs: Costs,
    failures: Mapping[str, float] | None,
    how: dict[str, Any],
) -> Iterator[Tried]:
    """Yield the best plan of each count, or None, and what was found."""
    states, recipe = state_bytes(model, costs.recipe), costs.recipe
    every = counts(costs.cluster)
    for at, count in enumerate(every, 1):
        if states > count * costs.cluster.usable_bytes:
            note = f"parameters and moments, {format_bytes(states)}, are more than all their memory"
            yield None, DeviceCount(num_devices=count, note=note)
            continue
        log.info("%d device(s), count %d of up to %d", count, at, len(every))
        try:
            plan = find(model, workload, costs, num_devices=count, **how)
        except NoLayout as error:
            yield None, DeviceCount(num_devices=count, note=error.args[0])
            continue
        told = plan.prediction
        assert told is not None
        lost = None
        if failures is not None:
            lost = goodput(model, costs.cluster, count, recipe=recipe, **failures)
        yield (
            plan,
            DeviceCount(
                num_devices=count,
                layout=plan.layout,
                step_time_s=told.step_time_s,
                high_s=told.high_s,
                p50_s=told.usual_s,
                goodput=lost.share if lost else 1.0,
            ),
        )


def _too_small(model: AnyModel, cluster: Cluster, tried: Sequence[DeviceCount]) -> NoLayout:
    return NoLayout(
        f"{model.name or 'the model'} cannot be planned for the {cluster.num_devices} device(s) of "
        f"cluster {cluster.name!r}: {tried[-1].note}; give more hosts with --hosts"
    )
