"""Attention of new tokens over all tokens so far, with cached keys and values.

In: q [b,s,heads,dim], k and v [b,s,kv_heads,dim] of the new tokens; ``Now`` has their positions.
Out: like q: softmax(q k^T / sqrt(dim)) v over the tokens at the same or earlier positions; with a
``window`` only over the last of these. A ``Cache`` replaces ``causal`` in a model
(``stage.Attend``).

Shapes are the same for every token, so a CUDA graph or compiled code can hold a step. The cache is
read up to a length that the host chose, and keys after the position are masked by comparing with a
tensor. Query heads that share a key head are rows of one product, so keys and values are read once
and not copied for every query head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwise.nn.stage import causal


@dataclass
class Now:
    """The tokens of the next forward pass. The layers of a stage share it.

    ``at`` [s]: their positions, on the device. ``length``: larger than all positions. ``fresh``: no
    tokens came before them.
    """

    at: Tensor
    length: int
    fresh: bool = True


# q [b,1,heads,dim], all keys and values, the token's position [1], a larger length -> like q
AttendOne = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


class Cache:
    """The cache and the attention of one layer. ``k`` and ``v``: [groups, b, most tokens,
    kv_heads, dim], of batches that take turns. ``one``: a faster kernel for one token, if there is
    one. All tokens are kept, even those outside of a ``window``."""

    def __init__(
        self, now: Now, k: Tensor, v: Tensor, one: AttendOne | None = None,
        window: int | None = None,
    ) -> None:  # fmt: skip
        self.now, self.k, self.v, self.one = now, k, v, one if window is None else None
        self.window = window
        self.turn_to(0)

    def turn_to(self, group: int) -> None:
        """Attend for this batch from now on. It is set as tensors, so code compiles only once."""
        self.keys, self.values = self.k[group], self.v[group]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        now = self.now
        self.keys.index_copy_(1, now.at, k)
        self.values.index_copy_(1, now.at, v)
        if now.fresh:
            return causal(q, k, v, self.window)
        if self.one is not None and q.shape[1] == 1:
            return self.one(q, self.keys, self.values, now.at, now.length)
        k, v = self.keys[:, : now.length], self.values[:, : now.length]
        return attend(q, k, v, now.at, self.window)


def attend(q: Tensor, k: Tensor, v: Tensor, at: Tensor, window: int | None = None) -> Tensor:
    """Attend with queries at positions ``at`` [s], each to the last ``window`` keys up to it."""
    kv_heads, sharing = k.shape[2], q.shape[2] // k.shape[2]
    split: Tensor = q.unflatten(2, (kv_heads, sharing))
    rows = split.permute(0, 2, 3, 1, 4).flatten(2, 3)
    positions = torch.arange(k.shape[1], device=k.device)
    seen = positions <= at[:, None]
    if window is not None:
        seen = seen & (positions > at[:, None] - window)
    out: Tensor = F.scaled_dot_product_attention(
        rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen.repeat(sharing, 1)
    )
    out = out.unflatten(2, (sharing, len(at)))  # [b, kv_heads, sharing, s, dim]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)
