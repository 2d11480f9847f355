"""The scenarios of ``refit`` by name, and the layouts that they mean on so many ranks.

In: a name or a number of the menu, and what the user changes of it. Out: scenarios, then one case a
method. Names, models and numbers are those of Megatron's refit benchmarks (``benchmark_refit.py``
and its launchers) where they have one: 4 layers (8 with pipelines) of width 1024, no gating,
untied, vocabulary 50257, fp32. The 8-GPU layouts stand for lists whose layouts are not all
published; ``8b`` and the like are those of the table in ``docs/refit.md``.
"""

import difflib
from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwise.models import catalogue
from meshwise.spec import Decoder, Experts, Mla, Model
from meshwise.spec.op import Dtype
from meshwise.spec.refit import Mode, Order, Scenario, Side
from meshwise.spec.weights import WeightLayout


def _vocab_multiple(order: Order, tp: int) -> int:
    """Embedding and head are padded to multiples of this: 128 x tp by Megatron, 64 by vLLM."""
    return {"megatron": 128 * tp, "engine": lcm(64, tp), "plain": 1}[order]


def _gpt(layers: int = 4, hidden: int = 1024, heads: int = 8, seq_len: int = 512) -> Decoder:
    return Decoder(
        name=f"gpt-{layers}x{hidden}",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=50257,
        max_seq_len=seq_len,
        gated=False,
    )


def _moe() -> Decoder:
    experts = Experts(num_experts=8, top_k=2, ffn=4096)
    return replace(_gpt(), name="moe-4x1024", experts=experts)


def _llama(name: str, experts: Experts | None = None) -> Decoder:
    """A gated decoder: Llama-3.2-1B's sizes, untied."""
    return Decoder(
        name=name, hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192,
        vocab=128256, max_seq_len=131072, experts=experts,
    )  # fmt: skip


def _qwen3_30b() -> Decoder:
    """Qwen3-30B-A3B's published config.json."""
    return Decoder(
        name="moe-30b", hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, ffn=6144,
        vocab=151936, max_seq_len=40960, qk_norm=True,
        experts=Experts(num_experts=128, top_k=8, ffn=768),
    )  # fmt: skip


def _kimi_k2() -> Decoder:
    """Its published config.json (moonshotai on Hugging Face)."""
    mla = Mla(
        q_lora_rank=1536, kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128
    )
    experts = Experts(
        num_experts=384, top_k=8, ffn=2048, shared_ffn=2048, first_dense=1, router_bias=True
    )
    return Decoder(
        name="kimi-k2", hidden=7168, layers=61, heads=64, kv_heads=64, head_dim=192, ffn=18432,
        vocab=163840, max_seq_len=131072, mla=mla, experts=experts,
    )  # fmt: skip


def _side(text: str) -> Side:
    """``tp2 pp2 x3``: degrees, and x replicas."""
    degrees: dict[str, int] = {}
    for word in text.split():
        axis = word.rstrip("0123456789")
        degrees["replicas" if axis == "x" else axis] = int(word[len(axis) :])
    return Side(**degrees)


_SUITE = "Megatron's suite"
_EIGHT = "8 GPUs, chosen for the suite's list"
_FIGURES = "compared with Megatron in docs/refit.md"
_REPLICAS = "replicated: many may send"
_DRY = "for --dry-run"
_8B, _1B, _MOE_30B = catalogue.find("llama-3-8b"), _llama("1.5b"), _qwen3_30b()
_MOE_5B = _llama("moe-5b", Experts(num_experts=32, top_k=4, ffn=1408))
_LARGE = _gpt(16, 4096, 32, 2048)

