"""run: execute a plan, and its runners-up if asked, one run directory each."""

import logging
from pathlib import Path

import msgspec

from meshwise import store
from meshwise.spec import Candidate, Plan, RunInfo, stages_of
from meshwise.verbs import files, job, trace

log = logging.getLogger("meshwise")

USUAL_STEPS = {"cuda": (20, 3), "cpu": (5, 1)}  # timed, and warm-up before them


def run(
    plan: Path | str = "plan.json",
    *,
    steps: int | None = None,
    warmup: int | None = None,
    rivals: int = 0,
    check: bool = False,
    data: str | None = None,
    seed: int = 0,
    nproc: int | None = None,
    runs: Path | str = "runs",
    nccl_trace: bool = False,
    dry_run: bool = False,
) -> list[Path] | list[Plan]:
    """Train ``steps`` steps of the plan; the run directories, or with ``dry_run`` the plans alone.

    ``rivals``: also run that many runners-up. ``check``: compare the losses of three steps with
    one device in fp32. ``steps`` are timed, ``warmup`` ones come before: 20 and 3 on GPUs, 5 and
    1 on CPUs, whose steps take seconds. ``data``: a token file, random tokens by default.
    ``nproc`` must be the number of devices that the plan is for. ``nccl_trace``, on the GPUs of
    one host: keep the calls of collectives that NCCL logs on each rank, and write how they compare
    with the plan's into ``nccl_check.json``; logging slows the steps.
    """
    chosen = files.take(plan, Plan)
    size = chosen.layout.num_devices
    if nproc not in (None, size):
        raise ValueError(
            f"nproc = {nproc}: {plan} is for {size} ranks; plan anew with --gpus {nproc}, "
            "or leave nproc out"
        )
    plans = [chosen, *_rivals(chosen, rivals)]
    usual = USUAL_STEPS[chosen.cluster.device.kind]
    steps, warmup = (
        default if given is None else given
        for given, default in zip((steps, warmup), usual, strict=True)
    )
    for name, value in (("steps", steps), ("warmup", warmup)):
        if value < 1:
            raise ValueError(f"{name} = {value}: must be >= 1")
    job.world_size(size, chosen.cluster, default=size)
    if seed < 0:
        raise ValueError(f"seed = {seed}: must be >= 0")
    for one in plans:
        _check_exists(one)
    _check_data(chosen, data, seed, steps + warmup + 1)
    if nccl_trace:
        trace.check_possible(chosen.cluster, check=check)
    if dry_run:
        return plans
    job.check_machine(chosen.cluster, size)
    from meshwise.engine.train import TrainRequest

    run_dirs: list[Path] = []
    for one in plans:
        slug = f"{one.model.name}-{one.layout.name}"
        size = one.layout.num_devices
        run_dir = job.created(runs, "run", slug, one.cluster, size, one)
        request = TrainRequest(
            plan=one,
            run_dir=str(run_dir),
            steps=steps,
            warmup=warmup,
            seed=seed,
            data=data,
            checked=check,
        )
        environment = trace.environment(run_dir) if nccl_trace else {}
        try:
            _start(run_dir, request, one, environment, finished=run_dirs)
        finally:
            trace.keep_calls(run_dir)
        if nccl_trace:
            trace.write_check(run_dir, one, request.total_steps)
        run_dirs.append(run_dir)
    return run_dirs


def _check_exists(plan: Plan) -> None:
    """Refuse a layout that cannot be, before any process starts."""
    from meshwise import search

    model, seq_len = plan.model, plan.workload.seq_len
    if seq_len > model.max_seq_len:
        raise ValueError(
            f"Workload.seq_len = {seq_len}: must be <= {model.max_seq_len}, the model's"
        )
    search.check(model, plan.workload, plan.layout)
    if plan.dtype not in ("fp32", "bf16"):
        raise ValueError(f"Plan.dtype = {plan.dtype!r}: training runs in fp32 or bf16")


def _check_data(plan: Plan, data: str | None, seed: int, steps: int) -> None:
    """Refuse a token file that the run could not use, before any process starts."""
    if data is not None:
        from meshwise.engine.data import batches

        batches(
            plan.workload,
            vocab=plan.model.vocab,
            steps=steps,
            seed=seed,
            file=data,
            rows=slice(0, 0),
        )


def _rivals(plan: Plan, count: int) -> list[Plan]:
    if not 0 <= count <= len(plan.runners_up):
        raise ValueError(
            f"rivals = {count}: the plan holds {len(plan.runners_up)} runners-up; "
            f"use 0 to {len(plan.runners_up)}, or plan with a larger --top"
        )
    return [_of_candidate(plan, candidate) for candidate in plan.runners_up[:count]]


def _of_candidate(plan: Plan, candidate: Candidate) -> Plan:
    """The runner-up as a plan of its own."""
    from meshwise.search.find import STRATEGY

    return msgspec.structs.replace(
        plan,
        layout=candidate.layout,
        prediction=candidate.prediction,
        stages=stages_of(candidate.layout, plan.model.layers, STRATEGY),
        runners_up=(),
        removed=(),
        nearest_infeasible=None,
    )


def _start(
    run_dir: Path,
    request: msgspec.Struct,
    plan: Plan,
    environment: dict[str, str],
    finished: list[Path],
) -> None:
    from meshwise import launch

    size = plan.layout.num_devices
    log.info("%s %s on %d ranks, into %s", plan.model.name, plan.layout.name, size, run_dir)
    kept = f"finished: {', '.join(map(str, finished)) or 'no layout'}"
    with job.recorded(run_dir, kept):
        launch.run(
            "meshwise.engine.train:run_ranks",
            request,  # type: ignore[arg-type]
            nproc=size,
            environment=environment,
        )
    if job.leads() and store.read(run_dir / "run.json", RunInfo).status == "running":
        store.finish(run_dir, "complete")
