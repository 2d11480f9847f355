"""Back ends of attention in plans: which one a search takes, and what it says of the others."""

import json
from pathlib import Path

import msgspec
import pytest

import meshwise
from meshwise import search, store
from meshwise.models import catalogue, decoder, kernels
from meshwise.pages import answers
from meshwise.prices import Prices, unmeasured
from meshwise.spec import (
    Attention,
    Cluster,
    Decoder,
    Layout,
    Plan,
    Recipe,
    Workload,
)
from meshwise.verbs import files
from tests import sample_records as known

GPT = catalogue.find("gpt-30m")
WORK, LAYOUT = (
    Workload(global_batch_size=4, seq_len=128),
    Layout(microbatch_size=2, num_microbatches=2),
)
ASKED = {"costs": "costs.json", "gpus": 1, "global_batch_size": 4, "seq_len": 128, "top": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Prices of two CPUs, their blocks measured by torch's own choice."""
    folder = tmp_path_factory.mktemp("prices")
    return meshwise.calibrate(known.synthetic_run(folder), out=folder / "costs.json")


@pytest.fixture(scope="module")
def measured(whole):
    """The same without any of a block, which would scale all within it."""
    return msgspec.structs.replace(whole, factors=())


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def told(costs, attention="auto", **shares):
    """Prices with each back end at a share of the times that torch's own choice took; ``auto=0``:
    without those."""
    of = [one for one in costs.surfaces if isinstance(one.like, Attention)]
    kept = [one for one in costs.surfaces if one not in of or shares.get("auto", 1)]
    kept += [
        msgspec.structs.replace(one, backend=name, time_s=tuple(share * t for t in one.time_s))
        for one in of
        for name, share in shares.items()
        if name != "auto"
    ]
    recipe = Recipe(attention=attention)
    return msgspec.structs.replace(costs, surfaces=tuple(kept), recipe=recipe)


def text(found):
    return json.dumps(found, ensure_ascii=False)


def step_s(costs):
    return search.given(GPT, WORK, costs, LAYOUT).prediction.step_time_s


def test_steps_differ_by_the_attention_of_all_layers_and_microbatches(measured):
    """Half of forward and backward by the law of the made-up machine. No message, no block."""
    ops = [
        Attention(
            batch=2, q_len=128, kv_len=128, heads=6, kv_heads=6, head_dim=64, dtype="fp32",
            direction=direction,
        )
        for direction in ("forward", "backward")
    ]  # fmt: skip
    assert (GPT.layers, GPT.heads, GPT.hidden) == (6, 6, 384)
    auto_s, flash_s = (step_s(told(measured, name, flash=0.5)) for name in ("auto", "flash"))
    due_s = 6 * 2 * sum(known.law_s(op) for op in ops) / 2
    assert auto_s - flash_s == pytest.approx(due_s, rel=1e-6)


def test_an_operation_of_a_plan_is_explained_by_its_back_end(measured):
    auto, flash = (
        search.explain(
            search.given(GPT, WORK, told(measured, name, flash=0.5), LAYOUT),
            told(measured, flash=0.5),  # as costs.json is, with the usual recipe
            "layers.0.attention",
        )
        for name in ("auto", "flash")
    )
    assert [one.phase for one in flash] == ["forward", "backward"]
    for mine, other in zip(flash, auto, strict=True):
        assert mine.price_s == pytest.approx(other.price_s / 2, rel=1e-9)


def test_a_back_end_that_is_twice_as_fast_is_planned(measured, capsys):
    store.write("costs.json", told(measured, flash=0.5, math=3.0))
    plan = meshwise.plan("gpt-30m", attention="math,auto,flash", **ASKED)
    assert plan.recipe == Recipe(attention="flash") and store.read("plan.json", Plan) == plan
    alone = {
        name: meshwise.plan("gpt-30m", attention=name, **ASKED)
        for name in ("flash", "auto", "math")
    }
    assert [one.change for one in plan.answers.attention] == [*alone]
    best = alone["flash"].prediction
    assert plan.prediction == best and plan.layout == alone["flash"].layout
    for one in plan.answers.attention:
        of = alone[one.change]
        assert of.recipe.attention == one.change and of.layout == one.layout and not one.ties
        assert of.prediction.step_time_s == one.step_time_s
        assert one.faster == pytest.approx(best.step_time_s / one.step_time_s)
    shown = text(answers.of(plan))
    assert "Attention by which back end" in shown and "or auto where it ties" in shown


def test_the_recipes_own_back_end_is_the_default(measured):
    store.write("costs.json", told(measured, flash=0.5, math=3.0))
    flash = meshwise.plan("gpt-30m", recipe='{"attention": "flash"}', **ASKED)
    assert flash.recipe.attention == "flash" and not flash.answers.attention
    other = meshwise.plan("gpt-30m", recipe='{"attention": "flash"}', attention="math", **ASKED)
    assert other.recipe.attention == "math"
    assert flash.prediction.step_time_s < other.prediction.step_time_s


@pytest.mark.parametrize(
    ("lacks", "prices"), [("auto", "measured"), ("flash", "measured"), ("flash", "whole")]
)
def test_what_was_not_measured_stands_in_and_is_said(request, lacks, prices):
    """A stand-in is never measured, so the step is that of the other one within the error between
    measured shapes. It is less sure by all of its attention, also where blocks were measured."""
    costs = request.getfixturevalue(prices)
    there, shares = ("flash", {"flash": 0.5, "auto": 0}) if lacks == "auto" else ("auto", {})
    has, mine = (
        search.given(GPT, WORK, told(costs, name, **shares), LAYOUT).prediction
        for name in (there, lacks)
    )
    assert mine.step_time_s == pytest.approx(has.step_time_s, rel=0.01)
    assert mine.tier == "transferred" and mine.ties(has)
    assert mine.high_s - mine.step_time_s > has.high_s - has.step_time_s
    names = {
        "auto": "attention fp32 forward causal",
        "flash": "attention fp32 forward causal flash",
    }
    said = f"{names[lacks]} was not measured: {names[there]} stands in"
    assert any(said in note for note in mine.notes), mine.notes
    assert not any(said in note for note in has.notes)


def test_torchs_own_choice_stands_in_before_another_back_end(measured):
    op = decoder.attention(GPT, 2, 128, dtype="fp32")
    few, more = (Prices(told(measured, "math", **of)).estimate(op) for of in ({}, {"flash": 0.5}))
    assert few == more and few.source == "transferred" and few.error > 1.0


def test_auto_wins_ties(measured):
    """Flash was not measured; then it was, and takes half a percent less with noise of two."""
    store.write("costs.json", measured)
    plan = meshwise.plan("gpt-30m", attention="flash,auto", **ASKED)
    noisy = told(measured, flash=0.995)
    noisy = msgspec.structs.replace(
        noisy,
        surfaces=tuple(
            msgspec.structs.replace(one, noise=0.02) if isinstance(one.like, Attention) else one
            for one in noisy.surfaces
        ),
    )
    store.write("costs.json", noisy)
    near = meshwise.plan("gpt-30m", attention="flash,auto", **ASKED)
    for found in (plan, near):
        assert found.recipe.attention == "auto"
        first, other = found.answers.attention
        assert (first.change, first.ties, first.faster) == ("auto", False, 1.0)
        assert other.change == "flash" and other.ties
    assert near.answers.attention[1].faster > 1.0
    assert '["flash ties", "' in text(answers.of(near))


MLA = catalogue.find("deepseek-v2-lite")
WIDE = Decoder(
    name="wide", hidden=1024, layers=2, heads=2, kv_heads=2, head_dim=512, ffn=64, vocab=64,
    max_seq_len=64,
)  # fmt: skip
LLAMA = catalogue.find("llama-3-8b")


@pytest.mark.parametrize(
    ("name", "cluster", "model", "dtype", "reason"),
    [
        ("cudnn", "cpus", GPT, "fp32", "it is a kernel for GPUs, and this is a CPU"),
        ("efficient", "cpus", GPT, "fp32", "it is a kernel for GPUs, and this is a CPU"),
        ("flash", "h100-hgx", GPT, "fp32", "it computes in 16 bits, and the plan's dtype is fp32"),
        ("cudnn", "h100-hgx", GPT, "fp32", "it computes in 16 bits, and the plan's dtype is fp32"),
        ("efficient", "h100-hgx", LLAMA, "bf16", "shares no key heads, and there are 8 for 32"),
        ("flash", "h100-hgx", MLA, "bf16", "as wide, and these are 192 and 128"),
        ("flash", "h100-hgx", WIDE, "bf16", "256 wide at most, and these are 512"),
        ("flash", "h100-hgx", known.IMAGES, "bf16", "images has none"),
        ("efficient", "h100-hgx", WIDE, "bf16", ""),
        ("cudnn", "h100-hgx", MLA, "bf16", ""),
        ("flash", "cpus", LLAMA, "fp32", ""),
        ("math", "cpus", MLA, "fp32", ""),
    ],
)
def test_what_cannot_run_is_refused_before_a_search(name, cluster, model, dtype, reason):
    there = known.CPUS if cluster == "cpus" else files.take(cluster, Cluster)
    costs = msgspec.structs.replace(known.COSTS, cluster=there, dtype=dtype)
    work = Workload(global_batch_size=8, seq_len=1 if model is known.IMAGES else 64)
    if not reason:
        kernels.check(Recipe(attention=name), there.device.kind, dtype, model)
        return
    with pytest.raises(ValueError, match=f"Recipe.attention = '{name}': .*{reason}.*; use auto"):
        search.best_attention(model, work, costs, ("auto", name), num_devices=1)


def test_ranks_that_share_sequences_choose_their_kernels():
    costs = unmeasured(files.take("h100-hgx", Cluster))
    costs = msgspec.structs.replace(costs, recipe=Recipe(attention="math"))
    long = Workload(global_batch_size=1, seq_len=32768)
    model = msgspec.structs.replace(catalogue.find("gpt-125m"), max_seq_len=32768)
    shared = Layout(cp=4)
    with pytest.raises(ValueError, match="attention over cp ranks chooses its kernels itself"):
        search.given(model, long, costs, shared)
    plan = search.find(model, long, costs, num_devices=4, top=1)
    assert plan.layout.cp == 1
    assert any("over cp ranks" in one.constraint for one in plan.removed)
    why = search.why_not(plan, costs, shared)
    assert "over cp ranks" in why.obstacle
    auto = search.given(model, long, msgspec.structs.replace(costs, recipe=Recipe()), shared)
    with pytest.raises(ValueError, match=r"Plan.recipe.*cp ranks.*use recipe.attention auto"):
        msgspec.structs.replace(auto, recipe=Recipe(attention="flash"))


def test_attention_with_a_window_keeps_its_kernels(measured):
    prices = Prices(told(measured, "flash", flash=0.5))
    op = decoder.attention(GPT, 2, 128, dtype="fp32")
    assert prices.in_step(op).backend == "flash"
    assert prices.in_step(msgspec.structs.replace(op, window=16)).backend == ""


@pytest.mark.parametrize(("recompute", "layers"), [("none", 6), ("full", 0)])
def test_math_keeps_the_softmax_and_wide_copies(measured, recompute, layers):
    """A microbatch of [32, 128] tokens keeps 4 bytes of [32, 6, 128, 128] and three of [32, 6, 128,
    64] a layer, while the head's logits make the peak."""
    layout = Layout(microbatch_size=32, recompute=recompute)
    work = Workload(global_batch_size=32, seq_len=128)
    auto, math = (
        search.given(GPT, work, told(measured, name), layout).prediction.peak_memory_bytes
        for name in ("auto", "math")
    )
    assert math - auto == layers * 4 * 32 * 6 * 128 * (128 + 3 * 64)


def test_a_search_by_math_fits_what_it_keeps(measured):
    """Its bounds of memory hold: the prediction of what it found is that of the layout alone."""
    costs = told(measured, "math", math=1.0)
    small = msgspec.structs.replace(costs.cluster.device, memory_bytes=700 * 2**20)
    cluster = msgspec.structs.replace(costs.cluster, device=small)
    costs = msgspec.structs.replace(costs, cluster=cluster)
    plan = search.find(GPT, Workload(global_batch_size=16, seq_len=128), costs, num_devices=2)
    for each in (plan, *plan.runners_up):
        assert each.prediction.peak_memory_bytes <= cluster.usable_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "flash,x"}, "attention = 'flash,x': 'x' must be one of auto, cudnn, flash"),
        ({"attention": ""}, "'' must be one of auto"),
        (
            {"attention": "auto,flash", "global_batch_size": "8,16"},
            "several are searched with --gpus alone; give one of them, or leave --attention out",
        ),
        (
            {"attention": "auto,flash", "fewest": True},
            "'auto,flash': several .* leave --fewest out",
        ),
        ({"attention": "auto,flash", "layout": LAYOUT}, "several are .* leave --layout out"),
    ],
)
def test_back_ends_that_cannot_be_compared_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        meshwise.plan("gpt-30m", cluster="h100-hgx", **options)


def test_stored_runs_with_a_back_end_are_predicted(measured):
    plan = search.given(GPT, WORK, told(measured, "flash", flash=0.5), LAYOUT)
    store.write("costs.json", told(measured, flash=0.5))
    info = msgspec.structs.replace(
        known.info("run", plan, "20260102T000000-run-flash"), cluster=plan.cluster, world_size=1
    )
    took_s = plan.prediction.step_time_s / 2
    sample = known.step_sample(plan, (took_s,) * 5)
    known.write_run(Path("runs"), info, [sample])
    (one,) = meshwise.validate("runs", costs="costs.json").runs
    assert one.time.predicted == pytest.approx(plan.prediction.step_time_s)