_TABLE: tuple[tuple[str, str, Model | Decoder, str, str, Mode, Dtype], ...] = (
    ("tp2-tp1", _SUITE, _gpt(), "tp2", "tp1", "collocated", "fp32"),
    ("tp2-tp1-apart", _SUITE, _gpt(), "tp2", "tp1", "non-collocated", "fp32"),
    ("tp1-tp2", _SUITE, _gpt(), "tp1", "tp2", "collocated", "fp32"),
    ("tp2-tp4", _SUITE, _gpt(), "tp2", "tp4", "collocated", "fp32"),
    ("tp2pp2-tp4pp1", _SUITE, _gpt(8), "tp2 pp2", "tp4", "collocated", "fp32"),
    ("tp1pp2-tp2pp1", _SUITE, _gpt(8), "pp2", "tp2", "collocated", "fp32"),
    ("ep2-ep1", _SUITE, _moe(), "ep2", "ep1", "collocated", "fp32"),
    ("ep2-ep4", _SUITE, _moe(), "ep2", "ep4", "collocated", "fp32"),
    ("large", _SUITE, _LARGE, "tp2 pp2", "tp4", "collocated", "fp32"),
    ("8gpu-tp2ep2-tp1ep4", _SUITE, _moe(), "tp2 ep2 etp1", "ep4", "non-collocated", "bf16"),
    ("8gpu-tp2pp2-tp4", _EIGHT, _gpt(8), "tp2 pp2", "tp4", "non-collocated", "bf16"),
    ("8gpu-pp4-tp4", _EIGHT, _gpt(8), "pp4", "tp4", "non-collocated", "bf16"),
    ("8gpu-tp4-tp2x2", _EIGHT, _gpt(8), "tp4", "tp2 x2", "non-collocated", "bf16"),
    ("8gpu-ep4-tp4", _EIGHT, _moe(), "ep4", "tp4", "non-collocated", "bf16"),
    ("8gpu-tp2pp2-tp2", _EIGHT, _gpt(8), "tp2 pp2", "tp2", "non-collocated", "bf16"),
    ("8gpu-tp4x2-tp8", _EIGHT, _gpt(8), "tp4 x2", "tp8", "collocated", "bf16"),
    ("8gpu-tp2pp2x2-tp4x2", _EIGHT, _gpt(8), "tp2 pp2 x2", "tp4 x2", "collocated", "bf16"),
    ("8gpu-tp4ep2-tp2ep4", _EIGHT, _moe(), "tp4 ep2 etp1", "tp2 ep4 etp1", "collocated", "bf16"),
    ("8gpu-tp2pp4-tp8", _EIGHT, _gpt(8), "tp2 pp4", "tp8", "collocated", "bf16"),
    ("16gpu-tp4pp2-tp8", _SUITE, _LARGE, "tp4 pp2 x2", "tp8 x2", "collocated", "bf16"),
    ("32gpu-tp8pp4-tp16pp2", _SUITE, _gpt(32, 8192, 64, 2048), "tp8 pp4", "tp16 pp2", "collocated",
     "bf16"),
    ("dp8-dp8", _REPLICAS, _gpt(), "x8", "x8", "non-collocated", "fp32"),
    ("ep4x16-ep8x8", _REPLICAS, _moe(), "ep4 x4", "ep8", "non-collocated", "fp32"),
    ("fsdp4-tp4", _REPLICAS, _gpt(), "fsdp4", "tp4", "collocated", "fp32"),
    ("8b-tp2-tp1", _FIGURES, _8B, "tp2", "tp1", "collocated", "bf16"),
    ("8b-tp2-tp4", _FIGURES, _8B, "tp2", "tp4", "collocated", "bf16"),
    ("8b-tp2pp2-tp4", _FIGURES, _8B, "tp2 pp2", "tp4", "collocated", "bf16"),
    ("8b-tp2pp2-tp1", _FIGURES, _8B, "tp2 pp2", "tp1", "collocated", "bf16"),
    ("8b-tp2-tp2-apart", _FIGURES, _8B, "tp2", "tp2", "non-collocated", "bf16"),
    ("1.5b-tp2-tp4", _FIGURES, _1B, "tp2", "tp4", "collocated", "bf16"),
    ("1.5b-tp2-tp1", _FIGURES, _1B, "tp2", "tp1", "collocated", "bf16"),
    ("moe-30b-ep2-ep4", _FIGURES, _MOE_30B, "ep2", "ep4", "collocated", "bf16"),
    ("moe-5b-ep2-ep4", _FIGURES, _MOE_5B, "ep2", "ep4", "collocated", "bf16"),
    ("kimi-k2", _DRY, _kimi_k2(), "tp8 ep8", "tp4 ep16", "collocated", "bf16"),
    ("kimi-k2-128", _DRY, _kimi_k2(), "tp8 ep16", "tp4 ep32", "non-collocated", "bf16"),
)  # fmt: skip
SCENARIOS = {
    name: Scenario(
        name=name, about=about, model=model, train=_side(train), infer=_side(infer), mode=mode,
        dtype=dtype,
    )
    for name, about, model, train, infer, mode, dtype in _TABLE
}  # fmt: skip

