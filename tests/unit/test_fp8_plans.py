"""Plans of layers whose products are in fp8: what is counted, priced, kept and refused."""

import re
from collections import Counter

import msgspec
import pytest

import meshwise
from meshwise import search, store
from meshwise.models import block_tasks, blocks_of, catalogue, graph, program_of, saved_block_bytes
from meshwise.prices import Prices, unmeasured
from meshwise.spec import (
    Cluster,
    Decoder,
    Elementwise,
    Experts,
    Factor,
    Gemm,
    HeldOut,
    Layout,
    Model,
    Recipe,
    Surface,
    Workload,
)
from meshwise.verbs import files

MODEL = Decoder(
    hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=64, max_seq_len=32
)
TOKENS = 32  # two sequences of 16
# out, in of the weights of q, k, v, out, gate, up, down
WEIGHTS = [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)]
FP8 = Recipe(fp8=True)
ASKED = {"cluster": "h100-hgx", "global_batch_size": 32, "seq_len": 256, "top": 20}


def tasks_of(lowering, model=MODEL, **how):
    step = graph(model, 2, 16, "bf16", fp8=lowering, **how)
    return program_of(step, Layout(microbatch_size=2), "bf16").tasks


def products(tasks):
    return Counter((op.m, op.n, op.k) for op in map(op_of, tasks) if is_fp8(op))


def op_of(task):
    return task.op


def is_fp8(op):
    return isinstance(op, Gemm) and op.dtype == "fp8"


def cast_bytes(tasks, *kernels):
    """Bytes read and written by kernels of these names."""
    of = [task.op for task in tasks if task.name.rsplit(".", 1)[-1] in kernels]
    return sum(op.read_bytes for op in of), sum(op.write_bytes for op in of), len(of)


@pytest.mark.parametrize("lowering", ["eager", "compiled"])
def test_three_products_of_each_linear_layer_are_fp8(lowering):
    tasks = tasks_of(lowering)
    wanted = Counter()
    for n, k in WEIGHTS:  # x w^T, dy w, dy^T x
        wanted += Counter([(TOKENS, n, k), (TOKENS, k, n), (n, k, TOKENS)])
    assert products(tasks) == wanted
    ops = [op for op in map(op_of, tasks) if is_fp8(op)]
    assert {(op.trans_a, op.trans_b, op.scaling) for op in ops} == {(False, True, "tensor")}
    assert sum(op.flops for op in ops) == 3 * 2 * TOKENS * 30_720
    head = [task.op.dtype for task in tasks if task.part == "head" and isinstance(task.op, Gemm)]
    assert head == ["bf16"] * 3


def test_compiled_casts_by_hand():
    """Each operand is read twice in bf16, and written once in fp8. Forward: 7 weights, and 4 inputs
    that the 7 products share. Backward: 7 weights again, 7 dy twice, the 4 inputs."""
    tasks = tasks_of("compiled")
    weights, inputs, results = 30_720, TOKENS * (64 + 64 + 64 + 96), TOKENS * 448
    elements = 2 * weights + 2 * inputs + 2 * results
    assert cast_bytes(tasks, "amax") == (2 * elements, 4 * 36, 36)
    layer = [task for task in tasks if task.name.endswith((".a.cast", ".b.cast"))]
    assert cast_bytes(layer, "cast") == (2 * elements + 4 * 36, elements, 36)


def test_eager_casts_by_hand():
    """Every operand for itself: 42 of them, 21 of which are transposed copies: w for dx, dy and x
    for dw."""
    tasks = [task for task in tasks_of("eager") if ".a." in task.name or ".b." in task.name]
    weights, inputs, results = 30_720, TOKENS * (6 * 64 + 96), TOKENS * 448
    elements, turned = 2 * (weights + inputs + results), weights + inputs + results
    assert cast_bytes(tasks, "copy") == (2 * turned, 2 * turned, 21)
    assert cast_bytes(tasks, "abs") == (2 * elements, 2 * elements, 42)
    assert cast_bytes(tasks, "amax") == (2 * elements, 2 * 42, 42)
    assert cast_bytes(tasks, "wide") == (2 * elements, 4 * elements, 42)
    assert cast_bytes(tasks, "divide") == (4 * elements + 4 * 42, 4 * elements, 42)
    assert cast_bytes(tasks, "clamp") == (4 * elements, 4 * elements, 42)
    assert cast_bytes(tasks, "cast") == (4 * elements, elements, 42)
    assert cast_bytes(tasks, "float", "least", "scale")[2] == 3 * 42


def test_a_bias_is_added_behind_the_product():
    tasks = tasks_of("compiled", Model(hidden=64, layers=1, heads=4, ffn=96))
    added = [task.op for task in tasks if task.name == "layers.0.up.bias"]
    assert added == [
        Elementwise(kind="add", read_bytes=2 * 96 * (TOKENS + 1), write_bytes=2 * 96 * TOKENS)
    ]
    assert sum(map(is_fp8, map(op_of, tasks))) == 3 * 4


