"""Models by name, and the default model and workload.

Sizes of the GPT family from gpt-125m on: Alpa's table (OSDI'22, table 5; benchmark/alpa
suite_manual_gpt.py), sequence 1024, vocabulary 51200. Parameters here include biases, norms and
positions, which Alpa's formula leaves out. gpt-30m is for machines without an accelerator. The moe
family comes from the same table (suite_manual_moe.py; vocabulary 32000), as the suites run it:
layers 0, 2, 4 and so on have experts, and each token goes to two. The Wide-ResNets come from it,
too (suite_wresnet.py).
Sizes of the decoders: their published config.json files (meta-llama, mistralai, deepseek-ai, Qwen,
openai on Hugging Face). DeepSeek-V3 comes without the head that predicts a second token.
gpt-oss-120b and llama-4-maverick are listed, not computed: ``_LISTED`` says why. Their sizes are
the defaults of transformers 5.23. Three of Maverick's were not compared with its file: its 128
experts, their place in every second layer (counted here from the first), and its positions.
"""

import difflib
from pathlib import Path
from typing import Any

from meshwise import store
from meshwise.models import hugging_face
from meshwise.spec import (
    AnyModel,
    Cluster,
    Decoder,
    Experts,
    Mla,
    Model,
    RopeScaling,
    WideResNet,
    Workload,
)

_GPT = {  # hidden, layers, heads
    "gpt-30m": (384, 6, 6),
    "gpt-125m": (768, 12, 12),
    "gpt-350m": (1024, 24, 16),
    "gpt-760m": (1536, 24, 16),
    "gpt-1.3b": (2048, 24, 32),
    "gpt-2.6b": (2560, 32, 32),
    "gpt-6.7b": (4096, 32, 32),
    "gpt-15b": (5120, 48, 40),
    "gpt-39b": (8192, 48, 64),
    "gpt-76b": (10240, 60, 80),
}

_MOE = {  # hidden, layers, num_experts; 16 heads, feed-forwards of 8 * hidden
    "moe-380m": (768, 8, 8),
    "moe-690m": (768, 8, 16),
    "moe-1.3b": (768, 16, 16),
    "moe-2.4b": (1024, 16, 16),
    "moe-7.1b": (1280, 16, 32),
    "moe-10b": (1536, 16, 32),
    "moe-27b": (2048, 16, 48),
    "moe-70b": (2048, 32, 64),
    "moe-140b": (2048, 32, 128),
}

