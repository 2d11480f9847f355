"""Models: sizes only. ``models/`` turns them into operations, ``nn/`` into modules."""

from collections import Counter
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from meshwise.spec.record import Count, Length, NonNegative, PositiveFloat, Record
from meshwise.spec.vision import WideResNet

EXPERT_ALIGNMENT = 8  # each expert's rows begin at a multiple of this, as grouped products demand


class LayerKind(NamedTuple):
    """The fields in which layers of a model differ. ``form``: dense or experts, the kind of
    feed-forward; for images ``WideResNet.kind_of``. ``window``: the most keys that a query sees;
    None: all keys before it."""

    form: str = "dense"
    window: int | None = None

    @property
    def name(self) -> str:
        return self.form if self.window is None else f"{self.form} w{self.window}"


class Model(Record, kw_only=True, tag_field="family", tag="gpt"):
    """A GPT-2 style decoder: learned positions, LayerNorm, GELU, biases, tied head.

    Shapes: embedding [vocab, hidden], positions [max_seq_len, hidden]; per layer qkv
    [3*heads*head_dim, hidden], out [hidden, heads*head_dim], up [ffn, hidden], down
    [hidden, ffn], each with a bias, and two norms of 2*hidden. Layers with ``experts`` have a
    router and the experts' weights in place of up and down.
    """

    name: str = ""
    hidden: Length
    layers: Annotated[int, Meta(ge=1, le=10_000)]
    heads: Count
    ffn: Length
    vocab: Length = 51200
    max_seq_len: Length = 1024
    experts: "Experts | None" = None

    def check(self) -> None:
        if self.hidden % self.heads:
            self.fail("heads", f"must divide hidden = {self.hidden}")

    def has_experts(self, layer: int) -> bool:
        """Whether layer ``layer``, from 0, has experts in place of the dense feed-forward."""
        return self.experts is not None and self.experts.are_in(layer)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Mla(Record, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2). q is projected through ``q_lora_rank`` unless it
    is None, k and v through ``kv_lora_rank``. A head of q and k is ``nope_head_dim +
    rope_head_dim`` wide."""

    q_lora_rank: Length | None = None
    kv_lora_rank: Length
    nope_head_dim: Length
    rope_head_dim: Length
    v_head_dim: Length


class RopeScaling(Record, kw_only=True):
    """Rotary positions for contexts longer than ``original_max_seq_len``. Frequencies are divided
    by up to ``factor``.

    ``kind``: ``linear`` divides all frequencies. ``llama3`` (Llama 3.1) and ``yarn`` (Peng et al.
    2023) keep those that turn more than ``fast`` times in the original length and divide those that
    turn less than ``slow`` times. In between, llama3 interpolates by the number of turns, yarn by
    the index of the frequency. ``rotary_scale`` multiplies cosines and sines, ``softmax_scale`` the
    logits of latent attention."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: PositiveFloat
    original_max_seq_len: NonNegative = 0
    slow: PositiveFloat = 1.0
    fast: PositiveFloat = 4.0
    rotary_scale: PositiveFloat = 1.0
    softmax_scale: PositiveFloat = 1.0

    def check(self) -> None:
        if self.kind != "linear" and not self.original_max_seq_len:
            self.fail("original_max_seq_len", f"must be given for {self.kind}")
        if self.slow >= self.fast:
            self.fail("fast", f"must be > slow = {self.slow}")


