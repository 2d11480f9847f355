"""The value of every parameter at the start, by its name alone."""

import zlib
from math import prod, sqrt

import torch
from torch import Tensor

INIT_STD = 0.02


def initial_value(name: str, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """The whole fp32 parameter ``name`` (as in ``Stage.named_parameters``) at the start.

    Weights are normal(0, 0.02), those of convolutions normal(0, sqrt(2 / fan_out)), norms 1, biases
    0. It depends on (seed, name) only, so every
    layout can cut its share out of the same model without ever holding more than one parameter.
    """
    if name.endswith("bias"):
        return torch.zeros(shape, device=device)
    if "norm" in name:
        return torch.ones(shape, device=device)
    fan_out = prod(shape) // shape[1] if len(shape) == 4 else 0
    std = sqrt(2 / fan_out) if fan_out else INIT_STD
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
