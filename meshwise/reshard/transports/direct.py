"""Receivers read the senders' weights in place, by CUDA IPC: no staging, one pass.

For processes whose GPUs reach each other's memory. A refit:

    meet        all sources are final (before the first stage)
    pull        one kernel per peer reads the peer's tiles, writes them in place and hashes what it
                read; meanwhile every sender hashes its tiles and copies those that stay with it
    meet        all tiles are read, all hashes are made
    compare     each receiver fetches the senders' hashes
    meet        the verdict: how many tiles differ, over all ranks; sources may change again

With ``verify`` = full, hashes are made of memory: of written tiles while others still come, and of
the sources at the end, so that a source that changed meanwhile shows. With ``delta``, receivers
fetch the hashes first and pull only what changed. The whole is one CUDA graph.

Writing to the receivers was faster than reading when both directions were in use and nothing else
ran (365 against 337 GB/s), but slower once copies within the ranks ran beside it:
benchmarks/2026-11-21-refit-2xh200.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwise.reshard import tiles
from meshwise.reshard.tiles import Table, TileBuffer
from meshwise.reshard.transports.base import (
    PROGRAMS,
    JobStage,
    Transport,
    TransportJob,
    num_bytes,
    straight,
)
from meshwise.reshard.transports.copies import Addresses, Lines, copier
from meshwise.reshard.transports.lanes import Launch
from meshwise.reshard.transports.peers import Handle, Meeting, Peers, share

PULL_PROGRAMS = 132  # over all peers: they fill the links, one per multiprocessor of an H100
BESIDE_PROGRAMS = 64  # of each kernel beside the pulls, which must find room at once
AGAIN_PROGRAMS = 132  # of kernels that read parts again
BESIDE = 3  # times the pulled bytes: so much can be copied beside the pulls by so few
PARTS = 8  # of the pulls: one part is read again while the next comes
_LINE = 2**13


class Direct(Transport):
    """A job's pulls, ready to be launched."""

    def __init__(self, job: TransportJob, cap_bytes: int) -> None:
        super().__init__(job)
        self.connections = self.peers = Peers()
        meeting = Meeting(job.ranks, self.peers, job.ranks.others)
        self.value, self.total, self.agree = meeting.value, meeting.total, meeting.meet
        self.far = self._reached()
        self.stages = [_DirectStage(self, table) for table in job.stages]
        if (most := max(job.ranks.gather(self.extra_bytes))) > cap_bytes:
            raise ValueError(
                f"cap_bytes = {cap_bytes}: tables and hashes need {most} bytes on some rank; give "
                "as much"
            )

    def _reached(self) -> Addresses:
        """Addresses of all buffers that this rank reads, its own and its peers'."""
        job, here = self.job, self.job.ranks.rank
        wanted: set[int] = set()
        exported: dict[str, Handle] = {}
        said = ""
        for table in job.stages:
            read = np.unique(table["read"][table["source"] == here]).tolist()
            try:
                exported |= {_key(job.buffers[number]): share(job.own[number]) for number in read}
            except ValueError as error:
                said = str(error)
            wanted |= set(table["read"][table["source"] != here].tolist())
        told = job.ranks.gather([said, exported])
        for rank, (text, _) in enumerate(told):
            if text:  # on all ranks alike
                raise ValueError(f"rank {rank}: {text}")
        found, shared = self.own.copy(), [shares for _, shares in told]
        for number in sorted(wanted):
            buffer = job.buffers[number]
            found[number] = self.peers.address(Handle(*shared[buffer.rank][_key(buffer)]))
        return found


