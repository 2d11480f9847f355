"""Weights, products, attention and messages of models against transformers, Primus' shapes and
the published byte counts."""

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from meshwise import models, search
from meshwise.models import catalogue, decoder, hugging_face, placement, primus
from meshwise.prices import unmeasured
from meshwise.spec import (
    Cluster,
    Decoder,
    Experts,
    Gemm,
    LayerKind,
    Layout,
    Mla,
    Model,
    Workload,
    layer_kinds,
)
from meshwise.verbs import files

DATA = Path(__file__).parents[1] / "data"
CONFIGS = DATA / "hugging_face"
PRIMUS_MODELS = DATA / "primus" / "model_configs.json"
PRIMUS_SHAPES = DATA / "primus" / "attention_shapes.json"

TEN = {  # parameters: transformers 4.57.1 on the meta device; sequence length as in Primus
    "llama-2-7b": (6_738_415_616, 4096),
    "llama-2-70b": (68_976_648_192, 4096),
    "llama-3.1-8b": (8_030_261_248, 8192),
    "llama-3.1-70b": (70_553_706_496, 8192),
    "llama-3.1-405b": (405_853_388_800, 8192),
    "mixtral-8x7b": (46_702_792_704, 4096),
    "mixtral-8x22b": (140_620_634_112, 4096),
    "deepseek-v2-lite": (15_706_484_224, 4096),
    "deepseek-v2": (235_741_434_880, 4096),
    # 671,026,404,352 parameters and 58 buffers e_score_correction_bias of 256, which the
    # published 671,026,419,200 counts
    "deepseek-v3": (671_026_404_352 + 58 * 256, 4096),
}

# Decoders of every kind of layer, small enough to try degrees on.
DENSE = Decoder(
    hidden=64, layers=2, heads=8, kv_heads=4, head_dim=16, ffn=96, vocab=128, max_seq_len=64
)
MOE = msgspec.structs.replace(
    DENSE,
    layers=3,
    experts=Experts(num_experts=6, top_k=2, ffn=24, shared_ffn=40, first_dense=1),
)
SCORED = msgspec.structs.replace(
    MOE, experts=msgspec.structs.replace(MOE.experts, shared_gate=True)
)
LATENT = msgspec.structs.replace(
    MOE,
    kv_heads=8,
    head_dim=24,
    mla=Mla(q_lora_rank=20, kv_lora_rank=12, nope_head_dim=16, rope_head_dim=8, v_head_dim=10),
)
GPT = Model(hidden=32, layers=3, heads=4, ffn=64, vocab=96, max_seq_len=16)


@pytest.mark.parametrize("name", TEN)
def test_parameters_are_as_published(name):
    assert decoder.published_parameters(catalogue.find(name)) == TEN[name][0]


