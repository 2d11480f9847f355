"""Pack tiles into messages, move and unpack them: three lanes, two slots each, under a byte cap.

A stage has several steps. In each step every pair of ranks that exchange anything moves an equal
part of all that it moves (``tiles.parts``). Packing and unpacking hash their tiles in the same
pass; at the end every receiver gets the senders' hashes and compares. A carrier moves the messages:
NCCL, gloo, or symmetric memory that the receiver pulls.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwise.reshard import tiles
from meshwise.reshard.tiles import Table
from meshwise.reshard.transports.base import (
    Connections,
    Ends,
    JobStage,
    Transport,
    TransportJob,
    at,
)
from meshwise.reshard.transports.copies import copier, lines
from meshwise.reshard.transports.lanes import Launch

SLOTS = 2
STEPS, STEP_BYTES = 8, 2**24  # at least so many steps, if each has so many bytes, to overlap
LINE_WORDS = 7

Spans = Mapping[int, slice]  # bytes of a slot, by peer


class Slots(NamedTuple):
    """Memory to pack messages into, one or two slots, and the operations on it.

    ``exchange(slot, sends, into, receives)``: sends parts of a slot, receives into parts of a
    buffer. ``packed(slot)`` is called when a slot is packed. ``taken`` waits until peers have read
    it. Both are None if the messages themselves ensure this.
    """

    memory: list[Tensor]
    exchange: Callable[[int, Spans, Tensor, Spans], Launch]
    packed: Callable[[int], object] | None = None
    taken: Launch | None = None


class Carrier(Connections, Protocol):
    """Moves messages between ranks. Launches go to the current stream, or block on a CPU; ranks
    make them together. ``programs``: of the packing kernels, fewer if the carrier needs
    multiprocessors. ``blocks``: the host waits in a launch, and knows its outcome."""

    programs: int
    blocks: bool

    def slots(self, count: int, nbytes: int, regions: Mapping[int, int]) -> Slots:
        """``count`` slots for messages; ``regions``: where each peer's begin in a slot."""

    def swap(self, source: Tensor, sends: Spans, into: Tensor, receives: Spans) -> Launch:
        """Send and receive parts of small buffers at the same time."""

    def add(self, value: Tensor, total: Tensor) -> Launch:
        """Sum one int32 over all ranks, from ``value`` into ``total``."""


class Staged(Transport):
    """A job's steps, ready to be launched."""

    def __init__(self, job: TransportJob, carrier: Carrier, cap_bytes: int) -> None:
        super().__init__(job, urgent=("pack", "taken"))
        self.connections, self.blocks = carrier, carrier.blocks
        self.value, self.total = torch.zeros_like(self.refused), torch.zeros_like(self.refused)
        each = cap_bytes // len(job.stages)  # stages keep their slots at the same time
        self.stages = [_Stage(self, carrier, table, each) for table in job.stages]
        self.agree = carrier.add(self.value, self.total)

    def launch(self) -> None:
        super().launch()
        if not (self.blocks and self.refused):
            self.agree()


class _Step(NamedTuple):
    pack: Launch
    move: Launch
    unpack: Launch


class _Side(NamedTuple):
    """Tiles that a rank sends, or receives, in the order of peers; each peer's region of a slot."""

    table: Table
    parts: dict[int, list[slice]]  # of the table, by peer and step
    regions: dict[int, int]  # where a peer's region begins, in bytes
    nbytes: int

    def step(
        self, number: int, changed: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Spans]:
        """Return the tiles of a step (lines of the table), the place of each in the slot, and each
        peer's span of the slot."""
        chosen, places, spans = [], [], {}
        for peer, cut in self.parts.items():
            lines_ = cut[number].start + np.flatnonzero(changed[cut[number]])
            if len(lines_):
                begins = self.regions[peer] + tiles.packed(self.table[lines_])
                chosen.append(lines_)
                places.append(begins[:-1])
                spans[peer] = slice(int(begins[0]), int(begins[-1]))
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *chosen]), np.concatenate([none, *places]), spans


def _side(table: Table, spans: dict[int, slice], count: int) -> _Side:
    cuts, regions, at_ = {}, {}, 0
    for peer, span in spans.items():
        cuts[peer] = [
            slice(span.start + part.start, span.start + part.stop)
            for part in tiles.parts(table[span], count)
        ]
        regions[peer] = at_
        at_ += max(int(tiles.packed(table[cut])[-1]) for cut in cuts[peer])
    return _Side(table, cuts, regions, at_)


