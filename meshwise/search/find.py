"""The plan: the fastest layout that fits, its runners-up, and why the rest are not it."""

from meshwise.prices import Prices
from meshwise.search.predict import predict
from meshwise.search.space import legal_layouts
from meshwise.spec import (
    Candidate,
    Costs,
    Infeasible,
    Layout,
    Model,
    Plan,
    Removal,
    Stage,
    Workload,
)
from meshwise.units import format_bytes

STRATEGY = {
    "embed": "vocab", "qkv": "col", "out": "row", "up": "col", "down": "row", "head": "vocab",
}  # fmt: skip


def find(
    model: Model, workload: Workload, costs: Costs, *, num_devices: int, top: int = 10
) -> Plan:
    """Price every legal layout on ``num_devices`` and keep the ``top`` fastest that fit."""
    cluster = costs.cluster
    if num_devices > cluster.num_devices:
        raise ValueError(
            f"gpus = {num_devices}: cluster {cluster.name!r} has {cluster.num_devices} devices; "
            "plan for fewer, or describe and measure the larger cluster"
        )
    layouts, removed = legal_layouts(model, workload, num_devices, cluster.num_devices_per_host)
    if not layouts:
        reasons = "; ".join(f"{r.constraint} ({r.count})" for r in removed)
        raise ValueError(f"no layout of {num_devices} devices is legal: {reasons}")
    prices = Prices(costs)
    candidates = [
        Candidate(layout=layout, prediction=predict(model, workload, layout, prices))
        for layout in layouts
    ]
    limit = cluster.device.memory_bytes - cluster.reserved_bytes
    fitting = [c for c in candidates if c.prediction.peak_memory_bytes <= limit]
    too_large = [c for c in candidates if c.prediction.peak_memory_bytes > limit]
    nearest = _nearest(too_large, limit)
    if too_large:
        removed.append(
            Removal(
                constraint=f"memory: more than {format_bytes(limit)} a device", count=len(too_large)
            )
        )
    if not fitting:
        assert nearest is not None
        raise ValueError(
            f"no layout of {model.name or 'the model'} fits {num_devices} devices; the nearest, "
            f"{nearest.layout.name}: {nearest.reason}"
        )
    ranked = sorted(fitting, key=lambda c: c.prediction.step_time_s)
    best = ranked[0]
    return Plan(
        model=model,
        workload=workload,
        cluster=cluster,
        dtype=costs.dtype,
        lowering=costs.lowering,
        layout=best.layout,
        stages=(stage_of(model, best.layout),),
        prediction=best.prediction,
        runners_up=tuple(ranked[1:top]),
        removed=tuple(removed),
        nearest_infeasible=nearest,
        num_considered=len(layouts) + sum(r.count for r in removed if "memory" not in r.constraint),
        runs=costs.runs,
    )


def stage_of(model: Model, layout: Layout) -> Stage:
    """The only stage of a layout without pipeline: all layers on all devices."""
    sharded = layout.tp > 1
    return Stage(
        first_layer=0,
        last_layer=model.layers,
        devices=tuple(range(layout.num_devices)),
        sharding={name: how if sharded else "replicated" for name, how in STRATEGY.items()},
    )


def _nearest(too_large: list[Candidate], limit: float) -> Infeasible | None:
    if not too_large:
        return None
    nearest = min(too_large, key=lambda c: c.prediction.peak_memory_bytes)
    missing = nearest.prediction.peak_memory_bytes - limit
    largest = max(nearest.prediction.memory_parts, key=lambda part: part.value)
    return Infeasible(
        layout=nearest.layout,
        missing_bytes=missing,
        reason=f"rank 0 needs {format_bytes(missing)} more: {largest.name} "
        f"({format_bytes(largest.value)} of {format_bytes(nearest.prediction.peak_memory_bytes)})",
    )
