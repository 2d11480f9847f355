"""A GPT-2 style decoder in plain torch: the computation of one device, without any parallelism.

In: tokens [batch, seq] of int64. Out: logits [batch, seq, vocab]. Pre-norm blocks after Radford et
al. 2019 (GPT-2): x + attention(norm(x)), then x + mlp(norm(x)); learned positions, biases
everywhere except in the tied head, GELU in its tanh form.

The rows of the fused qkv weight are ordered [heads, 3, head_dim]. A split over tp then leaves whole
heads, each with its q, k and v, and ``SelfAttention`` runs unchanged on its share.

Several ranks may share a sequence, each with some of its tokens. ``attend`` is then their common
attention, and ``GPT.at`` sets the positions of this rank's tokens.

Parameters: layers*(12*hidden^2 + 13*hidden) for ffn = 4*hidden, + vocab*hidden + max_seq_len*hidden
+ 2*hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.nn.experts import MoE
from meshwise.nn.initial import WEIGHT
from meshwise.nn.stage import Attend, Head, Layer, ModelStage, causal
from meshwise.spec import Model
from meshwise.spec.recipe import Routing


class SelfAttention(nn.Module):
    """Attention of all heads in ``qkv``'s result, between its two projections."""

    def __init__(self, model: Model, attend: Attend = causal) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.heads = attend
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden)
        self.out = nn.Linear(model.hidden, model.hidden)

    def attend(self, qkv: Tensor) -> Tensor:
        """Attend: [b,s,heads*3*head_dim] -> [b,s,heads*head_dim]."""
        qkv = qkv.unflatten(-1, (-1, 3, self.head_dim))  # [b, s, heads, 3, head_dim]
        return self.heads(*qkv.unbind(-2)).flatten(-2)


class MLP(nn.Module):
    """A feed-forward: hidden -> ffn -> hidden."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.up = nn.Linear(model.hidden, model.ffn)
        self.down = nn.Linear(model.ffn, model.hidden)


class GPTLayer(Layer):
    """One transformer layer: x[b,s,hidden] -> [b,s,hidden]. It has experts in place of the MLP if
    the model does."""

    def __init__(
        self, model: Model, index: int, attend: Attend = causal, routing: Routing = "learned"
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(model.hidden)
        self.attention = SelfAttention(model, attend)
        self.norm2 = nn.LayerNorm(model.hidden)
        self.dense = not model.has_experts(index)
        if self.dense:
            self.mlp = MLP(model)
        else:
            assert model.experts is not None
            self.moe = MoE(model.hidden, model.experts, gated=False, bias=True, routing=routing)

    def compute(self, x: Tensor) -> Tensor:
        qkv = self.part(lambda x: self.attention.qkv(self.norm1(x)), x)
        x = x + self.attention.out(self.attention.attend(qkv))
        if self.dense:
            up = self.part(lambda x: self.mlp.up(self.norm2(x)), x)
            down: Tensor = self.part(lambda up: self.mlp.down(F.gelu(up, approximate="tanh")), up)
            return x + down
        return x + self.moe(self.norm2(x))  # type: ignore[no-any-return]


class Positions(nn.Module):
    """Adds a learned vector to every position: x[b,s,hidden] -> [b,s,hidden].

    ``at`` [s]: the positions; by default the first s.
    """

    starts = {"weight": WEIGHT}
    at: Tensor | None = None

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.max_seq_len, model.hidden))

    def forward(self, x: Tensor) -> Tensor:
        if self.at is None:
            return x + self.weight[: x.shape[1]]
        return x + F.embedding(self.at, self.weight)


class GPT(ModelStage):
    """The whole model, or a pipeline stage with the layers ``layers``. The first stage has the
    embedding, the last one the head.

    A head without the embedding has a copy of its weight. ``attend``: q, k, v -> out, each
    [b,s,heads,head_dim], in every layer; by default causal, on one rank.
    """

    is_tied = True

    def __init__(
        self,
        model: Model,
        layers: range | None = None,
        *,
        attend: Attend = causal,
        routing: Routing = "learned",
    ) -> None:
        layers = layers or range(model.layers)
        super().__init__(layers, model.layers)
        if self.first:
            self.embed = nn.Embedding(model.vocab, model.hidden)
            self.positions = Positions(model)
        self.layers = nn.ModuleDict({str(i): GPTLayer(model, i, attend, routing) for i in layers})
        if self.last:
            self.head = Head(nn.LayerNorm(model.hidden), model.hidden, model.vocab)
        self.tie()

    def at(self, positions: Tensor) -> None:
        """Set the tokens' positions. A stage without the embedding needs none."""
        if not self.first:
            return
        most, rows = int(positions.max()) if len(positions) else 0, len(self.positions.weight)
        if most >= rows:
            raise ValueError(
                f"position {most}: the model has max_seq_len = {rows}; give it a larger one"
            )
        self.positions.at = positions

    def begin(self, x: Tensor) -> Tensor:
        return self.positions(self.embed(x))  # type: ignore[no-any-return]

    def end(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[no-any-return]
