"""run: execute a plan, and its runners-up if asked, or a model in a layout.

Each gets a run directory, which holds one sample of op ``step`` or says why there is none. The
suites of Alpa's benchmark are in ``verbs.suite``.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwise import provenance, store
from meshwise.launcher import Job
from meshwise.models import catalogue
from meshwise.options import keywords
from meshwise.options.run import USUAL, Course, RunOptions
from meshwise.spec import (
    Answers,
    Candidate,
    Layout,
    Plan,
    RunInfo,
    Sample,
    WideResNet,
    case_of,
    ending,
    stages_of,
)
from meshwise.verbs import files, given, memory, trace, world
from meshwise.verbs.recording import Recording

DEFAULT_PLAN = "plan.json"
log = logging.getLogger("meshwise")


@keywords(RunOptions)
def run(asked: RunOptions) -> list[Path] | list[Plan]:
    """Execute a plan, or a model in a layout; return run directories, or with ``dry_run`` plans.

    The plan is plan.json by default. The first ``rivals`` of its runners-up run too. Models,
    layouts and recipes may be records.
    """
    asked.check_mode()
    if asked.model is None:
        chosen = _planned(asked)
    elif asked.plan is not None:
        raise ValueError(f"model: {asked.plan} is a plan and has its model; give one of the two")
    else:
        asked = _prompted(asked) if asked.mode == "decode" else asked
        chosen = given.plan_of(asked)
    if asked.resume:
        going_on = _going_on(asked, chosen)
        if going_on is None:
            return []
        asked = going_on
    plans = [chosen, *_rivals(chosen, asked.rivals)]
    world.size(chosen.layout.num_devices, chosen.cluster, default=1)
    for one in plans:
        given.check(one)
        _check(one, asked)
    if asked.nccl_trace:
        trace.check_possible(chosen.cluster, check=asked.check)
    if asked.dry_run:
        for one in plans:
            if lacks := memory.shortage(one, asked):
                log.warning("%s does not fit: %s", one.layout.name, lacks)
        return plans
    for one in plans:
        memory.check(one, asked)
    world.check_machine(chosen.cluster, chosen.layout.num_devices)
    if chosen.prediction is not None and Job.here().leads:
        files.warn_if_expired(chosen.versions, provenance.here(chosen.cluster.device.kind))
    run_dirs: list[Path] = []
    for one in plans:
        run_dirs.append(_run(one, asked, run_dirs))
    return run_dirs


def _planned(asked: RunOptions) -> Plan:
    """Read the plan; refuse options that the plan sets itself."""
    for name in ("layout", "recipe", "global_batch_size", "seq_len", "dtype", "lowering"):
        if (value := getattr(asked, name)) is not None:
            raise ValueError(f"{name} = {value}: a plan has its own; give it with --model")
    plan = DEFAULT_PLAN if asked.plan is None else asked.plan
    chosen = files.take(plan, Plan)
    size = chosen.layout.num_devices
    if asked.nproc not in (None, size):
        raise ValueError(
            f"nproc = {asked.nproc}: {plan} is for {size} ranks; plan anew with --gpus "
            f"{asked.nproc}, or leave nproc out"
        )
    return chosen


def _prompted(asked: RunOptions) -> RunOptions:
    """Set decoding's defaults: as many prompts as the layout has rows, or one without a layout, and
    short enough to leave room for the new tokens."""
    model, new_tokens, seq_len = asked.model, asked.new_tokens, asked.seq_len
    assert model is not None
    chosen = catalogue.find_any(model)
    if isinstance(chosen, WideResNet):
        raise ValueError(f"model = {chosen.name!r}: images have no next token; name another")
    if new_tokens is None:
        new_tokens = min(USUAL["cpu"].new_tokens, chosen.max_seq_len // 2)
    layout = Layout() if asked.layout is None else files.record(asked.layout, Layout)
    rows = asked.global_batch_size
    if rows is None:
        rows = layout.batch_size
    # engine.decode makes its own microbatches
    size = max(1, rows // layout.dp)
    if seq_len is None:
        seq_len = max(layout.cp, min(128, chosen.max_seq_len - new_tokens))
    return dataclasses.replace(
        asked,
        model=chosen,
        layout=msgspec.structs.replace(layout, microbatch_size=size, num_microbatches=1),
        global_batch_size=rows,
        seq_len=seq_len,
        new_tokens=new_tokens,
    )


def _rivals(plan: Plan, count: int) -> list[Plan]:
    """Return the first runners-up as plans of their own: those that tie with the plan first. Of
    these, and of the rest, other layouts come before those that differ from an earlier one only in
    microbatches or recomputation."""
    if count > 0 and plan.prediction is None:
        raise ValueError(f"rivals = {count}: are a plan's, and this is none; leave it out")
    if not 0 <= count <= len(plan.runners_up):
        raise ValueError(
            f"rivals = {count}: the plan holds {len(plan.runners_up)} runners-up; "
            f"use 0 to {len(plan.runners_up)}, or plan with a larger --top"
        )
    seen, others, alike = {_alike(plan.layout)}, list[Candidate](), list[Candidate]()
    for candidate in plan.runners_up:
        (alike if _alike(candidate.layout) in seen else others).append(candidate)
        seen.add(_alike(candidate.layout))
    return [
        msgspec.structs.replace(
            plan,
            layout=candidate.layout,
            prediction=candidate.prediction,
            stages=stages_of(candidate.layout, plan.model),
            runners_up=(),
            removed=(),
            nearest_infeasible=None,
            answers=Answers(),
        )
        for candidate in sorted((*others, *alike), key=lambda one: not one.ties)[:count]
    ]


def _going_on(asked: RunOptions, plan: Plan) -> RunOptions | None:
    """Go on with the checkpoint in ``save``, if there is one, for the steps that are left of those
    asked for, warm-up and the untimed one behind it among them; for three at least, one of which is
    timed. None if none is left."""
    from meshwise.engine import checkpoint, folder

    assert asked.save is not None
    if not (Path(asked.save) / folder.JSON).exists():
        return asked
    counts = asked.counts(plan.cluster.device.kind)
    done = checkpoint.checked(asked.save, plan, asked.seed).step
    if (left := counts.warmup + 1 + counts.steps - done) <= 0:
        log.info(
            "%s has all steps that were asked for: %d; --steps asks for more", asked.save, done
        )
        return None
    warmup = min(counts.warmup, max(1, left - 2))
    steps = max(1, left - 1 - warmup)
    log.info("going on with step %d of %s; steps to time: %d", done, asked.save, steps)
    return dataclasses.replace(
        asked, resume_from=asked.save, resume=False, warmup=warmup, steps=steps
    )


def _alike(layout: Layout) -> tuple[Any, ...]:
    """Return the layout's fields, except those of microbatches and recomputation."""
    fewer = {"microbatch_size", "num_microbatches", "recompute", "recompute_layers"}
    return tuple(getattr(layout, name) for name in layout.__struct_fields__ if name not in fewer)


