"""Starting a job: a target function on every rank.

``run("meshwise.probe.sweep:measure_ranks", request, nproc=4)`` starts the ranks itself or, in a
process that torchrun or srun started, joins the others. Each rank calls ``target(ranks, request)``
with the request as JSON. Results are files; nothing comes back but ``RanksFailed``.

Ranks import this module before they can be told that their parent is gone: it imports nothing
heavy.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from meshwise.patience import USUAL, Patience

if TYPE_CHECKING:
    from meshwise.launch.errand import Errand
    from meshwise.spec import Record

__all__ = ["Joined", "Local", "Place", "RanksFailed", "run", "start"]


class RanksFailed(RuntimeError):
    """A job ended because of ``rank``; ``details`` is that rank's traceback, if it wrote one."""

    def __init__(self, message: str, rank: int | None = None, details: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details

    @property
    def hung(self) -> bool:
        """Whether a rank stayed away, and none died or raised an error of its own."""
        return any(words in str(self) for words in ("had not arrived", "had stopped"))


class Local(NamedTuple):
    """Ranks on this host, which this process starts."""

    nproc: int


class Joined(NamedTuple):
    """A launcher, torchrun or srun, started this process as one of ``world_size`` ranks, all of
    them ``on_one_host`` or not."""

    world_size: int
    on_one_host: bool


Place = Local | Joined


def run(
    target: str,
    request: "Record",
    *,
    nproc: int,
    threads: int | None = None,
    patience: Patience = USUAL,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Call ``target`` on ``nproc`` ranks; RanksFailed says which rank died of what, in which case.

    ``threads`` is each rank's OMP_NUM_THREADS, by default what the environment says, else an
    equal share of the cores. ``patience`` is how long ranks wait for each other. ``environment`` is
    set in each rank, with its number for ``{rank}``; not where a launcher started the ranks.
    """
    import msgspec

    from meshwise import provenance
    from meshwise.launch.errand import Errand

    place = _place(nproc)
    errand = Errand(
        target=target,
        request=msgspec.Raw(msgspec.json.encode(request)),
        threads=threads or provenance.threads_per_rank(nproc),
        patience=patience,
        environment=dict(environment or {}),
    )
    start(errand, place)


def _place(nproc: int) -> Place:
    from meshwise import ranks

    found = ranks.environment()
    if found is None:
        if nproc < 1:
            raise ValueError(f"nproc = {nproc}: must be >= 1")
        return Local(nproc)
    if nproc != found["world_size"]:
        raise ValueError(
            f"nproc = {nproc}, but the launcher started {found['world_size']} ranks; "
            "leave nproc out or make them equal"
        )
    return Joined(nproc, ranks.on_one_host(found))


def start(errand: "Errand", place: Place) -> None:
    """Run the errand on all ranks of ``place`` to its end."""
    if isinstance(place, Local):
        from meshwise.launch import local

        local.start(errand, place.nproc)
        return
    import os

    from meshwise import ranks
    from meshwise.launch import cache, scratch
    from meshwise.launch.errand import find, serve

    if errand.environment:
        raise ValueError("a launcher started the ranks: set their environment there")
    with scratch.folder() as folder:
        os.environ.update(cache.variables(folder))
        if place.on_one_host:
            os.environ.update({name: os.environ.get(name, v) for name, v in ranks.LOOPBACK.items()})
        request = bytes(errand.request)
        serve(find(errand.target), request, errand.patience)
