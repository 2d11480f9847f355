"""Refit: move live weights of a training model into an inference model, in place and verified.

In: on every rank the two models (or None), and what each rank holds of them (``Holdings``, or read
from live DTensors). Out: a ``Refit`` whose call moves the weights once. Making it plans the
transfer, compares the plan between ranks and connects them. Calling it exchanges no metadata.

The destination has a version. It is None from before the first byte is written until every rank has
verified what it received, so that half-old, half-new weights are never taken for either. ``atomic``
keeps the old weights whole until then, at the price of one more copy of them.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, NoReturn, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn

from meshwise.jobs import attached
from meshwise.ranks import Ranks
from meshwise.reshard import against_torch, checks, holdings, live, tiles, transfer
from meshwise.reshard.holdings import Holdings
from meshwise.reshard.transports import carriers, peers
from meshwise.reshard.transports.base import PROGRAMS, Transport, TransportJob, written
from meshwise.reshard.transports.copies import DTYPES, copier
from meshwise.reshard.transports.direct import Direct
from meshwise.reshard.transports.lanes import Launch, chained
from meshwise.reshard.transports.staged import Staged
from meshwise.spec import Plan

Method = Literal["auto", "ipc", "nccl", "nvshmem", "gloo"]
Verify = Literal["off", "hash", "full", "full_tensor"]
Model = nn.Module | Mapping[str, Tensor] | None
MiB = 2**20
T = TypeVar("T")


class Moved(NamedTuple):
    """One refit on this rank. ``seconds``: from the call to the verdict of all ranks."""

    version: int
    seconds: float
    sent_bytes: int
    received_bytes: int
    copied_bytes: int  # within the rank
    extra_bytes: int  # staging, tables and hashes; the old version with ``atomic``


class RefitError(RuntimeError):
    """Some rank refused and nothing was written, or some rank's destination is not whole. The
    version tells which: as before, or None (``atomic``: always as before)."""


class Refit:
    """Moves weights from ``source`` to ``destination``; all ranks make and call it together.

    ``source``, ``destination``: a module, or tensors by name, or None if this rank has none.
    ``*_plan``: what every rank holds of each logical tensor, or the ``Plan`` by which ``meshwise
    run`` laid the model out. None reads it from the live tensors: DTensors by their placements,
    others as whole. ``ranks``: by default all that joined torch.distributed. ``method``: the
    transport; auto is ipc if the GPUs of one host reach each other, else nccl, and gloo without
    GPUs. ``cap_bytes``: limit on staging, tables and hashes of a rank. ``verify``: hash (compares
    what was sent and received), full (compares memory with memory, so sources that changed
    meanwhile show), full_tensor (full, then both models by torch's own ``full_tensor``: slow, for a
    first run), off. ``atomic``: keep the old version whole until the new one is verified.
    ``delta``: move only tiles of 64 KiB that changed since the last refit. ``only``: patterns of
    the logical tensors to move, such as ``*lora*``. ``convert``: dtypes may differ. All ranks raise
    the same ValueError for what cannot be moved.
    """

    def __init__(
        self,
        source: Model,
        source_plan: Plan | Holdings | None,
        destination: Model,
        destination_plan: Plan | Holdings | None,
        *,
        ranks: Ranks | None = None,
        method: Method = "auto",
        cap_bytes: int = 512 * MiB,
        verify: Verify = "hash",
        atomic: bool = False,
        delta: bool = False,
        convert: bool = False,
        only: Sequence[str] = (),
    ) -> None:
        self.ranks = ranks = ranks or attached()
        ranks.at("refit")
        options = {
            "method": method, "cap_bytes": cap_bytes, "verify": verify, "atomic": atomic,
            "delta": delta, "convert": convert, "only": list(only),
        }  # fmt: skip
        _check_options(ranks, options)
        self.version: int | None = None
        self.count = 0
        self.ended = ""  # why it cannot be called any more
        shares = live.gathered(source, ranks), live.gathered(destination, ranks)
        self.watches = live.Watch(source), live.Watch(destination)
        models = live.tensors(source), live.tensors(destination)
        hosts = ranks.gather(socket.gethostname())
        host_of = [hosts.index(host) for host in hosts].__getitem__

        def planned() -> tuple[transfer.Transfer, list[Holdings]]:
            plans = _plans(ranks, shares, (source_plan, destination_plan), models, only)
            found = transfer.transfer_plan(*plans, convert=convert, only=only, host_of=host_of)
            checks.check_memory(ranks, found.names, plans, models)
            return found, plans

        self.transfer, plans = _together(ranks, planned)
        _check_alike(ranks, {"the plan": transfer.digest(self.transfer)})
        self.compared = (source, destination) if verify == "full_tensor" else ()
        if self.compared:
            verify = "full"
            wrong = against_torch.check(ranks, self.transfer, plans, self.compared)
            _together(ranks, lambda: checks.refuse(wrong, "verify = 'full_tensor', use 'full': "))
        self.kept = _kept(ranks, self.transfer, models[1]) if atomic else {}
        buffers = models[0], {**models[1], **self.kept}
        self.job = _together(
            ranks, lambda: _job(ranks, self.transfer, buffers, shares, verify, delta)
        )
        self.method = _method(method, ranks)
        self.transport = _transport(self.job, self.method, cap_bytes)
        self.commit = _between(self.job, self.kept, models[1]) if atomic else None
        kept = sum(tensor.nbytes for tensor in self.kept.values())
        self.moved = Moved(0, 0.0, *_loads(self.job), self.transport.extra_bytes + kept)
        self.graph: torch.cuda.CUDAGraph | None = None
        pinned = ranks.device.type == "cuda"
        self.flag, self.verdict = (
            torch.zeros(1, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        )

    def __call__(self) -> Moved:
        """Move the weights once; the destination then has the next version.

        RefitError names rank and tensor if what arrived is not what was sent, or if a tensor was
        replaced since the Refit was made. TimeoutError names a rank that did not come.
        """
        if self.ended:
            raise RuntimeError(f"{self.ended}; make a new Refit")
        begin, before = time.perf_counter(), self.version
        if self.commit is None:
            self.version = None
        self.flag[0] = 1 if (reason := self._replaced()) else 0
        self._waited(self._launch, "a refit")
        if self.job.delta:
            self.transport.settle(verified=not self.verdict[0])
        if self.verdict[0]:
            self._fail(reason, before)
        if self.compared:
            self._compare()
        if self.commit is not None:
            self.version = None
            self._waited(self.commit, "the commit")
        self.count += 1
        self.version = self.count
        moved = self.moved._replace(version=self.count, seconds=time.perf_counter() - begin)
        return self._of_changes(moved) if self.job.delta else moved

    def _of_changes(self, moved: Moved) -> Moved:
        """Count the changed bytes that were sent and received, as the receivers report them."""
        told = self.ranks.gather({str(k): n for k, n in self.transport.delta_bytes().items()})
        here = self.ranks.rank
        sent, received = sum(of.get(str(here), 0) for of in told), sum(told[here].values())
        return moved._replace(sent_bytes=sent, received_bytes=received)

    def _compare(self) -> None:
        """RefitError unless torch gathers the same whole tensors on both sides."""
        told: list[list[dict[str, str]]] = []

        def work() -> None:
            mine = [against_torch.digests(self.transfer, model) for model in self.compared]
            told.extend(self.ranks.gather(mine))

        self._waited(work, "torch's full_tensor")
        if wrong := list(against_torch.differences(told)):
            if self.job.delta:
                self.transport.settle(verified=False)
            said = f"by torch's full_tensor {_few(wrong)}"
            raise RefitError(f"{said}; the destination has no version")

    def _waited(self, launch: Launch, what: str) -> None:
        """Run ``launch`` and wait for it. An error names a lost rank and ends this Refit."""
        ranks = self.ranks
        try:
            launch()
            ranks.synchronize(what, self._event(), poll_s=0)
        except (RuntimeError, TimeoutError) as error:
            self.ended = "a refit was broken off"
            told = self._told(ranks.explain(error))
            self.transport.connections.release()
            raise told from None

    def phases(self) -> dict[str, float]:
        """Time each phase of one refit alone, in seconds on the slowest rank; in a refit they
        overlap. The weights move, but are not verified: call the Refit afterwards."""
        ranks, times = self.ranks, dict[str, float]()
        self.version = None
        for name, work in self.transport.parts():
            ranks.barrier(name)
            begin = time.perf_counter()
            work()
            ranks.synchronize(name, poll_s=0)
            slowest = max(ranks.gather(time.perf_counter() - begin))
            times[name] = times.get(name, 0.0) + slowest
        if self.job.delta:
            self.transport.settle(verified=False)
        return times

    def close(self) -> None:
        """Release what the peers share. All ranks close together, before the models go."""
        if self.ended:
            return
        self.ended, self.version, self.graph = "this Refit is closed", None, None
        self.ranks.barrier("the end of a refit")
        self.transport.connections.close()
        self.ranks.barrier("the end of a refit")

    def _launch(self) -> None:
        """Launch a refit; on a GPU later calls replay a graph, if the transport can be captured."""
        if self.graph is not None:
            self.graph.replay()
            return
        self._work()
        in_graph = self.method != "gloo" and not (self.job.delta and self.method != "ipc")
        if self.ranks.device.type == "cuda" and in_graph:
            self.ranks.synchronize("the first refit")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._work()
            self.graph = graph

    def _work(self) -> None:
        self.transport.value.copy_(self.flag, non_blocking=True)
        self.transport.launch()
        self.verdict.copy_(self.transport.total, non_blocking=True)

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream().record_event() if self.graph else None

    def _replaced(self) -> str:
        for side, watch in zip(checks.SIDES, self.watches, strict=True):
            if name := watch.replaced():
                return f"{side} {name} was replaced since this Refit was made; make a new one"
        return ""

    def _fail(self, reason: str, before: int | None) -> NoReturn:
        """Raise what went wrong, rank by rank. If a rank refused, nothing was written."""
        told = self.ranks.gather(reason)
        if any(told):
            self.version = before
        else:
            told = self.ranks.gather(self._wrong())
        state = f"version {self.version}" if self.version else "no version"
        texts = [f"rank {i}: {text}" for i, text in enumerate(told) if text]
        raise RefitError(f"{'; '.join(texts)}; the destination has {state}")

    def _wrong(self) -> str:
        found = [
            f"{self.transfer.names[tile['tensor']]} from rank {tile['source']}"
            for stage in self.transport.stages
            for tile in stage.wrong_tiles()
        ]
        names = list(dict.fromkeys(found))
        return f"{_few(names)} arrived other than sent" if names else ""

    def _told(self, error: Exception) -> Exception:
        """Return the error of a lost rank, with the tensors that are not whole on this one."""
        text = str(error)
        if not isinstance(error, TimeoutError) and re.search("timed out|timeout", text, re.I):
            waited_s = self.ranks.timeout_s
            error = TimeoutError(f"a rank came more than {waited_s:g} s late: {text}")
        lost = [r for r in range(self.ranks.world_size) if f"{self.ranks.name(r)} (" in str(error)]
        table = np.concatenate(self.job.stages)
        mine = (table["destination"] == self.ranks.rank) & np.isin(table["source"], lost)
        names = [self.transfer.names[i] for i in np.unique(table["tensor"][mine])]
        return type(error)(f"{error}; not whole here: {_few(names)}") if names else error


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _loads(job: TransportJob) -> tuple[int, int, int]:
    """Count the bytes that this rank sends, receives and copies within itself."""
    here, table = job.ranks.rank, np.concatenate(job.stages)
    size, out, into = tiles.nbytes(table), table["source"] == here, table["destination"] == here
    return int(size[out & ~into].sum()), int(size[into & ~out].sum()), int(size[into & out].sum())


def _between(job: TransportJob, read: Mapping[str, Tensor], write: Mapping[str, Tensor]) -> Launch:
    """Make a launch that copies what this rank received from ``read`` buffers to ``write``."""
    here = job.ranks.rank
    mine = {n: b.name for n, b in enumerate(job.buffers) if (b.side, b.rank) == (1, here)}
    bases = [
        job._replace(own={n: tensors[name] for n, name in mine.items()}).addresses()
        for tensors in (read, write)
    ]
    go = torch.zeros(1, dtype=torch.int32, device=job.device)
    tables = (stage[stage["destination"] == here] for stage in job.stages)
    return chained([copier(written(job, each, *bases), None, go, PROGRAMS) for each in tables])


def _holdings(plan: Plan | Holdings) -> Holdings:
    if isinstance(plan, Plan):
        return holdings.of_plan(plan)
    if not isinstance(plan, Mapping):
        raise ValueError(
            f"a plan is a Plan or Holdings, not {type(plan).__name__}; of a WeightLayout make them "
            "by meshwise.reshard.holdings.holdings(model, layout)"
        )
    return plan


def _plans(
    ranks: Ranks,
    shares: Sequence[live.Shares],
    given: Sequence[Plan | Holdings | None],
    models: Sequence[Mapping[str, Tensor]],
    only: Sequence[str],
) -> list[Holdings]:
    """Return what every rank holds of both sides, as plans or the live tensors say, checked."""
    plans = [
        live.held(shared, as_source=side == 0) if plan is None else _holdings(plan)
        for side, (shared, plan) in enumerate(zip(shares, given, strict=True))
    ]
    others = [[] if plan is None else held for held, plan in zip(shares, given, strict=True)]
    checks.check_held(ranks, plans, models, others)
    if given[1] is None:
        checks.check_tied(plans[0], shares[1], only)
    return plans


def _transport(job: TransportJob, method: str, cap_bytes: int) -> Transport:
    if method == "ipc":
        return Direct(job, cap_bytes)
    return Staged(job, carriers.open(method, job.ranks), cap_bytes)


def _together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Return this rank's result of ``work``; raise a ValueError of one rank on all."""
    result, said = ranks.together(work, lambda e: str(e) if isinstance(e, ValueError) else None)
    told = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
    if told and len(set(said)) == 1:
        raise ValueError(said[0])
    checks.refuse(told)
    return result


