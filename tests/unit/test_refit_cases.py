"""The catalogue of refits: its layouts, and the bytes that they move, against published figures."""

import msgspec
import numpy as np
import pytest

from meshwise.models.decoder import published_parameters
from meshwise.probe.cases import refit as cases
from meshwise.reshard import bounds, transfer
from meshwise.reshard.holdings import holdings
from meshwise.spec import Model
from meshwise.spec.refit import Scenario, Side

PEER = bounds.Rates("peer copies", 373e9)
# GB into the busiest GPU, as the comparison with Megatron on 4 H200 lists them
FIGURES = {
    "8b-tp2-tp1": 8.03,
    "8b-tp2-tp4": 4.01,
    "8b-tp2pp2-tp4": 4.02,
    "8b-tp2pp2-tp1": 12.05,
    "8b-tp2-tp2-apart": 8.03,
    "1.5b-tp2-tp4": 0.75,
    "1.5b-tp2-tp1": 1.50,
    "moe-30b-ep2-ep4": 14.5,
    "moe-5b-ep2-ep4": 2.2,
}
# Megatron's own planner replayed on these scenarios, fp32, vocabulary padded to 50432 (large:
# 50688): MB kept, MB sent, most into a rank, least possible most out of a rank
SUITE = {
    "tp2-tp1": (614.5, 614.5, 307.2, 307.2),
    "tp1-tp2": (614.5, 0.0, 0.0, 0.0),
    "tp2-tp4": (307.4, 307.2, 153.6, 76.8),
    "tp2pp2-tp4pp1": (204.1, 612.0, 204.0, 203.9),
    "tp1pp2-tp2pp1": (408.0, 408.0, 204.0, 204.0),
    "ep2-ep1": (2034.6, 1073.7, 536.9, 536.9),
    "ep2-ep4": (2458.5, 536.9, 268.4, 134.2),
    "large": (3637.5, 10910.5, 3636.7, 3636.5),
    "tp2-tp1-apart": (0.0, 614.5, 614.5, 307.3),
}
HUGE = {"kimi-k2", "kimi-k2-128", "32gpu-tp8pp4-tp16pp2"}


def planned(scenario: Scenario, orders=("megatron", "engine")):
    """(bytes kept, sent, most into a rank), and the bounds."""
    world_size = cases.num_ranks(scenario, scenario.mode)
    layouts = cases.layouts(scenario, scenario.mode, world_size, orders)
    source, destination = (holdings(scenario.model, layout) for layout in layouts)
    loads = sum(transfer.loads(transfer.transfer_plan(source, destination, multicast="never")))
    wire = loads - np.diag(loads.diagonal())
    return (loads.trace(), wire.sum(), wire.sum(0).max()), bounds.limits(source, destination, PEER)


@pytest.mark.parametrize("name", FIGURES)
def test_as_many_bytes_reach_the_busiest_gpu_as_the_comparison_says(name):
    (_, _, most_in), limits = planned(cases.scenarios()[name])
    assert most_in / 1e9 == pytest.approx(FIGURES[name], rel=0.012)
    assert limits.ingress_s == pytest.approx(most_in / 373e9)  # this plan's busiest is the bound


@pytest.mark.parametrize("name", SUITE)
def test_megatrons_scenarios_move_what_its_own_planner_moves(name):
    scenario = cases.scenarios()[name]
    padded = msgspec.structs.replace(scenario.model, vocab=50688 if name == "large" else 50432)
    scenario = msgspec.structs.replace(scenario, model=padded)
    (kept, sent, most_in), limits = planned(scenario, ("plain", "plain"))
    found = kept, sent, most_in, limits.egress_s * 373e9
    # norms and positions differ between the two models: some 2 MB in the largest
    assert [number / 1e6 for number in found] == pytest.approx(SUITE[name], rel=2e-3, abs=0.3)


@pytest.mark.parametrize("name", sorted(cases.scenarios().keys() - HUGE))
def test_every_scenario_can_be_laid_out_in_every_order(name):
    scenario = cases.scenarios()[name]
    for orders in (("megatron", "engine"), ("plain", "megatron"), ("engine", "plain")):
        world_size = cases.num_ranks(scenario, scenario.mode)
        for layout in cases.layouts(scenario, scenario.mode, world_size, orders):
            held = holdings(scenario.model, layout)
            ranks = {piece.rank for tensor in held.values() for piece in tensor.layout}
            assert ranks == set(range(layout.first_rank, layout.first_rank + layout.num_ranks))


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("tp2-tp1", 2), ("tp2-tp1-apart", 3), ("tp2-tp4", 4), ("ep2-ep4", 4), ("large", 4),
        ("16gpu-tp4pp2-tp8", 16), ("32gpu-tp8pp4-tp16pp2", 32), ("dp8-dp8", 16),
        ("ep4x16-ep8x8", 24), ("fsdp4-tp4", 4), ("kimi-k2", 64),
    ],
)  # fmt: skip
def test_a_scenario_takes_the_gpus_that_it_is_listed_with(name, gpus):
    scenario = cases.scenarios()[name]
    assert cases.num_ranks(scenario, scenario.mode) == gpus


def test_the_eight_gpu_lists_have_six_apart_and_four_together():
    eight = [one for name, one in cases.scenarios().items() if name.startswith("8gpu-")]
    modes = [one.mode for one in eight]
    assert (modes.count("non-collocated"), modes.count("collocated")) == (6, 4)
    assert all(cases.num_ranks(one, one.mode) <= 8 for one in eight)