def _check(plan: Plan, asked: Course) -> None:
    """Refuse options that the ranks could not carry out, before any process starts."""
    if asked.mode == "decode":
        from meshwise.engine import decode, frame

        decode.plan_for(frame.RunRequest(plan=plan, run_dir="", asked=asked))
    first = 0
    if asked.resume_from is not None:
        from meshwise.engine import checkpoint

        first = checkpoint.checked(asked.resume_from, plan, asked.seed).step
    if asked.save is not None:
        files.check_writable([asked.save])
    if asked.data is not None:
        from meshwise.engine.data import batches

        batches(
            plan.model,
            plan.workload,
            steps=asked.counts(plan.cluster.device.kind).all_steps,
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

        device = torch.device(plan.cluster.device.kind)
        kernels.choose(plan.recipe, device, plan.dtype, plan.model)


def _run(plan: Plan, asked: RunOptions, finished: list[Path]) -> Path:
    recording = new_run(plan, asked)
    run_dir = recording.path
    environment = trace.environment(run_dir) if asked.nccl_trace else {}
    try:
        carry_out(plan, asked, recording, environment=environment, finished=finished)
    finally:
        trace.keep_calls(run_dir)
    if asked.nccl_trace:
        trace.write_check(run_dir, plan, asked.counts(plan.cluster.device.kind).all_steps)
    return run_dir


def new_run(plan: Plan, asked: RunOptions, suite: str = "") -> Recording:
    """Make the run directory of a plan, or of a case of a ``suite``."""
    slug = "-".join(filter(None, (suite, plan.model.name, plan.layout.name)))
    size, facts = plan.layout.num_devices, {"suite": suite} if suite else {}
    return Recording.begin(asked.runs, "run", slug, plan.cluster, size, plan, **facts)


def carry_out(
    plan: Plan,
    asked: RunOptions,
    recording: Recording,
    *,
    environment: Mapping[str, str] | None = None,
    finished: Sequence[Path] = (),
) -> None:
    """Start the ranks, or join those that a launcher started, and wait for their end.

    run.json records how it ended in every case. ``finished``: run directories to name on Ctrl-C.
    """
    from meshwise import launch
    from meshwise.engine.frame import RunRequest

    size, run_dir = plan.layout.num_devices, recording.path
    log.info("%s %s on %d ranks, into %s", plan.model.name, plan.layout.name, size, run_dir)
    kept = f"finished: {', '.join(map(str, finished)) or 'no layout'}"
    try:
        with recording.watched(kept):
            launch.run(
                "meshwise.engine.frame:run_ranks",
                RunRequest(plan=plan, run_dir=str(run_dir), asked=asked),
                nproc=size,
                patience=asked.patience,
                environment=environment,
            )
    except BaseException:
        if recording.leads and asked.mode == "train":
            _keep_steps(plan, run_dir)
        raise
    if recording.leads:
        _draw_timelines(plan, run_dir)
        if store.read(run_dir / "run.json", RunInfo).status == "running":
            samples = store.load(run_dir)[1]
            wrong = [one.reason for one in samples if one.status == "error"]
            store.finish(run_dir, *(("failed", wrong[0]) if wrong else ending(samples)))


def _keep_steps(plan: Plan, run_dir: Path) -> None:
    """Keep the steps of a training that broke off as a sample with the reason."""
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
    """Write the timelines of the profiled and the predicted step, in the same form."""
    if not (run_dir / "phases.json").exists():
        return
    from meshwise import timeline
    from meshwise.spec.phases import Phases

    spans = store.read(run_dir / "phases.json", Phases).spans
    timeline.write(run_dir / "timeline.json", plan.layout, spans)
    if plan.prediction is not None:
        timeline.write(run_dir / "predicted.json", plan.layout, timeline.predicted(plan))
