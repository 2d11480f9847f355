"""Decode greedily, token by token, with a cache of keys and values, under tensor and pipeline
parallelism.

In: a ``frame.RunRequest`` whose plan's ``seq_len`` is the prompt's. Out: one Sample of op ``step``,
mode ``decode``. ``times_s``: between tokens of a sequence (the largest over the ranks that choose
them). Metrics: ``time_to_first_token_s`` (from the common start until all sequences have one),
``tokens_per_s`` (over all sequences, at the median time), ``weight_bytes``, ``cache_bytes`` and on
GPUs ``peak_bytes`` (largest over ranks), ``num_parameters``.

A pipeline's rows are cut into equal groups that take turns, one per stage if the rows allow it.
"""

import functools
import math
import statistics
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch import Tensor

from meshwise import models
from meshwise.engine import data, frame, greedy, memory, step
from meshwise.engine.frame import Metrics, RankJob, RunRequest, no_pauses
from meshwise.ranks import Ranks
from meshwise.spec import Plan, Sample, WideResNet, case_of
from meshwise.timing import clock, device_states


def plan_for(request: RunRequest) -> Plan:
    """Return the plan with its batch cut for decoding. Each group of rows is a microbatch."""
    plan, new_tokens = request.plan, request.counts.new_tokens
    model, layout, batch = plan.model, plan.layout, plan.workload.global_batch_size
    if isinstance(model, WideResNet):
        raise ValueError(f"model = {model.name!r}: images have no next token; use a language model")
    if model.experts is not None and model.experts.group_size is not None:
        model.experts.fail("group_size", "decoding has one token a step; leave out the capacity")
    for name, most in (("stages_per_rank", layout.stages_per_rank), ("cp", layout.cp)):
        if most > 1:
            raise ValueError(f"Layout.{name} = {most}: decoding has one token a step; use 1")
    for stage in range(layout.num_stages):
        if words := layout.of_stage(stage).cuts.name:
            raise ValueError(
                f"Layout.cuts = {words}: decoding cuts weights by heads, ffn, vocab alone; leave "
                "them out"
            )
    if plan.workload.seq_len + new_tokens > model.max_seq_len:
        raise ValueError(
            f"new_tokens = {new_tokens} behind a prompt of {plan.workload.seq_len} (seq_len): "
            f"must together be <= max_seq_len = {model.max_seq_len} of the model"
        )
    dp = math.lcm(layout.dp, *(dp for dp, _ in layout.meshes))
    groups = max(n for n in range(1, layout.pp + 1) if batch // dp % n == 0)
    ours = msgspec.structs.replace(
        layout,
        zero=0,
        replicas=1,
        sequence_parallel=False,
        recompute="none",
        recompute_layers=None,
        microbatch_size=batch // groups // layout.dp,
        num_microbatches=groups,
    )
    return msgspec.structs.replace(plan, layout=ours, prediction=None)


def measure(ranks: Ranks, request: RunRequest) -> Sample:
    """Return the run as a sample, the same on every rank."""
    plan = plan_for(request)
    case = case_of(plan, "decode", new_tokens=request.counts.new_tokens)
    return frame.sample(ranks, request, plan, case, _measured)


def prompts_of(plan: Plan, rank: int, seed: int) -> Tensor:
    """Return this rank's rows [groups, rows, prompt_len] of the request's random prompts."""
    rows = step.rows(plan.layout, rank)
    batches = data.batches(plan.model, plan.workload, steps=1, seed=seed, file=None, rows=rows)
    mine: Tensor = torch.from_numpy(batches.inputs[0])
    return mine.view(plan.layout.num_microbatches, -1, mine.shape[-1])


def _measured(job: RankJob) -> dict[str, Any]:
    """Decode once untimed, to capture and compile, and once timed."""
    ranks, request, plan = job.ranks, job.request, job.plan
    seed, new_tokens = request.asked.seed, request.counts.new_tokens
    job.say("building the model")
    build = functools.partial(
        greedy.prepare, plan, job.place, ranks.device, new_tokens=new_tokens, seed=seed
    )
    decoding = job.together("building the model", build)
    prompts = prompts_of(plan, ranks.rank, seed).to(ranks.device)
    mark, elapsed_s = clock(ranks.device)

    def wait(mark: Any) -> None:
        if job.on_gpu:
            ranks.synchronize("a token", mark)

    def decode() -> list[float]:
        with no_pauses():
            ranks.start_together()
            marks = greedy.generate(decoding, prompts, mark, wait).marks
            ranks.synchronize("the last token")
        return [elapsed_s(a, b) for a, b in pairwise(marks)] if decoding.stage.last else []

    ranks.at("tokens (warm-up)")
    job.together("warm-up", decode, compiling=True)
    if job.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    job.say(f"warmed up; timing {new_tokens} tokens")
    ranks.at("tokens")
    before = device_states(ranks)
    mine = job.together("timed tokens", decode)
    after = device_states(ranks)
    caches = memory.storage_bytes([t for cache in decoding.caches for t in (cache.k, cache.v)])
    weights = memory.storage_bytes([*decoding.stage.parameters(), *decoding.stage.buffers()])
    sizes: dict[str, float] = {"weight_bytes": weights, "cache_bytes": caches}
    sizes |= memory.cuda_peak() if job.on_gpu else {}
    replies = ranks.gather((mine, sizes))
    first_s, *times_s = frame.slowest([times for times, _ in replies if times])
    metrics: Metrics = {
        **{name: max(sizes[name] for _, sizes in replies) for name in sizes},
        "time_to_first_token_s": first_s,
        "tokens_per_s": plan.workload.global_batch_size / statistics.median(times_s),
        "num_parameters": models.num_parameters(plan.model),
    }
    return {"times_s": tuple(times_s), "metrics": metrics, "before": before, "after": after}
