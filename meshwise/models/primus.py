"""Read the two configuration files of Primus' operator benchmarks as they are; list its models.

benchmark/kernel/gemm/model_configs.json lists models in Hugging Face's terms without the number of
layers; benchmark/kernel/attention/attention_shapes.json lists attention shapes. The scripts in
benchmark/kernel/rccl name the models whose messages are sent, and the tokens of a sequence.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwise import store
from meshwise.models import hugging_face
from meshwise.spec import Decoder

# Models of the catalogue, each with the tokens of a sequence. COLLECTIVES: messages of tensor and
# pipeline parallelism. ALL_TO_ALL: messages to experts.
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
    """Return one layer of each model and its sequence length, by name. An entry with
    ``kv_lora_rank`` is a DeepSeek with experts. All others are dense, even the Mixtrals, as in the
    file."""
    found: dict[str, tuple[Decoder, int]] = {}
    for name, entry, source in _entries(path):
        latent = "kv_lora_rank" in entry
        _check(entry, _LATENT if latent else _DENSE, ("seqlen",), source)
        if name in found:
            raise ValueError(f"{source}: model is named twice; give each entry its own name")
        config = entry | {
            "model_type": "deepseek_v2" if latent else "llama",
            "num_hidden_layers": 1,
            "first_k_dense_replace": 0,
            "max_position_embeddings": entry["seqlen"],
        }
        found[name] = hugging_face.decoder(config, name, source), entry["seqlen"]
    return found


def read_attention_shapes(path: Path | str) -> list[AttentionShape]:
    """Return the shapes in the file's order."""
    found = []
    for _, entry, source in _entries(path):
        _check(entry, AttentionShape._fields, AttentionShape._fields[1:-1], source)
        if not isinstance(entry["causal"], bool):
            raise ValueError(f"{source}: causal = {entry['causal']!r}: must be true or false")
        if entry["num_head_q"] % entry["num_head_kv"]:
            kv, q = entry["num_head_kv"], entry["num_head_q"]
            raise ValueError(f"{source}: num_head_kv = {kv}: must divide num_head_q = {q}")
        found.append(AttentionShape(**{key: entry[key] for key in AttentionShape._fields}))
    return found


def _entries(path: Path | str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (name, entry, its name in error messages) for each object of a list."""
    entries: list[Any] = store.read(path, list)
    if not entries:
        raise ValueError(f"{path}: the list is empty; name at least one model")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: entry {number} = {entry!r}: must be an object")
        name = entry.get("model")
        if not isinstance(name, str) or not name:
            raise ValueError(f"{path}: entry {number}: model is missing; give its name")
        yield name, entry, f"{path}: entry {number} ({name})"


def _check(
    entry: dict[str, Any], keys: Sequence[str], positive: Sequence[str], source: str
) -> None:
    """Refuse an entry that lacks one of ``keys``, or whose ``positive`` are no integers >= 1."""
    if missing := [key for key in keys if key not in entry]:
        raise ValueError(f"{source}: {', '.join(missing)} missing; see Primus' file for its keys")
    for key in positive:
        value = entry[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{source}: {key} = {value!r}: must be a whole number >= 1")
