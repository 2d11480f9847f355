"""Predict a step of one layout: time and peak memory by part, with intervals.

``stage`` prices the stages action by action, and ``pipeline`` simulates their schedule. This module
prices the messages between stages. A microbatch's activation or gradient is sent to the ranks of
the next stage that need a slice of it: a copy to each, if they hold copies. Once a step, the
gradients of a tied embedding are sent if its two ends are on different ranks.

Interval of the time: each group of prices contributes its held-out error (p90) times its share.
Errors are fully correlated within a group and independent between groups. Interval of the memory:
plus or minus one unit's gathered weights and float32 gradients, since the host may run ahead of or
behind the order assumed here.
"""

import math
from collections.abc import Callable, Collection
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from meshwise import schedule
from meshwise.models import families, step_flops, stream_shape
from meshwise.models.decoder import weights
from meshwise.models.graph import message, num_bytes
from meshwise.models.placement import is_tied
from meshwise.prices import Prices
from meshwise.search.charges import MESSAGES
from meshwise.search.pipeline import (
    BUBBLE,
    Hop,
    StepTime,
    Timetable,
    peak_memory,
    step_time,
    timetable,
)
from meshwise.search.simulate import SHARING, SUMS, TO_HOST, WAITING, Amounts, Charge, Peak
from meshwise.search.stage import StageCost, StageKind, kinds_of, stage_cost, stage_memory, views
from meshwise.search.tail import tail
from meshwise.spec import (
    DTYPE_BYTES,
    TIERS,
    AnyModel,
    Cluster,
    Collective,
    Costs,
    Layout,
    Part,
    Prediction,
    StageTimes,
    WideResNet,
    Workload,
    layer_kinds,
)
from meshwise.spec.layout import rank_of
from meshwise.spec.plan import OUTSIDE_ALLOCATOR

TRANSFER, EXCHANGE = "pipeline transfer", "tied embedding exchange"
MFU_OF_FP8 = "MFU is of the peak of bf16, which products in fp8 exceed"
ALL_STAY = "offload moves nothing: each stage has one layer; plan without it, too"
PASSED = (*MESSAGES, SUMS, SHARING, WAITING, TRANSFER, EXCHANGE)  # parts of the step
_flops = lru_cache(step_flops)


class PricedStages(NamedTuple):
    """The arguments of ``pipeline.course``: priced stages, their timetable, messages between them,
    and the exchange of a tied embedding's gradients."""

    stages: list[StageCost]
    times: Timetable
    hops: dict[Hop, Charge]
    exchange: Charge | None


def predict(model: AnyModel, workload: Workload, layout: Layout, prices: Prices) -> Prediction:
    """Predict a training step of ``workload`` under ``layout``."""
    costs = prices.costs
    priced = staged(model, workload, layout, prices)
    stages, step = priced.stages, step_time(*priced)
    errors = _errors(step)
    relative = math.hypot(*[sum(of.values()) for of in errors.values()]) / step.time_s

    rank, peak = memory_of(model, workload, layout, prices, stage_cost)
    extra = max(stage.unit_bytes for stage in stages)
    rate = _flops(model, workload) / step.time_s / layout.num_devices
    peak_flops = costs.cluster.device.peak_flops.get(costs.dtype)
    notes = dict.fromkeys([note for stage in stages for note in stage.notes] + list(prices.notes))
    where = (f"memory peaks on rank {rank}",) if rank else ()
    if costs.recipe.offload and layout.num_stages == model.layers:
        where = (ALL_STAY, *where)
    if costs.recipe.fp8:
        where = (MFU_OF_FP8, *where)
    messages_s = sum(step.parts.get(part, 0.0) for part in PASSED)
    p50_s, p95_s = tail(step.time_s, messages_s, model, layout, prices)
    return Prediction(
        step_time_s=step.time_s,
        p50_s=p50_s,
        p95_s=p95_s,
        low_s=step.time_s * max(0.0, 1 - relative),
        high_s=step.time_s * (1 + relative),
        time_parts=_parts(step.parts, relative),
        errors=errors,
        peak_memory_bytes=peak.total_bytes,
        memory_low_bytes=max(0.0, peak.total_bytes - extra),
        memory_high_bytes=peak.total_bytes + extra,
        memory_parts=tuple(
            Part(name=name, value=value, low=value, high=value)
            for name, value in peak.parts.items()
            if round(value)  # of sums and differences that are 0 a little may be left
        ),
        tokens_per_s=workload.tokens / step.time_s,
        flops_per_device_per_s=rate,
        mfu=rate / peak_flops if peak_flops else None,
        stage_times=tuple(map(_of_microbatch, stages)) if layout.pp > 1 else (),
        notes=(*_for_run(costs, layout), *notes, *where),
        tier=max(prices.tier, *[stage.tier for stage in stages], key=TIERS.index),
    )


