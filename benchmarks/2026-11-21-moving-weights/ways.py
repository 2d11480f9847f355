"""Ways to move a job's slices between ranks; ``move.py`` says what they are called and times them.

A way is built once (buffers, views, buckets: what a cached plan holds) and returns a ``Variant``
whose ``call`` only launches work and leaves the current stream waiting for all of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from plans import WORD, WORLD, Job, Slice, senders, spans, steps_of, window

from meshwise.ranks import Ranks

Call = Callable[[], object]
Copies = list[tuple[torch.Tensor, torch.Tensor]]  # (to, from)
Weights = dict[int, torch.Tensor]  # by number of the weight


class Lanes:
    """Streams by name; on a CPU work is done at once, in the order in which it is given."""

    def __init__(self, device: torch.device) -> None:
        names = ("local", "pack", "unpack", "drain", *(f"move {k}" for k in range(4)))
        urgent = ("pack", "drain")  # other ranks wait for these
        self.streams = (
            {n: torch.cuda.Stream(device, priority=-(n in urgent)) for n in names}
            if device.type == "cuda"
            else {}
        )

    def now(self) -> Any:
        return torch.cuda.current_stream().record_event() if self.streams else None

    def run(self, name: str, work: Call, *after: Any) -> Any:
        """``work`` on stream ``name`` after those events; the event of its end."""
        if not self.streams:
            work()
            return None
        stream = self.streams[name]
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            work()
        return stream.record_event()

    def wait(self, *events: Any) -> None:
        for event in events if self.streams else ():
            torch.cuda.current_stream().wait_event(event)


class Symmetric(NamedTuple):
    """Memory that peers can read, by rank: two slots to pack into, and the source weights.

    ``meet``: all devices meet on the current stream; calls on one channel match in order.
    """

    slots: list[torch.Tensor]
    sources: list[torch.Tensor]
    meet: Callable[[int], None]


class Here(NamedTuple):
    """One job on this rank. ``far[peer]``: the peer's source weights in symmetric memory."""

    ranks: Ranks
    lanes: Lanes
    job: Job
    have: Weights
    want: Weights
    far: dict[int, Weights]
    symmetric: Symmetric | None

    @property
    def rank(self) -> int:
        return self.ranks.rank

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self.ranks.device)

    def symm(self) -> Symmetric:
        if self.symmetric is None:
            raise NotImplementedError("no symmetric memory: the first record says why")
        return self.symmetric

    def reads(self, slices: list[Slice]) -> list[torch.Tensor]:
        return [self.have[s.weight][window(s.read)] for s in slices]

    def writes(self, slices: list[Slice]) -> list[torch.Tensor]:
        return [self.want[s.weight][window(s.write)] for s in slices]

    def copy_local(self) -> Call:
        slices = self.job.local[self.rank]
        return copier([*zip(self.writes(slices), self.reads(slices), strict=True)])


class Variant(NamedTuple):
    call: Call
    extra_bytes: int = 0  # staging that is kept; what a call allocates is measured
    nbytes: int | None = None  # what a part of a way moves, whose outcome it checks itself:
    prepare: Call | None = None
    wrong: Callable[[], int] | None = None  # how many words


def copier(copies: Copies) -> Call:
    """One fused launch for contiguous copies: one strided pair would make it a loop for all."""
    fused = [pair for pair in copies if all(t.is_contiguous() for t in pair)]
    strided = [pair for pair in copies if not all(t.is_contiguous() for t in pair)]
    to, source = [a for a, _ in fused], [b for _, b in fused]

    def call() -> None:
        if to:
            torch._foreach_copy_(to, source)
        one_by_one(strided)

    return call


def one_by_one(copies: Copies) -> None:
    """A contiguous copy from a peer is a cudaMemcpyAsync: a copy engine does it, no SM."""
    for to, source in copies:
        to.copy_(source)


def two_dimensional(copies: Copies) -> Call:
    """Strided copies (rows of equal length) by copy engine too."""
    from cuda.bindings import runtime  # torch depends on it from CUDA 13 on

    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    plans = []
    for to, source in copies:
        height, width = source.shape[0], source.nbytes // source.shape[0]
        here, there = ((t.data_ptr(), t.stride(0) * WORD) for t in (to, source))
        plans.append((*here, *there, width, height))

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for arguments in plans:
            (code,) = runtime.cudaMemcpy2DAsync(*arguments, kind, stream)
            if code:
                raise RuntimeError(f"CUDA error in cudaMemcpy2DAsync: {code}")

    return call


