"""``meshwise measure``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

import meshwise
from meshwise.cli.options import ANY, MODELS, DryRun, Json, Runs, Size
from meshwise.cli.output import DONE, SOME_FAILED, emit
from meshwise.verbs import job

if TYPE_CHECKING:
    from meshwise.spec import Case

_HELP = (
    f"Model whose operations are measured, of {', '.join(MODELS)}; may be repeated. By default one "
    "that fills the cluster."
)
Models = Annotated[tuple[str, ...], Parameter(help=_HELP)]


def measure(
    what: Literal["profile"] = "profile",
    *,
    cluster: str = "cluster.toml",
    model: Models = (),
    lowering: Literal["eager", "compiled"] | None = None,
    budget: str | None = None,
    resume: bool = False,
    size: Size = ANY,
    runs: Runs = "runs",
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """Time operations on every rank, into a new run directory. Starts its ranks, or joins those
    of torchrun or srun.

    Parameters
    ----------
    what
        What to measure.
    cluster
        The machine; detected first when cluster.toml does not exist.
    lowering
        How a model's blocks are run; by default compiled on GPUs and eager on CPUs.
    budget
        Time to spend, as 120s or 2m; the most useful cases come first. By default all cases.
    resume
        Continue the newest run of this cluster without repeating finished cases.
    """
    found = meshwise.measure(
        what,
        cluster=cluster,
        model=model,
        lowering=lowering,
        budget=budget,
        resume=resume,
        nproc=size.ranks,
        runs=runs,
        dry_run=dry_run,
    )
    if isinstance(found, list):
        return _list(found, json)
    return _summarize(found, json) if job.leads() else DONE


def _list(cases: "list[tuple[Case, float]]", json: bool) -> int:
    from meshwise.pages import samples

    document = [{"id": case.id, "case": case, "about_s": about_s} for case, about_s in cases]
    emit(document, [samples.listing(cases)], json)
    return DONE


def _summarize(run_dir: Path, json: bool) -> int:
    from meshwise import store
    from meshwise.pages import samples

    info, measured, _ = store.load(run_dir)
    statuses = [sample.status for sample in measured]
    document = {
        "run_dir": str(run_dir),
        "status": info.status,
        "reason": info.reason,
        "cases": {status: statuses.count(status) for status in sorted(set(statuses))},
    }
    emit(document, [samples.state(info, measured), *samples.failed(measured)], json)
    return SOME_FAILED if {"error", "oom"} & set(statuses) else DONE