def _check_options(ranks: Ranks, options: Mapping[str, object]) -> None:
    """Refuse invalid options, and options that differ: the ranks would wait for each other."""
    if options["delta"] and (options["atomic"] or options["verify"] == "off"):
        raise ValueError("delta = True: needs verify = 'hash' or 'full', and atomic = False")
    if options["verify"] == "full_tensor" and options["atomic"]:
        raise ValueError("verify = 'full_tensor': compares what is served; needs atomic = False")
    for name, kind in (("method", Method), ("verify", Verify)):
        if options[name] not in get_args(kind):
            raise ValueError(
                f"{name} = {options[name]!r}: must be one of {', '.join(get_args(kind))}"
            )
    cap_bytes = options["cap_bytes"]
    if not isinstance(cap_bytes, int) or cap_bytes <= 0:
        raise ValueError(f"cap_bytes = {cap_bytes!r}: must be a number of bytes, > 0")
    _check_alike(ranks, options)


def _check_alike(ranks: Ranks, said: Mapping[str, object]) -> None:
    told = ranks.gather(said)
    for rank, other in enumerate(told):
        for name, value in other.items():
            if value != told[0][name]:
                raise ValueError(
                    f"{name} = {value!r} on rank {rank}, {told[0][name]!r} on rank 0: give all "
                    "ranks the same"
                )


