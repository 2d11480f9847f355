"""Attention by each back end that torch offers: ``Case.backend`` names it, "" is torch's choice.

flash, cudnn, efficient, math: ``scaled_dot_product_attention`` restricted to that kernel; fa3, fa4:
the same, with an installed package in place of flash; flex: FlexAttention, compiled on a GPU, eager
and forward only on a CPU; varlen: ``varlen_attn`` over sequences of equal length. Cases that a back
end cannot do are skipped, with torch's reason.

Heads are stored [batch, seq, heads, head_dim] and viewed as [batch, heads, seq, head_dim], as a
model's projections produce them. Forward is timed as in training, saving for backward. Backward is
timed alone, on a graph that is kept. A causal mask is aligned at the bottom right: the last query
sees all keys. If ``is_causal`` cannot express a mask (a window, or fewer queries than keys), math
and efficient get it as a tensor.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend

from meshwise.engine import kernels
from meshwise.probe.cases.attention import BACKENDS
from meshwise.probe.work import Unavailable, Work, num_buffers, torch_dtype, tried
from meshwise.spec import Attention, Case
from meshwise.timing import randn

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_PACKAGES = {"fa3": "flash_attn_3", "fa4": "flash-attn-4"}
_DENSE_MASK_PAIRS = 2**28  # (query, key) pairs above which FlexAttention's mask is built compiled


def build(case: Case, device: torch.device, settings: contextlib.ExitStack) -> Work:
    """Build a case. ``settings`` fixes the kernel until the caller closes it, as choosing it in
    each call would cost more than a short kernel takes."""
    op, backend = case.op, case.backend
    assert isinstance(op, Attention)
    if backend not in BACKENDS:
        known = ", ".join(filter(None, BACKENDS))
        raise ValueError(f"Case.backend = {backend!r}: must be one of {known}, or empty")
    if op.causal and op.q_len > op.kv_len:
        raise Unavailable("causal attention with q_len > kv_len: its first queries see no key")
    if backend in _PACKAGES:
        _activate(backend, settings)
    packed = backend == "varlen" or (backend in _PACKAGES and _is_odd(op))
    if packed:
        compute = _varlen(op, device)
    elif backend == "flex":
        compute = _flex(op, device)
    else:
        compute = _sdpa(op, backend, device, settings)
    num_sets = num_buffers(case, op.bytes, device)
    saves = not (backend == "flex" and device.type == "cpu")
    calls = [_call(op, compute, packed, saves, device, 4 * i) for i in range(num_sets)]
    tried(calls[0])
    return Work(calls=tuple(calls))


def _is_odd(op: Attention) -> bool:
    """Whether ``is_causal``, which torch aligns at the top left, cannot express the mask."""
    return op.causal and (op.window is not None or op.q_len != op.kv_len)


def _call(
    op: Attention, compute: Compute, packed: bool, saves: bool, device: torch.device, seed: int
) -> Callable[[], object]:
    dtype = torch_dtype(op.dtype)

    def stored(length: int, heads: int, width: int, seed: int) -> torch.Tensor:
        tensor = randn((op.batch, length, heads, width), dtype, device, seed)
        return tensor.flatten(0, 1) if packed else tensor.transpose(1, 2)

    q = stored(op.q_len, op.heads, op.head_dim, seed)
    k = stored(op.kv_len, op.kv_heads, op.head_dim, seed + 1)
    v = stored(op.kv_len, op.kv_heads, op.value_dim, seed + 2)
    forward = functools.partial(compute, *(x.requires_grad_(saves) for x in (q, k, v)))
    if op.direction == "forward":
        return forward
    gradient = stored(op.q_len, op.heads, op.value_dim, seed + 3)
    return functools.partial(
        torch.autograd.grad, tried(forward), (q, k, v), gradient, retain_graph=True
    )


def _sdpa(
    op: Attention, backend: str, device: torch.device, settings: contextlib.ExitStack
) -> Compute:
    if backend:
        kernel = kernels.BACKENDS.get(backend, SDPBackend.FLASH_ATTENTION)
        settings.enter_context(torch_attention.sdpa_kernel([kernel]))
    mask = None
    if _is_odd(op):
        if backend not in ("math", "efficient"):
            what = "q_len != kv_len" if op.window is None else "a window"
            name = backend or "torch's choice"
            raise Unavailable(f"no causal attention with {what} by {name}; flex and varlen have it")
        queries = torch.arange(op.q_len, device=device)[:, None]
        mask = _mask(op)(0, 0, queries, torch.arange(op.kv_len, device=device))
    return functools.partial(
        F.scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=op.causal and mask is None,
        enable_gqa=op.heads != op.kv_heads,
    )


def _mask(op: Attention) -> Callable[[object, object, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return FlexAttention's mask: (batch, head, query, key) -> whether the query sees the key."""
    behind, window = op.kv_len - op.q_len, op.window

    def seen(_b: object, _h: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        causal = key <= query + behind
        return causal if window is None else causal & (key > query + (behind - window))

    return seen


def _flex(op: Attention, device: torch.device) -> Compute:
    from torch.nn.attention import flex_attention as flex

    on_cpu = device.type == "cpu"
    if on_cpu and op.direction == "backward":
        raise Unavailable("FlexAttention has no backward on a CPU")
    mask = None
    if op.causal:
        pairs = op.q_len * op.kv_len
        make = flex.create_block_mask
        if pairs > _DENSE_MASK_PAIRS:
            make = torch.compile(make)
        mask = make(_mask(op), None, None, op.q_len, op.kv_len, device=str(device))
    compute: Callable[..., Any] = flex.flex_attention
    if not on_cpu:
        torch.compiler.reset()  # torch does not compile one function for more than eight shapes
        compute = torch.compile(compute, dynamic=False)
    return functools.partial(compute, block_mask=mask, enable_gqa=op.heads != op.kv_heads)


def _varlen(op: Attention, device: torch.device) -> Compute:
    from torch.nn.attention import varlen

    if device.type != "cuda":
        raise Unavailable("varlen_attn needs a CUDA device")
    if op.value_dim != op.head_dim:
        raise Unavailable("varlen_attn wants head_dim_v = head_dim")
    varlen_attn: Callable[..., Any] = varlen.varlen_attn
    left = -1 if op.window is None else op.window - 1  # without the query's own position
    options: dict[str, Any] = {"window_size": (left, 0) if op.causal else (-1, -1)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # 2.11 always does
        options["enable_gqa"] = op.heads != op.kv_heads
    starts = [
        torch.arange(op.batch + 1, dtype=torch.int32, device=device) * length
        for length in (op.q_len, op.kv_len)
    ]
    return lambda q, k, v: varlen_attn(q, k, v, *starts, op.q_len, op.kv_len, **options)


def _activate(backend: str, settings: contextlib.ExitStack) -> None:
    """Replace torch's own FlashAttention by the installed package."""
    try:
        torch_attention.activate_flash_attention_impl(backend.upper())
    except ImportError:
        raise Unavailable(f"{_PACKAGES[backend]} is not installed") from None
    except (RuntimeError, ValueError) as error:  # another package of that name, or an older torch
        raise Unavailable(f"{_PACKAGES[backend]}: {error}".splitlines()[0]) from None
    settings.callback(torch_attention.restore_flash_attention_impl)
