"""One block of attention by the fastest stock kernel that returns its log-sum-exp.

In: q [B, H, Lq, D], k and v [B, Hkv, Lk, D] of any strides, H a multiple of Hkv. Out: out like q,
lse [B, H, Lq] in fp32 (fp64 for fp64), natural log. A causal block is square. The backward takes
out and lse of the whole softmax that the block is a part of, so that the gradients of all blocks
add up to the exact ones.

    cuDNN       Hopper and later, fp16 and bf16
    flash       other GPUs from sm80 on, fp16 and bf16
    efficient   GPUs, fp32 and heads that flash has no kernel for
    cpu         CPUs
    plain       torch's own operations: fp64 on a GPU, and a single key, which cuDNN refuses

Traps: the CPU kernel crashes on an empty q or k. A causal mask of unequal lengths means something
else in each kernel. efficient pads its lse to 32. cuDNN finds a built plan by the strides of q, k
and v alone, so gradients must have q's layout.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwise.attention.merge import wide
from meshwise.spec.recipe import FLASH_HEAD_DIM

aten = torch.ops.aten
KERNELS = ("cudnn", "flash", "efficient", "cpu", "plain")
MOST_ELEMENTS = 2**31  # from a tensor's first to its last: beyond this cuDNN's backward is wrong


class KernelCall(NamedTuple):
    """The arguments of a kernel, with as many key heads as query heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def choose(q: Tensor, k: Tensor) -> str:
    """The fastest kernel for the device, dtype and shape; MESHWISE_ATTENTION overrides."""
    if (named := os.environ.get("MESHWISE_ATTENTION", "")) and named not in KERNELS:
        raise ValueError(f"MESHWISE_ATTENTION = {named!r}: must be one of {', '.join(KERNELS)}")
    if named:
        return named
    if q.device.type == "cpu":
        return "cpu"
    if q.dtype == torch.float64 or k.shape[2] == 1:
        return "plain"
    if q.dtype == torch.float32 or q.shape[-1] % 8 or q.shape[-1] > FLASH_HEAD_DIM:
        return "efficient"
    if torch.are_deterministic_algorithms_enabled():
        return "flash"
    hopper = _capability(q.device.index or 0) >= (9, 0)
    return "cudnn" if hopper and q.shape[-1] <= 128 else "flash"


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return out and lse of one block: 0 and -inf for an empty q or k, which ``merge`` ignores."""
    assert not causal or q.shape[2] == k.shape[2], "a causal block is square"
    if not q.numel() or not k.numel():
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide(q.dtype))
        return torch.zeros_like(q), lse
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    name, k, v = choose(q, k), _shared(k, q), _shared(v, q)
    if name != "cudnn" and max(_extent(q), _extent(k)) > MOST_ELEMENTS:
        parts = [attend(*cut, causal=causal, scale=scale) for cut in _halves(q, k, v)]
        axis = 0 if q.shape[0] > 1 else 1
        out, lse = (torch.cat(each, axis) for each in zip(*parts, strict=True))
        return out, lse
    out, lse = _FORWARD[name](KernelCall(q, k, v, causal, scale))
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, causal: bool, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv of one block. ``grad``, ``out`` [B, H, Lq, D] and ``lse`` [B, H, Lq] belong
    to the whole softmax. A query that saw no key (lse = -inf) has no gradient."""
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    name = choose(q, k)
    groups = q.shape[1] // k.shape[1]
    shared_k, shared_v = _shared(k, q), _shared(v, q)
    if max(_extent(q), _extent(shared_k)) > MOST_ELEMENTS:
        axis = 0 if q.shape[0] > 1 else 1
        parts = [
            attend_backward(*cut, causal=causal, scale=scale)
            for cut in _halves(grad, q, shared_k, shared_v, out, lse, q_at=1)
        ]
        dq, dk, dv = (torch.cat(each, axis) for each in zip(*parts, strict=True))
    else:
        # exp(a - lse) of a query that saw nothing must be 0, not exp(a + inf)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        block = KernelCall(q, shared_k, shared_v, causal, scale)
        dq, dk, dv = _BACKWARD[name](block, grad, out, lse)
    if dk.shape[1] != k.shape[1]:
        dk, dv = (x.unflatten(1, (k.shape[1], groups)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _extent(x: Tensor) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def _shared(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values for every query head: no kernel shares them itself."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _halves(*tensors: Tensor, q_at: int = 0) -> list[tuple[Tensor, ...]]:
    """Cut along the batch, or along whole groups of heads."""
    if tensors[q_at].shape[0] > 1:
        middle = tensors[q_at].shape[0] // 2
        return [tuple(x[:middle] for x in tensors), tuple(x[middle:] for x in tensors)]
    kv_heads = min(x.shape[1] for x in tensors)
    if kv_heads == 1:
        rows = tensors[q_at].shape[2]
        raise ValueError(f"one head of {rows} rows is more than a kernel can index; use more ranks")
    cut = kv_heads // 2

    def part(x: Tensor, first: bool) -> Tensor:
        at = x.shape[1] // kv_heads * cut
        return x[:, :at] if first else x[:, at:]

    return [tuple(part(x, first) for x in tensors) for first in (True, False)]


# ---- the kernels: forward -> out, lse; backward -> dq, dk, dv. torch has no types for them.


def _cudnn(block: KernelCall) -> Any:
    q, k, v, causal, scale = block
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal,
        return_debug_mask=False, scale=scale,
    )  # fmt: skip
    return out, lse.reshape(q.shape[:-1])


def _cudnn_backward(block: KernelCall, grad: Tensor, out: Tensor, lse: Tensor) -> Any:
    q, k, v, causal, scale = block
    grad, out = (_laid_out_as(q, x) for x in (grad, out))
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, logsumexp=lse.contiguous().unsqueeze(-1), philox_seed=unused,
        philox_offset=unused, attn_bias=None, cum_seq_q=None, cum_seq_k=None, max_q=q.shape[2],
        max_k=k.shape[2], dropout_p=0.0, is_causal=causal, scale=scale,
    )  # fmt: skip


def _laid_out_as(q: Tensor, x: Tensor) -> Tensor:
    return x if x.stride() == q.stride() else torch.empty_like(q).copy_(x)


def _flash(block: KernelCall) -> Any:
    q, k, v, causal, scale = block
    return aten._scaled_dot_product_flash_attention(
        q, k, v, dropout_p=0.0, is_causal=causal, return_debug_mask=False, scale=scale
    )[:2]


def _flash_backward(block: KernelCall, grad: Tensor, out: Tensor, lse: Tensor) -> Any:
    q, k, v, causal, scale = block
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused,
        scale=scale,
    )  # fmt: skip


