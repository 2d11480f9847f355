"""A Wide-ResNet in plain torch: the computation of one device, without any parallelism.

In: images [batch, 3, height, width]. Out: logits [batch, num_classes]. Bottlenecks after He et al.
2016 with a wider middle (Zagoruyko and Komodakis 2016), as Alpa measures them (alpa/model/
wide_resnet.py): the stride is in the 3x3 convolution, no convolution has a bias. Padding is torch's
(k - 1) / 2 on both sides; flax's "SAME" pads one side of an even image, with the same shapes.

Operations and tensors: ``models/families/wide_resnet.py``.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.nn import initial
from meshwise.nn.stage import Layer, ModelStage, identity, wide
from meshwise.spec.vision import EXPANSION
from meshwise.spec.vision import WideResNet as Model

EPSILON = 1e-5
MOMENTUM = 0.9  # of the running statistics, as flax defines it; torch's is 1 - this


class BatchNorm(nn.Module):
    """x[b,c,h,w] -> (x - mean) / sqrt(variance + 1e-5) * weight + bias for every channel c.

    Training uses mean and variance of the batch (in fp32, at least) and moves the running ones a
    tenth of the way to them; ``eval`` uses the running ones. The running variance is that of the
    batch without correction, as in flax: torch's is n / (n - 1) times larger.

    ``mean_over_ranks`` spreads the batch over several ranks with equal shares. It gets [3, c], this
    rank's mean, variance and squared mean, and returns their means over the ranks; gradients must
    flow through it. The total variance is the mean of variances plus the variance of means.
    ``local``: maps a weight or running statistic to the part to compute with.

    ``forward`` has three steps. A layer that recomputes calls them one by one: ``statistics`` once,
    ``normalise`` any number of times, ``keep`` once.
    """

    mean_over_ranks: Callable[[Tensor], Tensor] = staticmethod(identity)
    local: Callable[[Tensor], Tensor] = staticmethod(identity)
    starts = {"weight": initial.ONES, "bias": initial.ZEROS}
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def reset_buffers(self) -> None:
        self.running_mean.zero_()
        self.running_var.fill_(1)

    def statistics(self, x: Tensor) -> Tensor:
        """Return [2, c]: the mean and variance that normalise x."""
        if not self.training:
            return torch.stack([self.local(self.running_mean), self.local(self.running_var)])
        variance, mean = torch.var_mean(wide(x), (0, 2, 3), correction=0)
        mean, variance, squared = self.mean_over_ranks(
            torch.stack([mean, variance, mean.square()])
        ).unbind()
        # On one rank the last two terms cancel exactly; on several, rounding may give less than 0.
        return torch.stack([mean, (variance + (squared - mean.square())).clamp(min=0)])

    def normalise(self, x: Tensor, statistics: Tensor) -> Tensor:
        mean, variance = statistics
        scale = self.local(self.weight) * torch.rsqrt(variance + EPSILON)
        shift = self.local(self.bias) - mean * scale
        # One product and one sum: backward then keeps only x, which is kept anyway.
        y: Tensor = x * scale[:, None, None] + shift[:, None, None]
        return y.to(x.dtype)

    @torch.no_grad()
    def keep(self, statistics: Tensor) -> None:
        """Update the running statistics; in ``eval`` they stay."""
        if self.training:
            self.local(self.running_mean).lerp_(statistics[0], 1 - MOMENTUM)
            self.local(self.running_var).lerp_(statistics[1], 1 - MOMENTUM)

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.statistics(x)
        self.keep(statistics)
        return self.normalise(x, statistics)


class PaddedConv2d(nn.Conv2d):
    """x[b,inputs,h,w] -> [b,outputs,h/stride,w/stride], padded by (kernel - 1) / 2.

    Ranks that each have some of the channels set ``local``, as in ``BatchNorm``, and two functions:
    ``enter``, applied to the input, and ``leave``, applied to the result.
    """

    local: Callable[[Tensor], Tensor] = staticmethod(identity)
    enter: Callable[[Tensor], Tensor] = staticmethod(identity)
    leave: Callable[[Tensor], Tensor] = staticmethod(identity)

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.starts = {"weight": initial.convolution(outputs, kernel)}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.local(self.weight)
        return self.leave(F.conv2d(self.enter(x), weight, None, self.stride, self.padding))


class Bottleneck(Layer):
    """x[b,c,h,w] -> relu(x + conv3(relu(conv2(relu(conv1(x)))))), a norm after each convolution.

    If the shapes differ, x passes through a convolution of its own. For tensor parallelism conv2
    can be cut by output and conv3 by input channels: norm2 between them then has only its channels.
    """

    def __init__(self, inputs: int, filters: int, width_factor: int, stride: int) -> None:
        super().__init__()
        inner, outputs = filters * width_factor, filters * EXPANSION
        self.conv1 = PaddedConv2d(inputs, filters, 1)
        self.norm1 = BatchNorm(filters)
        self.conv2 = PaddedConv2d(filters, inner, 3, stride)
        self.norm2 = BatchNorm(inner)
        self.conv3 = PaddedConv2d(inner, outputs, 1)
        self.norm3 = BatchNorm(outputs)
        self.reshapes = inputs != outputs
        if self.reshapes:
            self.shortcut = PaddedConv2d(inputs, outputs, 1, stride)
            self.shortcut_norm = BatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        # ``compute`` returns the statistics, since it may run twice: they must be kept once, and
        # compiled recomputation must not write to tensors outside of it.
        out, *statistics = self.whole(self.compute, x)
        norms = [module for module in self.children() if isinstance(module, BatchNorm)]
        for norm, seen in zip(norms, statistics, strict=True):
            norm.keep(seen)
        return out  # type: ignore[no-any-return]

    def compute(self, x: Tensor) -> Any:
        """Return the output, and the statistics of every norm in order."""
        x = x.contiguous(memory_format=torch.channels_last)
        y = self.conv1(x)
        seen1 = self.norm1.statistics(y)
        y = self.part(lambda y: self.conv2(F.relu(self.norm1.normalise(y, seen1))), y)
        seen2 = self.norm2.statistics(y)
        y = self.part(lambda y: self.conv3(F.relu(self.norm2.normalise(y, seen2))), y)
        seen3 = self.norm3.statistics(y)
        y = self.norm3.normalise(y, seen3)
        seen = [seen1.detach(), seen2.detach(), seen3.detach()]
        if self.reshapes:
            x = self.shortcut(x)
            seen4 = self.shortcut_norm.statistics(x)
            x = self.shortcut_norm.normalise(x, seen4)
            seen.append(seen4.detach())
        return F.relu(x + y), *seen


class WideResNetModule(ModelStage):
    """The whole model, or a pipeline stage with the bottlenecks ``layers``. The first stage has the
    stem, the last one the head."""

    def __init__(self, model: Model, layers: range | None = None) -> None:
        layers = layers or range(model.layers)
        super().__init__(layers, model.layers)
        if self.first:
            self.stem = PaddedConv2d(3, model.channels, 7, stride=2)
            self.stem_norm = BatchNorm(model.channels)
        self.layers = nn.ModuleDict({str(i): _bottleneck(model, i) for i in layers})
        if self.last:
            features = EXPANSION * model.channels * 2 ** (len(model.blocks) - 1)
            self.head = nn.Linear(features, model.num_classes)

    def begin(self, x: Tensor) -> Tensor:
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        return F.max_pool2d(F.relu(self.stem_norm(x)), kernel_size=3, stride=2, padding=1)

    def end(self, x: Tensor) -> Tensor:
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def _bottleneck(model: Model, layer: int) -> Bottleneck:
    starts = list(accumulate(model.blocks, initial=0))
    resolution = sum(layer >= start for start in starts[1:])
    filters = model.channels * 2**resolution
    if layer > starts[resolution]:
        return Bottleneck(EXPANSION * filters, filters, model.width_factor, stride=1)
    if resolution == 0:
        return Bottleneck(model.channels, filters, model.width_factor, stride=1)
    return Bottleneck(EXPANSION * filters // 2, filters, model.width_factor, stride=2)
