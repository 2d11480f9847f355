"""Layers measured in fp8: which cases there are, what is refused, what plans make of them."""

import re
from pathlib import Path

import msgspec
import pytest

import meshwise
from meshwise import fit, search, store
from meshwise.models import DIRECTIONS, block_ops, block_tasks, blocks_of
from meshwise.options.measure import LayerOptions, ProfileOptions
from meshwise.prices import Prices
from meshwise.probe.cases import layer, profile
from meshwise.probe.cases.scope import Scope
from meshwise.search.stage import kinds_of, priced
from meshwise.spec import (
    Block,
    Case,
    Cluster,
    Elementwise,
    Experts,
    Gemm,
    Layout,
    Model,
    Recipe,
    Shaped,
)
from meshwise.spec.label import label
from meshwise.verbs import files
from tests import sample_records as known

MODEL = Model(hidden=96, layers=2, heads=6, ffn=384, vocab=1000, max_seq_len=256)
EXPERTS = msgspec.structs.replace(MODEL, experts=Experts(num_experts=8, top_k=2, ffn=384))
FP8 = Recipe(fp8=True)
STEP = Path(__file__).parents[2] / "benchmarks/2026-11-28-settled/gpt-1.3b/runs"


def scope(world_size=4, dtype="bf16"):
    cluster = files.take("h100-hgx", Cluster)
    return Scope(
        msgspec.structs.replace(cluster, num_devices_per_host=world_size), world_size, dtype
    )


def blocks(cases):
    return [case.op for case in cases if isinstance(case.op, Block)]


@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["gpt", "experts"])
def test_a_profile_has_each_whole_layer_in_both_precisions_and_their_products_first(model):
    plain, with_fp8 = (
        profile.cases(scope(), ProfileOptions(model=(model,), recipe=recipe))
        for recipe in (None, FP8)
    )
    added = [case.op for case in with_fp8 if case not in plain]
    assert {*plain} <= {*with_fp8}
    assert all(op.dtype == "fp8" and isinstance(op, Block | Gemm) for op in added)
    whole = [op for op in blocks(plain) if op.part == "layer" and op.tp == 1]
    wanted = {msgspec.structs.replace(op, dtype="fp8") for op in whole}
    assert {op for op in added if isinstance(op, Block)} == wanted
    assert {op.cp for op in wanted} == {1, 2, 4}
    assert {op.ep for op in wanted} == ({1, 2, 4} if model.experts else {1})
    order = [case.op for case in with_fp8]
    for op in wanted:
        products = {of for of in block_ops(op) if isinstance(of, Shaped)}
        assert products <= {*order[: order.index(op)]}
        other = msgspec.structs.replace(op, direction=DIRECTIONS[op.direction == "forward"])
        assert abs(order.index(op) - order.index(other)) == 1  # they share one set-up
    assert len({label(case) for case in with_fp8}) == len(with_fp8)


def test_layers_are_measured_in_both_precisions_where_tp_divides_no_weight():
    options = LayerOptions(
        model=(MODEL,), microbatch_sizes=(2,), tp=(1, 2), recompute=("none", "full"), recipe=FP8
    )
    found = blocks(layer.cases(scope(), options))
    fp8 = [op for op in found if op.dtype == "fp8"]
    assert [(op.direction, op.recompute, op.tp) for op in fp8] == [
        ("forward", "none", 1), ("backward", "none", 1), ("backward", "full", 1),
    ]  # fmt: skip
    assert {op.dtype for op in found if op.part == "head" or op.tp == 2} == {"bf16"}
    assert {msgspec.structs.replace(op, dtype="bf16") for op in fp8} <= {*found}


def test_other_fields_of_the_recipe_are_taken_where_they_change_no_layer():
    recipe = Recipe(
        optimizer="sgd", max_grad_norm=0.0, reduce="bf16", offload=True, fp32_precision="tf32",
        routing="balanced", prefetch=2,
    )  # fmt: skip
    for kind, cases in ((LayerOptions, layer.cases), (ProfileOptions, profile.cases)):
        plain, other = (cases(scope(), kind(model=(MODEL,), recipe=of)) for of in (None, recipe))
        assert plain == other


