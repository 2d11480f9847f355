"""Suites and models without a priced plan, on two real ranks that the tests share."""

import ast
import csv
import itertools
import json
import math
import os
import re
from pathlib import Path

import msgspec
import pytest

import meshwise
from meshwise import launch, store, suites
from meshwise.launch import RanksFailed
from meshwise.launch.order import find
from meshwise.options.run import Suite
from meshwise.spec import Cluster, Device, Layout, Recipe, Tier
from meshwise.suites import tsv
from meshwise.verbs.suite import INFERENCE_TSV, run_suite
from tests.sample_records import IMAGES, LLAMA, MOE

pytestmark = pytest.mark.dist


def serve(ranks, target, request, folder):
    os.chdir(folder)  # of this test; the ranks were started in another
    find(target)(ranks, request.encode())


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Two ranks with so little memory that every case must shrink."""
    monkeypatch.chdir(tmp_path)
    device = Device(name="a CPU", kind="cpu", memory_bytes=30_000_000)
    cluster = Cluster(
        name="small",
        num_hosts=1,
        num_devices_per_host=2,
        device=device,
        tiers=(Tier(name="host", num_devices=2),),
    )
    store.write("cluster.toml", cluster)


@pytest.fixture(autouse=True)
def shared_ranks(monkeypatch, gloo_ranks):
    """What ``launch.run`` would have started runs on ranks that are there already."""

    def run(target, request, *, nproc, **_):
        text = msgspec.json.encode(request).decode()
        gloo_ranks(nproc, serve, target=target, request=text, folder=os.getcwd())

    monkeypatch.setattr(launch, "run", run)
    return run


def masked(lines):
    """Without what differs from run to run: times, rates, and the run's date."""
    text = "\n".join(lines) + "\n"
    text = re.sub(r"(s|\(s\)|TFLOPs|\(GB\)): \d+\.\d+", r"\1: #", text)
    text = re.sub(r"\d{8}T\d{6}", "DATE", text)
    text = re.sub(r": \d+\.\d+ s$", ": # s", text, flags=re.MULTILINE)
    text = re.sub(r"(stage-construction(-dp)?': ')\d+\.\d+", r"\1#", text)
    text = re.sub(r"(latencies: )\[.*\]", r"\1[#]", text)
    return re.sub(r"trace-\w+", "trace-ID", text)


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.parametrize("family", ["gpt", "moe", pytest.param("wresnet", marks=pytest.mark.whole)])
def test_a_shrunken_suite_runs_to_its_end(family, golden):
    lines = []
    settings = Suite(niter=3, scale_to_fit=True, exp_name="mine")
    (result,) = run_suite(f"{family}.perf_test_auto", settings, lines.append)
    golden(f"suite_{family}.txt", masked(lines))
    assert result.status == "ok" and len(result.times_s) == 2  # the first of three is dropped
    (row,) = rows("mine.tsv")
    assert tuple(row) == tuple(tsv.COLUMNS) and row["#GPU"] == "2"
    assert float(row["Mean Time (s)"]) == pytest.approx(sum(result.times_s) / 2, abs=6e-4)
    info, (sample,), _ = store.load(result.run_dir)
    assert info.status == "complete" and info.plan.prediction is None
    assert len(sample.metrics["losses"]) == 4  # one compiles, three are iterations
    assert all(map(math.isfinite, sample.metrics["losses"]))
    for phase in ("setup_s", "data_s", "build_s", "compile_s", "timed_s"):
        assert sample.metrics[phase] > 0
    assert sample.metrics["timed_s"] >= sum(sample.times_s)


@pytest.mark.parametrize(("suite", "space"), [("gpt", ()), ("moe", ("uniform",))])
def test_a_searched_case_runs_and_its_row_tells_the_search(suite, space, monkeypatch, golden):
    some_cases(monkeypatch, 2)
    settings, lines = Suite(niter=3, scale_to_fit=True, space=space), []
    (result,) = run_suite(f"{suite}.grid_search_auto", settings, lines.append)
    golden(f"suite_search_{suite}.txt", masked(lines))
    assert result.status == "ok" and len(result.times_s) == 2
    layout = store.load(result.run_dir)[0].plan.layout
    (row,) = rows("default.tsv")
    assert "SearchParallelArgs(" in row["Parallel Config"]
    told = ast.literal_eval(row["Metadata"])
    times_s = ast.literal_eval(told["compilation_times"])
    assert [name.removeprefix("stage-construction") for name in times_s] == [
        "", "-dp", "-compilation", "-profiling"
    ]  # fmt: skip
    assert float(times_s["stage-construction"]) > 0
    assert told["compute_cost_file_name"] == "data sheet of p3.16xlarge"
    meshes = ast.literal_eval(told["logical_mesh_shapes"])
    assert meshes == [[layout.dp, layout.tp]] * layout.pp
    ids = ast.literal_eval(told["forward_stage_layer_ids"])
    clusters = {"gpt": 6, "moe": 8}[suite]
    assert [*itertools.chain(*ids)] == [*range(clusters)] and len(ids) == layout.pp
    assert len(ast.literal_eval(told["submesh_shapes"])) == layout.pp


