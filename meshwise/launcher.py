"""This process's place in a job that torchrun or srun started, read from its environment.

Imports nothing heavy: verbs ask before they load torch.
"""

import os
import re
from collections.abc import Mapping
from typing import TypedDict


class Environment(TypedDict):
    """A process's place in a job, from its launcher. ``host`` and ``port``: the store's."""

    rank: int
    local_rank: int
    world_size: int
    num_hosts: int
    host: str
    port: int


def environment(variables: Mapping[str, str] = os.environ) -> Environment | None:
    """Return this process's place in the job of torchrun or srun; None if neither started it.

    A Slurm step of one task (``srun --pty bash``) and a batch script are not launchers: a process
    in them starts its own ranks.
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        world_size = int(variables["WORLD_SIZE"])
        return Environment(
            rank=int(variables["RANK"]),
            local_rank=int(variables.get("LOCAL_RANK", "0")),
            world_size=world_size,
            num_hosts=max(1, world_size // int(variables.get("LOCAL_WORLD_SIZE", world_size))),
            host=variables.get("MASTER_ADDR", "127.0.0.1"),
            port=int(variables.get("MASTER_PORT", "29500")),
        )
    tasks = int(variables.get("SLURM_STEP_NUM_TASKS", variables.get("SLURM_NTASKS", "1")))
    if "SLURM_PROCID" not in variables or "SLURM_STEP_ID" not in variables or tasks == 1:
        return None
    hosts = variables.get("SLURM_STEP_NODELIST", variables.get("SLURM_JOB_NODELIST", ""))
    job = int(variables.get("SLURM_JOB_ID", "0")) * 7 + int(variables["SLURM_STEP_ID"])
    nodes = variables.get("SLURM_STEP_NUM_NODES", variables.get("SLURM_NNODES", "1"))
    return Environment(
        rank=int(variables["SLURM_PROCID"]),
        local_rank=int(variables.get("SLURM_LOCALID", "0")),
        world_size=tasks,
        num_hosts=int(nodes),
        host=variables.get("MASTER_ADDR") or ("127.0.0.1" if nodes == "1" else first_host(hosts)),
        port=int(variables.get("MASTER_PORT") or 20000 + job % 20000),
    )


def world_size(nproc: int | None = None) -> int | None:
    """Return how many ranks a launcher started, or None. Raises a ValueError if ``nproc`` is a
    different number."""
    place = environment()
    if nproc is not None and place is not None and nproc != place["world_size"]:
        raise ValueError(
            f"nproc = {nproc}, but the launcher started {place['world_size']} ranks; "
            "leave nproc out or make them equal"
        )
    return None if place is None else place["world_size"]


def on_one_host(place: Environment, variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether all ranks are on this host, wherever their store is; False if unknown."""
    said = "RANK" not in variables or "LOCAL_WORLD_SIZE" in variables
    return is_loopback(place["host"]) or (said and place["num_hosts"] == 1)


def first_host(nodelist: str) -> str:
    """Return a Slurm host list's first name: ``rack[1-2]n[003,007],login`` is ``rack1n003``."""
    names = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", names[0] if names else "") or "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback name, which only this host's processes reach."""
    return host == "localhost" or host.startswith("127.")