class _DirectStage(JobStage):
    def __init__(self, direct: Direct, table: Table) -> None:
        super().__init__(direct, table)
        self.direct, job, found = direct, self.job, self.ends
        changing = len(found.receives) if job.delta else 0
        self.changed = torch.ones(changing, dtype=torch.int32, device=job.device)
        self.pulls = self._pulls()
        pulled = num_bytes(found.receives)
        hidden = num_bytes(found.local) <= BESIDE * pulled
        self.local = self.copied_within(BESIDE_PROGRAMS if hidden else PROGRAMS)
        beside = job.verify == "hash" and pulled and not job.delta
        sources = np.concatenate([found.sends, found.local]) if self.full else found.sends
        self.look = _once(
            self.lines_in_place(sources, "read"), self.looked,
            partial(self.hashed, programs=BESIDE_PROGRAMS if beside else PROGRAMS),
        )  # fmt: skip
        if self.full:
            put = self.lines_in_place(found.local, "write")
            self.kept_again = self.hashed(put, self.kept[1], PULL_PROGRAMS)
        self.fetch = self._fetch()
        self.travels = any(job.ranks.gather(bool(found.send_spans)))

    def parts(self) -> Iterator[tuple[str, Launch]]:
        if self.travels:
            yield "move", self.pull
            yield "hash", self.look
            yield "compare", self.fetch
        yield "meet", self.direct.agree

    @property
    def extra_bytes(self) -> int:
        found, full = self.ends, self.full
        lines = (
            len(found.sends) + (1 + full) * len(found.receives) + (1 + 2 * full) * len(found.local)
        )
        sums = self.looked, self.received, self.theirs, *self.last, self.kept[1], self.changed
        return 7 * 8 * lines + 3 * self.looked.nbytes + sum(tensor.nbytes for tensor in sums)

    def _pulls(self) -> list[list[tuple[Launch, Launch | None]]]:
        """Return, for each peer, launches that pull a part and read it again, part by part. Each
        peer gets programs by its share of the bytes."""
        direct, found, job = self.direct, self.ends, self.job
        far = straight(job, found.receives, direct.far, self.own)
        put = self.lines_in_place(found.receives, "write")
        total = max(1, num_bytes(found.receives))
        fused = self.received if job.verify == "hash" else None
        chosen = self.changed if job.delta else None
        pulls = []
        for span in found.receive_spans.values():
            programs = max(1, round(PULL_PROGRAMS * num_bytes(found.receives[span]) / total))
            parts = tiles.parts(found.receives[span], PARTS if self.full else 1)
            of_peer: list[tuple[Launch, Launch | None]] = []
            for part in parts:
                at = slice(span.start + part.start, span.start + part.stop)
                pull = copier(far.some(at), fused, self.refused, programs, chosen=chosen)
                again = None
                if self.full:
                    again = self.hashed(put.some(at), self.received, AGAIN_PROGRAMS)
                of_peer.append((pull, again))
            pulls.append(of_peer)
        return pulls

    def _fetch(self) -> Launch:
        """Make a launch that reads the senders' hashes of the tiles that this rank receives."""
        direct, ranks, found = self.direct, self.job.ranks, self.ends
        begins = {str(peer): span.start for peer, span in found.send_spans.items()}
        told = ranks.gather([share(self.sent) if len(self.sent) else None, begins])
        lines = []
        for peer, span in found.receive_spans.items():
            shared, begins = told[peer]
            address = direct.peers.address(Handle(*shared)) + 8 * begins[str(ranks.rank)]
            lines += _plain(address, self.theirs[span].data_ptr(), 8 * (span.stop - span.start))
        at = np.array(lines, np.int64).reshape(-1, 7)
        every = Lines(at, np.full(len(at), 8, np.int32), ())
        return copier(every, None, self.refused, PULL_PROGRAMS)

    def launch(self) -> None:
        lanes, meet, job = self.direct.lanes, self.direct.agree, self.job
        begin = lanes.now()
        aside = [lanes.run("local", self._keep, begin)]
        if not self.travels:
            lanes.join(*aside)
            if self.full:
                self.look()
            self.count_wrong()
            meet()
            return
        if job.delta:
            self.look()
            meet()
            self.fetch()
            self.changed.copy_(self.changes()[0])
        elif job.verify == "hash":
            aside.append(lanes.run("look", self.look, begin))
        self.pull()
        lanes.join(*aside)
        if self.full:
            self.look()
        meet()
        if job.verify == "off":
            return
        self.fetch()
        self.count_wrong()
        meet()

    def _keep(self) -> None:
        self.local()
        if self.full:
            self.kept_again()

    def pull(self) -> None:
        lanes = self.direct.lanes
        ready, ends = lanes.now(), []
        for i, parts in enumerate(self.pulls):
            for pull, again in parts:
                ends.append(lanes.run(f"pull {i}", pull, ready))
                if again:
                    ends.append(lanes.run(f"again {i}", again, ends[-1]))
        lanes.join(*ends)

    def changed_here(self) -> npt.NDArray[np.bool_]:
        changed: npt.NDArray[np.bool_] = self.changed.cpu().numpy() != 0
        return changed


def _once(lines: Lines, sums: Tensor, hashed: Callable[[Lines, Tensor], Launch]) -> Launch:
    """Hash only once the tiles that several lines read: sent to several ranks, or sent and kept."""
    places = np.column_stack([lines.at[:, [0, 2, 4, 5]], lines.kind])
    _, first, which = np.unique(places, axis=0, return_index=True, return_inverse=True)
    if len(first) == len(places):
        return hashed(lines, sums)
    at = lines.at[first]
    at[:, 6] = np.arange(len(at))
    each = sums.new_zeros(len(at))
    index = torch.from_numpy(which.reshape(-1)).to(sums.device)
    look = hashed(lines.some(first)._replace(at=at), each)

    def launch() -> None:
        look()
        torch.index_select(each, 0, index, out=sums)

    return launch


def _key(buffer: TileBuffer) -> str:
    return f"{buffer.side} {buffer.name}"


def _plain(read: int, write: int, nbytes: int) -> list[Sequence[int]]:
    """Make lines that copy ``nbytes``, a multiple of 8, unchanged."""
    return [
        (read + first, write + first, 0, 0, 1, min(_LINE, nbytes - first), 0)
        for first in range(0, nbytes, _LINE)
    ]
