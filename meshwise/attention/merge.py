"""Merge partial softmaxes of one query over different keys into one.

Parts (o_i, l_i), each normalised, with its log-sum-exp, give

    m = max l_i,   s = sum e^(l_i - m),   out = sum e^(l_i - m) o_i / s,   lse = m + log s

m and s are kept apart: near 3,700 an fp32 lse is a multiple of 2^-12, and a weight computed from a
rounded lse is off by as much. A part of weight w is added as out += w (o - out), so the weights are
1 - w and w, and parts that agree give exactly their value. Order does not matter.

Error: l_i - m and all later steps are in fp64, so n parts are off by n 2^-50 of the largest |o_i|
before out is rounded, once, to the dtype of the inputs. lse is rounded once too: it is off by at
most two roundings, the parts' and this one. A query that has seen no key has out 0 and lse -inf.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SoFar(NamedTuple):
    """Parts merged so far, in fp64: ``out`` [..., D], m as ``most`` [...], s as ``share`` [...]."""

    out: Tensor
    most: Tensor
    share: Tensor


Softmax = SoFar | tuple[Tensor, Tensor]  # or the out and lse of a single part, as they came


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of gradients of ``dtype``, and for its log-sum-exp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nothing(shape: Sequence[int], device: torch.device) -> SoFar:
    """State of queries that have seen no key; ``shape`` is out's, [..., D]."""
    out = torch.zeros(shape, dtype=torch.float64, device=device)
    share = torch.zeros(shape[:-1], dtype=torch.float64, device=device)
    return SoFar(out, torch.full_like(share, -torch.inf), share)


def opened(found: Softmax) -> SoFar:
    """Turn a single part into a state that can take in more."""
    if isinstance(found, SoFar):
        return found
    out, lse = (x.double() for x in found)
    return SoFar(out, lse, torch.ones_like(lse))


def result(found: Softmax, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return out with dtype and layout of ``like``, and lse."""
    if not isinstance(found, SoFar):
        return found
    lse = found.most + found.share.log()
    return torch.empty_like(like).copy_(found.out), lse.to(wide(like.dtype))


def merge(so_far: SoFar, part: Tensor, lse: Tensor) -> None:
    """Merge ``part`` [..., D] with its ``lse`` [...] into ``so_far``, in place."""
    out, most, share = so_far
    if part.is_cuda and part.dtype != torch.float64:
        from meshwise.attention.row_kernels import merge as fused

        return fused(so_far, part, lse)
    more = torch.maximum(most, lse)
    kept, added = (  # avoids inf - inf
        torch.where(x == more, 0, x - more).exp() * (x > -torch.inf) for x in (most, lse)
    )
    most.copy_(more)
    share.mul_(kept).add_(added)
    out.lerp_(part.to(out.dtype), (added / share.clamp(min=1)).unsqueeze(-1))