@pytest.mark.parametrize(
    ("recipe", "dtype", "message"),
    [
        (
            {"attention": "math"},
            None,
            "recipe.attention = math: layers are not measured so; use auto",
        ),
        (
            {"routing": "skewed"},
            None,
            "recipe.routing = skewed: layers are not measured so; use bal",
        ),
        ({"async_tp": True}, None, "recipe.async_tp = True: layers are not measured so; use false"),
        (
            {"fp32_precision": "tf32"},
            "fp32",
            "recipe.fp32_precision = tf32: layers are not measured so; use ieee",
        ),
        ({"fp8": True}, "fp32", "recipe.fp8 = True: layers are not measured so; use dtype bf16"),
        ({"fp9": True}, None, "recipe"),
    ],
)
@pytest.mark.parametrize("what", ["layer", "profile"])
def test_what_would_change_layers_is_refused(what, recipe, dtype, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        meshwise.measure(
            what, cluster="h100-hgx", model=("gpt-125m",), nproc=1, dtype=dtype, dry_run=True,
            recipe=msgspec.json.encode(recipe).decode(),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tp": (2,)}, "recipe.fp8 = True: fp8 casts products of whole weights; use tp 1"),
        (
            {"seq_len": 20, "microbatch_sizes": (2,)},
            "recipe.fp8 = True: 40 tokens on a rank: fp8 needs a multiple of 16; change the",
        ),
        ({"model": ("wresnet-250m",)}, "recipe.fp8 = True: fp8 is for linear layers, and an image"),
    ],
)
def test_no_layer_in_fp8_is_refused_with_the_reason(asked, message):
    options = {"cluster": "h100-hgx", "model": ("gpt-125m",), "nproc": 2, "dry_run": True, **asked}
    with pytest.raises(ValueError, match=re.escape(message)):
        meshwise.measure("layer", recipe=FP8, **options)


def test_only_layers_of_language_models_can_be_in_fp8():
    with pytest.raises(ValueError, match=r"Block\.dtype = 'fp8': fp8 is for the linear products"):
        Block(part="head", model=MODEL, microbatch_size=1, seq_len=16, dtype="fp8")
    old = msgspec.json.decode(
        b'{"op":"block","part":"layer","model":' + msgspec.json.encode(MODEL)
        + b',"microbatch_size":1,"seq_len":16}', type=Block,
    )  # fmt: skip
    assert old.dtype == old.kept_dtype == "bf16"
    case = Case(op=msgspec.structs.replace(old, dtype="fp8", direction="backward"))
    assert label(case) == "layer gpt h96 mb1 fp8 backward"


LAYOUT = Layout(microbatch_size=4)
COPY = Elementwise(kind="copy", read_bytes=2**20, write_bytes=2**20)


def measured(*, products=("bf16", "fp8"), layers=("bf16", "fp8"), lowering="compiled"):
    """Costs of a made run on one GPU: layers in fp8 take 2.5 times their operations, others 1.1."""
    found = blocks_of(MODEL, 256, LAYOUT, "bf16").values()
    both = [
        msgspec.structs.replace(op, dtype=dtype)
        for op in found
        for dtype in (("bf16", "fp8") if op.part == "layer" else ("bf16",))
    ]
    ops = dict.fromkeys(
        of for op in both for of in block_ops(op)
        if isinstance(of, Shaped) and of.dtype in products
    )  # fmt: skip
    sizes = [msgspec.structs.replace(COPY, read_bytes=2**n, write_bytes=2**n) for n in (16, 20, 24)]
    times = {op: 2e-6 + op.bytes / 3e12 for op in sizes}
    times |= {op: 2e-6 + op.flops / (9e14 if op.dtype == "fp8" else 5e14) for op in ops}
    samples = [known.sample(op, [s] * 5, regime="cold", ranks=2) for op, s in times.items()]
    info = msgspec.structs.replace(known.info(), cluster=scope(1).cluster, world_size=1)
    prices = Prices(fit.calibrate([(info, samples)]))
    for op in both:
        if op.part == "head" or op.dtype in layers:
            composed_s = prices.composed_s(block_tasks(op, lowering=lowering))
            time_s = (2.5 if op.dtype == "fp8" else 1.1) * composed_s
            one = known.sample(op, [time_s] * 5, ranks=2)
            case = msgspec.structs.replace(one.case, lowering=lowering)
            samples.append(msgspec.structs.replace(one, case=case, case_id=case.id))
    times = {one.case.op: one.times_s[0] for one in samples}
    return fit.calibrate([(info, samples)]), times