def some_cases(monkeypatch, *wanted):
    whole = suites.cases
    monkeypatch.setattr(suites, "cases", lambda n, size: tuple(whole(n, size)[i] for i in wanted))


def test_inference_leaves_the_stages_and_a_trace(monkeypatch, golden):
    some_cases(monkeypatch, 0, 5)  # tp 2, and a pipeline of 2
    lines = []
    settings = Suite(niter=3, scale_to_fit=True, profile_stage_execution_time=True)
    results = run_suite("gpt_inference.profile", settings, lines.append)
    golden("suite_inference.txt", masked(lines))
    assert [result.status for result in results] == ["ok", "ok"]
    sharded, piped = rows(INFERENCE_TSV)
    assert (sharded["OP"], sharded["PP"]) == ("2", "1") and (piped["OP"], piped["PP"]) == ("1", "2")
    assert len(json.loads(sharded["StageLatencies(s)"])) == 1
    latencies = json.loads(piped["StageLatencies(s)"])
    assert len(latencies) == 2 and sum(latencies) <= 1.5 * float(piped["MeanTime(s)"]) + 1e-3
    assert len(json.loads(piped["StageWeights(B)"])) == 2
    (trace,) = Path(results[1].run_dir).glob("trace-*.json")
    assert json.loads(trace.read_text())["traceEvents"]


def test_driver_time_is_one_time_of_the_whole_loop(monkeypatch):
    some_cases(monkeypatch, 0)
    settings = Suite(niter=4, scale_to_fit=True, driver_time=True)
    (trained,) = run_suite("gpt.perf_test_auto", settings)
    (inferred,) = run_suite("gpt_no_embedding_inference.profile", settings)
    assert len(trained.times_s) == 1 and len(inferred.times_s) == 1
    _, (sample,), _ = store.load(trained.run_dir)
    of_rank_0 = sample.rank_times_s[0]
    assert trained.times_s[0] == pytest.approx(sum(of_rank_0) / 3)
    assert "vocab 51200 -> 128" in inferred.row["Metadata"]


def test_a_case_that_fails_does_not_stop_the_suite(monkeypatch, shared_ranks):
    some_cases(monkeypatch, 0, 1, 2, 3)
    died = RanksFailed("rank 1 died of SIGKILL during case step 2; the other ranks were ended")
    late = RanksFailed("rank 1 had stopped during case step 2; the other ranks were ended")
    fates = iter([died, late, MemoryError(), None])

    def run(target, request, *, nproc, **_):
        fate = next(fates)
        if isinstance(fate, RanksFailed):
            raise fate
        shared_ranks(target, request, nproc=nproc)
        if fate is not None:  # what the ranks leave when memory runs out
            path = Path(request.run_dir) / "samples.jsonl"
            sample = json.loads(path.read_text())
            sample |= {"status": "oom", "reason": "rank 0 lacks 2 GiB", "times_s": []}
            path.write_text(json.dumps(sample) + "\n")

    monkeypatch.setattr(launch, "run", run)
    settings = Suite(niter=2, scale_to_fit=True)
    results = run_suite("gpt_inference.profile", settings)
    assert [result.status for result in results] == ["error", "hung", "oom", "ok"]
    kept = rows("default.tsv")
    assert [bool(row["Mean Time (s)"]) for row in kept] == [False, False, False, True]
    assert "SIGKILL during case step 2" in kept[0]["Metadata"]
    assert "rank 0 lacks 2 GiB" in kept[2]["Metadata"]
    statuses = [store.load(result.run_dir)[0].status for result in results]
    assert statuses == ["failed", "failed", "partial", "complete"]
    assert len(rows(INFERENCE_TSV)) == 1


