"""Choose kernels: one of torch's scaled dot product attentions, and the precision of fp32 products.

In: a recipe and a device. Out: a context to train in. On a GPU ``auto`` takes the first possible
one of cuDNN, flash, efficient and math; on a CPU it is torch's own choice.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwise.spec import Recipe
from meshwise.spec.recipe import Precision

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def choose(recipe: Recipe, device: torch.device, dtype: str) -> AbstractContextManager[None]:
    """Use the recipe's kernel for all work, including that of other threads (backward).

    Raises a ValueError if the build or the device lacks the kernel, or it does not take the dtype.
    """
    if reason := _lacking(recipe.attention, device, dtype):
        raise ValueError(f"Recipe.attention = {recipe.attention!r}: {reason}; use auto")
    if recipe.attention == "auto":
        if device.type != "cuda":
            return nullcontext()
        return sdpa_kernel(list(BACKENDS.values()), set_priority=True)
    return sdpa_kernel(BACKENDS[recipe.attention])


@contextmanager
def fp32_precision(wanted: Precision) -> Iterator[None]:
    """Run products and convolutions of fp32 tensors on GPUs in IEEE fp32 or in TF32.

    torch's defaults are TF32 for convolutions and fp32 for products. This sets torch's older
    settings: compiled code reads them, and raises if the newer ones differ.
    """
    products: Any = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn
    before = [of.fp32_precision == "tf32" for of in (products, convolutions.conv)]
    products.allow_tf32 = convolutions.allow_tf32 = wanted == "tf32"
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


def _lacking(name: str, device: torch.device, dtype: str) -> str:
    """Say why the kernel cannot run here; "" if it can."""
    if name in ("auto", "math"):
        return ""
    if device.type != "cuda":
        return "" if name == "flash" else "it is a kernel for GPUs, and this is a CPU"
    if name == "cudnn" and not torch.backends.cudnn.is_available():
        return "this build of torch has no cuDNN"
    if name == "flash" and not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    if name in ("cudnn", "flash") and dtype == "fp32":
        return "it computes in 16 bits, and the plan's dtype is fp32"
    return ""
