"""The scenarios of ``refit`` by name, and their layouts on a number of ranks.

In: a name or a number of the menu, and the user's changes. Out: scenarios, their layouts and
methods. ``data/refit.toml`` lists the scenarios.
"""

import difflib
import functools
from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwise import files, store
from meshwise.models import catalogue
from meshwise.spec import Decoder, Experts, Model
from meshwise.spec.op import Dtype
from meshwise.spec.refit import Mode, Scenario, Side
from meshwise.spec.weights import Order, WeightLayout


def _vocab_multiple(order: Order, tp: int) -> int:
    """Return the multiple to which embedding and head are padded: Megatron 128 x tp, vLLM 64."""
    return {"megatron": 128 * tp, "engine": lcm(64, tp)}.get(order, 1)


@functools.cache
def scenarios() -> dict[str, Scenario]:
    """Return all scenarios by name, from ``data/refit.toml``."""
    data = files.own_data("refit.toml")
    found = {}
    for group in data["scenarios"]:
        for name, model, train, infer, mode, dtype in group["listed"]:
            found[name] = Scenario(
                name=name, about=group["about"], model=_model(model, data["models"]),
                train=Side(**degrees(train)), infer=Side(**degrees(infer)), mode=mode, dtype=dtype,
            )  # fmt: skip
    return found


def _model(name: str, models: dict[str, dict[str, Any]]) -> Model | Decoder:
    if name not in models:
        return catalogue.find(name)
    own = models[name]
    fields = models.get(own.get("like", ""), {}) | own | {"name": name, "family": "decoder"}
    fields.pop("like", None)
    return store.convert(fields, Decoder, f"model {name}")


def degrees(text: str) -> dict[str, int]:
    """Parse degrees: ``tp2 pp2 x3``, where x is the replicas."""
    found: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        axis = word.rstrip("0123456789")
        field = "replicas" if axis == "x" else axis
        if field not in Side.__struct_fields__ or field in found or not word[len(axis) :]:
            raise ValueError(
                f"layout = {text!r}: {word!r} must be one of tp, pp, ep, etp, fsdp and x "
                "(replicas), once, with a number, as tp2"
            )
        found[field] = int(word[len(axis) :])
    return found


_BASIC = (
    "tp2-tp1", "tp2-tp1-apart", "tp1-tp2", "tp2pp2-tp4pp1", "tp1pp2-tp2pp1", "ep2-ep1", "ep2-ep4",
)  # fmt: skip
MENU: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # scenarios, methods if fixed
    **{str(number): ((name,), ()) for number, name in enumerate(_BASIC, 1)},
    "8": (("tp2-tp1",), ("nccl", "nvshmem")),
    "9": (("large",), ()),
    "10": (_BASIC, ()),
}


class Chosen(NamedTuple):
    """A choice of the menu. ``methods``: those that the menu fixes; () leaves them to the user."""

    scenarios: tuple[Scenario, ...]
    methods: tuple[str, ...]


def find(name: str) -> Chosen:
    """Find a scenario by name, or those of a menu number. An error suggests the nearest name."""
    names, methods = MENU.get(name, ((name,), ()))
    for one in names:
        if one not in scenarios():
            near = difflib.get_close_matches(one, scenarios(), n=1)
            hint = f"did you mean {near[0]}?" if near else "`meshwise refit --list` names them all"
            raise ValueError(f"scenario = {one!r}: there is none; {hint}")
    return Chosen(tuple(scenarios()[one] for one in names), methods)


def custom() -> Scenario:
    """Return the scenario that the user's degrees and sizes change if none is named."""
    model = scenarios()["tp2-tp1"].model
    return Scenario(name="custom", about="", model=model, train=Side(), infer=Side())


def changed(
    scenario: Scenario,
    *,
    model: Model | Decoder | None = None,
    sizes: Mapping[str, Any] | None = None,
    train: Mapping[str, int] | None = None,
    infer: Mapping[str, int] | None = None,
    dtype: Dtype | None = None,
) -> Scenario:
    """Return the scenario with another model, sizes (see ``resized``), degrees or dtype.

    In a custom scenario the inference degrees default to the training degrees, except fsdp: only
    training shards weights by FSDP.
    """
    trained = replace(scenario.train, **train or {})
    usual = scenario.infer if scenario.about else replace(trained, fsdp=1)
    served = replace(usual, **infer or {})
    chosen = model or scenario.model
    return replace(
        scenario,
        model=resized(chosen, **sizes) if sizes else chosen,
        train=trained,
        infer=served,
        dtype=dtype or scenario.dtype,
    )


def resized(model: Model | Decoder, **sizes: Any) -> Decoder:
    """Return the model with other sizes: fields of ``Decoder``, and num_experts and expert_ffn.

    Sizes that are not given follow from the others as in Megatron: head_dim is hidden / heads,
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
    """Return the ranks needed: the sum of both models' if they are apart, else the larger."""
    train, infer = scenario.train.num_ranks, scenario.infer.num_ranks
    return max(train, infer) if mode == "collocated" else train + infer


def layouts(
    scenario: Scenario,
    mode: Mode,
    world_size: int,
    orders: tuple[Order, Order] = ("megatron", "engine"),
) -> tuple[WeightLayout, WeightLayout]:
    """Return both sides' layouts. Collocated models fill all ranks with replicas. For models apart,
    inference ranks come after training ranks, and any ranks left are idle."""
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
    """Return the methods to run. ``all`` is each that a device of this kind (cuda, cpu) has."""
    if asked == "all":
        return METHODS if kind == "cuda" else ("gloo",)
    if asked not in (*METHODS, "auto"):
        raise ValueError(f"method = {asked!r}: must be one of {', '.join((*METHODS, 'auto'))}, all")
    return tuple(menu) if asked == "auto" and menu and kind == "cuda" else (asked,)
