"""Data parallelism and ZeRO by FSDP2's ``fully_shard``: one unit per layer, one for the rest.

In: a module (already split by tp) and a place. Afterwards parameters, gradients and optimizer state
are fp32 shards. In bf16 a unit casts its parameters when it gathers them, and gradients are
reduced in fp32, so fp32 masters cost no extra copy. The stages are those of Rajbhandari et al.
2020 (ZeRO):

- zero 3: parameters are freed after a unit's forward and gathered again for its backward;
- zero 2: parameters stay until the step's last backward, gradients are scattered per microbatch;
- zero 1: the same, but gradients are summed whole (fp32) and scattered after the last microbatch;
- zero 0: every rank is a shard group of its own, and the groups all-reduce after the last
  microbatch (FSDP2 on a mesh of copies of one shard). It shares all code with the others. It keeps
  one more copy of the parameters from forward to backward than a bare module does. In bf16 this is
  the compute copy, which mixed precision needs anyway; in fp32 it is overhead.

With ``replicas`` (HSDP) a gradient is scattered within a group of shards, then all-reduced between
the groups. A mesh of one rank is sharded too if there is a dtype to cast to or a tp axis. Ranks
that share sequences (cp) count as data ranks. Divided experts (ep) are units on a mesh of their
own. Their gradients are sums over ep ranks; the exchange of tokens turns these into means.
"""

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshwise import torch_private
from meshwise.nn import ModelStage
from meshwise.nn.experts import MoE
from meshwise.parallel.mesh import MeshPlace
from meshwise.spec import Layout, Recipe


def is_needed(layout: Layout, dtype: str) -> bool:
    """Whether there is anything to shard or cast: one fp32 device needs none of this."""
    return layout.num_devices > 1 or dtype != "fp32"


def shard(
    unit: nn.Module,
    place: MeshPlace,
    dtype: str,
    recipe: Recipe,
    *,
    root: bool,
    unseen: set[nn.Parameter] | None = None,
) -> None:
    """Make a module one unit of gathering and scattering, without the weights ``unseen``. Shard
    the root last.

    For zero 3, torch decides about the root and keeps it gathered, as its backward comes first.
    """
    zero = place.layout.zero
    reduce_dtype = torch.bfloat16 if recipe.reduce == "bf16" else torch.float32
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    if place.experts is not None:
        for module in unit.modules():
            if isinstance(module, MoE) and not isinstance(module.experts, FSDPModule):
                _fully_shard(module.experts, place.experts, policy, zero == 3, unseen)
    _fully_shard(unit, place.mesh, policy, None if root and zero == 3 else zero == 3, unseen)


def _fully_shard(
    unit: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    reshard: bool | None,
    unseen: set[nn.Parameter] | None,
) -> None:
    fully_shard(
        unit,
        mesh=mesh["shard"] if mesh["replica"].size() == 1 else mesh["replica", "shard"],
        reshard_after_forward=reshard,
        mp_policy=policy,
        shard_placement_fn=_beside,
        ignored_params=unseen,
    )


def _beside(parameter: nn.Parameter) -> Shard | None:
    """Shard dim 0, or dim 1 where tp cut dim 0 part by part: torch would gather such a weight in a
    wrong order."""
    in_parts = isinstance(parameter, DTensor) and any(
        torch_private.cuts_parts(placement) and placement.dim == 0
        for placement in parameter.placements
    )
    return Shard(1) if in_parts else None


def prefetch(units: list[nn.Module], count: int) -> None:
    """Gather ``count`` units ahead of the one that computes. By default torch gathers one."""
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for index, unit in enumerate(sharded):
        unit.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + count])
        before = sharded[max(0, index - count) : index]
        unit.set_modules_to_backward_prefetch(before[::-1])


def before_backward(model: nn.Module, layout: Layout, *, last: bool) -> None:
    """Tell FSDP2, before each backward, what to do with parameters and gradients in it."""
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(last or layout.zero == 3)
        model.set_requires_gradient_sync(last or layout.zero >= 2)


def may_rest(layout: Layout) -> bool:
    """Whether FSDP2 has nothing to do between a step's first and last microbatch, because weights
    stay gathered and gradients whole. Its hooks took a fifth of a small microbatch's host time.
    Without them gradients stay in the compute dtype until the microbatch's backward ends."""
    return layout.zero <= 1 and layout.expert_ranks == 1 and layout.num_microbatches > 1


def gather(model: ModelStage) -> None:
    """Gather the weights for forwards that are hidden from FSDP2."""
    if isinstance(model, FSDPModule):
        torch_private.begin(model)
        before_split_backward(model)


def at_rest(model: ModelStage) -> AbstractContextManager[None]:
    """Hide a forward and its backward from FSDP2; call ``after_rest`` after the backward."""
    return torch_private.unseen(_units(model))


def after_rest(model: ModelStage, layout: Layout, *, last: bool) -> None:
    """Add the gradients of a hidden backward to FSDP2's."""
    torch_private.add_gradients(_units(model))
    if last:
        after_split_backward(model, layout, last=True)


def _units(model: ModelStage) -> list[FSDPModule]:
    parts = (model, *model.layers.values())
    return [part for part in parts if isinstance(part, FSDPModule)]


def before_split_backward(model: nn.Module) -> None:
    """Gather the weights for a part of a split backward; call ``after_split_backward`` later."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)


def after_split_backward(model: nn.Module, layout: Layout, *, last: bool) -> None:
    """Hand the weights' gradients to FSDP2, whose hooks do not run in a split backward."""
    before_backward(model, layout, last=last)
    if isinstance(model, FSDPModule):
        torch_private.end_backward(model)
