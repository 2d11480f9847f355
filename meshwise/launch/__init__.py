"""Start a job: call a target function on every rank.

``run("meshwise.probe.sweep:measure_ranks", request, nproc=4)`` starts the ranks itself. In a
process that torchrun or srun started, it joins the others. Each rank calls ``target(ranks,
request)`` with the request as JSON. Results are files; the only return is a ``RanksFailed`` error.

Ranks import this module before they watch for their parent's end, so it imports nothing heavy.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwise.launch.failed import RanksFailed
from meshwise.launcher import Job, on_one_host
from meshwise.patience import USUAL, Patience

if TYPE_CHECKING:
    from meshwise.launch.order import WorkOrder
    from meshwise.spec import Record

__all__ = ["RanksFailed", "run", "start"]


def run(
    target: str,
    request: "Record",
    *,
    nproc: int,
    threads: int | None = None,
    patience: Patience = USUAL,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Call ``target`` on ``nproc`` ranks. RanksFailed names the rank that died, the reason and the
    case.

    ``threads``: each rank's OMP_NUM_THREADS, by default the environment's, else an equal share of
    the cores. ``patience``: how long ranks wait for each other. ``environment``: variables for each
    rank, with its number for ``{rank}``; it must be empty if a launcher started the ranks."""
    import msgspec

    from meshwise import provenance
    from meshwise.launch.order import WorkOrder

    Job.here().check(nproc)
    if nproc < 1:
        raise ValueError(f"nproc = {nproc}: must be >= 1")
    order = WorkOrder(
        target=target,
        request=msgspec.Raw(msgspec.json.encode(request)),
        threads=threads or provenance.threads_per_rank(nproc),
        patience=patience,
        environment=dict(environment or {}),
    )
    start(order, nproc)


def start(order: "WorkOrder", nproc: int) -> None:
    """Carry out the order to its end: start all ranks here, or run as one of a launcher's ranks."""
    job = Job.here()
    if not job.launched:
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
        if on_one_host(job):
            os.environ.update({name: os.environ.get(name, v) for name, v in ranks.LOOPBACK.items()})
        serve(find(order.target), bytes(order.request), order.patience)
