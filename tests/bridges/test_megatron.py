"""Megatron-core's live modules into vLLM's models, through vLLM's own interface.

Two judges. The forward: transformers' logits with the weights in Hugging Face's names are those of
Megatron's own forward, which also runs here, over the same ranks. And vLLM's loader: the live
parameters are, bit for bit, what it makes of that checkpoint.
"""

import json
import re

import pytest

pytest.importorskip("megatron.core", reason="make test-bridges installs Megatron-core")

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from torch import nn

from meshwise.bridges import megatron
from meshwise.bridges.vllm import TrainerEngine, TrainerInfo
from tests.bridges import megatron_model
from tests.bridges.models import MODELS, written
from tests.bridges.test_vllm import as_loaded, sent

# Behind the model: tp, pp, ep, etp and chunks of a rank. vLLM makes its groups for experts with the
# first model in the alphabet, which must have some.
TWO = [
    "deepseek-v3@megatron-1-1-2-1-1", "llama-deep@megatron-1-2-1-1-2",
    "llama-tied@megatron-2-1-1-1-1", "mixtral@megatron-2-1-1-2-1", "qwen2@megatron-1-2-1-1-1",
    "qwen2-moe@megatron-2-1-2-1-1", "qwen3@megatron-2-1-1-1-1", "qwen3-moe@megatron-1-1-2-1-1",
]  # fmt: skip
FOUR = [
    "deepseek-v3@megatron-1-2-2-1-1", "llama@megatron-2-1-1-1-1", "qwen2@megatron-2-2-1-1-1",
    "qwen3-moe@megatron-2-2-2-1-1",
]  # fmt: skip


@pytest.mark.parametrize(("names", "trainers", "workers"), [(TWO, 2, 2), (FOUR, 4, 1)])
def test_live_parameters_are_what_megatron_computes_with(names, trainers, workers, tmp_path):
    said = sent(tmp_path, names, trainers, workers)
    for name in names:
        as_loaded(said, name)  # each element of the destination sent once
        assert said.count(f"{name}: transformers' logits are Megatron's") == 2