class Experts(Record, kw_only=True):
    """A mixture of experts of width ``ffn``. Each token goes to ``top_k`` of ``num_experts``, and
    to a shared expert of width ``shared_ffn`` (0: none).

    The first ``first_dense`` layers keep the dense feed-forward. Of the others, those whose index
    ``every`` divides have experts. ``shared_gate``: the shared expert has a gate of [1, hidden].
    ``router_bias``: one value per expert, added to its score; scores are then sigmoids, otherwise a
    softmax. ``normalized``: the chosen scores are scaled to add up to ``routed_scale``; otherwise
    they are only multiplied by it. ``groups``: experts form groups of neighbours, and a token uses
    only the best ``top_groups``, ranked by their largest score, or with ``router_bias`` by the sum
    of their two largest (DeepSeek-V2 and V3).
    ``group_size``: tokens are dispatched in groups of so many neighbours. An expert takes at most
    ``capacity`` tokens of each group; ``capacity_factor`` 1 is an equal share (GShard). Tokens
    beyond it are dropped, second choices before first ones. Without it all tokens are taken.

    ``load``: rows of a rank's experts that plans assume. ``mean``: an equal share. ``p95``: the
    95th percentile of random choices. A number: the fullest rank's over an equal share, >= 1. With
    a capacity all ranks have equally many.
    """

    num_experts: Count
    top_k: Count
    ffn: Length
    shared_ffn: NonNegative = 0
    shared_gate: bool = False
    first_dense: NonNegative = 0
    every: Count = 1
    router_bias: bool = False
    normalized: bool = True
    routed_scale: PositiveFloat = 1.0
    groups: Count = 1
    top_groups: Count = 1
    capacity_factor: PositiveFloat | None = None
    group_size: Length | None = None
    load: Literal["mean", "p95"] | float = "mean"

    def check(self) -> None:
        if not isinstance(self.load, str) and not 1 <= self.load <= self.num_experts:
            self.fail("load", f"must be mean, p95, or 1 to num_experts = {self.num_experts}")
        if self.group_size is None and self.capacity_factor is not None:
            self.fail("group_size", "must be given with capacity_factor; GShard's is 2048")
        if self.capacity_factor is None and self.group_size is not None:
            self.fail("capacity_factor", "must be given with group_size; 1.0 is an equal share")
        if self.num_experts % self.groups:
            self.fail("groups", f"must divide num_experts = {self.num_experts}")
        if self.router_bias and 1 < self.groups == self.num_experts:
            self.fail("groups", "must have two experts or more each, whose scores are added")
        if self.top_groups > self.groups:
            self.fail("top_groups", f"must be <= groups = {self.groups}")
        seen = self.num_experts // self.groups * self.top_groups
        if self.top_k > seen:
            which = "num_experts" if self.groups == 1 else "those of top_groups"
            self.fail("top_k", f"must be <= {which} = {seen}")

    @property
    def capacity(self) -> int:
        """Return the most tokens of a group that an expert takes, rounded as in Alpa."""
        assert self.capacity_factor is not None and self.group_size is not None
        share = self.top_k * self.group_size / self.num_experts
        return max(1, int(min(self.capacity_factor * share, self.group_size)))

    def check_layers(self, layers: int) -> None:
        """Raise a ValueError if none of ``layers`` layers has experts."""
        if not any(map(self.are_in, range(layers))):
            self.fail("first_dense", f"leaves none of {layers} layers with experts")

    def are_in(self, layer: int) -> bool:
        return layer >= self.first_dense and layer % self.every == 0


