"""Counts of a Wide-ResNet that need no device: weights, FLOPs, the shapes between its blocks.

In: a ``WideResNet``. A convolution [out, in, k, k] with an output of h*w positions costs
2*out*in*k*k*h*w FLOPs an image, the head 2*classes*in; norms, pooling and sums count nothing.
The catalogue is Alpa's table (OSDI'22, table 5; benchmark/alpa suite_wresnet.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwise.models.decoder import Weight
from meshwise.spec.vision import WideResNet

EXPANSION = 4  # channels of a bottleneck's output to its filters

_SIZES = {  # blocks, channels, width_factor
    "wresnet-250m": ((3, 4, 6, 3), 160, 2),
    "wresnet-500m": ((3, 4, 6, 3), 224, 2),
    "wresnet-1b": ((3, 4, 6, 3), 320, 2),
    "wresnet-2b": ((3, 4, 6, 3), 448, 2),
    "wresnet-4b": ((3, 4, 6, 3), 640, 2),
    "wresnet-6.8b": ((3, 4, 6, 3), 320, 16),
    "wresnet-13b": ((3, 4, 23, 3), 320, 16),
}


class Convolution(NamedTuple):
    """Weight [out, in, kernel, kernel], for an output of ``size`` x ``size``; a norm follows."""

    name: str
    norm: str
    unit: str
    out_channels: int
    in_channels: int
    kernel: int
    size: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.out_channels, self.in_channels, self.kernel, self.kernel

    @property
    def forward_flops(self) -> int:
        return 2 * self.out_channels * self.in_channels * self.kernel**2 * self.size**2


def names() -> tuple[str, ...]:
    return tuple(_SIZES)


def sized(name: str) -> WideResNet:
    """The model called ``name``."""
    if name not in _SIZES:
        raise ValueError(f"model {name!r} is not in the catalogue; known: {', '.join(_SIZES)}")
    blocks, channels, width_factor = _SIZES[name]
    return WideResNet(name=name, blocks=blocks, channels=channels, width_factor=width_factor)


def convolutions(model: WideResNet) -> Iterator[Convolution]:
    """All of them, in module order."""
    yield Convolution("stem", "stem_norm", "root", model.channels, 3, 7, _half(model.image_size))
    for layer in range(model.layers):
        yield from _block(model, layer)


def _block(model: WideResNet, layer: int) -> Iterator[Convolution]:
    _, n, before, _ = activation_shape(model, 1, layer)
    _, out, after, _ = activation_shape(model, 1, layer + 1)
    unit, filters = f"layers.{layer}", out // EXPANSION
    inner = filters * model.width_factor
    yield Convolution(f"{unit}.conv1", f"{unit}.norm1", unit, filters, n, 1, before)
    yield Convolution(f"{unit}.conv2", f"{unit}.norm2", unit, inner, filters, 3, after)
    yield Convolution(f"{unit}.conv3", f"{unit}.norm3", unit, out, inner, 1, after)
    if has_shortcut(model, layer):
        norm = f"{unit}.shortcut_norm"
        yield Convolution(f"{unit}.shortcut", norm, unit, out, n, 1, after)


def has_shortcut(model: WideResNet, layer: int) -> bool:
    """Whether the shortcut of this block is a convolution because its shape changes."""
    return activation_shape(model, 1, layer) != activation_shape(model, 1, layer + 1)


def activation_shape(model: WideResNet, rows: int, layer: int) -> tuple[int, int, int, int]:
    """[rows, channels, height, width] of what enters block ``layer``, from 0; for ``layer`` =
    ``model.layers``, of what leaves the last."""
    size = _half(_half(model.image_size))
    if layer == 0:
        return rows, model.channels, size, size
    resolution, last = 0, model.blocks[0]  # of block layer - 1, whose output this is
    while layer > last:
        resolution, last = resolution + 1, last + model.blocks[resolution + 1]
        size = _half(size)
    return rows, EXPANSION * model.channels * 2**resolution, size, size


def _half(size: int) -> int:
    """Of a stride of 2: rounded up, whatever the kernel, as all are padded."""
    return -(-size // 2)


def weights(model: WideResNet) -> list[Weight]:
    """Every weight in module order. The running statistics of norms are buffers and not here."""
    found = []
    for conv in convolutions(model):
        found.append(Weight(f"{conv.name}.weight", conv.shape, conv.unit))
        for part in ("weight", "bias"):
            found.append(Weight(f"{conv.norm}.{part}", (conv.out_channels,), conv.unit))
    features = activation_shape(model, 1, model.layers)[1]
    found.append(Weight("head.weight", (model.num_classes, features), "root"))
    found.append(Weight("head.bias", (model.num_classes,), "root"))
    return found


def num_parameters(model: WideResNet) -> int:
    return sum(weight.num_elements for weight in weights(model))


def forward_flops(model: WideResNet, images: int) -> int:
    """Convolutions and head, a multiplication and an addition as two."""
    features = activation_shape(model, 1, model.layers)[1]
    head = 2 * features * model.num_classes
    return images * (head + sum(conv.forward_flops for conv in convolutions(model)))


def step_flops(model: WideResNet, images: int, *, recomputed: bool = False) -> int:
    """Of a training step: forward and twice that for backward; ``recomputed``: all of forward
    once more. The gradient of the images, which nobody needs, is counted as if it were computed."""
    return (4 if recomputed else 3) * forward_flops(model, images)