_DECODERS = {  # hidden, layers, heads, kv_heads, ffn, vocab, max_seq_len
    "llama-2-7b": (4096, 32, 32, 32, 11008, 32000, 4096),
    "llama-2-70b": (8192, 80, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": (4096, 32, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": (8192, 80, 64, 8, 28672, 128256, 8192),
    "llama-3.1-8b": (4096, 32, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": (8192, 80, 64, 8, 28672, 128256, 131072),
    "llama-3.1-405b": (16384, 126, 128, 8, 53248, 128256, 131072),
    "mixtral-8x7b": (4096, 32, 32, 8, 14336, 32000, 32768),
    "mixtral-8x22b": (6144, 56, 48, 8, 16384, 32000, 65536),
    "deepseek-v2-lite": (2048, 27, 16, 16, 10944, 102400, 163840),
    "deepseek-v2": (5120, 60, 128, 128, 12288, 102400, 163840),
    "deepseek-v3": (7168, 61, 128, 128, 18432, 129280, 163840),
    "qwen3-235b-a22b": (4096, 94, 64, 4, 12288, 151936, 40960),
    "gpt-oss-120b": (2880, 36, 64, 8, 2880, 201088, 131072),
    "llama-4-maverick": (5120, 48, 40, 8, 16384, 202048, 1048576),
}
_EXPERTS = {  # num_experts, top_k, ffn, shared_ffn, first_dense, routed_scale, groups, top_groups
    "mixtral-8x7b": (8, 2, 14336, 0, 0, 1.0, 1, 1),
    "mixtral-8x22b": (8, 2, 16384, 0, 0, 1.0, 1, 1),
    "deepseek-v2-lite": (64, 6, 1408, 2 * 1408, 1, 1.0, 1, 1),
    "deepseek-v2": (160, 6, 1536, 2 * 1536, 1, 16.0, 8, 3),
    "deepseek-v3": (256, 8, 2048, 2048, 3, 2.5, 8, 4),
    "qwen3-235b-a22b": (128, 8, 1536, 0, 0, 1.0, 1, 1),
    "gpt-oss-120b": (128, 4, 2880, 0, 0, 1.0, 1, 1),
    "llama-4-maverick": (128, 1, 8192, 8192, 0, 1.0, 1, 1),
}
_SHAPES: dict[str, dict[str, Any]] = {  # fields that differ from the other decoders
    "qwen3-235b-a22b": {"head_dim": 128, "qk_norm": True},
    "gpt-oss-120b": {
        "head_dim": 64, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "window": 128,
        "full_layers": tuple(range(1, 36, 2)),
        "more_weights": (("sinks", 64), ("router.logit_bias", 128)),
    },
}  # fmt: skip
_LISTED = {  # models that nn/ does not compute, and why
    "gpt-oss-120b": "its attention has sinks, its experts a clamped SwiGLU, its router biases",
    "llama-4-maverick": "it attends in chunks of 8,192 tokens, some layers have no positions, and "
    "scores multiply what experts read",
}
_LLAMA_3_1 = RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=8192)


def _yarn(mscale: float) -> RopeScaling:
    """Return DeepSeek's YaRN scaling, from 4096 to 163,840 tokens."""
    scale = hugging_face.grown(40.0, mscale) ** 2
    return RopeScaling(
        kind="yarn", factor=40.0, original_max_seq_len=4096, fast=32.0, softmax_scale=scale
    )


_NUMBERS = {  # by the first prefix that matches a name: rope_theta, norm_eps, rope_scaling
    "llama-2": (1e4, 1e-5, None),
    "llama-3.1": (5e5, 1e-5, _LLAMA_3_1),
    "llama-3": (5e5, 1e-5, None),
    "mixtral": (1e6, 1e-5, None),
    "deepseek-v2": (1e4, 1e-6, _yarn(0.707)),
    "deepseek-v3": (1e4, 1e-6, _yarn(1.0)),
    "qwen3": (1e6, 1e-6, None),
    "gpt-oss": (1.5e5, 1e-5, None),
    "llama-4": (5e5, 1e-5, None),
}
_Q_LORA_RANK = {"deepseek-v2-lite": None, "deepseek-v2": 1536, "deepseek-v3": 1536}

_WIDE_RESNETS = {  # blocks, channels, width_factor
    "wresnet-250m": ((3, 4, 6, 3), 160, 2),
    "wresnet-500m": ((3, 4, 6, 3), 224, 2),
    "wresnet-1b": ((3, 4, 6, 3), 320, 2),
    "wresnet-2b": ((3, 4, 6, 3), 448, 2),
    "wresnet-4b": ((3, 4, 6, 3), 640, 2),
    "wresnet-6.8b": ((3, 4, 6, 3), 320, 16),
    "wresnet-13b": ((3, 4, 23, 3), 320, 16),
}


def names() -> tuple[str, ...]:
    """Return the names of the dense GPTs."""
    return tuple(_GPT)


def decoder_names() -> tuple[str, ...]:
    """Return the names of the decoders, including those that are only listed."""
    return tuple(_DECODERS)


def all_names() -> tuple[str, ...]:
    """Return the names of the models that can be trained, of every family."""
    computed = (name for name in _DECODERS if name not in _LISTED)
    return (*_GPT, *_MOE, *computed, *_WIDE_RESNETS)


def find(model: AnyModel | str) -> Model | Decoder:
    """Find a language model by name, or by the path of a Hugging Face config.json or its folder; a
    record is itself. An unknown name is a ValueError that suggests the nearest."""
    found = find_any(model)
    if isinstance(found, WideResNet):
        raise ValueError(f"model {found.name or model!r}: is an image model; name a language model")
    return found


def find_any(text: AnyModel | str) -> AnyModel:
    """Find a model of any family, as ``find`` does."""
    if not isinstance(text, str):
        if not isinstance(text, AnyModel):
            raise ValueError(f"model = {text!r:.80}: must be a model's name or record")
        return text
    if text in _GPT:
        return get(text)
    if text in _MOE:
        return _moe(text)
    if text in _DECODERS:
        return _decoder(text)
    if text in _WIDE_RESNETS:
        blocks, channels, width_factor = _WIDE_RESNETS[text]
        return WideResNet(name=text, blocks=blocks, channels=channels, width_factor=width_factor)
    if text.lstrip().startswith("{"):
        return _record(store.parse(text, dict, "model"), "model")
    if "/" in text or text.endswith(".json") or Path(text).is_dir():
        fields = {} if Path(text).is_dir() else store.read(text, dict)
        return _record(fields, text) if "family" in fields else hugging_face.read_config(text)
    known = (*all_names(), *_LISTED)
    near = difflib.get_close_matches(text, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    raise ValueError(f"model {text!r} is neither in the catalogue nor a config.json; {hint}")


def _record(fields: dict[str, Any], source: str) -> AnyModel:
    """Read one of our model records from its JSON fields."""
    every: tuple[type[AnyModel], ...] = (Model, Decoder, WideResNet)
    kinds = {str(kind.__struct_config__.tag): kind for kind in every}
    family = fields.get("family")
    if not isinstance(family, str) or family not in kinds:
        raise ValueError(f"{source}: family = {family!r}: must be one of {', '.join(kinds)}")
    return store.convert(fields, kinds[family], source)


def _moe(name: str) -> Model:
    hidden, layers, num_experts = _MOE[name]
    ffn = 8 * hidden
    return Model(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=16,
        ffn=ffn,
        vocab=32000,
        experts=Experts(num_experts=num_experts, top_k=2, ffn=ffn, every=2),
    )


def _decoder(name: str) -> Decoder:
    hidden, layers, heads, kv_heads, ffn, vocab, max_seq_len = _DECODERS[name]
    experts = mla = None
    if name in _EXPERTS:
        num_experts, top_k, width, shared_ffn, first_dense, scale, groups, best = _EXPERTS[name]
        experts = Experts(
            num_experts=num_experts,
            top_k=top_k,
            ffn=width,
            shared_ffn=shared_ffn,
            first_dense=first_dense,
            every=2 if name == "llama-4-maverick" else 1,
            router_bias=name == "deepseek-v3",
            normalized=not name.startswith("deepseek-v2"),
            routed_scale=scale,
            groups=groups,
            top_groups=best,
        )
    if name in _Q_LORA_RANK:
        rank = _Q_LORA_RANK[name]
        mla = Mla(
            q_lora_rank=rank, kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128
        )
    numbers = next(numbers for start, numbers in _NUMBERS.items() if name.startswith(start))
    rope_theta, norm_eps, rope_scaling = numbers
    shapes = {"head_dim": 192 if mla else hidden // heads} | _SHAPES.get(name, {})
    return Decoder(
        **shapes,
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        max_seq_len=max_seq_len,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=norm_eps,
        mla=mla,
        experts=experts,
        not_computed=_LISTED.get(name, ""),
    )


def get(name: str) -> Model:
    """Return the GPT called ``name``. An unknown name raises a ValueError that suggests the
    nearest."""
    if name not in _GPT:
        near = difflib.get_close_matches(name, _GPT, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_GPT)}"
        raise ValueError(f"model {name!r} is not in the catalogue; {hint}")
    hidden, layers, heads = _GPT[name]
    return Model(name=name, hidden=hidden, layers=layers, heads=heads, ffn=4 * hidden)


def default_model(cluster: Cluster) -> Model:
    """Return a GPT that fills the cluster. On GPUs it is the largest that trains without sharding
    (18 bytes a parameter) in half of one device's memory. So every degree of sharding fits."""
    if cluster.device.kind == "cpu":
        return get("gpt-30m")
    fitting = [m for m in map(get, _GPT) if 18 * _approximate(m) <= cluster.device.memory_bytes / 2]
    return fitting[-1] if fitting else get("gpt-30m")


def _approximate(model: Model) -> int:
    return 12 * model.layers * model.hidden**2 + model.vocab * model.hidden


def default_workload(cluster: Cluster, model: AnyModel) -> Workload:
    """Return a batch of 32 x 1024 on GPUs (8 sequences per device from 4 devices on) and 8 x 128
    on CPUs. Images count as sequences of length 1."""
    on_cpu, devices = cluster.device.kind == "cpu", cluster.num_devices
    longest = 1 if isinstance(model, WideResNet) else model.max_seq_len
    return Workload(
        global_batch_size=max(8, 2 * devices) if on_cpu else max(32, 8 * devices),
        seq_len=min(128 if on_cpu else 1024, longest),
    )
