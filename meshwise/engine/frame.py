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
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from meshwise import store
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


def run(ranks: Ranks, request: bytes, measure: Callable[[Ranks, Request], Sample]) -> None:
    """Measure what the JSON of a ``Request`` asks for; every rank calls it with the same."""
    ordered = msgspec.json.decode(request, type=Request)
    measured = measure(ranks, ordered)
    if ranks.rank == 0:
        store.append(ordered.run_dir, measured)


def sample(
    ranks: Ranks,
    plan: Plan,
    case: Case,
    work: Callable[[Place, dict[str, float]], dict[str, Any]],
) -> Sample:
    """Do ``work``; its result as a sample, the same on every rank.

    ``work`` gets this rank's place and the seconds that set-up took (``setup_s``), and returns
    fields of the sample; a ``reason`` among them is a failure.
    """
    filled = functools.partial(Sample, case_id=case.id, case=case, method_version=METHOD_VERSION)
    ranks.at("set-up")
    spent: dict[str, float] = {}
    with timed(spent, "setup_s"):
        place = mesh.build(plan.layout, ranks.device.type)
    try:
        found = work(place, spent)
    except torch.OutOfMemoryError as error:
        return filled(status="oom", reason=str(error))
    return filled(status="error" if "reason" in found else "ok", **found)


def say(ranks: Ranks, what: str) -> None:
    """Progress, for whoever waits: a plain line on rank 0's stderr."""
    if ranks.rank == 0:
        print(f"  {plain(what)}", file=sys.stderr, flush=True)


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
