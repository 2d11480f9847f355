"""The frame of training, inference and decoding: a run of a plan on the joined ranks.

In: a ``Request`` and the work that measures its plan. Out: one Sample of op ``step``, which rank 0
writes into the run directory. Memory that ran out on one rank ends the run on all of them with
status ``oom``.
"""

import contextlib
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from meshwise import store
from meshwise.engine import agree, kernels, memory
from meshwise.options.run import Counts, Course
from meshwise.parallel import mesh
from meshwise.parallel.mesh import Place
from meshwise.ranks import Ranks
from meshwise.spec import Case, Plan, Record, Sample
from meshwise.text import plain
from meshwise.timing import METHOD_VERSION

Metrics = dict[str, float | tuple[float, ...]]


class Request(Record, kw_only=True):
    """A plan, what is ``asked`` of it, and where the sample goes."""

    plan: Plan
    run_dir: str
    asked: Course = Course()

    @property
    def counts(self) -> Counts:
        """How much is timed."""
        return self.asked.counts(self.plan.cluster.device.kind)


T = TypeVar("T")


def run(ranks: Ranks, request: bytes, measure: Callable[[Ranks, Request], Sample]) -> None:
    """Measure what the JSON of a ``Request`` asks for; every rank calls it with the same."""
    ordered = msgspec.json.decode(request, type=Request)
    measured = measure(ranks, ordered)
    if ranks.rank == 0:
        store.append(ordered.run_dir, measured)


@dataclass(frozen=True)
class Job:
    """One rank's part of a run. ``plan``: the request's, or what was made of it. ``spent``: the
    seconds of its phases, by name."""

    ranks: Ranks
    place: Place
    request: Request
    plan: Plan
    spent: dict[str, float]

    @property
    def on_gpu(self) -> bool:
        return self.ranks.device.type == "cuda"

    def say(self, what: str) -> None:
        """Progress, for whoever waits: a plain line on rank 0's stderr."""
        if self.ranks.rank == 0:
            print(f"  {plain(what)}", file=sys.stderr, flush=True)

    def say_building(self) -> None:
        compiles = self.plan.lowering == "compiled"
        self.say("building the model" + (", then compiling it" if compiles else ""))

    def together(self, phase: str, work: Callable[[], T], *, compiling: bool = False) -> T:
        """Do ``work`` as ``agree.together`` does. ``compiling``: it compiles if the plan does."""
        compiling = compiling and self.plan.lowering == "compiled"
        return agree.together(self.ranks, self.place, phase, work, compiling=compiling)

    def peak(self, what: str, work: Callable[[], object], held: Iterable[Tensor]) -> dict[str, int]:
        """Peak memory of this rank: of what was timed on a GPU, of ``work`` traced on a CPU."""
        if self.on_gpu:
            return memory.cuda_peak()
        self.ranks.at(what)
        return {"peak_bytes": memory.peak_tensor_bytes(work, held)}


def sample(
    ranks: Ranks, request: Request, plan: Plan, case: Case, work: Callable[[Job], dict[str, Any]]
) -> Sample:
    """Do ``work``; its result as a sample, the same on every rank.

    It returns fields of the sample; a ``reason`` among them is a failure. The seconds of set-up are
    in its job already, as ``setup_s``.
    """
    filled = functools.partial(Sample, case_id=case.id, case=case, method_version=METHOD_VERSION)
    ranks.at("set-up")
    spent: dict[str, float] = {}
    with timed(spent, "setup_s"):
        place = mesh.build(plan.layout, ranks.device.type)
    try:
        with kernels.fp32_precision(plan.recipe.fp32_precision):
            found = work(Job(ranks, place, request, plan, spent))
    except torch.OutOfMemoryError as error:
        return filled(status="oom", reason=str(error))
    return filled(status="error" if "reason" in found else "ok", **found)


def slowest(rank_times_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Each iteration's largest time over the ranks."""
    return tuple(max(of_ranks) for of_ranks in zip(*rank_times_s, strict=True))


@contextlib.contextmanager
def timed(spent: dict[str, float], name: str) -> Iterator[None]:
    """Enter into ``spent`` how many seconds the body took on the host's clock."""
    started = time.perf_counter()
    yield
    spent[name] = time.perf_counter() - started


@contextlib.contextmanager
def no_pauses() -> Iterator[None]:
    """Python's garbage collector would be timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
