"""Do what was asked of a plan on its ranks: training, inference or decoding.

In: a plan and a ``Course``. Out: a run directory that holds one sample of op ``step``, or says why
there is none.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwise import store
from meshwise.options.run import Course, Run
from meshwise.spec import Plan, RunInfo, Sample, case_of, ending
from meshwise.verbs import files, job

log = logging.getLogger("meshwise")


def check(plan: Plan, asked: Course) -> None:
    """Refuse, before any process starts, what the ranks could not do."""
    if asked.mode == "decode":
        from meshwise.engine import decode, frame

        decode.plan_for(frame.Request(plan=plan, run_dir="", asked=asked))
    first = 0
    if asked.resume_from is not None:
        from meshwise.engine import checkpoint

        first = checkpoint.checked(asked.resume_from, plan, asked.seed).step
    if asked.save is not None:
        files.check_writable([asked.save])
    if asked.data is not None:
        from meshwise.engine.data import batches

        counts = asked.counts(plan.cluster.device.kind)
        batches(
            plan.model,
            plan.workload,
            steps=counts.steps + counts.warmup + 1,
            seed=asked.seed,
            file=asked.data,
            rows=slice(0, 0),
            first=first,
        )
    if plan.recipe.fp32_precision == "tf32" and plan.cluster.device.kind != "cuda":
        raise ValueError(
            "Recipe.fp32_precision = 'tf32': it is for GPUs, and these are CPUs; use ieee"
        )
    if plan.recipe.attention != "auto" and asked.mode != "decode":
        import torch

        from meshwise.engine import kernels

        kernels.choose(plan.recipe, torch.device(plan.cluster.device.kind), plan.dtype)


def new_run(plan: Plan, asked: Run, suite: str = "") -> Path:
    """Make the run directory of a plan, or of a case of a ``suite``."""
    slug = "-".join(filter(None, (suite, plan.model.name, plan.layout.name)))
    size, facts = plan.layout.num_devices, {"suite": suite} if suite else {}
    return job.created(asked.runs, "run", slug, plan.cluster, size, plan, **facts)


def carry_out(
    plan: Plan,
    asked: Run,
    run_dir: Path,
    *,
    environment: Mapping[str, str] | None = None,
    finished: Sequence[Path] = (),
) -> None:
    """Start the ranks, or join those that a launcher started, and wait for their end.

    However it ends, run.json says so; ``finished`` is what to tell after Ctrl-C.
    """
    from meshwise import launch
    from meshwise.engine.frame import Request

    size = plan.layout.num_devices
    log.info("%s %s on %d ranks, into %s", plan.model.name, plan.layout.name, size, run_dir)
    kept = f"finished: {', '.join(map(str, finished)) or 'no layout'}"
    try:
        with job.recorded(run_dir, kept):
            launch.run(
                f"meshwise.engine.{asked.mode}:run_ranks",
                Request(plan=plan, run_dir=str(run_dir), asked=asked),
                nproc=size,
                patience=asked.patience,
                environment=environment,
            )
    except BaseException:
        if job.leads() and asked.mode == "train":
            _keep_steps(plan, run_dir)
        raise
    if job.leads():
        _draw_timelines(plan, run_dir)
        if store.read(run_dir / "run.json", RunInfo).status == "running":
            samples = store.load(run_dir)[1]
            wrong = [one.reason for one in samples if one.status == "error"]
            store.finish(run_dir, *(("failed", wrong[0]) if wrong else ending(samples)))


def _keep_steps(plan: Plan, run_dir: Path) -> None:
    """Keep the steps of a training that broke off as a sample that says why."""
    from meshwise.timing import METHOD_VERSION

    if not (steps := store.steps(run_dir)):
        return
    info, samples, _ = store.load(run_dir)
    if samples:
        return
    case = case_of(plan, "train")
    sample = Sample(
        case_id=case.id,
        case=case,
        status="error",
        reason=f"it broke off: {info.reason}",
        method_version=METHOD_VERSION,
        times_s=tuple(step.time_s for step in steps),
    )
    store.append(run_dir, sample)


def _draw_timelines(plan: Plan, run_dir: Path) -> None:
    """Draw a profiled step, and the predicted one, in one form."""
    if not (run_dir / "phases.json").exists():
        return
    from meshwise import timeline
    from meshwise.spec.phases import Phases

    spans = store.read(run_dir / "phases.json", Phases).spans
    timeline.write(run_dir / "timeline.json", plan.layout, spans)
    if plan.prediction is not None:
        timeline.write(run_dir / "predicted.json", plan.layout, timeline.predicted(plan))
