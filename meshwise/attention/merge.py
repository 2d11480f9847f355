"""Partial softmaxes of one query over different keys become one: the log-sum-exp algebra.

(o1, l1) and (o2, l2), each normalised, make l = logaddexp(l1, l2), o = e^(l1-l) o1 + e^(l2-l) o2.
It is associative and commutative, so chunks, branches and ranks merge in any order. A query that
has seen no key is o = 0, l = -inf. Accumulators are fp32, or fp64 where the inputs are.
"""

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What partial results of ``dtype`` are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of queries q [..., D] that have seen no key."""
    dtype = wide(q.dtype)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
    return torch.zeros(q.shape, dtype=dtype, device=q.device), lse


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take ``part`` [..., D] and ``part_lse`` [...] into the wide ``out`` and ``lse``, in place."""
    total = torch.logaddexp(lse, part_lse)
    dead = total == -torch.inf
    kept, added = ((x - total).masked_fill(dead, -torch.inf).exp() for x in (lse, part_lse))
    out.mul_(kept.unsqueeze(-1)).addcmul_(part.to(out.dtype), added.unsqueeze(-1).to(out.dtype))
    lse.copy_(total)
