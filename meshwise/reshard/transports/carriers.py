"""Carriers of messages between ranks: NCCL, gloo, symmetric memory. See ``staged.Carrier``."""

import itertools
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise import nccl, torch_private
from meshwise.ranks import Ranks
from meshwise.reshard.transports.base import PROGRAMS
from meshwise.reshard.transports.lanes import Launch
from meshwise.reshard.transports.peers import Meeting, Peers
from meshwise.reshard.transports.staged import Slots, Spans

_made = itertools.count()
_CONNECTIONS = 4  # of gloo, each with a socket and a thread; 8 were slower between two GPUs


def _memory(count: int, nbytes: int, device: torch.device) -> list[Tensor]:
    return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]


class Nccl:
    """One communicator of all ranks, called directly: the messages of a step are one group."""

    programs = 48  # NCCL's kernels fill a multiprocessor each, up to 32
    blocks = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        ids = ranks.gather(nccl.unique_id() if ranks.rank == 0 else None)
        self.communicator = nccl.Communicator(ids[0], ranks.rank, ranks.world_size)

    def slots(self, count: int, nbytes: int, regions: Mapping[int, int]) -> Slots:
        memory = _memory(count, nbytes, self.ranks.device)
        return Slots(memory, lambda slot, *messages: self.swap(memory[slot], *messages))

    def swap(self, source: Tensor, sends: Spans, into: Tensor, receives: Spans) -> Launch:
        return self.communicator.exchange(
            [nccl.Message(peer, source[span]) for peer, span in sends.items()],
            [nccl.Message(peer, into[span]) for peer, span in receives.items()],
        )

    def add(self, value: Tensor, total: Tensor) -> Launch:
        return self.communicator.collective("all_reduce", value, total)

    def release(self) -> None:
        """Do nothing: abort hangs while a graph of NCCL's calls runs, so the process must end."""

    def close(self) -> None:
        self.communicator.close()


class Gloo:
    """Messages between hosts' memories; a GPU's messages pass through pinned memory.

    Large messages are cut over several groups, since each has one thread and one socket a pair.
    """

    programs = PROGRAMS
    blocks = True

    def __init__(self, ranks: Ranks) -> None:
        assert ranks.store is not None
        self.ranks = ranks
        turn = max(ranks.gather(next(_made)))  # a store's keys are for one group
        count = _CONNECTIONS if ranks.device.type == "cuda" else 1
        self.groups = [ranks.group(f"refit/{turn}/{i}") for i in range(count)]
        self.hosts: dict[int, Tensor] = {}

    def slots(self, count: int, nbytes: int, regions: Mapping[int, int]) -> Slots:
        memory = _memory(count, nbytes, self.ranks.device)
        hosts = [self._host(slot) for slot in memory]

        def exchange(slot: int, sends: Spans, into: Tensor, receives: Spans) -> Launch:
            return partial(self._exchange, hosts[slot], sends, into, receives)

        def packed(slot: int) -> None:
            hosts[slot].copy_(memory[slot], non_blocking=True)

        on_host = self.ranks.device.type == "cpu"
        return Slots(memory, exchange, None if on_host else packed)

    def swap(self, source: Tensor, sends: Spans, into: Tensor, receives: Spans) -> Launch:
        host = self._host(source)

        def work() -> None:
            if host is not source:
                host.copy_(source)
            self._exchange(host, sends, into, receives)

        return work

    def _exchange(self, host: Tensor, sends: Spans, into: Tensor, receives: Spans) -> None:
        there = self._host(into)
        if there is not into:  # packed data is still on its way to the host
            self.ranks.synchronize("packing", torch.cuda.current_stream().record_event(), poll_s=0)
        works = []
        for peer, span in receives.items():
            works += [g.recv([part], peer, 0) for g, part in self._cut(there[span])]
        for peer, span in sends.items():
            works += [g.send([part], peer, 0) for g, part in self._cut(host[span])]
        for work in works:
            work.wait()
        if there is not into:
            for span in receives.values():
                into[span].copy_(there[span], non_blocking=True)

    def _cut(self, message: Tensor) -> list[tuple[Any, Tensor]]:
        parts = message.tensor_split(len(self.groups))
        return [(g, part) for g, part in zip(self.groups, parts, strict=True) if len(part)]

    def _host(self, tensor: Tensor) -> Tensor:
        """Return the pinned memory that stands for a GPU's; on a CPU the tensor itself."""
        if tensor.device.type == "cpu":
            return tensor
        key = tensor.data_ptr()
        if key not in self.hosts:
            self.hosts[key] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return self.hosts[key]

    def add(self, value: Tensor, total: Tensor) -> Launch:
        def work() -> None:
            summed = value.cpu()
            self.groups[0].allreduce([summed]).wait()
            total.copy_(summed)

        return work

    def release(self) -> None:
        """Do nothing: gloo waits on the host, which has given up."""

    def close(self) -> None:
        self.groups.clear()


