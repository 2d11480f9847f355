"""Searches within a space: the names of Alpa's benchmark and fields of layouts, each said again
here in plain words, against the layouts that are found."""

import itertools

import msgspec
import pytest

from meshwise import search, store, suites
from meshwise.options.run import Suite
from meshwise.prices import Prices, on_hosts, unmeasured
from meshwise.search import inter_op_stages
from meshwise.search.space import legal_layouts, unchecked
from meshwise.search.within import NAMES, Space, space_of
from meshwise.spec import Cluster, Layout, Model, Workload
from meshwise.suites import layouts, scale
from meshwise.suites.case import GPTModelConfig, MoEModelConfig
from meshwise.verbs import files, suite_search
from tests.unit.test_inter_op import compositions

HOST = 8
MODEL = Model(name="small", hidden=1024, layers=8, heads=8, ffn=4096, vocab=25600)
WORKLOAD = Workload(global_batch_size=64, seq_len=512)
PLANNED = ["num_microbatches=8", "recompute=full", "schedule=1f1b"]


def costs_of(hosts=1):
    return unmeasured(on_hosts(files.take("p3.16xlarge", Cluster), hosts))


def found_within(words, *, hosts=1, devices=8, top=60):
    plan = search.find(
        MODEL, WORKLOAD, costs_of(hosts), num_devices=devices, top=top, within=space_of(words)
    )
    return [plan.layout, *(other.layout for other in plan.runners_up)]


def stages(layout):
    """(dp * cp, tp, devices) of each stage."""
    meshes = layout.meshes or ((layout.dp * layout.cp, layout.tp),) * layout.pp
    return [(dp, tp, dp * tp) for dp, tp in meshes]


