"""Run a plan forward only: time a batch, and measure the throughput of many.

In: a ``frame.RunRequest``. Out: one Sample of op ``step``, mode ``infer``, in the run directory,
beside a trace of the streamed batches (``trace-<case>.json``). Two loops:

- one batch at a time, with all ranks starting together: ``times_s`` run from the start on the first
  stage to the end on the last (the largest over ranks);
- streamed: batches follow each other without a barrier. A stage is at most ``in_flight`` batches
  ahead of the batches that the next has received. ``streamed_s``: rank 0's time from the first
  start to the last end, per batch. With ``driver_time`` this loop alone runs and gives ``times_s``.

Metrics: ``streamed_s``, ``samples_per_s``, ``tokens_per_s``; for each stage ``stage_s`` (its own
work on a batch: median over batches, the slowest of its ranks), ``stage_weight_bytes`` and
``stage_peak_bytes`` (of the ranks that hold it); ``peak_bytes``, ``num_parameters``; the seconds of
the phases, named as in ``engine.train``.
"""

import functools
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from meshwise import models, timeline
from meshwise.engine import data, frame, kernels, memory, step
from meshwise.engine.frame import Metrics, RankJob, RunRequest, no_pauses, timed
from meshwise.parallel import forward
from meshwise.parallel.mesh import MeshPlace
from meshwise.parallel.pipeline import Pipeline
from meshwise.ranks import Ranks
from meshwise.spec import Plan, Sample, case_of, phases
from meshwise.timing import clock, device_states

NUM_BATCHES = 2  # different batches, used in turn


@dataclass(frozen=True)
class InferenceState:
    """A rank's stages without gradients, and its rows of some batches on the device."""

    pipeline: Pipeline
    inputs: Tensor  # [batches, rows, seq], or images [batches, rows, channels, height, width]

    def tensors(self) -> list[Tensor]:
        """Return all tensors on the device between two batches."""
        modules = [stage.module for stage in self.pipeline.stages.values()]
        held = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        return [*held, self.inputs]


def prepare(
    plan: Plan,
    place: MeshPlace,
    batches: data.Batches,
    device: torch.device,
    *,
    dtype: str,
    seed: int,
) -> InferenceState:
    """Build a rank's share of the plan's model, in dtype ``dtype``, for its rows of batches."""
    if dtype not in ("fp32", "bf16"):
        raise ValueError(f"dtype = {dtype!r}: inference runs in fp32 or bf16; plan for one of them")
    numbers = torch.bfloat16 if dtype == "bf16" else torch.float32
    lay_out = functools.partial(forward.lay_out, dtype=numbers, lowering=plan.lowering, seed=seed)
    built, mine = step.built_stages(
        plan, place, batches, device, numbers, lay_out, forward_only=True
    )
    inputs = torch.from_numpy(mine.inputs).to(device)
    return InferenceState(built, inputs.to(numbers) if inputs.is_floating_point() else inputs)


def run(inference: InferenceState, index: int) -> list[Tensor]:
    """Run batch ``index``, modulo the number of batches. Return this rank's part of each
    microbatch's logits, on ranks with the last stage."""
    done = start(inference, index, finish=lambda logits: logits)
    done.wait()
    return done.results


def start(
    inference: InferenceState,
    index: int,
    *,
    finish: Callable[[Tensor], Tensor],
    mark: Callable[[], Any] = lambda: None,
) -> forward.Pass:
    """Start batch ``index``; messages may be pending on return. Keep ``finish(logits)``."""
    built = inference.pipeline
    inputs = inference.inputs[index % len(inference.inputs)].split(built.layout.microbatch_size)
    return forward.run(built, inputs, finish=finish, mark=mark)


def _forget(_: Tensor) -> Tensor:
    """Drop logits: those of all microbatches may need more memory than the model."""
    return torch.empty(0)