@pytest.fixture(scope="module")
def alone():
    """A job of one rank, Megatron's way. vLLM makes one of its own in tests behind these."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    megatron_model.placed()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def held(model: nn.Module, folder) -> dict[str, object]:
    """Return what a chunk holds, without the names of its buffers."""
    found = megatron.source([model], folder).held(0)
    return {
        name: of._replace(
            layout=tuple(piece._replace(buffer="") for piece in of.layout),
            padded=tuple(end._replace(buffer="") for end in of.padded),
        )
        for name, of in found.items()
    }


def moved(model: nn.Module, old: str, new: str) -> None:
    """Move a parameter to another module, made if there is none."""
    parameter = model.get_parameter(old)
    path, _, key = old.rpartition(".")
    delattr(model.get_submodule(path), key)
    path, _, key = new.rpartition(".")
    at = model
    for part in path.split("."):
        if part not in at._modules:
            at.add_module(part, nn.Module())
        at = at._modules[part]
    at.register_parameter(key, parameter)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_transformer_engines_names_are_known(name, alone, tmp_path):
    """The names are those by which Megatron's own checkpoints of both kinds are one: norms in the
    linear that follows, experts in one module."""
    folder = written(name, tmp_path)
    (model,) = megatron_model.built(MODELS[name][0])
    before = held(model, folder)
    fused = model.decoder.layers[0].submodules_config.sharded_state_dict_keys_map
    assert len(fused) == 2
    if name == "qwen3-moe":  # its norm stays apart where there are experts
        fused = {old: new for old, new in fused.items() if "mlp" not in new}
    for called in [*dict(model.named_parameters())]:
        layer, rest = re.match(r"(decoder\.layers\.\d+\.|)(.*)", called).groups()
        new = rest
        for old, other in fused.items():
            new = new.replace(old, other) if layer and new.startswith(old) else new
        new = re.sub(r"local_experts\.(\d+)\.(\w+)\.weight", r"\2.weight\1", new)
        if new != rest:
            moved(model, called, layer + new)
    names = dict(model.named_parameters())
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in names
    grouped, dense = "mlp.experts.linear_fc2.weight7", "mlp.linear_fc1.layer_norm_weight"
    assert f"decoder.layers.0.{grouped if name == 'qwen3-moe' else dense}" in names
    assert held(model, folder) == before


def test_wrapped_chunks_are_the_model_inside(alone, tmp_path):
    folder = written("llama", tmp_path)
    (model,) = megatron_model.built(MODELS["llama"][0])
    model.config.bf16, model.config.params_dtype = True, torch.bfloat16
    how = DistributedDataParallelConfig(use_distributed_optimizer=True)
    outer = DistributedDataParallel(model.config, how, Float16Module(model.config, model))
    source = megatron.source(outer, folder)
    assert list(source.module) == [model]
    of = source.held(0)["layers.1.q.weight"]
    assert of.dtype == "bf16"
    assert {p.buffer for p in of.layout} == {"0.decoder.layers.1.self_attention.linear_qkv.weight"}


WRONG = {
    "another width": (
        {"intermediate_size": 96},
        r"0.decoder.layers.0.mlp.linear_fc1.weight is \(256, 64\), \(192, 64\) by the config.json",
    ),
    "as many rows of other heads": (
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
        "0.config.num_attention_heads = 4, 2 by the config.json",
    ),
    "tied": (
        {"tie_word_embeddings": True},
        "share_embeddings_and_output_weights = False, True by the config.json",
    ),
    "fewer layers": ({"num_hidden_layers": 1}, "0.config.num_layers = 2, 1 by"),
    "a larger vocabulary": (
        {"vocab_size": 300},
        r"0.embedding.word_embeddings.weight is \(256, 64\), \(300, 64\) by the config.json",
    ),
    "norms of q and k": (
        {"model_type": "qwen3"},
        r"0.decoder.layers.0.self_attention.q_layernorm.weight \(16,\) is missing",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_the_checkpoints_is_refused_by_name(what, alone, tmp_path):
    changed, said = WRONG[what]
    path = written("llama", tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    (model,) = megatron_model.built(MODELS["llama"][0])
    with pytest.raises(ValueError, match=said):
        megatron.source([model], path.parent).held(0)


def test_what_is_no_gpt_model_is_named(alone, tmp_path):
    with pytest.raises(ValueError, match="0 is a Linear, no GPTModel"):
        megatron.source(nn.Linear(2, 2), written("llama", tmp_path)).held(0)


def test_without_groups_of_its_own_a_model_has_megatrons(alone, tmp_path):
    folder = written("qwen3-moe", tmp_path)
    (model,) = megatron_model.built(MODELS["qwen3-moe"][0])
    before = held(model, folder)
    del model.pg_collection
    assert held(model, folder) == before


def test_what_the_config_does_not_know_is_refused_by_name(alone, tmp_path):
    folder = written("llama", tmp_path)
    (model,) = megatron_model.built(MODELS["llama"][0])
    model.decoder.layers[0].mlp.linear_fc1.layer_norm_weight = nn.Parameter(torch.ones(64))
    with pytest.raises(ValueError, match="are one weight"):
        megatron.source([model], folder).held(0)
    del model.decoder.layers[0].mlp.linear_fc1.layer_norm_weight
    model.decoder.layers[1].extra = nn.Linear(3, 2, bias=False)
    with pytest.raises(ValueError, match=r"0.decoder.layers.1.extra.weight \(2, 3\) is no weight"):
        megatron.source([model], folder).held(0)
    model.config.layernorm_zero_centered_gamma = True  # equal shapes, other values
    with pytest.raises(ValueError, match="layernorm_zero_centered_gamma = True, False by the conf"):
        megatron.source([model], folder).held(0)


def test_a_source_without_its_checkpoint_is_told_what_to_give(alone, tmp_path):
    (model,) = megatron_model.built(MODELS["llama"][0])
    info = TrainerInfo(address="127.0.0.1:1", rank=0)
    for given in ([model], model):
        with pytest.raises(ValueError, match=r"TrainerInfo\(checkpoint=\)"):
            TrainerEngine.trainer_init(info, client=None, source=given)
    info.checkpoint = str(tmp_path)
    with pytest.raises(ValueError, match="a model chunk is str"):
        TrainerEngine.trainer_init(info, client=None, source=["model"])
