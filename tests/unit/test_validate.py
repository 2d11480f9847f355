"""``calibrate --validate`` on runs whose predictions and measurements are known by hand."""

import itertools
import json
import math
from pathlib import Path

import msgspec
import pytest
from scipy.stats import binomtest

import meshwise
from meshwise import store
from meshwise.cli import app
from meshwise.pages import table, validation
from meshwise.search import progress
from meshwise.spec import Layout, Recipe, RunInfo, Sample
from meshwise.stats import share_interval
from tests import sample_records as known

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(("count", "total"), [(0, 1), (1, 1), (0, 9), (5, 9), (62, 95), (95, 95)])
def test_the_interval_of_a_share_is_that_of_the_exact_binomial_test(count, total):
    exact = binomtest(count, total).proportion_ci(0.95, "exact")
    assert share_interval(count, total) == pytest.approx((exact.low, exact.high), abs=1e-9)
    low, _ = share_interval(count, total)
    if count:  # so many or more have a chance of 2.5 % at its lower end
        above = [math.comb(total, k) * low**k * (1 - low) ** (total - k) for k in range(total + 1)]
        assert sum(above[count:]) == pytest.approx(0.025)


def a_run(name: str, plan, slower: float, folder="runs", samples=None, **facts) -> str:
    """Write a run of a plan that took ``slower`` times what was predicted, in both time and
    memory."""
    told = plan.prediction
    info = msgspec.structs.replace(known.info("run", plan, name), cluster=plan.cluster)
    info = msgspec.structs.replace(info, world_size=plan.layout.num_devices, provenance=facts)
    done = known.step_sample(
        plan, [slower * told.step_time_s] * 7, peak_bytes=slower * told.peak_memory_bytes
    )
    return known.write_run(Path(folder), info, [done] if samples is None else samples)


@pytest.fixture
def plan():
    known.synthetic_run(Path("runs"))
    meshwise.calibrate()
    return meshwise.plan(layout=Layout(dp=2, zero=2, microbatch_size=4), global_batch_size=8)


def test_a_long_validation_says_how_far_it_is(plan, monkeypatch, caplog):
    a_run("20260102T000000-run-close", plan, 1.001)
    monkeypatch.setattr(progress, "monotonic", itertools.count(0, 6).__next__)
    caplog.set_level("INFO", "meshwise")
    meshwise.validate("runs")
    assert {"1 of 2 runs read", "1 of 2 runs predicted"} <= {*caplog.messages}


def test_runs_are_predicted_anew_and_the_worst_comes_first(plan):
    a_run("20260102T000000-run-close", plan, 1.001)
    a_run("20260103T000000-run-slow", plan, 4.0)
    a_run("20260104T000000-run-fast", plan, 0.8)
    found = meshwise.validate("runs")
    assert [one.run_id[16:] for one in found.runs] == ["run-slow", "run-fast", "run-close"]
    assert [one.time.error for one in found.runs] == pytest.approx([-0.75, 0.25, 1 / 1.001 - 1])
    assert found.runs[0].time.predicted == pytest.approx(plan.prediction.step_time_s)
    assert found.runs[0].time.within is False and all(one.own for one in found.runs)
    told = found.summary
    assert told == found.own and told.num_runs == 3
    assert told.mean_error == pytest.approx((0.75 + 0.25 + 1 - 1 / 1.001) / 3)
    assert told.worst_error == told.memory_worst_error == pytest.approx(0.75)
    prediction = plan.prediction
    width = (prediction.high_s - prediction.low_s) / 2 / prediction.step_time_s
    assert told.half_width == pytest.approx(width)


def test_a_prediction_of_other_prices_in_the_plan_is_not_believed(plan):
    """The plan's own figures are old: what counts is what this version predicts."""
    step_s = plan.prediction.step_time_s
    wrong = msgspec.structs.replace(plan.prediction, step_time_s=9 * step_s, high_s=99 * step_s)
    a_run("20260102T000000-run-x", msgspec.structs.replace(plan, prediction=wrong), 1 / 9)
    (one,) = meshwise.validate().runs
    assert one.time.error == pytest.approx(0.0, abs=1e-9)


def test_what_cannot_be_predicted_is_named_with_the_reason(plan, tmp_path):
    a_run("20260102T000000-run-good", plan, 1.0)
    ahead = msgspec.structs.replace(plan, recipe=Recipe(prefetch=2))
    a_run("20260103T000000-run-ahead", ahead, 1.0)
    a_run("20260104T000000-run-died", plan, 1.0, samples=[])
    device = msgspec.structs.replace(plan.cluster.device, name="another CPU")
    far = msgspec.structs.replace(plan.cluster, device=device)
    elsewhere = msgspec.structs.replace(plan, cluster=far, runs=("20250101-gone",))
    a_run("20260105T000000-run-far", elsewhere, 1.0)
    old = Path(a_run("20260106T000000-run-old", plan, 1.0)) / "run.json"
    data = json.loads(old.read_text())
    data["plan"]["schema_version"] = 0
    old.write_text(json.dumps(data))
    torn = Path(a_run("20260107T000000-run-torn", plan, 1.0)) / "samples.jsonl"
    torn.write_text(torn.read_text()[:-20])
    found = meshwise.validate("runs")
    assert [one.run_id[16:] for one in found.runs] == ["run-good"]
    why = {Path(one.path).name.split("-")[-1]: one.reason for one in found.not_checked}
    assert why["ahead"].startswith("recipe.prefetch = 2: plans do not price it yet")
    assert why["died"].startswith("no step was measured")
    assert why["far"].startswith("no prices for two-cpus (20250101-gone is not here); name some")
    assert "schema_version" in why["old"] and "truncated or damaged" in why["torn"]
    assert why["cpus"] == "no prices for two-cpus but its own; name some with --costs"


