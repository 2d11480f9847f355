"""Attention of queries that stay to keys and values that come, around a ring or all at once.

In: q [B, H, L, D], k and v [B, Hkv, L, D], this rank's rows of the heads that it works on, and the
ranks that hold the other rows of these heads. Out: the whole softmax; or dq, dk, dv.

At step t of the ring a rank attends the keys of the shard t before its own, while the next keys
come from the rank before: K and V in one message. In the backward they come again. Gradients of K
and V, in the wide dtype, follow one step behind the keys: each rank adds its part, and the last
rank that attends the shard sends them to its owner.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshwise.attention.blocks import add_gradients, attend_pieces, gradients, zeros_of
from meshwise.attention.heads import by_rows, heads_first, in_order, members
from meshwise.attention.merge import Softmax
from meshwise.attention.pieces import Mask, MaskPiece, local_pieces
from meshwise.attention.shards import Interval, Shards
from meshwise.attention.volume import NONE, RingHops, hops, hull, step_pieces
from meshwise.attention.wire import Arrived, Wire

Grads = tuple[Tensor, ...]


class Ring(NamedTuple):
    """``shards`` of the members; each member is ``stride`` ranks after the one before."""

    wire: Wire
    mask: Mask
    shards: Shards
    stride: int
    scale: float

    @property
    def size(self) -> int:
        return len(self.shards.intervals)

    @property
    def me(self) -> int:
        return self.wire.rank // self.stride

    @property
    def hops(self) -> RingHops:
        return hops(self.mask, self.shards)

    def held(self, step: int) -> Interval:
        return self.hops.held(self.me, step)

    def made(self, step: int) -> Interval:
        return self.hops.made(self.me, step)

    def pieces(self, step: int) -> tuple[MaskPiece, ...]:
        return step_pieces(self.mask, self.shards, self.me, step)

    def exchange(self, x: Tensor, to: int | None, receive: dict[int, int]) -> Arrived:
        """Send ``x`` [n, B, rows, D] to a member; ``receive``: rows that come, by member."""
        unit = x.shape[0] * x.shape[1]
        sent, received = [0] * self.wire.size, [0] * self.wire.size
        if to is not None:
            sent[self._rank(to)] = x.shape[2] * unit
        for source, rows in receive.items():
            received[self._rank(source)] = rows * unit
        return self.wire.exchange(x.reshape(-1, x.shape[-1]), sent, received)

    def _rank(self, member: int) -> int:
        return member % self.size * self.stride + self.wire.rank % self.stride


def attend_ring(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Softmax:
    if ring.size == 1:
        return attend_pieces(q, k, v, ring.pieces(0), ring.scale)
    held, so_far = _fused(k, v), None
    for step in range(ring.size):
        pending = _pass_keys(ring, held, step + 1)
        so_far = _attend_step(ring, q, held, step, so_far)
        if pending is None:
            break
        held = _unpacked(pending(), held, ring, step + 1)
    assert so_far is not None
    return so_far


def attend_ring_backward(
    ring: Ring, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Grads:
    if ring.size == 1:
        return gradients(grad, q, k, v, out, lse, ring.pieces(0), ring.scale)
    held, dq = _fused(k, v), zeros_of(q)
    own = zeros_of(held)
    coming = None
    for step in range(ring.size):
        pending = _pass_keys(ring, held, step + 1)
        made = own if step == 0 else _zeros_of_rows(held, ring.made(step))
        need = hull(ring.pieces(step))
        if need != NONE:
            pieces = tuple(p.shift(0, -need[0]) for p in ring.pieces(step))
            keys = _cut(held, ring.held(step), need)
            into = _cut(made, ring.made(step), need)
            add_gradients(grad, q, *_split(keys), out, lse, pieces, ring.scale, (dq, *_split(into)))
        if coming is not None:
            _take_in(ring, coming(), step - 1, made, own)
        coming = _pass_gradients(ring, made, step) if step else None
        if pending is None:
            break
        held = _unpacked(pending(), held, ring, step + 1)
    if coming is not None:
        _take_in(ring, coming(), step, None, own)
    return dq.to(q.dtype), *(x.to(q.dtype) for x in _split(own))


def attend_gathered(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Softmax:
    keys, values = _gather(ring, k, v)
    return attend_pieces(q, keys, values, _gathered_pieces(ring), ring.scale)


def attend_gathered_backward(
    ring: Ring, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Grads:
    keys, values = _gather(ring, k, v)
    dq, dk, dv = zeros_of(q), zeros_of(keys), zeros_of(values)
    pieces = _gathered_pieces(ring)
    add_gradients(grad, q, keys, values, out, lse, pieces, ring.scale, (dq, dk, dv))
    group = members(ring.wire, ring.shards, ring.size)
    blocks = by_rows(group, (dk, dv)).split([n * 2 * k.shape[1] * len(k) for n in group.lengths])
    sees = [bool(ring.pieces(ring.me - j)) for j in range(ring.size)]
    seen = [bool(step_pieces(ring.mask, ring.shards, j, j - ring.me)) for j in range(ring.size)]
    flat = torch.cat([x[: len(x) * wanted] for x, wanted in zip(blocks, sees, strict=True)])
    mine = len(blocks[ring.me])
    came = ring.wire.exchange(
        flat, [len(x) * w for x, w in zip(blocks, sees, strict=True)], [mine * w for w in seen]
    )()
    own = came.view(sum(seen), 2 * k.shape[1], len(k), k.shape[2], k.shape[3]).sum(0)
    return dq.to(q.dtype), *(x.to(q.dtype) for x in _split(own))


# ---- K and V as one tensor [2 * Hkv, B, rows, D]


def _fused(k: Tensor, v: Tensor) -> Tensor:
    heads, rows = k.shape[1], k.shape[2]
    found = k.new_empty(2 * heads, len(k), rows, k.shape[3])
    found[:heads], found[heads:] = k.transpose(0, 1), v.transpose(0, 1)
    return found


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V, each [B, Hkv, rows, D]."""
    half = x.shape[0] // 2
    return heads_first(x[:half]), heads_first(x[half:])


