"""Linear layers whose three products are in fp8, scaled by the largest element of each operand.

Forward y = x w^T with x and w in e4m3; backward dx = dy w and dw = dy^T x with dy in e5m2
(Micikevicius et al. 2022, arXiv:2209.05433). Scales come from the current operands, not from
earlier steps. Sums are in fp32, results in bf16. Masters, gradients between ranks, norms and
attention stay as they are.
"""

from typing import Any

import torch
from torch import Tensor, nn

from meshwise import torch_private
from meshwise.spec.op import FP8_ALIGNMENT as ALIGNMENT

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def use_fp8(layer: nn.Module) -> None:
    """Make the layer's linear modules compute in fp8, except those of unaligned sizes."""
    for module in layer.modules():
        if type(module) is nn.Linear and not any(n % ALIGNMENT for n in module.weight.shape):
            module.__class__ = Linear  # torch would compile a forward per module separately


class Linear(nn.Linear):
    """Computes x W^T + b with ``product``."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if len(rows) % ALIGNMENT:
            raise ValueError(
                f"{len(rows)} tokens on a rank: fp8 needs a multiple of {ALIGNMENT}; change the "
                "microbatch size or the sequence length"
            )
        y: Tensor = _Product.apply(rows, self.weight)  # type: ignore[no-untyped-call]
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """x [m,k], w [n,k] -> x w^T [m,n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return product(x, w, FORWARD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (dy,), (x, w) = gradients, ctx.saved_tensors
        return product(dy, w.t(), BACKWARD), product(dy.t(), x.t(), BACKWARD)


def product(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    """Multiply a [m,k], cast to ``kind``, by b^T, b [n,k] cast to e4m3 -> [m,n] in a's dtype."""
    scaled_a, scale_a = scaled(a.contiguous(), kind)
    scaled_b, scale_b = scaled(b.contiguous(), FORWARD)
    return torch_private.scaled_mm(scaled_a, scaled_b.t(), scale_a, scale_b, a.dtype)


def scaled(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x / scale in ``kind``, with the largest element at its limit, and the scale (fp32)."""
    limit = torch.finfo(kind).max
    scale = x.abs().amax().float().clamp(min=1e-12) / limit
    return (x.float() / scale).clamp(-limit, limit).to(kind), scale
