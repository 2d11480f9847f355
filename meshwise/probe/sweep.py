"""Measure a list of cases on all ranks, one after another, each saved when it is finished.

In: a ``SweepRequest`` as JSON. Out: one ``Sample`` for each case in the run directory, which rank 0
writes at once, and the status of the run: complete, or partial if the budget was spent or a case
failed.

Ranks do the same case at the same time (``loop``). They agree twice whether it can be done: after
its buffers are allocated, and after a first untimed call. A wrong element in a collective's result
is an ``error``. One call is checked before the timing. If graph replays or calls in a row are
timed, one of those is checked too.

``follow`` names a rule by which rank 0 adds cases that follow from the samples, round by round.
"""

import contextlib
import dataclasses
import functools
from pathlib import Path

import msgspec
import torch

from meshwise import store, timing
from meshwise.probe import collectives, operators, overlap
from meshwise.probe.block import Blocks
from meshwise.probe.cases import effort
from meshwise.probe.cases.follow import next_cases
from meshwise.probe.loop import Failed, Metrics, Outcome, measure_all, outcome, together
from meshwise.probe.request import CURRENT, SweepRequest
from meshwise.probe.work import Call, Unavailable, Work, communicates, fp32_precision
from meshwise.ranks import Ranks
from meshwise.spec import Block, Case, Collective, Overlap, RunInfo, ending
from meshwise.timing import Timed

__all__ = ["CURRENT", "Bench", "SweepRequest", "measure_case", "measure_ranks"]


def measure_ranks(ranks: Ranks, request: bytes) -> None:
    """Measure the request. Every rank must call this with the same one."""
    sweep = msgspec.json.decode(request, type=SweepRequest)
    skip = set(sweep.skip)
    todo = [case for case in sweep.cases if case.id not in skip]
    for case in todo:
        if case.world_size != ranks.world_size:
            raise ValueError(
                f"Case.world_size = {case.world_size}: {ranks.world_size} ranks were started; "
                f"start {case.world_size} (--nproc {case.world_size})"
            )
    run = None if ranks.rank else store.read(Path(sweep.run_dir) / "run.json", RunInfo)

    def estimate_s(case: Case) -> float:
        assert run is not None  # only rank 0 estimates
        return effort.estimate_s(case, run.cluster, sweep.sustain_s, sweep.iterations, sweep.warmup)

    left = measure_all(
        ranks,
        sweep.run_dir,
        todo,
        functools.partial(
            measure_case, Bench(ranks, sweep.sustain_s, sweep.iterations, sweep.warmup)
        ),
        estimate_s=estimate_s,
        budget_s=sweep.budget_s,
        follow=lambda: next_cases(sweep.follow, store.load(sweep.run_dir)[1]),
    )
    if ranks.rank == 0:
        status, reason = ending(store.load(sweep.run_dir)[1])
        if left:
            status, reason = "partial", "; ".join(filter(None, (left, reason)))
        store.finish(sweep.run_dir, status, reason)


class Bench:
    """Holds the state that cases share: process groups, meshes, the module of the last block."""

    def __init__(
        self,
        ranks: Ranks,
        sustain_s: float = effort.SUSTAIN_S,
        iterations: int | None = None,
        warmup: int = 0,
    ) -> None:
        self.ranks = ranks
        self.sustain_s, self.iterations, self.warmup = sustain_s, iterations, warmup
        self.blocks = Blocks(ranks)
        self.groups = collectives.Groups(ranks)
        self.settings = contextlib.ExitStack()  # process-wide settings of a case

    def build(self, case: Case) -> Work:
        self.settings.close()
        device = self.ranks.device
        if case.regime == "graph" and device.type != "cuda":
            raise Unavailable("graph replay needs a CUDA device")
        if isinstance(case.op, Block):
            self.settings.enter_context(fp32_precision(case.op.dtype, device))
            return self.blocks.build(case)
        if isinstance(case.op, Overlap):
            return overlap.build(case, self.groups, self.blocks, self.settings)
        self.blocks.release()
        if isinstance(case.op, Collective):
            return collectives.build(case, self.groups)
        return operators.build(case, device, self.settings)

    def free(self) -> None:
        """Free memory after a case that failed."""
        self.settings.close()
        self.blocks.release()
        timing.free(self.ranks.device)