def measure(ranks: Ranks, request: RunRequest) -> Sample:
    """Return the run as a sample, the same on every rank; rank 0 writes the trace."""
    plan = request.plan
    case = case_of(plan, "infer")

    def work(job: RankJob) -> dict[str, Any]:
        with kernels.choose(plan.recipe, ranks.device, plan.dtype, plan.model):
            before, mine, after = _measured(job)
        replies = [msgspec.convert(reply, RankTimes) for reply in ranks.gather(mine)]
        if ranks.rank == 0:
            spans = [span.named for reply in replies for span in reply.spans]
            path = Path(request.run_dir) / f"trace-{case.id}.json"
            timeline.write(path, plan.layout, spans)
        return {"before": before, "after": after, **_fields(request, replies)}

    return frame.sample(ranks, request, plan, case, work)


class BatchSpan(NamedTuple):
    """A rank's work on a microbatch in a stage; seconds since all ranks started."""

    rank: int
    stage: int
    batch: int
    microbatch: int
    start_s: float
    end_s: float

    @property
    def named(self) -> phases.PhaseSpan:
        return phases.PhaseSpan(
            rank=self.rank,
            stream="compute",
            name=f"F {self.stage}.{self.microbatch} of batch {self.batch}",
            start_s=self.start_s,
            end_s=self.end_s,
        )


class RankTimes(NamedTuple):
    """One rank's times and bytes. ``stages``: seconds of each batch in each stage that it holds."""

    times_s: list[float]
    loop_s: float
    stages: dict[str, list[float]]
    spans: list[BatchSpan]
    weight_bytes: dict[str, int]
    peaks: dict[str, float]


def _measured(job: RankJob) -> tuple[Any, RankTimes, Any]:
    """Build, warm up, time and measure memory; return device states before, times, states after."""
    ranks, plan, spent = job.ranks, job.plan, job.spent
    asked, counts = job.request.asked, job.request.counts
    rows = step.rows(plan.layout, ranks.rank)
    with timed(spent, "data_s"):
        batches = data.batches(
            plan.model, plan.workload, steps=NUM_BATCHES, seed=asked.seed, file=None, rows=rows
        )
    build = functools.partial(
        prepare, plan, job.place, batches, ranks.device, dtype=plan.dtype, seed=asked.seed
    )
    job.say_building()
    with timed(spent, "build_s"):
        inference = job.together("building the model", build)

    def warm_up() -> None:
        for index in range(counts.warmup):
            ranks.at(f"batch {index} (warm-up)")
            run(inference, index)

    with timed(spent, "compile_s"):
        job.together("warm-up", warm_up, compiling=True)
    if job.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = device_states(ranks)
    times_s: list[float] = []
    alone: list[BatchSpan] = []
    with timed(spent, "timed_s"):
        if not asked.driver_time:
            job.say(f"timing {counts.steps} batches one by one")
            one_by_one = functools.partial(_one_by_one, job, inference)
            times_s, alone = job.together("batches one by one", one_by_one)
        job.say(f"streaming {counts.steps} batches")
        stream = functools.partial(_streamed, job, inference)
        loop_s, spans = job.together("streamed batches", stream)
    after = device_states(ranks)
    one = functools.partial(start, inference, 0, finish=_forget)
    traced = functools.partial(
        job.peak, "a batch traced for its memory", lambda: one().wait(), inference.tensors()
    )
    peaks = job.together("memory", traced)
    weights = {
        str(number): memory.storage_bytes([*stage.module.parameters(), *stage.module.buffers()])
        for number, stage in inference.pipeline.stages.items()
    }
    own = _stage_times(alone or spans)
    return before, RankTimes(times_s, loop_s, own, spans, weights, peaks | spent), after


