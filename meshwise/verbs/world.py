"""Ranks of a verb: how many it starts, where they meet, and whether this machine can hold them."""

import os
from typing import TYPE_CHECKING

from meshwise.launcher import Job

if TYPE_CHECKING:
    from meshwise.spec import Cluster


def num_ranks(
    nproc: int | None = None,
    gpus: int | None = None,
    num_hosts: int | None = None,
    num_devices_per_host: int | None = None,
) -> int | None:
    """Return the number of ranks that these options agree on; None if none is given."""
    if (num_hosts is None) != (num_devices_per_host is None):
        raise ValueError("--num-hosts and --num-devices-per-host go together; give both")
    hosts = None if num_hosts is None else num_hosts * (num_devices_per_host or 0)
    options = {
        "--nproc": nproc,
        "--gpus": gpus,
        f"--num-hosts {num_hosts} x --num-devices-per-host {num_devices_per_host}": hosts,
    }
    given = {name: number for name, number in options.items() if number is not None}
    for name, number in given.items():
        if number < 1:
            raise ValueError(f"{name} = {number}: must be >= 1")
    if len(set(given.values())) > 1:
        said = ", ".join(f"{name} = {number}" for name, number in given.items())
        raise ValueError(f"{said}: these set the same number; give one, or make them equal")
    return next(iter(given.values()), None)


def meet_at(address: str | None, port: int | None) -> None:
    """Set where the ranks of several hosts meet, for a launcher that does not set it (srun)."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    given = {"MASTER_ADDR": address, "MASTER_PORT": None if port is None else str(port)}
    os.environ.update({name: value for name, value in given.items() if value is not None})


def size(asked: int | None, cluster: "Cluster", default: int) -> int:
    """Return how many ranks to start; refuse more than the launcher or the cluster has."""
    job = Job.here()
    job.check(asked)
    found = job.world_size if job.launched else default if asked is None else asked
    if not 1 <= found <= cluster.num_devices:
        raise ValueError(
            f"nproc = {found}: cluster {cluster.name!r} has {cluster.num_devices} devices; "
            f"use 1 to {cluster.num_devices}, look again by `meshwise detect`, or name a larger "
            "cluster: a file, or h100-hgx"
        )
    if not job.launched and found > cluster.num_devices_per_host:
        raise ValueError(
            f"nproc = {found}: a host of {cluster.name!r} has {cluster.num_devices_per_host} "
            "devices; start this verb on every host with torchrun or srun"
        )
    return found


def check_machine(cluster: "Cluster", size: int) -> None:
    """Refuse to start ``size`` ranks on a machine that is not the one described."""
    import torch

    device = cluster.device
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.kind == "cpu":
        if visible:
            raise ValueError(
                f"cluster {cluster.name!r} describes CPUs, but {visible} GPUs are visible; set "
                "CUDA_VISIBLE_DEVICES= to use the CPU, or run `meshwise detect`"
            )
        return
    found = sorted({torch.cuda.get_device_name(i) for i in range(visible)})
    if device.name not in found:
        raise ValueError(
            f"cluster {cluster.name!r} describes {device.name!r}, but here is "
            f"{', '.join(found) or 'no GPU'}; run `meshwise detect` on this machine"
        )
    if visible < min(size, cluster.num_devices_per_host) and not Job.here().launched:
        raise ValueError(f"{size} ranks need {size} GPUs, but {visible} are visible")
