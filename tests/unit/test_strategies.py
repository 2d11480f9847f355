"""Which strategy a pattern gives to a name; the maps of known models against their names."""

import fnmatch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.models import strategies

LLAMA = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.11.self_attn.q_proj.weight",
    "model.layers.11.self_attn.k_proj.bias",
    "model.layers.11.self_attn.v_proj.weight",
    "model.layers.11.self_attn.o_proj.weight",
    "model.layers.11.mlp.gate_proj.weight",
    "model.layers.11.mlp.up_proj.weight",
    "model.layers.11.mlp.down_proj.weight",
    "model.layers.11.input_layernorm.weight",
    "model.layers.11.post_attention_layernorm.weight",
]

part = st.sampled_from(["a", "b", "layers", "0", "11", "q_proj", "*", "*_proj", "l*s"])


@settings(max_examples=200)
@given(st.lists(part, min_size=1, max_size=4), st.lists(part, min_size=1, max_size=4))
def test_a_pattern_is_compared_component_by_component(pattern, name):
    name = [piece.replace("*", "x") for piece in name]
    same = all(fnmatch.fnmatchcase(n, p) for p, n in zip(pattern, name, strict=False))
    pattern, name = ".".join(pattern), ".".join(name)
    lengths = (pattern.count("."), name.count("."))
    assert strategies.selects(pattern, name) == (same and lengths[0] == lengths[1])
    assert strategies.covers(pattern, name) == (same and lengths[0] <= lengths[1])


def test_the_closest_pattern_counts_and_patterns_without_effect_are_told():
    mapping = {"blocks.*": "replicated", "blocks.*.up": "col", "block.*.up": "row"}
    names = ["blocks.0.up.weight", "blocks.0.norm.weight", "head.weight"]
    found = strategies.assign(mapping, names)
    assert found.strategies == dict(zip(names, ["col", "replicated", None], strict=True))
    assert found.idle == ("block.*.up",)


@pytest.mark.parametrize("wrong", ["column", "row/3", "col/", "col/x", "col/0", ""])
def test_an_unknown_strategy_is_refused_with_the_choices(wrong):
    with pytest.raises(ValueError, match=r"must be one of col, row, vocab"):
        strategies.assign({"a": wrong}, ["a.weight"])


def test_the_parts_of_a_fused_weight_are_read():
    assert strategies.parse("col/3") == ("col", 3)
    assert strategies.parse("row") == ("row", 1)


def test_every_weight_of_a_llama_is_mapped_and_by_a_class_that_derives_from_it():
    known = strategies.known(["MyLlama", "LlamaForCausalLM", "Module"])
    found = strategies.assign(known.strategies, LLAMA)
    assert found.idle == ()
    assert None not in found.strategies.values()
    assert found.strategies["model.layers.11.self_attn.k_proj.bias"] == "col"
    assert found.strategies["model.layers.11.self_attn.o_proj.weight"] == "row"


def test_an_unknown_class_has_no_map():
    assert strategies.known(["Module", "object"]) is None


def test_every_built_in_strategy_is_one():
    for known in strategies.KNOWN.values():
        for strategy in known.strategies.values():
            strategies.parse(strategy)
