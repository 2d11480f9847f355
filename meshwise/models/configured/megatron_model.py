"""Models as Megatron-LM's flags, and back. Defaults are those of its parser."""

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from meshwise.models.configured import ConfigValues, named
from meshwise.models.hugging_face import grown
from meshwise.spec import Decoder, Experts, LanguageModel, Mla, Model, RopeScaling

Flags = Iterator[tuple[str, Any]]

# Flag, field of the record, and what the flag is by default; None: it must be given.
_SIZES = (
    ("--num-layers", "layers", None), ("--hidden-size", "hidden", None),
    ("--ffn-hidden-size", "ffn", None), ("--num-attention-heads", "heads", None),
    ("--max-position-embeddings", "max_seq_len", None), ("--vocab-size", "vocab", None),
)  # fmt: skip
_DECODER = (
    ("--swiglu", "gated", False), ("--add-qkv-bias", "qkv_bias", False),
    ("--qk-layernorm", "qk_norm", False), ("--rotary-base", "rope_theta", 1e4),
    ("--norm-epsilon", "norm_eps", 1e-5),
)  # fmt: skip
_MLA = (
    ("--kv-lora-rank", "kv_lora_rank", 32), ("--qk-head-dim", "nope_head_dim", 128),
    ("--qk-pos-emb-head-dim", "rope_head_dim", 64), ("--v-head-dim", "v_head_dim", 128),
)  # fmt: skip
_EXPERTS = (
    ("--num-experts", "num_experts", None), ("--moe-ffn-hidden-size", "ffn", None),
    ("--moe-router-topk", "top_k", 2), ("--moe-shared-expert-gate", "shared_gate", False),
    ("--moe-router-topk-scaling-factor", "routed_scale", 1.0),
    ("--moe-router-num-groups", "groups", 1), ("--moe-router-group-topk", "top_groups", 1),
)  # fmt: skip
_Table = tuple[tuple[str, str, Any], ...]


def flags_of(model: LanguageModel) -> Flags:
    """Yield a model's flags; True is a switch, False and None are none."""
    yield from _said(model, _SIZES)
    if isinstance(model, Decoder):
        yield from _of_decoder(model)
    if (experts := model.experts) is None:
        return
    yield from _said(experts, _EXPERTS)
    dense, where = experts.first_dense, [int(experts.are_in(i)) for i in range(model.layers)]
    pattern = f"([0]*{dense}+[1]*{model.layers - dense})" if experts.every == 1 else str(where)
    yield "--moe-layer-freq", pattern.replace(" ", "") if dense else experts.every
    yield "--moe-shared-expert-intermediate-size", experts.shared_ffn or None
    yield "--moe-grouped-gemm", True
    yield "--moe-router-score-function", "sigmoid" if experts.router_bias else None
    yield "--moe-router-enable-expert-bias", experts.router_bias
    yield "--moe-router-pre-softmax", not (experts.normalized or experts.router_bias)


def _said(record: msgspec.Struct, table: _Table) -> Flags:
    values = ((flag, getattr(record, field), usual) for flag, field, usual in table)
    yield from ((flag, value) for flag, value, usual in values if value != usual)


def _of_decoder(model: Decoder) -> Flags:
    yield "--normalization", "RMSNorm"
    yield "--position-embedding-type", "rope"
    yield from _said(model, _DECODER)
    yield "--untie-embeddings-and-output-weights", not model.tied
    yield "--disable-bias-linear", not model.mlp_bias
    scaling, mla = model.rope_scaling, model.mla
    if mla is None:
        yield "--kv-channels", model.head_dim
        yield "--group-query-attention", model.kv_heads != model.heads
        yield "--num-query-groups", model.kv_heads if model.kv_heads != model.heads else None
    else:
        yield "--multi-latent-attention", True
        yield "--q-lora-rank", mla.q_lora_rank
        yield from _said(mla, _MLA)
        yield "--rope-type", scaling.kind if scaling else "rope"
    if scaling is None:
        return
    if mla is not None:
        yield "--rotary-scaling-factor", scaling.factor
        by = (math.sqrt(scaling.softmax_scale) - 1) / (grown(scaling.factor) - 1)
        yield from zip(("--mscale", "--mscale-all-dim"), [round(by, 6)] * 2, strict=True)
    elif scaling.kind == "llama3":
        yield "--use-rope-scaling", True
        yield "--rope-scaling-factor", scaling.factor
    elif scaling.kind == "linear":
        yield "--rotary-seq-len-interpolation-factor", int(scaling.factor)


def _given(given: ConfigValues, table: _Table, **usual: Any) -> dict[str, Any]:
    """Return the fields of a table. ``usual``: defaults that depend on other flags."""
    found = dict[str, Any]()
    for flag, field, default in table:
        kind = type(default)
        default = usual.get(field, default)
        read: Any = {bool: given.flag, float: given.number}.get(kind, given.count)
        found[field] = read(flag, default)
    return found