@pytest.mark.parametrize(  # transformers 4.57.1, meta device
    ("file", "parameters"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-nemo-12b", 12_247_782_400),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v3", 671_026_404_352 + 58 * 256),
        ("gemma-2b", 2_506_172_416),
        ("gpt2", 124_439_808),
    ],
)
def test_a_config_has_the_parameters_of_its_module(file, parameters):
    assert (
        decoder.published_parameters(hugging_face.read_config(CONFIGS / f"{file}.json"))
        == parameters
    )


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 101,
    "max_position_embeddings": 32,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SMALL_LATENT = SMALL | {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "attention_bias": True,
}
WINDOW = {"sliding_window": 16}  # of 32 positions
VARIANTS = {  # config -> parameters by transformers 4.57.1, meta device
    "biases and tied": (
        SMALL
        | {
            "model_type": "llama",
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        64_960,
    ),
    "heads wider than hidden": (SMALL | {"model_type": "mistral", "head_dim": 16}, 91_072),
    "biases of q, k and v": (SMALL | {"model_type": "qwen2", "tie_word_embeddings": True}, 64_320),
    "norms of q and k": (
        SMALL | {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
        91_648,
    ),
    "a gated shared expert": (
        SMALL
        | EXPERTS
        | {
            "model_type": "qwen2_moe",
            "num_hidden_layers": 3,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [0],
        },
        134_368,
    ),
    "experts alone": (
        SMALL | EXPERTS | {"model_type": "qwen3_moe", "num_hidden_layers": 3, "head_dim": 16},
        159_008,
    ),
    "latent attention with biases": (
        SMALL_LATENT | {"model_type": "deepseek_v3", "tie_word_embeddings": True},
        143_800 + 2 * 8,
    ),
    "latent attention with a softmax router": (
        SMALL_LATENT | {"model_type": "deepseek_v2"},
        150_264,
    ),
    "tied unless said otherwise": (
        SMALL
        | {
            "model_type": "gemma",
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 24,
        },
        74_368,
    ),
    "a fused phi": (SMALL | {"model_type": "phi3"}, 70_592),
    "norms behind": (SMALL | {"model_type": "olmo2", "attention_bias": True}, 71_072),
    "norms of whole q and k, experts": (SMALL | EXPERTS | {"model_type": "olmoe"}, 255_840),
    "multipliers": (SMALL | {"model_type": "granite", "mlp_bias": True}, 71_104),
    "windows and norms": (
        SMALL | WINDOW | {"model_type": "gemma3_text", "head_dim": 24, "rope_scaling": None},
        105_440,
    ),
    "a GPT": (
        {
            "model_type": "gpt2",
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 100,
            "vocab_size": 101,
        }
        | {"n_positions": 32},
        68_360,
    ),
}


LATENT_CONFIG = "latent attention with biases"
READ_PAST = [  # keys that change the computation and that were once not looked at
    ("biases and tied", WINDOW, "sliding_window = 16: is not known for model_type 'llama'"),
    ("heads wider than hidden", {"sliding_window": 0}, "sliding_window = 0: must be a whole"),
    (
        "heads wider than hidden",
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layer_types = ['full_attention', 'chunked_attention']: must be of full_attention",
    ),
    ("norms of q and k", {"layer_types": ["full_attention"]}, ": must be of 2 layers"),
    (
        "norms of q and k",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types = ['full_attention', 'sliding_attention']: must be full_attention",
    ),
    (LATENT_CONFIG, {"first_k_dense_replace": 3}, "first_k_dense_replace = 3: leaves none of 3"),
    ("a gated shared expert", {"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers = 3: leaves none"),
    (LATENT_CONFIG, {"topk_method": "greedy"}, "topk_method = 'greedy': must be 'noaux_tc'"),
    (LATENT_CONFIG, {"scoring_func": "softmax"}, "scoring_func = 'softmax': must be 'sigmoid'"),
    (LATENT_CONFIG, {"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7: must be even"),
    ("biases and tied", {"head_dim": 7}, "head_dim = 7: must be even"),
    ("biases and tied", {"num_local_experts": 4}, "num_local_experts = 4: is not known"),
    ("biases and tied", {"kv_lora_rank": 4}, "kv_lora_rank = 4: is not known"),
    ("biases and tied", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: is not"),
    (
        "biases and tied",
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "rope_parameters: partial_rotary_factor = 0.5: must be 1",
    ),
    ("biases and tied", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: is"),
    (
        "biases and tied",
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "leave out one of the two",
    ),
    (
        "biases and tied",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
        "the same for all layers",
    ),
    (
        "biases and tied",
        {"rope_scaling": {"rope_type": "yarn"}},
        "rope_scaling: factor is missing: yarn needs one",
    ),
    (
        "latent attention with a softmax router",
        {"norm_topk_prob": True},
        "norm_topk_prob = True: must be False",
    ),
    (LATENT_CONFIG, {"index_topk": 2048}, "index_topk = 2048: is not known"),
    ("a GPT", {"num_local_experts": 8}, "num_local_experts = 8: is not known"),
    ("a fused phi", {"rope_scaling": {"type": "longrope"}}, "rope_scaling = {'type': 'longrope'}"),
    ("a fused phi", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "must be default"),
    ("a fused phi", {"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75: is not"),
    ("norms of whole q and k, experts", {"clip_qkv": 8.0}, "clip_qkv = 8.0: is not known"),
    ("norms of whole q and k, experts", {"head_dim": 16}, "head_dim = 16: must be 8"),
    ("multipliers", {"residual_multiplier": 0}, "residual_multiplier = 0: must be a number > 0"),
    ("windows and norms", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0: is"),
    ("windows and norms", {"hidden_activation": "relu"}, "hidden_activation = 'relu': must be"),
    ("windows and norms", {"rope_parameters": {"rope_theta": 1e4}}, "must be an object of full_"),
    ("windows and norms", {"model_type": "gemma2"}, "attn_logit_softcapping is missing: capped"),
    (
        "windows and norms",
        {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": 30.0},
        "final_logit_softcapping = 30.0: capped logits are not computed",
    ),
    ("windows and norms", {"sliding_window": None}, "sliding_window = None: must be full_"),
    ("biases and tied", {"model_type": "gemma3"}, "model_type = 'gemma3': vision_config is not"),
    ("biases and tied", {"model_type": "llama4"}, "model_type = 'llama4': vision_config is not"),
    (
        "biases and tied",
        {"model_type": "llama4_text", "attention_chunk_size": 8192},
        "attention_chunk_size = 8192: attention in chunks",
    ),
    (
        "biases and tied",
        {"model_type": "gpt_oss", "swiglu_limit": 7.0},
        "swiglu_limit = 7.0: attention sinks and a clamped SwiGLU are not computed",
    ),
    ("biases and tied", {"model_type": "gpt_oss"}, "model_type = 'gpt_oss': attention sinks"),
    (
        "biases and tied",
        {"model_type": "gpt_neox", "use_parallel_residual": True},
        "use_parallel_residual = True: parallel residuals",
    ),
]


@pytest.mark.parametrize(  # of 8,192 positions and 4 layers
    ("name", "change", "window", "full"),
    [
        ("heads wider than hidden", {}, 4096, ()),
        ("heads wider than hidden", WINDOW, 16, ()),
        # Mistral's layers do not look at layer_types
        ("heads wider than hidden", WINDOW | {"layer_types": ["full_attention"] * 4}, 16, ()),
        ("heads wider than hidden", {"sliding_window": None}, None, ()),
        ("heads wider than hidden", {"sliding_window": 8192}, None, ()),
        ("a fused phi", {}, None, ()),
        ("a fused phi", WINDOW, 16, ()),
        ("biases of q, k and v", WINDOW, None, ()),
        ("biases of q, k and v", WINDOW | {"use_sliding_window": True}, None, ()),
        (
            "biases of q, k and v",
            {"use_sliding_window": True, "max_window_layers": 3},
            4096,
            (0, 1, 2),
        ),
        (
            "norms of q and k",
            WINDOW
            | {"use_sliding_window": True}
            | {"layer_types": ["sliding_attention", "full_attention"] * 2},
            16,
            (1, 3),
        ),
        ("windows and norms", {"sliding_window_pattern": 3}, 16, (2,)),
        ("windows and norms", {"sliding_window": 9000}, 9000, ()),  # whose positions are others
    ],
)
def test_windows_are_read_and_planned_for(name, change, window, full, tmp_path):
    h100 = files.take("h100-hgx", Cluster)
    config = VARIANTS[name][0] | {"num_hidden_layers": 4, "max_position_embeddings": 8192}
    found = hugging_face.read_config(written(tmp_path, config | change))
    assert (found.window, found.full_layers) == (window, full)
    seen = {None if window is None or window >= 8192 else window: 4 - len(full)}
    seen |= {None: len(full)} if full else {}
    assert Counter(kind.window for kind in layer_kinds(found, 8192)) == seen
    assert set(layer_kinds(found, 16)) == {LayerKind()}
    ops = decoder.attentions(found, 1, 8192)
    assert {op.window for op in ops} == set(seen)
    workload, costs = Workload(global_batch_size=4, seq_len=8192), unmeasured(h100)
    plan = search.find(found, workload, costs, num_devices=2)
    assert plan.prediction.tier == "datasheet"
    everywhere = msgspec.structs.replace(found, window=None, full_layers=())
    whole = search.given(everywhere, workload, costs, plan.layout).prediction
    assert (plan.prediction.step_time_s < whole.step_time_s) == (set(seen) != {None})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("heads wider than hidden", {"sliding_window": 32}),  # a window of all positions
        ("biases of q, k and v", WINDOW | {"use_sliding_window": False}),
        ("windows and norms", {"rope_local_base_freq": 300.0, "rope_theta": 7e5}),
        ("multipliers", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}),
        ("norms of q and k", WINDOW | {"layer_types": ["full_attention"] * 2}),
        (
            "norms of q and k",
            WINDOW | {"use_sliding_window": True, "layer_types": ["full_attention"] * 2},
        ),
        ("biases and tied", {"partial_rotary_factor": 1.0, "num_local_experts": 0}),
    ],
)
def test_keys_that_change_nothing_are_accepted(name, change, tmp_path):
    config, parameters = VARIANTS[name]
    found = hugging_face.read_config(written(tmp_path, config | change))
    assert decoder.published_parameters(found) == parameters


def written(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_a_layer_is_counted(variant, tmp_path):
    config, parameters = VARIANTS[variant]
    written(tmp_path, config)
    assert decoder.published_parameters(hugging_face.read_config(tmp_path)) == parameters


LLAMA = SMALL | {"model_type": "llama"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("{", "is not JSON"),
        ("[]", "Expected `object`"),
        ({"hidden_size": 1}, "model_type is missing"),
        (LLAMA | {"model_type": "t5"}, "model_type = 't5'"),
        (LLAMA | {"model_type": ["llama"]}, "model_type = ['llama']"),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "vocab_size is missing"),
        (LLAMA | {"hidden_size": -64}, "hidden_size = -64"),
        (LLAMA | {"hidden_size": 64.0}, "hidden_size = 64.0"),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers = True"),
        (LLAMA | {"intermediate_size": "96"}, "intermediate_size = '96'"),
        (LLAMA | {"num_hidden_layers": 10_001}, ": num_hidden_layers = 10001: must"),
        (LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3}, "hidden_size = 64"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        (LLAMA | {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
        (VARIANTS["experts alone"][0] | {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        (VARIANTS["experts alone"][0] | {"mlp_only_layers": [1]}, "mlp_only_layers = [1]"),
        (
            VARIANTS["experts alone"][0] | {"num_experts_per_tok": 7},
            ": num_experts_per_tok = 7: must be <= num_experts = 6",
        ),
        (
            VARIANTS["latent attention with a softmax router"][0] | {"num_experts_per_tok": 9},
            ": num_experts_per_tok = 9: must be <= n_routed_experts = 8",
        ),
        (LLAMA | {"hidden_act": "relu"}, "hidden_act = 'relu': must be 'silu' or 'swish'"),
        (LLAMA | {"hidden_act": ["silu"]}, "hidden_act = ['silu']: must be"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
            ": rope_scaling: truncate = False: must be True",
        ),
        (SMALL_LATENT | {"model_type": "deepseek_v2", "mlp_bias": True}, "mlp_bias = True"),
        (VARIANTS["a GPT"][0] | {"activation_function": "relu"}, "activation_function = 'relu'"),
        (VARIANTS["a GPT"][0] | {"n_layer": 10_001}, ": n_layer = 10001: must"),
        (VARIANTS["a GPT"][0] | {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        (VARIANTS["a GPT"][0] | {"n_head": 3}, "n_head = 3"),
        (VARIANTS["a GPT"][0] | {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-06"),
        *((VARIANTS[name][0] | change, named) for name, change, named in READ_PAST),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_file_and_key(config, named, tmp_path):
    path = written(tmp_path, config)
    with pytest.raises(ValueError) as caught:
        hugging_face.read_config(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_key_value_heads_that_llama_leaves_out_are_the_heads(tmp_path):
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert hugging_face.read_config(written(tmp_path, config)).kv_heads == 8
    with pytest.raises(ValueError, match="num_key_value_heads is missing"):
        hugging_face.read_config(written(tmp_path, config | {"model_type": "mistral"}))


@pytest.mark.parametrize("unused", [3, None, "none"])
def test_key_value_heads_of_latent_attention_are_not_looked_at(unused, tmp_path):
    config = VARIANTS["latent attention with a softmax router"][0] | {"num_key_value_heads": unused}
    assert hugging_face.read_config(written(tmp_path, config)).kv_heads == 4


def test_a_model_is_found_by_name_or_path(tmp_path):
    assert catalogue.find("gpt-125m") == catalogue.get("gpt-125m")
    assert catalogue.find("llama-3.1-8b").vocab == 128256
    assert catalogue.find(str(CONFIGS / "gpt2.json")).name == "gpt2"
    folder = tmp_path / "mine"
    folder.mkdir()
    written(folder, LLAMA)
    assert catalogue.find(str(folder)).name == "mine"
    with pytest.raises(ValueError, match=r"did you mean llama-3\.1-70b\?"):
        catalogue.find("llama-3.1-70")
    with pytest.raises(ValueError, match="does not exist"):
        catalogue.find("no/such/config.json")


def test_every_published_config_agrees_with_the_catalogue():
    for name in ("mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3"):
        assert hugging_face.read_config(CONFIGS / f"{name}.json") == catalogue.find(name)


@pytest.mark.parametrize(  # transformers 5.23, meta device
    ("name", "parameters"),
    [
        ("qwen3-235b-a22b", 235_093_634_560),
        ("gpt-oss-120b", 116_829_156_672),
        ("llama-4-maverick", 400_711_848_960),
    ],
)
def test_listed_models_have_the_parameters_of_their_modules(name, parameters):
    assert decoder.published_parameters(catalogue.find(name)) == parameters


@pytest.mark.parametrize("name", ["gpt-oss-120b", "llama-4-maverick"])
def test_what_no_module_computes_is_listed_and_refused_by_name(name):
    model = catalogue.find(name)
    assert {p.name for p in decoder.products(model, 1, 128)} >= {"qkv", "out", "experts_gate_up"}
    assert decoder.attentions(model, 1, 128)
    assert name in catalogue.decoder_names() and name not in catalogue.all_names()
    layout, workload = Layout(microbatch_size=1), Workload(global_batch_size=1, seq_len=128)
    for refused in (
        lambda: placement.check(model, workload, layout),
        lambda: models.graph(model, 1, 128, "bf16"),
    ):
        with pytest.raises(ValueError, match=f"{name} is not computed here: .*; measure gemm"):
            refused()
    with pytest.raises(ValueError, match=r"more_weights.*: no module here has them"):
        msgspec.structs.replace(DENSE, more_weights=(("sinks", 8),))


def test_gpt_oss_attends_in_windows_in_every_other_layer():
    ops = decoder.attentions(catalogue.find("gpt-oss-120b"), 1, 4096)
    assert [(op.heads, op.kv_heads, op.head_dim, op.window) for op in ops] == [
        (64, 8, 64, 128), (64, 8, 64, None),
    ]  # fmt: skip


def test_a_norm_over_all_heads_is_not_split():
    model = msgspec.structs.replace(DENSE, qk_norm=True, qk_norm_over="projection")
    workload = Workload(global_batch_size=1, seq_len=16)
    placement.check(model, workload, Layout(microbatch_size=1))
    with pytest.raises(ValueError, match=r"Layout.tp = 2: q and k are normed over all heads"):
        placement.check(model, workload, Layout(tp=2, microbatch_size=1))


@pytest.mark.parametrize("seq_len", [5, 8, 9, 16])
def test_every_layer_attends_the_pairs_of_its_own_window(seq_len):
    model = msgspec.structs.replace(DENSE, layers=5, window=8, full_layers=(1, 4))
    graph = models.graph(model, 1, seq_len, "bf16", recompute=("full",) * 5)
    tasks = models.program_of(graph, Layout(), "bf16").tasks
    for layer in range(5):
        nearest = seq_len if layer in (1, 4) else 8
        pairs = sum(0 <= q - k < nearest for q in range(seq_len) for k in range(seq_len))
        mine = [t for t in tasks if t.name.startswith(f"layers.{layer}.attention")]
        assert [t.phase for t in mine] == ["forward", "recompute", "backward"]
        assert {task.op.pairs for task in mine} == {pairs}
        assert sum(t.op.exact_flops for t in mine) == 18 * 8 * pairs * 16  # 4 + 4 + 10, heads


def test_names_that_are_trained_are_still_the_gpts():
    assert not set(catalogue.names()) & set(catalogue.decoder_names())
    assert set(TEN) <= set(catalogue.decoder_names())


def shapes(model, seq_len, **options):
    """{name: (m, n, k)} of one microbatch of one sequence."""
    found = decoder.products(model, 1, seq_len, **options)
    return {p.name: (p.gemm.m, p.gemm.n, p.gemm.k) for p in found}


@pytest.mark.parametrize(  # (m, n, k) of qkv, out, gate_up, down, vocab and their sum in TFLOP
    ("name", "n", "k", "tflop"),
    [
        ("Llama2_7B", (12288, 4096, 22016, 4096, 32000), (4096,) * 3 + (11008, 4096), 2.732),
        ("Llama2_70B", (10240, 8192, 57344, 8192, 32000), (8192,) * 3 + (28672, 8192), 9.157),
        ("Llama3.1_8B", (6144, 4096, 28672, 4096, 128256), (4096,) * 3 + (14336, 4096), 12.181),
        ("Llama3.1_70B", (10240, 8192, 57344, 8192, 128256), (8192,) * 3 + (28672, 8192), 31.233),
        (
            "Llama3.1_405B",
            (18432, 16384, 106496, 16384, 128256),
            (16384,) * 3 + (53248, 16384),
            86.655,
        ),
        ("Mistral_8x7B", (6144, 4096, 28672, 4096, 32000), (4096,) * 3 + (14336, 4096), 2.860),
        ("Mistral_8x22B", (8192, 6144, 32768, 6144, 32000), (6144,) * 3 + (16384, 6144), 4.806),
    ],
)
def test_dense_shapes_of_primus(name, n, k, tflop):
    """Read from its file, in which the Mixtrals are dense."""
    model, seq_len = primus.read_models(PRIMUS_MODELS)[name]
    found = decoder.products(model, 1, seq_len)
    assert [p.name for p in found] == ["qkv", "out", "gate_up", "down", "vocab"]
    assert [(p.gemm.m, p.gemm.n, p.gemm.k) for p in found] == [
        (seq_len, rows, columns) for rows, columns in zip(n, k, strict=True)
    ]
    assert sum(p.gemm.flops for p in found) / 1e12 == pytest.approx(tflop, abs=6e-4)


LATENT_SHAPES = {  # (m, n, k); experts over all their rows, shared experts at their own width
    "Deepseek_V2_Lite": {
        "q": (4096, 3072, 2048),
        "kv_down": (4096, 576, 2048),
        "kv_up": (4096, 4096, 512),
        "out": (4096, 2048, 2048),
        "router": (4096, 64, 2048),
        "experts_gate_up": (6 * 4096, 2816, 2048),
        "experts_down": (6 * 4096, 2048, 1408),
        "shared_gate_up": (4096, 2 * 2 * 1408, 2048),
        "shared_down": (4096, 2048, 2 * 1408),
        "vocab": (4096, 102400, 2048),
    },
    "Deepseek_V2": {
        "q_down": (4096, 1536, 5120),
        "q_up": (4096, 24576, 1536),
        "kv_down": (4096, 576, 5120),
        "kv_up": (4096, 32768, 512),
        "out": (4096, 5120, 16384),
        "router": (4096, 160, 5120),
        "experts_gate_up": (6 * 4096, 3072, 5120),
        "experts_down": (6 * 4096, 5120, 1536),
        "shared_gate_up": (4096, 2 * 2 * 1536, 5120),
        "shared_down": (4096, 5120, 2 * 1536),
        "vocab": (4096, 102400, 5120),
    },
    "Deepseek_V3": {
        "q_down": (4096, 1536, 7168),
        "q_up": (4096, 24576, 1536),
        "kv_down": (4096, 576, 7168),
        "kv_up": (4096, 32768, 512),
        "out": (4096, 7168, 16384),
        "router": (4096, 256, 7168),
        "experts_gate_up": (8 * 4096, 4096, 7168),
        "experts_down": (8 * 4096, 7168, 2048),
        "shared_gate_up": (4096, 2 * 2048, 7168),
        "shared_down": (4096, 7168, 2048),
        "vocab": (4096, 129280, 7168),
    },
}


@pytest.mark.parametrize("name", LATENT_SHAPES)
def test_latent_shapes_are_primus_but_for_the_experts(name):
    model, seq_len = primus.read_models(PRIMUS_MODELS)[name]
    assert shapes(model, seq_len) == LATENT_SHAPES[name]
    groups = {p.name: p.gemm.groups for p in decoder.products(model, 1, seq_len)}
    assert groups["experts_gate_up"] == groups["experts_down"] == model.experts.num_experts
    assert groups["shared_gate_up"] == 1


def test_out_reads_all_heads_where_they_are_wider_than_hidden():
    nemo = hugging_face.read_config(CONFIGS / "mistral-nemo-12b.json")
    assert shapes(nemo, 128)["out"] == (128, 5120, 4096)
    assert shapes(nemo, 128)["qkv"] == (128, (32 + 8 + 8) * 128, 5120)


def test_products_are_counted_over_the_model():
    counts = {p.name: p.count for p in decoder.products(catalogue.find("deepseek-v3"), 1, 64)}
    assert counts["out"] == 61
    assert counts["gate_up"] == counts["down"] == 3
    assert counts["router"] == counts["experts_gate_up"] == counts["shared_down"] == 58
    assert counts["vocab"] == 1


@pytest.mark.parametrize("model", [DENSE, MOE, SCORED, LATENT, GPT])
def test_products_multiply_every_matrix_once(model):
    """2 * rows FLOPs an element of each weight matrix but lookups."""
    rows = 2 * 8
    found = sum(p.count * p.gemm.flops for p in decoder.products(model, 2, 8))
    tables = ("embed.weight", "positions.weight")
    matrices = [w for w in decoder.weights(model) if len(w.shape) > 1 and w.name not in tables]
    elements = sum(w.num_elements for w in matrices)
    if isinstance(model, Model):  # its tied head is the embedding
        elements += model.vocab * model.hidden
    else:
        stacked = sum(w.num_elements for w in matrices if len(w.shape) == 3)
        elements -= stacked * 4 // 6  # of 6 experts a token sees 2
    assert found == 2 * rows * elements


def test_the_three_passes_are_in_primus_order():
    forward, wgrad, dgrad = decoder.passes(Gemm(m=8192, n=6144, k=4096))
    assert forward == Gemm(m=8192, n=6144, k=4096, trans_a=False, trans_b=True)
    assert wgrad == Gemm(m=6144, n=4096, k=8192, trans_a=True, trans_b=False)
    assert dgrad == Gemm(m=8192, n=4096, k=6144, trans_a=False, trans_b=False)


def test_grouped_passes_move_each_experts_weight():
    rows, width, hidden, experts = 512, 96, 64, 8
    forward, wgrad, dgrad = decoder.passes(Gemm(m=rows, n=width, k=hidden, groups=experts))
    x, y, w = rows * hidden, rows * width, experts * width * hidden
    assert forward.bytes == wgrad.bytes == dgrad.bytes == 2 * (x + y + w)
    assert forward.flops == wgrad.flops == dgrad.flops == 2 * rows * width * hidden


def test_fp8_products_are_scaled():
    gemm = decoder.products(DENSE, 1, 16, dtype="fp8")[0].gemm
    assert (gemm.dtype, gemm.scaling) == ("fp8", "tensor")


ATTENTION_FLOPS = {  # one causal forward, batch 1
    "Llama2_7B": 137_438_953_472,
    "Llama2_70B": 274_877_906_944,
    "Llama3_8B": 549_755_813_888,
    "Llama3_70B": 1_099_511_627_776,
    "deepseek_v2_lite": 343_597_383_680,
    "deepseek_v2": 2_748_779_069_440,
    "deepseek_v3": 2_748_779_069_440,
    "mistral_8x7B": 137_438_953_472,
    "mistral_8x22B": 206_158_430_208,
}
CATALOGUED = [
    "llama-2-7b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "deepseek-v2-lite", "deepseek-v2",
    "deepseek-v3", "mixtral-8x7b", "mixtral-8x22b",
]  # fmt: skip


def test_attention_shapes_of_primus_are_those_of_the_models():
    for shape, name in zip(primus.read_attention_shapes(PRIMUS_SHAPES), CATALOGUED, strict=True):
        op = decoder.attention(catalogue.find(name), 1, shape.seqlen_q)
        assert (op.q_len, op.kv_len) == (shape.seqlen_q, shape.seqlen_kv)
        assert (op.heads, op.kv_heads) == (shape.num_head_q, shape.num_head_kv)
        assert (op.head_dim, op.value_dim) == (shape.head_dim_qk, shape.head_dim_v)
        assert op.causal == shape.causal
        assert op.flops == ATTENTION_FLOPS[shape.model]


def test_attention_has_the_microbatch_and_the_direction_asked_for():
    op = decoder.attention(catalogue.find("llama-3-70b"), 2, 512, direction="backward")
    assert (op.batch, op.heads, op.kv_heads, op.direction) == (2, 64, 8, "backward")
    assert decoder.attention(GPT, 1, 16).kv_heads == GPT.heads


def exchanged(model, *options, **degrees):
    found = decoder.exchanges(model, *options, **degrees)
    return {each.name: each.collective for each in found}


@pytest.mark.parametrize(  # bytes of one sequence, fp16 (bf16)
    ("name", "seq_len", "size_bytes"),
    [
        ("llama-3-70b", 8192, 134_217_728),
        ("deepseek-v3", 8192, 117_440_512),
        ("llama-2-7b", 4096, 33_554_432),
    ],
)
def test_bytes_of_tensor_and_pipeline_messages(name, seq_len, size_bytes):
    found = exchanged(catalogue.find(name), 1, seq_len, tp=8, dtype="fp16")
    for op in ("tp.all_reduce", "sp.all_gather", "sp.reduce_scatter"):
        assert (found[op].size_bytes, found[op].group_size) == (size_bytes, 8)
    assert (found["pp.send_recv"].size_bytes, found["pp.send_recv"].group_size) == (size_bytes, 2)


@pytest.mark.parametrize(
    ("model", "seq_len", "size_bytes"),
    [
        (catalogue.find("deepseek-v3"), 4096, 469_762_048),
        (catalogue.find("deepseek-v2"), 4096, 251_658_240),
        (catalogue.find("deepseek-v2-lite"), 4096, 100_663_296),
        (catalogue.find("mixtral-8x22b"), 4096, 100_663_296),
        (catalogue.find("mixtral-8x7b"), 4096, 67_108_864),
        (catalogue.find("gpt-oss-120b"), 4096, 94_371_840),
        (catalogue.find("qwen3-235b-a22b"), 4096, 268_435_456),
        (catalogue.find("qwen3-235b-a22b"), 32768, 2_147_483_648),
        (catalogue.find("llama-4-maverick"), 1_048_576, 10_737_418_240),
    ],
)
def test_bytes_to_the_experts(model, seq_len, size_bytes):
    assert exchanged(model, 1, seq_len, tp=1, ep=8)["ep.all_to_all"].size_bytes == size_bytes


def test_rows_to_the_experts_are_padded_to_the_ranks():
    op = exchanged(MOE, 1, 7, tp=1, ep=3)["ep.all_to_all"]  # 7 * 2 rows on 3 ranks
    assert op.size_bytes == 15 * MOE.hidden * 2


def test_a_degree_of_one_sends_nothing():
    assert list(exchanged(MOE, 1, 8, tp=1)) == ["pp.send_recv"]
    assert list(exchanged(GPT, 1, 8, tp=1, ep=4)) == ["pp.send_recv"]


@pytest.mark.parametrize(
    ("model", "degrees", "named"),
    [
        (DENSE, {"tp": 3}, "tp = 3: must divide heads = 8"),
        (msgspec.structs.replace(DENSE, heads=6, kv_heads=3), {"tp": 2}, "kv_heads = 3"),
        (msgspec.structs.replace(DENSE, ffn=97), {"tp": 2}, "ffn = 97"),
        (msgspec.structs.replace(DENSE, vocab=5), {"tp": 4}, "vocab = 5"),
        (GPT, {"tp": 3}, "heads = 4"),
        (MOE, {"tp": 1, "ep": 4}, "ep = 4: must divide experts.num_experts = 6"),
        (DENSE, {"tp": 0}, "tp = 0: must be >= 1"),
        (DENSE, {"tp": 4, "seq_len": 6}, "tp = 4: must divide seq_len / cp = 6"),
        (DENSE, {"tp": 1, "microbatch_size": -1}, "microbatch_size = -1"),
    ],
)
def test_sizes_that_cannot_be_divided_are_named(model, degrees, named):
    with pytest.raises(ValueError, match=named):
        decoder.exchanges(model, **({"microbatch_size": 1, "seq_len": 8} | degrees))


@pytest.mark.parametrize("size", ["microbatch_size", "seq_len"])
@pytest.mark.parametrize("asked", [decoder.products, decoder.attention, decoder.attentions])
def test_a_size_of_none_is_named(asked, size):
    with pytest.raises(ValueError, match=f"^{size} = 0: must be >= 1"):
        asked(DENSE, **({"microbatch_size": 1, "seq_len": 8} | {size: 0}))


@pytest.mark.parametrize(
    ("change", "tp"),
    [({"kv_heads": 4}, 8), ({"vocab": 101}, 4)],  # a key head on two ranks; ranks with a row less
)
def test_what_a_run_may_do_exchanges_the_stream(change, tp):
    model = msgspec.structs.replace(DENSE, **change)
    found = exchanged(model, 2, 8, tp=tp)
    assert {op.size_bytes for op in found.values()} == {2 * 8 * 64 * 2}
    assert list(found) == ["tp.all_reduce", "sp.all_gather", "sp.reduce_scatter", "pp.send_recv"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda models: {"models": models}, "Expected `array`"),
        (lambda models: [], "the list is empty"),
        (lambda models: [1], "entry 1 = 1: must be an object"),
        (lambda models: [{"seqlen": 1}], "entry 1: model is missing"),
        (lambda models: [*models[:2], {"model": "A"}], r"entry 3 \(A\): seqlen, hidden_size"),
        (lambda models: [models[0] | {"hidden_size": 0}], r"\(Llama2_7B\): hidden_size = 0"),
        (lambda models: [models[0] | {"seqlen": "4k"}], r"\(Llama2_7B\): seqlen = '4k'"),
        (lambda models: [models[-1] | {"n_shared_experts": -1}], "n_shared_experts = -1"),
        (lambda models: [models[0], models[0]], "named twice"),
        (lambda models: [models[1] | {"num_key_value_heads": 3}], "num_key_value_heads = 3"),
    ],
)
def test_a_file_that_is_no_model_list_is_refused_by_name(change, named, tmp_path):
    path = written(tmp_path, change(json.loads(PRIMUS_MODELS.read_text())))
    with pytest.raises(ValueError, match=named) as caught:
        primus.read_models(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda shape: {k: v for k, v in shape.items() if k != "causal"}, "causal missing"),
        (lambda shape: shape | {"causal": "yes"}, "causal = 'yes'"),
        (lambda shape: shape | {"seqlen_kv": -4096}, "seqlen_kv = -4096"),
        (lambda shape: shape | {"num_head_kv": 5}, "num_head_kv = 5: must divide num_head_q = 32"),
    ],
)
def test_an_attention_shape_that_does_not_fit_is_refused_by_name(change, named, tmp_path):
    first = json.loads(PRIMUS_SHAPES.read_text())[0]
    with pytest.raises(ValueError, match=f"entry 1 \\(Llama2_7B\\): .*{named}"):
        primus.read_attention_shapes(written(tmp_path, [change(first)]))


def operations(name):
    """All operations of a model on one device, a microbatch of one sequence, bf16."""
    model, seq_len = catalogue.find(name), TEN[name][1]
    lines = [f"{name}: {decoder.published_parameters(model):,} parameters, {seq_len} tokens"]
    for product in decoder.products(model, 1, seq_len):
        for step, gemm in zip(("fwd", "wgrad", "dgrad"), decoder.passes(product.gemm), strict=True):
            size = f"{gemm.m} x {gemm.n} x {gemm.k}" + (f" / {gemm.groups}" * (gemm.groups > 1))
            stored = "".join("nt"[t] for t in (gemm.trans_a, gemm.trans_b))
            called = f"  {product.count:>3} {product.name:<15} {step:<5} {stored} {size:<26}"
            lines.append(f"{called} {gemm.flops:>21,} FLOP {gemm.bytes:>17,} B")
    for direction in ("forward", "backward"):
        op = decoder.attention(model, 1, seq_len, direction=direction)
        size = f"{op.heads}/{op.kv_heads} heads of {op.head_dim}/{op.value_dim}"
        called = f"  {model.layers:>3} {'attention':<15} {direction:<8} {size:<26}"
        lines.append(f"{called} {op.flops:>21,} FLOP {op.bytes:>17,} B")
    for each in decoder.exchanges(model, 1, seq_len, tp=8, ep=8):
        op = each.collective
        lines.append(f"      {each.name} of {op.group_size}: {op.size_bytes:,} B")
    return "\n".join(lines)


def test_operations_of_the_ten_models_are_as_recorded(golden):
    golden("operations.txt", "\n\n".join(map(operations, TEN)) + "\n")


def test_without_a_gate_there_is_up_and_down():
    """One of three layers is dense: a gate less there, in each of 6 experts and the shared one."""
    plain = msgspec.structs.replace(MOE, gated=False)
    gates = 64 * (96 + 2 * (6 * 24 + 40))
    assert decoder.published_parameters(MOE) - decoder.published_parameters(plain) == gates
    found = {p.name: p.gemm.n for p in decoder.products(plain, 1, 4)}
    assert {name: found[name] for name in found if "up" in name} == {
        "up": 96, "experts_up": 24, "shared_up": 40,
    }  # fmt: skip


def test_a_gpt_with_experts_lists_their_products():
    model = catalogue.find("moe-380m")  # experts in four of eight layers
    found = {p.name: (p.gemm.m, p.gemm.n, p.gemm.k, p.gemm.groups, p.count) for p in
             decoder.products(model, 2, 128)}  # fmt: skip
    h, ffn = 768, 8 * 768
    assert found == {
        "qkv": (256, 3 * h, h, 1, 8), "out": (256, h, h, 1, 8), "up": (256, ffn, h, 1, 4),
        "down": (256, h, ffn, 1, 4), "router": (256, 8, h, 1, 4),
        "experts_up": (512, ffn, h, 8, 4), "experts_down": (512, h, ffn, 8, 4),
        "vocab": (256, 32000, h, 1, 1),
    }  # fmt: skip