def staged(model: AnyModel, workload: Workload, layout: Layout, prices: Prices) -> PricedStages:
    """Price the stages of a layout and what they send each other."""
    stages = [stage_cost(kind, prices) for kind in kinds_of(model, workload.seq_len, layout)]
    prices.begin()
    tied = exchanged(model, layout, prices.costs)
    return PricedStages(
        stages,
        timetable(layout.schedule, layout.pp, layout.stages_per_rank, layout.num_microbatches),
        {
            hop: _charge(op, TRANSFER, prices)
            for hop, op in moved(model, workload, layout, prices.costs).items()
        },
        _charge(tied, EXCHANGE, prices) if tied else None,
    )


def _errors(step: StepTime) -> dict[str, dict[str, float]]:
    """Return the possible errors in seconds, by group of prices and part of the step. The bubble is
    as far off as the rest."""
    found: dict[str, dict[str, float]] = {}
    for (group, part), error_s in step.errors.items():
        of_all = error_s * step.time_s / (step.time_s - step.parts.get(BUBBLE, 0.0))
        found.setdefault(group, {})[part] = of_all
    return found


def _of_microbatch(stage: StageCost) -> StageTimes:
    """Return the stage's times for a middle microbatch, or for the last if there is no middle."""
    seconds = {
        kind: of_kind[min(1, len(of_kind) - 1)][0].time_s for kind, of_kind in stage.actions.items()
    }
    return StageTimes(
        forward_s=seconds["F"],
        backward_s=seconds["I"] if "I" in seconds else seconds["B"],
        weights_s=seconds.get("W", 0.0),
    )


def memory_of(
    model: AnyModel,
    workload: Workload,
    layout: Layout,
    prices: Prices,
    of_stage: Callable[[StageKind, Prices], StageCost] = stage_memory,
    among: Collection[int] | None = None,
) -> tuple[int, Peak]:
    """Return a rank that needs the most memory, the first of its pipeline rank, and its peak.
    ``among``: the pipeline ranks to consider; None: all."""
    costs = prices.costs
    kinds = zip(kinds_of(model, workload.seq_len, layout), _ranks(layout), strict=True)
    stages = [
        of_stage(kind, prices) if among is None or rank in among else None for kind, rank in kinds
    ]
    in_between, most = in_transit(model, workload, layout, costs), most_sent(layout, costs)
    some = layout.num_microbatches
    if of_stage is stage_memory and most == 1:
        some = schedule.enough(layout.schedule, layout.pp, some)
    times = timetable(layout.schedule, layout.pp, layout.stages_per_rank, some)
    rank, peak = peak_memory(stages, times, *in_between, most)
    images = images_bytes(model, workload, layout)
    total = peak.total_bytes + costs.memory_overhead_bytes + images
    apart = {"images": images, OUTSIDE_ALLOCATOR: costs.memory_overhead_bytes}
    return layout.devices_of(rank)[0], Peak(total, peak.parts | apart)


def images_bytes(model: AnyModel, workload: Workload, layout: Layout) -> int:
    """Return the bytes of a rank's images in a step; they stay in memory through the whole step.
    Tokens are too small to count."""
    if not isinstance(model, WideResNet):
        return 0
    fewest = min((dp for dp, _ in layout.meshes), default=layout.dp)
    return _image_bytes(model) * workload.global_batch_size // fewest


@lru_cache(maxsize=64)
def _image_bytes(model: AnyModel) -> int:
    first = families.forward(model, 1, 1, "fp32", layers=layer_kinds(model, 1)[:1], last=False)
    return num_bytes(first.tensors["images"], first.sizes)


def in_transit(
    model: AnyModel, workload: Workload, layout: Layout, costs: Costs
) -> tuple[float, float]:
    """Return the bytes that stages do not count: of a tensor being sent between ranks, and of a
    tied embedding's second gradient at the end of the step."""
    sizes, ends = _stream_bytes(model, workload, layout, costs), pairwise(_ranks(layout))
    moving = [max(of) for of, (here, there) in zip(sizes, ends, strict=True) if here != there]
    return max(moving, default=0), _exchanged_bytes(model, layout, costs)


def most_sent(layout: Layout, costs: Costs) -> int:
    """Return how many sent results a rank holds. With gloo it holds all of them until the step
    ends, since gloo does not tell when they arrived."""
    by_gloo = costs.cluster.device.kind == "cpu"
    return 2 * layout.stages_per_rank * layout.num_microbatches if by_gloo else 1


