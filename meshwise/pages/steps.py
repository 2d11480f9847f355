"""Predicted beside measured: one ``run`` directory in, the two numbers and their error out; of a
plan without a prediction, and of inference, what was measured alone.

    error = predicted / measured - 1, for step time (median) and peak memory
    FLOP/s per device = step FLOPs (as torchtitan counts them) / median / devices; of a forward
        pass a third of a step's
    MFU = FLOP/s per device / datasheet peak; absent when the peak is not known

What was measured lies "within" a prediction when the interval holds it.

Tables of it: predicted beside measured where plans were priced, measured alone where not; of
inference and decoding their own; what failed and why.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from meshwise import stats, store
from meshwise.models import num_parameters, step_flops
from meshwise.pages.spread import each, number
from meshwise.pages.table import (
    ABSENT,
    Table,
    columns,
    filled,
    flops,
    interval,
    listed,
    percent,
)
from meshwise.pages.tables import CONVENTION, INTERVAL, flop_legend, headline, rate_unit
from meshwise.spec import Plan, Record, RunInfo, Sample, Step, Workload
from meshwise.spec.phases import ADDENDS
from meshwise.units import format_bytes, format_count, format_seconds

UNFINISHED = "it has not finished"
CHECK_LEGEND = (
    "Loss error: largest relative difference from one device over three steps, in fp32 (of images: "
    "fp64)."
)
INFER_LEGEND = (
    "Latency: from a batch's start on the first stage to its end on the last, one batch at a time. "
    "Streamed: time of a batch when they follow each other without a barrier."
)
LOOP_LEGEND = "The streamed loop alone was timed, by rank 0's clock: its time stands for both."
SLOWER_LEGEND = (
    "* streamed is slower than one by one: a single stage has nothing to overlap, the loop's begin "
    "and end count, and ranks that share cores hold each other up. More --steps tell."
)
STAGES_LEGEND = (
    "Own work: median over batches of a stage's own time, its slowest rank; weights and peak of "
    "the rank that has most."
)
PHASES_LEGEND = (
    "Means over ranks, which add up to the step, and the longest of a rank; phases.json has each. "
    "Exposed: moments when a collective runs and no computation does; bubble: waiting for a "
    "neighbour in the pipeline. timeline.json in the run directory opens in Perfetto."
)
SCALED_LEGEND = (
    "Of two steps behind the timed ones: the first, with marks between the parts, gives the times; "
    "the second, under torch's profiler, which slows it, what ran between marks, scaled to them."
)
LOSS_LEGEND = "Loss: of the run's first step, warm-up included, and of its last timed one."
PHASE_NAMES = ("forward", "backward", "optimizer", "exposed", "bubble", "other")  # of ADDENDS
DECODE_LEGEND = (
    "First token: from the common start until every sequence has its first. Then the time between "
    "tokens of a sequence; tokens/s of all sequences."
)


class Outcome(Record, kw_only=True):
    """A quantity as measured and, of a plan that was priced, as predicted with its interval."""

    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    measured: float
    error: float | None = None
    within: bool | None = None


def outcome(measured: float, predicted: float, low: float, high: float) -> Outcome:
    """Put the two side by side."""
    return Outcome(
        predicted=predicted,
        low=low,
        high=high,
        measured=measured,
        error=predicted / measured - 1,
        within=low <= measured <= high,
    )


class StepResult(Record, kw_only=True):
    """One run of a plan. What a failed run did not measure is None, and ``reason`` says why.

    Times are seconds: ``time`` holds the median, ``measured_low_s`` and ``measured_high_s`` its
    95 % interval, of fewer than 6 steps their range. ``memory`` is in bytes, as ``memory_kind``
    counts them. ``mode`` is that of the ``Step``: times are of a training step, a batch or a token;
    ``metrics`` are the sample's.
    """

    run_id: str
    status: str
    reason: str = ""
    plan: Plan
    mode: Literal["train", "infer", "decode"] = "train"
    num_parameters: int
    num_steps: int = 0
    time: Outcome | None = None
    measured_low_s: float | None = None
    measured_high_s: float | None = None
    mean_s: float | None = None
    std_s: float | None = None
    tokens_per_s: float | None = None
    flops_per_device_per_s: float | None = None
    flop_convention: str = CONVENTION
    mfu: float | None = None
    memory: Outcome | None = None
    memory_kind: str
    check_loss_error: float | None = None
    metrics: dict[str, float | tuple[float, ...]] = {}


def results(run_dirs: list[Path]) -> list[StepResult]:
    """The result of every directory that a ``run`` made."""
    loaded = [store.load(run_dir) for run_dir in run_dirs]
    return [result(info, samples) for info, samples, _ in loaded]


def result(info: RunInfo, samples: list[Sample]) -> StepResult:
    """The result of one run of a plan."""
    plan = info.plan
    assert plan is not None, f"{info.run_id} holds no plan"
    gpu = plan.cluster.device.kind == "cuda"
    usual = functools.partial(
        StepResult,
        run_id=info.run_id,
        plan=plan,
        num_parameters=num_parameters(plan.model),
        memory_kind="allocator's peak" if gpu else "high-water mark of tensor bytes",
    )
    found = next(((s, s.case.op) for s in samples if isinstance(s.case.op, Step)), None)
    if found is None:
        return usual(status=info.status, reason=info.reason or UNFINISHED)
    sample, op = found
    if sample.status != "ok":
        reason = sample.reason or UNFINISHED
        return usual(status=sample.status, reason=reason, metrics=sample.metrics)
    median_s, low_s, high_s = stats.median_interval(sample.times_s)
    rate = _flops(op) / median_s / plan.layout.num_devices
    peak = plan.cluster.device.peak_flops.get(plan.dtype)
    time, memory = Outcome(measured=median_s), None
    if peak_bytes := number(sample.metrics, "peak_bytes"):
        memory = Outcome(measured=peak_bytes)
    if (told := plan.prediction) is not None and op.mode == "train":
        time = outcome(median_s, told.step_time_s, told.low_s, told.high_s)
        ends = told.peak_memory_bytes, told.memory_low_bytes, told.memory_high_bytes
        memory = outcome(peak_bytes, *ends) if peak_bytes else None
    return usual(
        status="ok",
        mode=op.mode,
        num_steps=len(sample.times_s),
        time=time,
        measured_low_s=low_s,
        measured_high_s=high_s,
        mean_s=statistics.fmean(sample.times_s),
        std_s=statistics.stdev(sample.times_s) if len(sample.times_s) > 1 else 0.0,
        tokens_per_s=op.tokens / median_s,
        flops_per_device_per_s=rate,
        mfu=rate / peak if peak else None,
        memory=memory,
        check_loss_error=number(sample.metrics, "check_loss_error"),
        metrics=sample.metrics,
    )


def _flops(op: Step) -> float:
    """FLOPs of one timed unit: a step, a forward pass, or a pass of one token a sequence."""
    if op.mode == "train":
        return step_flops(op.model, op.workload)
    one = Workload(global_batch_size=op.workload.global_batch_size, seq_len=1)
    return step_flops(op.model, op.workload if op.mode == "infer" else one) / 3


def tables(results: Sequence[StepResult]) -> list[Table]:
    """Each mode's runs, those of one model and batch in one table; then what failed."""
    shown = []
    for mode, of_mode in (("train", _training), ("infer", _inference), ("decode", _decoding)):
        alike: dict[str, list[StepResult]] = {}
        for result in results:
            if result.time is not None and result.mode == mode:
                alike.setdefault(headline(result.plan), []).append(result)
        shown += [table for group in alike.values() for table in of_mode(group)]
    return [*shown, *failures(results)]


