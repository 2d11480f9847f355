"""The part of a cluster on which a command runs when it does not start its ranks itself."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from meshwise.options import Options, Positive, Range
from meshwise.options import Time as Duration

Launcher = Literal["slurm", "ray", "kubernetes"]
_CONTAINER = {"run_id", "container_image", "container_mounts", "time"}
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
    "SOURCE:TARGET, as the container sees it; may be repeated. The working directory always is."
    container_engine: Literal["pyxis", "apptainer"] = "pyxis"
    "Of Slurm: srun's plugin for enroot, or apptainer exec."
    partition: str | None = None
    "Of Slurm."
    account: str | None = None
    "Of Slurm."
    constraint: str | None = None
    "Of Slurm: features of the nodes."
    time: Duration | None = None
    "Time limit, as 30m or 2h."
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

    def takes(self, name: str) -> bool:
        """Return whether an option belongs to this launcher."""
        return name in _OWN[self.launcher] or not any(name in own for own in _OWN.values())

    @property
    def ranks_per_node(self) -> int:
        """The ranks of each host."""
        return self.nproc_per_node or self.gpus_per_node or 1

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node
