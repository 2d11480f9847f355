"""Compare predictions with measurements. In: a ``run`` directory. Out: both, and the error.
Plans without a prediction, and inference, have measurements only.

    error = predicted / measured - 1, for step time (median) and peak memory
    FLOP/s per device = step FLOPs (torchtitan's count) / median / devices; a forward pass has
        a third of a step's
    MFU = FLOP/s per device / datasheet peak; absent if the peak is not known

A measurement is "within" a prediction if the prediction's interval contains it.
"""

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from meshwise import stats, store
from meshwise.models import num_parameters, step_flops
from meshwise.pages.spread import each, number
from meshwise.pages.table import (
    ABSENT,
    Column,
    Show,
    Table,
    columns,
    filled,
    flops,
    grouped,
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
    "Loss error: largest relative difference from one device over three steps, in fp32 "
    "(image models: fp64)."
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
LOSS_LEGEND = "Loss: the run's first step, warm-up included, and its last timed one."
_STAGE = ("s", "weight_bytes", "peak_bytes")
PHASE_NAMES = ("forward", "backward", "optimizer", "exposed", "bubble", "other")  # of ADDENDS
DECODE_LEGEND = (
    "First token: from the common start until every sequence has its first. Then the time between "
    "tokens of a sequence; tokens/s of all sequences."
)


class MeasuredQuantity(Record, kw_only=True):
    """A measured quantity and, for a priced plan, its prediction with interval."""

    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    measured: float
    error: float | None = None
    within: bool | None = None


def _beside(measured: float, predicted: float, low: float, high: float) -> MeasuredQuantity:
    return MeasuredQuantity(
        predicted=predicted,
        low=low,
        high=high,
        measured=measured,
        error=predicted / measured - 1,
        within=low <= measured <= high,
    )


class StepResult(Record, kw_only=True):
    """One run of a plan. Fields that a failed run did not measure are None; ``reason`` says why.

    Times are seconds of a training step, a batch or a token, by ``mode``. ``time``: the median.
    ``measured_low_s``, ``measured_high_s``: its 95 % interval, or the range of fewer than 6 steps.
    ``memory``: bytes, counted as ``memory_kind`` says. ``metrics``: the sample's.
    """

    run_id: str
    status: str
    reason: str = ""
    plan: Plan
    mode: Literal["train", "infer", "decode"] = "train"
    num_parameters: int
    num_steps: int = 0
    time: MeasuredQuantity | None = None
    measured_low_s: float | None = None
    measured_high_s: float | None = None
    mean_s: float | None = None
    std_s: float | None = None
    tokens_per_s: float | None = None
    flops_per_device_per_s: float | None = None
    flop_convention: str = CONVENTION
    mfu: float | None = None
    memory: MeasuredQuantity | None = None
    memory_kind: str
    check_loss_error: float | None = None
    metrics: dict[str, float | tuple[float, ...]] = {}


def results(run_dirs: list[Path]) -> list[StepResult]:
    """Return the result of every directory that a ``run`` made."""
    loaded = [store.load(run_dir) for run_dir in run_dirs]
    return [result(info, samples) for info, samples, _ in loaded]


def result(info: RunInfo, samples: list[Sample]) -> StepResult:
    """Return the result of one run of a plan."""
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
    time, memory = MeasuredQuantity(measured=median_s), None
    if peak_bytes := number(sample.metrics, "peak_bytes"):
        memory = MeasuredQuantity(measured=peak_bytes)
    if (told := plan.prediction) is not None and op.mode == "train":
        time = _beside(median_s, told.step_time_s, told.low_s, told.high_s)
        memory = _beside(peak_bytes, *told.allocated_bytes) if peak_bytes else None
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
    """Return the FLOPs of the timed work: a step, a forward pass, or one token per sequence."""
    if op.mode == "train":
        return step_flops(op.model, op.workload)
    one = Workload(global_batch_size=op.workload.global_batch_size, seq_len=1)
    return step_flops(op.model, op.workload if op.mode == "infer" else one) / 3


def tables(results: Sequence[StepResult]) -> list[Table]:
    """Show each mode's runs, with one table per model and batch; then failures."""
    done = [result for result in results if result.time is not None]
    shown = []
    for mode, of_mode in (("train", _training), ("infer", _inference), ("decode", _decoding)):
        same = (result for result in done if result.mode == mode)
        for title, alike in grouped(same, lambda result: headline(result.plan)).items():
            shown += of_mode(title, alike)
    return [*shown, *failures(results)]


def _training(title: str, done: Sequence[StepResult]) -> list[Table]:
    """Show time and memory, predicted beside measured; then rates."""
    kinds = " and ".join(sorted({result.memory_kind for result in done}))
    priced = any(result.plan.prediction is not None for result in done)
    beside = "predicted beside measured" if priced else "measured"
    median = "median over steps of the slowest rank"
    legend: tuple[str, ...] = (f"Measured: {median}. Interval: {INTERVAL}.",)
    if priced:
        legend = (
            "error = predicted/measured - 1; * marks a measurement outside the prediction's "
            f"interval. Measured: {median}.",
            f"First interval: the prediction's. Second: {INTERVAL}.",
        )
    time = (*_quantity("time", format_seconds, priced), *_SPREAD, ("steps", "num_steps"))
    memory = _quantity("memory", format_bytes, priced)
    largest = f"Measured: largest over ranks, {kinds}."
    return [
        listed(f"Step time, {beside}: {title}", done, _LAYOUT, *time, legend=legend),
        listed(f"Peak memory, {beside}", done, _LAYOUT, *memory, legend=(largest,)),
        _speed(done),
        *_phases(done),
    ]


def _quantity(name: str, show: Show, priced: bool) -> tuple[Column, ...]:
    """Return columns of a quantity: predicted, interval, measured, error; unpriced: measured."""

    def told(one: MeasuredQuantity) -> str:
        if one.low is None or one.high is None:
            return ABSENT
        return interval(one.low, one.high, show)

    def measured(one: MeasuredQuantity) -> str:
        return show(one.measured) + " *" * (one.within is False)

    if not priced:
        return (("measured", name, measured),)
    return (
        ("predicted", f"{name}.predicted", show),
        ("interval", name, told),
        ("measured", name, measured),
        ("error", f"{name}.error", lambda error: percent(error, sign=True)),
    )


def spread(result: StepResult) -> str:
    """Show the interval of a measured time."""
    assert result.measured_low_s is not None and result.measured_high_s is not None
    return interval(result.measured_low_s, result.measured_high_s)


_LAYOUT: Column = ("layout", "plan.layout.name")
_SPREAD: tuple[Column, ...] = (
    ("interval", spread),
    ("mean", "mean_s", format_seconds),
    ("std", "std_s", format_seconds),
)


def _phases(done: Sequence[StepResult]) -> list[Table]:
    """Show the parts of a step, for the runs that were profiled."""
    rows = tuple(
        (
            result.plan.layout.name,
            said,
            *(format_seconds(each(result.metrics, of + name)[0]) for name in ADDENDS),
            format_seconds(each(result.metrics, "phases_step_s")[0]) if not of else "",
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
    losses: tuple[Column, ...] = (
        ("first loss", lambda result: (*each(result.metrics, "losses"), None)[0], "{:.4f}".format),
        ("last loss", lambda result: (None, *each(result.metrics, "losses"))[-1], "{:.4f}".format),
    )
    error: Column = ("loss error", "check_loss_error", "{:.1e}".format)
    return listed(
        "As it ran",
        done,
        _LAYOUT,
        (unit, "tokens_per_s", format_count),
        ("FLOP/s a device", "flops_per_device_per_s", flops),
        ("MFU", "mfu", percent),
        ("parameters", "num_parameters", format_count),
        *losses * learned,
        *(error,) * checked,
        legend=(
            flop_legend(done[0].plan.model, done[0].mode),
            *(LOSS_LEGEND,) * learned,
            *(CHECK_LEGEND,) * checked,
        ),
    )


def _inference(title: str, done: Sequence[StepResult]) -> list[Table]:
    def is_slower(result: StepResult) -> bool:
        streamed_s = each(result.metrics, "streamed_s")[0]
        return result.time is not None and streamed_s > result.time.measured

    def streamed(result: StepResult) -> str:
        return format_seconds(each(result.metrics, "streamed_s")[0]) + " *" * is_slower(result)

    stages = [
        (result, stage, *each_stage)
        for result in done
        for stage, each_stage in enumerate(
            zip(*(each(result.metrics, f"stage_{name}") for name in _STAGE), strict=True)
        )
    ]
    median = f"Latency: median. Interval: {INTERVAL}."
    said = LOOP_LEGEND if _is_one_loop(done) else median
    return [
        listed(
            f"Forward only: {title}",
            done,
            _LAYOUT,
            ("latency", "time.measured", format_seconds),
            *_SPREAD,
            ("batches", "num_steps"),
            ("streamed", streamed),
            (f"{rate_unit(done[0].plan.model)}, streamed", "metrics.tokens_per_s", format_count),
            legend=(INFER_LEGEND, said, *(SLOWER_LEGEND,) * any(map(is_slower, done))),
        ),
        listed(
            "Stages",
            stages,
            ("layout", lambda row: row[0].plan.layout.name),
            ("stage", lambda row: row[1]),
            ("own work", lambda row: row[2], format_seconds),
            ("weights", lambda row: row[3], format_bytes),
            ("peak memory", lambda row: row[4], format_bytes),
            legend=(STAGES_LEGEND,),
            left=2,
        ),
        _speed(done),
    ]


def _is_one_loop(done: Sequence[StepResult]) -> bool:
    """Return whether only the streamed loop was timed, by the driver's clock."""
    return all(r.time is not None and r.time.measured == r.metrics["streamed_s"] for r in done)


def _decoding(title: str, done: Sequence[StepResult]) -> list[Table]:
    return [
        listed(
            f"Decoding: {title}",
            done,
            _LAYOUT,
            ("first token", "metrics.time_to_first_token_s", format_seconds),
            ("token", "time.measured", format_seconds),
            ("interval", spread),
            ("tokens/s", "metrics.tokens_per_s", format_count),
            ("weights", "metrics.weight_bytes", format_bytes),
            ("cache", "metrics.cache_bytes", format_bytes),
            legend=(DECODE_LEGEND, f"{INTERVAL}."),
        )
    ]


def failures(results: Sequence[StepResult]) -> list[Table]:
    """List runs without a measured step, and why they ended."""
    lost = [result for result in results if result.time is None]
    facts = columns(str, "status reason") + columns(str, {"run": "run_id"})
    return filled(listed("Not measured", lost, _LAYOUT, *facts, left=4))
