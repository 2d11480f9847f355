"""Starting a job: a target function on every rank.

``run("meshwise.probe.sweep:measure_ranks", request, nproc=4)`` starts the ranks itself or, in a
process that torchrun or srun started, joins the others. Each rank calls ``target(ranks, request)``
with the request as JSON. Results are files; nothing comes back but ``RanksFailed``.
"""

from collections.abc import Mapping

import msgspec

from meshwise.launch.failures import RanksFailed
from meshwise.spec import Record

__all__ = ["RanksFailed", "run"]


def run(
    target: str,
    request: Record,
    *,
    nproc: int,
    threads: int | None = None,
    timeout_s: float = 30.0,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Call ``target`` on ``nproc`` ranks; RanksFailed says which rank died of what, in which case.

    ``threads`` is each rank's OMP_NUM_THREADS, by default what the environment says, else an
    equal share of the cores. ``timeout_s`` is the steady-state timeout of every collective.
    ``environment`` is set in each rank, with its number for ``{rank}``; not where a launcher
    started the ranks.
    """
    from meshwise import provenance, ranks
    from meshwise.launch.local import start
    from meshwise.launch.worker import Errand, find, serve

    place = ranks.environment()
    payload = msgspec.json.encode(request)
    if place is None:
        if nproc < 1:
            raise ValueError(f"nproc = {nproc}: must be >= 1")
        errand = Errand(
            target=target,
            request=msgspec.Raw(payload),
            threads=threads or provenance.threads_per_rank(nproc),
            timeout_s=timeout_s,
            environment=dict(environment or {}),
        )
        start(errand, nproc)
        return
    if environment:
        raise ValueError("a launcher started the ranks: set their environment there")
    if nproc != place["world_size"]:
        raise ValueError(
            f"nproc = {nproc}, but the launcher started {place['world_size']} ranks; "
            "leave nproc out or make them equal"
        )
    serve(find(target), payload, timeout_s=timeout_s)