@pytest.mark.parametrize(
    ("peaks", "recorded", "is_predicted"),
    [
        ({"fp32": 1e12, "tf32": 8e12}, False, False),
        ({"fp32": 1e12, "tf32": 8e12}, True, True),
        ({"fp32": 1e12}, False, True),
    ],
)
def test_fp32_of_unknown_precision_is_not_predicted(plan, peaks, recorded, is_predicted):
    """Before the field was recorded, torch made convolutions TF32 on devices that have it."""
    device = msgspec.structs.replace(plan.cluster.device, peak_flops=peaks)
    cluster = msgspec.structs.replace(plan.cluster, device=device)
    path = Path(a_run("20260102T000000-run-x", msgspec.structs.replace(plan, cluster=cluster), 1.0))
    data = json.loads((path / "run.json").read_text())
    assert data["plan"]["dtype"] == "fp32" and data["plan"]["recipe"].pop("fp32_precision")
    if not recorded:
        (path / "run.json").write_text(json.dumps(data))
    found = meshwise.validate("runs")
    assert bool(found.runs) is is_predicted
    why = [one.reason for one in found.not_checked if one.path == str(path)]
    assert len(why) == (not is_predicted)
    assert all(one.startswith("its record lacks recipe.fp32_precision: torch") for one in why)


def test_other_measurements_of_the_machine_stand_in_and_costs_can_be_named(plan):
    lost = msgspec.structs.replace(plan, runs=("gone",))
    a_run("20260102T000000-run-x", lost, 2.0)
    (one,) = meshwise.validate().runs
    assert not one.own and one.prices == plan.runs and one.time.error == pytest.approx(-0.5)
    slow = msgspec.structs.replace(store.read("costs.json", meshwise.Costs), runs=("slow",))
    curves = [
        msgspec.structs.replace(curve, time_s=tuple(3 * t for t in curve.time_s))
        for curve in slow.curves
    ]
    store.write("slow.json", msgspec.structs.replace(slow, curves=tuple(curves)))
    (other,) = meshwise.validate(costs="slow.json").runs
    assert other.prices == ("slow",) and other.time.predicted > one.time.predicted


def test_a_run_whose_measurements_are_gone_uses_the_costs_that_were_kept(plan):
    a_run("20260102T000000-run-x", plan, 1.0, folder="elsewhere/runs")
    store.write("elsewhere/costs.json", store.read("costs.json", meshwise.Costs))
    (one,) = meshwise.validate("elsewhere").runs
    assert one.own and one.time.error == pytest.approx(0.0, abs=1e-9)


def test_operations_are_priced_by_other_runs_than_their_own(plan):
    """A second profile, a quarter slower: every price is a fifth too low."""
    (first,) = store.runs_of("runs")
    info, samples, _ = store.load(first)
    late = msgspec.structs.replace(info, run_id="20260109T000000-measure-profile-late")
    slower = [
        msgspec.structs.replace(one, times_s=tuple(1.25 * t for t in one.times_s))
        for one in samples
    ]
    known.write_run(Path("runs"), late, slower)
    found = meshwise.validate("runs")
    assert {one.run_id for one in found.samples} == {info.run_id, late.run_id}
    for one in found.samples:
        due = 0.2 if one.run_id == late.run_id else 0.25
        assert (one.mean_error, one.worst_error) == pytest.approx((due, due)), one.kind
    total = sum(one.num_samples + one.num_unpriced for one in found.samples)
    assert total == 2 * len(samples) and not found.not_checked


def test_a_busy_host_and_changed_versions_are_said(plan, monkeypatch, capsys):
    store.write("costs.json", store.read("costs.json", meshwise.Costs))
    (first,) = store.runs_of("runs")
    info = msgspec.structs.replace(
        store.read(first / "run.json", RunInfo), provenance={"torch": "1"}
    )
    store.write(first / "run.json", info)
    a_run("20260102T000000-run-x", plan, 1.0, torch="2", host_load=40.0, host_cores=64)
    assert meshwise.validate().runs[0].changed == "torch 1 to 2"
    monkeypatch.setattr(table, "WIDTH", 400)
    with pytest.raises(SystemExit):
        app.main(["calibrate", "--validate"])
    out = capsys.readouterr().out
    assert "0102T000000 busy" in out and "40 processes at work on 64 cores" in out
    assert "0102T000000 busy: since its prices: torch 1 to 2" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--validate --law cubic", "law = 'cubic': leave one of them out"),
        ("--validate --out x.json", "out = 'x.json': leave one of them out"),
        ("--costs costs.json", "costs = 'costs.json': only --validate takes it"),
        ("nothing --validate", "no run in nothing; name a run directory, or a folder of them"),
    ],
)
def test_flags_without_effect_and_folders_without_runs_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        app.main(["calibrate", *words.split()])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_tables_are_one_document_as_json(plan, capsys):
    a_run("20260102T000000-run-x", plan, 1.5)
    with pytest.raises(SystemExit):
        app.main(["calibrate", "--validate", "--json"])
    found = msgspec.json.decode(capsys.readouterr().out, type=validation.Validation)
    assert found.summary.num_runs == 1 and found.runs[0].time.error == pytest.approx(-1 / 3)


def test_a_sample_alone_says_nothing_of_inference(plan):
    case = known.step_sample(plan, [1.0]).case
    op = msgspec.structs.replace(case.op, mode="infer")
    case = msgspec.structs.replace(case, op=op)
    sample = Sample(case_id=case.id, case=case, status="ok", times_s=(1.0,) * 7)
    a_run("20260102T000000-run-x", plan, 1.0, samples=[sample])
    found = meshwise.validate("runs")
    assert found.summary is None and "infer: only training is predicted" in str(found.not_checked)
