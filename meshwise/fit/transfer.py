"""Prices of a machine from measurements of another.

Each measured time is multiplied by what the two data sheets say of the operation:

    time there = time here x (data sheet's time there / data sheet's time here)

so that work reaches as much of one machine's data sheet as of the other's. A block's factor is
taken over: its ratio of the sum of its operations, and the host's time, which a faster device does
not shorten. So is how work and collectives slow each other down. Operations that one of the data
sheets cannot price are left out.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from meshwise.fit.calibrate import calibrate
from meshwise.prices.datasheet import Datasheet
from meshwise.prices.key import Category, how, op_key
from meshwise.spec import Cluster, Costs, Op, Overlap, RunInfo, Sample, Shaped, Sized
from meshwise.spec.costs import LawName

Runs = Sequence[tuple[RunInfo, Sequence[Sample]]]
KINDS = ("curves", "surfaces", "factors", "slowdowns")


def transfer(runs: Runs, target: Cluster, law: LawName | None = None) -> Costs:
    """Return the costs of ``target`` that runs of another cluster give, each price named by it."""
    here = calibrate([(info, [*samples]) for info, samples in runs], law)
    sheets = [Datasheet(cluster.specified) for cluster in (runs[0][0].cluster, target)]
    moved = []
    for info, samples in runs:
        found = list[Sample]()
        for sample in samples:
            if not isinstance(sample.case.op, Shaped | Sized | Overlap):
                continue  # as of a training, or a block
            with suppress(ValueError):
                found.append(_moved(sample, *sheets))
        size = min(info.world_size, target.num_devices)
        moved.append((replace(info, cluster=target, world_size=size), found))
    if not any(sample.status == "ok" for _, samples in runs for sample in samples):
        raise ValueError(
            "transfer_from: these runs hold no ok sample; name runs of measure profile"
        )
    if not any(found for _, found in moved):
        raise ValueError(
            f"transfer_from: no operation is in both data sheets, {runs[0][0].cluster.name!r} and "
            f"{target.name!r}; give device.peak_flops and peak_memory_bytes_per_s of both"
        )
    costs, source = calibrate(moved, law), runs[0][0].cluster.device.name
    costs = replace(costs, factors=here.factors, lowering=here.lowering)
    named = {
        kind: tuple(replace(price, transferred_from=source) for price in getattr(costs, kind))
        for kind in KINDS
    }
    return replace(costs, versions={}, **named)


def completed(own: Costs, others: Costs) -> Costs:
    """Return ``own`` with the prices of categories that only ``others`` have."""

    def category(price: Any) -> Category:
        return op_key(price.like, how(price), own.cluster).category

    lacking: dict[str, Any] = {}
    for kind in KINDS:
        known = {category(price) for price in getattr(own, kind)}
        more = [price for price in getattr(others, kind) if category(price) not in known]
        lacking[kind] = (*getattr(own, kind), *more)
    return replace(own, runs=(*own.runs, *others.runs), **lacking)


def _moved(sample: Sample, here: Datasheet, there: Datasheet) -> Sample:
    op, ratio = sample.case.op, 1.0
    if not isinstance(op, Overlap):
        ratio = _time_s(op, sample, there) / _time_s(op, sample, here)  # type: ignore[arg-type]
    return replace(
        sample,
        times_s=tuple(ratio * time_s for time_s in sample.times_s),
        rank_times_s=tuple(tuple(ratio * x for x in times_s) for times_s in sample.rank_times_s),
    )


def _time_s(op: Op, sample: Sample, sheet: Datasheet) -> float:
    op_key(op, how(sample.case), sheet.cluster)  # raises for a group that the cluster cannot have
    return sheet.time_s(op)[0]