def test_ctrl_c_stops_and_keeps_what_is_there(monkeypatch, shared_ranks):
    some_cases(monkeypatch, 0, 1)
    calls = []

    def run(target, request, *, nproc, **_):
        calls.append(request)
        if len(calls) == 2:
            raise KeyboardInterrupt
        shared_ranks(target, request, nproc=nproc)

    monkeypatch.setattr(launch, "run", run)
    with pytest.raises(KeyboardInterrupt):
        run_suite("gpt_inference.profile", Suite(niter=2, scale_to_fit=True))
    assert len(rows("default.tsv")) == 1
    assert store.load(calls[1].run_dir)[0].status == "interrupted"


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (LLAMA, {"tp": 2, "sequence_parallel": True, "microbatch_size": 4}),
        (MOE, {"dp": 2, "ep": 2, "zero": 2, "microbatch_size": 2}),
        (IMAGES, {"pp": 2, "schedule": "1f1b", "microbatch_size": 4, "num_microbatches": 2}),
    ],
)
def test_a_model_without_a_plan_trains_as_on_one_device(model, layout):
    (run_dir,) = meshwise.run(
        model=model,
        layout=json.dumps(layout),
        recipe='{"aux_loss": 0.0}',
        seq_len=1 if model is IMAGES else 16,
        steps=2,
        check=True,
    )
    info, (sample,), _ = store.load(run_dir)
    assert (sample.status, sample.reason) == ("ok", "")
    assert sample.metrics["check_loss_error"] <= 1e-5
    assert info.plan.model == model and info.plan.recipe.aux_loss == 0


def test_training_goes_on_from_a_checkpoint_in_another_layout():
    two = {"model": LLAMA, "seq_len": 16, "warmup": 1, "seed": 3, "global_batch_size": 4}
    sharded, split = Layout(dp=2, zero=3, microbatch_size=2), Layout(tp=2, microbatch_size=4)

    def losses(**options):
        (run_dir,) = meshwise.run(**two, **options)
        return store.load(run_dir)[1][0].metrics["losses"]

    whole = losses(layout=sharded, steps=5)
    first = losses(layout=sharded, steps=1, save="kept")  # steps 0, 1, 2
    second = losses(layout=split, steps=2, resume_from="kept")  # steps 3, 4, 5, 6
    assert len(whole) == 7 and first == whole[:3]
    assert second == pytest.approx(whole[3:], rel=1e-5)


def test_a_loss_that_is_not_finite_is_an_error_with_its_step():
    recipe = Recipe(learning_rate=1e38, max_grad_norm=0.0)
    (run_dir,) = meshwise.run(model=LLAMA, recipe=recipe, seq_len=16, steps=3, find_nonfinite=True)
    info, (sample,), _ = store.load(run_dir)
    assert sample.status == "error"
    assert (info.status, info.reason) == ("failed", sample.reason)
    said = (
        r"the loss is (?:nan|inf) at step (\d+); first not finite: the (?:output|value before the "
        r"step) of (\S+) \(stage 0.*"
    )
    step, module = re.fullmatch(said, sample.reason).groups()
    assert int(step) >= 1 and len(sample.metrics["losses"]) == int(step)
    assert module.startswith(("embed", "layers.0"))


def test_a_profiled_run_says_where_the_time_goes():
    layout = Layout(pp=2, schedule="1f1b", num_microbatches=4)
    (run_dir,) = meshwise.run(model=LLAMA, layout=layout, seq_len=16, steps=2, profile=True)
    _, (sample,), _ = store.load(run_dir)
    found = sample.metrics
    addends = ("forward", "backward", "optimizer", "exposed_communication", "bubble", "other")
    assert sum(found[f"{name}_s"] for name in addends) == pytest.approx(found["phases_step_s"])
    names = {
        event["name"]
        for event in json.loads((run_dir / "timeline.json").read_text())["traceEvents"]
    }
    assert {"F 0.0", "F 1.3", "B 0.3"} <= names
    assert not (run_dir / "predicted.json").exists()


@pytest.mark.parametrize(("mode", "count"), [("infer", "steps"), ("decode", "new_tokens")])
def test_a_model_infers_and_decodes_without_a_plan(mode, count):
    much = {count: {"steps": 2, "new_tokens": 4}[count]}
    (run_dir,) = meshwise.run(model=LLAMA, layout=Layout(tp=2), seq_len=16, mode=mode, **much)
    _, (sample,), _ = store.load(run_dir)
    assert (sample.status, sample.case.op.mode) == ("ok", mode)
    assert len(sample.times_s) == {"infer": 2, "decode": 3}[mode]