def model_of(given: ConfigValues, seq_len: int, notes: list[str]) -> LanguageModel:
    """Return the model of flags, by the catalogue's name if it has one. ``notes`` gets what is
    planned otherwise."""
    hidden, swiglu = given.count("--hidden-size"), given.flag("--swiglu")
    given.count("--num-layers", most=10_000)
    shared = _given(
        given, _SIZES,
        ffn=int(8 * hidden / 3 / 64) * 64 if swiglu else 4 * hidden,
        vocab=given.get("--padded-vocab-size"), max_seq_len=seq_len,
    )  # fmt: skip
    if given.get("--num-experts") is not None:
        shared["experts"] = _experts(given, shared["layers"], shared["ffn"], notes)
    norm = given.word("--normalization", "LayerNorm", ("LayerNorm", "RMSNorm"))
    rotary = given.flag("--use-rotary-position-embeddings")
    places = given.get("--position-embedding-type", "rope" if rotary else "learned_absolute")
    own = ("--swiglu", "--untie-embeddings-and-output-weights", "--disable-bias-linear",
           "--qk-layernorm", "--group-query-attention", "--multi-latent-attention")  # fmt: skip
    plain = norm == "LayerNorm" and places == "learned_absolute"
    if plain and not any(map(given.flag, own)) and given.get("--kv-channels") is None:
        return named(Model(**shared))
    if norm == "LayerNorm":
        notes.append("--normalization LayerNorm: planned as RMSNorm")
    if places not in ("rope", "yarn"):
        notes.append(f"--position-embedding-type {places}: planned as rope")
    return named(_decoder(given, shared))


def _decoder(given: ConfigValues, shared: dict[str, Any]) -> Decoder:
    biased, heads = not given.flag("--disable-bias-linear"), shared["heads"]
    grouped, mla, scaling = given.flag("--group-query-attention"), None, None
    if given.flag("--multi-latent-attention"):
        rank = given.get("--q-lora-rank") and given.count("--q-lora-rank")
        mla = Mla(q_lora_rank=rank, **_given(given, _MLA))
        factor, grouped = given.number("--rotary-scaling-factor", 1.0), False
        if given.get("--rope-type", "yarn") == "yarn" and factor > 1:
            scale = grown(factor, given.number("--mscale-all-dim", 0.0))
            scaling = RopeScaling(
                kind="yarn", factor=factor, original_max_seq_len=4096, fast=32.0,
                rotary_scale=grown(factor, given.number("--mscale", 1.0)) / scale,
                softmax_scale=scale**2,
            )  # fmt: skip
    elif given.flag("--use-rope-scaling"):
        factor = given.number("--rope-scaling-factor", 8.0)
        scaling = RopeScaling(kind="llama3", factor=factor, original_max_seq_len=8192)
    elif given.get(linear := "--rotary-seq-len-interpolation-factor") is not None:
        scaling = RopeScaling(kind="linear", factor=given.number(linear, 1.0))
    width = mla.nope_head_dim + mla.rope_head_dim if mla else shared["hidden"] // heads or 1
    fields = shared | _given(given, _DECODER)
    fields["qkv_bias"] |= biased
    return Decoder(
        **fields,
        kv_heads=given.count("--num-query-groups", 1) if grouped else heads,
        head_dim=width if mla else given.count("--kv-channels", width),
        tied=not given.flag("--untie-embeddings-and-output-weights"),
        out_bias=biased,
        mlp_bias=biased,
        rope_scaling=scaling,
        mla=mla,
    )


def _experts(given: ConfigValues, layers: int, ffn: int, notes: list[str]) -> Experts:
    score = given.get("--moe-router-score-function", "softmax")
    biased = given.flag("--moe-router-enable-expert-bias")
    if (score != "softmax") != biased:
        notes.append(f"--moe-router-score-function {score}: planned with a bias if it is sigmoid")
    where = _where(str(given.get("--moe-layer-freq", 1)), layers)
    first, *others = [layer for layer in range(layers) if where[layer]] or [0]
    every = others[0] - first if others else first or layers
    if where != [layer >= first and layer % every == 0 for layer in range(layers)]:
        raise ValueError("--moe-layer-freq: only every nth layer behind dense ones is planned")
    shared = given.get("--moe-shared-expert-intermediate-size", 0)
    return Experts(
        **_given(given, _EXPERTS, ffn=ffn),
        shared_ffn=shared and given.count("--moe-shared-expert-intermediate-size"),
        first_dense=first,
        every=every,
        router_bias=score != "softmax",
        normalized=score != "softmax" or not given.flag("--moe-router-pre-softmax"),
    )


def _where(pattern: str, layers: int) -> list[bool]:
    """Return which layers have experts: every nth, or a pattern as ([0]*3+[1]*58)."""
    if pattern.isdecimal() and int(pattern):
        return [layer % int(pattern) == 0 for layer in range(layers)]
    found = unrolled(pattern.translate({ord("["): "(", ord("]"): ")"}))
    if len(found) != layers or set(found) - set("01"):
        raise ValueError(
            f"--moe-layer-freq = {pattern!r}: must be a number, or a 0 or 1 for each of {layers} "
            "layers, as ([0]*3+[1]*58)"
        )
    return [one == "1" for one in found]


def unrolled(pattern: str) -> str:
    """Write out what a pattern repeats, as (ab)*2 and a*3; commas and + mean nothing."""
    found = re.sub(r"[\s,+]", "", pattern)
    for rule in (r"\(([^()]*)\)(?:\*(\d{1,5}))?", r"(.)\*(\d{1,5})"):
        while one := re.search(rule, found):
            times = int(one[2] or 1)
            if len(found) + len(one[1]) * times > 30_000:
                raise ValueError(f"{pattern!r:.80}: repeats more than any model has layers")
            found = found[: one.start()] + one[1] * times + found[one.end() :]
    return found
