"""Runs a plan on the joined ranks: training steps timed one by one, their losses and peak memory.

In: a ``frame.Request``. Out: one Sample of op ``step`` in the run directory, written by rank 0:
``times_s`` per step (the largest over ranks), metrics ``losses`` (every step since the first,
mean over the global batch), ``peak_bytes`` and on GPUs ``reserved_bytes`` (largest over ranks),
``tokens_per_s`` (at the median step), ``num_parameters``, ``check_loss_error``; and the seconds of
the phases (largest over ranks): ``setup_s`` (meshes and communicators), ``data_s``, ``build_s``
(model and optimizer), ``compile_s`` (the warm-up steps, the first of which compile), ``timed_s``.
With ``profile`` two more steps say where the time goes: ``phases.json``, metrics of
``Phases.metrics``. With ``find_nonfinite``, if a loss is not finite, the run trains up to that step
anew and names the module where it begins.

Steps are timed back to back: on a GPU the host waits for nothing within a step and stays at most
one step ahead. Memory that ran out on one rank ends the run on all of them with status ``oom``.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwise import models, store
from meshwise.engine import check, checkpoint, frame, kernels, nonfinite, phases, step
from meshwise.engine.data import Batches, Rows, batches
from meshwise.engine.frame import Metrics, Request, no_pauses, timed
from meshwise.parallel import apply
from meshwise.ranks import Ranks
from meshwise.spec import Sample, StepLine, case_of
from meshwise.timing import clock, device_states, free


def total_steps(request: Request) -> int:
    """Warm-up, one more untimed step, and the timed ones."""
    return request.counts.warmup + 1 + request.counts.steps


def _batches(request: Request, steps: int, rows: Rows, first: int = 0) -> Batches:
    """Rows of the global batches from step ``first`` on."""
    plan, asked = request.plan, request.asked
    return batches(
        plan.model, plan.workload, steps=steps, seed=asked.seed, file=asked.data, rows=rows,
        first=first,
    )  # fmt: skip


Job = frame.Job


def run_ranks(ranks: Ranks, request: bytes) -> None:
    """Every rank calls it with the JSON of the same request."""
    frame.run(ranks, request, train)


def train(ranks: Ranks, request: Request) -> Sample:
    """The run as a sample; the same on every rank."""
    plan, asked = request.plan, request.asked

    def work(job: Job) -> dict[str, Any]:
        saving = checkpoint.saving(ranks, asked.save) if asked.save else nullcontext()
        with kernels.choose(plan.recipe, ranks.device, plan.dtype), saving as save:
            found = _measure(job, save)
            free(ranks.device)
            if "reason" in found and asked.find_nonfinite:
                found["reason"] += f"; {_first_nonfinite(job, len(found['metrics']['losses']))}"
        if asked.check and "reason" not in found:
            job.say("checking three steps against one device")
            with kernels.fp32_precision("ieee"):
                found |= _check(job, found["metrics"])
        return found

    return frame.sample(ranks, request, plan, case_of(plan, "train"), work)


class _Course:
    """Steps of a run, one after the other, and their losses, still on the device.

    The host is at most one step ahead of a GPU, so it knows how a step went when it has launched
    the next. Behind a loss that is not finite all ranks stop there: no step begins that any of them
    leaves out.
    """

    def __init__(self, ranks: Ranks, run: "_Run") -> None:
        self.ranks, self.run, self.ahead = ranks, run, int(ranks.device.type == "cuda")
        self.mark, self.elapsed_s = clock(ranks.device)
        self.ends, self.losses = list[Any](), list[Tensor]()
        # pinned, so that the device writes into it while the host goes on
        self.norms = torch.zeros(len(run.training.inputs), pin_memory=bool(self.ahead))

    def step(self, index: int, what: str = "") -> bool:
        """Run step ``index``; False if there is nothing left to train."""
        number = self.run.first + index
        self.ranks.at(f"step {number}{what}")
        if len(self.ends) > 1:
            self.ranks.synchronize(f"step {number - 2}", self.ends[-2])
        if self.is_lost(max(0, len(self.losses) - self.ahead)):
            return False
        self.losses.append(step.run(self.run.training, index))
        self.norms[index].copy_(self.run.training.norm, non_blocking=True)
        self.ends.append(self.mark())
        return True

    def is_lost(self, count: int | None = None) -> bool:
        """Whether the loss of any of the first ``count`` steps was not finite, on any rank."""
        return bool(self.norms[:count].isnan().any())


class _Run(NamedTuple):
    """A training under way. ``first``: the number of the first of its steps."""

    training: step.Training
    first: int
    done: Callable[[int], bool]  # called after each step; whether it took time of its own


def _measure(job: Job, save: checkpoint.Save | None) -> dict[str, Any]:
    """Warm up, time, and measure memory: the fields of the sample."""
    ranks, request, spent = job.ranks, job.request, job.spent
    run = _prepared(job, save)
    course = _Course(ranks, run)
    with timed(spent, "compile_s"):
        warm_up = functools.partial(_warm_up, job, course, request.counts.warmup)
        job.together("warm-up", warm_up, compiling=True)
    found: dict[str, Any] = {}
    times_s: list[float] = []
    profiled: dict[str, float] = {}
    peaks: dict[str, int] = {}
    if not course.is_lost():
        job.say(f"warmed up by {request.counts.warmup} steps; timing {request.counts.steps}")
        found["before"] = device_states(ranks)
        with timed(spent, "timed_s"), _unasked(run.training, request.plan.lowering):
            work = functools.partial(_timed_steps, job, course)
            times_s = job.together("timed steps", work)
        found["after"] = device_states(ranks)
    if not course.is_lost():
        if request.asked.profile:
            profiled = phases.record(job, run.training, Path(request.run_dir))
        job.say(f"{statistics.median(times_s):.3g} s a step; measuring memory")
        peaks = job.together("memory", functools.partial(_peak, job, run.training))
    mine = {
        "times_s": times_s,
        "losses": [float(loss) for loss in course.losses] if run.training.reports else [],
        "peaks": peaks | spent,
    }
    found |= _fields(request, run.first, ranks.gather(mine), lost=course.is_lost())
    found["metrics"] |= profiled
    return found


def _first_nonfinite(job: Job, index: int) -> str:
    """The module where the loss of the run's step ``index`` begins not to be finite."""
    ranks = job.ranks
    job.say("training up to that step again, to find where it begins")

    def find() -> str | None:
        run = _prepared(replace(job, spent={}), None)
        _warm_up(job, _Course(ranks, run), index)
        ranks.at(f"step {run.first + index}, module by module")
        return nonfinite.first_module(ranks, run.training, index)

    name = job.together("the search for the module", find, compiling=True)
    return f"first not finite: {name}" if name else "the second time all was finite"