def test_weights_that_the_kernels_refuse_stay_in_bf16():
    tasks = tasks_of("compiled", msgspec.structs.replace(MODEL, ffn=100))
    kept = [t.name for t in tasks if isinstance(t.op, Gemm) and t.op.dtype == "bf16"]
    layer = {name.split(".")[2] for name in kept if name.startswith("layers.")}
    assert layer == {"gate", "up", "down"} and sum(products(tasks).values()) == 3 * 4


def test_experts_and_their_router_stay_in_bf16():
    experts = Experts(num_experts=4, top_k=2, ffn=32, shared_ffn=32)
    tasks = tasks_of("compiled", msgspec.structs.replace(MODEL, experts=experts))
    named = {task.name.split(".")[2] for task in tasks if is_fp8(task.op)}
    assert named == {"q", "k", "v", "out"}


def test_recomputed_products_are_cast_again():
    tasks = tasks_of("eager", recompute=("full",))
    again = [task for task in tasks if task.phase == "recompute" and is_fp8(task.op)]
    # early stop: nothing reads the last product again
    assert len(again) == 6 and all(task.name.endswith(".again") for task in again)
    assert cast_bytes(tasks, "amax")[2] == 2 * (21 + 6)


def test_backward_keeps_bf16_and_no_cast():
    """Eager layers save what they do in bf16. Compiled ones compute what only casts read again:
    both norms' results, and the product of gate and up."""
    block = blocks_of(MODEL, 16, Layout(microbatch_size=2), "bf16")[("layer", ""), "backward"]
    fp8 = msgspec.structs.replace(block, dtype="fp8")
    assert saved_block_bytes(fp8) == saved_block_bytes(block)
    less = saved_block_bytes(block, compiled=True) - saved_block_bytes(fp8, compiled=True)
    assert less == 2 * TOKENS * (64 + 64 + 96)
    step = program_of(graph(MODEL, 2, 16, "bf16", fp8="eager"), Layout(microbatch_size=2), "bf16")
    forward = {name for task in step.tasks if task.phase == "forward" for name in task.writes}
    read = {name for task in step.tasks if task.phase == "backward" for name in task.reads}
    assert not [name for name in forward & read if name.endswith(".cast#0")]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def costs_of(**changes):
    costs = unmeasured(files.take("h100-hgx", Cluster))
    return msgspec.structs.replace(costs, recipe=FP8, **changes)


def surface(**of):
    like = Gemm(m=1, n=1, k=1, **of)
    shapes = ((1024, 1024, 1024), (4096, 4096, 4096))
    return Surface(
        regime="cold", like=like, dims=("m", "n", "k"), shapes=shapes, time_s=(1e-5, 2e-4),
        floor_s=1e-6, flops_per_s=7e14, bytes_per_s=3e12, noise=0.01, runs=("made",),
        held_out=HeldOut(median=0.02, p90=0.05, num_points=2),
    )  # fmt: skip


def test_the_tier_of_a_product_travels():
    op = Gemm(m=4096, n=4096, k=4096, dtype="fp8", scaling="tensor")
    measured = surface(dtype="fp8", scaling="tensor")
    for surfaces, tier, error in (
        ((measured, surface()), "measured", 0.01),
        ((surface(),), "transferred", 0.35),
        ((), "datasheet", 0.1),
    ):
        found = Prices(costs_of(surfaces=surfaces), datasheet=True).estimate(op)
        assert found.source == tier and found.error >= error
    by_peak = Prices(costs_of(surfaces=(surface(),))).estimate(op).time_s
    assert by_peak == pytest.approx(1e-4, rel=0.05)  # twice the peak of bf16


def factor(block, **of):
    return Factor(
        regime="warm", lowering="compiled", like=block, runs=("made",),
        activation_elements=(float(block.activation_elements),), host_s=(0.0,), ratio=(0.5,),
        held_out=HeldOut(median=0.0, p90=0.0, num_points=3), **of,
    )  # fmt: skip


