"""A GPT-2 style decoder in plain torch: what one device computes, and nothing about devices.

In: tokens [batch, seq] of int64. Out: logits [batch, seq, vocab]; ``loss`` turns them into one
number. Pre-norm blocks after Radford et al. 2019 (GPT-2): x + attention(norm(x)), then
x + mlp(norm(x)); learned positions, biases everywhere but in the tied head, GELU in its tanh form.

The rows of the fused qkv weight are ordered [heads, 3, head_dim], so that a split of them by tp
leaves whole heads, each with its q, k and v, and ``SelfAttention`` runs unchanged on its share.

Parameters: layers*(12*hidden^2 + 13*hidden) for ffn = 4*hidden, + vocab*hidden
+ max_seq_len*hidden + 2*hidden.
"""

import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.spec import Model

INIT_STD = 0.02


class SelfAttention(nn.Module):
    """Causal attention of all heads that ``qkv`` yields: x[b,s,hidden] -> [b,s,hidden]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden)
        self.out = nn.Linear(model.hidden, model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))  # [b, s, heads, 3, head_dim]
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(-2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """hidden -> ffn -> hidden."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.up = nn.Linear(model.hidden, model.ffn)
        self.down = nn.Linear(model.ffn, model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One transformer layer: x[b,s,hidden] -> [b,s,hidden]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(model.hidden)
        self.attention = SelfAttention(model)
        self.norm2 = nn.LayerNorm(model.hidden)
        self.mlp = MLP(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Positions(nn.Module):
    """Adds a learned vector to every position: x[b,s,hidden] -> [b,s,hidden]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.max_seq_len, model.hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class Head(nn.Module):
    """The last norm and the projection to the vocabulary: x[b,s,hidden] -> logits[b,s,vocab]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.hidden)
        self.projection = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """The whole model. Build it under ``torch.device("meta")`` and call ``init_weights`` later."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed = nn.Embedding(model.vocab, model.hidden)
        self.positions = Positions(model)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.head = Head(model)
        self.tie()

    def tie(self) -> None:
        """Make embedding and projection one parameter (again, after anything replaced either)."""
        self.head.projection.weight = self.embed.weight

    def init_weights(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            value = initial_value(name, parameter.shape, seed, parameter.device)
            with torch.no_grad():
                parameter.copy_(value)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.positions(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in fp32 of logits[b,s,vocab] for targets[b,s]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def initial_value(name: str, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """The whole fp32 parameter ``name`` (as in ``GPT.named_parameters``) at the start.

    Weights are normal(0, 0.02), norms 1, biases 0. It depends on (seed, name) only, so every
    layout can cut its share out of the same model without ever holding more than one parameter.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape, device=device)
    if "norm" in name:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.empty(shape, device=device).normal_(0.0, INIT_STD, generator=generator)