def measure_case(bench: Bench, case: Case) -> Outcome:
    """Measure a case. Every rank must call this with the same one."""
    found = outcome(case, functools.partial(_times, bench, case))
    if found.sample.status != "ok":
        bench.free()
    return Outcome(found.sample)  # ranks that still wait will time out


def _times(bench: Bench, case: Case) -> tuple[Timed, Metrics, str]:
    ranks = bench.ranks
    work = together(ranks, lambda: bench.build(case))
    waits = "compiling" if case.lowering == "compiled" else ""
    first_calls = functools.partial(_try, work, ranks)
    metrics = together(ranks, first_calls, transfers=communicates(case.op), waits=waits)
    _check(work, work.calls[-1], ranks, metrics, "wrong")
    if bench.warmup and case.regime != "sustained":
        together(ranks, lambda: _warm_up(work, bench), transfers=communicates(case.op))
    timed = _timed(case, work, bench, metrics)
    return timed, metrics | timed.metrics, ""


def _timed(case: Case, work: Work, bench: Bench, metrics: Metrics) -> Timed:
    seconds, ranks = effort.max_seconds(case, bench.sustain_s), bench.ranks
    calls = work.batch if case.regime in timing.IN_A_ROW else 1
    then = functools.partial(
        _check, work, ranks=ranks, metrics=metrics, name="wrong_as_timed", calls=calls
    )
    if work.measure is not None:
        return work.measure(seconds, then)
    count = None if case.regime == "sustained" else bench.iterations
    if work.on_host:
        ranks = dataclasses.replace(ranks, device=torch.device("cpu"))
    return timing.measure(
        work.calls,
        ranks=ranks,
        regime=case.regime,
        distributed=communicates(case.op),
        max_iterations=count or effort.ITERATIONS[1],
        max_seconds=effort.FOREVER_S if count else seconds,
        prepare=work.prepare,
        settle_s=effort.settle_s(case, ranks.device.type),
        batch=work.batch,
        min_iterations=count or effort.min_iterations(case),
        then=then if calls > 1 else None,  # else the timed call was checked
    )


def _check(
    work: Work, call: Call, ranks: Ranks, metrics: Metrics, name: str, calls: int = 1
) -> None:
    """Run ``call``, which does ``calls`` calls of the work, and record in ``metrics`` how many
    elements are wrong on all ranks. Raise Failed if any is."""
    check = work.check(calls)
    if check is None:
        return
    together(ranks, check.fill)
    call()
    ranks.synchronize("the checked call")
    wrong = ranks.gather(together(ranks, check.num_wrong))
    metrics[name] = float(sum(wrong))
    if any(wrong):
        whose = [f"{count} on rank {rank}" for rank, count in enumerate(wrong) if count]
        told = ", ".join([*whose[:4], *(["..."] if len(whose) > 4 else [])])
        after = f" after {calls} calls, as timed" if calls > 1 else ""
        raise Failed("error", f"wrong elements{after}: {told}", metrics)


def _warm_up(work: Work, bench: Bench) -> None:
    """Make the untimed calls that were asked for. Ranks wait every ten, as in the timing loop."""
    for i in range(bench.warmup):
        if work.prepare is not None:
            work.prepare()
        work.calls[i % len(work.calls)]()
        if i % 10 == 9 or i == bench.warmup - 1:
            bench.ranks.synchronize("the warm-up")


def _try(work: Work, ranks: Ranks) -> Metrics:
    """Run every call once, untimed: it compiles, connects, and shows whether memory suffices."""
    for call in work.calls:
        if work.prepare is not None:
            work.prepare()
        call()
    ranks.synchronize("the first call")
    return work.metrics() if work.metrics is not None else {}
