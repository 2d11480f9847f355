"""Attention by ``scaled_dot_product_attention`` with the back end that torch picks.

Heads are stored [batch, seq, heads, head_dim] and viewed as [batch, heads, seq, head_dim], as a
model's projections leave them. Forward is timed as training runs it, saving for backward;
backward is timed alone, on a graph that is kept.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from meshwise.probe.work import Unavailable, Work, num_buffers, torch_dtype
from meshwise.spec import Attention, Case
from meshwise.timing import randn


def build(case: Case, device: torch.device) -> Work:
    op = case.op
    assert isinstance(op, Attention)
    if op.causal and op.q_len != op.kv_len:
        # torch's is_causal aligns the mask top left; a decoder's continuation needs bottom right
        raise Unavailable("no probe for causal attention with q_len != kv_len yet")
    seeds = range(num_buffers(case, op.bytes, device))
    return Work(calls=tuple(_attention(op, device, 4 * seed) for seed in seeds))


def _attention(op: Attention, device: torch.device, seed: int) -> Callable[[], object]:
    dtype = torch_dtype(op.dtype)

    def heads(length: int, count: int, seed: int) -> torch.Tensor:
        stored = randn((op.batch, length, count, op.head_dim), dtype, device, seed)
        return stored.transpose(1, 2)

    q = heads(op.q_len, op.heads, seed).requires_grad_()
    k = heads(op.kv_len, op.kv_heads, seed + 1).requires_grad_()
    v = heads(op.kv_len, op.kv_heads, seed + 2).requires_grad_()
    forward = functools.partial(
        F.scaled_dot_product_attention,
        q, k, v, is_causal=op.causal, enable_gqa=op.heads != op.kv_heads,
    )  # fmt: skip
    if op.direction == "forward":
        return forward
    gradient = heads(op.q_len, op.heads, seed + 3)
    return functools.partial(torch.autograd.grad, forward(), (q, k, v), gradient, retain_graph=True)
