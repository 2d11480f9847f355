"""Steps of one rank in an attention over sequences that cp ranks share.

``meshwise.attention`` runs this attention. Its plans need no torch, so this module uses the same
plans: the way (heads, ring_heads, ring), the rows and heads of a rank, the pieces it attends at
each step of a ring, and the messages it sends and receives. Messages run on a separate stream. The
next keys arrive while a rank attends the current keys; gradients follow one step later.

A piece is one kernel, which needs one key head per query head. Sums over several pieces are wide:
fp64 for the softmax, fp32 for gradients.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from meshwise.attention import volume
from meshwise.attention.pieces import Mask, MaskPiece, batches
from meshwise.attention.shards import Interval, Shards, balanced
from meshwise.models.graph import BYTES, Device, attention, elementwise
from meshwise.spec import Attention, Collective, Op
from meshwise.spec.long_attention import LongAttention
from meshwise.spec.op import CollectiveKind, Direction

STREAM = "cp"
Names = tuple[str, ...]


class ContextStep(NamedTuple):
    """An operation, and the buffers that it reads and writes."""

    name: str
    op: Op
    stream: str
    reads: Names
    writes: Names


class Steps(NamedTuple):
    """The steps of one attention. ``sizes``: bytes of each buffer except inputs and results.
    ``sent``: message buffers. ``saved``: tensors that backward needs, per slice of heads: q, k
    and v, out, lse."""

    steps: tuple[ContextStep, ...]
    sizes: dict[str, int]
    sent: frozenset[str]
    saved: tuple[Names, ...] = ()


class AttentionShare(NamedTuple):
    """One rank's share of ``op``. The ranks of its group are ``stride`` apart. Values are
    ``value_dim`` wide and padded to the width of keys."""

    op: LongAttention
    shards: Shards
    way: str
    rank: int
    stride: int
    value_dim: int
    device: Device

    @property
    def degree(self) -> int:
        """Return the number of neighbours that divide the heads."""
        return volume.degree_of(self.way, self.op.kv_heads, len(self.shards.intervals))

    @property
    def ring(self) -> Shards:
        """Return the tokens that each member of the ring holds; a member is a group of
        neighbours."""
        return volume.grouped(self.shards, self.degree)

    def pieces(self, step: int) -> tuple[MaskPiece, ...]:
        return volume.step_pieces(self._mask, self.ring, self.rank // self.degree, step)

    @property
    def hops(self) -> volume.RingHops:
        return volume.hops(self._mask, self.ring)

    @property
    def _mask(self) -> Mask:
        return Mask(self.op.causal, self.op.window)


def share(
    op: Attention, ranks: int, stride: int, rank: int | None = None, device: Device = "cuda"
) -> AttentionShare:
    """Return a rank's share of an attention over ``ranks`` ranks. ``op``: one rank's queries, and
    as many keys. ``rank``: by default the rank with the most work; of equals, the one that
    receives the most bytes."""
    width = max(op.head_dim, op.value_dim)
    whole = LongAttention(
        batch=op.batch, seq_len=op.q_len * ranks, heads=op.heads, kv_heads=op.kv_heads,
        head_dim=width, causal=True, window=op.window, dtype=op.dtype, direction="backward",
    )  # fmt: skip
    return _share(whole, ranks, stride, op.value_dim, rank, device)


@lru_cache(maxsize=1024)
def _share(
    op: LongAttention, ranks: int, stride: int, value_dim: int, rank: int | None, device: Device
) -> AttentionShare:
    held = balanced(op.seq_len, ranks)
    way = volume.choose_dense(op, held)
    every = [
        AttentionShare(op, held, way, each, stride, value_dim, device) for each in range(ranks)
    ]
    if rank is not None:
        return every[rank]
    received = map(sum, zip(*volume.dense_bytes(op, held, way), strict=True))
    work = [sum(p.pairs for t in range(ranks) for p in each.pieces(t)) for each in every]
    heads = [s.q_stop - s.q_start for s in volume.shares(op.heads, op.kv_heads, every[0].degree)]
    load = [
        (n * heads[r % len(heads)], size)
        for r, (n, size) in enumerate(zip(work, received, strict=True))
    ]
    return every[max(range(ranks), key=lambda r: load[r])]


def forward(own: AttentionShare, at: str, inputs: Names, outputs: Names) -> Steps:
    """Return the forward steps. ``inputs``: buffers of q, k and v, or one buffer with all three.
    ``outputs``: out and lse."""
    steps, saved = _Writer(own, at, "forward"), []
    out, lse = outputs
    if steps.pads:
        inputs = (*inputs[:2], steps.copy("pad", own.op.kv_heads, inputs[2:], "values"))
        out = steps.rows("wide", own.op.heads)
    if own.degree == 1:
        steps.attend("", inputs, (out, lse), own.op.heads, own.op.kv_heads)
        saved.append((*inputs, out, lse))
    else:
        saved = _forward_by_heads(steps, inputs, out)
    if steps.pads:
        steps.moves("narrow", own.op.heads * steps.own_rows, (out,), outputs[:1])
    return steps.made(tuple(saved))


def backward(
    own: AttentionShare, at: str, saved: tuple[Names, ...], grad: str, outputs: Names
) -> Steps:
    """Return the backward steps. ``saved``: ``Steps.saved`` of the forward. ``outputs``: the
    gradients of its inputs."""
    steps = _Writer(own, at, "backward")
    if steps.pads:
        grad = steps.copy("pad", own.op.heads, (grad,), "grad")
    rows, made = (own.op.heads + 2 * own.op.kv_heads) * steps.own_rows, outputs
    if len(outputs) == 1:  # autograd stacks the three gradients
        made = (steps.buffer("grads", rows * steps.row),)
    if own.degree == 1:
        steps.attend_backward("", (grad, *saved[0]), made, own.op.heads, own.op.kv_heads)
    else:
        _backward_by_heads(steps, saved, grad, made)
    if made != outputs:
        steps.moves("stack", rows, made, outputs)
    return steps.made()


def _forward_by_heads(steps: "_Writer", inputs: Names, out: str) -> list[Names]:
    saved, back, heads = list[Names](), list[str](), steps.slices()
    coming = [steps.to_heads(f".{i}", inputs, each, keys=2) for i, each in enumerate(heads)]
    for i, each in enumerate(heads):
        at, h, k = f".{i}", each.mine[0], each.mine[1]
        held: Names = (steps.copy(f"unpack{at}", h + 2 * k, coming[i], "heads", steps.all_rows),)
        if each.uneven:  # one key head per query head: counts differ
            held = (*held, steps.copy(f"repeat{at}", 2 * h, held, "keys", steps.all_rows))
            k = h
        result = steps.rows(f"out{at}", h, steps.all_rows)
        lse = steps.buffer(f"lse{at}", h * steps.all_rows * steps.lse_row)
        steps.attend(at, held, (result, lse), h, k)
        saved.append((*held, result, lse))
        back += steps.to_rows(at, (result,), each, keys=0)
    steps.moves("unpack.rows", steps.own.op.heads * steps.own_rows, (*back, *inputs), (out,))
    return saved


def _backward_by_heads(
    steps: "_Writer", saved: tuple[Names, ...], grad: str, outputs: Names
) -> None:
    op, heads, back = steps.own.op, steps.slices(), list[str]()
    coming = [steps.to_heads(f".{i}", (grad,), each, keys=0) for i, each in enumerate(heads)]
    for i, (each, kept) in enumerate(zip(heads, saved, strict=True)):
        at, h, k = f".{i}", each.mine[0], each.mine[1]
        here = steps.copy(f"unpack{at}", h, coming[i], "grad", steps.all_rows)
        per_key = h if each.uneven else k
        made = (steps.rows(f"made{at}", h + 2 * per_key, steps.all_rows),)
        steps.attend_backward(at, (here, *kept), made, h, per_key)
        if each.uneven:
            made = (steps.copy(f"sum{at}", h + 2 * k, made, "summed", steps.all_rows),)
        back += steps.to_rows(at, made, each, keys=2, into=() if i else outputs)
    rows = (op.heads + 2 * op.kv_heads) * steps.own_rows
    held = [name for kept in saved for name in kept]  # the caller holds these and grad
    steps.moves("unpack.rows", rows, (*back, *held, grad), outputs)


class _Heads(NamedTuple):
    """Query and key heads of each neighbour in one exchange (``counts``) and of this rank
    (``mine``). ``uneven``: its key heads serve different numbers of query heads."""

    counts: tuple[tuple[int, int], ...]
    mine: tuple[int, int]
    uneven: bool


class _Writer:
    """Builds the steps of one attention."""

    def __init__(self, own: AttentionShare, at: str, direction: Direction) -> None:
        self.own, self.at, self.direction = own, at, direction
        self.steps: list[ContextStep] = []
        self.sizes: dict[str, int] = {}
        self.sent: set[str] = set()
        op, width = own.op, BYTES[own.op.dtype]
        self.row = op.batch * op.head_dim * width  # bytes of one row of one head
        self.wide_row = op.batch * op.head_dim * max(4, width)
        self.lse_row = op.batch * max(4, width)
        self.own_rows = own.shards.lengths[own.rank]
        self.me = own.rank // own.degree
        self.all_rows = own.ring.lengths[self.me]
        self.pads = own.value_dim < op.head_dim

    def made(self, saved: tuple[Names, ...] = ()) -> Steps:
        return Steps(tuple(self.steps), self.sizes, frozenset(self.sent), saved)

    def buffer(self, name: str, size: int) -> str:
        full = f"{self.at}.{name}"
        self.sizes[full] = size
        return full

    def rows(self, name: str, heads: int, rows: int | None = None) -> str:
        return self.buffer(name, heads * (self.own_rows if rows is None else rows) * self.row)

    def step(self, name: str, op: Op, reads: Names, writes: Names, stream: str = "compute") -> None:
        self.steps.append(ContextStep(f"{self.at}.{name}", op, stream, reads, writes))

    def moves(self, name: str, rows: int, reads: Names, writes: Names) -> None:
        """Add a copy of ``rows`` rows of one head."""
        size = rows * self.row
        self.step(name, elementwise("copy", size, size, self.direction), reads, writes)

    def copy(self, name: str, heads: int, reads: Names, to: str, rows: int | None = None) -> str:
        rows = self.own_rows if rows is None else rows
        made = self.rows(f"{name}.{to}", heads, rows)
        self.moves(name, heads * rows, reads, (made,))
        return made

    def adds(self, name: str, read: int, written: int, reads: Names, writes: Names) -> None:
        op = elementwise("add", read, written, self.direction)
        self.step(name, op, reads, writes)

    # ---- messages

    def sends(
        self, name: str, kind: CollectiveKind, sent: int, received: int, ranks: int, held: Names
    ) -> str:
        """Add a message of ``sent`` bytes and return the buffer in which ``received`` bytes
        arrive. ``ranks``: neighbours, or members of a ring."""
        arrives = self.buffer(f"{name}.arrived", received)
        self.sent.add(arrives)
        if max(sent, received):
            apart = self.own.degree if kind == "send_recv" else 1
            op = Collective(
                kind=kind, size_bytes=max(sent, received), group_size=ranks,
                group_stride=self.own.stride * apart, dtype=self.own.op.dtype,
            )  # fmt: skip
            self.step(name, op, held, (arrives,), STREAM)
        return arrives

    def slices(self) -> list[_Heads]:
        op, degree = self.own.op, self.own.degree
        found = []
        for each in volume.slices(op, degree, len(self.own.shards.intervals)):
            counts = tuple(
                (b - a, d - c) for (a, b), (c, d) in zip(each.queries, each.keys, strict=True)
            )
            member = self.own.rank % degree
            (a, b), (c, d) = each.queries[member], each.keys[member]
            per = op.heads // op.kv_heads
            shared = {min(b, (x + 1) * per) - max(a, x * per) for x in range(c, d)}
            found.append(_Heads(counts, counts[member], len(shared) > 1))
        return found

    def to_heads(self, at: str, held: Names, heads: _Heads, keys: int) -> Names:
        """Exchange own rows of all heads for all rows of own heads. The rows are those of the
        queries and of ``keys`` tensors of keys. The sent buffer lives as long as the received."""
        here = sum(q + keys * k for q, k in heads.counts)
        mine = heads.mine[0] + keys * heads.mine[1]
        packed = self.copy(f"pack{at}", here, held, "sent")
        self.sent.add(packed)
        return self._exchange(f"to_heads{at}", here * self.own_rows, mine * self.all_rows, packed)

    def to_rows(self, at: str, held: Names, heads: _Heads, keys: int, into: Names = ()) -> Names:
        """Exchange all rows of own heads for own rows of all heads. Packing also writes the
        buffers ``into``."""
        here = heads.mine[0] + keys * heads.mine[1]
        every = sum(q + keys * k for q, k in heads.counts)
        packed = self.rows(f"pack_rows{at}.sent", here, self.all_rows)
        self.moves(f"pack_rows{at}", here * self.all_rows, held, (packed, *into))
        self.sent.add(packed)
        return self._exchange(f"to_rows{at}", here * self.all_rows, every * self.own_rows, packed)

    def _exchange(self, name: str, sent: int, received: int, packed: str) -> Names:
        sizes = sent * self.row, received * self.row
        return self.sends(name, "all_to_all", *sizes, self.own.degree, (packed,)), packed

    def _hop(self, at: str, step: int, heads: int, held: Names) -> str | None:
        """Add the message that brings the next keys and return its buffer, or None if no rank
        attends keys at this step."""
        hops = self.own.hops
        if step > max(hops.last):
            return None
        row, size = 2 * heads * self.row, len(hops.last)
        sent, come = hops.held(self.me + 1, step), hops.held(self.me, step)
        return self.sends(
            f"keys{at}.{step}", "send_recv", _len(sent) * row, _len(come) * row, size, held
        )

    def _hop_back(self, at: str, step: int, heads: int, made: Names) -> str:
        """Add the message that sends the gradients of the held keys to the next rank or home."""
        hops, row = self.own.hops, 2 * heads * self.wide_row
        come = sum(hops.expected(self.me, step).values())
        sizes = _len(hops.made(self.me, step)) * row, come * row
        return self.sends(f"gradients{at}.{step}", "send_recv", *sizes, len(hops.last), made)

    # ---- rounds

    def attend(self, at: str, held: Names, results: Names, heads: int, keys: int) -> None:
        """Add the forward of these heads. ``held``: q, k and v with all rows. ``results``: out
        and lse."""
        queries, rounds, rows = held, len(self.own.ring.intervals), self.all_rows
        pieces, accumulated = self.own.pieces(0), None
        whole = len(pieces) == 1 and pieces[0][:2] == (0, rows)
        alone = rounds == 1 or max(self.own.hops.last) == 0
        if rounds > 1:
            held = (self.copy(f"fuse{at}", 2 * keys, held, "held", rows),)
        if not (alone and whole):
            size = self.own.op.batch * rows * heads * 8 * (self.own.op.head_dim + 2)
            accumulated = self.buffer(f"softmax{at}", size)
        for step in range(rounds):
            following = self._hop(at, step + 1, keys, held) if rounds > 1 else None
            for i, batch in enumerate(batches(self.own.pieces(step))):
                name = f"{at}.{step}.{i}"
                if accumulated is None:
                    self._piece(name, batch, (*queries, *held), results, heads, keys)
                    continue
                part_rows = len(batch) * (batch[0].q_stop - batch[0].q_start)
                part = self.rows(f"part{name}", heads, part_rows)
                self._piece(name, batch, (*queries, *held), (part,), heads, keys)
                read = heads * part_rows * self.row
                wide = heads * part_rows * 8 * self.own.op.batch * (self.own.op.head_dim + 2)
                passing = self._passing(f"merge{name}", heads * part_rows, 8)
                writes = (accumulated, *passing)
                self.adds(f"merge{name}", read + wide, wide, (part, accumulated), writes)
            if following is None:
                break
            held = (following, *held[:1])  # a sent buffer lives until the next is sent
        if accumulated is not None:
            size = heads * rows * self.row
            op = elementwise("cast", self.sizes[accumulated], size, self.direction)
            self.step(f"result{at}", op, (accumulated,), results)

    def attend_backward(self, at: str, read: Names, results: Names, heads: int, keys: int) -> None:
        """Add the backward. ``read``: the gradient and the saved tensors. ``results``: dq, dk and
        dv."""
        rounds, rows = len(self.own.ring.intervals), self.all_rows
        pieces = self.own.pieces(0)
        if rounds == 1 and len(pieces) == 1 and pieces[0][:4] == (0, rows, 0, rows):
            self._piece(f"{at}.0.0", pieces, read, results, heads, keys)
            return
        held: Names = ()
        if rounds > 1:
            held = (self.copy(f"fuse{at}", 2 * keys, read[1:-2], "held", rows),)
        dq = self._zeros(f"dq{at}", heads * rows)
        own = self._zeros(f"own{at}", 2 * keys * rows)
        coming: str | None = None
        for step in range(rounds):
            following = self._hop(at, step + 1, keys, held) if rounds > 1 else None
            made = own
            if step:
                made = self._zeros(f"made{at}.{step}", 2 * keys * _len(self._made(step)))
            for i, batch in enumerate(batches(self.own.pieces(step))):
                name, p = f"{at}.{step}.{i}", batch[0]
                count = heads * (p.q_stop - p.q_start) + 2 * keys * (p.k_stop - p.k_start)
                parts = self.rows(f"parts{name}", len(batch), count)
                self._piece(name, batch, (*read, *held), (parts,), heads, keys)
                wide = len(batch) * count * self.wide_row
                total = (dq, made)
                largest = max(heads * (p.q_stop - p.q_start), keys * (p.k_stop - p.k_start))
                passing: Names = ()
                if self.wide_row > self.row:  # a sum of two dtypes casts first
                    passing = self._passing(f"add{name}", len(batch) * largest, 4)
                read_bytes, writes = self.sizes[parts] + wide, (*total, *passing)
                self.adds(f"add{name}", read_bytes, wide, (parts, *total), writes)
            if coming is not None:
                self._take_in(f"{at}.{step - 1}", coming, (made, own))
            coming = self._hop_back(at, step, keys, (made,)) if step else None
            if following is None:
                break
            held = (following, *held[:1])
        if coming is not None:
            self._take_in(f"{at}.last", coming, (own,))
        wide, narrow = ((heads + 2 * keys) * rows * row for row in (self.wide_row, self.row))
        op = elementwise("cast", wide, narrow, self.direction)
        self.step(f"result{at}", op, (dq, own, *read), results)

    def _passing(self, name: str, rows: int, width: int) -> Names:
        """Return the buffers in which CPUs widen rows before adding; GPUs add in one pass."""
        if self.own.device == "cuda":
            return ()
        return (
            self.buffer(f"{name}.wide", rows * self.own.op.batch * self.own.op.head_dim * width),
        )

    def _made(self, step: int) -> Interval:
        return self.own.hops.made(self.me, step)

    def _zeros(self, name: str, rows: int) -> str:
        made = self.buffer(name, rows * self.wide_row)
        self.step(
            f"zeros.{name}", elementwise("copy", 0, self.sizes[made], "backward"), (), (made,)
        )
        return made

    def _take_in(self, at: str, coming: str, into: Names) -> None:
        size = self.sizes[coming]
        self.adds(f"take_in{at}", 2 * size, size, (coming, *into), into)

    def _piece(
        self,
        at: str,
        batch: Sequence[MaskPiece],
        read: Names,
        written: Names,
        heads: int,
        keys: int,
    ) -> None:
        """Add the kernel for a batch of pieces of one shape. Keys are repeated before it, and
        their gradients summed after it."""
        p, op = batch[0], self.own.op
        q_len, kv_len, count = p.q_stop - p.q_start, p.k_stop - p.k_start, len(batch)
        if p.kind == "anti":
            rows = count * (2 * heads * q_len + 2 * keys * kv_len)
            self.moves(f"flip{at}", rows, read, ())
        if keys != heads:
            rows, name = 2 * count * kv_len, f"repeat{at}"
            read = (*read, self.rows(f"{name}.keys", heads, rows))
            self.moves(name, heads * rows, read[:-1], read[-1:])
        kernel = attention(
            batch=op.batch * count, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=heads,
            head_dim=op.head_dim, causal=p.kind != "full", direction=self.direction,
            dtype=op.dtype,
        )  # fmt: skip
        if keys == heads or self.direction == "forward":
            self.step(f"attend{at}", kernel, read, written)
            return
        every = self.rows(f"every{at}", heads, count * (q_len + 2 * kv_len))
        self.step(f"attend{at}", kernel, read, (every,))
        size = 2 * count * kv_len * self.row
        self.adds(f"sum{at}", heads * size, keys * size, (every,), written)


def _len(rows: Interval) -> int:
    return rows[1] - rows[0]
