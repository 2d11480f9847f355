"""Every private name of torch that meshwise uses, each with the public way it stands in for.

Tried on torch 2.11 and 2.13.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    world = dist.group.WORLD
    assert world is not None
    return [world, *mesh.get_all_groups()]


def set_timeout(mesh: DeviceMesh, timeout_s: float) -> None:
    """How long a mesh's collectives wait from now on.

    A mesh makes its groups with torch's 10 or 30 minutes, whatever the default group was given,
    and a group's timeout is public only where the group is made.
    """
    for group in _groups(mesh):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def abort(mesh: DeviceMesh) -> None:
    """End the GPU collectives of a mesh that a rank has left, so that this process can go on.

    The public ``destroy_process_group`` waits for them.
    """
    if mesh.device_type == "cuda":
        for group in _groups(mesh):
            group._get_backend(torch.device("cuda")).abort()


def scale(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply many tensors in place in few kernels; torch's optimizers do so by this name."""
    torch._foreach_mul_(tensors, factor)
