"""Flags of the records in ``meshwise.options``, and those that only the command line has."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import App, ArgumentCollection, CoercionError, Parameter, default_name_transform

from meshwise import options

# For all commands: no --no-FLAG, and help shows no empty default.
PLAIN = Parameter(negative=(), show_default=lambda usual: usual or None)
Json = Annotated[bool, Parameter(help="Print one JSON document on standard output.")]
Runs = Annotated[str, Parameter(help="Where run directories are.")]


def flags(record: Any, *hidden: str, lists: bool = False) -> Parameter:
    """Make a flag for every field of the record, except ``hidden`` ones and those only for Python.
    Flags that all verbs share come last. ``lists``: a flag may have several values after it."""
    fields = record.__dataclass_fields__.items()
    shared = vars(options.Started()) if issubclass(record, options.Started) else {}
    record.__dataclass_fields__ = dict(sorted(fields, key=lambda one: one[0] in shared))
    called = {name: rule.name for name, rule in options.rules(record).items()}
    none = "|".join([*hidden, *(name for name, flag in called.items() if not flag)])
    return Parameter(
        name="*",
        name_transform=lambda name: default_name_transform(called.get(name, name)),
        consume_multiple=(1, None) if lists else None,
        parse=re.compile(f"^(?!({none})$)"),
    )


def whole_numbers(_: App, __: object, arguments: ArgumentCollection) -> None:
    """Refuse 1.5 where a whole number belongs; cyclopts would round it."""
    for argument in arguments:
        for token in argument.tokens if argument.hint in (int, int | None, tuple[int, ...]) else ():
            if "." in token.value:
                raise CoercionError(token=token, target_type=int)


def alone(flag: str, given: Iterable[str]) -> None:
    """Refuse options beside a flag that lists and does nothing else."""
    if odd := sorted(given):
        raise ValueError(f"{odd[0]}: {flag} lists all there is; leave one of them out")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The address at which ranks of several hosts meet."""

    master_addr: str | None = None
    "With --master-port: where the ranks of several hosts meet, when no launcher says it."
    master_port: int | None = None
    "See --master-addr."

    def __post_init__(self) -> None:
        from meshwise.verbs import world

        world.meet_at(self.master_addr, self.master_port)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Size(Rendezvous):
    """The number of ranks, in three spellings, which must agree; and where they meet."""

    nproc: int | None = None
    "Ranks, one on each device: measure and run start them, or join those of a launcher."
    gpus: int | None = None
    "Another name of --nproc."
    num_hosts: int | None = None
    "Hosts; times --num-devices-per-host, a third way to give --nproc."
    num_devices_per_host: int | None = None
    "Devices of each host."

    @property
    def counts(self) -> dict[str, int | None]:
        """The spellings of the number, by name."""
        names = [name for name in Size.__dataclass_fields__ if not name.startswith("master")]
        return {name: getattr(self, name) for name in names}

    @property
    def ranks(self) -> int | None:
        """The number of ranks; ValueError if the flags do not agree."""
        from meshwise.verbs import world

        return world.num_ranks(**self.counts)


ANY = Size()
