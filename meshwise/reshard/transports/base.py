"""The work of a transport: the tiles that concern one rank, where its buffers are, their hashes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwise.ranks import Ranks
from meshwise.reshard import tiles
from meshwise.reshard.tiles import Table, TileBuffer
from meshwise.reshard.transports.copies import Addresses, Lines, Pair, copier, lines
from meshwise.reshard.transports.lanes import Lanes, Launch

PROGRAMS = 528  # of a kernel that has the device for itself


class TransportJob(NamedTuple):
    """``stages``: tables, one after the other in time. ``buffers``: by number, which differs
    between ranks; ``own``: those of this rank. ``pairs``: dtypes of each tensor at both ends.
    ``verify``: off, hash or full. ``delta``: only tiles whose hashes changed since last time."""

    ranks: Ranks
    stages: tuple[Table, ...]
    buffers: list[TileBuffer]
    own: dict[int, Tensor]
    pairs: list[Pair]
    verify: str
    delta: bool

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def addresses(self) -> Addresses:
        """Addresses of this rank's buffers, by number; others 0."""
        found = np.zeros(len(self.buffers), np.int64)
        for number, tensor in self.own.items():
            found[number] = tensor.data_ptr()
        return found


class Ends(NamedTuple):
    """A stage as one rank sees it, in the order of peers: what it sends, receives and keeps.

    ``sends`` and ``receives`` are sorted by peer; the spans are each peer's lines in them.
    """

    sends: Table
    receives: Table
    local: Table
    send_spans: dict[int, slice]
    receive_spans: dict[int, slice]


def ends(table: Table, here: int) -> Ends:
    out, into = table["source"] == here, table["destination"] == here
    sends, receives = table[out & ~into], table[into & ~out]
    sends = sends[np.argsort(sends["destination"], kind="stable")]
    receives = receives[np.argsort(receives["source"], kind="stable")]
    return Ends(
        sends, receives, table[out & into], _spans(sends["destination"]), _spans(receives["source"])
    )


def _spans(peers: npt.NDArray[np.int32]) -> dict[int, slice]:
    """Find each peer's lines in a table that is sorted by peer."""
    found, first = np.unique(peers, return_index=True)
    edges = [*first.tolist(), len(peers)]
    return {peer: slice(*edges[i : i + 2]) for i, peer in enumerate(found.tolist())}


def at(table: Table, bases: Addresses, end: str) -> Addresses:
    """Addresses of the tiles at their ``read`` or ``write`` end."""
    found: Addresses = bases[table[end]] + table[f"{end}_at"]
    return found


def straight(job: TransportJob, table: Table, read: Addresses, write: Addresses) -> Lines:
    """Make lines that copy from buffer to buffer; hashes are numbered in order."""
    return lines(
        table, at(table, read, "read"), at(table, write, "write"), job.pairs,
        np.arange(len(table)),
    )  # fmt: skip


def written(job: TransportJob, table: Table, read: Addresses, write: Addresses) -> Lines:
    """Make lines from the written tiles of one set of buffers to those of another; their dtype is
    converted already."""
    table = table.copy()
    table["read"], table["read_at"] = table["write"], table["write_at"]
    table["read_step"] = table["write_step"]
    converted = table["word"] == 0
    table["word"][converted] = [job.pairs[i][1].itemsize for i in table["tensor"][converted]]
    return straight(job, table, read, write)


def num_bytes(table: Table) -> int:
    return int(tiles.nbytes(table).sum())


