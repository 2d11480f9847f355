"""Name a rank's buffers, what they hold and in which order, in the conventions of ``Order``.

In: the logical tensors of a layer (or of what is in no layer), and a rank's place: its share of
tensor, expert and expert-tensor parallelism. Out: the rank's buffers, each with the pieces of the
logical tensors that it holds. Logical names are those of ``models.decoder.weights``, with experts'
gate and up apart ([experts, ffn, hidden] each), and for a GPT those of ``nn.gpt``.

``plain``: one buffer for each logical tensor, of its name, as ``parallel`` and FSDP2 have them.

``megatron``: Megatron-core's (core/models/gpt, core/transformer/{attention,mlp,moe}), with norms as
tensors of their own (``input_layernorm``, not the ``layer_norm_weight`` of a fused linear).
linear_qkv holds q, k and v of one group of query heads after another. It is cut evenly by rows: by
whole groups, or within them if tp exceeds the number of groups. linear_fc1 is a rank's gate, then
its up. Experts are numbered from 0 on each rank, one tensor each.

``engine``: vLLM's (0.33: model_executor/models/{llama,deepseek_v2,gpt2}.py, layers/fused_moe).
qkv_proj is a rank's q, k and v. If tp exceeds kv_heads, neighbours hold the same k and v (as in all
orders but ``megatron``). gate_up_proj and experts' w13 are a rank's gate, then its up. The two
latent down-projections are one tensor that all ranks have.

``hf``: Hugging Face's checkpoints, with a tensor for each expert. ``hf-fused``: the modules of
transformers 5, which stack experts and fuse their gate and up. The names follow from what a model
has: experts without norms of q and k, biases or shared experts are Mixtral's. Phi 3's fused q, k
and v and GPT-2's transposed weights have no names here; ``bridges`` read them off the module.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from meshwise.reshard.regions import Piece, chunk_bounds, cropped, moved, narrowed, whole
from meshwise.spec import Decoder, Model
from meshwise.spec.weights import Order


def _by_role(roles: dict[str, str]) -> dict[str, str]:
    """Turn the roles of each buffer into the buffer of each role."""
    return {role: buffer for buffer, several in roles.items() for role in several.split()}


_MEGATRON = _by_role(
    {  # {}: weight or bias
        "embedding.word_embeddings.{}": "embed",
        "embedding.position_embeddings.{}": "positions",
        "input_layernorm.{}": "norm1",
        "pre_mlp_layernorm.{}": "norm2",
        "self_attention.linear_qkv.{}": "q k v attention.qkv",
        "self_attention.q_layernorm.{}": "q_norm",
        "self_attention.k_layernorm.{}": "k_norm",
        "self_attention.linear_q_down_proj.{}": "q_down",
        "self_attention.linear_q_up_proj.{}": "q_up",
        "self_attention.linear_kv_down_proj.{}": "kv_down",
        "self_attention.kv_layernorm.{}": "kv_norm",
        "self_attention.linear_kv_up_proj.{}": "kv_up",
        "self_attention.linear_proj.{}": "out attention.out",
        "mlp.linear_fc1.{}": "gate up mlp.up",
        "mlp.linear_fc2.{}": "down mlp.down",
        "mlp.router.{}": "router",
        "mlp.router.expert_bias": "router.bias",
        "mlp.experts.linear_fc1.{}{{expert}}": "experts.gate experts.up",  # its number on its rank
        "mlp.experts.linear_fc2.{}{{expert}}": "experts.down",
        "mlp.shared_experts.linear_fc1.{}": "shared.gate shared.up",
        "mlp.shared_experts.linear_fc2.{}": "shared.down",
        "mlp.shared_experts.gate_{}": "shared_gate",
        "decoder.final_layernorm.{}": "norm head.norm",
        "output_layer.{}": "head head.projection",
    }
)
_VLLM = _by_role(
    {
        "model.embed_tokens.{}": "embed",
        "input_layernorm.{}": "norm1",
        "post_attention_layernorm.{}": "norm2",
        "self_attn.qkv_proj.{}": "q k v",
        "self_attn.q_norm.{}": "q_norm",
        "self_attn.k_norm.{}": "k_norm",
        "self_attn.o_proj.{}": "out",
        "mlp.gate_up_proj.{}": "gate up",
        "mlp.down_proj.{}": "down",
        "mlp.gate.{}": "router",
        "mlp.gate.e_score_correction_bias": "router.bias",
        "mlp.experts.routed_experts.w13_{}": "experts.gate experts.up",
        "mlp.experts.routed_experts.w2_{}": "experts.down",
        "mlp.shared_experts.gate_up_proj.{}": "shared.gate shared.up",
        "mlp.shared_experts.down_proj.{}": "shared.down",
        "mlp.shared_expert_gate.{}": "shared_gate",
        "model.norm.{}": "norm",
        "lm_head.{}": "head",
    }
)
_HF = _by_role(
    {
        "model.embed_tokens.{}": "embed",
        "input_layernorm.{}": "norm1",
        "post_attention_layernorm.{}": "norm2 post1",
        "post_feedforward_layernorm.{}": "post2",
        "self_attn.q_proj.{}": "q",
        "self_attn.k_proj.{}": "k",
        "self_attn.v_proj.{}": "v",
        "self_attn.q_norm.{}": "q_norm",
        "self_attn.k_norm.{}": "k_norm",
        "self_attn.o_proj.{}": "out",
        "mlp.gate_proj.{}": "gate",
        "mlp.up_proj.{}": "up",
        "mlp.down_proj.{}": "down",
        "mlp.gate.{}": "router",
        "mlp.gate.e_score_correction_bias": "router.bias",
        "mlp.experts.{{expert}}.gate_proj.{}": "experts.gate",  # its number in the model
        "mlp.experts.{{expert}}.up_proj.{}": "experts.up",
        "mlp.experts.{{expert}}.down_proj.{}": "experts.down",
        "mlp.shared_experts.gate_proj.{}": "shared.gate",
        "mlp.shared_experts.up_proj.{}": "shared.up",
        "mlp.shared_experts.down_proj.{}": "shared.down",
        "mlp.shared_expert_gate.{}": "shared_gate",
        "model.norm.{}": "norm",
        "lm_head.{}": "head",
    }
)
_HF_FUSED = _by_role(
    {
        "mlp.experts.gate_up_proj": "experts.gate.weight experts.up.weight",
        "mlp.experts.gate_up_proj_bias": "experts.gate.bias experts.up.bias",
        "mlp.experts.down_proj": "experts.down.weight",
        "mlp.experts.down_proj_bias": "experts.down.bias",
    }
)
_HF_LATENT = _by_role(
    {
        "self_attn.q_a_proj.{}": "q_down",
        "self_attn.q_a_layernorm.{}": "q_norm",
        "self_attn.q_b_proj.{}": "q_up",
        "self_attn.kv_a_proj_with_mqa.{}": "kv_down",
        "self_attn.kv_a_layernorm.{}": "kv_norm",
        "self_attn.kv_b_proj.{}": "kv_up",
    }
)
_MIXTRAL = _by_role(
    {
        "block_sparse_moe.gate.{}": "router",
        "block_sparse_moe.experts.{{expert}}.w1.{}": "experts.gate",
        "block_sparse_moe.experts.{{expert}}.w3.{}": "experts.up",
        "block_sparse_moe.experts.{{expert}}.w2.{}": "experts.down",
    }
)
_MEGATRON_LATENT = _MEGATRON | {"q": "self_attention.linear_q_proj.{}"}
_VLLM_LATENT = _VLLM | {
    "q": "self_attn.q_proj.{}",
    "q_down": "self_attn.fused_qkv_a_proj.{}",
    "q_norm": "self_attn.q_a_layernorm.{}",
    "q_up": "self_attn.q_b_proj.{}",
    "kv_down": "self_attn.fused_qkv_a_proj.{}",
    "kv_norm": "self_attn.kv_a_layernorm.{}",
    "kv_up": "self_attn.kv_b_proj.{}",
}
_VLLM_LATENT_WHOLE_Q = _VLLM_LATENT | {"kv_down": "self_attn.kv_a_proj_with_mqa.{}"}
_VLLM_GPT2 = {
    "embed": "transformer.wte.{}",
    "positions": "transformer.wpe.{}",
    "norm1": "ln_1.{}",
    "attention.qkv": "attn.c_attn.{}",
    "attention.out": "attn.c_proj.{}",
    "norm2": "ln_2.{}",
    "mlp.up": "mlp.c_fc.{}",
    "mlp.down": "mlp.c_proj.{}",
    "head.norm": "transformer.ln_f.{}",
    "head.projection": "lm_head.{}",
}

# What tp cuts, and how (ep and etp cut experts); all else is whole on every rank.
_ROWS = {"q", "q_up", "kv_up", "gate", "up", "shared.gate", "shared.up", "attention.qkv", "mlp.up"}
_COLUMNS = {"out", "down", "shared.down", "attention.out", "mlp.down"}
_VOCABULARY = {"embed", "head", "head.projection"}


class Member(NamedTuple):
    """A logical tensor. ``role``: its name in the tables above, which differs from ``tensor`` only
    for a head that is tied to the embedding."""

    tensor: str
    role: str
    shape: tuple[int, ...]


class Share(NamedTuple):
    """Part ``which`` of ``parts`` equal parts."""

    which: int = 0
    parts: int = 1

    def of(self, size: int) -> tuple[int, int]:
        assert size % self.parts == 0, (size, self)
        each = size // self.parts
        return self.which * each, (self.which + 1) * each


class Place(NamedTuple):
    """The shares of a rank. ``vocab_rows``: of embedding and head, padding included."""

    vocab_rows: int
    tp: Share = Share()
    ep: Share = Share()
    etp: Share = Share()


class Fused(NamedTuple):
    """A rank's buffer with its ``pieces``, (logical name, piece), whose rank is not set yet.
    ``tensor``: the logical tensor that it is made for, the first of several."""

    name: str
    tensor: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, Piece], ...]

    @property
    def missing_dims(self) -> int:
        """The number of dims of 1 that the pieces have before the buffer's own."""
        return len(self.pieces[0][1].offset) - len(self.shape) if self.pieces else 0

    def rows(self, low: int, high: int) -> "Fused":
        """Keep only rows [low, high) of the buffer's first dim."""
        pieces = tuple(
            (name, kept)
            for name, piece in self.pieces
            for kept in cropped((piece,), self.missing_dims, low, high)
        )
        return self._replace(shape=(high - low, *self.shape[1:]), pieces=pieces)

    @property
    def is_padded(self) -> bool:
        dim = self.missing_dims
        ends = (piece.offset[dim] + piece.box.shape[dim] for _, piece in self.pieces)
        return max(ends, default=0) < self.shape[0]


