"""Predicted beside measured: one ``run`` directory in, the two numbers and their error out.

    error = predicted / measured - 1, for step time (median) and peak memory
    FLOP/s per device = step FLOPs (as torchtitan counts them) / median / devices
    MFU = FLOP/s per device / datasheet peak; absent when the peak is not known

What was measured lies "within" a prediction when the interval holds it.
"""

import statistics
from pathlib import Path

from meshwise import stats, store
from meshwise.models import num_parameters, step_flops
from meshwise.spec import Plan, Record, RunInfo, Sample, Step

CONVENTION = "torchtitan"


class Outcome(Record, kw_only=True):
    """A quantity as predicted, with its interval, and as measured."""

    predicted: float
    low: float
    high: float
    measured: float
    error: float
    within: bool


def outcome(predicted: float, low: float, high: float, measured: float) -> Outcome:
    """The two side by side."""
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
    95 % interval. ``memory`` is in bytes, as ``memory_kind`` counts them.
    """

    run_id: str
    status: str
    reason: str = ""
    plan: Plan
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


def results(run_dirs: list[Path]) -> list[StepResult]:
    """The result of every directory that a ``run`` made."""
    loaded = [store.load(run_dir) for run_dir in run_dirs]
    return [result(info, samples) for info, samples, _ in loaded]


def result(info: RunInfo, samples: list[Sample]) -> StepResult:
    """What became of one plan."""
    plan = info.plan
    assert plan is not None, f"{info.run_id} holds no plan"
    gpu = plan.cluster.device.kind == "cuda"
    counted = "allocator's peak" if gpu else "high-water mark of tensor bytes"
    parameters = num_parameters(plan.model)
    sample = next((s for s in samples if isinstance(s.case.op, Step)), None)
    if sample is None or sample.status != "ok":
        return StepResult(
            run_id=info.run_id,
            status=info.status if sample is None else sample.status,
            reason=(info.reason if sample is None else sample.reason) or "it has not finished",
            plan=plan,
            num_parameters=parameters,
            memory_kind=counted,
        )
    median_s, low_s, high_s = stats.median_interval(sample.times_s)
    prediction = plan.prediction
    rate = step_flops(plan.model, plan.workload) / median_s / plan.layout.num_devices
    peak = plan.cluster.device.peak_flops.get(plan.dtype)
    return StepResult(
        run_id=info.run_id,
        status="ok",
        plan=plan,
        num_parameters=parameters,
        num_steps=len(sample.times_s),
        time=outcome(prediction.step_time_s, prediction.low_s, prediction.high_s, median_s),
        measured_low_s=low_s,
        measured_high_s=high_s,
        mean_s=statistics.fmean(sample.times_s),
        std_s=statistics.stdev(sample.times_s) if len(sample.times_s) > 1 else 0.0,
        tokens_per_s=plan.workload.tokens / median_s,
        flops_per_device_per_s=rate,
        mfu=rate / peak if peak else None,
        memory=_memory(plan, sample),
        memory_kind=counted,
        check_loss_error=_number(sample, "check_loss_error"),
    )


def _memory(plan: Plan, sample: Sample) -> Outcome | None:
    measured = _number(sample, "peak_bytes")
    if not measured:
        return None
    predicted = plan.prediction
    return outcome(
        predicted.peak_memory_bytes,
        predicted.memory_low_bytes,
        predicted.memory_high_bytes,
        measured,
    )


def _number(sample: Sample, name: str) -> float | None:
    value = sample.metrics.get(name)
    return float(value) if isinstance(value, float | int) else None