class Decoder(Record, kw_only=True, tag_field="family", tag="decoder"):
    """A Llama-type decoder: RMSNorm, rotary positions, SwiGLU; dense, GQA, MLA or with experts.

    Shapes: embedding and, unless ``tied``, head [vocab, hidden]; per layer q [heads*head_dim,
    hidden], k and v [kv_heads*head_dim, hidden], out [hidden, heads*head_dim], gate and up [ffn,
    hidden], down [hidden, ffn], two norms of hidden; a last norm. ``qk_norm``: two more norms of
    head_dim, or, if ``qk_norm_over`` is projection, of all of q's and of k's heads. ``ffn``: width
    of the dense feed-forward, even if some layers have experts. Without ``gated`` all
    feed-forwards, the experts' too, are up and down with GELU. ``activation``: the gate's.
    ``norms``: before attention and feed-forward, after them (OLMo 2) or both (Gemma 2).
    ``embed_scale`` multiplies the embedding's output, ``residual_scale`` the terms that a layer
    adds, ``logits_scale`` the logits, ``softmax_scale`` the products of q and k (by default
    head_dim^-1/2). ``window``: the most keys that a query sees, its own included, except in
    ``full_layers`` (counted from 0). ``local_rope_theta``: of layers with a window.
    ``not_computed``: the part of the model that no module here computes. Its operations are listed,
    but planning or running it raises an error with these words. ``more_weights``: names and
    elements of further weights of each layer of such a model.
    """

    name: str = ""
    hidden: Length
    layers: Annotated[int, Meta(ge=1, le=10_000)]
    heads: Count
    kv_heads: Count
    head_dim: Length
    ffn: Length
    vocab: Length
    max_seq_len: Length
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gated: bool = True
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: PositiveFloat = 1e-5
    mla: Mla | None = None
    experts: Experts | None = None
    norms: Literal["before", "after", "both"] = "before"
    qk_norm_over: Literal["head", "projection"] = "head"
    activation: Literal["silu", "gelu"] = "silu"
    embed_scale: PositiveFloat = 1.0
    residual_scale: PositiveFloat = 1.0
    logits_scale: PositiveFloat = 1.0
    softmax_scale: PositiveFloat | None = None
    window: Length | None = None
    full_layers: tuple[NonNegative, ...] = ()
    local_rope_theta: PositiveFloat | None = None
    not_computed: str = ""
    more_weights: tuple[tuple[str, int], ...] = ()

    def check(self) -> None:
        if self.heads % self.kv_heads:
            self.fail("kv_heads", f"must divide heads = {self.heads}")
        for field in ("softmax_scale", "window") if self.mla is not None else ():
            if getattr(self, field) is not None:
                self.fail(field, "must be null with latent attention")
        if self.activation != "silu" and self.experts is not None:
            self.fail("activation", "must be silu where there are experts")
        if self.more_weights and not self.not_computed:
            self.fail("more_weights", "no module here has them; say so in not_computed")

    def check_computed(self) -> None:
        """Raise a ValueError if no module here computes the model."""
        if self.not_computed:
            told = f"{self.name or 'the model'} is not computed here: {self.not_computed}"
            raise ValueError(f"{told}; measure gemm, attention and collectives list its operations")

    def window_of(self, layer: int) -> int | None:
        """Return the most keys that a query of layer ``layer`` sees; None: all keys before it."""
        return None if layer in self.full_layers else self.window

    def check_rotary(self) -> None:
        """Raise a ValueError if a head's width is odd: rotary positions turn pairs."""
        owner, field = (self, "head_dim") if self.mla is None else (self.mla, "rope_head_dim")
        if getattr(owner, field) % 2:
            owner.fail(field, "must be even: rotary positions turn pairs")

    def has_experts(self, layer: int) -> bool:
        """Whether layer ``layer``, from 0, has experts in place of the dense feed-forward."""
        return self.experts is not None and self.experts.are_in(layer)


LanguageModel = Model | Decoder
AnyModel = LanguageModel | WideResNet


@lru_cache(maxsize=4096)
def layer_kinds(
    model: AnyModel, seq_len: int, layers: range | None = None
) -> tuple[LayerKind, ...]:
    """Return the kind of each of ``layers`` (by default all) for sequences of ``seq_len`` tokens. A
    window of ``seq_len`` or more counts as none."""

    def kind(layer: int) -> LayerKind:
        if isinstance(model, WideResNet):
            return LayerKind(model.kind_of(layer))
        window = model.window_of(layer) if isinstance(model, Decoder) else None
        binds = window is not None and window < seq_len
        form = "experts" if model.has_experts(layer) else "dense"
        return LayerKind(form, window if binds else None)

    return tuple(map(kind, range(model.layers) if layers is None else layers))


def forms_of(model: AnyModel, seq_len: int) -> dict[str, LayerKind]:
    """Return the kinds of layers by name, the most frequent first. A language model whose layers
    are all alike has one, named ""."""
    found = Counter(layer_kinds(model, seq_len))
    if len(found) == 1 and not isinstance(model, WideResNet):
        return dict.fromkeys([""], *found)
    return {kind.name: kind for kind, _ in found.most_common()}