MEANT = {
    "uniform": lambda x: not (x.layers or x.meshes or x.ways),
    "2d_shard": lambda x: x.pp == 1,
    "zero-3": lambda x: (x.pp, x.tp, x.zero) == (1, 1, 3),
    "shard-largest": lambda x: x.pp == 1 and x.tp == x.num_devices,
    "power_of_two": lambda x: all(n in (1, 2, 4, 8, 16, 32) for *_, n in stages(x)),
    "small_power_of_two": lambda x: all(n in (1, 2, 4, 8, 16, 32) for *_, n in stages(x)),
    "same_as_physical": lambda x: all(dp == max(1, n // HOST) for dp, _, n in stages(x)),
    "data_parallel_only": lambda x: all(tp == 1 for _, tp, _ in stages(x)),
    "model_parallel_only": lambda x: all(dp == 1 for dp, _, _ in stages(x)),
    "tp=2": lambda x: all(tp == 2 for _, tp, _ in stages(x)),
    "pp=4": lambda x: x.pp == 4,
    "num_micro_batches=16": lambda x: x.num_microbatches == 16,
    "sequence_parallel=false": lambda x: not x.sequence_parallel and "seq" not in str(x.ways),
    "schedule=zbv": lambda x: x.schedule in ("zbv", "none"),
    "recompute=selective": lambda x: x.recompute == "selective" and not x.recompute_layers,
    "recompute=none": lambda x: x.recompute == "none" and "recompute=" not in str(x.ways),
    "num_auto_layers=2": lambda x: all(stage.start in (0, 4) for stage in x.stage_layers(8)),
}


@pytest.mark.parametrize("word", MEANT)
def test_only_what_the_word_means_is_found_and_the_best_of_it(word):
    """The best of the uniform layouts that the word means is not faster than what is found."""
    found = found_within([*PLANNED[1:2], word] if "recompute" not in word else [word])
    assert found and all(MEANT[word](layout) for layout in found)
    prices, limit = Prices(costs_of(), datasheet=True), costs_of().cluster.usable_bytes
    again = "full" if "recompute" not in word else word.partition("=")[2]
    least = search.predict(MODEL, WORKLOAD, found[0], prices).step_time_s
    layouts, _ = legal_layouts(MODEL, WORKLOAD, costs_of(), 8)
    for layout in layouts[::7]:
        split = layout.schedule in ("interleaved_zero_bubble", "zbv", "dualpipev")
        if split and again != "none":
            continue
        layout = unchecked(layout, recompute=again)
        if MEANT[word](layout):
            told = search.predict(MODEL, WORKLOAD, layout, prices)
            assert told.step_time_s >= least * (1 - 1e-9) or told.peak_memory_bytes > limit


@pytest.mark.parametrize("word", [word for word in NAMES if word not in MEANT])
def test_some_names_leave_all(word):
    assert found_within([*PLANNED, word], top=3) == found_within(PLANNED, top=3)


def test_submeshes_of_several_hosts():
    whole = ["pp=1", "num_auto_layers=1", "recompute=full"]
    assert found_within([*whole, "power_of_two"], hosts=8, devices=64)
    for words in (["small_power_of_two"], ["power_of_two", "pp=1"]):
        devices = 64 if words[0] == "small_power_of_two" else 24
        with pytest.raises(search.NoLayout, match="outside the space asked for"):
            found_within([*whole, *words], hosts=8, devices=devices)
    assert found_within(["small_power_of_two", "zero-3"], hosts=8, devices=64)  # one mesh by name
    hosts_by_devices = found_within([*whole, "same_as_physical"], hosts=2, devices=16)
    assert {(layout.dp, layout.tp) for layout in hosts_by_devices} == {(2, 8)}


def balanced(layout, tolerance):
    """Stages' shares of devices and layers (all have the same FLOPs) are at most so far apart."""
    whole = layout.num_devices
    for (*_, size), layers in zip(stages(layout), layout.stage_layers(MODEL.layers), strict=True):
        ratio = (size / whole) / (len(layers) / MODEL.layers)
        if not 1 - 1e-9 <= ratio * (1 + tolerance) <= (1 + tolerance) ** 2 * (1 + 1e-9):
            return False
    return True


@pytest.mark.parametrize(("groups", "tolerance"), [(4, 1.0), (8, 0.35), (8, 1.0)])
def test_uneven_pipelines_against_all_of_them(groups, tolerance):
    """All 1F1B pipelines of 6 devices with ZeRO-2, without sequence parallelism."""
    words = [*PLANNED, "zero=2", "sequence_parallel=false", f"num_auto_layers={groups}"]
    words += [f"stage_imbalance_tolerance={tolerance}", "pp=3"]
    layout, *_ = found_within(words, devices=6, top=1)
    prices, limit = Prices(costs_of(), datasheet=True), costs_of().cluster.usable_bytes
    least, each = float("inf"), MODEL.layers // groups
    for sizes, counts in itertools.product(compositions(6), compositions(groups)):
        if len(sizes) != 3 or len(counts) != 3:
            continue
        for tps in itertools.product((1, 2, 4, 8), repeat=3):
            meshes = tuple((size // tp, tp) for size, tp in zip(sizes, tps, strict=True))
            if any(size % tp or 8 % (size // tp) for size, tp in zip(sizes, tps, strict=True)):
                continue
            other = Layout(
                pp=3, schedule="1f1b", meshes=meshes, layers=tuple(each * n for n in counts),
                zero=2 if any(dp > 1 for dp, _ in meshes) else 0, microbatch_size=8,
                num_microbatches=8, recompute="full",
            )  # fmt: skip
            if balanced(other, tolerance):
                told = search.predict(MODEL, WORKLOAD, other, prices)
                if told.peak_memory_bytes <= limit:
                    least = min(least, told.step_time_s)
    assert balanced(layout, tolerance) and all(n.start % each == 0 for n in layout.stage_layers(8))
    assert search.predict(MODEL, WORKLOAD, layout, prices).step_time_s <= 1.01 * least


@pytest.mark.parametrize(
    ("layers", "tolerance", "fits"),
    [
        ((2, 6), 1.0, True),
        ((1, 7), "inf", True),
        ((2, 6), 0.99, False),  # half of the devices for a quarter of the FLOPs
        ((5, 1, 1, 1), 1.5, True),
        ((5, 1, 1, 1), 1.2, False),  # a quarter of the devices for five eighths
    ],
)
def test_a_stage_s_devices_and_its_flops_go_together(layers, tolerance, fits):
    layout = Layout(pp=len(layers), schedule="1f1b", layers=layers, num_microbatches=8)
    within = space_of([f"stage_imbalance_tolerance={tolerance}"])
    assert within.has_cut(MODEL, 512, layout) == fits


def test_layers_that_all_stages_recompute_take_a_second_forward():
    """Forward and backward are 3 parts, with another forward 4; the head is not computed
    again, nor are gradients added up again."""
    floors_s, prices = [], Prices(costs_of(), datasheet=True)
    for word in ("none", "full"):
        within = space_of(["num_microbatches=8", f"recompute={word}"])
        (frame,) = inter_op_stages.frames(MODEL, WORKLOAD, prices, 8, within)
        floors_s.append(frame.floor.whole[1])  # of the slowest stage
    assert 1.1 < floors_s[1] / floors_s[0] < 4 / 3


def test_words_become_a_space_the_later_ones_in_place_of_earlier():
    said = ["submesh_physical_shape_space=all", "zero=2", "parallel_mode=zero-3"]
    said += ["use_hlo_cost_model=True", "layer_profile_mode=individual", "num_micro_batches=4"]
    assert space_of(said) == Space(pp=1, tp=1, zero=3, num_microbatches=4)
    assert space_of(["power_of_two", "all"]) == Space() == space_of([])


def test_all_logical_shapes_leave_the_physical_ones_and_the_reverse():
    physical, logical = "submesh_physical_shape_space=", "submesh_logical_shape_space="
    few = space_of([f"{physical}power_of_two", f"{logical}all"])
    assert few == Space(submeshes="power_of_two")
    alike = space_of([f"{logical}same_as_physical", f"{physical}all"])
    assert alike == Space(same_as_physical=True)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("zer-3", r"space = 'zer-3': is not known; did you mean zero-3\?"),
        ("parallel_mode=zero-2", r"parallel_mode = 'zero-2': is not known; did you mean zero-3\?"),
        ("parallel_mode=", "parallel_mode = '': must be one of search"),
        ("schedule=1F1B", r"schedule = '1F1B': is not known; did you mean 1f1b\?"),
        ("submeshes=x", "submeshes = 'x': must be one of all, power_of_two, small_power_of_two"),
        ("layer_profile_mode=x", "must be one of composition, individual"),
        ("zero=4", r"space = 'zero=4': .*<= 3"),
        ("tp=two", r"space = 'tp=two': Expected `int"),
        ("stage_imbalance_tolerance=nan", "space = 'stage_imbalance_tolerance=nan'"),
        ("num_auto_layers=0", "space = 'num_auto_layers=0': .*>= 1"),
        ("schedule=2f2b", "schedule = '2f2b': "),
    ],
)
def test_a_word_that_says_nothing_is_named(word, text):
    with pytest.raises(ValueError, match=text):
        space_of(["tp=2", word])


# The cases of suites that ask for a search.

SEARCHED = [
    (f"{family}.grid_search_auto", n) for family in ("gpt", "moe", "wresnet") for n in (2, 4)
] + [("gpt.correctness_test_auto", 8), ("moe.grid_search_auto", 16), ("gpt.grid_search_auto", 64)]


@pytest.mark.parametrize(("suite", "devices"), SEARCHED)
def test_a_searched_case_is_laid_out_as_it_asks(suite, devices):
    """By the rules of Alpa's stage construction, on its own machine."""
    case = suites.cases(suite, devices)[-1]
    known = suite_search.PriceList(costs_of(-(-devices // HOST)), "a sheet")
    layout, told = suite_search.searched(case, devices, known, Suite())
    args, option = case.parallel_args, case.parallel_args.auto_stage_option
    assert layout.num_devices == devices and layout.num_microbatches == case.num_micro_batches
    assert layout.batch_size == case.batch_size and layout.recompute == "full"
    assert layout.schedule in ("none", "1f1b") and not layout.recompute_layers
    most = 1 + option["stage_imbalance_tolerance"]
    ids, physical = told["forward_stage_layer_ids"], told["submesh_shapes"]
    assert list(itertools.chain(*ids)) == list(range(args.num_auto_layers))
    assert all(hosts in (1, 2, 4) and size in (1, 2, 4, 8) for hosts, size in physical)
    sizes = [hosts * size for hosts, size in physical]
    assert [dp * tp for dp, tp in told["logical_mesh_shapes"]] == sizes
    assert sum(sizes) == devices
    if isinstance(case.model_config, GPTModelConfig | MoEModelConfig):
        for size, layers in zip(sizes, ids, strict=True):  # alike but for the experts
            share = len(layers) / args.num_auto_layers
            assert share / most * 0.999 <= size / devices <= share * most * 1.001
    pinned = told["autosharding_option_dicts"]
    assert len(pinned) == len(ids) and (layout.ep == 1) == all(pinned)
    times_s = told["compilation_times"]
    assert times_s["stage-construction"] > 0 == times_s["stage-construction-profiling"]
    assert told["compute_cost_file_name"] == "a sheet"


def test_any_case_is_searched_within_a_space_of_the_user():
    (case,) = suites.cases("gpt.perf_test_manual", 4)
    known = suite_search.PriceList(costs_of(), "a sheet")
    found = {}
    for word in ("zero-3", "shard-largest", "2d_shard", "uniform", "search"):
        asked = Suite(space=(word,))
        asking = suite_search.asking(case, asked)
        assert asking.parallel_mode == "search" and f"'space': '{word}'" in str(asking)
        found[word] = suite_search.searched(asking, 4, known, asked).layout
    assert (found["zero-3"].dp, found["zero-3"].zero) == (4, 3)
    assert found["shard-largest"].tp == 4 and found["2d_shard"].pp == 1
    assert all(layout.num_microbatches == 4 for layout in found.values())
    alone = suite_search.searched(asking, 4, known, Suite(shard_only=True))
    assert alone.layout.pp == 1
    assert suite_search.asking(case, Suite()) == case


@pytest.mark.parametrize(("scatters", "zero"), [(True, 2), (False, 0)])
def test_without_reduce_scatter_nothing_is_sharded(scatters, zero):
    asked, known = Suite(space=("pp=1", "dp=8")), suite_search.PriceList(costs_of(), "a sheet")
    case = suites.cases("moe.perf_test_fast_2d", 8)[0]
    args = case.parallel_args._replace(prefer_reduce_scatter=scatters)
    asking = suite_search.asking(case._replace(parallel_args=args), asked)
    assert suite_search.searched(asking, 8, known, asked).layout.zero == zero


def test_what_does_not_fit_is_searched_only_if_the_case_may_shrink():
    case = suites.cases("gpt.grid_search_auto", 2)[0]
    device = msgspec.structs.replace(costs_of().cluster.device, memory_bytes=2**30)
    small = msgspec.structs.replace(costs_of().cluster, device=device, reserved_bytes=0)
    known = suite_search.PriceList(unmeasured(small), "a sheet")
    with pytest.raises(search.NoLayout, match="no layout of gpt-760m fits"):
        suite_search.searched(case, 2, known, Suite())
    assert suite_search.searched(case, 2, known, Suite(scale_to_fit=True)).layout.num_devices == 2


def test_prices_are_those_measured_here_or_a_sheet_and_predict_what_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpus = files.take("h100-hgx", Cluster)
    device = msgspec.structs.replace(gpus.device, name="a CPU", kind="cpu", peak_flops={})
    cpus = msgspec.structs.replace(gpus, name="cpus", device=device)
    sheet, foreign = (suite_search.prices(cluster, Suite()) for cluster in (gpus, cpus))
    assert (sheet.name, sheet.of_here) == ("data sheet of h100-hgx", True)
    assert (foreign.name, foreign.of_here) == ("data sheet of p3.16xlarge", False)
    (case,) = suites.cases("gpt.perf_test_manual", 4)
    whole = scale.Scaled(layouts.model(case), layouts.workload(case), layouts.layout(case, 4), ())
    assert suite_search.predicted(whole, case, foreign) is None
    told = suite_search.predicted(whole, case, sheet)
    assert told == search.given(*whole[:2], unmeasured(gpus), whole.layout).prediction
    store.write("costs.json", msgspec.structs.replace(unmeasured(gpus), dtype="fp32"))
    assert suite_search.prices(gpus, Suite()).name == "costs.json"
    with pytest.raises(ValueError, match="name is a CPU, but the costs are for"):
        suite_search.prices(cpus, Suite())
    (images,) = suites.cases("wresnet.perf_test_auto", 4)
    assert [sheet.of(each).dtype for each in (case, images)] == ["bf16", "fp32"]
