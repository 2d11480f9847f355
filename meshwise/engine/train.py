"""Run a plan on the joined ranks: training steps timed one by one, their losses and peak memory.

In: a ``frame.RunRequest``. Out: one Sample of op ``step`` in the run directory, written by rank 0.
``times_s``: per step (the largest over ranks). Metrics: ``losses`` (every step since the first,
mean over the global batch), ``peak_bytes`` and on GPUs ``reserved_bytes`` (largest over ranks),
``tokens_per_s`` (at the median step), ``num_parameters``, ``check_loss_error``; and the seconds of
the phases (largest over ranks): ``setup_s`` (meshes and communicators), ``data_s``, ``build_s``
(model and optimizer), ``compile_s`` (warm-up steps; the first ones compile), ``timed_s``. With
``profile`` two more steps show where the time goes: ``phases.json``, metrics of
``Phases.metrics``. With ``find_nonfinite``, if a loss is not finite, the run trains up to that step
again and names the module where it begins.

Steps are timed back to back. On a GPU the host never waits within a step and stays at most one
step ahead. If one rank runs out of memory, the run ends on all ranks with status ``oom``.
"""

import contextlib
import functools
import itertools
import math
import signal
import statistics
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwise import models, signals, store
from meshwise.engine import check, checkpoint, frame, kernels, nonfinite, phases, step
from meshwise.engine.data import Batches, Rows, batches
from meshwise.engine.frame import Metrics, RankJob, RunRequest, no_pauses, timed
from meshwise.parallel import apply
from meshwise.ranks import Ranks
from meshwise.spec import Sample, StepLine, case_of
from meshwise.timing import clock, device_states, free


def measure(ranks: Ranks, request: RunRequest) -> Sample:
    """Return the run as a sample, the same on every rank."""
    plan, asked = request.plan, request.asked

    def work(job: RankJob) -> dict[str, Any]:
        saving = checkpoint.saving(ranks, asked.save) if asked.save else nullcontext()
        with kernels.choose(plan.recipe, ranks.device, plan.dtype, plan.model), saving as save:
            found = _trained(job, save)
            free(ranks.device)
            if "reason" in found and asked.find_nonfinite:
                found["reason"] += f"; {_first_nonfinite(job, len(found['metrics']['losses']))}"
        if asked.check and "reason" not in found:
            job.say("checking three steps against one device")
            with kernels.fp32_precision("ieee"):
                found |= _check(job, found["metrics"])
        return found

    return frame.sample(ranks, request, plan, case_of(plan, "train"), work)


def _batches(request: RunRequest, steps: int, rows: Rows, first: int = 0) -> Batches:
    """Return rows of the global batches from step ``first`` on."""
    plan, asked = request.plan, request.asked
    return batches(
        plan.model, plan.workload, steps=steps, seed=asked.seed, file=asked.data, rows=rows,
        first=first,
    )  # fmt: skip


