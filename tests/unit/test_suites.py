"""The suites against the tables and texts that Alpa publishes, by hand."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise import suites
from meshwise.models import placement, step_flops
from meshwise.spec import Layout, Model, WideResNet, Workload
from meshwise.suites import formulas, layouts, scale, source, tsv
from meshwise.suites.case import (
    BenchmarkCase,
    GPTModelConfig,
    ShardParallelArgs,
    UniformParallelArgs,
)

GiB = 2**30
BUILT = [name for name in suites.names() if not name.startswith("unet")]


def only(suite, num_devices):
    (case,) = suites.cases(suite, num_devices)
    return case


# The cases.


def test_there_are_20_suites_and_the_two_of_unet_say_that_they_are_not_built():
    assert len(set(suites.names())) == 20 and len(BUILT) == 18
    for name in set(suites.names()) - set(BUILT):
        with pytest.raises(ValueError, match="UNet is not built"):
            suites.cases(name, 4)


@pytest.mark.parametrize(
    ("suite", "counts"),
    [
        ("gpt.tmp", {1: 1, 8: 1}),
        ("gpt.tmp_auto", {}),
        ("gpt.perf_test_fast_2d", {1: 1, 8: 2}),
        ("gpt.perf_test_manual", {1: 1, 4: 1, 8: 1, 64: 1}),
        ("gpt.perf_test_auto", dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 1)),
        ("gpt.grid_search_auto", {2: 6, 4: 5, 8: 5, 16: 4, 32: 4, 64: 4}),
        ("gpt.correctness_test_auto", {8: 1}),
        (
            "gpt_inference.profile",
            {1: 20, 2: 40, 4: 60, 8: 80, 16: 75, 32: 65, 64: 45, 128: 25, 256: 10},
        ),
        (
            "moe_inference.profile",
            {1: 20, 2: 40, 4: 60, 8: 80, 16: 80, 32: 60, 64: 40, 128: 20},
        ),
        ("moe.tmp", {1: 1, 8: 1, 16: 1}),
        ("moe.tmp_auto", {}),
        ("moe.perf_test_fast_2d", {1: 1, 8: 3}),
        ("moe.perf_test_auto", dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 1)),
        ("moe.grid_search_auto", {2: 3, 4: 3, 8: 3, 16: 3, 32: 9, 64: 3}),
        ("wresnet.perf_test_2d", {1: 2, 4: 4, 8: 1}),
        ("wresnet.perf_test_auto", dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 1)),
        ("wresnet.grid_search_auto", {1: 2, 2: 2, 4: 2, 8: 2, 16: 2, 32: 2, 64: 1}),
    ],
)
def test_every_suite_has_the_cases_of_the_source(suite, counts):
    assert {n: len(suites.cases(suite, n)) for n in suites.device_counts(suite)} == counts


def test_inference_with_and_without_embeddings_has_the_same_420_cases():
    with_it = suites.device_counts("gpt_inference.profile")
    found = [suites.cases("gpt_inference.profile", n) for n in with_it]
    assert sum(map(len, found)) == 420
    assert found == [suites.cases("gpt_no_embedding_inference.profile", n) for n in with_it]


def test_the_text_of_a_case_is_the_source_s():
    assert str(only("gpt.perf_test_manual", 8)) == (
        "BenchmarkCase(batch_size=32, model_config=GPTModelConfig(seq_len=1024, hidden_size=2560, "
        "num_layers=32, num_heads=32, vocab_size=51200), num_micro_batches=4, "
        "parallel_mode='uniform', parallel_args=UniformParallelArgs(prefer_reduce_scatter=True, "
        "use_remat=True, dp=2, op=2, pp=2, force_batch_dim_mapping=True))"
    )
    assert str(only("gpt.perf_test_auto", 8)) == (
        "BenchmarkCase(batch_size=1024, model_config=GPTModelConfig(seq_len=1024, "
        "hidden_size=2560, num_layers=32, num_heads=32, vocab_size=51200), num_micro_batches=128, "
        "parallel_mode='load_solution', parallel_args=LoadSolutionParallelArgs("
        "prefer_reduce_scatter=True, use_remat=True, num_auto_layers=8, "
        "forward_stage_layer_ids=[[0, 1], [2, 3], [4, 5, 6, 7]], "
        "submesh_physical_shapes=[(1, 2), (1, 2), (1, 4)], "
        "submesh_logical_shapes=[(2, 1), (2, 1), (4, 1)], "
        "submesh_autosharding_option_dicts=[{'force_batch_dim_to_mesh_dim': 0}, {}, {}]))"
    )
    assert str(suites.cases("moe.perf_test_fast_2d", 8)[1]) == (
        "BenchmarkCase(batch_size=16, model_config=MoEModelConfig(seq_len=1024, hidden_size=1024, "
        "num_layers=4, num_heads=32, vocab_size=25600, num_experts=32, expert_group_size=1024), "
        "num_micro_batches=1, parallel_mode='uniform', parallel_args=UniformParallelArgs("
        "prefer_reduce_scatter=False, use_remat=True, dp=4, op=2, pp=1, "
        "force_batch_dim_mapping=False))"
    )
    assert str(suites.cases("wresnet.perf_test_2d", 4)[0]) == (
        "BenchmarkCase(batch_size=32, model_config=WResNetModelConfig(image_size=224, "
        "num_layers=50, num_channels=320, width_factor=2, dtype='fp32'), num_micro_batches=1, "
        "parallel_mode='2d_shard', parallel_args=ShardParallelArgs(prefer_reduce_scatter=False, "
        "use_remat=False, logical_mesh_shape=(4, 1), force_batch_dim_mapping=False))"
    )
    assert str(suites.cases("wresnet.grid_search_auto", 32)[1]) == (
        "BenchmarkCase(batch_size=1512, model_config=WResNetModelConfig(image_size=224, "
        "num_layers=50, num_channels=320, width_factor=16, dtype='fp32'), num_micro_batches=42, "
        "parallel_mode='search', parallel_args=SearchParallelArgs(prefer_reduce_scatter=True, "
        "use_remat=True, num_auto_layers=16, auto_stage_option={"
        "'submesh_physical_shape_space': 'small_power_of_two', "
        "'submesh_logical_shape_space': 'single_node_model_parallel', "
        "'stage_imbalance_tolerance': 0.25, 'use_hlo_cost_model': False, "
        "'profiling_database_filename': None}))"
    )


def test_what_cannot_run_says_why():
    found = {name: suites.missing(name) for name in suites.names()}
    assert [name for name, why in found.items() if "empty" in why] == [
        "gpt.tmp_auto",
        "moe.tmp_auto",
    ]
    assert all("UNet" in found[name] for name in found if name.startswith("unet"))
    assert list(found.values()).count("") == 16


@pytest.mark.parametrize(
    ("suite", "num_devices", "text"),
    [
        ("gpt.perf_test_manuel", 8, r"did you mean gpt.perf_test_manual\?"),
        ("xyz", 8, "known: gpt.tmp, "),
        ("gpt.perf_test_manual", 3, "no case for 3 GPUs; it has cases for 1, 4, 8, 64"),
        ("gpt.tmp_auto", 8, "no case for 8 GPUs; it is empty"),
    ],
)
def test_what_is_not_there_is_refused_with_the_fix(suite, num_devices, text):
    with pytest.raises(ValueError, match=text):
        suites.cases(suite, num_devices)


def test_the_sweeps_are_those_of_run_exp():
    found = {sweep.name: sweep for sweep in suites.sweeps()}
    assert len(found) == 7 and suites.shapes()[0] == (8, 8) and suites.shapes()[-1] == (1, 1)
    assert {sweep.suite for sweep in found.values()} <= set(BUILT)
    assert found["gpt_inference"].niter == 10
    assert found["gpt_inference_streaming"].profile_driver_time


# Their layouts.


def mesh(layout):
    return layout.pp, layout.dp, layout.tp, layout.ep, layout.zero, layout.microbatch_size


@pytest.mark.parametrize(
    ("suite", "num_devices", "expected"),  # (pp, dp, tp, ep, zero, microbatch size)
    [
        ("gpt.perf_test_auto", 1, (1, 1, 1, 1, 0, 2)),
        ("gpt.perf_test_auto", 2, (2, 1, 1, 1, 0, 8)),
        ("gpt.perf_test_auto", 4, (2, 2, 1, 1, 2, 4)),
        ("gpt.perf_test_auto", 16, (2, 2, 4, 1, 2, 8)),
        ("gpt.perf_test_auto", 32, (4, 2, 4, 1, 2, 4)),
        ("gpt.perf_test_auto", 64, (16, 1, 4, 1, 0, 1)),
        ("moe.perf_test_auto", 1, (1, 1, 1, 1, 0, 2)),
        ("moe.perf_test_auto", 2, (1, 2, 1, 1, 2, 16)),
        ("moe.perf_test_auto", 4, (2, 2, 1, 1, 2, 16)),
        ("moe.perf_test_auto", 8, (2, 4, 1, 1, 2, 8)),
        ("moe.perf_test_auto", 16, (2, 8, 1, 8, 2, 8)),
        ("moe.perf_test_auto", 32, (8, 4, 1, 4, 2, 2)),
        ("moe.perf_test_auto", 64, (8, 8, 1, 8, 2, 2)),
        ("wresnet.perf_test_auto", 1, (1, 1, 1, 1, 0, 64)),
        ("wresnet.perf_test_auto", 2, (1, 1, 2, 1, 0, 64)),
        ("wresnet.perf_test_auto", 4, (1, 1, 4, 1, 0, 64)),
        ("wresnet.perf_test_auto", 32, (4, 8, 1, 1, 2, 6)),
        ("gpt.perf_test_manual", 8, (2, 2, 2, 1, 2, 4)),
        ("gpt.perf_test_manual", 64, (16, 1, 4, 1, 0, 1)),
        ("moe.tmp", 8, (2, 1, 4, 1, 0, 16)),
        ("moe.tmp", 16, (1, 2, 8, 1, 2, 16)),
    ],
)
def test_equal_stages_become_dp_and_tp(suite, num_devices, expected):
    layout = layouts.layout(only(suite, num_devices), num_devices)
    assert mesh(layout) == expected and not layout.meshes
    assert layout.recompute == "full"
    assert layout.schedule == ("1f1b" if layout.pp > 1 else "none")


@pytest.mark.parametrize(
    ("suite", "num_devices", "meshes", "layers", "rows"),
    [
        ("gpt.perf_test_auto", 8, ((2, 1), (2, 1), (4, 1)), (8, 8, 16), 8),
        ("wresnet.perf_test_auto", 8, ((4, 1), (1, 4)), (), 64),
        ("wresnet.perf_test_auto", 16, ((4, 1), (4, 1), (8, 1)), (5, 4, 7), 48),
        (
            "wresnet.perf_test_auto",
            64,
            ((8, 1), (1, 8), (8, 1), (1, 8), (8, 1), (8, 1), (1, 8), (8, 1)),
            (4, 4, 4, 4, 4, 4, 5, 4),
            40,
        ),
    ],
)
def test_unequal_stages_keep_their_meshes_and_layers(suite, num_devices, meshes, layers, rows):
    layout = layouts.layout(only(suite, num_devices), num_devices)
    assert (layout.meshes, layout.layers, layout.microbatch_size) == (meshes, layers, rows)
    assert layout.zero == 2 and not layout.sequence_parallel


@pytest.mark.parametrize("name", BUILT)
def test_every_case_has_a_legal_layout_on_its_devices(name):
    for num_devices in suites.device_counts(name):
        for case in suites.cases(name, num_devices):
            if case.parallel_mode == "search":
                with pytest.raises(ValueError, match="the case has no layout; search one"):
                    layouts.layout(case, num_devices)
                continue
            inference = suites.is_inference(name)
            layout = layouts.layout(case, num_devices, inference=inference)
            model, workload = layouts.model(case), layouts.workload(case)
            assert layout.num_devices == num_devices
            stages = layout.stage_layers(model.layers)
            assert sum(len(stage) for stage in stages) == model.layers
            rows = layout.microbatch_rows * layout.num_microbatches
            assert rows == workload.global_batch_size == case.batch_size
            for rank in range(layout.pp):
                placement.check(model, workload, layout.of_rank(rank))
            if isinstance(model, Model):
                assert workload.seq_len == 1024


def test_inference_is_forward_only():
    case = suites.cases("gpt_inference.profile", 8)[0]  # the 1.3B model in 1 stage, op 8
    layout = layouts.layout(case, 8, inference=True)
    assert (layout.tp, layout.zero, layout.recompute) == (8, 0, "none")
    assert not layout.sequence_parallel
    pipeline = layouts.layout(suites.cases("gpt_inference.profile", 8)[-1], 8, inference=True)
    assert pipeline.schedule == "gpipe"


def test_experts_lie_over_data_ranks_unless_the_batch_is_pinned():
    found = [layouts.layout(case, 8) for case in suites.cases("moe.perf_test_fast_2d", 8)]
    assert [(x.dp, x.tp, x.ep) for x in found] == [(8, 1, 8), (4, 2, 4), (2, 4, 2)]


def case_of(mode, args, **changes):
    config = GPTModelConfig(1024, 768, 12, 12, 51200)
    return BenchmarkCase(16, config, 1, mode, args)._replace(**changes)


def test_a_mesh_without_stages_and_one_with_them_under_shard_only():
    args = ShardParallelArgs(True, True, (4, 2), True)
    assert mesh(layouts.layout(case_of("2d_shard", args), 8)) == (1, 4, 2, 1, 2, 4)
    piped = case_of("uniform", UniformParallelArgs(True, True, 2, 2, 2, True))
    with pytest.raises(ValueError, match="2 pipeline stages; run it without --shard-only"):
        layouts.layout(piped, 8, shard_only=True)


@pytest.mark.parametrize(
    ("changes", "num_devices", "text"),
    [
        ({}, 4, "needs 8 devices, not 4"),
        ({"num_micro_batches": 3}, 8, "must be a multiple of num_micro_batches = 3"),
        ({"batch_size": 5}, 8, "times each dp = 2"),
        (
            {"model_config": GPTModelConfig(1024, 768, 11, 12, 51200)},
            8,
            "num_layers = 11: must be a multiple of the 2 equal parts",
        ),
    ],
)
def test_a_case_that_does_not_divide_is_refused(changes, num_devices, text):
    case = case_of("uniform", UniformParallelArgs(True, True, 2, 2, 2, True), **changes)
    with pytest.raises(ValueError, match=text):
        layouts.layout(case, num_devices)


def test_models_of_cases():
    dense = layouts.model(only("gpt.perf_test_manual", 8))
    assert isinstance(dense, Model) and dense.name == "gpt-2.6b" and dense.ffn == 10240
    routed = layouts.model(only("moe.perf_test_auto", 8))
    assert isinstance(routed, Model) and routed.name == "moe-2.4b" and routed.ffn == 8 * 1024
    assert routed.experts and (routed.experts.num_experts, routed.experts.top_k) == (16, 2)
    assert [routed.has_experts(i) for i in range(4)] == [True, False, True, False]
    assert (routed.experts.group_size, routed.experts.capacity) == (2048, 256)
    uneven = layouts.model(only("moe.perf_test_auto", 32))
    assert uneven.experts.capacity == 2 * 2048 // 48
    one_row = layouts.model(suites.cases("moe_inference.profile", 1)[0])
    assert one_row.experts.group_size == 1024  # of the two thousand that a microbatch lacks
    images = layouts.model(only("wresnet.perf_test_auto", 64))
    assert isinstance(images, WideResNet) and images.layers == 33
    assert layouts.workload(only("wresnet.perf_test_auto", 64)).seq_len == 1
    assert layouts.model(only("gpt.tmp", 8)).name == "gpt-h4096-l4"


def test_each_family_trains_with_its_optimizer():
    found = {f: layouts.recipe(only(f"{f}.perf_test_auto", 4)) for f in ("gpt", "moe", "wresnet")}
    assert [r.optimizer for r in found.values()] == ["adamw", "adafactor", "sgd"]
    assert all(r.max_grad_norm == 0 for r in found.values())
    assert layouts.dtype(only("wresnet.perf_test_auto", 4)) == "fp32"
    assert layouts.dtype(only("gpt.perf_test_auto", 4)) == "bf16"


# What the source's formulas say.

GPT_TABLE = {  # parameters, PFLOP of 1024 sequences recomputed, and not
    "125M": (124_408_832, 1.1182, 0.9005),
    "350M": (354_740_224, 3.2853, 2.5465),
    "760M": (758_577_152, 6.8280, 5.2447),
    "1.3B": (1_313_409_024, 11.6372, 8.8929),
    "2.6B": (2_648_606_720, 23.3426, 17.7131),
    "6.7B": (6_653_659_136, 57.6144, 43.5407),
    "15B": (15_364_392_960, 132.5351, 99.8137),
    "39B": (39_078_512_640, 333.6534, 250.8998),
    "76B": (76_028_569_600, 647.1725, 486.2040),
}
MOE_TABLE = {  # parameters, PFLOP of 1024 sequences recomputed
    "380M": (383_506_688, 1.5799),
    "690M": (685_717_760, 1.5801),
    "1.3B": (1_346_827_520, 3.0057),
    "2.4B": (2_382_961_920, 4.9926),
    "7.1B": (7_069_615_360, 7.4735),
    "10B": (10_169_642_240, 10.4459),
    "27B": (26_648_100_096, 17.8706),
    "70B": (70_415_219_968, 35.3334),
    "140B": (139_153_571_072, 35.3509),
}
WRESNET_TABLE = {  # parameters, GFLOP of an image forward
    "250M": (254_123_104, 83.6),
    "500M": (495_046_176, 163.5),
    "1B": (1_005_653_184, 333.2),
    "2B": (1_965_011_008, 652.5),
    "4B": (4_000_937_344, 1330.6),
    "6.8B": (6_727_679_424, 2203.5),
    "13B": (12_633_386_944, 4518.2),
}


def one(batch_size, config, remat=True, num_micro_batches=1):
    args = UniformParallelArgs(True, remat, 1, 1, 1, True)
    return BenchmarkCase(batch_size, config, num_micro_batches, "uniform", args)


@pytest.mark.parametrize("size", GPT_TABLE)
def test_gpt_counts_of_the_table(size):
    parameters, recomputed, kept = GPT_TABLE[size]
    found = formulas.counts(one(1024, source.configs("gpt")[size]), "gpt")
    assert found.parameters == parameters
    assert found.flops / 1e15 == pytest.approx(recomputed, abs=5e-5)
    found = formulas.counts(one(1024, source.configs("gpt")[size], remat=False), "gpt")
    assert found.flops / 1e15 == pytest.approx(kept, abs=5e-5)


@pytest.mark.parametrize("size", MOE_TABLE)
def test_moe_counts_of_the_table(size):
    parameters, recomputed = MOE_TABLE[size]
    found = formulas.counts(one(1024, source.configs("moe")[size]), "moe")
    assert found.parameters == parameters
    assert found.flops / 1e15 == pytest.approx(recomputed, abs=5e-5)


@pytest.mark.parametrize("size", WRESNET_TABLE)
def test_wresnet_counts_of_the_table(size):
    parameters, forward = WRESNET_TABLE[size]
    found = formulas.counts(one(8, source.configs("wresnet")[size]), "wresnet")
    assert found.parameters == parameters
    assert found.flops / 1e9 == pytest.approx(8 * 4 * forward, rel=1e-3)


def test_the_rate_of_the_published_run():
    """8 GPUs, 2.6B, 32 sequences in 2.454 s: 37.157 by the formula, 37.16 in the README."""
    found = formulas.counts(only("gpt.perf_test_manual", 8), "gpt")
    assert formulas.tflops(found.flops, 2.454, 8) == pytest.approx(37.157, abs=5e-4)


def test_inference_counts_the_forward_pass_only():
    """Of the layers a quarter of what recomputed training costs; the head's term stays."""
    config = source.configs("gpt")["1.3B"]
    head = 6 * 4 * 1024 * 2048 * 51200
    trained = formulas.counts(one(4, config), "gpt").flops - head
    found = formulas.counts(one(4, config, remat=False), "gpt_inference").flops
    assert found == pytest.approx(trained / 4 + head)
    without = formulas.counts(one(4, config, remat=False), "gpt_no_embedding_inference").flops
    assert without == pytest.approx(trained / 4)
    config, head = source.configs("moe")["1.3B"], 6 * 4 * 1024 * 768 * 32000
    trained = formulas.counts(one(4, config), "moe").flops - head
    found = formulas.counts(one(4, config, remat=False), "moe_inference").flops
    assert found == pytest.approx(trained / 4 + head)


