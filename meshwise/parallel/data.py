"""Data parallelism and ZeRO through FSDP2's ``fully_shard``: one unit per layer, one for the rest.

In: a module (already split by tp) and a layout. Afterwards parameters, gradients and optimizer
state are fp32 shards; for bf16 a unit casts its parameters when it gathers them, and gradients
are reduced in fp32, so fp32 masters cost no extra copy. Rajbhandari et al. 2020 (ZeRO), as

- zero 3: parameters are freed after a unit's forward, gathered again for its backward;
- zero 2: parameters stay until the step's last backward, gradients are scattered per microbatch;
- zero 1: the same, but gradients are summed whole (fp32) and scattered after the last microbatch;
- zero 0: every rank is a shard group of its own, and the groups all-reduce after the last
  microbatch (FSDP2 on a mesh of copies of one shard). It shares all code with the others; its
  price against a bare module is one more copy of the parameters from forward to backward (in bf16
  that copy is the compute copy, which mixed precision needs anyway; in fp32 it is overhead).

With ``replicas`` (HSDP) a gradient is scattered within a group of shards, then all-reduced between
the groups. A mesh of one rank is sharded too when there is a dtype to cast to or a tp axis.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from meshwise.parallel import torch_private
from meshwise.parallel.mesh import data_axes
from meshwise.spec import Layout


def is_needed(layout: Layout, dtype: str) -> bool:
    """One fp32 device needs none of this."""
    return layout.num_devices > 1 or dtype != "fp32"


def shard(unit: nn.Module, layout: Layout, mesh: DeviceMesh, dtype: str, *, root: bool) -> None:
    """Make a module one unit of gathering and scattering; the root after all others.

    The root of zero 3 is left to torch, which keeps it gathered: its backward comes first.
    """
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reshard = None if root and layout.zero == 3 else layout.zero == 3
    fully_shard(unit, mesh=data_axes(mesh), reshard_after_forward=reshard, mp_policy=policy)


def before_backward(model: nn.Module, layout: Layout, *, last: bool) -> None:
    """Say what the coming backward does with parameters and gradients; call it every time."""
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(last or layout.zero == 3)
        model.set_requires_gradient_sync(last or layout.zero >= 2)


def before_split_backward(model: nn.Module) -> None:
    """Have the weights for either part of a split backward; what it leaves is taken up later."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)


def after_split_backward(model: nn.Module, layout: Layout, *, last: bool) -> None:
    """Take up the weights' gradients: hooks that do so in a whole backward did not run."""
    before_backward(model, layout, last=last)
    if isinstance(model, FSDPModule):
        torch_private.end_backward(model)
