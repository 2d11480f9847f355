"""The two configuration files of Primus' operator benchmarks, read unchanged, and its lists.

benchmark/kernel/gemm/model_configs.json is a list of models in Hugging Face's terms without the
number of layers; benchmark/kernel/attention/attention_shapes.json a list of attention shapes. Whose
messages its collectives are, and of how many tokens, its scripts say (benchmark/kernel/rccl).
"""

from pathlib import Path
from typing import Any, NamedTuple

from meshwise import store
from meshwise.models import hugging_face
from meshwise.spec import Decoder

# Models of the catalogue with the tokens of a sequence: of tensor and pipeline parallelism, and to
# the experts.
COLLECTIVES = (
    ("llama-2-7b", 4096), ("llama-2-70b", 4096), ("llama-3-8b", 8192), ("llama-3-70b", 8192),
    ("deepseek-v2-lite", 4096), ("deepseek-v2", 4096), ("deepseek-v3", 8192),
    ("mixtral-8x22b", 8192),
)  # fmt: skip
ALL_TO_ALL = (
    ("deepseek-v2-lite", 4096), ("deepseek-v2", 4096), ("deepseek-v3", 4096),
    ("mixtral-8x7b", 4096), ("mixtral-8x22b", 4096), ("gpt-oss-120b", 4096),
    ("qwen3-235b-a22b", 4096), ("qwen3-235b-a22b", 32768), ("llama-4-maverick", 1_048_576),
)  # fmt: skip
_SIZES = ("seqlen", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_DENSE = (*_SIZES, "num_key_value_heads", "head_dim")
_LATENT = (
    *_SIZES, "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "moe_intermediate_size", "num_experts_per_tok", "n_routed_experts", "n_shared_experts",
)  # fmt: skip


class AttentionShape(NamedTuple):
    model: str
    seqlen_q: int
    seqlen_kv: int
    num_head_q: int
    num_head_kv: int
    head_dim_qk: int
    head_dim_v: int
    causal: bool


def read_models(path: Path | str) -> dict[str, tuple[Decoder, int]]:
    """Name -> (one layer of the model, sequence length). An entry with ``kv_lora_rank`` is a
    DeepSeek with experts; every other is dense, also the Mixtrals, as the file has it."""
    found: dict[str, tuple[Decoder, int]] = {}
    for name, entry, source in _entries(path):
        latent = "kv_lora_rank" in entry
        _require(entry, _LATENT if latent else _DENSE, source)
        _positive(entry, "seqlen", source)
        if name in found:
            raise ValueError(f"{source}: model is named twice; give each entry its own name")
        seq_len = entry["seqlen"]
        config = entry | {
            "model_type": "deepseek_v2" if latent else "llama",
            "num_hidden_layers": 1,
            "first_k_dense_replace": 0,
            "max_position_embeddings": seq_len,
        }
        found[name] = hugging_face.decoder(config, name, source), seq_len
    return found


def read_attention_shapes(path: Path | str) -> list[AttentionShape]:
    """The shapes in the file's order."""
    found = []
    for _, entry, source in _entries(path):
        _require(entry, AttentionShape._fields, source)
        for key in AttentionShape._fields[1:-1]:
            _positive(entry, key, source)
        if not isinstance(entry["causal"], bool):
            raise ValueError(f"{source}: causal = {entry['causal']!r}: must be true or false")
        if entry["num_head_q"] % entry["num_head_kv"]:
            kv, q = entry["num_head_kv"], entry["num_head_q"]
            raise ValueError(f"{source}: num_head_kv = {kv}: must divide num_head_q = {q}")
        found.append(AttentionShape(**{key: entry[key] for key in AttentionShape._fields}))
    return found


def _entries(path: Path | str) -> list[tuple[str, dict[str, Any], str]]:
    """(name, entry, how errors call it) of a list of objects."""
    entries: list[Any] = store.read(path, list)
    if not entries:
        raise ValueError(f"{path}: the list is empty; name at least one model")
    found = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: entry {number} = {entry!r}: must be an object")
        name = entry.get("model")
        if not isinstance(name, str) or not name:
            raise ValueError(f"{path}: entry {number}: model is missing; give its name")
        found.append((name, entry, f"{path}: entry {number} ({name})"))
    return found


def _require(entry: dict[str, Any], keys: tuple[str, ...], source: str) -> None:
    missing = [key for key in keys if key not in entry]
    if missing:
        raise ValueError(f"{source}: {', '.join(missing)} missing; see Primus' file for its keys")


def _positive(entry: dict[str, Any], key: str, source: str) -> None:
    value = entry[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{source}: {key} = {value!r}: must be a whole number >= 1")
