"""Sum the gradients of weights that tp repeats.

In: a weight that is whole on all tp ranks, while each rank computes a part of its gradient (a norm
under sequence parallelism, a router, a part of the model that tp cuts by tokens). The gradient must
be summed over two axes, tp and the data ranks. ``Layout.tp_sums`` says when tp's sum is taken:

- first: over tp when autograd makes it, in the compute dtype; FSDP2 then sums over the data ranks;
- last: FSDP2 sums over the data ranks. At the end of the step one all-reduce over tp sums all such
  gradients that a rank has (Megatron-LM does so for its norms);
- together: FSDP2 does not see such a weight. At the end of the step one all-reduce sums it over
  both axes. Experts that differ between data ranks are summed as with ``last``.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from meshwise.parallel.mesh import MeshPlace, share

Name = tuple[nn.Module, str]  # names a parameter, as other code replaces the object itself


class Sums:
    """The sums to do at the end of a step. ``cast``: the compute dtype of weights that FSDP2 does
    not see. ``reduce``: gradients are summed in this dtype, or in a wider one of their own."""

    def __init__(
        self,
        place: MeshPlace,
        order: str = "first",
        cast: torch.dtype | None = None,
        reduce: torch.dtype = torch.float32,
    ) -> None:
        self.mesh, self.order, self.cast, self.reduce = place.mesh, order, cast, reduce
        self.data_ranks, self.everyone = place.layout.data_ranks, place.everyone
        self.over_tp: list[Name] = []
        self.over_both: list[Name] = []

    def placed(
        self, module: nn.Module, name: str, mesh: DeviceMesh, placements: list[Placement]
    ) -> tuple[DeviceMesh, list[Placement]]:
        """Note a weight whose gradient is a sum over tp; return its mesh and placements."""
        if self.order == "together" and all(p.is_replicate() for p in placements):
            self.over_both.append((module, name))
            return self.mesh, [Replicate()] * self.mesh.ndim
        if self.order != "first":
            self.over_tp.append((module, name))
        return mesh, placements

    def unseen(self) -> set[nn.Parameter]:
        """Return the weights that FSDP2 must not see."""
        return {getattr(module, name) for module, name in self.over_both}

    @torch.no_grad()
    def add_up(self) -> None:
        """Reduce the noted gradients: sum over tp, mean over the data ranks."""
        self._all_reduce(self.over_tp, self.mesh["tp"].get_group())
        if self.over_both:
            assert self.everyone is not None
            self._all_reduce(self.over_both, self.everyone, 1 / self.data_ranks)

    def _all_reduce(self, names: list[Name], group: dist.ProcessGroup, scale: float = 1) -> None:
        held = dict.fromkeys(getattr(module, name) for module, name in names)  # a tied weight once
        gradients: list[Tensor] = [share(weight.grad) for weight in held]
        if not gradients:
            return
        total = torch.cat([gradient.flatten() for gradient in gradients])
        is_narrow = self.reduce == torch.bfloat16
        total = total.to(
            self.reduce if is_narrow else torch.promote_types(total.dtype, self.reduce)
        )
        dist.all_reduce(total, group=group)
        parts = total.mul_(scale).split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
