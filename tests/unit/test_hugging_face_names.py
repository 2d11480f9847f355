"""Hugging Face's names of weights, against transformers' own modules and what it saves of them."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    Olmo2Config,
    OlmoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from meshwise.models.hugging_face import decoder, read_config
from meshwise.reshard.holdings import holdings
from meshwise.spec import WeightLayout
from tests.bridges.models import LATENT, MODELS, SMALL, WITHOUT_HEAD_DIM
from tests.unit.test_holdings import filled, state_of

CONFIGS = {name: config for name, (config, _) in MODELS.items() if name != "gpt-oss"} | {
    "gemma": GemmaConfig(**SMALL),
    "gemma2": Gemma2Config(**SMALL, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3": Gemma3TextConfig(**SMALL),
    "granite": GraniteConfig(**WITHOUT_HEAD_DIM),
    "olmo2": Olmo2Config(**WITHOUT_HEAD_DIM, pad_token_id=0),
    "olmoe": OlmoeConfig(**WITHOUT_HEAD_DIM, num_experts=4, num_experts_per_tok=2),
    "deepseek-v2": DeepseekV2Config(
        **{**LATENT, "topk_method": "group_limited_greedy", "q_lora_rank": None}
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_shapes_and_elements_are_those_of_transformers(name):
    """A module whose elements are numbered is saved by transformers itself."""
    config = CONFIGS[name]
    model = decoder(config.to_dict(), name, name)
    held = {order: holdings(model, WeightLayout(order=order)) for order in ("hf", "hf-fused")}
    mine, saved = (filled(held[order], 0, state_of(held[order])) for order in ("hf-fused", "hf"))

    module = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    state = module.state_dict()
    theirs = {n: t for n, t in state.items() if n not in module.all_tied_weights_keys}
    assert {n: tuple(t.shape) for n, t in theirs.items()} == {n: a.shape for n, a in mine.items()}

    numbered = {n: torch.from_numpy(array) for n, array in mine.items()}
    by_them = revert_weight_conversion(module, numbered)
    assert by_them.keys() == saved.keys()
    for tensor, array in saved.items():
        assert torch.equal(by_them[tensor], torch.from_numpy(array)), tensor


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "mixtral"])
def test_a_whole_model_is_what_its_parts_hold(name):
    """tp, ep and FSDP2: every rank's part under the same names, each expert by its number."""
    model = decoder(CONFIGS[name].to_dict(), name, name)
    ep = 2 if model.experts else 1
    layout = WeightLayout(tp=2, dp=2, ep=ep, fsdp=2, order="hf")
    whole = filled(of_one := holdings(model, WeightLayout(order="hf")), 0, state_of(of_one))
    cut = holdings(model, layout)
    found = {tensor: set() for tensor in whole}
    for rank in range(4):
        for tensor, array in filled(cut, rank, state_of(cut)).items():
            found[tensor] |= {*array.ravel()}
    assert found == {tensor: {*array.ravel()} for tensor, array in whole.items()}


def test_a_gpt2_has_no_such_names(tmp_path):
    GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=250).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="order = 'hf': has no names for GPT-2"):
        holdings(read_config(tmp_path), WeightLayout(order="hf"))