def _prepared(job: Job, save: checkpoint.Save | None) -> _Run:
    """The data and the model, from the seed or from a checkpoint."""
    ranks, request, plan = job.ranks, job.request, job.plan
    first, folder, note = 0, request.asked.resume_from, ""
    if folder is not None:
        saved = checkpoint.checked(folder, plan, request.asked.seed)
        first, note = saved.step, f" ({saved.note})" if saved.note else ""
    with timed(job.spent, "data_s"):
        rows = step.rows(plan.layout, ranks.rank)
        mine = _batches(request, total_steps(request), rows, first)
    build = functools.partial(
        step.prepare, plan, job.place, mine, ranks.device, dtype=plan.dtype, seed=request.asked.seed
    )
    job.say_building()
    with timed(job.spent, "build_s"):
        training = job.together("building the model", build)
        if folder is not None:
            job.say(f"going on with step {first} of {folder}{note}")
            checkpoint.load(ranks, training, folder, plan, seed=request.asked.seed)
    return _Run(training, first, functools.partial(_save, job, save, training, first))


def _save(
    job: Job,
    save: checkpoint.Save | None,
    training: step.Training,
    first: int,
    index: int,
) -> bool:
    """Save behind the last step and where it is due; whether that was done."""
    request, number = job.request, first + index + 1
    is_due = request.asked.save_every is not None and number % request.asked.save_every == 0
    if save is None or not (is_due or index + 1 == total_steps(request)):
        return False
    if training.norm.isnan():  # what was saved before is worth more
        return False
    job.ranks.at(f"saving before step {number}")
    save(training, request.plan, step=number, seed=request.asked.seed)
    return True


def _fields(
    request: Request, first: int, replies: list[dict[str, Any]], *, lost: bool
) -> dict[str, Any]:
    """The fields of the sample from what every rank found; ``reason`` among them is a failure."""
    plan = request.plan
    rank_times_s = tuple(tuple(reply["times_s"]) for reply in replies)
    times_s = frame.slowest(rank_times_s)
    if request.asked.driver_time and times_s:
        times_s = (statistics.fmean(rank_times_s[0]),)
    losses = _mean_losses([reply["losses"] for reply in replies])
    finite = tuple(itertools.takewhile(math.isfinite, losses))
    metrics: Metrics = {
        **{name: max(r["peaks"][name] for r in replies) for name in replies[0]["peaks"]},
        "num_parameters": models.num_parameters(plan.model),
        "losses": finite,
    }
    if times_s:
        metrics["tokens_per_s"] = plan.workload.tokens / statistics.median(times_s)
    found = {"times_s": times_s, "rank_times_s": rank_times_s, "metrics": metrics}
    if len(finite) < len(losses):
        found["reason"] = f"the loss is {losses[len(finite)]} at step {first + len(finite)}"
    elif lost:
        found["reason"] = f"the gradients' norm is nan at step {first + len(losses) - 1}"
    return found


