"""Recipes: how a model is trained, apart from its layout: dtypes, optimizer, kernels."""

from typing import Literal

from meshwise.spec.op import DTYPE_BYTES
from meshwise.spec.record import NonNegativeFloat, Positive, PositiveFloat, Record

Optimizer = Literal["adamw", "adafactor", "sgd"]
AttentionBackend = Literal["auto", "cudnn", "flash", "efficient", "math"]
FLASH_HEAD_DIM = 256  # the widest heads that flash has kernels for, on GPUs
CP_CHOOSES = (
    "attention over cp ranks chooses its kernels itself; use recipe.attention auto, or cp 1"
)
Precision = Literal["ieee", "tf32"]
Routing = Literal["learned", "balanced", "skewed"]


class Recipe(Record, kw_only=True):
    """The recipe of a training; the defaults are torchtitan's.

    ``weights``: dtype of master weights and the optimizer's moments. ``reduce``: dtype in which
    gradients are summed over ranks. ``max_grad_norm``: 0 does not clip. ``prefetch``: units
    gathered ahead of the one that computes (ZeRO-3). ``attention``: the kernel. ``aux_loss``:
    weight of the experts' load balancing loss. ``routing``: learned by the router; for benchmarks,
    balanced over experts, or skewed as 1/n. ``fp8``: the layers' products use scaled fp8.
    ``offload``: activations wait in host memory for their backward. ``async_tp``: in compiled code,
    tp's gathers and reductions overlap products of the backward that do not need them.
    ``fp32_precision``: how GPUs multiply fp32 tensors, also in convolutions."""

    optimizer: Optimizer = "adamw"
    learning_rate: PositiveFloat = 3e-4
    weight_decay: NonNegativeFloat = 0.1
    max_grad_norm: NonNegativeFloat = 1.0
    weights: Literal["fp32", "bf16"] = "fp32"
    reduce: Literal["fp32", "bf16"] = "fp32"
    attention: AttentionBackend = "auto"
    prefetch: Positive = 1
    aux_loss: NonNegativeFloat = 0.01
    routing: Routing = "learned"
    fp8: bool = False
    offload: bool = False
    async_tp: bool = False
    fp32_precision: Precision = "ieee"

    @property
    def widening(self) -> float:
        """Bytes of a gradient that is added up for its reduction over those of its weight."""
        return DTYPE_BYTES[self.reduce] / DTYPE_BYTES[self.weights]
