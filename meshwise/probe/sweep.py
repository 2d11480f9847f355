"""Measures a list of cases on all ranks, one after the other; every finished case is on disk.

In: a ``SweepRequest`` as JSON. Out: one ``Sample`` a case in the run directory, written by rank 0
as it is measured, and the status of the run: complete, or partial when the budget was spent or a
case failed.

Ranks do the same case at the same time. Rank 0 decides whether the next case still fits the
budget; a case that does not is passed over for cheaper ones and leaves no sample, so that a
resumed run measures it. Whether a case can be done is agreed on twice, after its buffers are
allocated and after a first untimed call: out of memory on one rank is ``oom`` on all, a missing
back end ``skipped``, any other failure of a case without communication ``error``. So is a wrong
element in the result of a collective: of one call before it is timed and, where a graph's replay or
calls in a row are timed, of one more of those. A collective that fails ends the job, since the
ranks no longer know of each other: ``current.json`` in the run directory then says which case it
was.

``follow`` names a rule by which rank 0 adds cases to those that were measured, round by round.
"""

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import torch

from meshwise import store, timing
from meshwise.probe import attention, collectives, convolution, elementwise, gemm, overlap
from meshwise.probe.block import Blocks
from meshwise.probe.cases import effort
from meshwise.probe.cases.follow import Follow, next_cases
from meshwise.probe.progress import Pace, Progress
from meshwise.probe.work import Call, Unavailable, Work, communicates
from meshwise.ranks import Ranks
from meshwise.spec import (
    Attention,
    Block,
    Case,
    Collective,
    Convolution,
    Elementwise,
    Gemm,
    Overlap,
    Record,
    RunInfo,
    Sample,
    ending,
)
from meshwise.spec.label import label
from meshwise.spec.record import PositiveFloat

T = TypeVar("T")
Metrics = dict[str, float | tuple[float, ...]]
Status = Literal["oom", "skipped", "error"]
CURRENT = "current.json"  # the case in hand, while it is measured


class SweepRequest(Record, kw_only=True):
    """``skip``: ids of cases that are measured already. No budget means all cases. ``sustain_s``:
    how long a sustained case lasts."""

    cases: tuple[Case, ...]
    run_dir: str
    budget_s: PositiveFloat | None = None
    skip: tuple[str, ...] = ()
    follow: Follow = "nothing"
    sustain_s: PositiveFloat = effort.SUSTAIN_S