def _mean_losses(of_ranks: list[list[float | None]]) -> tuple[float, ...]:
    """Mean of every step's loss over the ranks that know it. What is not finite travelled as
    null."""
    steps = zip(*filter(None, of_ranks), strict=True)
    return tuple(statistics.fmean(math.nan if x is None else x for x in losses) for losses in steps)


def _unasked(training: step.Training, lowering: str) -> AbstractContextManager[None]:
    """Compiled code runs without the question whether it still fits, 5 % of a step that the host
    bounds, if each layer is one graph: then steps are like those of the warm-up."""
    built = training.pipeline
    layers = [layer for stage in built.stages.values() for layer in stage.module.layers.values()]
    if lowering != "compiled" or not all(apply.is_one_graph(x, built.layout) for x in layers):
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance(skip_guard_eval_unsafe=True)
    return stance


def _warm_up(job: Job, course: _Course, count: int) -> None:
    job.say(f"built; {count} steps of warm-up")
    for index in range(count):
        if not course.step(index, " (warm-up)"):
            return
        course.run.done(index)


def _timed_steps(job: Job, course: _Course) -> list[float]:
    """Seconds of every step after the untimed one behind the warm-up."""
    if job.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    request, run, spans, begin = job.request, course.run, list[tuple[Any, Any]](), None
    told = _Told(job, course)
    with no_pauses():
        for index in range(request.counts.warmup, len(run.training.inputs)):
            if not course.step(index):
                break
            if begin is not None:
                spans.append((begin, course.ends[-1]))
                told.up_to(len(spans) - 2 * job.on_gpu, spans)
            begin = course.mark() if run.done(index) else course.ends[-1]
    job.ranks.synchronize("the last step")
    told.up_to(len(spans), spans)
    return [course.elapsed_s(*span) for span in spans]


class _Told:
    """Tells rank 0's timed steps that are known to have ended: into ``steps.jsonl``, so that a run
    which breaks off keeps them, and on CPUs, where steps are long, to whoever waits."""

    def __init__(self, job: Job, course: _Course) -> None:
        self.job, self.run, self.course, self.request = job, course.run, course, job.request
        self.count = 0
        # its own stream: reading a loss would wait for the steps behind it
        self.stream = torch.cuda.Stream() if job.on_gpu else None

    def up_to(self, count: int, spans: list[tuple[Any, Any]]) -> None:
        losses = self.course.losses[self.request.counts.warmup + 1 :]
        for index in range(self.count, count if self.job.ranks.rank == 0 else 0):
            self._tell(index, self.course.elapsed_s(*spans[index]), losses[index])
        self.count = max(self.count, count)

    def _tell(self, index: int, time_s: float, loss: Tensor) -> None:
        known = None
        if self.run.training.reports:
            with torch.cuda.stream(self.stream):
                known = float(loss)
        number = self.run.first + self.request.counts.warmup + 1 + index
        finite = known if known is not None and math.isfinite(known) else None
        store.append_step(self.request.run_dir, StepLine(step=number, time_s=time_s, loss=finite))
        if self.stream is None:
            told = "" if known is None else f", loss {known:.4g} on rank 0"
            self.job.say(f"step {number}: {time_s:.3g} s{told}")


def _peak(job: Job, training: step.Training) -> dict[str, int]:
    last = functools.partial(step.run, training, len(training.inputs) - 1)
    return job.peak("a step traced for its memory", last, training.tensors())


def _check(job: Job, metrics: Metrics) -> dict[str, Any]:
    """Compare with one device; a difference beyond the tolerance makes the sample an error."""
    rows_of, seed = functools.partial(_batches, job.request), job.request.asked.seed
    try:
        error = check.loss_error(job.ranks, job.plan, job.place, rows_of, seed=seed)
    except torch.OutOfMemoryError as lacking:
        return {"reason": f"the check could not run: {lacking}"}
    tolerance = check.TOLERANCE[job.ranks.device.type]
    if math.isfinite(error):  # else JSON has null, which is no metric
        metrics["check_loss_error"] = error
    if error <= tolerance:
        return {}
    return {
        "reason": f"the plan is wrong: its losses differ from those of one device by {error:.2e} "
        f"relative, allowed are {tolerance:.0e}"
    }
