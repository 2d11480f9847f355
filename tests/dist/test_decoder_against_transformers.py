"""A decoder computes what Hugging Face's module of the same config.json and weights computes: the
logits, and the gradients of every weight."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from meshwise.models import hugging_face  # noqa: E402
from meshwise.nn import build  # noqa: E402

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 256,
    "head_dim": 16, "initializer_range": 0.3, "use_cache": False, "tie_word_embeddings": False,
    "pad_token_id": None,  # whose row gets no gradient there
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **SIZES, **EXPERTS, "num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 8,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 20, "q_lora_rank": 28,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
}  # fmt: skip


def rope(sizes=SIZES, **parameters):
    return sizes | {"rope_parameters": parameters}


OF_LLAMA = {
    "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
OF_DEEPSEEK = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7, "rope_theta": 500.0,
}  # fmt: skip
UNSIZED = {k: v for k, v in SIZES.items() if k != "head_dim"}
SHARED = EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 40}
WINDOWED = {"use_sliding_window": True, "sliding_window": 24}
OF_QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
IN_GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
CASES = {
    "llama": ("Llama", SIZES | {"rms_norm_eps": 1e-2, "attention_bias": True, "mlp_bias": True}),
    "theta": ("Llama", rope(rope_type="default", rope_theta=300.0)),
    "linear": ("Llama", rope(rope_type="linear", factor=3.0, rope_theta=1e4)),
    "llama 3.1": ("Llama", rope(**OF_LLAMA, rope_theta=5e5)),
    "yarn": ("Qwen3", rope(**OF_QWEN, rope_theta=1e6)),
    "mistral": ("Mistral", SIZES | {"sliding_window": None}),
    "a window": ("Mistral", SIZES | {"sliding_window": 24}),
    "a window of experts": (
        "Mixtral",
        SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    ),
    "windows above": ("Qwen2", UNSIZED | WINDOWED | {"max_window_layers": 1}),
    "windows by type": (
        "Qwen3",
        SIZES | WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "every other window": ("Qwen2Moe", UNSIZED | SHARED | WINDOWED),
    "windows in all": ("Qwen3Moe", SIZES | EXPERTS | WINDOWED | {"num_experts": 8}),
    "phi": ("Phi3", UNSIZED | {"sliding_window": 31}),
    "olmo 2": ("Olmo2", UNSIZED | {"attention_bias": True}),
    "olmoe": ("Olmoe", UNSIZED | {"num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe, normed": (
        "Olmoe",
        UNSIZED | {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "granite": (
        "Granite",
        UNSIZED
        | {"embedding_multiplier": 7.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2}
        | {"logits_scaling": 5.0, "mlp_bias": True, "attention_bias": True},
    ),
    "granite, unscaled": ("Granite", UNSIZED | {"initializer_range": 0.1}),
    "gemma": ("Gemma", SIZES | {"tie_word_embeddings": True}),
    "gemma 2 without caps": (
        "Gemma2",
        SIZES
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 24}
        | {"query_pre_attn_scalar": 30},
    ),
    "gemma 3": (
        "Gemma3Text",
        rope(
            SIZES | {"num_hidden_layers": 7, "sliding_window": 24, "query_pre_attn_scalar": 24},
            full_attention={"rope_type": "linear", "factor": 3.0, "rope_theta": 5e4},
            sliding_attention={"rope_type": "default", "rope_theta": 300.0},
        ),
    ),
    "qwen 2": ("Qwen2", UNSIZED),
    "qwen 3": ("Qwen3", SIZES),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "a gated shared expert": ("Qwen2Moe", UNSIZED | SHARED),
    "experts": ("Qwen3Moe", SIZES | EXPERTS | {"num_experts": 8}),
    "normed": ("Qwen3Moe", SIZES | EXPERTS | {"num_experts": 8, "norm_topk_prob": True}),
    "deepseek 2": ("DeepseekV2", rope(LATENT, **OF_DEEPSEEK) | {"q_lora_rank": None}),
    "deepseek 2 in groups": (
        "DeepseekV2",
        LATENT | IN_GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7},
    ),
    "deepseek 3": (
        "DeepseekV3",
        rope(LATENT, **OF_DEEPSEEK) | IN_GROUPS | {"rope_interleave": False},
    ),
}
BEHIND = ("Olmo2", "Gemma2", "Gemma3Text")  # whose norms are called otherwise
NORMS = {
    "post_attention_layernorm": "post1", "pre_feedforward_layernorm": "norm2",
    "post_feedforward_layernorm": "post2",
}  # fmt: skip
RENAMED = {
    "model.embed_tokens": "embed", "model.norm": "head.norm", "lm_head": "head.projection",
    "model.layers": "layers", "input_layernorm": "norm1", "post_attention_layernorm": "norm2",
    "self_attn.o_proj": "out", "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm", "self_attn.q_proj": "qkv.q",
    "self_attn.k_proj": "qkv.k", "self_attn.v_proj": "qkv.v",
    "self_attn.q_a_proj": "qkv.q_down", "self_attn.q_a_layernorm": "qkv.q_norm",
    "self_attn.q_b_proj": "qkv.q_up", "self_attn.kv_a_proj_with_mqa": "qkv.kv_down",
    "self_attn.kv_a_layernorm": "qkv.kv_norm", "self_attn.kv_b_proj": "qkv.kv_up",
    "mlp.shared_experts.gate_proj": "moe.shared.gate", "mlp.shared_expert_gate": "moe.shared.score",
    "mlp.shared_experts.up_proj": "moe.shared.up", "mlp.shared_expert.up_proj": "moe.shared.up",
    "mlp.shared_experts.down_proj": "moe.shared.down",
    "mlp.shared_expert.gate_proj": "moe.shared.gate",
    "mlp.shared_expert.down_proj": "moe.shared.down",
    "mlp.gate_proj": "gate_up.gate", "mlp.up_proj": "gate_up.up", "mlp.down_proj": "down",
    "mlp.experts.gate_up_proj": "moe.experts.first", "mlp.experts.down_proj": "moe.experts.down",
    "mlp.gate.e_score_correction_bias": "moe.router.bias", "mlp.gate": "moe.router",
}  # fmt: skip


def unpaired(weight, heads, width):
    """Rows that DeepSeek-V2 turns in neighbouring pairs, as halves that turn against each other;
    the last ``width`` of each head."""
    rows = weight.unflatten(0, (heads, -1))
    turned = rows[:, -width:].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([rows[:, :-width], turned], 1).flatten(0, 1)


def parted(name, value, config):
    """Phi 3's fused products apart."""
    if "qkv_proj" in name:
        sizes = [config.num_attention_heads, *[config.num_key_value_heads] * 2]
        rows = [n * config.hidden_size // config.num_attention_heads for n in sizes]
        names = [name.replace("qkv_proj", f"{part}_proj") for part in "qkv"]
        return zip(names, value.split(rows), strict=True)
    if "mlp.gate_up_proj" in name:
        names = [name.replace("gate_up_proj", f"{part}_proj") for part in ("gate", "up")]
        return zip(names, value.chunk(2), strict=True)
    return [(name, value)]


def ours_of(theirs, kind, config):
    """Their weights, or gradients of them, by our names and in our order."""
    found = {}
    every = [each for name, value in theirs.items() for each in parted(name, value, config)]
    for name, value in every:
        if kind == "DeepseekV2" and ("q_proj" in name or "q_b_proj" in name):
            value = unpaired(value, config.num_attention_heads, config.qk_rope_head_dim)
        if kind == "DeepseekV2" and "kv_a_proj" in name:
            value = unpaired(value, 1, config.qk_rope_head_dim)
        for old, new in (RENAMED | (NORMS if kind in BEHIND else {})).items():
            if old in name:
                name = name.replace(old, new)
        if name.endswith("experts.first"):
            value = value.unflatten(1, (2, -1))
        found[name] = value
    return found


def is_near(found, due):
    """Angles up to 200 are of float32."""
    return (found - due).abs().max() <= 1e-4 * due.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case):
    kind, sizes = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **sizes, attn_implementation="eager", experts_implementation="eager"
    )
    theirs = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    for name, value in theirs.state_dict().items():
        if "norm" in name or "bias" in name:
            value.copy_(1.0 * ("norm" in name) + 0.2 * torch.randn(value.shape))
    theirs.double()
    ours = build(hugging_face.decoder(config.to_dict(), "it", "config.json"))
    ours.init_weights(0)
    ours.double()
    weights = ours_of(theirs.state_dict(), kind, config)
    if kind.startswith("Gemma"):  # which multiplies by 1 + w
        weights = {n: x + 1 if "norm" in n or "post" in n else x for n, x in weights.items()}
    ours.load_state_dict(weights)
    tokens = torch.randint(97, (2, 200))
    due, found = theirs(tokens).logits, ours(tokens)
    assert is_near(found, due)
    share = torch.randn(due.shape, dtype=torch.float64)
    gradients = []
    for module, logits in ((theirs, due), (ours, found)):
        (logits * share).sum().backward()
        gradients.append({name: x.grad for name, x in module.named_parameters()})
    due, found = ours_of(gradients[0], kind, config), gradients[1]
    assert due.keys() == found.keys()
    assert [name for name in due if not is_near(found[name], due[name])] == []
