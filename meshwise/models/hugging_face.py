"""Models from Hugging Face: a ``config.json`` becomes a Decoder or, for GPT-2, a Model.

The names of keys, their defaults and the parameters that follow from them are those of transformers
4.57.1 and 5.23 (models/*/configuration_*.py, modeling_*.py). If the default of a size there fits
only one model and is not derived from other sizes, the file must give it. Needs neither network nor
transformers.
Weights are Hugging Face's, except Gemma's norms, which multiply by 1 + w: here w counts from 0. Phi
3's qkv_proj and gate_up_proj stack q, k, v and gate, up. Dropout is not read.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from meshwise import store
from meshwise.spec import Decoder, Experts, Mla, Model, RopeScaling

T = TypeVar("T")


def read_config(path: Path | str) -> Decoder | Model:
    """Read a config.json, or a folder with one. A key or value that is not supported raises a
    ValueError with file and key."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    config: dict[str, Any] = store.read(path, dict)
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    if config.get("model_type") == "gpt2":
        return _gpt2(_ConfigKeys(config, str(path)), name)
    return decoder(config, name, str(path))


def decoder(data: Mapping[str, Any], name: str, source: str) -> Decoder:
    """Return the Decoder of a config whose ``model_type`` is in ``_KINDS``. Errors name
    ``source``."""
    config, kind = _ConfigKeys(data, source), data.get("model_type")
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join([*_KINDS, "gpt2"])
        keys, why = _REFUSED.get(str(kind), ((), f"must be one of those known exactly: {known}"))
        raise config.error(next((key for key in keys if key in data), "model_type"), why)
    if kind not in _GEMMAS:
        config.only("hidden_act", "silu", "swish")
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    mla = _mla(config) if kind in _LATENT else None
    found = config.build(
        Decoder,
        {"layers": "num_hidden_layers"},
        name=name,
        hidden=hidden,
        layers=config.size("num_hidden_layers"),
        heads=heads,
        kv_heads=heads if mla else _kv_heads(config, heads),
        head_dim=mla.nope_head_dim + mla.rope_head_dim if mla else _head_dim(config),
        ffn=config.size("intermediate_size"),
        vocab=config.size("vocab_size"),
        max_seq_len=config.size("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", kind in _GEMMAS),
        norm_eps=config.number("rms_norm_eps", _NORM_EPS.get(kind, 1e-6)),
        mla=mla,
        experts=_KINDS[kind](config),
        **_biases(config),
        **_windows(config),
        **_rotary(config),
        **_SCALES.get(kind, _unscaled)(config),
        **_SHAPES.get(kind, {}),
    )
    config.nothing_else()
    config.build(found.check_rotary, {"rope_head_dim": "qk_rope_head_dim"})
    if found.experts is not None:
        first = "mlp_only_layers" if kind in ("qwen2_moe", "qwen3_moe") else "first_k_dense_replace"
        config.build(found.experts.check_layers, {"first_dense": first}, layers=found.layers)
    return found