def test_a_dispatch_group_is_no_larger_than_the_microbatch():
    """1024 tokens in place of 2048: 4 B S G + 8 B S H G less in each of 8 layers, fourfold."""
    config = source.configs("moe")["1.3B"]
    whole = formulas.counts(one(2, config), "moe").flops
    halved = formulas.counts(one(2, config, num_micro_batches=2), "moe").flops
    assert whole - halved == pytest.approx(4 * 8 * 2048 * 1024 * (4 + 8 * 768))


# Their tables.

METADATA = dict.fromkeys(
    (
        "compilation_times",
        "compute_cost_file_name",
        "forward_stage_layer_ids",
        "submesh_shapes",
        "logical_mesh_shapes",
        "autosharding_option_dicts",
    )
)


def golden_row():
    case = only("gpt.perf_test_manual", 8)
    flops, parameters = formulas.counts(case, "gpt")
    times_s = (2.4538, 2.4542)
    rate = formulas.tflops(flops, 2.454, 8)
    peak = round(8.745 * GiB)
    return tsv.row(tsv.Ran("gpt", case, 8, parameters, times_s, rate, peak, METADATA))


def test_the_printed_line_is_the_published_one():
    assert tsv.line(golden_row()) == (
        "Type: gpt  Model Config: GPTModelConfig(seq_len=1024, hidden_size=2560, num_layers=32, "
        "num_heads=32, vocab_size=51200)  #Microbatch: 4  #GPU: 8  Parallel Config: "
        "UniformParallelArgs(prefer_reduce_scatter=True, use_remat=True, dp=2, op=2, pp=2, "
        "force_batch_dim_mapping=True)  Mean Time (s): 2.454  Std Time (s): 0.000  "
        "#Params (Billion): 2.649B  TFLOPs: 37.16  Peak Mem (GB): 8.745  Metadata: "
        "{'compilation_times': 'None', 'compute_cost_file_name': 'None', "
        "'forward_stage_layer_ids': 'None', 'submesh_shapes': 'None', "
        "'logical_mesh_shapes': 'None', 'autosharding_option_dicts': 'None'}"
    )