class _StepLoop:
    """The steps of a training, one after the other, and their losses, still on the device.
    ``first``: the number of the first step.

    The host is at most one step ahead of a GPU, so it knows a step's result once it has launched
    the next. After a loss that is not finite, all ranks must stop at the same step. Otherwise some
    would wait in a step that others skip.
    """

    def __init__(
        self, job: RankJob, training: step.TrainingState, first: int, save: checkpoint.Save | None
    ) -> None:
        self.job, self.training, self.first, self.save = job, training, first, save
        self.end = _NoticedEnd(job.ranks)
        self.mark, self.elapsed_s = clock(job.ranks.device)
        self.ends, self.losses = list[Any](), list[Tensor]()
        # pinned, so that the device writes into it while the host continues
        self.norms = torch.zeros(len(training.inputs), pin_memory=job.on_gpu)

    def step(self, index: int, what: str = "") -> bool:
        """Run step ``index``. Return False without running it if an earlier loss was not finite."""
        ranks, number = self.job.ranks, self.first + index
        ranks.at(f"step {number}{what}")
        if len(self.ends) > 1:
            ranks.synchronize(f"step {number - 2}", self.ends[-2])
        if self.is_lost(max(0, len(self.losses) - self.job.on_gpu)):
            return False
        self.losses.append(step.run(self.training, index))
        self.norms[index].copy_(self.training.norm, non_blocking=True)
        self.ends.append(self.mark())
        return True

    def is_lost(self, count: int | None = None) -> bool:
        """Return whether any of the first ``count`` losses was not finite, on any rank."""
        return bool(self.norms[:count].isnan().any())

    def save_after(self, index: int) -> bool:
        """Save after the last step, when a save is due and when the job is told to end; return
        whether it saved."""
        asked, number = self.job.request.asked, self.first + index + 1
        if self.save is None:
            return False
        is_due = asked.save_every is not None and number % asked.save_every == 0
        is_end = self.end.due_after(number)
        if not (is_due or is_end or index + 1 == len(self.training.inputs)):
            return False
        if self.training.norm.isnan():  # keep the checkpoint before
            return False
        self.job.ranks.at(f"saving before step {number}")
        self.save(self.training, self.job.plan, step=number, seed=asked.seed)
        if is_end:
            raise signals.Ended(signal.SIGUSR1, f"saved before step {number}; --resume goes on")
        return True

    def warm_up(self, count: int) -> None:
        self.job.say(f"built; steps of warm-up: {count}")
        for index in range(count):
            if not self.step(index, " (warm-up)"):
                return
            self.save_after(index)

    def timed_steps(self) -> list[float]:
        """Return the seconds of every step after the untimed one that follows the warm-up."""
        job, spans, begin = self.job, list[tuple[Any, Any]](), None
        if job.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        reporter = _StepReporter(self)
        with no_pauses():
            for index in range(job.request.counts.warmup, len(self.training.inputs)):
                if not self.step(index):
                    break
                if begin is not None:
                    spans.append((begin, self.ends[-1]))
                    reporter.report(len(spans) - 2 * job.on_gpu, spans)
                begin = self.mark() if self.save_after(index) else self.ends[-1]
        job.ranks.synchronize("the last step")
        reporter.report(len(spans), spans)
        return [self.elapsed_s(*span) for span in spans]


