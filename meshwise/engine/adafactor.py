"""Adafactor on whole parameters or on shards (Shazeer and Stern 2018), as torch.optim.Adafactor.

torch's own fails on DTensors; here every rank updates its share. With t steps, r = t^-0.8 and a
gradient G of m rows and n columns (the last two dims):

    R = (1 - r) R + r mean over columns of G^2        C = (1 - r) C + r mean over rows of G^2
    V = R C / max(mean(R), eps1)                      U = G / sqrt(max(V, eps1^2))
    W = (1 - lr decay) W - max(eps2, rms(W)) min(lr, 1/sqrt(t)) U / max(1, rms(U) / d)

with d = 1; rms(W) is taken before the decay. A vector keeps V itself. If an axis of the mesh cuts a
dim, the mean over it is this rank's sum, all-reduced over that axis and divided by the whole size.
The host never waits for the device.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from meshwise.parallel.mesh import share

BETA2_DECAY = -0.8
EPS2 = 1e-3


class Adafactor(torch.optim.Optimizer):
    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: nn.Parameter, lr: float, decay: float) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state |= _new(parameter)
        state["step"] += 1
        step = float(state["step"])  # a tensor on the host
        weight, gradient = share(parameter), share(parameter.grad)
        everything = tuple(range(parameter.ndim))
        size = _rms(parameter, weight, everything).clamp(min=EPS2)
        weight.mul_(1 - lr * decay)
        update = _variance(parameter, gradient, state, step**BETA2_DECAY)
        eps1 = torch.finfo(weight.dtype).eps
        update.clamp_(min=eps1 * eps1).rsqrt_().mul_(gradient)
        factor = size * min(lr, step**-0.5) / _rms(parameter, update, everything).clamp(min=1.0)
        weight.sub_(update.mul_(factor))


def _variance(
    parameter: nn.Parameter, gradient: Tensor, state: dict[str, Any], rate: float
) -> Tensor:
    """Return this rank's share of V as a new tensor."""
    squares = gradient.square()
    if parameter.ndim < 2:
        return share(state["variance"]).lerp_(squares, rate).clone()
    rows, columns = parameter.ndim - 2, parameter.ndim - 1
    row, col = share(state["row_var"]), share(state["col_var"])
    row.lerp_(_mean(parameter, squares, columns), rate)
    col.lerp_(_mean(parameter, squares, rows), rate)
    eps1 = torch.finfo(parameter.dtype).eps
    return row @ col / _mean(parameter, row, rows).clamp(min=eps1)


def _mean(parameter: Tensor, part: Tensor, dim: int) -> Tensor:
    """Return the mean over a whole dim. ``part``: this rank's share of the tensor."""
    total = part.sum(dim, keepdim=True)
    return _sum(parameter, total, (dim,)) / parameter.shape[dim]


def _rms(parameter: Tensor, part: Tensor, dims: tuple[int, ...]) -> Tensor:
    total = part.square().sum()
    return (_sum(parameter, total, dims) / prod(parameter.shape)).sqrt()


def _sum(parameter: Tensor, part: Tensor, dims: tuple[int, ...]) -> Tensor:
    """All-reduce ``part`` over the mesh axes that cut one of these dims of the parameter."""
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate() and placement.dim in dims:  # type: ignore[attr-defined]
                dist.all_reduce(part, group=parameter.device_mesh.get_group(axis))
    return part


def _new(parameter: nn.Parameter) -> dict[str, Tensor]:
    step = torch.tensor(0.0)
    if parameter.ndim < 2:
        return {"step": step, "variance": torch.zeros_like(parameter)}
    last = parameter.ndim - 1
    return {
        "step": step,
        "row_var": _zeros_without(parameter, last),
        "col_var": _zeros_without(parameter, last - 1),
    }


def _zeros_without(parameter: nn.Parameter, dim: int) -> Tensor:
    """Return zeros that are cut like the parameter, but of size 1 in ``dim``."""
    part = share(parameter)
    local_shape, shape = list(part.shape), list(parameter.shape)
    local_shape[dim] = shape[dim] = 1
    zeros = part.new_zeros(local_shape)
    if not isinstance(parameter, DTensor):
        return zeros
    placements = [
        placement if placement.is_replicate() or placement.dim != dim else Replicate()  # type: ignore[attr-defined]
        for placement in parameter.placements
    ]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape),
        stride=stride,
    )  # fmt: skip
