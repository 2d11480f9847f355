"""The place of a process in a layout: its pipeline rank, the mesh within it, links to others.

In: a Layout whose degrees multiply to the number of joined ranks. Out: a ``MeshPlace``. The axes of
a pipeline rank's mesh are ``replica``, ``shard``, ``tp``, and the last varies fastest: rank r is
number r % tp of its tp group. Ranks that share a sequence (cp) are neighbouring data ranks, and so
are ranks that divide a set of experts (ep). The experts' mesh has one more axis, ``ep``. If tp
divides the experts as well, its ranks are part of that axis.

Every rank makes all groups in the same order, even those it is not in. On GPUs each boundary
between two stages has one communicator forward and one backward, so that a message cannot block
one of the other direction or of another boundary.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwise.spec import Layout, rank_of


class Link(NamedTuple):
    """The groups of a boundary. Each has all ranks of the stage before it and the stage after."""

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


class MeshPlace(NamedTuple):
    """A rank's place. ``layout`` is the layout within the pipeline rank. ``links`` are keyed by the
    stage before the boundary; -1 links the pipeline's ends. Present only if the layout needs them:
    ``experts``, a mesh of the same ranks with an axis ``ep``; ``context``, the ranks that share
    this one's sequences; ``everyone``, all ranks of the pipeline rank."""

    layout: Layout
    pipeline_rank: int
    mesh: DeviceMesh
    links: Mapping[int, Link]
    experts: DeviceMesh | None = None
    context: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """List all groups that this process communicates in."""
        world = dist.group.WORLD
        assert world is not None
        of_links = [group for link in self.links.values() for group in link]
        others = self.experts.get_all_groups() if self.experts is not None else []
        others += [group for group in (self.context, self.everyone) if group is not None]
        return [world, *self.mesh.get_all_groups(), *others, *of_links]

    @property
    def data_groups(self) -> list[dist.ProcessGroup]:
        """List the groups to sum over, one after the other, to cover all data ranks."""
        if self.layout.data_ranks == 1:
            return []
        axes = (self.mesh["replica"], self.mesh["shard"])
        return [axis.get_group() for axis in axes if axis.size() > 1]


def build(layout: Layout, device_type: str) -> MeshPlace:
    """Return this process's place among all joined ranks."""
    if layout.num_devices != dist.get_world_size():
        raise ValueError(
            f"layout {layout.name} needs {layout.num_devices} ranks, but {dist.get_world_size()} "
            f"joined; start {layout.num_devices} (--nproc {layout.num_devices})"
        )
    mine = layout.pipeline_rank_of(dist.get_rank())
    made = [_meshes(layout, rank, device_type) for rank in range(layout.pp)]
    mesh, experts, context, everyone = made[mine]
    links = _links(layout, device_type)
    if mesh["tp"].size() > 1:
        _keep_apart(mesh)
    return MeshPlace(layout.of_rank(mine), mine, mesh, links, experts, context, everyone)


def _keep_apart(mesh: DeviceMesh) -> None:
    """Give each rank its own entries in torch's cache of compiled code on disk. The cache key has
    a DTensor's mesh, but not the rank in it or the names of its groups, and the code has both. In
    torch 2.13, ranks of one host shared an entry and got the loss of another rank's share."""
    names = ",".join(group.group_name for group in mesh.get_all_groups())
    torch.compiler.config.cache_key_tag = f"rank {dist.get_rank()} in groups {names}"


def _meshes(
    layout: Layout, pipeline_rank: int, device_type: str
) -> tuple[DeviceMesh, DeviceMesh | None, dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Build a pipeline rank's mesh, its experts' mesh, this rank's context group, and the group of
    all ranks of the pipeline rank."""
    inside = layout.of_rank(pipeline_rank)
    devices = torch.tensor(layout.devices_of(pipeline_rank))
    copies, shards, tp, ep = inside.data_ranks // inside.shards, inside.shards, inside.tp, inside.ep
    mesh = DeviceMesh(
        device_type, devices.view(copies, shards, tp), mesh_dim_names=("replica", "shard", "tp")
    )
    experts = context = everyone = None
    if inside.expert_ranks > 1:
        data = (copies, shards // ep) if inside.zero else (copies // ep, 1)
        divided = (*data, inside.expert_ranks, -1)
        axes = ("replica", "shard", "ep", "tp")
        experts = DeviceMesh(device_type, devices.view(divided), mesh_dim_names=axes)
    if inside.cp > 1:
        tokens = devices.view(inside.dp, inside.cp, tp)
        shared = DeviceMesh(device_type, tokens, mesh_dim_names=("dp", "cp", "tp"))
        here = dist.get_rank() in devices.tolist()
        context = shared["cp"].get_group() if here else None
    if inside.tp_sums == "together":
        everyone = dist.new_group(devices.tolist())
    return mesh, experts, context, everyone


def _links(layout: Layout, device_type: str) -> dict[int, Link]:
    """Make this rank's links and warm them up, as a group's first use needs all its ranks."""
    rank, links = dist.get_rank(), {}
    for stage in range(-1, layout.num_stages - 1 if layout.pp > 1 else -1):
        ends = [
            rank_of(layout.schedule, s % layout.num_stages, layout.pp) for s in (stage, stage + 1)
        ]
        if ends[0] == ends[1]:
            continue
        members = sorted({*layout.devices_of(ends[0]), *layout.devices_of(ends[1])})
        groups = [dist.new_group(members) for _ in Link._fields]
        if rank in members:
            links[stage] = Link(*groups)
            for group in groups:
                dist.all_reduce(torch.zeros(1, device=device_type), group=group)
    return links


def share(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
