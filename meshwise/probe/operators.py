"""Build operations of one device: products, convolutions, memory-bound work; and attention.

**Matrix products**: C[m,n] = A[m,k] B[k,n] into a preallocated C, operands stored as the case says.
A linear layer's forward stores B transposed (the weight is [n,k]), its input gradient stores
neither transposed, its weight gradient stores A transposed. fp8 is e4m3: normal random numbers,
scaled so that the largest of the tensor, or of each row of A and column of B, is e4m3's largest
(448). Sums are in full precision, C in bf16. Grouped products allocate their result, since torch
takes no buffer for it, except batched ones (groups of equal size).

**Convolutions** by cuDNN or oneDNN, each product alone: y from x and w, dx from dy and w, dw from
dy and x. Channels last, also for weights; padding is kernel // 2. As in a step, the library guesses
its fastest algorithm and tries none. Results are allocated, since torch takes no buffer for them.

**Memory-bound work**: copies, the optimizer, and the kinds that ``KINDS`` lists, as ``nn`` calls
them. Backward is autograd's alone: forward has run once. Work of other kinds is priced as copies.
adamw is one fused step over one flat fp32 parameter: it reads p, g, m, v and writes p, m, v, 28
bytes an element. h2d and d2h copy between pinned host memory and the device.

tf32 and fp32 both work on fp32 tensors, with torch's precision set to one or the other.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from meshwise import torch_private
from meshwise.prices.key import ONE_KERNEL
from meshwise.probe import attention
from meshwise.probe.work import (
    Call,
    Unavailable,
    Work,
    fp32_precision,
    num_buffers,
    torch_dtype,
    tried,
)
from meshwise.spec import Attention, Case, Convolution, Elementwise, Gemm
from meshwise.timing import randn

FP32_BYTES, TOKEN_BYTES = 4, 8
_FP8 = torch.float8_e4m3fn
_ALIGNED_ROWS = 8  # experts' rows are padded to this: kernels need 16 bytes, 8 of bf16
_OUTPUTS = {"dgrad": [True, False, False], "wgrad": [False, True, False]}  # dx, dw, db


def build(case: Case, device: torch.device, settings: contextlib.ExitStack) -> Work:
    """Build a case. ``settings`` fixes torch's precision, or attention's kernel, until the caller
    closes it."""
    op = case.op
    if isinstance(op, Attention):
        return attention.build(case, device, settings)
    make: Any  # (operation, device, seed) -> a call
    if isinstance(op, Gemm):
        settings.enter_context(fp32_precision(op.dtype, device))
        make = _grouped if op.groups > 1 else _scaled if op.dtype == "fp8" else _product
        make = _batched if op.batched else make
    elif isinstance(op, Convolution):
        settings.enter_context(fp32_precision(op.dtype, device))
        make = _convolution
    else:
        assert isinstance(op, Elementwise), op
        if op.kind in ("h2d", "d2h") and device.type == "cpu":
            raise Unavailable("no host link: the device is the host")
        make = {"adamw": _adamw, **dict.fromkeys(("copy", "h2d", "d2h"), _copy)}.get(op.kind, _kind)
    calls = [make(op, device, 3 * i) for i in range(num_buffers(case, op.bytes, device))]
    tried(calls[0])
    return Work(calls=tuple(calls))


def _product(op: Gemm, device: torch.device, seed: int) -> Call:
    dtype = torch.float32 if op.dtype == "tf32" else torch_dtype(op.dtype)
    a = _operand((op.m, op.k), op.trans_a, dtype, device, seed)
    b = _operand((op.k, op.n), op.trans_b, dtype, device, seed + 1)
    return functools.partial(
        torch.mm, a, b, out=torch.empty(op.m, op.n, dtype=dtype, device=device)
    )


def _operand(
    shape: tuple[int, ...], transposed: bool, dtype: torch.dtype, device: torch.device, seed: int
) -> torch.Tensor:
    """Make a tensor of ``shape``. If ``transposed``, its last two dims are stored swapped."""
    if transposed:
        return randn((*shape[:-2], shape[-1], shape[-2]), dtype, device, seed).mT
    return randn(shape, dtype, device, seed)


def _scaled(op: Gemm, device: torch.device, seed: int) -> Call:
    if op.trans_a or not op.trans_b:
        raise Unavailable("fp8 kernels take A by rows and B by columns (nt) only")
    if op.n % 16 or op.k % 16:
        raise Unavailable(f"fp8 kernels take n and k in multiples of 16, not {op.n} and {op.k}")
    a, scale_a = quantised(randn((op.m, op.k), torch.float32, device, seed), op.scaling)
    b, scale_b = quantised(randn((op.n, op.k), torch.float32, device, seed + 1), op.scaling)
    out = torch.empty(op.m, op.n, dtype=torch.bfloat16, device=device)
    return functools.partial(torch_private.scaled_mm, a, b.T, scale_a, scale_b.T, out.dtype, out)


def quantised(x: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 elements, and the fp32 scale that maps them to ``x``: [1, 1] or [rows, 1]."""
    largest = x.abs().amax(dim=1, keepdim=True) if scaling == "row" else x.abs().amax().view(1, 1)
    scale = largest / torch.finfo(_FP8).max
    return (x / scale).to(_FP8), scale


