"""Causal attention with a window, of one rank, forward and backward by hand.

In: q [B, L, H, D], k and v [B, L, Hkv, D]. Out: like q; a query sees the last ``window`` keys, its
own included. Stock kernels know no windows, so the band is cut into triangles that they do
(``pieces``): nothing of L x L is made, and backward keeps q, k, v, the result and its log-sum-exp.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from meshwise.attention.arguments import no_view, refuse_second_derivatives
from meshwise.attention.blocks import attend_pieces, gradients
from meshwise.attention.merge import result
from meshwise.attention.pieces import Mask, Piece, local_pieces


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The whole attention of this rank's heads."""
    if torch.compiler.is_compiling():  # the model around it compiles; this runs as it is
        out: Tensor = torch.compiler.disable(_apply)(q, k, v, window)
        return out
    return _apply(q, k, v, window)


def _apply(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return _Windowed.apply(q, k, v, window)  # type: ignore[no-any-return, no-untyped-call]


@functools.lru_cache(64)
def _pieces(length: int, window: int) -> tuple[Piece, ...]:
    every = ((0, length),)
    return local_pieces(Mask(causal=True, window=window), every, every)


class _Windowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        pieces, scale = _pieces(q.shape[1], window), q.shape[-1] ** -0.5
        by_heads = q.transpose(1, 2)
        found = attend_pieces(by_heads, k.transpose(1, 2), v.transpose(1, 2), pieces, scale)
        out, lse = result(found, by_heads)
        rows = no_view(out.transpose(1, 2).contiguous())
        ctx.save_for_backward(q, k, v, rows, lse)
        ctx.pieces, ctx.scale = pieces, scale
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        q, k, v, rows, lse = ctx.saved_tensors
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grads[0].contiguous(), q, k, v, rows))
        found = gradients(grad, q, k, v, out, lse, ctx.pieces, ctx.scale)
        return *(x.transpose(1, 2) for x in found), None