_BASIC = (
    *("tp2-tp1", "tp2-tp1-apart", "tp1-tp2", "tp2pp2-tp4pp1", "tp1pp2-tp2pp1", "ep2-ep1"),
    "ep2-ep4",
)
MENU: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # scenarios, methods where it says
    **{str(number): ((name,), ()) for number, name in enumerate(_BASIC, 1)},
    "8": (("tp2-tp1",), ("nccl", "nvshmem")),
    "9": (("large",), ()),
    "10": (_BASIC, ()),
}


class Chosen(NamedTuple):
    """``methods``: those that the menu names; () leaves them to the user."""

    scenarios: tuple[Scenario, ...]
    methods: tuple[str, ...]


def find(name: str) -> Chosen:
    """A scenario, or those of a number of the menu; an unknown name suggests the nearest."""
    names, methods = MENU.get(name, ((name,), ()))
    for one in names:
        if one not in SCENARIOS:
            near = difflib.get_close_matches(one, SCENARIOS, n=1)
            hint = f"did you mean {near[0]}?" if near else "`meshwise refit --list` names them all"
            raise ValueError(f"scenario = {one!r}: there is none; {hint}")
    return Chosen(tuple(SCENARIOS[one] for one in names), methods)


def custom() -> Scenario:
    """What degrees and sizes are changed of when no scenario is named."""
    return Scenario(name="custom", about="", model=_gpt(), train=Side(), infer=Side())


def changed(
    scenario: Scenario,
    *,
    model: Model | Decoder | None = None,
    sizes: Mapping[str, Any] | None = None,
    train: Mapping[str, int] | None = None,
    infer: Mapping[str, int] | None = None,
    dtype: Dtype | None = None,
) -> Scenario:
    """The scenario with another model, sizes (see ``resized``), degrees or dtype.

    In a custom one the inference degrees that are not given are the training ones'.
    """
    trained = replace(scenario.train, **train or {})
    served = replace(scenario.infer if scenario.about else trained, **infer or {})
    chosen = model or scenario.model
    return replace(
        scenario,
        model=resized(chosen, **sizes) if sizes else chosen,
        train=trained,
        infer=served,
        dtype=dtype or scenario.dtype,
    )


