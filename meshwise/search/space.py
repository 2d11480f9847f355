"""List every legal layout of a model on N devices with like stages, and why the others are not
legal.

pp * dp * cp * tp = N, with the pipeline outermost. The space holds every schedule; 1F1B is also
interleaved by each divisor of a rank's layers. cp is used only if each rank keeps 8,192 tokens of a
sequence or more. ZeRO is 0 to 3 over dp * cp, also with replicas if there are several hosts.
Experts are divided over any share of the ranks that hold one copy. Sequence parallelism runs over
tp, also with different experts on each tp rank. A dp rank's batch is cut into equal microbatches of
every size that divides it. Listing is cheap, since ``find`` prices only layouts that can be among
the best. Stages get equal layer counts or one more; ``balance`` deals them by price. A layout that
runs the same program as another, or gains nothing over it, is dropped with its reason.
Recomputation is no dimension of this space. It costs time and saves memory, so ``find`` adds it
only if a layout does not fit without it.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from msgspec.structs import force_setattr

from meshwise import schedule
from meshwise.models import kernels, placement
from meshwise.search.within import ANY, Space
from meshwise.spec import AnyModel, Cluster, Costs, Cuts, Layout, Removal, Workload
from meshwise.spec.layout import SPLIT, ScheduleName
from meshwise.spec.plan import fp8_obstacle
from meshwise.spec.recipe import CP_CHOOSES

Reasons = Counter[str]
OUTSIDE = "outside the space asked for"
FEWEST_TOKENS = 8192  # of a sequence on each rank, if the search shares sequences over cp

MOST_STAGES = 8  # per rank; with more, a stage is only a few kernels

# Schedules with their stages per rank. ``_pipelines`` adds more stages to interleaved 1F1B.
PIPELINES: tuple[tuple[ScheduleName, int], ...] = (
    ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("looped_bfs", 2),
    ("looped_bfs", 4), ("interleaved_zero_bubble", 2), ("zbv", 2), ("dualpipev", 2),
)  # fmt: skip


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def legal_layouts(
    model: AnyModel, workload: Workload, costs: Costs, num_devices: int, within: Space = ANY
) -> tuple[list[Layout], list[Removal]]:
    """Return the legal layouts in a fixed order, and how many layouts each constraint removed. A
    recipe's kernel that cannot run the model is a ValueError."""
    kernels.check(costs.recipe, costs.cluster.device.kind, costs.dtype, model)
    removed = Reasons()
    layouts, host = [], costs.cluster.num_devices_per_host
    for layout in _candidates(model, workload, costs.cluster, num_devices, removed):
        reason = (
            (OUTSIDE if within is not ANY and not within.has(layout, host) else None)
            or obstacle(model, workload.seq_len, layout)
            or nothing_gained(layout, host)
            or cannot_run(layout, model, costs)
            or recipe_obstacle(model, workload.seq_len, layout, costs)
        )
        if reason is None:
            stages = layout.num_stages
            counts = equal_counts(model.layers, stages) if model.layers % stages else ()
            layouts.append(unchecked(layout, layers=counts) if counts else layout)
        else:
            removed[reason] += 1
    return layouts, [Removal(constraint=name, count=n) for name, n in sorted(removed.items())]


def obstacle(model: AnyModel, seq_len: int, layout: Layout) -> str | None:
    """Return why a layout is illegal within a pipeline rank, or None. Only its cuts count, which
    many layouts share."""
    cuts = layout.tp, layout.cp, layout.ep, layout.sequence_parallel, layout.cuts
    return _obstacle(model, seq_len, *cuts, layout.microbatch_size)


@lru_cache(maxsize=65536)
def _obstacle(
    model: AnyModel, seq_len: int, tp: int, cp: int, ep: int, sp: bool, cuts: Cuts, size: int
) -> str | None:
    how = {"tp": tp, "cp": cp, "ep": ep, "sequence_parallel": sp, "cuts": cuts}
    return placement.obstacle(model, seq_len, unchecked(Layout(), microbatch_size=size, **how))


