"""Sum the gradients of weights that tp repeats.

In: a weight that is whole on all tp ranks, each of which computes a part of its gradient (a norm
under sequence parallelism, a router, a part of the model that tp cuts by tokens). The gradient is a
partial sum over two axes, tp and the data ranks. ``Layout.tp_sums`` says in which order they go:

- first: over tp as autograd makes it, in the compute dtype; then over the data ranks by FSDP2;
- last: over the data ranks by FSDP2; what that leaves on a rank is summed over tp at the end of the
  step, all of it in one all-reduce (Megatron-LM does so for its norms);
- together: FSDP2 does not see such a weight. At the end of the step one all-reduce sums it over
  both axes. Experts that differ between data ranks are summed as with ``last``.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from meshwise.parallel.mesh import MeshPlace, share

Name = tuple[nn.Module, str]  # a parameter: others put new ones in its place


class Sums:
    """The sums that wait for the end of a step. ``cast``: the dtype to compute in with weights that
    FSDP2 does not see."""

    def __init__(
        self, place: MeshPlace, order: str = "first", cast: torch.dtype | None = None
    ) -> None:
        self.mesh, self.order, self.cast = place.mesh, order, cast
        self.data_ranks, self.everyone = place.layout.data_ranks, place.everyone
        self.over_tp: list[Name] = []
        self.over_both: list[Name] = []

    def placed(
        self, module: nn.Module, name: str, mesh: DeviceMesh, placements: list[Placement]
    ) -> tuple[DeviceMesh, list[Placement]]:
        """Note a weight whose gradient is a sum over tp; return where the weight lies."""
        if self.order == "together" and all(p.is_replicate() for p in placements):
            self.over_both.append((module, name))
            return self.mesh, [Replicate()] * self.mesh.ndim
        if self.order != "first":
            self.over_tp.append((module, name))
        return mesh, placements

    def unseen(self) -> set[nn.Parameter]:
        """Return the weights that FSDP2 is not to see."""
        return {getattr(module, name) for module, name in self.over_both}

    @torch.no_grad()
    def add_up(self) -> None:
        """Sum the gradients of a step: over tp as a sum, over the data ranks as a mean."""
        _all_reduce(self.over_tp, self.mesh["tp"].get_group())
        if self.over_both:
            assert self.everyone is not None
            _all_reduce(self.over_both, self.everyone, 1 / self.data_ranks)


def _all_reduce(names: list[Name], group: dist.ProcessGroup, scale: float = 1) -> None:
    held = dict.fromkeys(getattr(module, name) for module, name in names)  # a tied one once
    gradients: list[Tensor] = [share(weight.grad) for weight in held]
    if not gradients:
        return
    total = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(total, group=group)
    parts = total.mul_(scale).split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
