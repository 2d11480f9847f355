"""Runs a plan on the joined ranks: training steps timed one by one, their losses and peak memory.

In: a TrainRequest. Out: one Sample of op ``step`` in the run directory, written by rank 0:
``times_s`` per step (the largest over ranks), metrics ``losses`` (every step since the first,
mean over the global batch), ``peak_bytes`` and on GPUs ``reserved_bytes`` (largest over ranks),
``tokens_per_s`` (at the median step), ``num_parameters``, ``check_loss_error``.

Steps are timed back to back: on a GPU the host waits for nothing within a step and stays at most
one step ahead. Memory that ran out on one rank ends the run on all of them with status ``oom``.
"""

import functools
import gc
import itertools
import math
import statistics
import sys
from typing import Any

import msgspec
import torch
from torch import Tensor

from meshwise import models, store
from meshwise.engine import check, memory, step
from meshwise.engine.agree import together
from meshwise.engine.data import Rows, Tokens, batches
from meshwise.parallel import mesh
from meshwise.parallel.mesh import Place
from meshwise.ranks import Ranks
from meshwise.spec import Case, Plan, Record, Sample, Step
from meshwise.spec.record import NonNegative, Positive, PositiveFloat
from meshwise.timing import METHOD_VERSION, clock, device_states

Metrics = dict[str, float | tuple[float, ...]]


class TrainRequest(Record, kw_only=True):
    """What to run. ``warmup`` steps are set-up; one more untimed step precedes the timed ones."""

    plan: Plan
    run_dir: str
    steps: Positive = 20
    warmup: Positive = 2
    seed: NonNegative = 0
    data: str | None = None
    checked: bool = False  # compare with one device afterwards
    max_grad_norm: PositiveFloat = 1.0

    @property
    def total_steps(self) -> int:
        return self.warmup + 1 + self.steps

    def tokens(self, steps: int, rows: Rows) -> Tokens:
        """[steps, rows, seq + 1]: rows of the first global batches."""
        return batches(
            self.plan.workload,
            vocab=self.plan.model.vocab,
            steps=steps,
            seed=self.seed,
            file=self.data,
            rows=rows,
        )


def run_ranks(ranks: Ranks, request: bytes) -> None:
    """Every rank calls it with the JSON of the same TrainRequest."""
    ordered = msgspec.json.decode(request, type=TrainRequest)
    sample = train(ranks, ordered)
    if ranks.rank == 0:
        store.append(ordered.run_dir, sample)


def train(ranks: Ranks, request: TrainRequest) -> Sample:
    """The run as a sample; the same on every rank."""
    plan = request.plan
    op = Step(model=plan.model, workload=plan.workload, layout=plan.layout, dtype=plan.dtype)
    case = Case(op=op, lowering=plan.lowering, world_size=ranks.world_size)
    sample = Sample(
        case_id=case.id,
        case=case,
        status="error",
        reason="the run did not end",
        method_version=METHOD_VERSION,
    )
    filled = functools.partial(msgspec.structs.replace, sample)
    ranks.at("set-up")
    place = mesh.build(plan.layout, ranks.device.type)
    tokens = request.tokens(request.total_steps, step.rows(plan.layout, ranks.rank))
    try:
        found = _measure(ranks, place, request, tokens)
    except torch.OutOfMemoryError as error:
        return filled(status="oom", reason=str(error))
    check.free(ranks.device)
    if request.checked and "reason" not in found:
        _say(ranks, "checking three steps in fp32 against one device")
        found |= _check(ranks, place, request, found["metrics"])
    return filled(**{"status": "error" if "reason" in found else "ok", "reason": "", **found})


def _measure(ranks: Ranks, place: Place, request: TrainRequest, tokens: Tokens) -> dict[str, Any]:
    """Warm up, time, and measure memory: the fields of the sample."""
    plan = request.plan
    build = functools.partial(
        step.prepare,
        plan,
        place,
        tokens,
        ranks.device,
        dtype=plan.dtype,
        seed=request.seed,
        max_grad_norm=request.max_grad_norm,
    )
    compiling = plan.lowering == "compiled"
    _say(ranks, "building the model" + (", then compiling it" if compiling else ""))
    training = together(ranks, place, "building the model", build)
    warm_up = functools.partial(_warm_up, ranks, training, request.warmup)
    losses = together(ranks, place, "warm-up", warm_up, compiling=compiling)
    _say(ranks, f"warmed up by {request.warmup} steps; timing {request.steps}")
    before = device_states(ranks)
    timed = functools.partial(_timed_steps, ranks, training, request.warmup)
    times_s, more = together(ranks, place, "timed steps", timed)
    after = device_states(ranks)
    _say(ranks, f"{statistics.median(times_s):.3g} s a step; measuring memory")
    peaks = together(ranks, place, "memory", functools.partial(_peak, ranks, training))
    mine = {
        "times_s": times_s,
        "losses": [float(loss) for loss in losses + more] if training.reports else [],
        "peaks": peaks,
    }
    num_parameters = models.num_parameters(plan.model)
    found = _fields(plan, ranks.gather(mine), num_parameters)
    return {**found, "before": before, "after": after}


