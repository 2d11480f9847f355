"""Convolutions by cuDNN or oneDNN, each product alone: y of x and w, dx of dy and w, dw of dy, x.

Channels last, weights too, padded by kernel // 2. The library guesses which of its algorithms is
fastest, as in a step: none is tried out. Results are allocated, since torch takes no buffer for
them. tf32 and fp32 are convolutions of fp32 tensors with torch's precision set to one or the other.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from meshwise.probe.work import Work, fp32_precision, num_buffers, torch_dtype, tried
from meshwise.spec import Case, Convolution
from meshwise.timing import randn

_OUTPUTS = {"dgrad": [True, False, False], "wgrad": [False, True, False]}  # dx, dw, of a bias


def build(case: Case, device: torch.device, settings: contextlib.ExitStack) -> Work:
    """``settings`` keeps torch's fp32 precision as the case needs it until the caller closes it."""
    op = case.op
    assert isinstance(op, Convolution)
    settings.enter_context(fp32_precision(op.dtype, device))
    calls = [_call(op, device, 3 * i) for i in range(num_buffers(case, op.bytes, device))]
    tried(calls[0])
    return Work(calls=tuple(calls))


def _call(op: Convolution, device: torch.device, seed: int) -> Callable[[], object]:
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