def test_the_models_are_as_large_as_they_are_called():
    sizes = {"8b-tp2-tp1": 8.03e9, "1.5b-tp2-tp1": 1.5e9, "moe-30b-ep2-ep4": 30.5e9}
    sizes |= {"moe-5b-ep2-ep4": 5.1e9, "kimi-k2": 1.03e12}
    for name, parameters in sizes.items():
        assert published_parameters(cases.scenarios()[name].model) == pytest.approx(
            parameters, rel=0.01
        )


def test_the_menu_has_ten_numbers():
    assert list(cases.MENU) == [str(number) for number in range(1, 11)]
    assert cases.find("2").scenarios[0].mode == "non-collocated"
    assert cases.find("8").methods == ("nccl", "nvshmem")
    assert [one.name for one in cases.find("9").scenarios] == ["large"]
    assert len(cases.find("10").scenarios) == 7


def test_an_unknown_scenario_suggests_the_nearest():
    with pytest.raises(
        ValueError, match="scenario = 'tp2tp4': there is none; did you mean tp2-tp4"
    ):
        cases.find("tp2tp4")


def test_models_apart_follow_each_other_and_leave_the_rest_idle():
    scenario = cases.scenarios()["8gpu-tp2pp2-tp2"]
    train, infer = cases.layouts(scenario, "non-collocated", 8)
    assert (train.first_rank, train.num_ranks) == (0, 4)
    assert (infer.first_rank, infer.num_ranks) == (4, 2)


def test_collocated_models_fill_more_ranks_with_replicas():
    train, infer = cases.layouts(cases.scenarios()["tp2-tp4"], "collocated", 8)
    assert (train.dp, infer.dp) == (4, 2)
    assert train.num_ranks == infer.num_ranks == 8


def test_ranks_that_both_sides_cannot_share_are_refused_with_a_number_that_fits():
    odd = msgspec.structs.replace(cases.scenarios()["tp2-tp4"], infer=Side(tp=3))
    with pytest.raises(ValueError, match=r"nproc = 4: must be a multiple of 2 .* and 3 .*, as 6"):
        cases.layouts(odd, "collocated", 4)
    with pytest.raises(ValueError, match="nproc = 2: tp2-tp4 collocated needs 4 ranks"):
        cases.layouts(cases.scenarios()["tp2-tp4"], "collocated", 2)


def test_sizes_follow_from_each_other_as_in_megatron():
    base = cases.scenarios()["tp2-tp1"].model
    wide = cases.resized(base, hidden=512, heads=4)
    assert (wide.head_dim, wide.kv_heads, wide.ffn) == (128, 4, 2048)
    gated = cases.resized(base, gated=True)
    assert (gated.gated, gated.ffn) == (True, 2688)  # 8/3 x 1024 = 2730.7, down to 64 x 42
    grouped = cases.resized(base, kv_heads=2, hidden=2048)
    assert (grouped.kv_heads, grouped.head_dim) == (2, 256)
    moe = cases.resized(base, num_experts=4)
    assert (moe.experts.num_experts, moe.experts.ffn) == (4, 4096)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 100, "heads": 8}, "num_attention_heads = 8: must divide hidden_size = 100"),
        ({"expert_ffn": 64}, "moe_ffn_hidden_size = 64: needs --num-experts"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_their_flag(sizes, message):
    with pytest.raises(ValueError, match=message):
        cases.resized(cases.scenarios()["tp2-tp1"].model, **sizes)


def test_a_model_of_fixed_sizes_is_named():
    model = Model(name="gpt-30m", hidden=8, layers=1, heads=1, ffn=8)
    with pytest.raises(ValueError, match="model = 'gpt-30m': its sizes cannot be changed"):
        cases.resized(model, layers=2)


def test_inference_degrees_default_to_training_ones_only_where_no_scenario_says():
    custom = cases.changed(cases.custom(), train={"tp": 2})
    assert custom.infer.tp == 2
    named = cases.changed(cases.scenarios()["tp2-tp4"], train={"tp": 1})
    assert (named.train.tp, named.infer.tp) == (1, 4)


def test_experts_are_cut_by_tp_unless_told_otherwise():
    train, infer = cases.layouts(cases.scenarios()["kimi-k2"], "collocated", 64)
    assert (train.ep, train.etp, infer.ep, infer.etp) == (8, 8, 16, 4)
    assert cases.layouts(cases.scenarios()["8gpu-tp2ep2-tp1ep4"], "non-collocated", 8)[0].etp == 1


def test_expert_parallelism_needs_experts():
    with pytest.raises(ValueError, match="ep = 2: the model has no experts; give --num-experts"):
        cases.layouts(cases.changed(cases.custom(), train={"ep": 2}), "collocated", 2)


def test_all_methods_are_those_of_the_device():
    assert cases.methods("all", "cuda") == ("nccl", "nvshmem", "gloo", "ipc")
    assert cases.methods("all", "cpu") == ("gloo",)
    assert cases.methods("auto", "cuda", ("nccl", "nvshmem")) == ("nccl", "nvshmem")
    assert cases.methods("gloo", "cuda", ("nccl", "nvshmem")) == ("gloo",)
    with pytest.raises(ValueError, match="method = 'mpi': must be one of nccl"):
        cases.methods("mpi", "cuda")


def test_training_alone_is_sharded_by_fsdp():
    """Degrees of inference that nobody gave are training's, but FSDP is for training."""
    found = cases.changed(cases.custom(), train={"tp": 2, "fsdp": 4})
    assert (found.train.tp, found.train.fsdp) == (2, 4)
    assert (found.infer.tp, found.infer.fsdp) == (2, 1)