def test_a_table_has_its_header_once_and_a_row_a_case(tmp_path):
    path = tmp_path / "default.tsv"
    for _ in range(3):
        tsv.append(path, golden_row())
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    assert (
        len(lines) == 4
        and lines[0] == list(tsv.COLUMNS)
        and lines[3] == list(golden_row().values())
    )


def test_jobs_that_begin_a_table_at_once_give_it_one_header(tmp_path):
    path, together = tmp_path / "default.tsv", threading.Barrier(8)

    def job(_):
        together.wait()
        tsv.append(path, golden_row())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(job, range(8)))
    header, *rows = path.read_text().splitlines()
    assert header.split("\t") == list(tsv.COLUMNS)
    assert rows == ["\t".join(golden_row().values())] * 8
    assert [*tmp_path.iterdir()] == [path]


def test_a_table_with_other_columns_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "default.tsv"
    path.write_text("gpt\t2.454\n")  # as the source writes them, without a header
    with pytest.raises(ValueError, match=r"default\.tsv has other columns; give another"):
        tsv.append(path, golden_row())
    assert path.read_text() == "gpt\t2.454\n"


def test_a_case_that_failed_has_no_numbers_and_one_line(tmp_path):
    path = tmp_path / "default.tsv"
    case = only("gpt.perf_test_manual", 8)
    metadata = {"error": "out of memory:\n\ttried 3 GB"}
    failed = tsv.Ran("gpt", case, 8, 2_648_606_720, metadata=metadata)
    tsv.append(path, tsv.row(failed))
    _, row = path.read_text().splitlines()
    assert row.split("\t")[5:10] == ["", "", "2.649B", "", ""]
    assert "out of memory" in row.split("\t")[10]