def test_a_layer_measured_in_bf16_stands_in_with_a_note_and_all_errors():
    """Its ratio is known to 0 % in bf16; in fp8 the operations' own errors count as well."""
    layout, work = Layout(microbatch_size=2), Workload(global_batch_size=2, seq_len=1024)
    model = catalogue.find("llama-3-8b")
    blocks = blocks_of(model, 1024, layout, "bf16")
    costs = costs_of(surfaces=(surface(),), factors=tuple(map(factor, blocks.values())))
    told = {
        fp8: search.predict(
            model,
            work,
            layout,
            Prices(msgspec.structs.replace(costs, recipe=Recipe(fp8=fp8)), datasheet=True),
        )
        for fp8 in (False, True)
    }
    width = {fp8: of.high_s / of.step_time_s - 1 for fp8, of in told.items()}
    assert told[True].step_time_s < told[False].step_time_s
    assert width[True] > width[False] + 0.05
    assert told[True].tier == "datasheet"  # of attention
    stands = [note for note in told[True].notes if note.startswith("no layer")]
    assert len(stands) == 2 and all("fp8" in note and "stands in" in note for note in stands)
    assert not [note for note in told[True].notes if note.startswith("no head")]


@pytest.mark.parametrize(
    "recipe",
    [FP8, msgspec.structs.replace(FP8, offload=True, attention="cudnn", optimizer="sgd")],
    ids=["fp8", "with offload, cudnn and sgd"],
)
def test_a_search_offers_what_the_recipe_runs(recipe):
    plan = meshwise.plan("gpt-1.3b", recipe=recipe, **ASKED)
    assert plan.recipe == recipe
    costs = msgspec.structs.replace(costs_of(), recipe=recipe)
    model, prices = plan.model, Prices(costs, datasheet=True)
    for each in (plan, *plan.runners_up):
        assert each.prediction == search.predict(model, plan.workload, each.layout, prices)
        assert {tp for _, tp in each.layout.meshes or ((0, each.layout.tp),)} == {1}
    removed = {removal.constraint: removal.count for removal in plan.removed}
    assert removed["fp8 casts products of whole weights; use tp 1"] > 0


def test_why_not_says_why_the_recipe_refuses_a_layout():
    layout = Layout(tp=2, dp=4, microbatch_size=8)
    plan = meshwise.plan("gpt-1.3b", recipe='{"fp8": true}', why_not=(layout,), **ASKED)
    assert plan.answers.why_not[0].obstacle == "fp8 casts products of whole weights; use tp 1"
    assert "MFU is of the peak of bf16, which products in fp8 exceed" in plan.prediction.notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": Layout(tp=2, microbatch_size=2)}, "layout = tp2 mb2x1: fp8 casts products of"),
        (
            {"layout": Layout(microbatch_size=2), "seq_len": 20},
            "40 tokens on a rank: fp8 needs a multiple of 16; change the microbatch size or",
        ),
        ({"cluster": "p3.16xlarge"}, "recipe.fp8 = True: it casts products of bf16; plan in dtype"),
        ({"model": "wresnet-250m"}, "fp8 is for linear layers, and an image model has none"),
        (
            {"layout": Layout(pp=2, schedule="interleaved_zero_bubble", stages_per_rank=2,
                              microbatch_size=1, num_microbatches=4)},
            "interleaved_zero_bubble splits the backward, which computes fp8's products twice",
        ),
    ],
)  # fmt: skip
def test_refusals_say_the_reason(options, message):
    asked = {"cluster": "h100-hgx", "layout": Layout(microbatch_size=2), **options}
    with pytest.raises(ValueError, match=re.escape(message)):
        meshwise.plan(asked.pop("model", "gpt-125m"), recipe='{"fp8": true}', **asked)


def test_devices_without_fp8_are_named(tmp_path):
    cluster = files.take("h100-hgx", Cluster)
    peaks = {dtype: of for dtype, of in cluster.device.peak_flops.items() if dtype != "fp8"}
    device = msgspec.structs.replace(cluster.device, peak_flops=peaks)
    store.write(tmp_path / "old.toml", msgspec.structs.replace(cluster, device=device))
    with pytest.raises(ValueError, match=r"recipe\.fp8 = True: cluster .* of fp8; use false"):
        meshwise.plan(
            "gpt-125m",
            cluster=tmp_path / "old.toml",
            layout=Layout(microbatch_size=2),
            recipe='{"fp8": true}',
        )


def test_a_plan_says_what_its_layout_has_no_fp8_for():
    plan = meshwise.plan("gpt-125m", cluster="h100-hgx", layout=Layout(microbatch_size=2))
    with pytest.raises(ValueError, match=r"Plan\.recipe.*use dtype bf16"):
        msgspec.structs.replace(plan, recipe=FP8, dtype="fp16").check()


@pytest.mark.parametrize("lowering", ["eager", "compiled"])
def test_tasks_of_a_measured_block_are_those_of_a_step(lowering):
    step = tasks_of(lowering)
    block = blocks_of(MODEL, 16, Layout(microbatch_size=2), "bf16")[("layer", ""), "backward"]
    mine = block_tasks(msgspec.structs.replace(block, dtype="fp8"), lowering=lowering)
    assert [t.op for t in mine] == [
        t.op for t in step if (t.part, t.phase) == ("layer", "backward")
    ]