def resized(model: Model | Decoder, **sizes: Any) -> Decoder:
    """The model with other sizes: fields of ``Decoder``, and num_experts and expert_ffn.

    As in Megatron what follows from others does so unless it is given: head_dim is hidden / heads,
    kv_heads are heads, ffn is 4 x hidden, or with gating 8/3 x hidden down to a multiple of 64.
    """
    if isinstance(model, Model):
        raise ValueError(
            f"model = {model.name!r}: its sizes cannot be changed; leave out the model"
        )
    num_experts, expert_ffn = sizes.pop("num_experts", None), sizes.pop("expert_ffn", None)
    new: dict[str, Any] = {}
    hidden = sizes.get("hidden", model.hidden)
    heads = sizes.get("heads", model.heads)
    if {"hidden", "heads"} & sizes.keys() and model.mla is None:
        if hidden % heads:
            raise ValueError(f"num_attention_heads = {heads}: must divide hidden_size = {hidden}")
        new |= {"head_dim": hidden // heads, "kv_heads": heads}
    if {"hidden", "gated"} & sizes.keys():
        gated = sizes.get("gated", model.gated)
        new["ffn"] = hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden
    chosen = {**new, **sizes}
    if num_experts is not None or expert_ffn is not None:
        count = num_experts or (model.experts.num_experts if model.experts else 0)
        if count < 1:
            raise ValueError(f"moe_ffn_hidden_size = {expert_ffn}: needs --num-experts")
        ffn = expert_ffn or chosen.get("ffn", model.ffn)
        chosen["experts"] = Experts(num_experts=count, top_k=min(2, count), ffn=ffn)
    return replace(model, name="", **chosen)


def num_ranks(scenario: Scenario, mode: Mode) -> int:
    """The number of ranks it takes: both models' when they are apart, else the larger's."""
    train, infer = scenario.train.num_ranks, scenario.infer.num_ranks
    return max(train, infer) if mode == "collocated" else train + infer


def layouts(
    scenario: Scenario,
    mode: Mode,
    world_size: int,
    orders: tuple[Order, Order] = ("megatron", "engine"),
) -> tuple[WeightLayout, WeightLayout]:
    """Both sides' layouts. Collocated models fill the ranks with replicas; of models apart the
    inference ranks come after the training ranks, and ranks beyond those are idle."""
    train, infer = scenario.train.num_ranks, scenario.infer.num_ranks
    needed = num_ranks(scenario, mode)
    if world_size < needed:
        raise ValueError(f"nproc = {world_size}: {scenario.name} {mode} needs {needed} ranks")
    if mode == "non-collocated":
        return (
            _layout(scenario, scenario.train, train, 0, orders[0]),
            _layout(scenario, scenario.infer, infer, train, orders[1]),
        )
    if world_size % train or world_size % infer:
        raise ValueError(
            f"nproc = {world_size}: must be a multiple of {train} (training) and {infer} "
            f"(inference) ranks, as {lcm(train, infer)}"
        )
    return (
        _layout(scenario, scenario.train, world_size, 0, orders[0]),
        _layout(scenario, scenario.infer, world_size, 0, orders[1]),
    )


def _layout(
    scenario: Scenario, side: Side, num_ranks: int, first_rank: int, order: Order
) -> WeightLayout:
    model = scenario.model
    has_experts = isinstance(model, Decoder) and model.experts is not None
    if side.ep > 1 and not has_experts:
        raise ValueError(f"ep = {side.ep}: the model has no experts; give --num-experts")
    return WeightLayout(
        tp=side.tp,
        dp=num_ranks // (side.tp * side.pp),
        pp=side.pp,
        ep=side.ep,
        etp=(side.etp or side.tp) if has_experts else 1,
        fsdp=side.fsdp,
        first_rank=first_rank,
        vocab_multiple=_vocab_multiple(order, side.tp),
        order=order,
        dtype=scenario.dtype,
    )


METHODS = ("nccl", "nvshmem", "gloo", "ipc")


def methods(asked: str, kind: str, menu: Sequence[str] = ()) -> tuple[str, ...]:
    """``all`` is every method that a device of this kind (cuda, cpu) has."""
    if asked == "all":
        return METHODS if kind == "cuda" else ("gloo",)
    if asked not in (*METHODS, "auto"):
        raise ValueError(f"method = {asked!r}: must be one of {', '.join((*METHODS, 'auto'))}, all")
    return tuple(menu) if asked == "auto" and menu and kind == "cuda" else (asked,)
