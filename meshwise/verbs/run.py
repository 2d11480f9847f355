"""run: execute a plan, and its runners-up if asked, or a model in a layout; a run directory each.

The suites of Alpa's benchmark are in ``verbs.suite``.
"""

from pathlib import Path
from typing import Unpack, get_args

import msgspec

from meshwise.models import catalogue
from meshwise.patience import Limit, parsed
from meshwise.spec import AnyModel, Candidate, Layout, Plan, WideResNet, stages_of
from meshwise.verbs import files, given, job, memory, order, trace
from meshwise.verbs.measure import DEFAULT_CLUSTER

USUAL_STEPS = {"cuda": (20, 3), "cpu": (5, 1)}  # timed, and warm-up before them
USUAL_TOKENS = 64  # decoded
USUAL_IN_FLIGHT = 4
DEFAULT_PLAN = "plan.json"


def run(
    plan: Path | str | None = None,
    *,
    model: AnyModel | str | None = None,
    cluster: Path | str = DEFAULT_CLUSTER,
    mode: order.Mode = "train",
    steps: int | None = None,
    warmup: int | None = None,
    rivals: int = 0,
    check: bool = False,
    data: Path | str | None = None,
    seed: int = 0,
    driver_time: bool = False,
    in_flight: int | None = None,
    new_tokens: int | None = None,
    save: Path | str | None = None,
    save_every: int | None = None,
    resume_from: Path | str | None = None,
    profile: bool = False,
    find_nonfinite: bool = False,
    nproc: int | None = None,
    timeout: Limit = None,
    setup_timeout: Limit = None,
    runs: Path | str = "runs",
    nccl_trace: bool = False,
    dry_run: bool = False,
    **options: Unpack[given.Options],
) -> list[Path] | list[Plan]:
    """Train ``steps`` steps of the plan (plan.json by default), or with ``mode`` infer batches or
    decode tokens; the run directories, or with ``dry_run`` the plans alone.

    ``model``: a name of any family, a Hugging Face config.json or a record, to run without a plan.
    ``options`` are of it: ``layout`` and ``recipe`` (records, JSON or files of it),
    ``global_batch_size``, ``seq_len``, ``dtype`` and ``lowering``, as in ``verbs.given.plan``.
    ``rivals``: also run that many of the plan's runners-up. ``check``: compare the losses of three
    steps with one device in fp32. ``steps`` are timed, ``warmup`` ones come before: 20 and 3 on
    GPUs, 5 and 1 on CPUs. ``data``: a token file, random tokens by default. ``driver_time``: time
    the whole loop from rank 0, of inference with ``in_flight`` batches under way. ``save``,
    ``save_every``, ``resume_from``: checkpoints. ``profile``: say where a step's time goes, with a
    timeline. ``find_nonfinite``: name the module where a loss that is not finite begins. ``nproc``
    must be the plan's number of devices. ``timeout``, ``setup_timeout``: how long ranks wait for
    each other. ``nccl_trace``, on the GPUs of one host: compare the collectives that NCCL logs with
    the plan's in ``nccl_check.json``, in slower steps.
    """
    _check_mode(mode, new_tokens, in_flight)
    if model is None:
        _refuse_beside_a_plan(options)
        chosen = _planned(DEFAULT_PLAN if plan is None else plan, nproc)
    elif plan is not None:
        raise ValueError(f"model: {plan} is a plan and has its model; give one of the two")
    else:
        if mode == "decode":
            model, options, new_tokens = _prompted(model, options, new_tokens)
        chosen = given.plan(
            model, cluster=cluster, nproc=nproc, training=mode == "train", **options
        )
    ordered = _order(
        chosen, mode=mode, steps=steps, warmup=warmup, seed=seed, data=_text(data), checked=check,
        driver_time=driver_time, save=_text(save), save_every=save_every,
        resume_from=_text(resume_from), profile=profile, find_nonfinite=find_nonfinite,
        in_flight=USUAL_IN_FLIGHT if in_flight is None else in_flight, new_tokens=new_tokens,
        patience=parsed(timeout, setup_timeout),
    )  # fmt: skip
    plans = [chosen, *_rivals(chosen, rivals)]
    job.world_size(chosen.layout.num_devices, chosen.cluster, default=1)
    for one in plans:
        given.check(one)
        ordered.check(one)
    if nccl_trace:
        trace.check_possible(chosen.cluster, check=check)
    return plans if dry_run else _all_carried_out(plans, ordered, runs, nccl_trace)