def _batched(op: Gemm, device: torch.device, seed: int) -> Call:
    """Build one product of stacked matrices. Each has an equal share of the rows."""
    if op.dtype in ("fp8", "tf32"):
        raise Unavailable(f"no probe for batched products in {op.dtype}; measure bf16")
    n, m, k = op.groups, op.m, op.k
    m, k = (m, k // n) if op.trans_a else (m // n, k)
    dtype = torch_dtype(op.dtype)
    a = _operand((n, m, k), op.trans_a, dtype, device, seed)
    b = _operand((n, k, op.n), op.trans_b, dtype, device, seed + 1)
    out = torch.empty(n, m, op.n, dtype=dtype, device=device)
    return functools.partial(torch.bmm, a, b, out=out)


def _grouped(op: Gemm, device: torch.device, seed: int) -> Call:
    """Build a grouped product, with groups as equal as alignment allows."""
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
    """Return the end row of each of ``groups`` groups that divide ``rows``."""
    step = _ALIGNED_ROWS if rows >= _ALIGNED_ROWS * groups else 1
    return [rows * i // groups // step * step for i in range(1, groups)] + [rows]


def _convolution(op: Convolution, device: torch.device, seed: int) -> Call:
    dtype = torch.float32 if op.dtype == "tf32" else torch_dtype(op.dtype)

    def stored(rows: int, channels: int, size: Sequence[int], seed: int) -> torch.Tensor:
        return randn((rows, *size, channels), dtype, device, seed).permute(0, 3, 1, 2)

    x = stored(op.batch, op.in_channels, (op.height, op.width), seed)
    w = stored(op.out_channels, op.in_channels, [op.kernel] * 2, seed + 1)
    stride, padding = [op.stride] * 2, [op.kernel // 2] * 2
    if op.product == "forward":
        return functools.partial(F.conv2d, x, w, None, stride, padding)
    out = [-(-size // op.stride) for size in (op.height, op.width)]
    dy = stored(op.batch, op.out_channels, out, seed + 2)
    backward = torch.ops.aten.convolution_backward.default
    fixed = ([1, 1], False, [0, 0], 1)  # dilation, transposed, output padding, groups
    return functools.partial(
        backward, dy, x, w, None, stride, padding, *fixed, _OUTPUTS[op.product]
    )


def _copy(op: Elementwise, device: torch.device, seed: int) -> Call:
    assert op.read_bytes == op.write_bytes, "a copy writes what it reads"
    source = randn((op.read_bytes // FP32_BYTES,), torch.float32, device, seed)
    target = torch.empty_like(source)
    if op.kind == "h2d":
        source = source.cpu().pin_memory()
    elif op.kind == "d2h":
        target = target.cpu().pin_memory()
    return functools.partial(target.copy_, source, non_blocking=True)


def _norm(of: Any) -> Callable[..., torch.Tensor]:
    return lambda x, weight, *bias: of(x, weight.shape, weight, *bias)


# What runs each kind, of x and other tensors; "x": like x [rows, width], "w": a row [width].
KINDS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "add": (torch.add, "xx"),
    "mul": (torch.mul, "xx"),
    "cast": (torch.Tensor.to, "x"),
    "gelu": (functools.partial(F.gelu, approximate="tanh"), "x"),
    "silu": (F.silu, "x"),
    "layer_norm": (_norm(F.layer_norm), "xww"),
    "rms_norm": (_norm(F.rms_norm), "xw"),
    "cross_entropy": (functools.partial(F.log_softmax, dim=-1), "x"),
    "embedding": (F.embedding, "t"),  # "t": a table, whose rows tokens name
}


def _kind(op: Elementwise, device: torch.device, seed: int) -> Call:
    if op.kind not in KINDS or not op.rows:
        raise Unavailable(f"no probe for {op.kind}: it is priced by its bytes, as a copy")
    (run, tensors), dtype = KINDS[op.kind], torch_dtype(op.dtype)
    backward = op.direction == "backward" and op.kind not in ONE_KERNEL
    table_bytes = op.write_bytes if backward else op.read_bytes - TOKEN_BYTES * op.rows
    table = table_bytes // (op.width * dtype.itemsize)
    shapes = {"x": (op.rows, op.width), "w": (op.width,), "t": (table, op.width)}
    held = [randn(shapes[each], dtype, device, seed + i) for i, each in enumerate(tensors)]
    more: tuple[Any, ...] = ()
    if op.kind == "cast":
        more = (torch.float32 if dtype != torch.float32 else torch.bfloat16,)
    tokens = [torch.randint(table, (op.rows,), device=device)] if tensors == "t" else []
    for each in held:
        each.requires_grad_(backward)
    call = functools.partial(run, *tokens, *held, *more)
    if not backward:
        return call
    y = call()
    dy = randn(tuple(y.shape), y.dtype, device, seed + len(held))
    return functools.partial(torch.autograd.grad, y, held, dy, retain_graph=True)


def _adamw(op: Elementwise, device: torch.device, seed: int) -> Call:
    elements = op.read_bytes // (4 * FP32_BYTES)
    parameter = torch.nn.Parameter(randn((elements,), torch.float32, device, seed))
    parameter.grad = randn((elements,), torch.float32, device, seed + 1)
    return torch.optim.AdamW([parameter], lr=1e-4, fused=True).step