# ---- packed into slots ------------------------------------------------------------------------


class Step(NamedTuple):
    """One bucket of every pair: what to pack, what each peer gets and gives, what to unpack."""

    pack: Call
    sends: dict[int, torch.Tensor]
    receives: dict[int, torch.Tensor]
    pulls: Copies
    unpack: Call


class Staging(NamedTuple):
    steps: list[Step]
    send: torch.Tensor  # [slots, words]
    receive: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.send.nbytes + self.receive.nbytes


def staged(
    here: Here,
    bucket_bytes: int | None,
    *,
    symmetric: bool = False,
    straight: bool = False,
    in_turns: bool = False,
) -> Staging:
    """The steps of a job over two slots, or over one if all goes at once.

    ``symmetric``: slots to send from are symmetric memory, for peers to pull from; ``straight``:
    unpacking reads the peer's slot instead of one of our own.
    """
    tables = steps_of(here.job.table, bucket_bytes)
    ends = [spans(t, r, end) for t in tables for r in range(WORLD) for end in (0, 1)]
    size = max(stop for found in ends for _, stop in found.values())
    count = min(2, len(tables))
    send = (
        here.symm().slots[here.rank][: count * size].view(count, size)
        if symmetric
        else here.empty(count, size)
    )
    receive = here.empty(count, 0 if straight else size)
    steps = []
    for i, table in enumerate(tables):
        at = i % count
        sends = {p: send[at, slice(*span)] for p, span in spans(table, here.rank, 0).items()}
        own = spans(table, here.rank, 1)
        far = {}
        for peer in senders(table, here.rank, in_turns) if symmetric else ():
            slot = here.symm().slots[peer][at * size :]
            far[peer] = slot[slice(*spans(table, peer, 0)[here.rank])]
        receives = far if straight else {p: receive[at, slice(*span)] for p, span in own.items()}
        pack: Copies = []
        unpack: Copies = []
        for peer, flat in sends.items():
            parts = here.reads(table[here.rank, peer])
            pack += zip(sliced(flat, parts), parts, strict=True)
        for peer, flat in receives.items():
            parts = here.writes(table[peer, here.rank])
            unpack += zip(parts, sliced(flat, parts), strict=True)
        pulls = [(receives[peer], flat) for peer, flat in far.items()]
        steps.append(Step(copier(pack), sends, receives, pulls, copier(unpack)))
    return Staging(steps, send, receive)