def equal_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return layer counts of the stages that differ by at most one. The stages before the last get
    the extra layers: the last has the head, and the first holds most microbatches."""
    count, over = divmod(num_layers, num_stages)
    last = num_stages - 1
    return tuple(count + (last - over <= stage < last) for stage in range(num_stages))


def check(model: AnyModel, workload: Workload, layout: Layout) -> None:
    """Raise a ValueError with the field if model and batch cannot be cut into this layout. The
    layout may be uneven."""
    layout.stage_layers(model.layers)
    reason = schedule.check(
        layout.schedule, layout.pp, layout.stages_per_rank, layout.num_microbatches
    )
    if reason is not None:
        raise ValueError(f"Layout.schedule = {layout.schedule!r}: {reason}")
    for pipeline_rank in range(layout.pp):
        placement.check(model, workload, layout.of_rank(pipeline_rank))


def unchecked(layout: Layout, **changes: Any) -> Layout:
    """Return ``layout`` with other values that are known to be legal, without checking it: there
    are too many layouts to check each again."""
    other = copy.copy(layout)
    for field, value in changes.items():
        force_setattr(other, field, value)
    return other


def _candidates(
    model: AnyModel, workload: Workload, cluster: Cluster, num_devices: int, removed: Reasons
) -> Iterator[Layout]:
    """Yield every cut of devices and batch. Count an impossible cut of the devices once."""
    batch, host = workload.global_batch_size, cluster.num_devices_per_host
    for pp in divisors(num_devices):
        inside = num_devices // pp
        if pp > 1 and inside % host and host % inside:
            removed[f"pp = {pp}: its ranks of {inside} devices straddle hosts of {host}"] += 1
            continue
        for tp in divisors(inside):
            if tp > host:
                removed[f"tp = {tp} would leave the host (tp <= {host})"] += 1
                continue
            if inside > host and host % tp:
                removed[f"tp = {tp}: its groups straddle hosts of {host}"] += 1
                continue
            for cp in divisors(inside // tp):
                dp = inside // tp // cp
                if batch % dp:
                    removed[f"dp = {dp} does not divide global_batch_size = {batch}"] += 1
                elif cp > 1 and workload.seq_len < FEWEST_TOKENS * cp:
                    removed[f"cp > 1 would leave a rank fewer than {FEWEST_TOKENS:,} tokens"] += 1
                else:
                    for layout in shared(dp, cp, tp, bool(getattr(model, "experts", None))):
                        yield from _cuts(layout, batch // dp, pp, model.layers)


def shared(dp: int, cp: int, tp: int, has_experts: bool) -> Iterator[Layout]:
    """Yield the ways in which the ranks of one stage may share its state and its experts."""
    ranks = dp * cp
    for zero in range(4) if ranks > 1 else (0,):
        for replicas in divisors(dp) if zero else (1,):
            if replicas == ranks > 1:
                continue
            for ep in divisors(ranks // replicas) if has_experts else (1,):
                over_tp = [(False, Cuts()), (True, Cuts()), (True, Cuts(experts="experts"))]
                for sp, cuts in over_tp[: 2 + has_experts] if tp > 1 else over_tp[:1]:
                    yield Layout(
                        dp=dp, cp=cp, tp=tp, zero=zero, replicas=replicas, ep=ep,
                        sequence_parallel=sp, cuts=cuts,
                    )  # fmt: skip


def _pipelines(pp: int, layers: int) -> Iterator[tuple[ScheduleName, int]]:
    if pp == 1:
        yield "none", 1
        return
    equal = [n for n in divisors(layers // pp) if 1 < n <= MOST_STAGES] if layers % pp == 0 else []
    interleaved: list[tuple[ScheduleName, int]] = [("interleaved_1f1b", n) for n in equal]
    yield from dict.fromkeys([*PIPELINES, *interleaved])


def _cuts(layout: Layout, local_batch: int, pp: int, layers: int) -> Iterator[Layout]:
    for microbatch_size in divisors(local_batch):
        for name, stages in _pipelines(pp, layers):
            yield unchecked(
                layout,
                pp=pp,
                microbatch_size=microbatch_size,
                num_microbatches=local_batch // microbatch_size,
                schedule=name,
                stages_per_rank=stages,
            )


def nothing_gained(layout: Layout, host: int) -> str | None:
    """Return why another legal layout is as good, or None. ``host``: its devices."""
    if layout.zero == 1 and layout.num_microbatches == 1:
        return "zero 1 is zero 2 when there is one microbatch"
    if layout.schedule == "gpipe":
        return "gpipe is 1f1b with more memory"
    if layout.replicas > 1 and layout.data_ranks * layout.tp <= host:
        return "replicas save traffic between hosts, and all ranks are on one"
    if layout.replicas > 1 and layout.shards * layout.tp > host:
        return "replicas save traffic between hosts only if a host holds all shards"
    return None


def recipe_obstacle(model: AnyModel, seq_len: int, layout: Layout, costs: Costs) -> str | None:
    """Return why the costs' recipe is not for a layout, or None."""
    if layout.cp > 1 and costs.recipe.attention != "auto":
        return CP_CHOOSES
    if not costs.recipe.fp8:
        return None
    if layout.schedule in SPLIT:
        return f"{layout.schedule} splits the backward, which computes fp8's products twice"
    return fp8_obstacle(model, seq_len, layout)


def cannot_run(layout: Layout, model: AnyModel, costs: Costs) -> str | None:
    """Return why the layout's schedule cannot be used, or None."""
    name, pp, stages = layout.schedule, layout.pp, layout.stages_per_rank
    if name in SPLIT and costs.lowering == "compiled":
        return f"{name} splits the backward, which compiled code cannot"
    if pp * stages > model.layers:
        return f"{pp * stages} stages are more than layers = {model.layers}"
    if schedule.check(name, pp, stages, layout.num_microbatches):
        return f"{name} needs another number of microbatches"
    return None