class JobStage(ABC):
    """A stage on one rank: its tiles, and hashes of what it ``sent`` and ``received`` and of what
    the senders sent (``theirs``); two of each tile that it ``kept``, if all memory is verified.
    ``local`` copies within the rank. ``KNOWN``: hashes that ``delta`` compares with the last."""

    KNOWN: tuple[str, ...] = ("theirs",)
    local: Launch

    def __init__(self, transport: "Transport", table: Table) -> None:
        self.job = job = transport.job
        self.own, self.refused, self.value = transport.own, transport.refused, transport.value
        self.full = job.verify == "full"
        self.ends = found = ends(table, job.ranks.rank)
        sent, received = len(found.sends), len(found.receives)
        kept = len(found.local) if self.full else 0
        self.looked, self.received, self.theirs, again = (
            torch.zeros(count, dtype=torch.int64, device=job.device)
            for count in (sent + kept, received, received, kept)
        )
        self.sent, self.kept = self.looked[:sent], (self.looked[sent:], again)
        self.known = [getattr(self, name) for name in self.KNOWN if job.delta]
        self.last = [torch.zeros_like(now) for now in self.known]
        self.fresh = torch.ones(1, dtype=torch.bool, device=job.device)  # nothing is there yet

    @property
    @abstractmethod
    def extra_bytes(self) -> int:
        """Bytes on this rank beside the buffers."""

    @abstractmethod
    def launch(self) -> None:
        """Run the stage and count wrong tiles in ``value``."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[str, Launch]]:
        """Yield what follows the copies within the rank, to be timed each alone."""

    @abstractmethod
    def changed_here(self) -> npt.NDArray[np.bool_]:
        """Return which tiles of this rank came in the last launch, with ``delta``."""

    def hashed(self, found: Lines, sums: Tensor, programs: int = PROGRAMS) -> Launch:
        """Make a launch that hashes tiles without a copy."""
        return copier(found, sums, self.refused, programs, stores=False)

    def lines_in_place(self, table: Table, end: str) -> Lines:
        """Make lines that hash tiles where they are, at one end."""
        lines_of = straight if end == "read" else written
        return lines_of(self.job, table, self.own, self.own)

    def copied_within(self, programs: int = PROGRAMS) -> Launch:
        found = straight(self.job, self.ends.local, self.own, self.own)
        return copier(found, None, self.refused, programs)

    def count_wrong(self) -> None:
        self.value.add_(torch.ne(self.theirs, self.received).sum())
        if self.full:
            self.value.add_(torch.ne(*self.kept).sum())

    def changes(self) -> list[Tensor]:
        """Return which of the ``known`` hashes changed since last time."""
        pairs = zip(self.known, self.last, strict=True)
        return [torch.ne(now, last) | self.fresh for now, last in pairs]

    def settle(self, verified: bool) -> None:
        """Keep for ``delta`` the hashes of what the destination has now, if it was ``verified``."""
        for last, now in zip(self.last, self.known, strict=True):
            last.copy_(now)
        self.fresh.fill_(not verified)

    def wrong_tiles(self) -> Table:
        """Return the received or kept tiles whose two hashes differ."""
        wrong, stayed = (
            torch.ne(*pair).nonzero()[:, 0].cpu().numpy()
            for pair in ((self.theirs, self.received), self.kept)
        )
        return np.concatenate([self.ends.receives[wrong], self.ends.local[stayed]])


class Connections(Protocol):
    """Connections of a transport to its peers."""

    def release(self) -> None:
        """Release the device if it waits for a peer that will not come."""

    def close(self) -> None: ...


class Transport:
    """A job's stages, ready to be launched. On a GPU ``launch`` may be captured in a graph if
    ``agree`` and the stages may.

    ``value``: this rank's number for all; not 0 refuses a launch. ``total``: the sum of all ranks'
    numbers, which ``agree`` makes, in the end the number of wrong tiles.
    """

    connections: Connections
    stages: Sequence[JobStage]
    value: Tensor
    total: Tensor
    agree: Launch
    blocks = False  # the host waits in a launch, and knows its outcome

    def __init__(self, job: TransportJob, urgent: tuple[str, ...] = ()) -> None:
        self.job, self.own = job, job.addresses()
        self.lanes = Lanes(job.device, urgent)
        self.refused = torch.zeros(1, dtype=torch.int32, device=job.device)

    @property
    def extra_bytes(self) -> int:
        return sum(stage.extra_bytes for stage in self.stages)

    def launch(self) -> None:
        """Run all stages. Nothing is touched if some rank came with a ``value`` other than 0."""
        self.agree()
        self.refused.copy_(self.total)
        if self.blocks and self.refused:
            return
        for stage in self.stages:
            stage.launch()

    def parts(self) -> Iterator[tuple[str, Launch]]:
        """Yield the parts of a refit, to be timed each alone; all ranks have the same parts."""
        for stage in self.stages:
            yield "copy_within", stage.local
            yield from stage.parts()

    def settle(self, verified: bool) -> None:
        for stage in self.stages:
            stage.settle(verified)

    def delta_bytes(self) -> dict[int, int]:
        """Count the bytes that this rank received in the last launch, with ``delta``, by sender."""
        found: dict[int, int] = {}
        for stage in self.stages:
            chosen = stage.changed_here()
            for peer, span in stage.ends.receive_spans.items():
                size = tiles.nbytes(stage.ends.receives[span])[chosen[span]].sum()
                found[peer] = found.get(peer, 0) + int(size)
        return found
