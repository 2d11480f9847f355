"""Options that several verbs share."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

Json = Annotated[bool, Parameter(help="Print one JSON document on standard output.")]
DryRun = Annotated[bool, Parameter(help="Say what would be done, do and write nothing.")]
Runs = Annotated[str, Parameter(help="Where run directories are.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Size:
    """How many ranks: three spellings of one number, which must agree."""

    nproc: int | None = None
    "Ranks to start, or that the launcher has started."
    gpus: int | None = None
    "The same number, as GPUs."
    num_hosts: int | None = None
    "With --num-devices-per-host the same number again."
    num_devices_per_host: int | None = None
    "Devices of each host."

    @property
    def ranks(self) -> int | None:
        """The number that was meant; ValueError when two were."""
        from meshwise.verbs import job

        return job.num_ranks(
            nproc=self.nproc,
            gpus=self.gpus,
            num_hosts=self.num_hosts,
            num_devices_per_host=self.num_devices_per_host,
        )


ANY = Size()
