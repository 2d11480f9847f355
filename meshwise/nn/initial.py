"""Initial values of every parameter, drawn by its kind and its name.

A module gives the distributions of its own parameters in ``starts``; ``TORCH`` gives those of
torch's modules. A parameter without one is an error, never a guess from its shape.
"""

import zlib
from collections.abc import Mapping
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Start(NamedTuple):
    """A normal distribution with this mean and standard deviation; constant if ``std`` is 0."""

    mean: float
    std: float


Starts = Mapping[str, Start]
ZEROS, ONES = Start(0.0, 0.0), Start(1.0, 0.0)
# Products (also each expert's), routers, and tables of tokens and positions (Radford et al. 2019).
WEIGHT = Start(0.0, 0.02)
TORCH: Mapping[type[nn.Module], Starts] = {
    nn.Linear: {"weight": WEIGHT, "bias": ZEROS},
    nn.Embedding: {"weight": WEIGHT},
    nn.LayerNorm: {"weight": ONES, "bias": ZEROS},
    nn.RMSNorm: {"weight": ONES},
}


def convolution(outputs: int, kernel: int) -> Start:
    """Return a convolution's start: normal(0, sqrt(2 / fan_out)) (He et al. 2015, eq. 14)."""
    return Start(0.0, sqrt(2 / (outputs * kernel**2)))


def start(module: nn.Module, name: str) -> Start:
    """Return the start of the module's own parameter ``name``."""
    of_torch = (starts for kind, starts in TORCH.items() if isinstance(module, kind))
    starts: Starts = getattr(module, "starts", None) or next(of_torch, {})
    assert name in starts, f"{type(module).__name__}.{name}: say in `starts` how it begins"
    return starts[name]


def draw(start: Start, name: str, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Draw the whole fp32 parameter ``name`` (as in ``ModelStage.named_parameters``).

    The values depend only on (seed, name). So every layout can cut its share out of the same model
    without ever holding more than one whole parameter.
    """
    if not start.std:
        return torch.full(shape, start.mean, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.empty(shape, device=device).normal_(*start, generator=generator)


def reset_buffers(model: nn.Module) -> None:
    """Give every buffer (tables, statistics) its initial values."""
    for module in model.modules():
        if callable(reset := getattr(module, "reset_buffers", None)):
            reset()