def _layout(result: StepResult) -> str:
    return result.plan.layout.name


def _training(done: Sequence[StepResult]) -> list[Table]:
    """Predicted beside measured, time then memory; how fast that is."""
    kinds = " and ".join(sorted({result.memory_kind for result in done}))
    priced = any(result.plan.prediction is not None for result in done)
    compared = ("layout", "predicted", "interval", "measured", "error")
    columns = compared if priced else ("layout", "measured")
    beside = "predicted beside measured" if priced else "measured"
    median = "median over steps of the slowest rank"
    legend: tuple[str, ...] = (f"Measured: {median}. Interval: {INTERVAL}.",)
    if priced:
        legend = (
            "error = predicted/measured - 1; * marks a measurement outside the prediction's "
            f"interval. Measured: {median}.",
            f"First interval: the prediction's. Second: {INTERVAL}.",
        )
    return [
        Table(
            f"Step time, {beside}: {headline(done[0].plan)}",
            (*columns, "interval", "mean", "std", "steps"),
            tuple(
                (_layout(r), *_outcome(r.time, format_seconds, priced), *_spread(r)) for r in done
            ),
            legend,
        ),
        Table(
            f"Peak memory, {beside}",
            columns,
            tuple((_layout(r), *_outcome(r.memory, format_bytes, priced)) for r in done),
            (f"Measured: largest over ranks, {kinds}.",),
        ),
        _speed(done),
        *_phases(done),
    ]


def _phases(done: Sequence[StepResult]) -> list[Table]:
    """The parts of a step, of the runs that were profiled."""
    rows = tuple(
        (
            _layout(result),
            said,
            *(format_seconds(_number(result, of + name)) for name in ADDENDS),
            format_seconds(_number(result, "phases_step_s")) if not of else "",
        )
        for result in done
        if "phases_step_s" in result.metrics
        for said, of in (("mean", ""), ("longest", "largest_"))
    )
    columns = ("layout", "ranks", *PHASE_NAMES, "step")
    legend = (PHASES_LEGEND, SCALED_LEGEND)
    return filled(Table("Where a step's time goes", columns, rows, legend, left=2))


