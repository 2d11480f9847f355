"""Operation graphs of models, each rank's share of them, and counts. No torch."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

from msgspec.structs import replace

from meshwise.models import families, kernels
from meshwise.models.apply import ActionSpan, Loop, Program, program_of
from meshwise.models.backward import training_step
from meshwise.models.counts import num_parameters, saved_activation_bytes, step_flops
from meshwise.models.decoder import stream_shape
from meshwise.models.eager_cpu import device_of, on_cpu
from meshwise.models.fp8 import in_fp8
from meshwise.models.graph import Device, Graph
from meshwise.models.shard import Task
from meshwise.spec import (
    AnyModel,
    Block,
    Decoder,
    Elementwise,
    LayerKind,
    Layout,
    Op,
    WideResNet,
    forms_of,
    layer_kinds,
)
from meshwise.spec.layout import Recompute
from meshwise.spec.op import Direction, Dtype, Lowering
from meshwise.spec.recipe import AttentionBackend

__all__ = [
    "DIRECTIONS",
    "ActionSpan",
    "Device",
    "Graph",
    "Loop",
    "Piece",
    "Program",
    "Task",
    "block_ops",
    "block_tasks",
    "blocks_of",
    "device_of",
    "graph",
    "num_parameters",
    "piece_of",
    "program_of",
    "programs_of",
    "saved_activation_bytes",
    "saved_block_bytes",
    "step_flops",
    "stream_shape",
]


@lru_cache(maxsize=1024)
def graph(
    model: AnyModel,
    batch: int,
    seq: int,
    dtype: str,
    *,
    layers: tuple[LayerKind, ...] | None = None,
    first: bool = True,
    last: bool = True,
    recompute: tuple[Recompute, ...] = (),
    device: Device = "cuda",
    attention: AttentionBackend = "auto",
    fp8: Lowering | None = None,
) -> Graph:
    """Build the graph of a training step (forward, backward and optimizer) on ``batch`` sequences
    of ``seq`` tokens, or on ``batch`` images.

    The graph covers the whole model, or a pipeline stage with ``layers`` of these kinds
    (``families.forward``). ``recompute``: one word per layer; () recomputes nothing. ``device``:
    the device whose eager kernels run. ``attention``: the recipe's back end. ``fp8``: the lowering
    of the casts to fp8, if the layers' products are in fp8.
    """
    _check(dtype)
    if isinstance(model, Decoder):
        model.check_computed()
    forward = families.forward(model, batch, seq, dtype, layers=layers, first=first, last=last)
    forward = kernels.by_math(forward) if attention == "math" else forward
    step = training_step(on_cpu(forward) if device == "cpu" else forward, recompute)
    return step if fp8 is None else in_fp8(step, fp8)


def _check(dtype: str) -> None:
    if dtype == "fp8":
        raise ValueError(
            "dtype = 'fp8': is priced and measured of products alone (gemm); use bf16, "
            "and recipe.fp8 for layers"
        )


def programs_of(
    model: AnyModel, layout: Layout, seq_len: int, dtype: str
) -> Iterator[tuple[Layout, range, Program]]:
    """Yield the layout within each pipeline stage, its layers, and the program of its ranks."""
    stages = layout.stage_layers(model.layers)
    for index, layers in enumerate(stages):
        inside = layout.of_stage(index)
        part = graph(
            model, inside.microbatch_size, seq_len, dtype,
            layers=layer_kinds(model, seq_len, layers),
            first=index == 0, last=index == len(stages) - 1,
            recompute=inside.recomputed(len(layers)),
        )  # fmt: skip
        yield inside, layers, program_of(part, inside, dtype)


Piece = tuple[str, str]  # part and form of a block
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
ENTRY = ("layers.0.in", "layers.0.in.grad")  # a Wide-ResNet stage's copies, not its layer's


@lru_cache(maxsize=1024)
def blocks_of(
    model: AnyModel, seq_len: int, layout: Layout, dtype: Dtype
) -> Mapping[tuple[Piece, str], Block]:
    """Return the blocks of a layout by piece and direction: one for each kind of layer, the most
    frequent first, and one for the head of a language model. Layers without experts have no ep."""
    _check(dtype)
    known = forms_of(model, seq_len)
    pieces: list[tuple[Literal["layer", "head"], str]] = [("layer", form) for form in known]
    few: AnyModel
    if isinstance(model, WideResNet):
        few = replace(model, name="", blocks=tuple(min(count, 2) for count in model.blocks))
    else:
        pieces.append(("head", ""))
        all_kinds = layer_kinds(model, seq_len)
        layers = 1 + max(all_kinds.index(kind) for kind in known.values())
        moe = model.experts and replace(model.experts, load="mean")  # blocks are measured with it
        few = replace(model, name="", layers=layers, experts=moe)
    return {
        ((part, form), direction): Block(
            part=part,
            form=form,
            model=few,
            microbatch_size=layout.microbatch_size,
            seq_len=seq_len,
            tp=layout.tp,
            sequence_parallel=layout.placed.stream != "whole",  # by batch, as many messages
            cp=layout.cp,
            ep=layout.ep if part == "layer" and known[form].form == "experts" else 1,
            direction=direction,
            dtype=dtype,
        )
        for part, form in pieces
        for direction in DIRECTIONS
    }


def piece_of(task: Task, layers: tuple[LayerKind, ...]) -> Piece:
    """Return the part and form of the block that holds a task. ``layers``: the stage's, of a model
    whose layers differ."""
    if task.part != "layer":
        return task.part, ""
    return task.part, layers[int(task.name.split(".")[1])].name


@lru_cache(maxsize=4096)
def block_tasks(
    block: Block, device: Device = "cuda", lowering: Lowering = "eager"
) -> tuple[Task, ...]:
    """Return one rank's tasks in a block, in order: its compute, and the messages of tp, cp and
    ep. Those of a backward include what it computes again. ``lowering``: of the casts to fp8."""
    tasks = _block_program(block, device, lowering).tasks
    phases = (block.direction, "recompute") if block.recompute != "none" else (block.direction,)
    return tuple(
        task for task in tasks
        if task.part == block.part and task.phase in phases and task.name not in ENTRY
    )  # fmt: skip


def _block_program(block: Block, device: Device, lowering: Lowering) -> Program:
    size, seq_len, dtype = block.microbatch_size, block.seq_len, block.kept_dtype
    alone: dict[str, Any] = {"fp8": lowering if block.dtype == "fp8" else None}
    if isinstance(block.model, WideResNet):
        alone |= {"first": False, "last": False}
    kinds = (
        forms_of(block.model, seq_len).get(block.form) or layer_kinds(block.model, seq_len)[0],
    )
    alone["recompute"] = (block.recompute,)
    of = graph(block.model, size, seq_len, dtype, layers=kinds, device=device, **alone)
    return program_of(of, block.layout, dtype, device=device)


@lru_cache(maxsize=4096)
def block_ops(block: Block, device: Device = "cuda") -> tuple[Op, ...]:
    """Return the operations of a block."""
    return tuple(task.op for task in block_tasks(block, device))


@lru_cache(maxsize=4096)
def saved_block_bytes(block: Block, device: Device = "cuda", *, compiled: bool = False) -> int:
    """Return the bytes that the forward pass saves for a block's backward on one rank, the
    block's input included. A ``compiled`` layer computes again what it can, element by element,
    from what it saves, if only element-wise work of backward reads it."""
    program = _block_program(block, device, "compiled")
    writers = {name: t for t in program.tasks if t.phase == "forward" for name in t.writes}
    mine = block_tasks(replace(block, direction="backward"), device, "compiled")
    saved = {name for task in mine for name in task.reads} & writers.keys()

    def again(name: str) -> bool:
        writer, lost = writers[name], writers.keys() - saved
        tasks = [writer, *(task for task in mine if name in task.reads)]
        by_element = all(isinstance(task.op, Elementwise) for task in tasks)
        return by_element and writer.part == "layer" and lost.isdisjoint(writer.reads)

    kept = {name for name in saved if not (compiled and again(name))}
    return sum(program.buffers[name].num_bytes for name in kept)