def moved(
    model: AnyModel, workload: Workload, layout: Layout, costs: Costs
) -> dict[Hop, Collective]:
    """Return the messages between neighbouring stages on different ranks, either way. A device gets
    its part of the next stage's tensor, and fewer devices send more each."""
    ranks, found = _ranks(layout), dict[Hop, Collective]()
    for stage, sizes in enumerate(_stream_bytes(model, workload, layout, costs)):
        ends = (stage, stage + 1)
        count = {end: len(layout.devices_of(ranks[end])) for end in ends}
        for (here, there), got in (ends, sizes[1]), (ends[::-1], sizes[0]):
            if ranks[here] != ranks[there]:
                most = max(got, got * count[there] // count[here])
                found[here, there] = _between(layout, costs, ranks[here], ranks[there], most)
    return found


def _ranks(layout: Layout) -> list[int]:
    """Return the pipeline rank of each stage."""
    return [rank_of(layout.schedule, stage, layout.pp) for stage in range(layout.num_stages)]


def _stream_bytes(
    model: AnyModel, workload: Workload, layout: Layout, costs: Costs
) -> list[tuple[int, ...]]:
    """Return the bytes of a microbatch's activations at each stage boundary, on a device before it
    and on one after it."""
    inside, layers = views(layout), layout.stage_layers(model.layers)
    shares = {
        view: view.cp * (view.tp if view.placed.stream != "whole" else 1) for view in set(inside)
    }
    return [
        tuple(
            _stream_elements(model, view.microbatch_size, workload.seq_len, at.stop)
            // shares[view] * DTYPE_BYTES[costs.dtype]
            for view in sides
        )
        for at, sides in zip(layers, pairwise(inside), strict=False)
    ]  # fmt: skip


@lru_cache(maxsize=4096)
def _stream_elements(model: AnyModel, rows: int, seq_len: int, behind: int) -> int:
    return math.prod(stream_shape(model, rows, seq_len, behind))


def exchanged(model: AnyModel, layout: Layout, costs: Costs) -> Collective | None:
    """Return the message between the first and the last stage that carries the gradient of a tied
    embedding, or None."""
    size_bytes = _exchanged_bytes(model, layout, costs)
    here, there = (rank_of(layout.schedule, end, layout.pp) for end in (0, layout.num_stages - 1))
    return _between(layout, costs, here, there, size_bytes) if size_bytes else None


def _exchanged_bytes(model: AnyModel, layout: Layout, costs: Costs) -> int:
    here, there = (rank_of(layout.schedule, end, layout.pp) for end in (0, layout.num_stages - 1))
    if here == there or not is_tied(model):
        return 0
    own = layout.meshes or layout.ways
    inside = [layout.of_rank(rank) for rank in (here, there)] if own else [layout]
    shares = [
        view.shards * (view.tp if view.placed.embed == view.placed.head == "vocab" else 1)
        for view in inside
    ]
    return DTYPE_BYTES[costs.recipe.weights] * _embedding_elements(model) // min(shares)


@lru_cache(maxsize=64)
def _embedding_elements(model: AnyModel) -> int:
    return next(w.num_elements for w in weights(model) if w.name == "embed.weight")


def _between(layout: Layout, costs: Costs, here: int, there: int, size_bytes: int) -> Collective:
    """Return the message that a device of one pipeline rank sends to its counterpart on another."""
    low, high = sorted(layout.devices_of(rank)[0] for rank in (here, there))
    return message(
        kind="send_recv",
        size_bytes=size_bytes,
        group_size=2,
        group_stride=_stride(costs.cluster, low, high),
        dtype=costs.dtype,
    )


def _stride(cluster: Cluster, low: int, high: int) -> int:
    """Return a stride for which rank 0 and its partner share the same tier of links as these two
    devices. It is at least their distance, and more if a tier's boundary lies between them."""
    within = 0
    for tier in cluster.tiers:
        if low // tier.num_devices == high // tier.num_devices:
            break
        within = tier.num_devices
    return max(high - low, within)


def _charge(op: Collective, part: str, prices: Prices) -> Charge:
    estimate = prices.estimate(op)
    return Charge(estimate.time_s, part, "Collective", estimate.time_s * estimate.error)


def _parts(parts: Amounts, relative: float) -> tuple[Part, ...]:
    idle = (TO_HOST, SHARING, WAITING, TRANSFER, EXCHANGE, BUBBLE)
    order = sorted(parts, key=lambda name: (idle.index(name) if name in idle else -1, -parts[name]))
    return tuple(
        Part(
            name=name,
            value=parts[name],
            low=parts[name] * max(0.0, 1 - relative),
            high=parts[name] * (1 + relative),
        )
        for name in order
    )


def _for_run(costs: Costs, layout: Layout) -> tuple[str, ...]:
    """Return notes about ``run``: it cannot train in fp16, and on a CPU prices hold only for as
    many ranks as were measured, since ranks share the cores."""
    if costs.dtype not in ("fp32", "bf16"):
        return (f"`meshwise run` refuses this plan: it trains in fp32 or bf16, not {costs.dtype}",)
    if costs.cluster.device.kind != "cpu" or layout.num_devices == costs.world_size:
        return ()
    measured, wanted = costs.world_size, layout.num_devices
    return (f"measured with {measured} ranks sharing the cores; {wanted} will run differently",)
