"""Divide a Wide-ResNet over ranks: norms over the whole microbatch, convolutions by channel.

In: a ``WideResNetModule``. Each data rank sees a share of the microbatch; tp ranks see the same
share. Afterwards norms use mean and variance over all data ranks. Over tp a bottleneck is
Megatron's pair (Shoeybi et al. 2019): conv2 makes a share of the channels (col), norm2 normalises
it, conv3 reads it (row), and the ranks sum their results. Forward all-reduces conv3's result,
backward all-reduces the gradient of conv2's input. All else is whole on every tp rank.

This is by hand because DTensor's convolution with channel shards is silently wrong. Weights and
running statistics are still DTensors, for FSDP2, clipping and checkpoints. The collectives save
nothing for backward, so recomputation stops at the convolution before them.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from meshwise import torch_private
from meshwise.nn.wide_resnet import BatchNorm, Bottleneck, PaddedConv2d, WideResNetModule
from meshwise.parallel.mesh import MeshPlace, share

DIMS = {"conv2": 0, "norm2": 0, "conv3": 1}  # the dim of each bottleneck tensor that tp divides

Groups = tuple[ProcessGroup, ...]


def divide(model: WideResNetModule, place: MeshPlace) -> None:
    """Divide a model or a stage over tp, and let its norms average over all data ranks."""
    if groups := tuple(place.data_groups):
        average = partial(_mean, groups=groups, num_ranks=place.layout.data_ranks)
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.mean_over_ranks = average
    if place.layout.tp > 1:
        _divide(model, place.mesh["tp"])


def _divide(model: WideResNetModule, tp_mesh: DeviceMesh) -> None:
    for layer in model.layers.values():
        for name, dim in DIMS.items():
            _distribute(getattr(layer, name), tp_mesh, Shard(dim))
    distribute_module(model, tp_mesh)  # the other tensors, as replicas
    # The same two functions in every layer, so that layers of one shape share compiled code.
    tp = (tp_mesh.get_group(),)
    enter, leave = (
        partial(_all_reduce, groups=(), back=tp),
        partial(_all_reduce, groups=tp, back=()),
    )
    # ``share`` is enough: a tensor whole on all tp ranks has the same whole gradient on each
    for module in model.modules():
        if isinstance(module, BatchNorm | PaddedConv2d):
            module.local = share
        if isinstance(module, Bottleneck):
            module.conv2.enter, module.conv3.leave = enter, leave
    if model.last:
        model.head.forward = partial(_linear, model.head)  # type: ignore[method-assign]


def _distribute(module: nn.Module, tp_mesh: DeviceMesh, cut: Shard) -> None:
    for name, parameter in list(module.named_parameters()):
        placed = distribute_tensor(parameter, tp_mesh, [cut], src_data_rank=None)
        setattr(module, name, nn.Parameter(placed))
    for name, buffer in list(module.named_buffers()):
        setattr(module, name, distribute_tensor(buffer, tp_mesh, [cut], src_data_rank=None))


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, share(linear.weight), share(linear.bias))


def _mean(x: Tensor, *, groups: Groups, num_ranks: int) -> Tensor:
    """Average x over ranks. All ranks use the result, so the gradient is averaged over them too."""
    return _all_reduce(x / num_ranks, groups=groups, back=groups)


def _all_reduce(x: Tensor, *, groups: Groups, back: Groups) -> Tensor:
    """Sum x over ``groups`` and its gradient over ``back``; without groups nothing is summed."""
    return _AllReduce.apply(x, groups, back)  # type: ignore[no-any-return, no-untyped-call]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups, back: Groups) -> Tensor:
        ctx.back = back
        return _sum(x, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _sum(gradients[0], ctx.back), None, None


def _sum(x: Tensor, groups: Groups) -> Tensor:
    if not groups:
        return x.view_as(x)
    is_image = x.ndim == 4
    total = x.clone(memory_format=torch.channels_last if is_image else torch.contiguous_format)
    if is_image:  # contiguous, with the same order of elements on all ranks
        total = total.permute(0, 2, 3, 1)
    for group in groups:
        total = torch_private.summed(total, group)
    return total.permute(0, 3, 1, 2) if is_image else total
