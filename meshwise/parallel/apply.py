"""Applies a layout to a GPT or a stage of one: tensor parallelism, recomputation, compilation,
data parallelism.

In: a GPT built on the meta device, the Layout within a pipeline rank, its mesh. Out: the same
module with initialised weights, each rank holding its share. The order is torchtitan's: DTensor
hooks are compiled with the layer, FSDP2's run outside the compiled code.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from meshwise.nn import gpt
from meshwise.parallel import data, recompute, tensor
from meshwise.spec import Layout

Lowering = Literal["eager", "compiled"]
Loss = Callable[[Tensor, Tensor], Tensor]


def parallelize(
    model: gpt.GPT,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    dtype: str,
    lowering: Lowering,
    seed: int = 0,
) -> gpt.GPT:
    """Lay the model out; its weights are those of ``GPT.init_weights(seed)`` under any layout.

    Each unit is filled and sharded before the next is allocated, so a rank holds its share of
    the model plus one unit and one whole parameter at most.
    """
    if dtype not in ("fp32", "bf16"):
        raise ValueError(f"dtype = {dtype!r}: training runs in fp32 or bf16; plan for one of them")
    if layout.tp > 1:
        tensor.apply(model, mesh["tp"], layout.sequence_parallel)
    device = _device(mesh)
    sharded = data.is_needed(layout, dtype)
    kinds = layout.recomputed(len(model.layers))
    for (index, layer), kind in zip(model.layers.items(), kinds, strict=True):
        assert isinstance(layer, gpt.Layer)
        _fill(layer, f"layers.{index}", seed, device)
        recompute.apply(layer, kind)
        if lowering == "compiled":
            # attention over ranks is no one graph
            layer.compile(fullgraph=layer.attention.heads is gpt.causal, dynamic=False)
        if sharded:
            data.shard(layer, layout, mesh, dtype, root=False)
    if model.first:
        _fill(model.embed, "embed", seed, device)
        _fill(model.positions, "positions", seed, device)
    if model.last:
        _fill(model.head.norm, "head.norm", seed, device)
        if not model.first:
            _fill(model.head.projection, "head.projection", seed, device)
    model.tie()
    if sharded:
        data.shard(model, layout, mesh, dtype, root=True)
    return model


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _fill(module: nn.Module, name: str, seed: int, device: torch.device) -> None:
    """Allocate a module's parameters on the device and give them their initial values."""
    module.to_empty(device=device)
    for full_name, parameter in module.named_parameters(prefix=name):
        value = gpt.initial_value(full_name, parameter.shape, seed, device)
        if isinstance(parameter, DTensor):  # every rank made the whole value: cut, send nothing
            value = distribute_tensor(
                value, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        with torch.no_grad():
            parameter.copy_(value)


def loss_function(layout: Layout, lowering: Lowering) -> Loss:
    """(logits, targets) -> this rank's mean loss as a local scalar, compiled if the layers are.

    Compiled, the fp32 copies of the logits are never written to memory. With tp the logits stay
    split by vocabulary; call it, and the backward, inside ``loss_context``.
    """
    compute: Loss = gpt.loss
    if lowering == "compiled":
        compute = torch.compile(gpt.loss, fullgraph=True, dynamic=False)
    if layout.tp == 1:
        return compute

    def local_loss(logits: Tensor, targets: Tensor) -> Tensor:
        whole = compute(logits, targets)
        assert isinstance(whole, DTensor)
        return whole.to_local()

    return local_loss


def loss_context(layout: Layout) -> AbstractContextManager[None]:
    """Holds forward loss and backward; with tp it makes cross entropy work on split logits."""
    return loss_parallel() if layout.tp > 1 else nullcontext()