def layer_s(costs, recipe):
    """The seconds of one layer of a stage of two."""
    prices = Prices(msgspec.structs.replace(costs, recipe=recipe))
    (kind,) = kinds_of(MODEL, 256, LAYOUT)
    program, charge = priced(kind, prices)
    found = dict.fromkeys(DIRECTIONS, 0.0)
    for task in program.tasks:
        if task.part == "layer" and task.name.startswith("layers.0."):
            found[task.phase] += charge(task).time_s
    return found


@pytest.mark.parametrize("lowering", ["eager", "compiled"])
def test_a_plan_takes_a_layer_as_it_was_measured_in_its_precision(lowering):
    costs, times = measured(lowering=lowering)
    assert (costs.dtype, costs.lowering) == ("bf16", lowering)
    of_layers = [price.like.dtype for price in costs.factors if price.like.part == "layer"]
    assert sorted(of_layers) == ["bf16", "bf16", "fp8", "fp8"]
    for recipe, dtype in ((Recipe(), "bf16"), (FP8, "fp8")):
        found = blocks_of(MODEL, 256, LAYOUT, "bf16")
        wanted = {
            way: times[msgspec.structs.replace(block, dtype=dtype)]
            for (piece, way), block in found.items()
            if piece == ("layer", "")
        }
        told = layer_s(costs, recipe)
        assert sum(told.values()) == pytest.approx(sum(wanted.values()), rel=1e-3)
        for way, time_s in wanted.items():  # clocks are of the whole layer
            assert told[way] == pytest.approx(time_s, rel=0.03)
    assert layer_s(costs, FP8)["forward"] > layer_s(costs, Recipe())["forward"]


def step(costs, recipe=FP8):
    prices = Prices(msgspec.structs.replace(costs, recipe=recipe), datasheet=True)
    work = meshwise.Workload(global_batch_size=4, seq_len=256)
    return search.predict(MODEL, work, LAYOUT, prices)


def test_the_note_and_the_wide_interval_go_when_layers_are_measured_in_fp8():
    wide, narrow = step(measured(layers=("bf16",))[0]), step(measured()[0])
    stands = [note for note in wide.notes if "stands in" in note]
    assert len(stands) == 2 and all(" fp8 " in note for note in stands)
    assert not [note for note in narrow.notes if "stands in" in note]
    assert wide.high_s / wide.step_time_s > narrow.high_s / narrow.step_time_s
    assert narrow.step_time_s > 2 * wide.step_time_s  # layers take 2.5 times their sum, not 1.1


def test_layers_in_fp8_widen_no_plan_in_bf16():
    """Their ratios are others: where a bf16 layer stands in for another, they do not count."""
    told = []
    for costs in (measured(layers=("bf16",))[0], measured()[0]):
        block = next(of.like for of in costs.factors if of.like.part == "layer")
        other = msgspec.structs.replace(block, tp=2, dtype="bf16")
        told.append(Prices(costs).factor(other, block_tasks(block)))
    assert told[0] == told[1]


def test_a_layer_in_fp8_of_another_degree_stands_in_before_one_in_bf16():
    costs, _ = measured()
    one = next(of for of in costs.factors if of.like.dtype == "bf16" and of.like.part == "layer")
    shared = msgspec.structs.replace(one, like=msgspec.structs.replace(one.like, cp=2))
    prices = Prices(
        msgspec.structs.replace(costs, factors=(*costs.factors, shared)), datasheet=True
    )
    block = msgspec.structs.replace(shared.like, dtype="fp8")
    prices.begin()
    prices.factor(block, block_tasks(block, lowering="compiled"))
    (note,) = [note for note in prices.notes if "stands in" in note]
    assert re.search(r"fp8 tp1 cp2 .*was measured; .* fp8 tp1 compiled stands in", note)


def test_the_interval_without_layers_in_fp8_holds_the_step_that_ran():
    """Two H200 took 289 ms for a step told at 214 from layers in bf16."""
    runs = [files.load(path)[:2] for path in sorted(STEP.glob("*-measure-*"))]
    info, samples, _ = store.load(next(STEP.glob("20261128T182147-run-*")))
    (ran,) = [one for one in samples if one.status == "ok"]
    plan = info.plan
    costs = msgspec.structs.replace(fit.calibrate(runs), recipe=plan.recipe)
    told = search.predict(plan.model, plan.workload, plan.layout, Prices(costs, datasheet=True))
    assert told.low_s < sum(ran.times_s) / len(ran.times_s) < told.high_s
    assert told.step_time_s == pytest.approx(0.214, rel=0.01)
