"""The device mesh of a layout: axes ``dp`` and ``tp``, tp innermost.

In: a Layout whose degrees multiply to the number of joined ranks. Out: a DeviceMesh. Rank r is
number r % tp of its tp group and number r // tp along dp, so tp groups are neighbours.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwise.spec import Layout


def build(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of all joined ranks. Every rank calls it, in the same order as other meshes."""
    if layout.num_devices != dist.get_world_size():
        raise ValueError(
            f"layout {layout.name} needs {layout.num_devices} ranks, but {dist.get_world_size()} "
            f"joined; start {layout.num_devices} (--nproc {layout.num_devices})"
        )
    if layout.dp > 1 and layout.zero == 0:
        # Copies of the whole model are shards of one rank each: the axis of size 1 says so.
        return init_device_mesh(
            device_type, (layout.dp, 1, layout.tp), mesh_dim_names=("dp", "shard", "tp")
        )
    return init_device_mesh(device_type, (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh that data parallelism works on: (dp) sharded, (dp, shard) copied."""
    names = mesh.mesh_dim_names or ()
    return mesh["dp", "shard"] if "shard" in names else mesh["dp"]
