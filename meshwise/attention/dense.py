"""Exact dense attention over the ranks of a group, with a hand-written backward.

In: this rank's rows of q [B, L, H, D], k and v [B, L, Hkv, D]. Out: out like q, equal to one
softmax over the whole sequence. Ways:

    heads       ranks swap tokens for heads (Ulysses), attend whole sequences, and swap back
    ring        K and V pass around the ring (``rounds``)
    gather      every rank collects all K and V
    ring_heads  heads within groups of u consecutive ranks, a ring between the P/u groups (USP)

One code path serves all ways: u consecutive ranks divide the heads (``heads``), and keys come in
rounds from the P/u ranks that work on the same heads (``rounds``). In the ``heads`` way a large
exchange is cut into slices of heads, so that one slice is sent while another is computed.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.attention import rounds, volume
from meshwise.attention.arguments import (
    agreed,
    no_view,
    refuse_second_derivatives,
    shown,
    starts_of,
    uncompiled,
)
from meshwise.attention.heads import Members, like_rows, members, to_heads, to_rows
from meshwise.attention.merge import result
from meshwise.attention.pieces import Mask
from meshwise.attention.rounds import Ring
from meshwise.attention.shards import Shards, of_lengths
from meshwise.attention.wire import Wire, wire_of
from meshwise.prices import Prices
from meshwise.spec.long_attention import WAYS, LongAttention


@uncompiled
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    wire: Wire | None = None,
    causal: bool = False,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    shards: Shards | None = None,
    way: str = "auto",
    scale: float | None = None,
    prices: Prices | None = None,
    return_lse: bool = False,
) -> Any:
    """Return out [B, L, H, D]; with ``return_lse`` also lse [B, H, L] in fp32 (fp64 for fp64),
    which has no gradient.

    ``shards``: the tokens of each rank. By default each rank holds one run as long as its q, and
    the ranks exchange these lengths in every call; pass ``shards`` in training. ``window``: a query
    sees at most that many keys, its own included; causal only. ``documents``: the global positions
    where packed documents start; a query sees its own document. ``way``: auto chooses by
    ``prices``, or by a rule without them (``volume.choose_dense``). All ranks raise the same
    ValueError if arguments are invalid or differ between ranks.
    """
    wire, starts = wire_of(group, wire), starts_of(documents)
    mask = Mask(causal, window, starts)
    call = agreed(
        q, k, v, wire, lambda: _problem(mask, way), return_lse, {"lse": return_lse}, causal=causal,
        window=window, documents=starts, shards=shards, way=way, scale=scale, prices=prices,
    )  # fmt: skip
    shards, lengths = call.shards, tuple(call.lengths)
    if shards.lengths != lengths:
        raise ValueError(
            f"shards = {shards.lengths} tokens by rank: q has {lengths}; give the same"
        )
    if not _covers(shards):
        raise ValueError(
            f"shards = {shards.intervals}: must hold each of {shards.seq_len} tokens once"
        )
    if mask.documents and mask.documents[-1] > shards.seq_len:
        raise ValueError(
            f"documents = {shown(starts)}: {starts[-1]} lies behind the last of {shards.seq_len} "
            "tokens; give positions where documents start"
        )
    op = call.op(causal=causal, window=window, direction="backward" if call.has_grad else "forward")
    if way == "auto":
        way = _chosen(op, shards, prices, mask.documents)
    else:
        volume.check_way(op, wire.size, way)
    run = run_of(op, mask, shards, way, wire, call.scale)
    out, lse = attend_dense(call.q, call.k, call.v, run, return_lse)
    return (out, lse) if return_lse else out


def _problem(mask: Mask, way: str) -> str:
    """Describe the first fault in this rank's options; empty if there is none."""
    if mask.window is not None and not mask.causal:
        return f"window = {mask.window}: only causal attention has a window; set causal=True"
    if list(mask.documents) != sorted(set(mask.documents)):
        return f"documents = {shown(mask.documents)}: must ascend, where each document starts"
    return "" if way in WAYS else f"way = {way!r}: must be one of {', '.join(WAYS)}"


@functools.lru_cache(64)
def _covers(shards: Shards) -> bool:
    every = list(itertools.chain(*shards.intervals))
    held = sorted(x for x in every if x[0] != x[1])
    starts, stops = [a for a, _ in held], [b for _, b in held]
    return starts == [0, *stops[:-1]] and all(a <= b for a, b in every)


@functools.lru_cache(64)
def _chosen(
    op: LongAttention, shards: Shards, prices: Prices | None, documents: tuple[int, ...]
) -> str:
    return volume.choose_dense(op, shards, prices, documents)


