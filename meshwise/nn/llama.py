"""A Llama-type decoder in plain torch: RMSNorm, rotary positions, grouped or latent attention,
SwiGLU or experts. Mistral, Mixtral, Phi, Qwen, OLMo, Granite, Gemma and DeepSeek are sizes of it.

In: tokens [batch, seq] of int64. Out: logits [batch, seq, vocab]. Pre-norm: x + attention(norm(x)),
then x + feed_forward(norm(x)). OLMo 2 norms the added term instead, Gemma 2 both. Rotary positions
rotate the two halves of a head as pairs, as in Hugging Face (Su et al. 2021): pair i at position p
by the angle p * theta^(-2i / head_dim).
Angles are computed in fp32; ``RopeScaling`` says how they are scaled for long contexts.

Latent attention (DeepSeek-V2): k and v come from a latent row of ``kv_lora_rank``. A head of q and
k has a part without positions and a rotary part; all heads share the rotary part of k.

Products that read the same input and are cut by heads or by ffn are one module (``qkv``,
``gate_up``), so their input is gathered from other ranks only once.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.nn.experts import MoE
from meshwise.nn.stage import Attend, Head, Layer, ModelStage, activate, call, causal, wide
from meshwise.spec import Decoder, Mla, RopeScaling
from meshwise.spec.recipe import Routing


class Rotary(nn.Module):
    """Rotates q and k [b,s,heads,dim] by their positions ``at`` [s], by default the first s. All
    layers share one module with the cosines and sines of all positions in fp32. Layers with a
    window may share another, ``local``."""

    cos: Tensor
    sin: Tensor
    at: Tensor | None = None

    def __init__(self, dim: int, model: Decoder, *, local: bool = False) -> None:
        super().__init__()
        self.dim, self.theta, self.scaling = dim, model.rope_theta, model.rope_scaling
        if local and model.local_rope_theta is not None:
            self.theta, self.scaling = model.local_rope_theta, None
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(model.max_seq_len, dim // 2), persistent=False)

    def reset_buffers(self) -> None:
        positions, pairs = (torch.arange(n, device=self.cos.device) for n in self.cos.shape)
        frequencies, scale = self.theta ** (pairs * (-2 / self.dim)), 1.0
        if self.scaling is not None:
            kept = self.kept(self.scaling, frequencies)
            frequencies = frequencies * (kept + (1 - kept) / self.scaling.factor)
            scale = self.scaling.rotary_scale
        angles = positions[:, None] * frequencies
        self.cos.copy_(angles.cos() * scale)
        self.sin.copy_(angles.sin() * scale)

    def kept(self, scaling: RopeScaling, frequencies: Tensor) -> Tensor:
        """Return the share of each frequency [dim / 2] that is kept unscaled, from 0 to 1."""
        length, ends = scaling.original_max_seq_len, (scaling.slow, scaling.fast)
        if scaling.kind == "linear":
            return torch.zeros_like(frequencies)
        if scaling.kind == "llama3":
            turns = length / (2 * math.pi) * frequencies
            return ((turns - ends[0]) / (ends[1] - ends[0])).clamp(0, 1)
        # the indices of dim whose frequencies turn this often
        last, first = (
            self.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            for turns in ends
        )
        low, high = max(math.floor(first), 0), min(math.ceil(last), self.dim - 1)
        index = torch.arange(len(frequencies), device=frequencies.device)
        return 1 - ((index - low) / max(high - low, 0.001)).clamp(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = slice(x.shape[1]) if self.at is None else self.at
        cos, sin = self.cos[rows], self.sin[rows]
        halves = wide(x).unflatten(-1, (2, -1))  # [b, s, heads, 2, dim / 2]
        # The compiler turns a flip into an index, but two joined halves into a branch.
        signed = torch.stack((-sin, sin), 1)[:, None]
        turned: Tensor = halves * cos[:, None, None] + halves.flip(-2) * signed
        return turned.flatten(-2).to(x.dtype)


class QKV(nn.Module):
    """Products x -> q, k, v of this rank's heads."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        bias, dim = model.qkv_bias, model.head_dim
        self.kv_heads, self.head_dim = model.kv_heads, dim
        self.q = nn.Linear(model.hidden, model.heads * dim, bias=bias)
        self.k = nn.Linear(model.hidden, model.kv_heads * dim, bias=bias)
        self.v = nn.Linear(model.hidden, model.kv_heads * dim, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)