def test_a_row_of_inference_profiles():
    case = suites.cases("gpt_inference.profile", 8)[20]  # 1.3B: pp 1, 2, 4, 8 on 8 GPUs
    ran = tsv.Ran(
        "gpt_inference", case, 8, 1_313_409_024, (0.5, 0.7), 12.345, None, {}, (10, 20), (30, 40),
        (0.25, 0.3),
    )  # fmt: skip
    assert tsv.row(ran, tsv.INFERENCE_COLUMNS) == {
        "ModelName": "bert-1.3b",
        "BS": str(case.batch_size),
        "#Microbatch": "1",
        "DP": "1",
        "OP": str(case.parallel_args.op),
        "PP": str(8 // case.parallel_args.op),
        "#GPU": "8",
        "MeanTime(s)": "0.600",
        "StdTime(s)": "0.100",
        "TFLOPs": "12.35",
        "StageWeights(B)": "[10, 20]",
        "StagePeakMem(B)": "[30, 40]",
        "StageLatencies(s)": "[0.25, 0.3]",
    }


def test_numbers_inside_metadata_are_rounded_as_the_source_does():
    nested = {"times": {"dp": 1.659, "all": 2.0}, "shapes": [(1, 2), (4, 8)], "name": "x"}
    assert tsv.rounded(nested) == (
        """{'times': "{'dp': '1.66', 'all': '2.00'}", 'shapes': '[[1, 2], [4, 8]]', 'name': 'x'}"""
    )


# What is run where they do not fit.


def test_what_fits_is_left_as_it_is():
    case = only("gpt.perf_test_manual", 8)
    model, workload, layout = layouts.model(case), layouts.workload(case), layouts.layout(case, 8)
    found = scale.scaled(model, workload, layout, 80 * GiB)
    assert found == scale.Scaled(model, workload, layout, ())


PLANS = [
    (f"{family}.perf_test_auto", n)
    for family in ("gpt", "moe", "wresnet")
    for n in (1, 2, 4, 8, 16, 32, 64)
]


@settings(max_examples=60, deadline=None)
@given(plan=st.sampled_from(PLANS), megabytes=st.integers(120, 20_000))
def test_a_scaled_case_fits_and_keeps_its_structure(plan, megabytes):
    case = only(*plan)
    model, workload, layout = (
        layouts.model(case),
        layouts.workload(case),
        layouts.layout(case, plan[1]),
    )
    found = scale.scaled(model, workload, layout, megabytes * 1e6)
    assert scale.stage_bytes(found.model, found.workload, found.layout) <= megabytes * 1e6
    assert found == scale.scaled(model, workload, layout, megabytes * 1e6)

    small = found.layout
    same = ("dp", "tp", "pp", "ep", "zero", "meshes", "schedule", "recompute", "sequence_parallel")
    assert all(getattr(small, field) == getattr(layout, field) for field in same)
    rows = small.microbatch_rows * small.num_microbatches
    assert rows == found.workload.global_batch_size <= workload.global_batch_size
    before = [len(stage) for stage in layout.stage_layers(model.layers)]
    after = [len(stage) for stage in small.stage_layers(found.model.layers)]
    assert all(a * before[0] == b * after[0] for a, b in zip(after, before, strict=True))
    if isinstance(model, WideResNet):
        assert (found.model.blocks, found.model.width_factor) == (model.blocks, model.width_factor)
        tp = max([tp for _, tp in layout.meshes], default=layout.tp)
        assert found.model.channels % tp == 0
        return
    assert found.model.heads % layout.tp == 0 and found.workload.seq_len % layout.tp == 0
    assert found.model.ffn * model.hidden == model.ffn * found.model.hidden
    if model.experts:
        assert found.model.experts.num_experts == model.experts.num_experts
        for rank in range(small.pp):
            placement.check(found.model, found.workload, small.of_rank(rank))
        stages = small.stage_layers(found.model.layers)
        pattern = {tuple(found.model.has_experts(i) for i in stage[:2]) for stage in stages}
        assert pattern == {(True, False)}


@pytest.mark.parametrize("family", ["gpt", "moe", "wresnet"])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_a_budget_of_flops_scales_further_and_says_so(family, num_devices):
    case = only(f"{family}.perf_test_auto", num_devices)
    whole = layouts.model(case), layouts.workload(case), layouts.layout(case, num_devices)
    found = scale.scaled(*whole, 80 * GiB, device_flops=2e11)
    assert found.changes[-1] == "to 0.2 TFLOP an iteration of each device"
    flops = step_flops(found.model, found.workload) * 4 / 3  # all of them are recomputed
    assert flops <= 2e11 * num_devices
    fitting = scale.scaled(*whole, 80 * GiB)
    assert step_flops(fitting.model, fitting.workload) * 4 / 3 > 2e11 * num_devices
    assert scale.scaled(*whole, 80 * GiB, device_flops=1e18) == fitting


def test_a_budget_that_nothing_meets_gives_the_smallest():
    case = only("wresnet.perf_test_auto", 1)
    whole = layouts.model(case), layouts.workload(case), layouts.layout(case, 1)
    found = scale.scaled(*whole, 80 * GiB, device_flops=1.0)
    assert (found.model.channels, found.layout.microbatch_size) == (8, 1)


def test_what_was_changed_is_said_in_words():
    model = Model(name="gpt-x", hidden=256, layers=8, heads=8, ffn=1024, vocab=4096)
    layout = Layout(tp=2, microbatch_size=4, num_microbatches=8)
    workload = Workload(global_batch_size=32, seq_len=1024)
    need = scale.stage_bytes(model, workload, layout)
    assert scale.scaled(model, workload, layout, need / 2).changes == (
        "hidden 256 -> 128",
        "layers 8 -> 4",
        "heads 8 -> 4",
        "ffn 1024 -> 512",
        "vocab 4096 -> 2048",
        "global_batch_size 32 -> 4",
        "seq_len 1024 -> 512",
        "microbatch_size 4 -> 2",
        "num_microbatches 8 -> 2",
    )


def test_the_bound_holds_the_states_of_all_weights():
    """16 bytes a parameter and a bf16 copy, a margin over them, and little else for one token."""
    sizes = {"hidden": 1024, "layers": 4, "heads": 8, "ffn": 4096, "vocab": 128}
    model = Model(name="gpt-x", **sizes, max_seq_len=1)
    one_token = Workload(global_batch_size=1, seq_len=1)
    weights = 4 * 12 * 1024**2 + 129 * 1024
    found = scale.stage_bytes(model, one_token, Layout())
    assert found / scale.MARGIN == pytest.approx(18 * weights, rel=0.01)
    served = scale.stage_bytes(model, one_token, Layout(), inference=True)
    assert served / scale.MARGIN == pytest.approx(6 * weights, rel=0.01)


def test_a_device_too_small_for_anything_is_refused():
    case = only("moe.perf_test_auto", 64)
    with pytest.raises(ValueError, match=r"device memory of 1e-05 GB: too little"):
        scale.scaled(layouts.model(case), layouts.workload(case), layouts.layout(case, 64), 1e4)
