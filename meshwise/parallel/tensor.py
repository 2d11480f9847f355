"""Tensor and sequence parallelism of a GPT through DTensor, in place, on the tp axis of a mesh.

Weights (Shoeybi et al. 2019, Megatron-LM): qkv and up are split by rows (col in plan.json), out
and down by columns (row), embedding and head by vocabulary. Activations between those are whole
on every rank, or with ``sequence_parallel`` split by position (Korthikanti et al. 2022). Logits
stay split by vocabulary and are a DTensor; ``data.loss_context`` computes their loss that way.

Every parameter becomes a DTensor on the tp mesh, norms and positions as replicas, so that
gradients that are partial sums are known to be.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from meshwise.nn.gpt import GPT, Head, Layer
from meshwise.spec import Layout, Model, Workload

SEQ_DIM = 1


def check(model: Model, workload: Workload, layout: Layout) -> None:
    """Refuse, by name, a layout that this model and sequence length cannot be cut into."""
    rules = [("heads", model.heads), ("ffn", model.ffn)]
    if layout.sequence_parallel:
        rules.append(("seq_len", workload.seq_len))
    for name, size in rules:
        if size % layout.tp:
            raise ValueError(f"Layout.tp = {layout.tp}: must divide {name} = {size}")
    if workload.seq_len > model.max_seq_len:
        raise ValueError(
            f"Workload.seq_len = {workload.seq_len}: must be <= max_seq_len = {model.max_seq_len} "
            "of the model"
        )


def _stream(sequence_parallel: bool) -> Placement:
    """How activations between the split weights lie on the tp ranks."""
    return Shard(SEQ_DIM) if sequence_parallel else Replicate()


def _replicate(module: nn.Module, tp_mesh: DeviceMesh, stream: Placement) -> None:
    """Keep all of a module's parameters on every rank; it reads and writes the stream."""

    def read(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[DTensor]:
        return (DTensor.from_local(inputs[0], mesh, [stream]),)

    def write(_: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        return output.to_local()  # type: ignore[no-any-return]

    distribute_module(module, tp_mesh, input_fn=read, output_fn=write)  # type: ignore[arg-type]


def apply_layer(layer: Layer, tp_mesh: DeviceMesh, sequence_parallel: bool) -> Layer:
    """Split one layer; its input and output are local tensors, [b,s/tp,hidden] when sp."""
    stream = _stream(sequence_parallel)
    _replicate(layer.norm1, tp_mesh, stream)
    _replicate(layer.norm2, tp_mesh, stream)
    parallelize_module(
        layer,
        tp_mesh,
        {
            "attention.qkv": ColwiseParallel(input_layouts=stream),
            "attention.out": RowwiseParallel(output_layouts=stream),
            "mlp.up": ColwiseParallel(input_layouts=stream),
            "mlp.down": RowwiseParallel(output_layouts=stream),
        },
    )
    return layer


def apply_head(head: Head, tp_mesh: DeviceMesh, sequence_parallel: bool) -> Head:
    """Split the projection by vocabulary; the logits are a DTensor split in their last dim."""
    stream = _stream(sequence_parallel)
    _replicate(head.norm, tp_mesh, stream)
    projection = ColwiseParallel(
        input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
    )
    parallelize_module(head, tp_mesh, {"projection": projection})
    return head


def apply(model: GPT, tp_mesh: DeviceMesh, sequence_parallel: bool) -> GPT:
    """Split a whole model, or a stage of one."""
    stream = _stream(sequence_parallel)
    if model.first:
        parallelize_module(
            model,
            tp_mesh,
            {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)},
        )
        _replicate(model.positions, tp_mesh, stream)
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        apply_layer(layer, tp_mesh, sequence_parallel)
    if model.last:
        apply_head(model.head, tp_mesh, sequence_parallel)
    model.tie()  # the splits made two parameters of one
    return model
