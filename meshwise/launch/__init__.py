"""Start a job: call a target function on every rank.

``run("meshwise.probe.sweep:measure_ranks", request, nproc=4)`` starts the ranks itself or, in a
process that torchrun or srun started, joins the others. Each rank calls ``target(ranks, request)``
with the request as JSON. Results are files; nothing comes back but ``RanksFailed``.

Ranks import this module before they watch for their parent's end, so it imports nothing heavy.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwise.patience import USUAL, Patience

if TYPE_CHECKING:
    from meshwise.launch.order import WorkOrder
    from meshwise.ranks import Environment
    from meshwise.spec import Record

__all__ = ["RanksFailed", "run", "start"]


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
    set in each rank, with its number for ``{rank}``. Where a launcher started the ranks, it must be
    empty.
    """
    import msgspec

    from meshwise import provenance, ranks
    from meshwise.launch.order import WorkOrder

    launched = ranks.environment()
    if launched is None and nproc < 1:
        raise ValueError(f"nproc = {nproc}: must be >= 1")
    if launched is not None and nproc != launched["world_size"]:
        raise ValueError(
            f"nproc = {nproc}, but the launcher started {launched['world_size']} ranks; "
            "leave nproc out or make them equal"
        )
    order = WorkOrder(
        target=target,
        request=msgspec.Raw(msgspec.json.encode(request)),
        threads=threads or provenance.threads_per_rank(nproc),
        patience=patience,
        environment=dict(environment or {}),
    )
    start(order, nproc, launched)


def start(order: "WorkOrder", nproc: int, launched: "Environment | None") -> None:
    """Carry out the order on all ranks, to its end. ``launched``: this process is one of them."""
    if launched is None:
        from meshwise.launch import local

        local.start(order, nproc)
        return
    import os

    from meshwise import ranks
    from meshwise.launch import cache, scratch
    from meshwise.launch.order import find, serve

    if order.environment:
        raise ValueError("a launcher started the ranks: set their environment there")
    with scratch.folder() as folder:
        os.environ.update(cache.variables(folder))
        if ranks.on_one_host(launched):
            os.environ.update({name: os.environ.get(name, v) for name, v in ranks.LOOPBACK.items()})
        serve(find(order.target), bytes(order.request), order.patience)