def layer_prefix(model: Decoder | Model, order: Order, layer: int, local: int) -> str:
    """The prefix of the names of a layer's tensors; ``local``: its number within its stage."""
    if order == "plain":
        return f"layers.{layer}."
    if order == "megatron":
        return f"decoder.layers.{local}."
    if order != "engine":
        return f"model.layers.{layer}."
    return f"transformer.h.{layer}." if isinstance(model, Model) else f"model.layers.{layer}."


def buffers_of(
    members: Sequence[Member], model: Decoder | Model, order: Order, place: Place
) -> Iterator[Fused]:
    """Yield a rank's buffers, fused where the order has one name for several tensors."""
    fused: dict[str, list[Member]] = {}
    for member in members:
        fused.setdefault(_buffer_name(member.role, model, order), []).append(member)
    for name, parts in fused.items():
        role = parts[0].role
        if order == "megatron" and len(parts) == 3:
            yield _grouped_qkv(name, parts, model, place)
        elif order == "engine" and role.startswith("attention.qkv."):
            yield _qkv_of_heads(name, parts[0], model, place)
        elif order in ("megatron", "hf") and role.startswith("experts."):
            first = 0 if order == "megatron" else place.ep.of(parts[0].shape[0])[0]
            yield from _apart(_joined(name, parts, model, place, dim=1), first)
        else:
            yield _joined(name, parts, model, place, dim=int(role.startswith("experts.")))