def _speed(done: Sequence[StepResult]) -> Table:
    checked = any(result.check_loss_error is not None for result in done)
    learned = any(each(result.metrics, "losses") for result in done)
    unit = rate_unit(done[0].plan.model)
    if done[0].mode == "infer":
        unit += ", streamed" if _is_one_loop(done) else ", one by one"
    losses = {"first loss": _loss(0), "last loss": _loss(-1)}
    return listed(
        "As it ran",
        done,
        ("layout", _layout),
        *columns(format_count, {unit: "tokens_per_s"}),
        *columns(flops, {"FLOP/s a device": "flops_per_device_per_s"}),
        *columns(percent, {"MFU": "mfu"}),
        *columns(format_count, {"parameters": "num_parameters"}),
        *columns("{:.4f}".format, losses if learned else {}),
        *columns("{:.1e}".format, {"loss error": "check_loss_error"} if checked else {}),
        legend=(
            flop_legend(done[0].plan.model, done[0].mode),
            *(LOSS_LEGEND,) * learned,
            *(CHECK_LEGEND,) * checked,
        ),
    )


def _loss(index: int) -> Callable[[StepResult], float | None]:
    return lambda result: next(iter(each(result.metrics, "losses")[index:]), None)


def _outcome(
    outcome: Outcome | None, show: Callable[[float], str], priced: bool
) -> tuple[str, ...]:
    """Predicted, its interval, measured, error; without ``priced`` only the third."""
    if outcome is None:
        return (ABSENT,) * (4 if priced else 1)
    measured = show(outcome.measured)
    if not priced:
        return (measured,)
    if outcome.predicted is None:
        return ABSENT, ABSENT, measured, ABSENT
    assert outcome.low is not None and outcome.high is not None
    return (
        show(outcome.predicted),
        interval(outcome.low, outcome.high, show),
        measured + ("" if outcome.within else " *"),
        percent(outcome.error, sign=True),
    )


def spread(result: StepResult) -> str:
    """The interval of a measured time."""
    assert result.measured_low_s is not None and result.measured_high_s is not None
    return interval(result.measured_low_s, result.measured_high_s)


def _spread(result: StepResult) -> tuple[str, str, str, str]:
    assert result.mean_s is not None and result.std_s is not None
    means = format_seconds(result.mean_s), format_seconds(result.std_s)
    return spread(result), *means, str(result.num_steps)


def _inference(done: Sequence[StepResult]) -> list[Table]:
    slower = [_number(r, "streamed_s") > r.time.measured for r in done if r.time]
    rows = tuple(
        (
            _layout(result),
            *_outcome(result.time, format_seconds, False),
            *_spread(result),
            format_seconds(_number(result, "streamed_s")) + " *" * marked,
            format_count(_number(result, "tokens_per_s")),
        )
        for result, marked in zip(done, slower, strict=True)
    )
    columns = ("layout", "latency", "interval", "mean", "std", "batches", "streamed")
    median = f"Latency: median. Interval: {INTERVAL}."
    legend = (INFER_LEGEND, LOOP_LEGEND if _is_one_loop(done) else median)
    return [
        Table(
            f"Forward only: {headline(done[0].plan)}",
            (*columns, f"{rate_unit(done[0].plan.model)}, streamed"),
            rows,
            (*legend, SLOWER_LEGEND) if any(slower) else legend,
        ),
        Table(
            "Stages",
            ("layout", "stage", "own work", "weights", "peak memory"),
            tuple(row for result in done for row in _stages(result)),
            (STAGES_LEGEND,),
            left=2,
        ),
        _speed(done),
    ]


def _is_one_loop(done: Sequence[StepResult]) -> bool:
    """Whether the streamed batches alone were timed, by the driver's clock."""
    return all(r.time is not None and r.time.measured == r.metrics["streamed_s"] for r in done)


def _stages(result: StepResult) -> list[tuple[str, ...]]:
    names = ("stage_s", "stage_weight_bytes", "stage_peak_bytes")
    columns = (each(result.metrics, name) for name in names)
    return [
        (_layout(result), str(stage), format_seconds(own_s), *map(format_bytes, held))
        for stage, (own_s, *held) in enumerate(zip(*columns, strict=True))
    ]


def _decoding(done: Sequence[StepResult]) -> list[Table]:
    return [
        listed(
            f"Decoding: {headline(done[0].plan)}",
            done,
            ("layout", _layout),
            *columns(format_seconds, {"first token": "metrics.time_to_first_token_s"}),
            *columns(format_seconds, {"token": "time.measured"}),
            ("interval", spread),
            *columns(format_count, {"tokens/s": "metrics.tokens_per_s"}),
            *columns(format_bytes, {"weights": "metrics.weight_bytes"}),
            *columns(format_bytes, {"cache": "metrics.cache_bytes"}),
            legend=(DECODE_LEGEND, f"{INTERVAL}."),
        )
    ]


def _number(result: StepResult, name: str) -> float:
    return each(result.metrics, name)[0]


def failures(results: Sequence[StepResult]) -> list[Table]:
    """Runs without a measured step, with what ended them."""
    lost = [result for result in results if result.time is None]
    facts = {"layout": "plan.layout.name", "status": "status", "reason": "reason", "run": "run_id"}
    return filled(listed("Not measured", lost, *columns(str, facts), left=4))
