"""Options that several verbs share."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

Json = Annotated[bool, Parameter(help="Print one JSON document on standard output.")]
DryRun = Annotated[bool, Parameter(help="Say what would be done, do and write nothing.")]
Numbers = Annotated[tuple[int, ...], Parameter(consume_multiple=(1, None))]
Runs = Annotated[str, Parameter(help="Where run directories are.")]

# models.catalogue.names(), spelt out since --help imports no room; a test compares them
MODELS = (
    "gpt-30m", "gpt-125m", "gpt-350m", "gpt-760m", "gpt-1.3b", "gpt-2.6b", "gpt-6.7b", "gpt-15b",
    "gpt-39b", "gpt-76b",
)  # fmt: skip

DECODERS = (  # models.catalogue.decoder_names(), likewise
    "llama-2-7b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3.1-8b", "llama-3.1-70b",
    "llama-3.1-405b", "mixtral-8x7b", "mixtral-8x22b", "deepseek-v2-lite", "deepseek-v2",
    "deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b", "llama-4-maverick",
)  # fmt: skip


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Size:
    """How many ranks: three spellings of one number, which must agree."""

    nproc: int | None = None
    "Ranks, one on each device: measure and run start them, or join those of a launcher."
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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Waits:
    """How long ranks wait for each other. Longer by default where processes share cores."""

    timeout: str | None = None
    "In a collective or at a barrier; 30s by default."
    setup_timeout: str | None = None
    "At the start, and while ranks compile, load or save; 10m by default."


WAITS = Waits()
