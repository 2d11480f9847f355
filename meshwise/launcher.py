"""This process's place in a job that torchrun or srun started, read from its environment.

Imports nothing heavy: verbs ask before they load torch.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A job, and this process's place in it. ``host`` and ``port``: the store's.

    ``launched``: torchrun or srun started its ranks. Without a launcher a process is a job of one,
    which starts the ranks that it needs.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_hosts: int = 1
    host: str = "127.0.0.1"
    port: int = 29500
    launched: bool = False

    @classmethod
    def here(cls, variables: Mapping[str, str] = os.environ) -> "Job":
        """Read this process's job from the variables that torchrun and srun set.

        A Slurm step of one task (``srun --pty bash``) and a batch script are not launchers: a
        process in them starts its own ranks, unless WORLD_SIZE says that the task is the job.
        """
        if "RANK" in variables and "WORLD_SIZE" in variables:
            world_size = int(variables["WORLD_SIZE"])
            per_host = int(variables.get("LOCAL_WORLD_SIZE", world_size))
            return cls(
                rank=int(variables["RANK"]),
                local_rank=int(variables.get("LOCAL_RANK", "0")),
                world_size=world_size,
                num_hosts=max(1, world_size // per_host),
                host=variables.get("MASTER_ADDR", cls.host),
                port=int(variables.get("MASTER_PORT", cls.port)),
                launched=True,
            )
        tasks = int(variables.get("SLURM_STEP_NUM_TASKS", variables.get("SLURM_NTASKS", "1")))
        is_rank = tasks > 1 or variables.get("WORLD_SIZE") == "1"
        if "SLURM_PROCID" not in variables or "SLURM_STEP_ID" not in variables or not is_rank:
            return cls()
        hosts = variables.get("SLURM_STEP_NODELIST", variables.get("SLURM_JOB_NODELIST", ""))
        job = int(variables.get("SLURM_JOB_ID", "0")) * 7 + int(variables["SLURM_STEP_ID"])
        nodes = variables.get("SLURM_STEP_NUM_NODES", variables.get("SLURM_NNODES", "1"))
        return cls(
            rank=int(variables["SLURM_PROCID"]),
            local_rank=int(variables.get("SLURM_LOCALID", "0")),
            world_size=tasks,
            num_hosts=int(nodes),
            host=variables.get("MASTER_ADDR") or (cls.host if nodes == "1" else first_host(hosts)),
            port=int(variables.get("MASTER_PORT") or 20000 + job % 20000),
            launched=True,
        )

    @property
    def leads(self) -> bool:
        """Whether this process writes and prints for its job."""
        return self.rank == 0

    def check(self, nproc: int | None) -> None:
        """Raise ValueError if the launcher did not start ``nproc`` ranks."""
        if self.launched and nproc not in (None, self.world_size):
            raise ValueError(
                f"nproc = {nproc}, but the launcher started {self.world_size} ranks; "
                "leave nproc out or make them equal"
            )


def on_one_host(job: Job, variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether all ranks are on this host, wherever their store is; False if unknown."""
    said = "RANK" not in variables or "LOCAL_WORLD_SIZE" in variables
    return is_loopback(job.host) or (said and job.num_hosts == 1)


def first_host(nodelist: str) -> str:
    """Return a Slurm host list's first name: ``rack[1-2]n[003,007],login`` is ``rack1n003``."""
    names = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", names[0] if names else "") or "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback name, which only this host's processes reach."""
    return host == "localhost" or host.startswith("127.")
