"""The part of a cluster on which a command runs when it does not start its ranks itself."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from meshwise.options import Options, Positive, Range
from meshwise.options import Time as Duration
from meshwise.units import some_seconds

Launcher = Literal["slurm", "ray", "kubernetes"]
_CONTAINER = {"run_id", "container_image", "container_mounts", "time"}
_LEAST_S = 180  # on Slurm, which tells the job 120 s before its limit
# What belongs to some launchers. All take the other fields.
_OWN: dict[Launcher, set[str]] = {
    "slurm": _CONTAINER
    | {"container_engine", "partition", "account", "constraint", "sbatch", "array", "wait"},
    "ray": {"array", "wait", "address", "strategy"},
    "kubernetes": _CONTAINER | {"namespace"},
}


def belongs(name: str) -> str:
    """Say to which launchers an option belongs."""
    owners = [each for each, own in _OWN.items() if name in own] or _OWN
    return f"belongs to --launcher {' or '.join(owners)}"


@dataclass(frozen=True, kw_only=True)
class Allocation(Options):
    """The part of a cluster on which a command runs, and how to get it."""

    launcher: Launcher = "slurm"
    "Who starts the ranks. kubernetes: only print manifests."
    nodes: Annotated[int, Range(1, 100_000)] = 1
    "Hosts."
    gpus_per_node: Annotated[int, Range(0, 1024)] = 0
    "GPUs of each host, a rank on each; without it ranks run on CPUs."
    nproc_per_node: Positive = None
    "Ranks of each host; by default one for each GPU, or 1."
    run_id: str | None = None
    (
        "Name of the folder of script and logs, RUNS/jobs/RUN_ID, in the folder of --runs, else "
        "OUTPUT_DIR of the environment; by default RUN_ID of the environment, else verb and time."
    )
    python: str | None = None
    "The interpreter on the hosts; by default this one, in a container python3."
    container_image: str | None = None
    "By default CONTAINER_IMAGE of the environment."
    container_mounts: tuple[str, ...] = ()
    (
        "SOURCE:TARGET, as the container sees it; may be repeated. On Slurm the working directory "
        "always is; on Kubernetes one has to hold it."
    )
    container_engine: Literal["pyxis", "apptainer"] = "pyxis"
    "Of Slurm: srun's plugin for enroot, or apptainer exec."
    partition: str | None = None
    "Of Slurm."
    account: str | None = None
    "Of Slurm."
    constraint: str | None = None
    "Of Slurm: features of the nodes."
    time: Duration | None = None
    "Time limit, as 30m, 2h, 12:00:00 or 1-00:00:00; on Slurm at least 3m."
    sbatch: tuple[str, ...] = ()
    "Another option of sbatch, as --qos=high; may be repeated."
    array: str | None = None
    "Of Slurm and Ray: a job for each value of a flag of the command, as seq-len=1024,2048."
    wait: bool = False
    "Of Slurm: follow the job's output to its end; the exit code is the job's. On Ray it always is."
    address: str | None = None
    "Of Ray: a running cluster, auto or HOST:PORT. By default one is started here and stopped."
    strategy: Literal["pack", "spread"] = "pack"
    "Of Ray: ranks on few hosts, or on many."
    namespace: str = field(default="default", metadata={"help": "Of Kubernetes."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.said().items():
            if not self.takes(name):
                raise ValueError(f"{name} = {value!r}: {belongs(name)}; give that, or leave it out")
            if value == "":
                raise ValueError(f"{name} = '': is empty; give a value, or leave it out")
        limit_s = self.limit_s  # one that is no time is refused at once
        if self.launcher == "slurm" and limit_s is not None and limit_s < _LEAST_S:
            raise ValueError(
                f"time = {self.time!r}: must be at least 3m, as Slurm tells the job 2 minutes "
                "before the limit"
            )

    def takes(self, name: str) -> bool:
        """Return whether an option belongs to this launcher."""
        return name in _OWN[self.launcher] or not any(name in own for own in _OWN.values())

    @property
    def limit_s(self) -> int | None:
        """The time limit in whole seconds, also of Slurm's D-HH:MM:SS and HH:MM:SS. A ValueError
        refuses a plain number, which is minutes to Slurm and seconds to our other options."""
        if self.time is None:
            return None
        text = str(self.time)
        if parts := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text, re.ASCII):
            days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
            text = f"{days * 86400 + hours * 3600 + minutes * 60 + seconds}s"
        elif re.fullmatch(r"[\d.]+", text, re.ASCII):
            raise ValueError(f"time = {self.time!r}: has no unit; write {text}m or {text}s")
        elif ":" in text:
            raise ValueError(f"time = {self.time!r}: write 30m, 2h, 12:00:00 or 1-00:00:00")
        return max(1, round(some_seconds("time", text)))

    @property
    def ranks_per_node(self) -> int:
        """The ranks of each host."""
        return self.nproc_per_node or self.gpus_per_node or 1

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node
