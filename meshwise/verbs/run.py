"""run: execute a plan, and its runners-up if asked, or a model in a layout; a run directory each.

The suites of Alpa's benchmark are in ``verbs.suite``.
"""

import dataclasses
from pathlib import Path

import msgspec

from meshwise.models import catalogue
from meshwise.options import keywords
from meshwise.options.run import USUAL_TOKENS, Run
from meshwise.spec import Candidate, Layout, Plan, WideResNet, stages_of
from meshwise.verbs import files, given, job, memory, order, trace

DEFAULT_PLAN = "plan.json"


@keywords(Run)
def run(asked: Run) -> list[Path] | list[Plan]:
    """Execute a plan, or a model in a layout: the run directories, or with ``dry_run`` the plans.

    The plan is plan.json by default; its runners-up run too where ``rivals`` says so. Models,
    layouts and recipes may be records.
    """
    asked.check_mode()
    if asked.model is None:
        _refuse_beside_a_plan(asked)
        chosen = _planned(DEFAULT_PLAN if asked.plan is None else asked.plan, asked.nproc)
    elif asked.plan is not None:
        raise ValueError(f"model: {asked.plan} is a plan and has its model; give one of the two")
    else:
        asked = _prompted(asked) if asked.mode == "decode" else asked
        chosen = given.plan(asked)
    plans = [chosen, *_rivals(chosen, asked.rivals)]
    job.world_size(chosen.layout.num_devices, chosen.cluster, default=1)
    for one in plans:
        given.check(one)
        order.check(one, asked)
    if asked.nccl_trace:
        trace.check_possible(chosen.cluster, check=asked.check)
    if asked.dry_run:
        return plans
    for one in plans:
        memory.check(one, asked)
    job.check_machine(chosen.cluster, chosen.layout.num_devices)
    run_dirs: list[Path] = []
    for one in plans:
        run_dirs.append(_carried_out(one, asked, run_dirs))
    return run_dirs


def _carried_out(plan: Plan, asked: Run, finished: list[Path]) -> Path:
    run_dir = order.new_run(plan, asked)
    environment = trace.environment(run_dir) if asked.nccl_trace else {}
    try:
        order.carry_out(plan, asked, run_dir, environment=environment, finished=finished)
    finally:
        trace.keep_calls(run_dir)
    if asked.nccl_trace:
        counts = asked.counts(plan.cluster.device.kind)
        trace.write_check(run_dir, plan, counts.warmup + 1 + counts.steps)
    return run_dir


def _planned(plan: Path | str, nproc: int | None) -> Plan:
    chosen = files.take(plan, Plan)
    size = chosen.layout.num_devices
    if nproc not in (None, size):
        raise ValueError(
            f"nproc = {nproc}: {plan} is for {size} ranks; plan anew with --gpus {nproc}, "
            "or leave nproc out"
        )
    return chosen


def _refuse_beside_a_plan(asked: Run) -> None:
    for name in ("layout", "recipe", "global_batch_size", "seq_len", "dtype", "lowering"):
        if (value := getattr(asked, name)) is not None:
            raise ValueError(f"{name} = {value}: a plan has its own; give it with --model")


def _prompted(asked: Run) -> Run:
    """Give decoding the layout's prompts, one without it, short enough for what is to follow."""
    model, new_tokens, seq_len = asked.model, asked.new_tokens, asked.seq_len
    chosen = catalogue.find_any(model) if isinstance(model, str) else model
    assert chosen is not None
    if isinstance(chosen, WideResNet):
        raise ValueError(f"model = {chosen.name!r}: images have no next token; name another")
    if new_tokens is None:
        new_tokens = min(USUAL_TOKENS, chosen.max_seq_len // 2)
    layout = Layout() if asked.layout is None else given.record(asked.layout, Layout)
    rows = asked.global_batch_size
    if rows is None:
        rows = layout.microbatch_rows * layout.num_microbatches
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
    if count > 0 and plan.prediction is None:
        raise ValueError(f"rivals = {count}: are a plan's, and this is none; leave it out")
    if not 0 <= count <= len(plan.runners_up):
        raise ValueError(
            f"rivals = {count}: the plan holds {len(plan.runners_up)} runners-up; "
            f"use 0 to {len(plan.runners_up)}, or plan with a larger --top"
        )
    return [_of_candidate(plan, candidate) for candidate in plan.runners_up[:count]]


def _of_candidate(plan: Plan, candidate: Candidate) -> Plan:
    """The runner-up as a plan of its own."""
    return msgspec.structs.replace(
        plan,
        layout=candidate.layout,
        prediction=candidate.prediction,
        stages=stages_of(candidate.layout, plan.model),
        runners_up=(),
        removed=(),
        nearest_infeasible=None,
    )
