"""Recipes: how a model is trained, beside its layout: numbers, optimizer, kernels, trade-offs."""

from typing import Literal

from meshwise.spec.record import NonNegativeFloat, Positive, PositiveFloat, Record

Optimizer = Literal["adamw", "adafactor", "sgd"]
AttentionBackend = Literal["auto", "cudnn", "flash", "efficient", "math"]
Precision = Literal["ieee", "tf32"]
Routing = Literal["learned", "balanced", "skewed"]


class Recipe(Record, kw_only=True):
    """The recipe of a training; the defaults are torchtitan's.

    ``weights``: of masters and the optimizer's moments. ``reduce``: in what gradients are added
    over ranks. ``max_grad_norm``: 0 does not clip. ``prefetch``: units gathered ahead of the one
    that computes (ZeRO-3). ``attention``: the kernel. ``aux_loss``: weight of the experts' load
    balancing loss. ``routing``: by the router, or to experts of equal or, as 1/n, of unequal load,
    for benchmarks. ``fp8``: the layers' products by scaled fp8. ``offload``: activations wait in
    host memory for their backward. ``async_tp``: compiled, tp's gathers and reductions run
    beside products of the backward that do not need them. ``fp32_precision``: how GPUs take fp32
    tensors in products and convolutions.
    """

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
