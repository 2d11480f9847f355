"""The definition of long attention, dense and in float64, to compare everything else with.

In: q [B, N, H, D], k and v [B, N, Hkv, D] of the whole sequence, and the operation. Out: out
[B, N, H, D] and lse [B, H, N] in float64, differentiable. Each head builds the multiplicity matrix
M [N, N] of ``spec.long_attention`` and computes

    out[p] = sum_x M[p,x] exp(a(p,x)) v_x / sum_x M[p,x] exp(a(p,x)),   lse = log of the denominator

Time and memory grow with N^2. With the mixture ``detached`` each branch is its own softmax, and the
weights exp(lse_i - lse) take no gradient.
"""

import math

import torch
from torch import Tensor

from meshwise.spec.long_attention import LongAttention, offsets

_NEVER = -1e300  # exp of it is 0; an infinity would make the gradients of dead rows NaN


def multiplicity(op: LongAttention, head: int, branch: int | None = None) -> Tensor:
    """M[p, x] of a query head in float64: how often p attends x, in all branches or in one."""
    p = torch.arange(op.seq_len)
    allowed = torch.ones(op.seq_len, op.seq_len, dtype=torch.float64)
    if op.causal:
        allowed = (p[:, None] >= p).double()
    if op.window is not None:
        allowed *= p[:, None] - p < op.window
    if op.dilation is None:
        return allowed
    count = torch.zeros_like(allowed)
    for i, (length, rate) in enumerate(
        zip(op.dilation.segment_lengths, op.dilation.dilation_rates, strict=True)
    ):
        offset = offsets(op.dilation, i, op.heads, op.kv_heads)[head]
        if offset is None or branch not in (None, i):
            continue
        width = min(length, op.seq_len)
        kept = p % width % rate == offset
        count += (p[:, None] // width == p // width) & kept[:, None] & kept
    return count * allowed


def reference(
    q: Tensor, k: Tensor, v: Tensor, op: LongAttention, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return out and lse; a query that attends no key has out 0 and lse -inf."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    heads = []
    for head in range(op.heads):
        kv_head = head * op.kv_heads // op.heads
        heads.append(_head(q[:, head], k[:, kv_head], v[:, kv_head], op, head, scale))
    outs, lses = zip(*heads, strict=True)
    return torch.stack(outs, 2), torch.stack(lses, 1)


def _head(
    q: Tensor, k: Tensor, v: Tensor, op: LongAttention, head: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend with one query head, [B, N, D]."""
    scores = q @ k.mT * scale
    out, lse = _softmax(scores, v, multiplicity(op, head).to(q.device))
    if op.dilation is None or op.dilation.mixture == "exact":
        return out, lse
    mixed = torch.zeros_like(out)
    for branch in range(op.dilation.num_branches):
        part, part_lse = _softmax(scores, v, multiplicity(op, head, branch).to(q.device))
        weight = (part_lse - lse).nan_to_num(nan=-math.inf).exp().detach()
        mixed = mixed + weight.unsqueeze(-1) * part
    return mixed, lse


def _softmax(scores: Tensor, v: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    scores = scores.masked_fill(times == 0, _NEVER)
    most = scores.detach().amax(-1, keepdim=True)
    weights = times * (scores - most).exp()
    total = weights.sum(-1, keepdim=True)
    dead = total == 0
    total = total.masked_fill(dead, 1.0)
    lse = (most + total.log()).masked_fill(dead, -math.inf)
    return weights @ v / total, lse.squeeze(-1)
