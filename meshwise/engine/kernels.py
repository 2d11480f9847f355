"""Choose kernels: one of torch's scaled dot product attentions, and the precision of fp32 products.

In: a recipe and a device. Out: a context to train in. On a GPU ``auto`` takes the first possible
one of cuDNN, flash, efficient and math; on a CPU it is torch's own choice.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwise.models.kernels import check
from meshwise.spec import AnyModel, Recipe
from meshwise.spec.op import Dtype
from meshwise.spec.recipe import Precision

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def choose(
    recipe: Recipe, device: torch.device, dtype: Dtype, model: AnyModel
) -> AbstractContextManager[None]:
    """Use the recipe's kernel for all work, including that of other threads (backward).

    Raises a ValueError if the build or the device lacks the kernel, or it cannot run the model.
    """
    check(recipe, "cuda" if device.type == "cuda" else "cpu", dtype, model)
    if reason := _unbuilt(recipe.attention, device):
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


def _unbuilt(name: str, device: torch.device) -> str:
    """Say what this build of torch lacks; "" if it has the kernel."""
    if name == "cudnn" and not torch.backends.cudnn.is_available():
        return "this build of torch has no cuDNN"
    on_gpu = device.type == "cuda"
    if name == "flash" and on_gpu and not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    return ""