def _cut(x: Tensor, rows: Interval, wanted: Interval) -> Tensor:
    """Take the rows ``wanted`` of a tensor that holds ``rows``."""
    return x[:, :, wanted[0] - rows[0] : wanted[1] - rows[0]]


def _zeros_of_rows(like: Tensor, rows: Interval) -> Tensor:
    return zeros_of(like[:, :, :1].expand(-1, -1, rows[1] - rows[0], -1))


# ---- messages around the ring


def _attend_step(ring: Ring, q: Tensor, held: Tensor, step: int, so_far: Softmax | None) -> Softmax:
    first = ring.held(step)[0]
    pieces = tuple(p.shift(0, -first) for p in ring.pieces(step))
    if so_far is not None and not pieces:
        return so_far
    return attend_pieces(q, *_split(held), pieces, ring.scale, so_far)


def _pass_keys(ring: Ring, held: Tensor, step: int) -> Arrived | None:
    """Send the held keys on, cut to the rows needed from ``step`` on; None if nobody needs any."""
    if step > max(ring.hops.last):
        return None
    rows, come = ring.hops.keys[step][ring.me - step + 1], ring.held(step)
    sent = _cut(held, ring.held(step - 1), rows)
    return ring.exchange(sent, ring.me + 1, {ring.me - 1: come[1] - come[0]})


def _unpacked(flat: Tensor, like: Tensor, ring: Ring, step: int) -> Tensor:
    first, last = ring.held(step)
    return flat.view(*like.shape[:2], last - first, like.shape[3])


def _pass_gradients(ring: Ring, made: Tensor, step: int) -> Arrived:
    """Send gradients of the held shard to the next rank, or after its last step to its owner."""
    last = ring.hops.last
    shard = (ring.me - step) % ring.size
    to = None if step > last[shard] else shard if step == last[shard] else ring.me + 1
    sent = made if to is not None else made[:, :, :0]
    return ring.exchange(sent, to, ring.hops.expected(ring.me, step))


def _take_in(ring: Ring, flat: Tensor, step: int, made: Tensor | None, own: Tensor) -> None:
    """Add gradients that came after ``step`` to those of the held shard or the own one."""
    expected, at = ring.hops.expected(ring.me, step), 0
    grads = ring.hops.grads[step]
    before = (ring.me - step - 1) % ring.size
    for source in sorted(expected):
        size = expected[source] * own.shape[0] * own.shape[1]
        part = flat[at : at + size].view(*own.shape[:2], expected[source], own.shape[3])
        at += size
        last = ring.hops.last[ring.me]
        if step == last and source == (ring.me + step) % ring.size:
            _cut(own, (0, own.shape[2]), grads[ring.me]).add_(part)
        else:
            assert made is not None
            _cut(made, ring.made(step + 1), grads[before]).add_(part)


# ---- all at once


def _gather(ring: Ring, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Collect all keys and values [B, Hkv, N, D] in global order."""
    fused = _fused(k, v)
    unit = fused.shape[0] * fused.shape[1]
    flat = ring.wire.gather(fused.view(-1, k.shape[3]), [n * unit for n in ring.shards.lengths])()
    group = members(ring.wire, ring.shards, ring.size)
    return _split(in_order(group, flat, fused.shape[0], fused.shape[1]))


def _gathered_pieces(ring: Ring) -> tuple[MaskPiece, ...]:
    mine = ring.shards.intervals[ring.me]
    return local_pieces(ring.mask, mine, ((0, ring.shards.seq_len),))
