"""Matrix products: C[m,n] = A[m,k] B[k,n] into a preallocated C, operands stored as the case says.

A linear layer's forward stores B transposed (the weight is [n,k]), its input gradient stores
neither, its weight gradient stores A transposed.
"""

import functools
from collections.abc import Callable

import torch

from meshwise.probe.work import Work, num_buffers, torch_dtype
from meshwise.spec import Case, Gemm
from meshwise.timing import randn


def build(case: Case, device: torch.device) -> Work:
    op = case.op
    assert isinstance(op, Gemm)
    seeds = range(num_buffers(case, op.bytes, device))
    return Work(calls=tuple(_product(op, device, seed) for seed in seeds))


def _product(op: Gemm, device: torch.device, seed: int) -> Callable[[], object]:
    dtype = torch_dtype(op.dtype)
    a = _operand(op.m, op.k, op.trans_a, dtype, device, 2 * seed)
    b = _operand(op.k, op.n, op.trans_b, dtype, device, 2 * seed + 1)
    out = torch.empty(op.m, op.n, dtype=dtype, device=device)
    return functools.partial(torch.mm, a, b, out=out)


def _operand(
    rows: int, columns: int, transposed: bool, dtype: torch.dtype, device: torch.device, seed: int
) -> torch.Tensor:
    """[rows, columns], stored as [columns, rows] when ``transposed``."""
    if transposed:
        return randn((columns, rows), dtype, device, seed).T
    return randn((rows, columns), dtype, device, seed)
