"""Dense attention over the ranks of a group, exact, forward and backward by hand.

In: this rank's rows of q [B, L, H, D], k and v [B, L, Hkv, D]. Out: out like q, as one softmax over
the whole sequence would give it. Ways:

    heads       tokens are exchanged for heads (Ulysses), whole sequences attended, and back
    ring        K and V go round (``rounds``)
    gather      K and V are collected
    ring_heads  heads within groups of u consecutive ranks, a ring among the P/u groups (USP)

Here the arguments are checked, the ranks agree on them, and the way is chosen; ``passes`` goes it.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.attention import volume
from meshwise.attention.arguments import agreed, shown, starts_of
from meshwise.attention.passes import attend_dense, run_of
from meshwise.attention.pieces import Mask
from meshwise.attention.shards import Shards
from meshwise.attention.wire import Wire, wire_of
from meshwise.prices import Prices
from meshwise.spec.long_attention import WAYS, LongAttention


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
    """out [B, L, H, D]; with ``return_lse`` also lse [B, H, L] in fp32 (fp64 for fp64), which has
    no gradient.

    ``shards``: which tokens each rank holds; by default one run each, as long as its q, which
    ranks then tell each other in every call: give them in training. ``window``: a query sees that
    many keys at most, its own included; causal only. ``documents``: the global positions where
    packed documents start; a query sees its own document. ``way``: auto chooses by ``prices``,
    without them by rule (``volume.choose_dense``). ValueError, on all ranks alike, where the
    arguments do not fit or differ over the ranks.
    """
    given = (group, wire, causal, window, documents, shards, way, scale, prices, return_lse)
    if torch.compiler.is_compiling():  # the model around it compiles; this runs as it is
        return torch.compiler.disable(_attention)(q, k, v, *given)
    return _attention(q, k, v, *given)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None, wire: Wire | None,
    causal: bool, window: int | None, documents: Sequence[int] | None, shards: Shards | None,
    way: str, scale: float | None, prices: Prices | None, return_lse: bool,
) -> Any:  # fmt: skip
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
    """The first fault of one rank's options, in words; empty if there is none."""
    if mask.window is not None and not mask.causal:
        return f"window = {mask.window}: a window is of causal attention; set causal=True"
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
