"""The frame of training, inference and decoding: a run of a plan on the joined ranks.

In: a ``RunRequest``; the module named by its mode measures the plan. Out: one Sample of op
``step``, which rank 0 writes into the run directory. If one rank runs out of memory, the run ends
on all ranks with status ``oom``.
"""

import contextlib
import functools
import gc
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from meshwise import store, torch_private
from meshwise.engine import kernels, memory
from meshwise.options.run import Course, RunCounts
from meshwise.parallel import mesh
from meshwise.parallel.mesh import MeshPlace
from meshwise.ranks import Ranks
from meshwise.spec import Case, Plan, Record, Sample
from meshwise.text import one_line, plain
from meshwise.timing import METHOD_VERSION, is_out_of_memory

Metrics = dict[str, float | tuple[float, ...]]
T = TypeVar("T")
_phases = itertools.count()  # all ranks count the same phases


class RunRequest(Record, kw_only=True):
    """A plan, the options of its run (``asked``), and the directory for the sample."""

    plan: Plan
    run_dir: str
    asked: Course = Course()

    @property
    def counts(self) -> RunCounts:
        return self.asked.counts(self.plan.cluster.device.kind)


def run_ranks(ranks: Ranks, request: bytes) -> None:
    """Measure what a ``RunRequest`` in JSON asks for. All ranks call it with the same request."""
    ordered = msgspec.json.decode(request, type=RunRequest)
    measured = importlib.import_module(f"meshwise.engine.{ordered.asked.mode}").measure
    sample = measured(ranks, ordered)
    if ranks.rank == 0:
        store.append(ordered.run_dir, sample)


@dataclass(frozen=True)
class RankJob:
    """One rank's part of a run. ``plan``: the request's, or a plan derived from it. ``spent``: the
    seconds of its phases, by name."""

    ranks: Ranks
    place: MeshPlace
    request: RunRequest
    plan: Plan
    spent: dict[str, float]

    @property
    def on_gpu(self) -> bool:
        return self.ranks.device.type == "cuda"

    def say(self, what: str) -> None:
        """Report progress: a plain line on rank 0's stderr."""
        if self.ranks.rank == 0:
            print(f"  {plain(what)}", file=sys.stderr, flush=True)

    def say_building(self) -> None:
        compiles = self.plan.lowering == "compiled"
        self.say("building the model" + (", then compiling it" if compiles else ""))

    def together(self, phase: str, work: Callable[[], T], *, compiling: bool = False) -> T:
        """Do ``work`` on all ranks. ``compiling``: it compiles if the plan does."""
        compiling = compiling and self.plan.lowering == "compiled"
        return together(self.ranks, self.place, phase, work, compiling=compiling)

    def peak(self, what: str, work: Callable[[], object], held: Iterable[Tensor]) -> dict[str, int]:
        """Return this rank's peak memory: on a GPU during the timed work, on a CPU during a traced
        ``work``."""
        if self.on_gpu:
            return memory.cuda_peak()
        self.ranks.at(what)
        return {"peak_bytes": memory.peak_tensor_bytes(work, held)}


def together(
    ranks: Ranks, place: MeshPlace, phase: str, work: Callable[[], T], *, compiling: bool = False
) -> T:
    """Return this rank's result of ``work`` once all ranks and this rank's device are done.

    If one rank runs out of memory, all raise ``torch.OutOfMemoryError`` with the rank, the phase
    and the case. Ranks that wait for it in a collective time out first and learn the reason here.
    Any other error is raised on its own rank. ``compiling``: collectives may wait as long as set-up
    takes, because ranks compile at different speeds and meet in the first steps.
    """
    assert ranks.store is not None
    store, key = ranks.store, f"out of memory/{next(_phases)}"
    torch_private.set_timeout(place.groups, ranks.setup_s if compiling else ranks.timeout_s)

    def told(error: Exception) -> str | None:
        if is_out_of_memory(error):
            store.set(key, "")
            return f"rank {ranks.rank}, {phase}, {ranks.case}: {str(error).splitlines()[0]}"
        waited = isinstance(error, RuntimeError | TimeoutError) and store.check([key])
        return "" if waited else None

    result, failures = ranks.together(work, told, waits=f"the end of {phase}")
    if lacking := [failure for failure in failures if failure]:
        torch_private.abort(place.groups, ranks.device)
        raise torch.OutOfMemoryError(one_line(lacking[0]))
    ranks.synchronize(phase)
    return result


def sample(
    ranks: Ranks,
    request: RunRequest,
    plan: Plan,
    case: Case,
    work: Callable[[RankJob], dict[str, Any]],
) -> Sample:
    """Do ``work`` and make a sample of it, the same on every rank.

    ``work`` returns fields of the sample; a ``reason`` among them means failure. The job's
    ``spent`` already has the seconds of set-up, as ``setup_s``.
    """
    filled = functools.partial(Sample, case_id=case.id, case=case, method_version=METHOD_VERSION)
    ranks.at("set-up")
    spent: dict[str, float] = {}
    with timed(spent, "setup_s"):
        place = mesh.build(plan.layout, ranks.device.type)
    try:
        with kernels.fp32_precision(plan.recipe.fp32_precision):
            found = work(RankJob(ranks, place, request, plan, spent))
    except torch.OutOfMemoryError as error:
        return filled(status="oom", reason=str(error))
    return filled(status="error" if "reason" in found else "ok", **found)


def slowest(rank_times_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return each iteration's largest time over the ranks."""
    return tuple(max(of_ranks) for of_ranks in zip(*rank_times_s, strict=True))


@contextlib.contextmanager
def timed(spent: dict[str, float], name: str) -> Iterator[None]:
    """Store in ``spent`` the seconds that the body took on the host's clock."""
    started = time.perf_counter()
    yield
    spent[name] = time.perf_counter() - started


@contextlib.contextmanager
def no_pauses() -> Iterator[None]:
    """Keep Python's garbage collector from running during timed work."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