class _Stage(JobStage):
    KNOWN = ("sent", "theirs")

    def __init__(self, staged: Staged, carrier: Carrier, table: Table, cap_bytes: int) -> None:
        super().__init__(staged, table)
        self.lanes, self.programs, job, found = staged.lanes, carrier.programs, self.job, self.ends
        count = _num_steps(job, found, cap_bytes, self._tables_bytes)
        self.sides = (
            _side(found.sends, found.send_spans, count),
            _side(found.receives, found.receive_spans, count),
        )
        slots = min(SLOTS, count)
        self.slots = carrier.slots(slots, self.sides[0].nbytes, self.sides[0].regions)
        self.landing = [
            torch.empty(self.sides[1].nbytes, dtype=torch.uint8, device=job.device)
            for _ in range(slots)
        ]
        self.changed = np.ones(len(found.sends), np.bool_), np.ones(len(found.receives), np.bool_)
        self.steps = [self._step(i) for i in range(count)]
        self.local = self.copied_within()
        if job.delta:
            self.look = self.hashed(self.lines_in_place(found.sends, "read"), self.sent)
        self.again = [
            self.hashed(self.lines_in_place(table, end), sums)
            for table, end, sums in (
                (found.sends, "read", self.sent), (found.receives, "write", self.received),
                (found.local, "read", self.kept[0]), (found.local, "write", self.kept[1]),
            )
            if self.full
        ]  # fmt: skip
        self.swap = carrier.swap(self.sent, found.send_spans, self.theirs, found.receive_spans)

    def parts(self) -> Iterator[tuple[str, Launch]]:
        for number, step in enumerate(self.steps):
            yield "pack", partial(self.pack, number)
            yield "move", step.move
            yield "unpack", step.unpack
            if self.slots.taken:
                yield "meet", self.slots.taken
        yield "compare", self.swap

    @property
    def extra_bytes(self) -> int:
        slots = sum(slot.nbytes for slot in (*self.slots.memory, *self.landing))
        return slots + self._tables_bytes

    @property
    def _tables_bytes(self) -> int:
        job, found, full = self.job, self.ends, self.full
        moved = len(found.sends) + len(found.receives)
        lines_ = (1 + full) * moved + (1 + 2 * full) * len(found.local)
        lines_ += len(found.sends) if job.delta else 0
        sums = len(self.sent) + 2 * len(self.received) + 2 * len(self.kept[0])
        sums += moved if job.delta else 0
        return 8 * (LINE_WORDS * lines_ + sums)

    def _step(self, number: int) -> _Step:
        job, own, slot = self.job, self.own, number % SLOTS
        sends, receives = self.sides
        fused = job.verify == "hash"
        work = partial(copier, refused=self.refused, programs=self.programs)
        out, places, send_spans = sends.step(number, self.changed[0])
        table = sends.table[out]
        pack = lines(
            table, at(table, own, "read"), self.slots.memory[slot].data_ptr() + places, job.pairs,
            out, packed="write",
        )  # fmt: skip
        into, places, receive_spans = receives.step(number, self.changed[1])
        table = receives.table[into]
        unpack = lines(
            table, self.landing[slot].data_ptr() + places, at(table, own, "write"), job.pairs,
            into, packed="read",
        )  # fmt: skip
        return _Step(
            work(pack, self.sent if fused else None),
            self.slots.exchange(slot, send_spans, self.landing[slot], receive_spans),
            work(unpack, self.received if fused else None),
        )

    def launch(self) -> None:
        lanes, taken = self.lanes, self.slots.taken
        if self.job.delta:
            self._choose()
        begin = lanes.now()
        apart = lanes.run("local", self.local, begin)
        free, landed = [begin] * SLOTS, [begin] * SLOTS  # for packing again; for filling again
        packed = [lanes.run("pack", partial(self.pack, 0), begin)]
        for i, step in enumerate(self.steps):
            slot = i % SLOTS
            if i + 1 < len(self.steps):  # early, since a carrier may hold up the host
                after = free[(i + 1) % SLOTS]
                packed.append(lanes.run("pack", partial(self.pack, i + 1), after))
            moved = lanes.run("move", step.move, packed[i], landed[slot])
            landed[slot] = lanes.run("unpack", step.unpack, moved)
            free[slot] = lanes.run("taken", taken, moved) if taken else moved
        lanes.join(apart, *free, *landed)
        if self.job.verify == "off":
            return
        for work in self.again:
            work()
        self.swap()
        self.count_wrong()

    def _choose(self) -> None:
        """Find the changed tiles by the hashes now and of last time; both ends of a pair agree."""
        self.look()
        self.swap()
        sent, received = (changed.cpu().numpy() for changed in self.changes())
        self.changed = sent, received
        self.steps = [self._step(i) for i in range(len(self.steps))]

    def pack(self, number: int) -> None:
        self.steps[number].pack()
        if self.slots.packed:
            self.slots.packed(number % SLOTS)

    def changed_here(self) -> npt.NDArray[np.bool_]:
        return self.changed[1]


def _num_steps(job: TransportJob, found: Ends, cap_bytes: int, tables_bytes: int) -> int:
    """Return the steps that the busiest rank needs, so that all agree; enough to overlap."""
    peers = max(len(found.send_spans), len(found.receive_spans))
    least = tables_bytes + 2 * SLOTS * (peers * tiles.TILE + tiles.TILE // 4)
    room = (cap_bytes - tables_bytes) // (2 * SLOTS) - peers * tiles.TILE
    most = max(int(tiles.packed(side)[-1]) for side in (found.sends, found.receives))
    needed = -(-most // max(1, room))
    told = job.ranks.gather([max(1, needed, min(STEPS, most // STEP_BYTES)), least])
    if (least := max(each for _, each in told)) > cap_bytes:
        raise ValueError(
            f"cap_bytes = {cap_bytes}: must be at least {least}, for tables and slots of a tile a "
            "peer; give more"
        )
    return int(max(count for count, _ in told))
