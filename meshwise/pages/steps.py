"""Predicted beside measured: one ``run`` directory in, the two numbers and their error out; of a
plan without a prediction, and of inference, what was measured alone.

    error = predicted / measured - 1, for step time (median) and peak memory
    FLOP/s per device = step FLOPs (as torchtitan counts them) / median / devices; of a forward
        pass a third of a step's
    MFU = FLOP/s per device / datasheet peak; absent when the peak is not known

What was measured lies "within" a prediction when the interval holds it.
"""

import statistics
from pathlib import Path
from typing import Literal

from meshwise import stats, store
from meshwise.models import num_parameters, step_flops
from meshwise.spec import Plan, Prediction, Record, RunInfo, Sample, Step, Workload

CONVENTION = "torchtitan"


class Outcome(Record, kw_only=True):
    """A quantity as measured and, of a plan that was priced, as predicted with its interval."""

    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    measured: float
    error: float | None = None
    within: bool | None = None


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
    """What became of one plan."""
    plan = info.plan
    assert plan is not None, f"{info.run_id} holds no plan"
    gpu = plan.cluster.device.kind == "cuda"
    counted = "allocator's peak" if gpu else "high-water mark of tensor bytes"
    parameters = num_parameters(plan.model)
    found = next(((s, s.case.op) for s in samples if isinstance(s.case.op, Step)), None)
    if found is None or found[0].status != "ok":
        sample = None if found is None else found[0]
        return StepResult(
            run_id=info.run_id,
            status=info.status if sample is None else sample.status,
            reason=(info.reason if sample is None else sample.reason) or "it has not finished",
            plan=plan,
            num_parameters=parameters,
            memory_kind=counted,
            metrics={} if sample is None else sample.metrics,
        )
    sample, op = found
    median_s, low_s, high_s = stats.median_interval(sample.times_s)
    rate = _flops(op) / median_s / plan.layout.num_devices
    peak = plan.cluster.device.peak_flops.get(plan.dtype)
    return StepResult(
        run_id=info.run_id,
        status="ok",
        plan=plan,
        mode=op.mode,
        num_parameters=parameters,
        num_steps=len(sample.times_s),
        time=_time(plan.prediction, op, median_s),
        measured_low_s=low_s,
        measured_high_s=high_s,
        mean_s=statistics.fmean(sample.times_s),
        std_s=statistics.stdev(sample.times_s) if len(sample.times_s) > 1 else 0.0,
        tokens_per_s=_tokens(op) / median_s,
        flops_per_device_per_s=rate,
        mfu=rate / peak if peak else None,
        memory=_memory(plan.prediction, op, sample),
        memory_kind=counted,
        check_loss_error=_number(sample, "check_loss_error"),
        metrics=sample.metrics,
    )


def _flops(op: Step) -> float:
    """Of what one time is of: a step, a forward pass, or a pass of one token a sequence."""
    if op.mode == "train":
        return step_flops(op.model, op.workload)
    one = Workload(global_batch_size=op.workload.global_batch_size, seq_len=1)
    return step_flops(op.model, op.workload if op.mode == "infer" else one) / 3


def _tokens(op: Step) -> int:
    return op.workload.global_batch_size if op.mode == "decode" else op.workload.tokens


def _time(predicted: Prediction | None, op: Step, measured_s: float) -> Outcome:
    if predicted is None or op.mode != "train":
        return Outcome(measured=measured_s)
    return outcome(predicted.step_time_s, predicted.low_s, predicted.high_s, measured_s)


def _memory(predicted: Prediction | None, op: Step, sample: Sample) -> Outcome | None:
    measured = _number(sample, "peak_bytes")
    if not measured:
        return None
    if predicted is None or op.mode != "train":
        return Outcome(measured=measured)
    return outcome(
        predicted.peak_memory_bytes,
        predicted.memory_low_bytes,
        predicted.memory_high_bytes,
        measured,
    )


def _number(sample: Sample, name: str) -> float | None:
    value = sample.metrics.get(name)
    return float(value) if isinstance(value, float | int) else None
