"""Partial softmaxes of one query over different keys become one.

Parts (o_i, l_i), each normalised, with its log-sum-exp, make

    m = max l_i,   s = sum e^(l_i - m),   out = sum e^(l_i - m) o_i / s,   lse = m + log s

m and s are carried apart: a lse in fp32 is a multiple of 2^-12 at 3,700, and a weight made of a
rounded one is off by as much. A part of weight w is taken in as out += w (o - out), so that weights
are 1 - w and w: parts that agree give exactly what they agree on. Order does not matter.

Error: l_i - m and what follows are in fp64, so that n parts are off by n 2^-50 of the largest |o_i|
before out is rounded, once, to the dtype of the inputs. lse is rounded once, too: it is off by no
more than two roundings, the parts' and this one. A query that has seen no key is 0 and -inf.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SoFar(NamedTuple):
    """``out`` [..., D], m as ``most`` [...] and s as ``share`` [...] of the parts seen, in fp64."""

    out: Tensor
    most: Tensor
    share: Tensor


Softmax = SoFar | tuple[Tensor, Tensor]  # or the out and lse of a single part, as they came


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of ``dtype`` are summed, and of its log-sum-exp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nothing(shape: Sequence[int], device: torch.device) -> SoFar:
    """Queries of out's ``shape`` [..., D] that have seen no key."""
    out = torch.zeros(shape, dtype=torch.float64, device=device)
    share = torch.zeros(shape[:-1], dtype=torch.float64, device=device)
    return SoFar(out, torch.full_like(share, -torch.inf), share)


def opened(found: Softmax) -> SoFar:
    """Able to take in more."""
    if isinstance(found, SoFar):
        return found
    out, lse = (x.double() for x in found)
    return SoFar(out, lse, torch.ones_like(lse))


def result(found: Softmax, like: Tensor) -> tuple[Tensor, Tensor]:
    """out as ``like``, in dtype and layout, and lse."""
    if not isinstance(found, SoFar):
        return found
    lse = found.most + found.share.log()
    return torch.empty_like(like).copy_(found.out), lse.to(wide(like.dtype))


def merge(so_far: SoFar, part: Tensor, lse: Tensor) -> None:
    """Take in ``part`` [..., D] with its ``lse`` [...], in place."""
    out, most, share = so_far
    if part.is_cuda and part.dtype != torch.float64:
        from meshwise.attention.row_kernels import merge as fused

        return fused(so_far, part, lse)
    more = torch.maximum(most, lse)
    kept, added = (  # no difference of infinities
        torch.where(x == more, 0, x - more).exp() * (x > -torch.inf) for x in (most, lse)
    )
    most.copy_(more)
    share.mul_(kept).add_(added)
    out.lerp_(part.to(out.dtype), (added / share.clamp(min=1)).unsqueeze(-1))