class Symmetric:
    """Slots in symmetric memory of NVSHMEM's back end; the receiver pulls them by copy engine.

    Ranks that exchange anything meet on their devices when slots are packed and again when they
    have been read; no other rank waits. For the ranks of one host, in one job.
    """

    programs = PROGRAMS
    blocks = False

    def __init__(self, ranks: Ranks) -> None:
        memory = torch_private.symmetric_memory()
        if not memory.is_nvshmem_available():
            raise ValueError("method = 'nvshmem': this torch has no NVSHMEM; use ipc or nccl")
        memory.set_backend("NVSHMEM")
        assert dist.group.WORLD is not None
        self.memory, self.group, self.ranks = memory, dist.group.WORLD, ranks
        self.peers = Peers()

    def _shared(self, nbytes: int) -> tuple[Tensor, Any]:
        """Allocate symmetric memory, for the rank that needs most; all ranks call together."""
        most = max(1, *self.ranks.gather(nbytes))
        mine = self.memory.empty(most, dtype=torch.uint8, device=self.ranks.device)
        return mine, self.memory.rendezvous(mine, self.group)

    def slots(self, count: int, nbytes: int, regions: Mapping[int, int]) -> Slots:
        mine, handle = self._shared(count * nbytes)
        told = self.ranks.gather([nbytes, {str(peer): at for peer, at in regions.items()}])
        far = {  # a peer's slots, from where this rank's messages begin
            peer: handle.get_remote_tensor(peer, (count * size,), torch.uint8).view(count, size)[
                :, places[str(self.ranks.rank)] :
            ]
            for peer, (size, places) in enumerate(told)
            if str(self.ranks.rank) in places
        }

        def exchange(slot: int, sends: Spans, into: Tensor, receives: Spans) -> Launch:
            return _copies(
                (into[span], far[peer][slot, : span.stop - span.start])
                for peer, span in receives.items()
            )

        partners = sorted({*regions, *far})
        meet, taken = (Meeting(self.ranks, self.peers, partners).meet for _ in range(2))
        memory = list(mine[: count * nbytes].view(count, nbytes))
        return Slots(memory, exchange, lambda slot: meet(), taken)

    def swap(self, source: Tensor, sends: Spans, into: Tensor, receives: Spans) -> Launch:
        mine, handle = self._shared(source.nbytes)
        told = self.ranks.gather({str(peer): span.start for peer, span in sends.items()})
        pairs = []
        for peer, span in receives.items():
            length, begins = span.stop - span.start, told[peer][str(self.ranks.rank)]
            far = handle.get_remote_tensor(peer, (begins + length,), source.dtype)
            pairs.append((into[span], far[begins:]))
        copy, staged = _copies(pairs), mine[: source.nbytes].view(source.dtype)
        meet = Meeting(self.ranks, self.peers, sorted({*sends, *receives})).meet

        def work() -> None:
            staged.copy_(source)
            meet()
            copy()
            meet()

        return work

    def add(self, value: Tensor, total: Tensor) -> Launch:
        meeting = Meeting(self.ranks, self.peers, self.ranks.others)

        def work() -> None:
            meeting.value.copy_(value)
            meeting.meet()
            total.copy_(meeting.total)

        return work

    def release(self) -> None:
        self.peers.release()

    def close(self) -> None:
        self.peers.close()


def _copies(pairs: Iterable[tuple[Tensor, Tensor]]) -> Launch:
    """Make a launch that copies each pair's second into its first: by copy engine if gapless."""
    kept = list(pairs)

    def work() -> None:
        for to, taken in kept:
            to.copy_(taken, non_blocking=True)

    return work


def open(method: str, ranks: Ranks) -> Nccl | Gloo | Symmetric:
    """Open the carrier called ``method``; ValueError if it is not available."""
    if method == "gloo":
        return Gloo(ranks)
    if ranks.device.type != "cuda":
        raise ValueError(f"method = {method!r}: needs GPUs; use gloo")
    return Nccl(ranks) if method == "nccl" else Symmetric(ranks)
