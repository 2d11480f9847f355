"""Receivers read the senders' weights where they lie, by CUDA IPC: no staging, one pass.

For processes whose GPUs reach each other's memory. Each stage:

    meet        all sources are final
    pull        a kernel a peer reads the peer's tiles and writes them in place, hashing what it
                read; meanwhile every sender hashes what it holds, and copies what stays with it
    meet        all is read, all hashes are made
    compare     each receiver fetches the senders' hashes
    meet        the verdict: how many tiles differ, over all ranks; sources may change again

With ``verify`` = full, hashes are made of memory after the pulls, of the sources and of all that
was written. With ``delta``, receivers fetch the hashes first and pull what changed. The whole is
one CUDA graph. (Writing to the receivers instead, and hashing there as parts arrive, took 34 ms
where reading takes 25: benchmarks/2026-11-21-refit-2xh200.)
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from meshwise.reshard import tiles
from meshwise.reshard.tiles import Buffer, Table
from meshwise.reshard.transports.copies import Addresses, Launch, Lines, copier
from meshwise.reshard.transports.job import Job, ends, in_place, num_bytes, straight
from meshwise.reshard.transports.lanes import Lanes
from meshwise.reshard.transports.peers import Meeting, Peers, Share, share
from meshwise.reshard.transports.staged import PROGRAMS

PULL_PROGRAMS = 132  # of all peers together: they fill the links, one a multiprocessor of an H100
BESIDE_PROGRAMS = 64  # of each kernel beside the pulls, which must find room at once
BESIDE = 3  # times the bytes that are pulled can be copied beside them by so few
_LINE = 2**20


class Direct:
    """A job's pulls, ready to be launched. ``launch`` may be captured in a graph."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.lanes = Lanes(job.device)
        self.peers = Peers()
        self.meeting = Meeting(job.ranks, self.peers, job.ranks.others)
        self.own = job.addresses()
        self.far = self._reached()
        self.stages = [_Stage(self, table) for table in job.stages]

    def _reached(self) -> Addresses:
        """Addresses of all buffers that this rank reads, its own and its peers'."""
        job, here = self.job, self.job.ranks.rank
        wanted: set[int] = set()
        exported: dict[str, Share] = {}
        for table in job.stages:
            read = np.unique(table["read"][table["source"] == here]).tolist()
            exported |= {_key(job.buffers[number]): share(job.own[number]) for number in read}
            wanted |= set(table["read"][table["source"] != here].tolist())
        found, shared = self.own.copy(), job.ranks.gather(exported)
        for number in sorted(wanted):
            buffer = job.buffers[number]
            found[number] = self.peers.address(Share(*shared[buffer.rank][_key(buffer)]))
        return found

    @property
    def extra_bytes(self) -> int:
        return sum(stage.extra_bytes for stage in self.stages)

    @property
    def total(self) -> Tensor:
        return self.meeting.total

    @property
    def value(self) -> Tensor:
        return self.meeting.value

    def launch(self) -> None:
        for stage in self.stages:
            stage.launch()

    def parts(self) -> Iterator[tuple[str, Launch]]:
        """A refit in pieces, to be timed each by itself; all ranks have the same."""
        for stage in self.stages:
            yield "copy within", stage.local
            yield "move", stage.pull
            yield "hash", stage.look
            yield "meet", self.meeting.meet
            yield "compare", stage.fetch

    def settle(self, verified: bool) -> None:
        """With ``delta``: what the destination has now, or that nobody knows."""
        for stage in self.stages:
            stage.last.copy_(stage.theirs)
            stage.fresh.fill_(not verified)

    def delta_bytes(self) -> int:
        """Bytes that this rank received in the last launch, with ``delta``."""
        return sum(stage.delta_bytes() for stage in self.stages)

    def wrong_tiles(self) -> list[Table]:
        """Tiles that were written here and whose hashes differ, stage by stage."""
        return [stage.wrong_tiles() for stage in self.stages]

    def release(self) -> None:
        """Let go of the device where it waits for a peer that will not come."""
        self.meeting.stop.fill_(1)

    def close(self) -> None:
        self.peers.close()


