"""Measure one refit on all ranks: allocate both models, move, time, check every element.

In: a ``RefitRequest`` as JSON. Out: one ``Sample`` in the run directory, written by rank 0. Times
are of the blocking regime: ranks meet, each calls ``refit()`` and waits for its device, and the
slowest rank counts. Sources are synthetic (``elements``). After the timing the sources get a new
version and the destination is overwritten. After one more refit every destination element is
compared with the bits for its name and place. A wrong one makes the sample an error without times.

Metrics (tuples have one number for each rank): ``received_bytes``, ``sent_bytes`` and
``extra_bytes`` of one refit as it counts them; ``allocated_bytes`` (the allocator's peak above the
two models); ``device_bytes`` (the device memory taken since then, with libraries' buffers);
``source_bytes``, ``destination_bytes``; ``phase_NAME_s``, each phase alone, on the slowest rank;
``compared`` elements; and the metrics of the request.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from meshwise import store, timing
from meshwise.options.refit import Moving
from meshwise.probe import elements
from meshwise.probe.loop import Failed, Metrics, outcome, together
from meshwise.probe.work import torch_dtype
from meshwise.ranks import Ranks
from meshwise.reshard.holdings import Holdings, buffers, holdings
from meshwise.reshard.transfer import renumbered
from meshwise.reshard.weights import Moved, Refit
from meshwise.spec import Case, Record, Resharding
from meshwise.spec.label import label

_FOREVER_S = 1e9  # only the number of iterations ends the timing


class RefitRequest(Record, kw_only=True):
    """A case to measure, the number of its refits, and whether to compare every element
    afterwards. ``metrics``: known before it runs."""

    case: Case
    run_dir: str
    asked: Moving = Moving()
    metrics: dict[str, float] = {}


def measure_ranks(ranks: Ranks, request: bytes) -> None:
    """Measure the request. Every rank must call this with the same one."""
    asked = msgspec.json.decode(request, type=RefitRequest)
    case = asked.case
    ranks.at(label(case))
    known: Metrics = {**asked.metrics}
    found = outcome(case, functools.partial(_measure, asked, ranks), known)
    if ranks.rank == 0:
        store.append(asked.run_dir, found.sample)


class _Models(NamedTuple):
    """Both models: what every rank should hold, and this rank's tensors."""

    source_plan: Holdings
    destination_plan: Holdings
    source: dict[str, Tensor]
    destination: dict[str, Tensor]


def _measure(asked: RefitRequest, ranks: Ranks) -> tuple[timing.Timed, Metrics, str]:
    op, case = asked.case.op, asked.case
    assert isinstance(op, Resharding)
    models = together(ranks, lambda: _allocated(op, ranks))
    together(ranks, lambda: _renew(models, ranks, version=1))
    memory = _RefitMemory(ranks.device)
    refit = together(ranks, lambda: _refit(case, op, models, ranks))
    try:
        timed, metrics = _timed(asked, refit, op, models, memory, ranks)
    except (Failed, torch.OutOfMemoryError):  # raised on all ranks
        refit.close()  # not after any other error: other ranks may not answer
        raise
    refit.close()
    return timed, metrics, f"auto chose {refit.method}" if case.backend == "auto" else ""


def _timed(
    asked: RefitRequest,
    refit: Refit,
    op: Resharding,
    models: _Models,
    memory: "_RefitMemory",
    ranks: Ranks,
) -> tuple[timing.Timed, Metrics]:
    moved: list[Moved] = []

    def move() -> None:
        moved.append(refit())

    iterations = asked.asked.iterations
    for _ in range(asked.asked.warmup):
        move()
    timed = timing.measure(
        [move],
        ranks=ranks,
        regime="blocking",
        distributed=True,
        max_iterations=iterations,
        min_iterations=iterations,
        max_seconds=_FOREVER_S,
        prepare=_before(op, models, ranks),
    )
    metrics = _totals(moved[-iterations:], models, memory, ranks)
    metrics |= {f"phase_{name}_s": seconds for name, seconds in refit.phases().items()}
    if asked.asked.check:
        metrics["compared"] = _checked(refit, models, ranks)
    return timed, metrics


def _allocated(op: Resharding, ranks: Ranks) -> _Models:
    source, destination = holdings(op.model, op.source), holdings(op.model, op.destination)
    if op.placement:
        destination = renumbered(destination, op.placement)
    own = [
        {
            name: torch.empty(shape, dtype=torch_dtype(dtype), device=ranks.device)
            for name, (shape, dtype) in buffers(held, ranks.rank).items()
        }
        for held in (source, destination)
    ]
    return _Models(source, destination, *own)


def _refit(case: Case, op: Resharding, models: _Models, ranks: Ranks) -> Refit:
    return Refit(
        models.source or None,
        models.source_plan,
        models.destination or None,
        models.destination_plan,
        ranks=ranks,
        method=case.backend,  # type: ignore[arg-type]  # the verb knows which there are
        cap_bytes=op.cap_bytes,
        verify=op.verify,
        atomic=op.atomic,
        delta=op.changed is not None,
    )


def _renew(models: _Models, ranks: Ranks, version: int) -> None:
    """Write a new version into the sources, and overwrite the destination with poison."""
    elements.write(models.source, models.source_plan, ranks.rank, version)
    elements.poison(models.destination)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _before(op: Resharding, models: _Models, ranks: Ranks) -> Callable[[], None]:
    """Return what runs untimed before a refit: ranks meet, and with delta some weights change."""
    if op.changed is None:
        return ranks.start_together
    every, turn = max(1, round(1 / op.changed)), iter(range(2**62))

    def prepare() -> None:
        elements.change(models.source, models.source_plan, ranks.rank, next(turn), every)
        ranks.synchronize("new weights")
        ranks.start_together()

    return prepare


def _checked(refit: Callable[[], object], models: _Models, ranks: Ranks) -> int:
    """Check one refit; return the elements compared. Failed names the first wrong rank, tensor."""
    _renew(models, ranks, version=2)
    ranks.barrier("the check")
    refit()
    own, plan = models.destination, models.destination_plan
    found = ranks.gather(elements.wrong(own, plan, ranks.rank, version=2))
    for rank, (_, counts) in enumerate(found):
        if counts:
            name, number = next(iter(counts.items()))
            raise Failed(
                "error",
                f"wrong weights: rank {rank} has {number} wrong elements of {name}, "
                f"{sum(counts.values())} in {len(counts)} tensors",
            )
    return sum(compared for compared, _ in found)


def _totals(moved: list[Moved], models: _Models, memory: "_RefitMemory", ranks: Ranks) -> Metrics:
    """Return the metrics of the timed refits, the same on all ranks."""
    mine = {
        "received_bytes": moved[-1].received_bytes,
        "sent_bytes": moved[-1].sent_bytes,
        "extra_bytes": max(one.extra_bytes for one in moved),
        "source_bytes": _num_bytes(models.source),
        "destination_bytes": _num_bytes(models.destination),
        **memory.taken(),
    }
    found = ranks.gather(mine)
    return {name: tuple(float(own[name]) for own in found) for name in mine}


def _num_bytes(own: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in own.values())


class _RefitMemory:
    """Measures device memory taken since this object was made; a CPU gives no figures."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.allocated = torch.cuda.memory_allocated(device)
            self.free, _ = torch.cuda.mem_get_info(device)

    def taken(self) -> dict[str, int]:
        if self.device.type != "cuda":
            return {}
        free, _ = torch.cuda.mem_get_info(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        return {"allocated_bytes": peak - self.allocated, "device_bytes": self.free - free}
