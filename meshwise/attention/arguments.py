"""What dense and dilated attention both check before they send anything.

In: this rank's q [B, L, H, D], k and v [B, L, Hkv, D]. Out: them in one dtype, and what is wrong
with them, in words; a rank tells the others and all raise alike.
"""

import functools
import hashlib
import math

import torch
from torch import Tensor

from meshwise.attention.shards import Shards
from meshwise.prices import Prices
from meshwise.spec.op import Dtype
from meshwise.spec.record import digest

DTYPES: dict[torch.dtype, Dtype] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast, where it is on, would have them."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def problem(q: Tensor, k: Tensor, v: Tensor, scale: float | None, shards: Shards | None) -> str:
    """What is wrong with them on this rank; empty if nothing is."""
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        return f"scale = {scale!r}: must be a number above 0"
    if not (shards is None or isinstance(shards, Shards)):
        return f"shards = {type(shards).__name__}: make them by attention.shards"
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if any(x.dim() != 4 for x in (q, k, v)):
        return f"{shapes}: each must be [batch, length, heads, head_dim]"
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        return f"{shapes}: must be alike, except that q may have more heads than k and v"
    if not (q.shape[0] and k.shape[2] and q.shape[3]):
        return f"{shapes}: batch, heads and head_dim must be 1 or more"
    if not q.device == k.device == v.device:
        return f"q, k, v on {q.device}, {k.device}, {v.device}: give one device"
    if q.shape[2] % k.shape[2]:
        return f"{shapes}: heads {q.shape[2]} must be a multiple of key heads {k.shape[2]}"
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        return (
            f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}: give one of {', '.join(DTYPES.values())}"
        )
    return ""


def said(q: Tensor, k: Tensor, **options: object) -> dict[str, object]:
    """What ranks must have in common."""
    heads = {"heads": q.shape[2], "kv_heads": k.shape[2], "head_dim": q.shape[3]}
    return {"batch": len(q), **heads, "dtype": q.dtype, **options}


def short(what: object) -> str | None:
    """A name of what may be long."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:8] if what else None


@functools.lru_cache(8)
def named(prices: Prices | None) -> str:
    """Prices by their digest, which is slow to make."""
    return "none" if prices is None else digest(prices.costs)


def refuse_second_derivatives() -> None:
    """In a backward by hand, which autograd would take for a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "attention over ranks has no second derivative; leave out create_graph=True"
        )
