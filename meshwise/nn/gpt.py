"""A GPT-2 style decoder in plain torch: what one device computes, and nothing about devices.

In: tokens [batch, seq] of int64. Out: logits [batch, seq, vocab]; ``loss`` turns them into one
number. Pre-norm blocks after Radford et al. 2019 (GPT-2): x + attention(norm(x)), then
x + mlp(norm(x)); learned positions, biases everywhere but in the tied head, GELU in its tanh form.

The rows of the fused qkv weight are ordered [heads, 3, head_dim], so that a split of them by tp
leaves whole heads, each with its q, k and v, and ``SelfAttention`` runs unchanged on its share.

A sequence may be shared by several ranks, each with some of its tokens: ``attend`` says how heads
attend, ``GPT.at`` where this rank's tokens stand.

Parameters: layers*(12*hidden^2 + 13*hidden) for ffn = 4*hidden, + vocab*hidden
+ max_seq_len*hidden + 2*hidden.
"""

import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.spec import Model

INIT_STD = 0.02

Part = Callable[[Tensor], Tensor]
Run = Callable[[Part, Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[b,s,heads,head_dim] each, and so is what comes out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class SelfAttention(nn.Module):
    """Attention of all heads that ``qkv`` yields, between its two projections."""

    def __init__(self, model: Model, attend: Attend = causal) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.heads = attend
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden)
        self.out = nn.Linear(model.hidden, model.hidden)

    def attend(self, qkv: Tensor) -> Tensor:
        """[b,s,heads*3*head_dim] -> [b,s,heads*head_dim]"""
        qkv = qkv.unflatten(-1, (-1, 3, self.head_dim))  # [b, s, heads, 3, head_dim]
        return self.heads(*qkv.unbind(-2)).flatten(-2)


class MLP(nn.Module):
    """hidden -> ffn -> hidden."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.up = nn.Linear(model.hidden, model.ffn)
        self.down = nn.Linear(model.ffn, model.hidden)


def call(part: Part, x: Tensor) -> Tensor:
    return part(x)


class Layer(nn.Module):
    """One transformer layer: x[b,s,hidden] -> [b,s,hidden].

    ``whole`` runs the layer and ``part`` each piece that is cheap to compute but dear to keep: a
    norm or the activation, with the product that reads it. Recomputation replaces these two.
    """

    whole: Run = staticmethod(call)
    part: Run = staticmethod(call)

    def __init__(self, model: Model, attend: Attend = causal) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(model.hidden)
        self.attention = SelfAttention(model, attend)
        self.norm2 = nn.LayerNorm(model.hidden)
        self.mlp = MLP(model)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.compute, x)

    def compute(self, x: Tensor) -> Tensor:
        qkv = self.part(lambda x: self.attention.qkv(self.norm1(x)), x)
        x = x + self.attention.out(self.attention.attend(qkv))
        up = self.part(lambda x: self.mlp.up(self.norm2(x)), x)
        down = self.part(lambda up: self.mlp.down(F.gelu(up, approximate="tanh")), up)
        return x + down


class Positions(nn.Module):
    """Adds a learned vector to every position: x[b,s,hidden] -> [b,s,hidden].

    ``at`` [s]: the positions; by default the first s.
    """

    at: Tensor | None = None

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.max_seq_len, model.hidden))

    def forward(self, x: Tensor) -> Tensor:
        if self.at is None:
            return x + self.weight[: x.shape[1]]
        return x + F.embedding(self.at, self.weight)


class Head(nn.Module):
    """The last norm and the projection to the vocabulary: x[b,s,hidden] -> logits[b,s,vocab]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.hidden)
        self.projection = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """The whole model, or a pipeline stage of it: the layers in ``layers``, with the embedding if
    they are the first and the head if they are the last.

    Build it under ``torch.device("meta")`` and call ``init_weights`` later. Parameters are named
    as in the whole model, but a head without the embedding has a copy of its weight. ``attend``:
    q, k, v -> out, each [b,s,heads,head_dim], in every layer; by default causal and of one rank.
    """

    def __init__(
        self, model: Model, layers: range | None = None, *, attend: Attend = causal
    ) -> None:
        super().__init__()
        layers = layers or range(model.layers)
        self.first, self.last = layers.start == 0, layers.stop == model.layers
        if self.first:
            self.embed = nn.Embedding(model.vocab, model.hidden)
            self.positions = Positions(model)
        self.layers = nn.ModuleDict({str(i): Layer(model, attend) for i in layers})
        if self.last:
            self.head = Head(model)
        self.tie()

    def tie(self) -> None:
        """Make embedding and projection one parameter (again, after anything replaced either)."""
        if self.first and self.last:
            self.head.projection.weight = self.embed.weight

    def at(self, positions: Tensor) -> None:
        """From now on tokens stand at ``positions`` [s], on the device of the weights; a stage
        without the embedding needs none. Not with tensor parallelism."""
        if not self.first:
            return
        most, rows = int(positions.max()) if len(positions) else 0, len(self.positions.weight)
        if most >= rows:
            raise ValueError(
                f"position {most}: the model has max_seq_len = {rows}; give it a larger one"
            )
        self.positions.at = positions

    def init_weights(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            value = initial_value(name, parameter.shape, seed, parameter.device)
            with torch.no_grad():
                parameter.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [b,s], or what the stage before made of them; logits, or what the next needs."""
        if self.first:
            x = self.positions(self.embed(x))
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.last else x


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in fp32 of logits[b,s,vocab] for targets[b,s]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def initial_value(name: str, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """The whole fp32 parameter ``name`` (as in ``GPT.named_parameters``) at the start.

    A head's copy of the embedding starts as the embedding does.

    Weights are normal(0, 0.02), norms 1, biases 0. It depends on (seed, name) only, so every
    layout can cut its share out of the same model without ever holding more than one parameter.
    """
    if name == "head.projection.weight":
        name = "embed.weight"
    if name.endswith(".bias"):
        return torch.zeros(shape, device=device)
    if "norm" in name:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.empty(shape, device=device).normal_(0.0, INIT_STD, generator=generator)
