"""Matrix products: C[m,n] = A[m,k] B[k,n] into a preallocated C, operands stored as the case says.

A linear layer's forward stores B transposed (the weight is [n,k]), its input gradient stores
neither, its weight gradient stores A transposed.

tf32 and fp32 are products of fp32 tensors with torch's precision set to one or the other. fp8 is
e4m3: normal numbers scaled so that the largest of the tensor, or of each row of A and column of B,
is e4m3's largest (448), the sum kept in full precision, C in bf16. Grouped products allocate their
result: torch has no way to give one.
"""

import contextlib
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from meshwise.parallel import torch_private
from meshwise.probe.work import Unavailable, Work, fp32_precision, num_buffers, torch_dtype, tried
from meshwise.spec import Case, Gemm
from meshwise.timing import randn

_FP8 = torch.float8_e4m3fn
_ALIGNED_ROWS = 8  # experts' rows are padded to it: 16 bytes of bf16, which the kernels ask for


def build(case: Case, device: torch.device, settings: contextlib.ExitStack) -> Work:
    """``settings`` keeps torch's fp32 precision as the case needs it until the caller closes it."""
    op = case.op
    assert isinstance(op, Gemm)
    settings.enter_context(fp32_precision(op.dtype, device))
    make = _grouped if op.groups > 1 else _scaled if op.dtype == "fp8" else _plain
    calls = [make(op, device, 2 * i) for i in range(num_buffers(case, op.bytes, device))]
    tried(calls[0])
    return Work(calls=tuple(calls))


def _plain(op: Gemm, device: torch.device, seed: int) -> Callable[[], torch.Tensor]:
    dtype = torch.float32 if op.dtype == "tf32" else torch_dtype(op.dtype)
    a = _operand((op.m, op.k), op.trans_a, dtype, device, seed)
    b = _operand((op.k, op.n), op.trans_b, dtype, device, seed + 1)
    return functools.partial(
        torch.mm, a, b, out=torch.empty(op.m, op.n, dtype=dtype, device=device)
    )


def _operand(
    shape: tuple[int, ...], transposed: bool, dtype: torch.dtype, device: torch.device, seed: int
) -> torch.Tensor:
    """A tensor of ``shape``, its last two dims stored the other way round when ``transposed``."""
    if transposed:
        return randn((*shape[:-2], shape[-1], shape[-2]), dtype, device, seed).mT
    return randn(shape, dtype, device, seed)


def _scaled(op: Gemm, device: torch.device, seed: int) -> Callable[[], torch.Tensor]:
    if op.trans_a or not op.trans_b:
        raise Unavailable("fp8 kernels take A by rows and B by columns (nt) only")
    if op.n % 16 or op.k % 16:
        raise Unavailable(f"fp8 kernels take n and k in multiples of 16, not {op.n} and {op.k}")
    a, scale_a = quantised(randn((op.m, op.k), torch.float32, device, seed), op.scaling)
    b, scale_b = quantised(randn((op.n, op.k), torch.float32, device, seed + 1), op.scaling)
    out = torch.empty(op.m, op.n, dtype=torch.bfloat16, device=device)
    return functools.partial(torch_private.scaled_mm, a, b.T, scale_a, scale_b.T, out)


def quantised(x: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 numbers, and the fp32 scale that turns them back into ``x``: [1, 1] or [rows, 1]."""
    largest = x.abs().amax(dim=1, keepdim=True) if scaling == "row" else x.abs().amax().view(1, 1)
    scale = largest / torch.finfo(_FP8).max
    return (x / scale).to(_FP8), scale


def _grouped(op: Gemm, device: torch.device, seed: int) -> Callable[[], torch.Tensor]:
    """Groups of equal size, as near as their alignment allows."""
    if op.dtype not in ("bf16", "fp16", "fp32"):
        raise Unavailable(f"no probe for grouped products in {op.dtype}; measure bf16")
    if op.trans_a and op.trans_b:
        raise Unavailable("no probe for grouped products of two transposed operands")
    dtype = torch_dtype(op.dtype)
    a = _operand((op.m, op.k), op.trans_a, dtype, device, seed)
    of_group = () if op.trans_a else (op.groups,)
    b = _operand((*of_group, op.k, op.n), op.trans_b, dtype, device, seed + 1)
    ends = group_ends(op.k if op.trans_a else op.m, op.groups)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    return functools.partial(F.grouped_mm, a, b, offs=offsets)


def group_ends(rows: int, groups: int) -> list[int]:
    """The end of each of ``groups`` among ``rows``."""
    step = _ALIGNED_ROWS if rows >= _ALIGNED_ROWS * groups else 1
    return [rows * i // groups // step * step for i in range(1, groups)] + [rows]
