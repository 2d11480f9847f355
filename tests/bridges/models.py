"""Small models of each type that the bridges are tested with, as transformers' configurations."""

import json
from pathlib import Path
from typing import Any

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

DEEP = {"llama-deep": (LlamaConfig(**SMALL | {"num_hidden_layers": 4}), "LlamaForCausalLM")}

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
# what trainer and server have otherwise than MODELS, and the line that says so
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "llama@vocabulary": (
        {}, {"vocab_size": 300},
        "vocab_size: 250 in the trainer's configuration, 300 in the server's",
    ),
    "llama@heads": (  # of equal shapes
        {}, {"num_attention_heads": 8, "head_dim": 8, "num_key_value_heads": 4},
        "num_attention_heads: 4 in the trainer's configuration, 8 in the server's",
    ),
    "llama@tied": (
        {}, {"tie_word_embeddings": True},
        "tie_word_embeddings: False in the trainer's configuration, True in the server's",
    ),
    "llama@layers": (
        {}, {"num_hidden_layers": 3},
        "num_hidden_layers: 2 in the trainer's configuration, 3 in the server's",
    ),
    "llama@quantised": (
        WIDE, WIDE | {"quantization_config": BLOCKS},
        "self_attn.o_proj.weight: bf16 in the trainer, fp8 in the server; quantised weights have "
        "scales",
    ),
}  # fmt: skip


def written(name: str, folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """Write a model's config.json, as vLLM reads it; return its folder. In ``llama@tp`` the way
    stands behind the model, see ``trainer.sharded`` and ``megatron_model.made``."""
    config, architecture = (MODELS | DEEP)[name.partition("@")[0]]
    config.architectures = [architecture]
    config.save_pretrained(folder / name)
    path = folder / name / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (changes or {})))
    return folder / name
