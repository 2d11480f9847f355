"""Say what would change the answer: search again with more memory, faster links, a larger batch.

Each change is made alone, to the cluster, its prices or the batch, and searched like any plan.

Faster links: the rates in the cluster's file are doubled, which prices of data sheets follow.
Measured collectives among devices that only such links connect, at the outermost, keep their launch
(their least measured time) and take half of the rest:

    time = launch + (measured time - launch) / 2

A group that spans hosts counts as the network's, whatever it does inside of them.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwise.search.find import NoLayout, find
from meshwise.spec import Collective, Costs, Curve, Plan, Tier, WhatIf, Workload
from meshwise.spec.costs import Law

MORE_BYTES = 10 * 10**9
FASTER = 2
log = logging.getLogger("meshwise")


class Change(NamedTuple):
    """A change: what it is called, the prices and the batch that it makes, and how."""

    name: str
    costs: Costs
    workload: Workload
    note: str = ""


def what_if(plan: Plan, costs: Costs, **how: Any) -> tuple[WhatIf, ...]:
    """Return the best plan after each change. ``costs``, ``how``: the prices and options of
    ``find`` that ``plan`` was searched with."""
    found, waiting = list[WhatIf](), list(changes(plan, costs))
    for number, change in enumerate(waiting, 1):
        log.info("what if: %s, search %d of %d", change.name, number, len(waiting))
        try:
            best = find(
                plan.model,
                change.workload,
                change.costs,
                num_devices=plan.layout.num_devices,
                **how,
            )
        except NoLayout as error:
            found.append(WhatIf(change=change.name, note=str(error)))
            continue
        assert best.prediction is not None and plan.prediction is not None
        found.append(
            WhatIf(
                change=change.name,
                note=change.note,
                layout=best.layout,
                step_time_s=best.prediction.step_time_s,
                tokens_per_s=best.prediction.tokens_per_s,
                faster=best.prediction.tokens_per_s / plan.prediction.tokens_per_s,
            )
        )
    return tuple(found)


def changes(plan: Plan, costs: Costs) -> Iterator[Change]:
    """Yield the changes that can matter to the plan: none of links that its devices do not use."""
    cluster, batch, devices = (
        costs.cluster,
        plan.workload.global_batch_size,
        plan.layout.num_devices,
    )
    host = cluster.num_devices_per_host
    device = replace(cluster.device, memory_bytes=cluster.device.memory_bytes + MORE_BYTES)
    roomy = replace(costs, cluster=replace(cluster, device=device))
    yield Change("10 GB more memory a device", roomy, plan.workload)
    if devices > host:
        network = _faster(costs, lambda tier: tier.num_devices > host)
        yield Change("twice the network between hosts", network[0], plan.workload, network[1])
    if devices > 1 and host > 1:
        inside = _faster(costs, lambda tier: tier.num_devices <= host)
        yield Change("twice the links within a host", inside[0], plan.workload, inside[1])
    yield Change("twice the batch", costs, replace(plan.workload, global_batch_size=2 * batch))


def _faster(costs: Costs, is_faster: Callable[[Tier], bool]) -> tuple[Costs, str]:
    """Return the prices with some tiers of links twice as fast, and a note of what that did."""
    tiers = tuple(
        replace(tier, bytes_per_s=FASTER * tier.bytes_per_s)
        if is_faster(tier) and tier.bytes_per_s
        else tier
        for tier in costs.cluster.tiers
    )
    curves, count = list[Curve](), 0
    for curve in costs.curves:
        is_slow = _crosses(curve, costs, is_faster)
        curves.append(halved(curve) if is_slow else curve)
        count += is_slow
    changed = replace(costs, cluster=replace(costs.cluster, tiers=tiers), curves=tuple(curves))
    measured = f"{count} measured curves take half of what they took beyond their launch"
    return changed, measured if count else "the data sheet's rate is doubled"


def _crosses(curve: Curve, costs: Costs, is_faster: Callable[[Tier], bool]) -> bool:
    """Whether a curve is of a collective whose outermost links get faster."""
    op = curve.like
    if not isinstance(op, Collective):
        return False
    try:
        return is_faster(costs.cluster.tier_of(op.group_size, op.group_stride))
    except ValueError:  # a group of more devices than this cluster has
        return False


def halved(curve: Curve) -> Curve:
    """Return a curve whose times beyond its launch are half as long."""
    launch_s = min(curve.time_s)
    least, most = curve.end_range_s_per_byte
    if curve.law == "sigmoid":  # it does not pass through its knots
        lines = Law(held_out=curve.held_out)
        curve = replace(curve, law="lines", laws=curve.laws | {"lines": lines})
    return replace(
        curve,
        time_s=tuple(launch_s + (time_s - launch_s) / FASTER for time_s in curve.time_s),
        end_s_per_byte=curve.end_s_per_byte / FASTER,
        end_range_s_per_byte=(least / FASTER, most / FASTER),
    )
