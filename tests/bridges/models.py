"""Small models of each type that the bridges are tested with, as transformers' configurations."""

from pathlib import Path

from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 250, "max_position_embeddings": 128, "head_dim": 16,
}  # fmt: skip
WITHOUT_HEAD_DIM = {name: value for name, value in SMALL.items() if name != "head_dim"}
LATENT = WITHOUT_HEAD_DIM | {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
}  # fmt: skip
MODELS: dict[str, tuple[PretrainedConfig, str]] = {
    "llama": (LlamaConfig(**SMALL), "LlamaForCausalLM"),
    "llama-tied": (LlamaConfig(**SMALL, tie_word_embeddings=True), "LlamaForCausalLM"),
    "mistral": (MistralConfig(**SMALL), "MistralForCausalLM"),
    "qwen2": (Qwen2Config(**WITHOUT_HEAD_DIM, tie_word_embeddings=True), "Qwen2ForCausalLM"),
    "qwen3": (Qwen3Config(**SMALL), "Qwen3ForCausalLM"),
    "gemma2": (Gemma2Config(**SMALL), "Gemma2ForCausalLM"),
    "mixtral": (MixtralConfig(**SMALL, num_local_experts=4), "MixtralForCausalLM"),
    "qwen2-moe": (
        Qwen2MoeConfig(
            **WITHOUT_HEAD_DIM,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
        ),
        "Qwen2MoeForCausalLM",
    ),
    "qwen3-moe": (
        Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
        "Qwen3MoeForCausalLM",
    ),
    "deepseek-v3": (DeepseekV3Config(**LATENT), "DeepseekV3ForCausalLM"),
    "gpt-oss": (
        GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
        "GptOssForCausalLM",
    ),
}


def written(name: str, folder: Path) -> Path:
    """Write a model's config.json, as vLLM reads it; return its folder."""
    config, architecture = MODELS[name]
    config.architectures = [architecture]
    config.save_pretrained(folder / name)
    return folder / name
