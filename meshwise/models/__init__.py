"""Operation graphs of models, what each rank does of them, and counts. No torch."""

from functools import lru_cache

from meshwise.models import families
from meshwise.models.apply import Loop, Program, Span, apply
from meshwise.models.backward import training_step
from meshwise.models.counts import num_parameters, saved_activation_bytes, step_flops
from meshwise.models.decoder import stream_shape
from meshwise.models.eager_cpu import device_of, on_cpu
from meshwise.models.graph import Device, Graph
from meshwise.models.shard import Task
from meshwise.spec import (
    AnyModel,
    Block,
    Decoder,
    LayerKind,
    Layout,
    Op,
)
from meshwise.spec.layout import Recompute

__all__ = [
    "Device",
    "Graph",
    "Loop",
    "Program",
    "Span",
    "Task",
    "apply",
    "block_ops",
    "block_tasks",
    "device_of",
    "graph",
    "num_parameters",
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
) -> Graph:
    """Forward, backward and optimizer of ``batch`` sequences of ``seq`` tokens or images.

    Of the whole model, or of a pipeline stage of ``layers`` of these kinds (``families.forward``).
    ``recompute``: one word a layer; () is none. ``device``: whose eager kernels.
    """
    if isinstance(model, Decoder):
        model.check_computed()
    forward = families.forward(model, batch, seq, dtype, layers=layers, first=first, last=last)
    return training_step(on_cpu(forward) if device == "cpu" else forward, recompute)


def block_tasks(block: Block, device: Device = "cuda") -> tuple[Task, ...]:
    """What one rank does in a block: its compute and tensor-parallel collectives, in order."""
    tasks = _block_program(block, device).tasks
    return tuple(t for t in tasks if t.part == block.part and t.phase == block.direction)


def _block_program(block: Block, device: Device) -> Program:
    layout = Layout(
        tp=block.tp,
        sequence_parallel=block.sequence_parallel,
        microbatch_size=block.microbatch_size,
    )
    size = block.microbatch_size
    whole = graph(block.model, size, block.seq_len, block.dtype, device=device)
    return apply(whole, layout, block.dtype, device=device)


def block_ops(block: Block, device: Device = "cuda") -> tuple[Op, ...]:
    """The operations of a block; their prices add up to its composed price."""
    return tuple(task.op for task in block_tasks(block, device))


def saved_block_bytes(block: Block, device: Device = "cuda") -> int:
    """Bytes that a block's backward reads of the forward pass on one rank, its input included."""
    program = _block_program(block, device)
    written = {name for t in program.tasks if t.phase == "forward" for name in t.writes}
    mine = [t for t in program.tasks if t.phase == "backward" and t.part == block.part]
    read = {name for task in mine for name in task.reads} & written
    return sum(program.buffers[name].num_bytes for name in read)
