"""Layouts of Wide-ResNets: bounds hold for stages of unequal layers, and the plan is the fastest.

Priced by data sheets.
"""

import random

import pytest
from msgspec.structs import replace

from meshwise import models, plan, search
from meshwise.fit.calibrate import calibrate
from meshwise.models import block_ops, offload
from meshwise.options.measure import ProfileOptions
from meshwise.prices import Prices, unmeasured
from meshwise.probe.cases import profile
from meshwise.probe.cases.scope import Scope
from meshwise.search import bound, room
from meshwise.search import stage as stages
from meshwise.search.predict import memory_of
from meshwise.search.space import legal_layouts
from meshwise.spec import (
    Block,
    Cluster,
    Layout,
    Recipe,
    RunInfo,
    Sample,
    WideResNet,
    Workload,
)
from meshwise.verbs import files
from tests.unit.test_offload_plans import at_rate
from tests.unit.test_search import KNOWN, ladder

MODEL = WideResNet(
    name="small", blocks=(2, 1, 1), channels=64, width_factor=2, image_size=96, num_classes=64
)
WORKLOAD = Workload(global_batch_size=64, seq_len=1)


def costs(**changes):
    return replace(unmeasured(files.take("h100-hgx", Cluster)), **changes)


@pytest.mark.parametrize(("lowering", "dtype"), [("eager", "bf16"), ("compiled", "bf16")])
def test_bounds_are_bounds(lowering, dtype):
    there = costs(lowering=lowering, dtype=dtype)
    prices, chance = Prices(there, datasheet=True), random.Random(3)
    layouts, _ = legal_layouts(MODEL, WORKLOAD, there, 4)
    assert {1, 2, 4} == {x.tp for x in layouts} == {x.pp for x in layouts}
    rungs = [chance.choice(ladder(layout, MODEL)) for layout in chance.sample(layouts, 40)]
    # each stage copies its input, but not that of its second layer
    two_layers = Layout(pp=2, tp=2, schedule="1f1b", microbatch_size=64)
    for rung in [*rungs, *ladder(two_layers, MODEL)]:
        of = (MODEL, 1, rung, prices)
        prediction = search.predict(MODEL, WORKLOAD, rung, prices)
        least_s = max(bound.mathematics_s(*of), bound.traffic_s(*of))
        assert least_s <= prediction.step_time_s * (1 + 1e-9), rung.name
        least, most = room.between(MODEL, WORKLOAD, rung, prices)
        needed = memory_of(MODEL, WORKLOAD, rung, prices)[1].total_bytes
        assert max(least, bound.memory_bytes(*of)) <= needed <= most, rung.name


@pytest.mark.parametrize("stages", [{}, {"pp": 2, "schedule": "1f1b"}], ids=["one", "two"])
def test_bounds_count_copies_to_the_host(monkeypatch, stages):
    """A block that changes channels or resolution reads other sizes than such a block makes."""
    monkeypatch.setattr(offload, "MIN_BYTES", 2**12)
    layout = Layout(microbatch_size=16, num_microbatches=4, recompute="full", **stages)
    with at_rate(1e9):
        prices = Prices(costs(recipe=Recipe(offload=True), dtype="bf16"), datasheet=True)
        step_s = search.predict(MODEL, WORKLOAD, layout, prices).step_time_s
        least_s = bound.mathematics_s(MODEL, 1, layout, prices)
    assert 0.7 * step_s < least_s <= step_s


def test_the_plan_is_the_fastest(tmp_path):
    """Against pricing every layout of like stages without recomputation, which all fit."""
    found = plan(
        MODEL, cluster="h100-hgx", gpus=2, global_batch_size=8, top=3, out=tmp_path / "plan.json",
        space="uniform",
    )  # fmt: skip
    workload, prices = replace(WORKLOAD, global_batch_size=8), Prices(costs(), datasheet=True)
    layouts, _ = legal_layouts(MODEL, workload, costs(), 2)
    times = [search.predict(MODEL, workload, x, prices).step_time_s for x in layouts]
    ranked = [found.prediction, *(candidate.prediction for candidate in found.runners_up)]
    assert [each.step_time_s for each in ranked][:3] == sorted(times)[:3]


def of_profile(with_blocks, seconds):
    """Prices of a profile of GPUs for the model, of operations that take so many seconds."""
    cluster = files.take("h100-hgx", Cluster)
    cases = profile.cases(Scope(cluster, 8, "bf16"), ProfileOptions(model=(MODEL,)))
    cases = [case for case in cases if with_blocks or not isinstance(case.op, Block)]
    info = RunInfo(
        run_id="x", verb="measure", command=(), started="", world_size=8, cluster=cluster
    )
    return calibrate(
        [
            (
                info,
                [
                    Sample(case_id=case.id, case=case, status="ok", times_s=(seconds(case.op),) * 3)
                    for case in cases
                ],
            )
        ]
    )


@pytest.fixture(autouse=True)
def _hosts_that_launch_at_once(monkeypatch):
    monkeypatch.setattr("meshwise.prices.measured.attainable", lambda: KNOWN)


@pytest.mark.parametrize("measured", [False, True])
def test_plans_are_compiled_and_layers_cost_what_their_blocks_took(measured):
    """A layer twice as fast as the sum of its operations, but those of the last resolution as fast;
    without blocks the sum, in a wider interval."""

    def seconds(op):
        if isinstance(op, Block):
            ratio = 1.0 if op.form.startswith("2") else 0.5
            return ratio * sum(map(seconds, block_ops(op)))
        return 1e-5 + op.flops / 5e14 + op.bytes / 2e12

    there = of_profile(measured, seconds)
    layout = Layout(microbatch_size=32, num_microbatches=2)
    found = search.given(MODEL, WORKLOAD, there, layout).prediction
    assert there.lowering == "compiled"
    said = [note for note in found.notes if "no layer was measured" in note]
    assert bool(said) == (not measured)
    program = models.program_of(models.graph(MODEL, 32, 1, "bf16"), layout, "bf16")
    expected = {"forward": 0.0, "backward": 0.0}
    for task in program.tasks:
        if task.part == "layer":
            halved = measured and not task.name.startswith("layers.3")
            expected[task.phase] += seconds(task.op) * (0.5 if halved else 1.0)
    parts = {part.name: part.value for part in found.time_parts}
    for phase, expected_s in expected.items():
        assert parts[f"{phase} layer"] == pytest.approx(expected_s, rel=0.02)
    wide = (found.high_s - found.low_s) / found.step_time_s
    assert wide > 0.3 or measured


def test_any_number_of_images_follows_from_two():
    """Seconds and bytes of a stage's actions, against its own program, written for that number."""
    layout, shared = Layout(dp=2, tp=2, zero=3, num_microbatches=3), Prices(costs(), datasheet=True)
    for size in (3, 1, 8, 64):
        rung = replace(layout, microbatch_size=size)
        (kind,) = stages.kinds_of(MODEL, 1, rung)
        own = Prices(costs(), datasheet=True)
        assert stages.stage_cost(kind, shared) == stages.stage_cost(kind, own), size