def _efficient(block: KernelCall) -> Any:
    q, k, v, causal, scale = block
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(block: KernelCall, grad: Tensor, out: Tensor, lse: Tensor) -> Any:
    q, k, v, causal, scale = block
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, padded, unused, unused, 0.0, [True, True, True, False], causal,
        scale=scale,
    )[:3]  # fmt: skip


def _cpu(block: KernelCall) -> Any:
    q, k, v, causal, scale = block
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal, scale=scale)


def _cpu_backward(block: KernelCall, grad: Tensor, out: Tensor, lse: Tensor) -> Any:
    q, k, v, causal, scale = block
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )


def _plain(block: KernelCall) -> Any:
    scores = _scores(block)
    lse = scores.logsumexp(-1)
    shares = (scores - lse.unsqueeze(-1)).exp()
    return (shares @ block.v.to(lse.dtype)).to(block.q.dtype), lse


def _plain_backward(block: KernelCall, grad: Tensor, out: Tensor, lse: Tensor) -> Any:
    shares = (_scores(block) - lse.unsqueeze(-1)).exp()
    grad, q, k, v, out = (x.to(lse.dtype) for x in (grad, *block[:3], out))
    slopes = shares * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * block.scale
    return [x.to(block.q.dtype) for x in (slopes @ k, slopes.mT @ q, shares.mT @ grad)]


def _scores(block: KernelCall) -> Tensor:
    q, k = (x.to(wide(x.dtype)) for x in (block.q, block.k))
    scores = q @ k.mT * block.scale
    if block.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


_FORWARD: dict[str, Callable[[KernelCall], Any]] = {
    "cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "cpu": _cpu, "plain": _plain,
}  # fmt: skip
_BACKWARD: dict[str, Callable[[KernelCall, Tensor, Tensor, Tensor], Any]] = {
    "cudnn": _cudnn_backward, "flash": _flash_backward, "efficient": _efficient_backward,
    "cpu": _cpu_backward, "plain": _plain_backward,
}  # fmt: skip