class RotaryAttention(nn.Module):
    """q [b,s,heads*head_dim], k and v with as many or fewer heads -> [b,s,heads*head_dim]."""

    def __init__(
        self, model: Decoder, attend: Attend, rotary: Rotary, window: int | None = None
    ) -> None:
        super().__init__()
        self.heads: Attend = attend if window is None else partial(attend, window=window)
        self.head_dim, self.window = model.head_dim, window
        self.rotary = rotary
        self.normed, scale = model.qk_norm_over if model.qk_norm else "", model.softmax_scale
        if model.qk_norm:
            by_head = self.normed == "head"
            q_heads, k_heads = (1, 1) if by_head else (model.heads, model.kv_heads)
            self.q_norm = nn.RMSNorm(q_heads * model.head_dim, model.norm_eps)
            self.k_norm = nn.RMSNorm(k_heads * model.head_dim, model.norm_eps)
        self.scale = None if scale is None else scale * math.sqrt(model.head_dim)

    def forward(self, projected: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        q, k, v = projected
        if self.normed == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.normed == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q = self.rotary(q)
        q = q if self.scale is None else q * self.scale
        return self.heads(q, self.rotary(k), v).flatten(-2)


LATENT_EPS = 1e-6  # of DeepSeek's latent norms; a config sets only that of other norms


class LatentQKV(nn.Module):
    """Products x -> q [b,s,heads*(nope+rope)], k and v of the same heads from the latent row, and
    the rotary part of k [b,s,rope]. The projections down are whole on every rank."""

    def __init__(self, model: Decoder, mla: Mla) -> None:
        super().__init__()
        self.mla = mla
        bias, rows = model.qkv_bias, model.heads * (mla.nope_head_dim + mla.rope_head_dim)
        if mla.q_lora_rank is None:
            self.q = nn.Linear(model.hidden, rows, bias=False)
        else:
            self.q_down = nn.Linear(model.hidden, mla.q_lora_rank, bias=bias)
            self.q_norm = nn.RMSNorm(mla.q_lora_rank, LATENT_EPS)
            self.q_up = nn.Linear(mla.q_lora_rank, rows, bias=False)
        latent = mla.kv_lora_rank
        self.kv_down = nn.Linear(model.hidden, latent + mla.rope_head_dim, bias=bias)
        self.kv_norm = nn.RMSNorm(latent, LATENT_EPS)
        up = model.heads * (mla.nope_head_dim + mla.v_head_dim)
        self.kv_up = nn.Linear(latent, up, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(x) if self.mla.q_lora_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        latent, turned = self.kv_down(x).split([self.mla.kv_lora_rank, self.mla.rope_head_dim], -1)
        return q, self.kv_up(self.kv_norm(latent)), turned


class LatentAttention(nn.Module):
    """Attention of q over k and v from the latent row."""

    def __init__(self, model: Decoder, mla: Mla, attend: Attend, rotary: Rotary) -> None:
        super().__init__()
        self.heads, self.mla = attend, mla
        self.rotary = rotary
        self.scale = model.rope_scaling.softmax_scale if model.rope_scaling else 1.0

    def forward(self, projected: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        mla = self.mla
        q, kv, turned = projected
        q = q.unflatten(-1, (-1, mla.nope_head_dim + mla.rope_head_dim))
        kv = kv.unflatten(-1, (-1, mla.nope_head_dim + mla.v_head_dim))
        plain, q_turned = q.split([mla.nope_head_dim, mla.rope_head_dim], -1)
        k, v = kv.split([mla.nope_head_dim, mla.v_head_dim], -1)
        shared = self.rotary(turned.unsqueeze(-2)).expand(*k.shape[:-1], -1)
        q = torch.cat([plain, self.rotary(q_turned)], -1)
        q = q if self.scale == 1 else q * self.scale
        return self.heads(q, torch.cat([k, shared], -1), v).flatten(-2)


class GateUp(nn.Module):
    """The products of act(gate) * up: x -> (gate, up), or (up,) without a gate."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, bias=model.mlp_bias) if model.gated else None
        self.up = nn.Linear(model.hidden, model.ffn, bias=model.mlp_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.up(x),) if self.gate is None else (self.gate(x), self.up(x))


class DecoderLayer(Layer):
    """One layer: x[b,s,hidden] -> [b,s,hidden]. If it is not ``dense``, it has experts in place of
    the feed-forward."""

    def __init__(
        self, model: Decoder, index: int, attend: Attend, rotary: Rotary, routing: Routing
    ) -> None:
        super().__init__()

        def norm(*places: str) -> nn.Module:
            held = model.norms in places
            return nn.RMSNorm(model.hidden, model.norm_eps) if held else nn.Identity()

        self.norm1 = norm("before", "both")
        self.qkv: nn.Module = QKV(model) if model.mla is None else LatentQKV(model, model.mla)
        self.attention: nn.Module = (
            RotaryAttention(model, attend, rotary, model.window_of(index))
            if model.mla is None
            else LatentAttention(model, model.mla, attend, rotary)
        )
        width = model.head_dim if model.mla is None else model.mla.v_head_dim
        self.out = nn.Linear(model.heads * width, model.hidden, bias=model.out_bias)
        self.post1 = norm("after", "both")
        self.norm2 = norm("before", "both")
        self.activation, self.scale = model.activation, model.residual_scale
        self.dense = not model.has_experts(index)
        if self.dense:
            self.gate_up = GateUp(model)
            self.down = nn.Linear(model.ffn, model.hidden, bias=model.mlp_bias)
        else:
            assert model.experts is not None
            self.moe = MoE(
                model.hidden, model.experts, gated=model.gated, bias=model.mlp_bias, routing=routing
            )
        self.post2 = norm("after", "both")

    def compute(self, x: Tensor) -> Tensor:
        # a product without a norm before it has nothing cheap to recompute
        part = call if isinstance(self.norm1, nn.Identity) else self.part
        projected: Any = part(lambda x: self.qkv(self.norm1(x)), x)
        x = self.add(x, self.post1(self.out(self.attention(projected))))
        if self.dense:
            up = part(lambda x: self.gate_up(self.norm2(x)), x)
            return self.add(x, self.post2(self.part(self.narrow, up)))
        return self.add(x, self.post2(self.moe(self.norm2(x))))

    def narrow(self, up: Any) -> Tensor:
        return self.down(activate(up, self.activation))  # type: ignore[no-any-return]

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + (y if self.scale == 1 else y * self.scale)


class Llama(ModelStage):
    """The whole model or one of its stages. ``attend``: q, k, v -> out, each [b,s,heads,dim]; k and
    v may have fewer heads. By default it is causal, on one rank."""

    def __init__(
        self,
        model: Decoder,
        layers: range | None = None,
        *,
        attend: Attend = causal,
        routing: Routing = "learned",
    ) -> None:
        model.check_computed()
        layers = layers or range(model.layers)
        super().__init__(layers, model.layers)
        self.is_tied, self.max_seq_len = model.tied, model.max_seq_len
        self.scale = model.embed_scale
        if self.first:
            self.embed = nn.Embedding(model.vocab, model.hidden)
        turned = model.head_dim if model.mla is None else model.mla.rope_head_dim
        rotary = local = Rotary(turned, model)
        if model.local_rope_theta is not None:
            local = Rotary(turned, model, local=True)
        rotaries = {i: rotary if model.window_of(i) is None else local for i in layers}
        self.layers = nn.ModuleDict(
            {str(i): DecoderLayer(model, i, attend, rotaries[i], routing) for i in layers}
        )
        if self.last:
            norm = nn.RMSNorm(model.hidden, model.norm_eps)
            self.head = Head(norm, model.hidden, model.vocab, model.logits_scale)
        self.tie()

    def at(self, positions: Tensor) -> None:
        for module in self.modules():
            if isinstance(module, Rotary):
                module.at = positions

    def begin(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return x if self.scale == 1 else x * self.scale

    def end(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[no-any-return]