def _check_mode(mode: str, new_tokens: int | None, in_flight: int | None) -> None:
    if mode not in get_args(order.Mode):
        raise ValueError(f"mode = {mode!r}: must be one of {', '.join(get_args(order.Mode))}")
    if mode != "decode" and new_tokens is not None:
        raise ValueError("new_tokens: is of decoding; leave it out, or decode")
    if mode != "infer" and in_flight is not None:
        raise ValueError("in_flight: is of inference; leave it out, or infer")


def _all_carried_out(
    plans: list[Plan], ordered: order.Order, runs: Path | str, nccl_trace: bool
) -> list[Path]:
    for one in plans:
        memory.check(one, ordered)
    job.check_machine(plans[0].cluster, plans[0].layout.num_devices)
    run_dirs: list[Path] = []
    for one in plans:
        run_dirs.append(_carried_out(one, ordered, runs, run_dirs, nccl_trace))
    return run_dirs


def _carried_out(
    plan: Plan, ordered: order.Order, runs: Path | str, finished: list[Path], nccl_trace: bool
) -> Path:
    size = plan.layout.num_devices
    slug = f"{plan.model.name}-{plan.layout.name}"
    run_dir = job.created(runs, "run", slug, plan.cluster, size, plan)
    environment = trace.environment(run_dir) if nccl_trace else {}
    try:
        order.carry_out(
            plan, ordered, runs, run_dir=run_dir, environment=environment, finished=finished
        )
    finally:
        trace.keep_calls(run_dir)
    if nccl_trace:
        trace.write_check(run_dir, plan, ordered.warmup + 1 + ordered.steps)
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


def _refuse_beside_a_plan(options: given.Options) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} = {value}: a plan has its own; give it with --model")


def _text(path: Path | str | None) -> str | None:
    """Requests travel as JSON."""
    return None if path is None else str(path)


def _prompted(
    model: AnyModel | str, options: given.Options, new_tokens: int | None
) -> tuple[AnyModel, given.Options, int]:
    """Decoding is of the layout's prompts, one without it, short enough for what is to follow."""
    chosen = catalogue.find_any(model) if isinstance(model, str) else model
    if isinstance(chosen, WideResNet):
        raise ValueError(f"model = {chosen.name!r}: images have no next token; name another")
    if new_tokens is None:
        new_tokens = min(USUAL_TOKENS, chosen.max_seq_len // 2)
    layout, batch = options.get("layout"), options.get("global_batch_size")
    asked = Layout() if layout is None else given.record(layout, Layout)
    rows = asked.microbatch_rows * asked.num_microbatches if batch is None else batch
    size = max(1, rows // asked.dp)
    found: given.Options = {**options}
    # engine.decode makes its own microbatches
    found["layout"] = msgspec.structs.replace(asked, microbatch_size=size, num_microbatches=1)
    found["global_batch_size"] = rows
    if options.get("seq_len") is None:
        found["seq_len"] = max(asked.cp, min(128, chosen.max_seq_len - new_tokens))
    return chosen, found, new_tokens


def _order(
    plan: Plan,
    *,
    steps: int | None,
    warmup: int | None,
    new_tokens: int | None,
    **options: object,
) -> order.Order:
    """What was asked for, complete and in range."""
    usual = USUAL_STEPS[plan.cluster.device.kind]
    ordered = order.Order(
        steps=usual[0] if steps is None else steps,
        warmup=usual[1] if warmup is None else warmup,
        new_tokens=USUAL_TOKENS if new_tokens is None else new_tokens,
        **options,  # type: ignore[arg-type]
    )
    least = {"steps": 1, "warmup": 1, "in_flight": 1, "new_tokens": 2, "seed": 0, "save_every": 1}
    for name, smallest in least.items():
        value = getattr(ordered, name)
        if not isinstance(value, int | None):
            raise ValueError(f"{name} = {value!r}: must be a whole number")
        if value is not None and value < smallest:
            raise ValueError(f"{name} = {value}: must be >= {smallest}")
    if ordered.save_every is not None and ordered.save is None:
        raise ValueError(f"save_every = {ordered.save_every}: there is no folder; give --save")
    of_training = ("data", "checked", "save", "resume_from", "profile", "find_nonfinite")
    if ordered.mode != "train" and (odd := [n for n in of_training if getattr(ordered, n)]):
        name = "check" if odd[0] == "checked" else odd[0]
        raise ValueError(f"{name}: is of training; leave it out, or train")
    if ordered.mode == "decode" and ordered.driver_time:
        raise ValueError("driver_time: decoding has no other clock; leave it out")
    return ordered


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
