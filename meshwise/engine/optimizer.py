"""Optimizers and gradient clipping, on whole parameters or shards, without waiting for the device.

The global norm is sqrt(sum over parameters of |gradient|^2). A rank sums the squares of its
elements, each divided by the number of ranks that hold the same; an all-reduce of one value sums
over ranks. This covers every mix of shards and replicas. torch's own norm of DTensors reduces one
parameter at a time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.sgd import sgd

from meshwise import torch_private
from meshwise.engine.adafactor import Adafactor
from meshwise.parallel.mesh import share
from meshwise.spec import Recipe

BETAS = (0.9, 0.95)
MOMENTUM = 0.9
_OF_SGD = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW, on this rank's own shares. Updates are elementwise, but torch first
    works out how to redistribute sharded tensors, which took 20 s in the first step for experts on
    a mesh of four axes. States are sharded like the parameters."""

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> Any:
        is_complex = super()._init_group(group, *tensors)  # type: ignore[no-untyped-call]
        for same in tensors:
            same[:] = map(share, same)
        return is_complex


class SGD(torch.optim.SGD):
    """torch's SGD with momentum, on this rank's own shares, for the same reason as ``AdamW``:
    experts on a mesh of four axes took minutes."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in held:
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            sgd(
                [share(parameter) for parameter in held],
                [share(parameter.grad) for parameter in held],
                [share(self.state[parameter]["momentum_buffer"]) for parameter in held],
                foreach=True,
                **{name: group[name] for name in _OF_SGD},
            )


def build(recipe: Recipe, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the recipe's optimizer: AdamW, SGD with Nesterov's momentum, or Adafactor. Only AdamW
    has a fused kernel for shards."""
    rate, decay = recipe.learning_rate, recipe.weight_decay
    if recipe.optimizer == "adamw":
        return AdamW(parameters, lr=rate, betas=BETAS, weight_decay=decay, fused=True)
    if recipe.optimizer == "sgd":
        return SGD(parameters, lr=rate, momentum=MOMENTUM, weight_decay=decay, nesterov=True)
    return Adafactor(parameters, lr=rate, weight_decay=decay)


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    alone: bool,
    copy: nn.Parameter | None = None,
    loss: Tensor | None = None,
) -> Tensor:
    """Scale all gradients by min(1, max_norm / norm); return the norm before it, on the device.

    ``alone``: this rank holds all gradients. ``copy``: a tied copy; it is scaled, too, but only its
    original counts. The norm is nan on all ranks if the ``loss`` of any rank is not finite. This
    works on the ranks' own shares: torch's clipping of many DTensors makes the host the bottleneck.
    """
    alike: dict[int, list[Tensor]] = defaultdict(list)  # by the number of ranks that hold a copy
    uncounted: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        held = uncounted if parameter is copy else alike[_num_replicas(gradient)]
        held.append(share(gradient))
    norms = {n: nn.utils.get_total_norm(group, foreach=True) for n, group in alike.items()}
    total = torch.stack([norm.square() / n for n, norm in norms.items()]).sum()
    if loss is not None:
        total = total + nothing(loss).to(total.dtype)
    if not alone:
        dist.all_reduce(total)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils adds the same 1e-6
    torch_private.scale([*uncounted, *chain.from_iterable(alike.values())], factor)
    return norm


def nothing(loss: Tensor) -> Tensor:
    """Return 0, or nan if the loss is not finite. A sum over ranks passes the nan on to all."""
    return 0 * loss.detach()


def _num_replicas(gradient: Tensor) -> int:
    """Count the ranks that hold the same elements as this one."""
    count = 1
    if isinstance(gradient, DTensor):
        for axis, placement in enumerate(gradient.placements):
            assert not placement.is_partial()
            if placement.is_replicate():
                count *= gradient.device_mesh.size(axis)
    return count