def _fields(plan: Plan, replies: list[dict[str, Any]], num_parameters: int) -> dict[str, Any]:
    """The fields of the sample from what every rank found; ``reason`` among them is a failure."""
    rank_times_s = tuple(tuple(reply["times_s"]) for reply in replies)
    times_s = tuple(max(of_step) for of_step in zip(*rank_times_s, strict=True))
    losses = _mean_losses([reply["losses"] for reply in replies])
    finite = tuple(itertools.takewhile(math.isfinite, losses))
    metrics: Metrics = {
        **{name: max(r["peaks"][name] for r in replies) for name in replies[0]["peaks"]},
        "tokens_per_s": plan.workload.tokens / statistics.median(times_s),
        "num_parameters": num_parameters,
        "losses": finite,
    }
    found = {"times_s": times_s, "rank_times_s": rank_times_s, "metrics": metrics}
    if len(finite) < len(losses):
        found["reason"] = f"the loss is {losses[len(finite)]} at step {len(finite)}"
    return found


def _say(ranks: Ranks, what: str) -> None:
    """Progress, for whoever waits: a plain line on rank 0's stderr."""
    if ranks.rank == 0:
        print(f"  {what}", file=sys.stderr, flush=True)


def _mean_losses(of_ranks: list[list[float | None]]) -> tuple[float, ...]:
    """Mean of every step's loss over the ranks that know it. What is not finite travelled as
    null."""
    steps = zip(*filter(None, of_ranks), strict=True)
    return tuple(statistics.fmean(math.nan if x is None else x for x in losses) for losses in steps)


def _warm_up(ranks: Ranks, training: step.Training, count: int) -> list[Tensor]:
    losses = []
    for index in range(count):
        ranks.at(f"step {index} (warm-up)")
        losses.append(step.run(training, index))
    return losses


def _timed_steps(
    ranks: Ranks, training: step.Training, first: int
) -> tuple[list[float], list[Tensor]]:
    """Seconds of every step after ``first``, and the losses since it, still on the device."""
    mark, elapsed_s = clock(ranks.device)
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    gc.collect()
    gc.disable()  # its pauses would be timed
    marks: list[Any] = []
    losses = []
    try:
        for index in range(first, len(training.inputs)):
            ranks.at(f"step {index}")
            if len(marks) > 1:
                ranks.synchronize(f"step {index - 2}", marks[-2])
            losses.append(step.run(training, index))
            marks.append(mark())
            if ranks.device.type == "cpu" and len(marks) > 1:  # a GPU's steps are not waited for
                took_s = elapsed_s(*marks[-2:])
                total = len(training.inputs) - first - 1
                _say(ranks, f"step {len(marks) - 1} of {total}: {took_s:.3g} s")
    finally:
        gc.enable()
    ranks.synchronize("the last step")
    return [elapsed_s(start, end) for start, end in itertools.pairwise(marks)], losses


def _peak(ranks: Ranks, training: step.Training) -> dict[str, float]:
    """Peak memory of this rank: of the timed steps on a GPU, of a traced one on a CPU."""
    if ranks.device.type == "cuda":
        return memory.cuda_peak()
    ranks.at("a step traced for its memory")
    last = functools.partial(step.run, training, len(training.inputs) - 1)
    return {"peak_bytes": memory.peak_tensor_bytes(last, training.tensors())}


def _check(ranks: Ranks, place: Place, request: TrainRequest, metrics: Metrics) -> dict[str, Any]:
    """Compare with one device; a difference beyond the tolerance makes the sample an error."""
    try:
        error = check.loss_error(
            ranks,
            request.plan,
            place,
            request.tokens,
            seed=request.seed,
            max_grad_norm=request.max_grad_norm,
        )
    except torch.OutOfMemoryError as lacking:
        return {"reason": f"the check could not run: {lacking}"}
    tolerance = check.TOLERANCE[ranks.device.type]
    metrics["check_loss_error"] = error
    if error <= tolerance:
        return {}
    return {
        "reason": f"the plan is wrong: its losses differ from those of one device by {error:.2e} "
        f"relative in fp32, allowed are {tolerance:.0e}"
    }
