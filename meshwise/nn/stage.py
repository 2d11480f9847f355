"""The parts that all models share: layers between which a pipeline is cut, pieces to recompute.

A model has three kinds of units: ``begin`` (tokens to a stream of activations), layers, ``end``
(the stream to a result). A pipeline stage is the same module with fewer units. Its parameters have
the same names as in the whole model.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.attention.dense import windowed
from meshwise.nn import initial

Part = Callable[[Tensor], Any]
Run = Callable[[Part, Tensor], Any]
Attend = Callable[..., Tensor]  # q, k, v and, if a layer has one, ``window`` -> like q
EMBEDDING, PROJECTION = "embed.weight", "head.projection.weight"  # of every language model


def call(part: Part, x: Tensor) -> Any:
    return part(x)


def nothing() -> None:
    pass


def identity(x: Tensor) -> Tensor:
    return x


def activate(x: tuple[Tensor, ...], activation: str = "silu") -> Tensor:
    """Return activation(gate) * up of x = (gate, up), or gelu(up) of x = (up,)."""
    gelu = len(x) == 1 or activation == "gelu"
    acted = F.gelu(x[0], approximate="tanh") if gelu else F.silu(x[0])
    return acted if len(x) == 1 else acted * x[1]


def causal(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Return causal attention. q, k and v are [b,s,heads,head_dim]; k and v may have fewer heads;
    the result is like q. ``window``: the most keys that a query sees, its own included."""
    if window is not None and window < q.shape[1]:
        return windowed(q, k, v, window)
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(
        1, 2
    )


class Layer(nn.Module):
    """One layer: x -> x, by ``compute``.

    ``whole`` runs the layer. ``part`` runs each piece that is cheap to compute but large to keep: a
    norm or an activation function, with the product that reads it. Recomputation replaces both.
    """

    whole: Run = staticmethod(call)
    part: Run = staticmethod(call)

    def compute(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.compute, x)  # type: ignore[no-any-return]


class ModelStage(nn.Module):
    """A model, or a pipeline stage with ``layers`` of its ``count`` layers. The first stage has
    ``begin``, the last one ``end``.

    Build it under ``torch.device("meta")`` and call ``init_weights`` later. If ranks share the
    work, ``sum_gradients`` completes the sums of gradients at the end of a step.
    """

    layers: nn.ModuleDict
    is_tied: bool = False  # embedding and head share a weight
    sum_gradients: Callable[[], None] = staticmethod(nothing)

    def __init__(self, layers: range, count: int) -> None:
        super().__init__()
        self.first, self.last = layers.start == 0, layers.stop == count

    def begin(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def end(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def tied(self) -> nn.Parameter | None:
        """The weight that embedding and head share, or None if the model has none or this stage
        has neither. A stage with only one of the two has its own copy."""
        if not self.is_tied or not (self.first or self.last):
            return None
        return self.get_parameter(EMBEDDING if self.first else PROJECTION)

    def tie(self) -> None:
        """Make embedding and projection one parameter. Call it again after either was replaced."""
        if self.is_tied and self.first and self.last:
            self.get_submodule("head.projection").weight = self.get_parameter(EMBEDDING)

    def origin(self, name: str) -> str:
        """Return the name of a tied copy's original; for other parameters ``name`` itself."""
        return EMBEDDING if self.is_tied and name == PROJECTION else name

    def at(self, positions: Tensor) -> None:
        """Set the tokens' positions [s] from now on, on the device of the weights. By default they
        are the first s."""

    def initial_value(self, name: str, seed: int, device: torch.device) -> Tensor:
        """Return the initial value of a whole parameter in fp32, the same in all layouts."""
        owner, _, own = name.rpartition(".")
        start = initial.start(self.get_submodule(owner), own)
        shape = self.get_parameter(name).shape
        return initial.draw(start, self.origin(name), shape, seed, device)

    def init_weights(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                parameter.copy_(self.initial_value(name, seed, parameter.device))
        initial.reset_buffers(self)

    def forward(self, x: Tensor) -> Tensor:
        """Turn tokens, or the stream of the stage before, into a result, or the stream so far."""
        if self.first:
            x = self.begin(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.end(x) if self.last else x


class Head(nn.Module):
    """The last norm and the projection: x[b,s,hidden] -> logits[b,s,vocab], times ``scale``."""

    def __init__(self, norm: nn.Module, hidden: int, vocab: int, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.scale = norm, scale
        self.projection = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = x if self.scale == 1 else x * self.scale  # far fewer elements than the logits
        return self.projection(x)  # type: ignore[no-any-return]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss, in fp32 at least, of logits [..., classes] for targets [...]."""
    return F.cross_entropy(wide(logits.flatten(0, -2)), targets.flatten())


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 if it is in fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