@uncompiled
def windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention on one rank; a query sees the last ``window`` keys, its own included.

    Stock kernels have no windows, so the band is cut into triangles that they support (``pieces``).
    No L x L tensor is made. The backward keeps q, k, v, the output and its log-sum-exp.
    """
    return attend_dense(q, k, v, _alone(q.shape[1], window, q.shape[-1] ** -0.5), False)[0]


@functools.lru_cache(64)
def _alone(length: int, window: int, scale: float) -> "Run":
    ring = Ring(Wire(alone=True), Mask(True, window), of_lengths([length]), 1, scale)
    return Run(ring, False, None, (), (), (0, 0, 0))


# ---- the forward, and its backward by hand

# q, k, v, out [B, h, N, D] and lse of each slice. If heads are not divided: q, k, v as given and
# out as returned, so that autograd notices in-place writes to them.
Saved = Sequence[Sequence[Tensor]]


class Run(NamedTuple):
    """One call on one rank. ``group``: the ranks that divide the heads; None if heads are not
    divided. ``key_heads``: how many of this rank's query heads use each key head; empty if equally
    many. ``num_heads``: the heads of q, k and v over all ranks."""

    ring: Ring
    gathers: bool
    group: Members | None
    slices: tuple[volume.Slice, ...]
    key_heads: tuple[int, ...]
    num_heads: tuple[int, int, int]


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, run: Run, returns_lse: bool
) -> tuple[Tensor, Tensor]:
    """Return out [B, L, H, D] and lse [B, H, L]; lse is empty if not asked for and not local."""
    return _Dense.apply(q, k, v, run, returns_lse)  # type: ignore[no-any-return, no-untyped-call]


@functools.lru_cache(64)
def run_of(
    op: LongAttention, mask: Mask, shards: Shards, way: str, wire: Wire, scale: float
) -> Run:
    """Prepare a call on this rank. ``way`` must not be auto."""
    degree = volume.degree_of(way, op.kv_heads, wire.size)
    ring = Ring(wire, mask, volume.grouped(shards, degree), degree, scale)
    gathers = way == "gather" and wire.size > 1
    num_heads = (op.heads, op.kv_heads, op.kv_heads)
    if degree == 1:
        return Run(ring, gathers, None, (), (), num_heads)
    each = volume.shares(op.heads, op.kv_heads, degree)
    a, b, c, d = each[wire.rank % degree]
    per_key = op.heads // op.kv_heads
    counts = [min(b, (x + 1) * per_key) - max(a, x * per_key) for x in range(c, d)]
    return Run(
        ring, gathers, members(wire, shards, degree), volume.slices(op, degree, wire.size),
        () if len(set(counts)) < 2 else tuple(counts), num_heads,
    )  # fmt: skip


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: Tensor, k: Tensor, v: Tensor, run: Run, returns_lse: bool
    ):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        of = _forward_here if run.group is None else _forward_by_heads
        out, lse, saved = of(run, q, k, v, returns_lse)
        ctx.save_for_backward(*itertools.chain(*saved))
        ctx.run = run
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
        refuse_second_derivatives()
        saved = ctx.saved_tensors
        slices = [saved[i : i + 5] for i in range(0, len(saved), 5)]
        of = _backward_here if ctx.run.group is None else _backward_by_heads
        return *of(ctx.run, grad, slices), None, None


def _forward_here(
    run: Run, q: Tensor, k: Tensor, v: Tensor, _: bool
) -> tuple[Tensor, Tensor, Saved]:
    out, lse = _attend(run, *(x.transpose(1, 2) for x in (q, k, v)))
    rows = no_view(out.transpose(1, 2).contiguous())
    return rows, lse, [(q, k, v, rows, lse)]


def _backward_here(run: Run, grad: Tensor, saved: Saved) -> Sequence[Tensor]:
    *rows, lse = grad.contiguous(), *saved[0]
    grads = _attend_backward(run, *(x.transpose(1, 2) for x in rows), lse)
    return [x.transpose(1, 2) for x in grads]


def _forward_by_heads(
    run: Run, q: Tensor, k: Tensor, v: Tensor, returns_lse: bool
) -> tuple[Tensor, Tensor, Saved]:
    group, saved, back, back_lse = run.group, [], [], []
    assert group is not None
    coming = [to_heads(group, (q, k, v), (s.queries, s.keys, s.keys)) for s in run.slices]
    for each in run.slices:
        queries, keys, values = coming.pop(0)()
        keys, values = (_repeated(x, run.key_heads) for x in (keys, values))
        out, lse = _attend(run, queries, keys, values)
        saved.append((queries, keys, values, out, lse))
        back.append(to_rows(group, [out], [each.queries]))
        if returns_lse:
            back_lse.append(to_rows(group, [lse.unsqueeze(-1)], [each.queries]))
    asked = [run.slices[0].queries]
    rows = like_rows(group, [out], asked, [q.shape[2]])
    for unpack in back:
        unpack(rows)
    rows_lse: list[Tensor] = []
    if returns_lse:
        rows_lse = like_rows(group, [lse.unsqueeze(-1)], asked, [q.shape[2]])
    for unpack in back_lse:
        unpack(rows_lse)
    lses = rows_lse[0].squeeze(-1).transpose(1, 2) if returns_lse else lse.new_empty(0)
    return rows[0].to(q.dtype), lses, saved


def _backward_by_heads(run: Run, grad: Tensor, saved: Saved) -> Sequence[Tensor]:
    group, back = run.group, []
    assert group is not None
    coming = [to_heads(group, [grad], [s.queries]) for s in run.slices]
    rows: list[Tensor] = []
    for each, kept in zip(run.slices, saved, strict=True):
        dq, dk, dv = _attend_backward(run, *coming.pop(0)(), *kept)
        made = dq, _summed(dk, run.key_heads), _summed(dv, run.key_heads)
        ranges = (each.queries, each.keys, each.keys)
        rows = rows or like_rows(group, made, ranges, run.num_heads)
        back.append(to_rows(group, made, ranges))
        del dq, dk, dv, made  # packed by now; the next slice needs the memory
    while back:
        back.pop(0)(rows)
    return [x.to(grad.dtype) for x in rows]


def _attend(run: Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    of = rounds.attend_gathered if run.gathers else rounds.attend_ring
    return result(of(run.ring, q, k, v), q)


def _attend_backward(run: Run, *given: Tensor) -> rounds.Grads:
    of = rounds.attend_gathered_backward if run.gathers else rounds.attend_ring_backward
    return of(run.ring, *given)


def _repeated(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Repeat key head i ``counts[i]`` times, once per query head; without counts return x."""
    if not counts:
        return x
    return torch.cat([x[:, i : i + 1].expand(-1, n, -1, -1) for i, n in enumerate(counts)], 1)


def _summed(x: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.stack([part.sum(1) for part in x.split(counts, 1)], 1) if counts else x