def sliced(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of ``flat``, one behind the other, in the shapes of ``like``."""
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def pipeline(
    here: Here,
    steps: list[Step],
    moves: list[list[Call]],
    meet: Callable[[int], None] | None = None,
) -> Call:
    """Pack, move (on one or several streams), unpack: each a stream, step after step, two slots.

    ``meet``: where peers pull, all ranks meet when slots are packed and when they have been read.
    """
    lanes, within = here.lanes, here.copy_local()

    def packed(step: Step) -> None:
        step.pack()
        if meet:
            meet(0)

    def call() -> None:
        begin = lanes.now()
        apart = lanes.run("local", within, begin)
        sent, unpacked = [begin] * 2, [begin] * 2  # by slot
        for i, step in enumerate(steps):
            at = i % 2
            ready = lanes.run("pack", partial(packed, step), sent[at])
            moved = [
                lanes.run(f"move {k}", move, ready, unpacked[at]) for k, move in enumerate(moves[i])
            ]
            unpacked[at] = lanes.run("unpack", step.unpack, ready, *moved)
            read = moved or [unpacked[at]]
            sent[at] = lanes.run("drain", partial(meet, 1), *read) if meet else read[0]
        lanes.wait(apart, *sent, *unpacked)

    return call


def exchange(
    sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]
) -> None:
    """One batch of (peer, tensor)s; the current stream waits for it."""
    ops = [dist.P2POp(dist.isend, t, peer) for peer, t in sends]
    ops += [dist.P2POp(dist.irecv, t, peer) for peer, t in receives]
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()


# ---- the ways ---------------------------------------------------------------------------------


def slices(here: Here) -> Variant:
    """One message a slice; strided ones pass through contiguous copies, all alive at once."""
    sends, receives = [], []
    for (sender, receiver), moved in sorted(here.job.table.items()):
        if sender == here.rank:
            sends += [(receiver, t) for t in here.reads(moved)]
        if receiver == here.rank:
            receives += [(sender, t) for t in here.writes(moved)]
    within = here.copy_local()

    def call() -> None:
        apart = here.lanes.run("local", within, here.lanes.now())
        landings = [(p, t if t.is_contiguous() else t.new_empty(t.shape)) for p, t in receives]
        exchange([(p, t.contiguous()) for p, t in sends], landings)
        one_by_one(
            [(t, a) for (_, t), (_, a) in zip(receives, landings, strict=True) if a is not t]
        )
        here.lanes.wait(apart)

    return Variant(call)


def buckets(here: Here, bucket_bytes: int | None) -> Variant:
    """Packed, a message a peer and step; None: one step."""
    staging = staged(here, bucket_bytes)
    moves: list[list[Call]] = [
        [partial(exchange, [*s.sends.items()], [*s.receives.items()])] for s in staging.steps
    ]
    return Variant(pipeline(here, staging.steps, moves), staging.nbytes)


def all_to_all(here: Here) -> Variant:
    """Packed, one collective."""
    staging = staged(here, None)
    (step,) = staging.steps
    to, source = (
        [found[r].numel() if r in found else 0 for r in range(WORLD)]
        for found in (step.receives, step.sends)
    )
    flats = staging.receive[0, : sum(to)], staging.send[0, : sum(source)]
    move = partial(dist.all_to_all_single, *flats, to, source)
    return Variant(pipeline(here, [step], [[move]]), staging.nbytes)


def pull(here: Here, bucket_bytes: int, streams: int | None, in_turns: bool = False) -> Variant:
    """Receivers pull packed slots by copy engine; 0 streams: unpacking reads peers' slots; None:
    a stream a peer."""
    staging = staged(here, bucket_bytes, symmetric=True, straight=streams == 0, in_turns=in_turns)

    def lanes(pulls: Copies) -> list[Copies]:
        if streams is None:
            return [[pair] for pair in pulls]
        cut = [[t.tensor_split(streams) for t in pair] for pair in pulls] if streams else []
        return [[(to[k], source[k]) for to, source in cut] for k in range(streams)]

    moves: list[list[Call]] = [
        [partial(one_by_one, copies) for copies in lanes(step.pulls)] for step in staging.steps
    ]
    return Variant(pipeline(here, staging.steps, moves, here.symm().meet), staging.nbytes)


def source(
    here: Here, by_engine: bool, in_turns: bool = False, peers_apart: bool = False
) -> Variant:
    """No staging: slices are pulled from the peers' weights as they are.

    Contiguous ones by copy engine, on one stream or on one a peer; strided ones by kernels on
    another stream or, ``by_engine``, by copy engine as well.
    """
    meet = here.symm().meet
    plain: list[Copies] = []
    strided: Copies = []
    for peer in senders(here.job.table, here.rank, in_turns):
        moved = here.job.table[peer, here.rank]
        reads = [here.far[peer][s.weight][window(s.read)] for s in moved]
        copies: Copies = [*zip(here.writes(moved), reads, strict=True)]
        plain.append([pair for pair in copies if all(t.is_contiguous() for t in pair)])
        strided += [pair for pair in copies if not all(t.is_contiguous() for t in pair)]
    streams = plain if peers_apart else [[pair for copies in plain for pair in copies]]
    works: list[Call] = [
        *(partial(one_by_one, copies) for copies in streams),
        two_dimensional(strided) if by_engine else partial(one_by_one, strided),
    ]
    within, lanes = here.copy_local(), here.lanes

    def call() -> None:
        begin = lanes.now()
        apart = lanes.run("local", within, begin)
        ready = lanes.run("pack", partial(meet, 0), begin)
        read = [lanes.run(f"move {k}", work, ready) for k, work in enumerate(works)]
        lanes.wait(apart, lanes.run("drain", partial(meet, 1), *read))

    return Variant(call)
