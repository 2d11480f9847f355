"""measure: time operations on every rank, into a run directory."""

import logging
import math
from pathlib import Path
from typing import Literal

from meshwise import store
from meshwise.spec import Case, Cluster, Model, RunInfo, digest
from meshwise.units import parse_seconds
from meshwise.verbs import files, job
from meshwise.verbs.detect import detect, look

log = logging.getLogger("meshwise")

DEFAULT_CLUSTER = "cluster.toml"


def measure(
    what: str = "profile",
    *,
    cluster: Path | str = DEFAULT_CLUSTER,
    model: str | tuple[str, ...] = (),
    lowering: Literal["eager", "compiled"] | None = None,
    budget: str | float | None = None,
    resume: bool = False,
    nproc: int | None = None,
    runs: Path | str = "runs",
    dry_run: bool = False,
) -> Path | list[tuple[Case, float]]:
    """Measure what prices rest on, into a run directory whose path is returned. With ``dry_run``
    nothing is written, and the cases are returned with about how many seconds each would take.

    ``model``: names of the catalogue, by default the one that fills the cluster. ``budget``:
    seconds to spend (``120s``, ``2m``), all cases by default. ``resume`` continues the newest run
    of the same cluster and number of ranks. ``lowering`` of the blocks, and so of the plans made
    from them: compiled on GPUs and eager on CPUs unless given. A missing cluster.toml is detected
    first.
    """
    if what != "profile":
        raise ValueError(f"what = {what!r}: must be profile")
    budget_s = None if budget is None else parse_seconds(str(budget))
    if budget_s is not None and not 0 < budget_s < math.inf:
        raise ValueError(f"budget = {budget!r}: must be some time, as 60s; all cases without it")
    machine = _cluster(cluster, nproc, keep=not dry_run)
    size = job.world_size(nproc, machine, default=machine.num_devices)
    if lowering is None:
        lowering = "compiled" if machine.device.kind == "cuda" else "eager"
    cases = _cases(machine, files.several(model), size, lowering)
    if dry_run:
        from meshwise.probe import profile

        return [(case, profile.estimate_s(case, machine)) for case in cases]
    job.check_machine(machine, size)
    run_dir = _newest(runs, machine, size) if resume else _created(runs, what, machine, size)
    with job.locked(run_dir):
        skip = _measured(run_dir) if resume else frozenset()
        if all(case.id in skip for case in cases):
            log.info("all %d cases are measured already", len(cases))
            return run_dir
        if resume and job.leads():
            store.finish(run_dir, "running")
        _start(run_dir, cases, budget_s, skip, size)
    return run_dir


def _cluster(path: Path | str, nproc: int | None, *, keep: bool) -> Cluster:
    if Path(path).exists() or str(path) != DEFAULT_CLUSTER:
        return files.take(path, Cluster)
    log.info("%s does not exist: looking at this machine", path)
    return detect(nproc=nproc, out=path) if keep else look(nproc)


def _cases(
    cluster: Cluster,
    names: tuple[str, ...],
    size: int,
    lowering: Literal["eager", "compiled"],
) -> list[Case]:
    from meshwise.models import catalogue
    from meshwise.probe import profile

    models: tuple[Model, ...] = tuple(map(catalogue.get, names))
    return profile.cases(
        cluster,
        models=models or (catalogue.default_model(cluster),),
        world_size=size,
        dtype="bf16" if cluster.device.kind == "cuda" else "fp32",
        lowering=lowering,
    )


def _created(runs: Path | str, what: str, cluster: Cluster, size: int) -> Path:
    if not job.leads():
        return Path(runs)
    from meshwise import provenance

    return store.create(
        runs,
        verb="measure",
        slug=f"{what}-{cluster.name}",
        cluster=cluster,
        world_size=size,
        command=job.command("measure"),
        provenance=provenance.collect(nproc=size),
    )


def _newest(runs: Path | str, cluster: Cluster, size: int) -> Path:
    """The newest run of this cluster with this many ranks."""
    for run_dir in reversed(store.runs_of(runs, "measure")):
        info = store.read(run_dir / "run.json", RunInfo)
        if digest(info.cluster) == digest(cluster) and info.world_size == size:
            files.announce(run_dir, "the newest run")
            return run_dir
    raise ValueError(
        f"no measure run of cluster {cluster.name!r} with {size} ranks under {runs}; "
        "start one without --resume"
    )


def _measured(run_dir: Path) -> frozenset[str]:
    """The cases that need not be measured again."""
    _, samples = files.load(run_dir)
    return frozenset(sample.case_id for sample in samples if sample.status != "error")


def _start(
    run_dir: Path, cases: list[Case], budget_s: float | None, skip: frozenset[str], size: int
) -> None:
    from meshwise import launch
    from meshwise.probe.sweep import SweepRequest

    request = SweepRequest(
        cases=tuple(cases), run_dir=str(run_dir), budget_s=budget_s, skip=tuple(sorted(skip))
    )
    log.info("%d cases on %d ranks, into %s", len(cases) - len(skip), size, run_dir)
    with job.recorded(run_dir, f"what was measured is in {run_dir}, --resume continues"):
        launch.run("meshwise.probe.sweep:measure_ranks", request, nproc=size)
