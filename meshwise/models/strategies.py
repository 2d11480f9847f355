"""Name how tensor and expert parallelism cut the weights of a foreign module.

In: a map of patterns to strategies, and the names of a module's parameters. Out: each parameter's
strategy, and the patterns that matched nothing. A pattern is a dotted name in which ``*`` stands
for any part of one component: ``model.layers.*.self_attn.q_proj``. It names a module or a parameter
and covers everything below it. If several patterns match, the one with the most components wins.

Strategies of a weight over the tp ranks:

- ``col``: cut by outputs; ``col/3``: each of 3 equal parts by its outputs, for a fused [q|k|v];
- ``row``: cut by inputs, which a ``col`` before it has split; results are summed;
- ``vocab``: cut by rows of the vocabulary: an embedding, or a head whose logits are gathered;
- ``expert``: stacked experts, cut by expert over the ep ranks and by ffn over the tp ranks;
- ``channel_col``, ``channel_row``: ``col`` and ``row`` for a convolution;
- ``replicated``: whole on every rank, applied to whole activations;
- ``summed``: whole on every rank, applied to split activations (the norm of each head, for
  example); its gradient is summed over ranks.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple, get_args

Strategy = Literal[
    "col", "row", "vocab", "expert", "channel_col", "channel_row", "replicated", "summed"
]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
StrategyMap = Mapping[str, str]
WHOLE: tuple[Strategy, ...] = ("replicated", "summed")


class Known(NamedTuple):
    """A known class of models. ``units``: modules that are sharded, recomputed and compiled one
    by one. ``divided``: attributes that count heads or features; each rank divides them."""

    strategies: StrategyMap
    units: tuple[str, ...]
    divided: tuple[str, ...] = ()


class Assigned(NamedTuple):
    """The strategies of a module. ``strategies``: by parameter, None if no pattern matches.
    ``idle``: patterns that match no parameter."""

    strategies: dict[str, str | None]
    idle: tuple[str, ...]


def parse(strategy: str) -> tuple[Strategy, int]:
    """Return the strategy and its number of parts: ("col", 3) for ``col/3``."""
    word, _, parts = strategy.partition("/")
    kind = next((kind for kind in STRATEGIES if kind == word), None)
    numbered = re.fullmatch("[1-9][0-9]?", parts) and kind == "col"
    if kind is None or (parts and not numbered) or strategy.endswith("/"):
        choices = ", ".join([*STRATEGIES, "col/3 and the like"])
        raise ValueError(f"strategy {strategy!r}: must be one of {choices}")
    return kind, int(parts or 1)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("[^.]*".join(map(re.escape, pattern.split("*"))))


def selects(pattern: str, name: str) -> bool:
    """Return whether a pattern matches exactly this name."""
    return _compiled(pattern).fullmatch(name) is not None


def covers(pattern: str, name: str) -> bool:
    """Return whether a pattern matches this name or a module above it."""
    head = ".".join(name.split(".")[: pattern.count(".") + 1])
    return selects(pattern, head)


def assign(strategies: StrategyMap, names: Iterable[str]) -> Assigned:
    """Return the strategy of each parameter."""
    for strategy in strategies.values():
        parse(strategy)
    closest = sorted(strategies, key=lambda pattern: -pattern.count("."))
    found: dict[str, str | None] = {}
    used = set()
    for name in names:
        matching = [pattern for pattern in closest if covers(pattern, name)]
        used.update(matching)
        found[name] = strategies[matching[0]] if matching else None
    return Assigned(found, tuple(pattern for pattern in strategies if pattern not in used))


def known(class_names: Iterable[str]) -> Known | None:
    """Return the entry of the first known class. Pass a module's class and its base classes."""
    return next((KNOWN[name] for name in class_names if name in KNOWN), None)


_ATTENTION = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.q_proj": "col",
    "model.layers.*.self_attn.k_proj": "col",
    "model.layers.*.self_attn.v_proj": "col",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.input_layernorm": "replicated",
    "model.layers.*.post_attention_layernorm": "replicated",
    "model.norm": "replicated",
    "lm_head": "vocab",
}
_LLAMA = Known(
    {
        **_ATTENTION,
        "model.layers.*.mlp.gate_proj": "col",
        "model.layers.*.mlp.up_proj": "col",
        "model.layers.*.mlp.down_proj": "row",
    },
    units=("model.layers.*",),
)
_QWEN3 = _LLAMA._replace(
    strategies={
        **_LLAMA.strategies,
        "model.layers.*.self_attn.q_norm": "summed",
        "model.layers.*.self_attn.k_norm": "summed",
    }
)
_MIXTRAL = Known(
    {**_ATTENTION, "model.layers.*.mlp.gate": "replicated", "model.layers.*.mlp.experts": "expert"},
    units=("model.layers.*",),
)
_GPT2 = Known(
    {
        "transformer.wte": "vocab",
        "transformer.wpe": "replicated",
        "transformer.h.*.ln_1": "replicated",
        "transformer.h.*.attn.c_attn": "col/3",
        "transformer.h.*.attn.c_proj": "row",
        "transformer.h.*.ln_2": "replicated",
        "transformer.h.*.mlp.c_fc": "col",
        "transformer.h.*.mlp.c_proj": "row",
        "transformer.ln_f": "replicated",
        "lm_head": "vocab",
    },
    units=("transformer.h.*",),
    divided=("transformer.h.*.attn.split_size",),
)
# Names as in transformers 4.57 and 5. Experts are stacked from version 5 on.
KNOWN: dict[str, Known] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _QWEN3,
    "GPT2LMHeadModel": _GPT2,
    "MixtralForCausalLM": _MIXTRAL,
}