class CaseFailed(Exception):
    """A case that cannot be measured, on all ranks alike; the sweep goes on."""

    def __init__(self, status: Status, reason: str, metrics: Metrics | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.metrics = status, reason, metrics or {}


def measure_ranks(ranks: Ranks, request: bytes) -> None:
    """Every rank calls this with the same request."""
    sweep = msgspec.json.decode(request, type=SweepRequest)
    skip = set(sweep.skip)
    todo = [case for case in sweep.cases if case.id not in skip]
    for case in todo:
        if case.world_size != ranks.world_size:
            raise ValueError(
                f"Case.world_size = {case.world_size}: {ranks.world_size} ranks were started; "
                f"start {case.world_size} (--nproc {case.world_size})"
            )
    bench, missed = Bench(ranks, sweep.sustain_s), 0
    pace = _pace(ranks, sweep, todo)
    with Progress(len(todo), visible=pace is not None) as progress:
        while todo:
            missed += _round(bench, sweep, todo, pace, progress)
            more = next_cases(sweep.follow, store.load(sweep.run_dir)[1]) if pace else None
            replies = ranks.gather([msgspec.Raw(msgspec.json.encode(case)) for case in more or []])
            todo = [] if missed else msgspec.convert(replies[0], list[Case])
            progress.add(len(todo))
            if pace:
                pace.add(todo)
    if pace:
        status, reason = ending(store.load(sweep.run_dir)[1])
        if missed:
            left = f"budget: {missed} of {progress.total} cases not measured; --resume continues"
            status, reason = "partial", "; ".join(filter(None, (left, reason)))
        store.finish(sweep.run_dir, status, reason)


def _round(
    bench: "Bench", sweep: SweepRequest, todo: list[Case], pace: Pace | None, progress: Progress
) -> int:
    """Measure the cases that fit the budget; how many do not."""
    missed, ranks = 0, bench.ranks
    for case in todo:
        if not ranks.gather(pace.fits(case) if pace else None)[0]:
            missed += 1
            progress.pass_over()
            continue
        ranks.at(label(case))
        if pace:
            store.write(Path(sweep.run_dir) / CURRENT, case)
        sample = _measure(case, bench)
        if pace:
            store.append(sweep.run_dir, sample)
            pace.done(case)
            progress.end(sample, pace.remaining_s())
    if pace:
        (Path(sweep.run_dir) / CURRENT).unlink(missing_ok=True)
    return missed


def _pace(ranks: Ranks, sweep: SweepRequest, todo: list[Case]) -> Pace | None:
    """The clock, on rank 0 only: it alone decides, writes and shows."""
    if ranks.rank > 0:
        return None
    cluster = store.read(Path(sweep.run_dir) / "run.json", RunInfo).cluster
    return Pace(cluster, todo, sweep.budget_s, sweep.sustain_s)


class Bench:
    """Holds what cases share: process groups, meshes, the module of the last block."""

    def __init__(self, ranks: Ranks, sustain_s: float = effort.SUSTAIN_S) -> None:
        self.ranks = ranks
        self.sustain_s = sustain_s
        self.blocks = Blocks(ranks)
        self.groups = collectives.Groups(ranks)
        self.settings = contextlib.ExitStack()  # choices of the process that a case needs

    def build(self, case: Case) -> Work:
        self.settings.close()
        device = self.ranks.device
        if case.regime == "graph" and device.type != "cuda":
            raise Unavailable("graph replay needs a CUDA device")
        if isinstance(case.op, Block):
            return self.blocks.build(case)
        self.blocks.release()
        if isinstance(case.op, Collective):
            return collectives.build(case, self.groups)
        if isinstance(case.op, Overlap):
            return overlap.build(case, self.groups, self.settings)
        if isinstance(case.op, Gemm):
            return gemm.build(case, device, self.settings)
        if isinstance(case.op, Attention):
            return attention.build(case, device, self.settings)
        if isinstance(case.op, Convolution):
            return convolution.build(case, device, self.settings)
        assert isinstance(case.op, Elementwise), case.op
        return elementwise.build(case, device)

    def free(self) -> None:
        """Give memory back after a case that did not get enough of it."""
        self.settings.close()
        self.blocks.release()
        gc.collect()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(case: Case, bench: Bench) -> Sample:
    try:
        return _time(case, bench)
    except CaseFailed as failed:
        sample = Sample(
            case_id=case.id,
            case=case,
            status=failed.status,
            reason=failed.reason,
            metrics=failed.metrics,
            method_version=timing.METHOD_VERSION,
        )
    bench.free()  # out here, where the error no longer holds on to frames and their tensors
    return sample


def _time(case: Case, bench: Bench) -> Sample:
    ranks, distributed = bench.ranks, communicates(case.op)
    work = _together(ranks, lambda: bench.build(case), fatal=False)
    waits = "compiling" if case.lowering == "compiled" else ""
    metrics = _together(ranks, lambda: _try(work, ranks), fatal=distributed, waits=waits)
    _check(work, work.calls[-1], ranks, metrics, "wrong")
    try:
        timed = _timed(case, work, bench, metrics)
    except torch.OutOfMemoryError as error:  # raised on every rank
        raise CaseFailed("oom", _first_line(error)) from None
    return Sample(
        case_id=case.id,
        case=case,
        status="ok",
        times_s=timed.times_s,
        rank_times_s=timed.rank_times_s,
        metrics=metrics | timed.metrics,
        before=timed.before,
        after=timed.after,
        method_version=timing.METHOD_VERSION,
    )


def _timed(case: Case, work: Work, bench: Bench, metrics: Metrics) -> timing.Timed:
    seconds, ranks = effort.max_seconds(case, bench.sustain_s), bench.ranks
    calls = work.batch if case.regime in timing.IN_A_ROW else 1
    then = functools.partial(
        _check, work, ranks=ranks, metrics=metrics, name="wrong_as_timed", calls=calls
    )
    if work.measure is not None:
        return work.measure(seconds, then)
    if work.on_host:
        ranks = dataclasses.replace(ranks, device=torch.device("cpu"))
    return timing.measure(
        work.calls,
        ranks=ranks,
        regime=case.regime,
        distributed=communicates(case.op),
        max_seconds=seconds,
        prepare=work.prepare,
        settle_s=effort.settle_s(case, ranks.device.type),
        batch=work.batch,
        min_iterations=effort.min_iterations(case),
        then=then if calls > 1 else None,  # else it is the call that was checked
    )


def _check(
    work: Work, call: Call, ranks: Ranks, metrics: Metrics, name: str, calls: int = 1
) -> None:
    """Enter how many elements are wrong on all ranks after ``call``, which does so many calls of
    the work; any at all is CaseFailed."""
    check = work.check(calls)
    if check is None:
        return
    _together(ranks, check.fill, fatal=False)
    call()
    ranks.synchronize("the checked call")
    wrong = ranks.gather(_together(ranks, check.num_wrong, fatal=False))
    metrics[name] = float(sum(wrong))
    if any(wrong):
        whose = [f"{count} on rank {rank}" for rank, count in enumerate(wrong) if count]
        told = ", ".join([*whose[:4], *(["..."] if len(whose) > 4 else [])])
        after = f" after {calls} calls, as timed" if calls > 1 else ""
        raise CaseFailed("error", f"wrong elements{after}: {told}", metrics)


def _together(ranks: Ranks, work: Callable[[], T], *, fatal: bool, waits: str = "") -> T:
    """This rank's result of ``work``; what fails on one rank raises CaseFailed on all.

    ``fatal``: a failure other than lack of memory or back end is raised as it is. ``waits``
    names work that may take ranks very different times: they meet at the set-up barrier.
    """
    failure: tuple[Status, str] | None = None
    try:
        result = work()
    except Exception as error:
        status = _status(error)
        if fatal and status == "error":
            raise
        failure = status, _first_line(error)
    if waits:
        ranks.arrive(waits)
    for rank, found in enumerate(ranks.gather(failure)):
        if found is not None:
            status, reason = found
            raise CaseFailed(status, reason if status == "skipped" else f"rank {rank}: {reason}")
    return result


def _status(error: Exception) -> Status:
    if isinstance(error, Unavailable):
        return "skipped"
    return "oom" if timing.is_out_of_memory(error) else "error"


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _try(work: Work, ranks: Ranks) -> Metrics:
    """Every call once, untimed: compiles, connects, and finds out whether memory suffices."""
    for call in work.calls:
        if work.prepare is not None:
            work.prepare()
        call()
    ranks.synchronize("the first call")
    return work.metrics() if work.metrics is not None else {}