class _NoticedEnd:
    """An end that a signal announces, SIGUSR1: all ranks save after the same step. Ranks are at
    most two steps apart, so the first that gets the signal names a step three further on."""

    def __init__(self, ranks: Ranks) -> None:
        self.store, self.is_told = ranks.store, False

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice the signal, which otherwise ends the process at once, while the body runs."""

        def notice(*_: object) -> None:
            self.is_told = True

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGUSR1, notice)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)

    def due_after(self, number: int) -> bool:
        """Return whether all ranks end now that ``number`` steps are done."""
        assert self.store is not None
        if self.is_told:
            self.store.compare_set("last step", "", str(number + 3))
        return self.store.check(["last step"]) and number >= int(self.store.get("last step"))


class _StepReporter:
    """Reports rank 0's timed steps that have ended: into ``steps.jsonl``, so that an interrupted
    run keeps them, and on CPUs, where steps are long, to the terminal."""

    def __init__(self, loop: _StepLoop) -> None:
        self.loop, self.job, self.count = loop, loop.job, 0
        # a separate stream: reading a loss would otherwise wait for later steps
        self.stream = torch.cuda.Stream() if self.job.on_gpu else None

    def report(self, count: int, spans: list[tuple[Any, Any]]) -> None:
        """Report the first ``count`` timed steps, each once."""
        before = self.job.request.counts.warmup + 1
        for index in range(self.count, count if self.job.ranks.rank == 0 else 0):
            time_s = self.loop.elapsed_s(*spans[index])
            self._write(self.loop.first + before + index, time_s, self.loop.losses[before + index])
        self.count = max(self.count, count)

    def _write(self, number: int, time_s: float, loss: Tensor) -> None:
        known = None
        if self.loop.training.reports:
            with torch.cuda.stream(self.stream):
                known = float(loss)
        finite = known if known is not None and math.isfinite(known) else None
        line = StepLine(step=number, time_s=time_s, loss=finite)
        store.append_step(self.job.request.run_dir, line)
        if self.stream is None:
            suffix = "" if known is None else f", loss {known:.4g} on rank 0"
            self.job.say(f"step {number}: {time_s:.3g} s{suffix}")


def _trained(job: RankJob, save: checkpoint.Save | None) -> dict[str, Any]:
    """Warm up, time, and measure memory; return the fields of the sample."""
    ranks, request, spent = job.ranks, job.request, job.spent
    loop = _prepared(job, save)
    found: dict[str, Any] = {}
    times_s: list[float] = []
    profiled: dict[str, float] = {}
    peaks: dict[str, int] = {}
    with loop.end.noticed() if save else nullcontext():
        with timed(spent, "compile_s"):
            warm_up = functools.partial(loop.warm_up, request.counts.warmup)
            job.together("warm-up", warm_up, compiling=True)
        if not loop.is_lost():
            job.say(f"warmed up; steps to time: {request.counts.steps}")
            found["before"] = device_states(ranks)
            with timed(spent, "timed_s"), _without_guards(loop.training, request.plan.lowering):
                times_s = job.together("timed steps", loop.timed_steps)
            found["after"] = device_states(ranks)
    if not loop.is_lost():
        if request.asked.profile:
            profiled = phases.record(job, loop.training, Path(request.run_dir))
        job.say(f"{statistics.median(times_s):.3g} s a step; measuring memory")
        peaks = job.together("memory", functools.partial(_peak, job, loop.training))
    mine = {
        "times_s": times_s,
        "losses": [float(loss) for loss in loop.losses] if loop.training.reports else [],
        "peaks": peaks | spent,
    }
    found |= _fields(request, loop.first, ranks.gather(mine), lost=loop.is_lost())
    found["metrics"] |= profiled
    return found


def _first_nonfinite(job: RankJob, index: int) -> str:
    """Name the module that first computes a value that is not finite, in step ``index``."""
    ranks = job.ranks
    job.say("training up to that step again, to find where it begins")

    def find() -> str | None:
        loop = _prepared(replace(job, spent={}), None)
        loop.warm_up(index)
        ranks.at(f"step {loop.first + index}, module by module")
        return nonfinite.first_module(ranks, loop.training, index)

    name = job.together("the search for the module", find, compiling=True)
    return f"first not finite: {name}" if name else "the second time all was finite"


def _prepared(job: RankJob, save: checkpoint.Save | None) -> _StepLoop:
    """Make the data and the model, the model from the seed or from a checkpoint."""
    ranks, plan, asked = job.ranks, job.plan, job.request.asked
    first, folder, note = 0, asked.resume_from, ""
    if folder is not None:
        saved = checkpoint.checked(folder, plan, asked.seed)
        first, note = saved.step, f" ({saved.note})" if saved.note else ""
    with timed(job.spent, "data_s"):
        rows = step.rows(plan.layout, ranks.rank)
        mine = _batches(job.request, job.request.counts.all_steps, rows, first)
    build = functools.partial(
        step.prepare, plan, job.place, mine, ranks.device, dtype=plan.dtype, seed=asked.seed
    )
    job.say_building()
    with timed(job.spent, "build_s"):
        training = job.together("building the model", build)
        if folder is not None:
            job.say(f"going on with step {first} of {folder}{note}")
            checkpoint.load(ranks, training, folder, plan, seed=asked.seed)
    return _StepLoop(job, training, first, save)


def _fields(
    request: RunRequest, first: int, replies: list[dict[str, Any]], *, lost: bool
) -> dict[str, Any]:
    """Make the sample's fields from every rank's reply. A ``reason`` among them means failure."""
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
    """Return each step's mean loss over the ranks that have it. JSON has null for inf and nan."""
    steps = zip(*filter(None, of_ranks), strict=True)
    return tuple(statistics.fmean(math.nan if x is None else x for x in losses) for losses in steps)


def _without_guards(training: step.TrainingState, lowering: str) -> AbstractContextManager[None]:
    """Run compiled code without guard checks if each layer is one graph: steps are then the same as
    in the warm-up. The checks take 5 % of a host-bound step."""
    built = training.pipeline
    layers = [layer for stage in built.stages.values() for layer in stage.module.layers.values()]
    if lowering != "compiled" or not all(apply.is_one_graph(x, built.layout) for x in layers):
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance(skip_guard_eval_unsafe=True)
    return stance


def _peak(job: RankJob, training: step.TrainingState) -> dict[str, int]:
    last = functools.partial(step.run, training, len(training.inputs) - 1)
    return job.peak("a step traced for its memory", last, training.tensors())


def _check(job: RankJob, metrics: Metrics) -> dict[str, Any]:
    """Compare with one device. A difference beyond the tolerance makes the sample an error."""
    try:
        error = check.loss_error(job, functools.partial(_batches, job.request))
    except torch.OutOfMemoryError as lacking:
        return {"reason": f"the check could not run: {lacking}"}
    tolerance = check.TOLERANCE[job.ranks.device.type]
    if math.isfinite(error):  # otherwise JSON would have null, which is no metric
        metrics["check_loss_error"] = error
    if error <= tolerance:
        return {}
    return {
        "reason": f"the plan is wrong: its losses differ from those of one device by {error:.2e} "
        f"relative, allowed are {tolerance:.0e}"
    }