class _Stage:
    def __init__(self, direct: Direct, table: Table) -> None:
        job, self.direct = direct.job, direct
        self.ends = found = ends(table, job.ranks.rank)
        device, verify, own = job.device, job.verify, direct.own

        def sums(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        self.sent, self.received = sums(len(found.sends)), sums(len(found.receives))
        self.theirs, self.last = sums(len(found.receives)), sums(len(found.receives))
        self.kept = sums(len(found.local)), sums(len(found.local))
        self.changed = torch.ones(len(found.receives), dtype=torch.int32, device=device)
        self.fresh = torch.ones(1, dtype=torch.bool, device=device)  # the destination has nothing
        self.pulls = self._pulls(self.received if verify == "hash" else None)
        pulled = num_bytes(found.receives)
        hidden = num_bytes(found.local) <= BESIDE * pulled
        within = straight(job, found.local, own, own)
        self.local = copier(within, None, device, BESIDE_PROGRAMS if hidden else PROGRAMS)
        beside = verify == "hash" and pulled and not job.delta
        hashed = partial(copier, device=device, programs=PROGRAMS, stores=False)
        self.look = partial(hashed, programs=BESIDE_PROGRAMS if beside else PROGRAMS)(
            in_place(job, found.sends, own, "read"), self.sent
        )
        self.again: list[Launch] = []
        if verify == "full":
            self.again = [
                self.look,
                hashed(in_place(job, found.receives, own, "write"), self.received),
                hashed(in_place(job, found.local, own, "read"), self.kept[0]),
                hashed(in_place(job, found.local, own, "write"), self.kept[1]),
            ]
        self.fetch = self._fetch()

    @property
    def extra_bytes(self) -> int:
        found, full = self.ends, 1 + (self.direct.job.verify == "full")
        lines = len(found.sends) + full * len(found.receives) + (2 * full - 1) * len(found.local)
        sums = (self.sent, self.received, self.theirs, self.last, *self.kept, self.changed)
        return 7 * 8 * lines + sum(tensor.nbytes for tensor in sums)

    def _pulls(self, fused: Tensor | None) -> list[Launch]:
        """A launch a peer, whose programs are its share of the bytes."""
        direct, found = self.direct, self.ends
        every = straight(direct.job, found.receives, direct.far, direct.own)
        total = max(1, num_bytes(found.receives))
        pulls = []
        for span in found.receive_spans.values():
            mine = Lines(every.at[span], every.kind[span], every.pairs)
            programs = max(1, round(PULL_PROGRAMS * num_bytes(found.receives[span]) / total))
            chosen = self.changed if direct.job.delta else None
            pulls.append(copier(mine, fused, direct.job.device, programs, chosen=chosen))
        return pulls

    def _fetch(self) -> Launch:
        """Reads the senders' hashes of the tiles that this rank receives."""
        direct, ranks, found = self.direct, self.direct.job.ranks, self.ends
        begins = {str(peer): span.start for peer, span in found.send_spans.items()}
        told = ranks.gather([share(self.sent) if len(self.sent) else None, begins])
        lines = []
        for peer, span in found.receive_spans.items():
            shared, begins = told[peer]
            address = direct.peers.address(Share(*shared)) + 8 * begins[str(ranks.rank)]
            lines += _plain(address, self.theirs[span].data_ptr(), 8 * (span.stop - span.start))
        at = np.array(lines, np.int64).reshape(-1, 7)
        return copier(Lines(at, np.full(len(at), 8, np.int32), ()), None, ranks.device, 32)

    def launch(self) -> None:
        lanes, meet, job = self.direct.lanes, self.direct.meeting.meet, self.direct.job
        begin = lanes.now()
        aside = [lanes.run("local", self.local, begin)]
        if job.delta:
            self.look()
            meet()
            self.fetch()
            self.changed.copy_(torch.ne(self.theirs, self.last) | self.fresh)
        elif job.verify == "hash":
            aside.append(lanes.run("look", self.look, begin))
        meet()
        self.pull()
        lanes.join(*aside)
        for work in self.again:
            work()
        meet()
        if job.verify == "off":
            return
        self.fetch()
        value = self.direct.meeting.value
        value.add_(torch.ne(self.theirs, self.received).sum())
        if self.again:
            value.add_(torch.ne(*self.kept).sum())
        meet()

    def pull(self) -> None:
        lanes = self.direct.lanes
        ready = lanes.now()
        lanes.join(*[lanes.run(f"pull {i}", pull, ready) for i, pull in enumerate(self.pulls)])

    def delta_bytes(self) -> int:
        return int(tiles.nbytes(self.ends.receives)[self.changed.bool().cpu().numpy()].sum())

    def wrong_tiles(self) -> Table:
        wrong = torch.ne(self.theirs, self.received).nonzero()[:, 0].cpu().numpy()
        kept = torch.ne(*self.kept).nonzero()[:, 0].cpu().numpy()
        return np.concatenate([self.ends.receives[wrong], self.ends.local[kept]])


def _key(buffer: Buffer) -> str:
    return f"{buffer.side} {buffer.name}"


def _plain(read: int, write: int, nbytes: int) -> list[Sequence[int]]:
    """Lines that copy ``nbytes``, a multiple of 8, as they are."""
    return [
        (read + first, write + first, 0, 0, 1, min(_LINE, nbytes - first), 0)
        for first in range(0, nbytes, _LINE)
    ]