def _buffer_name(role: str, model: Decoder | Model, order: Order) -> str:
    if order == "plain":
        return role
    stem, kind = role.rsplit(".", 1)
    names = _names(model, order)
    return names[role] if role in names else names[stem].format(kind)


@cache
def _names(model: Decoder | Model, order: Order) -> dict[str, str]:
    mla = None if isinstance(model, Model) else model.mla
    if order == "megatron":
        return _MEGATRON_LATENT if mla else _MEGATRON
    if isinstance(model, Model):
        return _VLLM_GPT2
    if order == "engine":
        found = _VLLM if mla is None else _VLLM_LATENT if mla.q_lora_rank else _VLLM_LATENT_WHOLE_Q
        new_of = {"mlp.": "block_sparse_moe."} if _is_mixtral(model) else {}
    else:
        found, new_of = _hugging_face(model, is_fused=order == "hf-fused"), {}
    if model.experts and model.experts.shared_gate:  # Qwen's
        new_of["shared_experts."] = "shared_expert."
    for old, new in new_of.items():
        found = {role: name.replace(old, new) for role, name in found.items()}
    return found


def _hugging_face(model: Decoder, *, is_fused: bool) -> dict[str, str]:
    found = _HF | (_HF_LATENT if model.mla else {})
    if model.norms == "both":
        found |= {"norm2": "pre_feedforward_layernorm.{}"}
    if is_fused:
        return found | _HF_FUSED
    return found | (_MIXTRAL if _is_mixtral(model) else {})


