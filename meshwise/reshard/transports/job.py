"""The work of a transport: the tiles that concern one rank, where its buffers are, their hashes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwise.ranks import Ranks
from meshwise.reshard import tiles
from meshwise.reshard.tiles import Table, TileBuffer
from meshwise.reshard.transports.copies import Addresses, Lines, Pair, lines


class Job(NamedTuple):
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


def straight(job: Job, table: Table, read: Addresses, write: Addresses) -> Lines:
    """Make lines that copy from buffer to buffer; hashes are numbered in order."""
    return lines(
        table, at(table, read, "read"), at(table, write, "write"), job.pairs,
        np.arange(len(table)),
    )  # fmt: skip


def in_place(job: Job, table: Table, bases: Addresses, end: str) -> Lines:
    """Make lines that hash tiles where they are, at one end."""
    if end == "read":
        return straight(job, table, bases, bases)
    return written(job, table, bases, bases)


def written(job: Job, table: Table, read: Addresses, write: Addresses) -> Lines:
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
    the senders sent (``theirs``); two of each tile that it ``kept``, if all memory is verified."""

    def __init__(self, job: Job, table: Table) -> None:
        self.job, self.full = job, job.verify == "full"
        self.ends = found = ends(table, job.ranks.rank)
        sent, received = len(found.sends), len(found.receives)
        kept = len(found.local) if self.full else 0
        self.looked, self.received, self.theirs, again = (
            torch.zeros(count, dtype=torch.int64, device=job.device)
            for count in (sent + kept, received, received, kept)
        )
        self.sent, self.kept = self.looked[:sent], (self.looked[sent:], again)

    @property
    @abstractmethod
    def extra_bytes(self) -> int:
        """Bytes on this rank beside the buffers."""

    @abstractmethod
    def settle(self, verified: bool) -> None:
        """Note for ``delta`` what the destination has now, or that nobody knows."""

    @abstractmethod
    def changed_here(self) -> npt.NDArray[np.bool_]:
        """Return which tiles of this rank came in the last launch, with ``delta``."""

    def wrong_tiles(self) -> Table:
        """Return the received or kept tiles whose two hashes differ."""
        wrong, stayed = (
            torch.ne(*pair).nonzero()[:, 0].cpu().numpy()
            for pair in ((self.theirs, self.received), self.kept)
        )
        return np.concatenate([self.ends.receives[wrong], self.ends.local[stayed]])


class Transport:
    """A transport and its stages. ``value``: this rank's number for all; not 0 refuses a launch.
    ``total``: the sum of all ranks' numbers, in the end the number of wrong tiles."""

    stages: Sequence[JobStage]
    value: Any
    total: Any

    @property
    def extra_bytes(self) -> int:
        return sum(stage.extra_bytes for stage in self.stages)

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

    def wrong_tiles(self) -> list[Table]:
        return [stage.wrong_tiles() for stage in self.stages]