def _one_by_one(job: RankJob, inference: InferenceState) -> tuple[list[float], list[BatchSpan]]:
    """Time each batch from the common start to this rank's end; return the seconds and spans."""
    ranks = job.ranks
    mark, elapsed_s = clock(ranks.device)
    times_s, spans = [], []
    with no_pauses():
        for index in range(job.request.counts.steps):
            ranks.at(f"batch {index}")
            ranks.start_together()
            zero = mark()
            done = start(inference, index, finish=_forget, mark=mark)
            done.wait()
            end = mark()
            ranks.synchronize(f"batch {index}", poll_s=0.0)
            times_s.append(elapsed_s(zero, end))
            spans += _spans(ranks.rank, index, done, zero, elapsed_s)
    return times_s, spans


def _streamed(job: RankJob, inference: InferenceState) -> tuple[float, list[BatchSpan]]:
    """Time the whole loop on this rank's clock until all ranks have ended; return the seconds and
    the batches' spans."""
    ranks, counts = job.ranks, job.request.counts
    mark, elapsed_s = clock(ranks.device)
    passes: list[forward.Pass] = []
    under_way: deque[tuple[forward.Pass, Any]] = deque()

    def await_oldest() -> None:
        done, end = under_way.popleft()
        done.wait()
        if job.on_gpu:  # the host must not run ahead without limit
            ranks.synchronize("a batch under way", end)

    with no_pauses():
        ranks.start_together()
        started, zero = time.perf_counter(), mark()
        for index in range(counts.steps):
            ranks.at(f"streamed batch {index}")
            if len(under_way) == counts.in_flight:
                await_oldest()
            done = start(inference, index, finish=_forget, mark=mark)
            passes.append(done)
            under_way.append((done, mark()))
        while under_way:
            await_oldest()
        ranks.synchronize("the last batch")
        ranks.barrier("the end of the stream")
        loop_s = time.perf_counter() - started
    return loop_s, [
        span
        for index, done in enumerate(passes)
        for span in _spans(ranks.rank, index, done, zero, elapsed_s)
    ]


def _spans(
    rank: int, batch: int, done: forward.Pass, zero: Any, elapsed_s: Callable[[Any, Any], float]
) -> list[BatchSpan]:
    return [
        BatchSpan(
            rank, action.stage, batch, action.microbatch, *(elapsed_s(zero, m) for m in marks)
        )
        for action, *marks in done.marks
    ]


def _stage_times(spans: list[BatchSpan]) -> dict[str, list[float]]:
    """Return the seconds that each stage of this rank took for each batch."""
    taken: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        taken[str(span.stage)][span.batch] += span.end_s - span.start_s
    return {stage: list(batches.values()) for stage, batches in taken.items()}


def _fields(request: RunRequest, replies: list[RankTimes]) -> dict[str, Any]:
    """Make the sample's times and metrics from every rank's reply."""
    workload = request.plan.workload
    streamed_s = replies[0].loop_s / request.counts.steps  # rank 0 is the driver
    rank_times_s = tuple(tuple(reply.times_s) for reply in replies)

    def by_stage(value: Callable[[RankTimes, str], float]) -> tuple[float, ...]:
        """Return each stage's largest value over the ranks that hold it."""
        stages = map(str, range(request.plan.layout.num_stages))
        return tuple(max(value(r, stage) for r in replies if stage in r.stages) for stage in stages)

    metrics: Metrics = {
        **{name: max(reply.peaks[name] for reply in replies) for name in replies[0].peaks},
        "streamed_s": streamed_s,
        "samples_per_s": workload.global_batch_size / streamed_s,
        "tokens_per_s": workload.tokens / streamed_s,
        "num_parameters": models.num_parameters(request.plan.model),
        "stage_s": by_stage(lambda reply, stage: statistics.median(reply.stages[stage])),
        "stage_weight_bytes": by_stage(lambda reply, stage: reply.weight_bytes[stage]),
        "stage_peak_bytes": by_stage(lambda reply, _: reply.peaks["peak_bytes"]),
    }
    return {
        "times_s": frame.slowest(rank_times_s) or (streamed_s,),
        "rank_times_s": () if request.asked.driver_time else rank_times_s,
        "metrics": metrics,
    }