class _ConfigKeys:
    """A config and the file it came from: values by key, checked."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data, self.source = data, source
        self.kind = data.get("model_type")
        self.read: set[str] = set()

    def error(self, key: str, fix: str) -> ValueError:
        found = f"{key} = {self.data[key]!r}" if key in self.data else f"{key} is missing"
        return ValueError(f"{self.source}: {found}: {fix}")

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Read a whole number. Absent or null means the default, if there is one."""
        self.read.add(key)
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"must be a whole number >= {least}")
        return value

    def number(self, key: str, default: float) -> float:
        """Read a number above 0. Absent or null means the default."""
        self.read.add(key)
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(key, "must be a number > 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def only(self, key: str, *known: Any) -> None:
        """Refuse a value that would change the computation. Absent or null means the default."""
        if self.data.get(key) not in (None, *known):
            raise self.error(key, f"must be {' or '.join(map(repr, known))}")

    def nothing_else(self) -> None:
        """Refuse keys of other model types that change the computation and were not read for
        this type."""
        for key, neutral in _NEUTRAL.items():
            if key not in self.read and self.data.get(key) not in (None, *neutral):
                raise self.error(key, f"is not known for model_type {self.kind!r}; leave it out")

    def build(self, record: Callable[..., T], keys: Mapping[str, str], **fields: Any) -> T:
        """Build a record. Its errors name the file and, instead of its fields, the file's
        ``keys``."""
        try:
            return record(**fields)
        except ValueError as error:
            told = re.sub(r"^\w+\.", "", str(error))
            for field, key in keys.items():
                told = re.sub(rf"\b{field}\b", key, told)
            raise ValueError(f"{self.source}: {told}") from None

    def experts(self, num_key: str, **fields: Any) -> Experts:
        """Read the experts. ``num_key``: the key that holds their number in this type."""
        return self.build(
            Experts,
            {"num_experts": num_key, "top_k": "num_experts_per_tok"},
            num_experts=self.size(num_key),
            top_k=self.size("num_experts_per_tok"),
            **fields,
        )


def _gpt2(config: _ConfigKeys, name: str) -> Model:
    if not config.flag("tie_word_embeddings", True):
        raise config.error("tie_word_embeddings", "a GPT here is tied; leave it out")
    config.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    config.only("layer_norm_epsilon", 1e-5)
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    config.nothing_else()
    hidden, heads = config.size("n_embd"), config.size("n_head")
    if hidden % heads:
        raise config.error("n_head", f"must divide n_embd = {hidden}")
    return config.build(
        Model,
        {"layers": "n_layer"},
        name=name,
        hidden=hidden,
        layers=config.size("n_layer"),
        heads=heads,
        ffn=config.size("n_inner", 4 * hidden),
        vocab=config.size("vocab_size"),
        max_seq_len=config.size("n_positions"),
    )


def _kv_heads(config: _ConfigKeys, heads: int) -> int:
    """Read the number of key heads. Null means one per query head, and so does an absent key for
    some types. Other types default to one model's size, so they must give the key."""
    derived = config.kind in _HEADS_DERIVED or "num_key_value_heads" in config.data
    kv_heads = config.size("num_key_value_heads", heads if derived else None)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads = {heads}")
    return kv_heads


def _head_dim(config: _ConfigKeys) -> int:
    if config.data.get("head_dim") is not None:
        return config.size("head_dim")
    if config.kind == "qwen3" or config.kind in _GEMMAS:  # a size, whatever hidden_size is
        return 128 if config.kind == "qwen3" else 256
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden % heads:
        raise config.error("hidden_size", f"must be divisible by num_attention_heads = {heads}")
    return hidden // heads


def _biases(config: _ConfigKeys) -> dict[str, bool]:
    """Return which products have a bias and whether q and k are normed."""
    kind = config.kind
    if kind in ("mistral", "mixtral", "phi3"):
        return {}
    if kind == "qwen2":
        return {"qkv_bias": True}
    if kind == "qwen2_moe":
        return {"qkv_bias": config.flag("qkv_bias", True)}
    if kind == "deepseek_v2":  # versions of transformers disagree on which experts have biases
        config.only("mlp_bias", False)
    bias = config.flag("attention_bias", False)
    mlp_bias = kind in ("llama", "granite") and config.flag("mlp_bias", False)
    norm = kind in ("qwen3", "qwen3_moe", "olmo2", "olmoe", "gemma3_text")
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": mlp_bias, "qk_norm": norm}


def _windows(config: _ConfigKeys) -> dict[str, Any]:
    """Return how many keys a token sees, and in which layers it sees all before it."""
    layers = range(min(config.size("num_hidden_layers"), 10_000))  # more are refused elsewhere
    types = config.data.get("layer_types") or []
    if not isinstance(types, list) or any(
        each not in ("full_attention", "sliding_attention") for each in types
    ):
        raise config.error("layer_types", "must be of full_attention and sliding_attention")
    if types and len(types) != len(layers):
        raise config.error("layer_types", f"must be of {len(layers)} layers")
    usual, slides = _WINDOWS.get(str(config.kind), (None, _never))
    window, is_qwen = None, str(config.kind).startswith("qwen")
    if config.kind in _WINDOWS:
        config.read.add("sliding_window")
        used = config.flag("use_sliding_window", False) if is_qwen else True
        if used and config.data.get("sliding_window", usual) is not None:
            window = config.size("sliding_window", usual)
    if slides is None:  # all layers have the window, whatever their types
        sliding = [window is not None for _ in layers]
    elif types:
        sliding = [each == "sliding_attention" for each in types]
    else:
        sliding = [(window is not None or not is_qwen) and slides(config, i) for i in layers]
    if any(sliding) and window is None:
        key = "layer_types" if types else "sliding_window"
        raise config.error(key, "must be full_attention in every layer, or there must be a window")
    if not any(sliding) or window is None:
        return {}
    binds = window < config.size("max_position_embeddings") or config.kind == "gemma3_text"
    full = tuple(i for i, each in enumerate(sliding) if not each)
    return {"window": window, "full_layers": full} if binds else {}


def _never(config: _ConfigKeys, layer: int) -> bool:
    return False


def _unscaled(config: _ConfigKeys) -> dict[str, Any]:
    return {}


def _granite(config: _ConfigKeys) -> dict[str, Any]:
    return {
        "embed_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "logits_scale": 1 / config.number("logits_scaling", 1.0),
        "softmax_scale": config.number("attention_multiplier", 1.0),
    }


def _gemma(config: _ConfigKeys) -> dict[str, Any]:
    config.only("hidden_act", "gelu", "gelu_pytorch_tanh")  # both are the latter there
    config.only("hidden_activation", "gelu_pytorch_tanh")
    scales = {"embed_scale": config.size("hidden_size") ** 0.5}
    if config.kind == "gemma":
        return scales
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.kind == "gemma2" and (key not in config.data or config.data[key] is not None):
            raise config.error(key, "capped logits are not computed; only null is known")
    width = config.number("query_pre_attn_scalar", 256)
    return scales | ({} if width == _head_dim(config) else {"softmax_scale": width**-0.5})


def _rotary(config: _ConfigKeys) -> dict[str, Any]:
    """Read the rotary positions. transformers 5 keeps all their keys in ``rope_parameters``."""
    theta = config.number("rope_theta", 1e6 if config.kind in ("mixtral", "gemma3_text") else 1e4)
    old, new = (config.data.get(key) for key in ("rope_scaling", "rope_parameters"))
    key = "rope_parameters" if new else "rope_scaling"
    if new and old and new != old:
        raise config.error(key, f"rope_scaling says {old!r}; leave out one of the two")
    if config.kind == "gemma3_text":
        return _rotary_of_types(config, key, new or {"full_attention": old}, theta)
    return _turned(config, key, new or old or {}, theta)


def _rotary_of_types(config: _ConfigKeys, key: str, types: Any, theta: float) -> dict[str, Any]:
    """Read Gemma 3's rotary positions. Layers with a window have their own, which are not
    scaled."""
    if not isinstance(types, dict) or types.keys() - {"full_attention", "sliding_attention"}:
        raise config.error(key, "must be an object of full_attention and sliding_attention")
    full, sliding = (types.get(each) or {} for each in ("full_attention", "sliding_attention"))
    if not isinstance(sliding, dict):
        raise config.error(key, "must hold an object for sliding_attention")
    local = _ConfigKeys(sliding, f"{config.source}: {key}")
    local.only("rope_type", "default")
    base = config.number("rope_local_base_freq", 1e4)
    found = {"local_rope_theta": local.number("rope_theta", base)}
    return found | _turned(config, key, full, theta)


def _turned(config: _ConfigKeys, key: str, given: Any, theta: float) -> dict[str, Any]:
    """Read one set of rotary positions from under ``key``."""
    if not isinstance(given, dict) or any(isinstance(each, dict) for each in given.values()):
        raise config.error(key, "must be an object of numbers, the same for all layers, or null")
    rope = _ConfigKeys(given, f"{config.source}: {key}")
    rope.only("partial_rotary_factor", 1)
    found = {"rope_theta": rope.number("rope_theta", theta)}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return found
    ends = {
        "linear": None,
        "llama3": ("low_freq_factor", 1.0, "high_freq_factor", 4.0),
        "yarn": ("beta_slow", 1.0, "beta_fast", 32.0),
    }
    if config.kind == "phi3":
        raise config.error(key, "rope_type must be default")
    if not isinstance(kind, str) or kind not in ends:
        raise config.error(key, f"rope_type must be one of default, {', '.join(ends)}")
    if rope.data.get("factor") is None:
        raise rope.error("factor", f"{kind} needs one")
    factor, fields = rope.number("factor", 1.0), {}
    if names := ends[kind]:
        slow, least, fast, most = names
        fields = {"slow": rope.number(slow, least), "fast": rope.number(fast, most)}
        whole = config.size("max_position_embeddings")
        fields["original_max_seq_len"] = rope.size("original_max_position_embeddings", whole)
    if kind == "yarn":
        rope.only("truncate", True)
        fields |= _yarn_scales(rope, factor, latent=config.kind in _LATENT)
    scaling = config.build(RopeScaling, {}, kind=kind, factor=factor, **fields)
    return {**found, "rope_scaling": scaling}


def _yarn_scales(rope: _ConfigKeys, factor: float, latent: bool) -> dict[str, float]:
    """Return YaRN's factors of q and k, and DeepSeek's of the softmax."""
    both = rope.data.get("mscale") and rope.data.get("mscale_all_dim")
    share = grown(factor, rope.number("mscale", 1.0))
    by = rope.number("mscale_all_dim", 1.0)
    whole = grown(factor, by) if rope.data.get("mscale_all_dim") else 1.0
    rotary = rope.number("attention_factor", share / whole if both else grown(factor))
    return {"rotary_scale": rotary, "softmax_scale": whole**2 if latent else 1.0}


def grown(factor: float, by: float = 1.0) -> float:
    """Return YaRN's factor for q and k, which makes logits grow with the context length (Peng et
    al. 2023, 3.4)."""
    return 0.1 * by * math.log(max(factor, 1.0)) + 1.0


def _mla(config: _ConfigKeys) -> Mla:
    if "q_lora_rank" not in config.data:
        raise config.error("q_lora_rank", "must be given, or null for a q in one product")
    whole = config.data["q_lora_rank"] is None
    return Mla(
        q_lora_rank=None if whole else config.size("q_lora_rank"),
        kv_lora_rank=config.size("kv_lora_rank"),
        nope_head_dim=config.size("qk_nope_head_dim"),
        rope_head_dim=config.size("qk_rope_head_dim"),
        v_head_dim=config.size("v_head_dim"),
    )


def _dense(config: _ConfigKeys) -> None:
    return None


def _mixtral(config: _ConfigKeys) -> Experts:
    return config.experts("num_local_experts", ffn=config.size("intermediate_size"))


def _qwen(config: _ConfigKeys) -> Experts:
    if config.size("decoder_sparse_step", 1) != 1:
        raise config.error("decoder_sparse_step", "experts in some layers only are not known")
    dense = config.data.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise config.error("mlp_only_layers", "must be a list of the first layers")
    shared = config.kind == "qwen2_moe"
    return config.experts(
        "num_local_experts" if "num_local_experts" in config.data else "num_experts",  # v5, v4
        ffn=config.size("moe_intermediate_size"),
        shared_ffn=config.size("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
        first_dense=len(dense),
        normalized=config.flag("norm_topk_prob", False),
    )


def _olmoe(config: _ConfigKeys) -> Experts:
    config.only("head_dim", config.size("hidden_size") // config.size("num_attention_heads"))
    return config.experts(
        "num_experts" if "num_experts" in config.data else "num_local_experts",
        ffn=config.size("intermediate_size"),
        normalized=config.flag("norm_topk_prob", False),
    )


def _deepseek(config: _ConfigKeys) -> Experts:
    width, is_v3 = config.size("moe_intermediate_size"), config.kind == "deepseek_v3"
    config.only("scoring_func", "sigmoid" if is_v3 else "softmax")
    config.only("topk_method", *(["noaux_tc"] if is_v3 else ["greedy", "group_limited_greedy"]))
    if not is_v3:  # transformers ignores it, DeepSeek's own model does not
        config.only("norm_topk_prob", False)
    is_greedy = not is_v3 and config.data.get("topk_method") in (None, "greedy")
    groups = 1 if is_greedy else config.size("n_group", 1)
    config.only("moe_layer_freq", 1)  # transformers ignores it
    if "n_shared_experts" not in config.data:
        raise config.error("n_shared_experts", "give it; null is none")
    return config.experts(
        "n_routed_experts",
        ffn=width,
        shared_ffn=width * config.size("n_shared_experts", 0, least=0),
        first_dense=config.size("first_k_dense_replace", least=0),
        router_bias=is_v3,
        normalized=is_v3 and config.flag("norm_topk_prob", True),
        routed_scale=config.number("routed_scaling_factor", 2.5 if is_v3 else 1.0),
        groups=groups,
        top_groups=config.size("topk_group", 1) if groups > 1 else 1,
    )


_LATENT = ("deepseek_v2", "deepseek_v3")
_GEMMAS = ("gemma", "gemma2", "gemma3_text")
_HEADS_DERIVED = ("llama", "phi3", "olmo2", "olmoe", "granite")
_NORM_EPS = dict.fromkeys(("mixtral", "phi3", "olmo2", "olmoe"), 1e-5)
_SCALES = {"granite": _granite, **dict.fromkeys(_GEMMAS, _gemma)}
_BOTH = {"activation": "gelu", "norms": "both"}
_SHAPES: dict[str, dict[str, str]] = {
    "olmo2": {"norms": "after", "qk_norm_over": "projection"},
    "olmoe": {"qk_norm_over": "projection"},
    "gemma": {"activation": "gelu"}, "gemma2": _BOTH, "gemma3_text": _BOTH,
}  # fmt: skip
# The default window, and a function that says whether a layer has it if there are no layer_types
# (None: all layers have it). Qwen's types ask use_sliding_window first.
_WINDOWS: dict[str, tuple[int | None, Callable[[_ConfigKeys, int], bool] | None]] = {
    "mistral": (4096, None), "mixtral": (None, None), "phi3": (None, None),
    "qwen3_moe": (4096, None),
    **dict.fromkeys(
        ("qwen2", "qwen3"), (4096, lambda c, i: i >= c.size("max_window_layers", 28, least=0))
    ),
    "qwen2_moe": (4096, lambda c, i: i % 2 == 0 and i < c.size("max_window_layers", 28, least=0)),
    "gemma2": (4096, lambda c, i: i % 2 == 0),
    "gemma3_text": (4096, lambda c, i: (i + 1) % c.size("sliding_window_pattern", 6) > 0),
}  # fmt: skip
# Types that no module here computes: the keys that an error names, and the reason.
_REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "gpt_oss": (("swiglu_limit",), "attention sinks and a clamped SwiGLU are not computed; "
                "measure lists the operations of gpt-oss-120b"),
    "llama4_text": (("attention_chunk_size", "no_rope_layers"), "attention in chunks, layers "
                    "without positions and scaled inputs of experts are not computed; measure "
                    "lists the operations of llama-4-maverick"),
    "gpt_neox": (("use_parallel_residual", "rotary_pct"), "parallel residuals, LayerNorm and "
                 "heads that turn in part are not computed"),
    "llama4": ((), "vision_config is not computed; give its text_config as a file of its own"),
    "gemma3": ((), "vision_config is not computed; give its text_config as a file of its own"),
}  # fmt: skip
# keys that change what some model types compute, with the values that change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_experts": (0,), "num_local_experts": (0,), "n_routed_experts": (0,),
    "kv_lora_rank": (), "partial_rotary_factor": (1,), "attention_chunk_size": (),
    "no_rope_layers": ([],), "no_rope_layer_interval": (), "clip_qkv": (), "index_topk": (),
    "use_bidirectional_attention": (False,), "attn_logit_softcapping": (),
    "final_logit_softcapping": (), "query_pre_attn_scalar": (), "attention_multiplier": (),
    "embedding_multiplier": (1,), "residual_multiplier": (1,), "logits_scaling": (1,),
    "sliding_window": (), "is_causal": (True,),
}  # fmt: skip
_KINDS = {
    "llama": _dense, "mistral": _dense, "qwen2": _dense, "qwen3": _dense, "gemma": _dense,
    "phi3": _dense, "olmo2": _dense, "granite": _dense, "gemma2": _dense, "gemma3_text": _dense,
    "olmoe": _olmoe, "mixtral": _mixtral, "qwen2_moe": _qwen, "qwen3_moe": _qwen,
    "deepseek_v2": _deepseek, "deepseek_v3": _deepseek,
}  # fmt: skip