def _is_mixtral(model: Decoder) -> bool:
    has_more = model.mla or model.qk_norm or model.qkv_bias
    return bool(model.experts and not (has_more or model.experts.shared_ffn))


def _joined(
    name: str, parts: Sequence[Member], model: Decoder | Model, place: Place, dim: int
) -> Fused:
    """Put a rank's shares of several tensors one after the other, in ``dim``."""
    pieces: list[tuple[str, Piece]] = []
    shape: tuple[int, ...] = ()
    filled = 0
    for member in parts:
        shape, layout = _share(member, model, place)
        offset = [filled if d == dim else 0 for d in range(len(shape))]
        pieces += [(member.tensor, piece) for piece in moved(layout, offset=offset)]
        filled += shape[dim]
    shape = (*shape[:dim], filled, *shape[dim + 1 :])
    return Fused(name, parts[0].tensor, shape, tuple(pieces))


def _share(
    member: Member, model: Decoder | Model, place: Place
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Return the shape of a rank's share of a tensor, and the piece that is not padding."""
    stem, kind = member.role.rsplit(".", 1)
    box, origin = whole(member.shape), (0,) * len(member.shape)
    if stem in _VOCABULARY:
        low, end = chunk_bounds(place.vocab_rows, place.tp.parts, place.tp.which)
        high = min(end, member.shape[0])
        held = (Piece(0, narrowed(box, 0, low, high), origin),) if low < high else ()
        return (end - low, *member.shape[1:]), held
    for dim, share in _cuts(stem, kind, model, place).items():
        box = narrowed(box, dim, *share.of(member.shape[dim]))
    return box.shape, (Piece(0, box, origin),)


def _cuts(stem: str, kind: str, model: Decoder | Model, place: Place) -> dict[int, Share]:
    """Return the dims of a tensor that are cut, with this rank's share."""
    if stem in ("k", "v"):
        assert isinstance(model, Decoder)
        parts = min(place.tp.parts, model.kv_heads)
        return {0: Share(place.tp.which * parts // place.tp.parts, parts)}
    if stem in _ROWS:
        return {0: place.tp}
    if stem in _COLUMNS and kind == "weight":
        return {1: place.tp}
    if stem in ("experts.gate", "experts.up"):
        return {0: place.ep, 1: place.etp}
    if stem == "experts.down":
        return {0: place.ep, 2: place.etp} if kind == "weight" else {0: place.ep}
    return {}


def _apart(stacked: Fused, first: int) -> Iterator[Fused]:
    """Yield a buffer for each expert, numbered from ``first``."""
    for expert in range(stacked.shape[0]):
        one = stacked.rows(expert, expert + 1)
        name = stacked.name.format(expert=first + expert)
        yield one._replace(name=name, shape=stacked.shape[1:])


def _grouped_qkv(name: str, parts: Sequence[Member], model: Decoder | Model, place: Place) -> Fused:
    """Stack the rows of q, k and v group by group, and cut them evenly."""
    assert isinstance(model, Decoder)
    rows = [
        (part, group * size, (group + 1) * size)
        for group in range(model.kv_heads)
        for part in parts
        for size in [part.shape[0] // model.kv_heads]
    ]
    fused = _stacked(name, rows)
    return fused.rows(*place.tp.of(fused.shape[0]))


def _qkv_of_heads(name: str, part: Member, model: Decoder | Model, place: Place) -> Fused:
    """Stack [q; k; v] of a rank's heads, from rows ordered by head, each with its q, k and v."""
    numbers = [3 * head + which for which in range(3) for head in range(*place.tp.of(model.heads))]
    size = model.head_dim
    return _stacked(name, [(part, number * size, (number + 1) * size) for number in numbers])


def _stacked(name: str, rows: Sequence[tuple[Member, int, int]]) -> Fused:
    """Stack rows [low, high) of tensors, one run behind the other."""
    pieces, filled = [], 0
    for part, low, high in rows:
        box = narrowed(whole(part.shape), 0, low, high)
        pieces.append((part.tensor, Piece(0, box, (filled, *(0 for _ in part.shape[1:])))))
        filled += high - low
    first = rows[0][0]
    return Fused(name, first.tensor, (filled, *first.shape[1:]), tuple(pieces))
