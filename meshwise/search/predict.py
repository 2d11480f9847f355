"""One layout in, its predicted step out: time and peak memory by part, with intervals.

Time: every task of a rank's program is priced (``prices``), tasks of a measured block times the
block's factor, then the program is run on paper (``simulate``). Up to three microbatches are
simulated; more repeat the third: T(m) = T(2) + (m-2) (T(3) - T(2)).

Interval of the time: for each group of prices the held-out error (p90) times its share, taken as
wholly correlated inside a group and independent between groups. Interval of the memory: one
unit's gathered weights and float32 gradients more or less, which is how far the host may run
ahead of, or behind, the order assumed here.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import msgspec

from meshwise.models import Program, Task, apply, graph, step_flops
from meshwise.prices import Prices
from meshwise.search.simulate import WAITING, Timeline, peak_memory, run_program
from meshwise.spec import (
    Block,
    Collective,
    Costs,
    Elementwise,
    Layout,
    Model,
    Part,
    Prediction,
    Workload,
)
from meshwise.spec.op import Direction, Dtype

PARTS: tuple[Literal["layer", "head"], ...] = ("layer", "head")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def predict(model: Model, workload: Workload, layout: Layout, prices: Prices) -> Prediction:
    """Predict a training step of ``workload`` under ``layout``."""
    costs = prices.costs
    prices.notes.clear()
    blocks = blocks_of(model, workload, layout, costs.dtype)
    factors = {key: prices.factor(block) for key, block in blocks.items()}
    saved: dict[str, float] = {part: prices.saved_ratio(blocks[part, "backward"]) for part in PARTS}
    prices_used: dict[str, list[float]] = {}

    def time_of(task: Task) -> float:
        estimate = prices.estimate(task.op)
        ratio, error = factors.get((task.part, task.phase), (1.0, None))
        group, relative = task.part + task.phase, estimate.error
        if error is None or error.num_points == 0:
            group = type(task.op).__name__
        else:
            relative = error.p90
        time_s = estimate.time_s * ratio
        prices_used.setdefault(group, []).append(time_s * relative)
        return time_s

    programs = [
        _program(
            model,
            workload.seq_len,
            msgspec.structs.replace(layout, num_microbatches=n),
            costs.dtype,
        )
        for n in sorted({min(layout.num_microbatches, n) for n in (2, 3)})
    ]
    one_stream = costs.cluster.device.kind == "cpu"
    timelines = [run_program(program, time_of, _part_of, one_stream) for program in programs]
    timeline = _repeat(timelines, layout.num_microbatches)
    spread = math.sqrt(sum(sum(group) ** 2 for group in prices_used.values()))
    busy = sum(sum(timeline.parts.values()) for timeline in timelines)
    relative = spread / busy if busy else 0.0

    peak = peak_memory(programs[-1], _sizes(programs[-1], saved, costs.lowering == "compiled"))
    extra = _one_unit(programs[-1])
    total = peak.total_bytes + costs.memory_overhead_bytes
    flops = step_flops(model, workload)
    rate = flops / timeline.time_s / layout.num_devices
    peak_flops = costs.cluster.device.peak_flops.get(costs.dtype)
    return Prediction(
        step_time_s=timeline.time_s,
        low_s=timeline.time_s * max(0.0, 1 - relative),
        high_s=timeline.time_s * (1 + relative),
        time_parts=_parts(timeline.parts, relative),
        peak_memory_bytes=total,
        memory_low_bytes=max(0.0, total - extra),
        memory_high_bytes=total + extra,
        memory_parts=tuple(
            Part(name=name, value=value, low=value, high=value)
            for name, value in peak.parts.items()
            if value
        ),
        tokens_per_s=workload.tokens / timeline.time_s,
        flops_per_device_per_s=rate,
        mfu=rate / peak_flops if peak_flops else None,
        notes=(*_shared_cores(costs, layout), *prices.notes),
    )


@lru_cache(maxsize=256)
def _program(model: Model, seq_len: int, layout: Layout, dtype: str) -> Program:
    whole = graph(model, layout.microbatch_size, seq_len, dtype)
    return apply(whole, layout, dtype)


def blocks_of(
    model: Model, workload: Workload, layout: Layout, dtype: Dtype
) -> dict[tuple[str, str], Block]:
    """The blocks of a layout by (part, direction), as ``probe`` measures them."""
    piece = msgspec.structs.replace(model, name="", layers=1)
    return {
        (part, direction): Block(
            part=part,
            model=piece,
            microbatch_size=layout.microbatch_size,
            seq_len=workload.seq_len,
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            direction=direction,
            dtype=dtype,
        )
        for part in PARTS
        for direction in DIRECTIONS
    }


def _part_of(task: Task) -> str:
    if task.part == "dp":
        return "data-parallel copies"
    if isinstance(task.op, Collective):
        return "tensor-parallel communication"
    return "optimizer" if task.phase == "optimizer" else f"{task.phase} {task.part}"


def _repeat(timelines: list[Timeline], count: int) -> Timeline:
    first, last = timelines[0], timelines[-1]
    repeats = count - 2 if len(timelines) > 1 else 0
    names = {**first.parts, **last.parts}
    parts = {
        name: first.parts.get(name, 0.0)
        + repeats * (last.parts.get(name, 0.0) - first.parts.get(name, 0.0))
        for name in names
    }
    return Timeline(first.time_s + repeats * (last.time_s - first.time_s), parts)


def _parts(parts: dict[str, float], relative: float) -> tuple[Part, ...]:
    order = sorted(parts, key=lambda name: (name == WAITING, -parts[name]))
    return tuple(
        Part(
            name=name,
            value=parts[name],
            low=parts[name] * max(0.0, 1 - relative),
            high=parts[name] * (1 + relative),
        )
        for name in order
    )


def _shared_cores(costs: Costs, layout: Layout) -> tuple[str, ...]:
    """On a CPU ranks share cores, so prices hold for as many ranks as were measured."""
    if costs.cluster.device.kind != "cpu" or layout.num_devices == costs.world_size:
        return ()
    measured, wanted = costs.world_size, layout.num_devices
    return (f"measured with {measured} ranks sharing the cores; {wanted} will run differently",)


def _one_unit(program: Program) -> float:
    """Bytes of the largest unit: its gathered weights and its gradients on their way."""
    sizes: dict[str, int] = {}
    for buffer in program.buffers.values():
        sizes[buffer.role] = max(sizes.get(buffer.role, 0), buffer.num_bytes)
    return float(sizes.get("weights", 0) + sizes.get("communication", 0))


def _sizes(program: Program, ratio: dict[str, float], compiled: bool) -> Callable[[str], float]:
    """What to multiply a buffer's counted size by.

    What backward reads of a block's forward pass: the measured ratio. In compiled code, what one
    elementwise operation hands to the next is never written: nothing.
    """
    writers = {name: task for task in program.tasks for name in task.writes}
    readers: dict[str, list[Task]] = {}
    for task in program.tasks:
        for name in task.reads:
            readers.setdefault(name, []).append(task)

    def scale(name: str) -> float:
        writer, used = writers[name], readers.get(name, [])
        if writer.part not in PARTS:
            return 1.0
        if writer.phase == "forward" and any(task.phase == "backward" for task in used):
            return ratio[writer.part]
        within = {(task.part, task.phase) for task in used} == {(writer.part, writer.phase)}
        chain = all(isinstance(task.op, Elementwise) for task in (writer, *used))
        return 0.0 if compiled and within and chain else 1.0

    return scale