def _kept(
    ranks: Ranks, planned: transfer.Transfer, destination: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Copy the tensors that are written here; the copies are written in their place."""
    names = {
        move.put or planned.names[n]
        for stage in planned.stages
        for n, move in stage
        if move.destination == ranks.rank
    }
    return {name: _copied(destination[name]) for name in sorted(names)}


def _copied(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides; clone() would close its gaps."""
    strided = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return strided.copy_(tensor)


def _job(
    ranks: Ranks,
    planned: transfer.Transfer,
    models: Sequence[Mapping[str, Tensor]],
    shares: Sequence[live.Shares],
    verify: str,
    delta: bool,
) -> TransportJob:
    """Collect the tiles that concern this rank, and their buffers."""
    here = ranks.rank
    mine = [
        [(n, m) for n, m in stage if here in (m.source, m.destination)] for stage in planned.stages
    ]
    memory = live.memory(shares[0], 0) | live.memory(shares[1], 1)
    touched = (
        tiles.buffers_of(move, planned.names[n], side)
        for side, stage in enumerate(mine)
        for n, move in stage
    )
    buffers = sorted({buffer for both in touched for buffer in both})
    number = {buffer: i for i, buffer in enumerate(buffers)}
    pairs = [(DTYPES[a], DTYPES[b]) for a, b in planned.dtypes]
    converted = frozenset(i for i, (a, b) in enumerate(pairs) if a != b)
    stages = tuple(
        tiles.tiles(stage, memory, number, planned.names, side=min(i, 1),
                    converted=converted if i == 0 else frozenset())
        for i, stage in enumerate(mine)
    )  # fmt: skip
    own = {
        n: models[buffer.side][buffer.name] for buffer, n in number.items() if buffer.rank == here
    }
    return TransportJob(ranks, stages, buffers, own, pairs, verify, delta)


def _method(method: Method, ranks: Ranks) -> Method:
    """Resolve ``auto``, the same on all ranks."""
    if method in ("ipc", "nvshmem"):
        hosts = {*ranks.gather(socket.gethostname())}
        if len(hosts) > 1:
            raise ValueError(
                f"method = {method!r}: reaches the memory of one host's GPUs, and ranks are on "
                f"{len(hosts)}; use nccl"
            )
    if method != "auto":
        return method
    if ranks.device.type != "cuda":
        return "gloo"
    others = [i for i in range(torch.cuda.device_count()) if i != ranks.device.index]
    reached = all(torch.cuda.can_device_access_peer(ranks.device, i) for i in others)
    seen = socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES"), len(others)
    told = ranks.gather([seen, reached and peers.can_share(ranks.device)])
    alike = all(place == told[0][0] for place, _ in told)  # else GPUs' numbers may differ
    return "ipc" if alike and all(can for _, can in told) else "nccl"
