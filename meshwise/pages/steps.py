"""Predicted beside measured: one ``run`` directory in, the two numbers and their error out; of a
plan without a prediction, and of inference, what was measured alone.

    error = predicted / measured - 1, for step time (median) and peak memory
    FLOP/s per device = step FLOPs (as torchtitan counts them) / median / devices; of a forward
        pass a third of a step's
    MFU = FLOP/s per device / datasheet peak; absent when the peak is not known

What was measured lies "within" a prediction when the interval holds it.
"""

import functools
import statistics
from pathlib import Path
from typing import Literal

from meshwise import stats, store
from meshwise.models import num_parameters, step_flops
from meshwise.pages.spread import number
from meshwise.pages.tables import CONVENTION
from meshwise.spec import Plan, Record, RunInfo, Sample, Step, Workload

UNFINISHED = "it has not finished"


class Outcome(Record, kw_only=True):
    """A quantity as measured and, of a plan that was priced, as predicted with its interval."""

    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    measured: float
    error: float | None = None
    within: bool | None = None


def outcome(measured: float, predicted: float, low: float, high: float) -> Outcome:
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
        tokens_per_s=_tokens(op) / median_s,
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


def _tokens(op: Step) -> int:
    return op.workload.global_batch_size if op.mode == "decode" else op.workload.tokens
