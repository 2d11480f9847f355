"""The verbs from Python: each reachable after any import, on files whose law is known, and what
they ask of the ranks they start (the start itself is replaced; tests/dist starts real ones)."""

import importlib
import os
import pkgutil
import re
import shlex
import signal
from pathlib import Path

import msgspec
import pytest

import meshwise
from meshwise import spec, store
from meshwise.files import read_bytes
from meshwise.launcher import Job
from meshwise.patience import Patience
from meshwise.spec import Block, Cluster, Collective, Convolution, RunInfo, Sample
from meshwise.verbs import files, ring, world
from meshwise.verbs import measure as measuring
from meshwise.verbs.recording import Recording
from tests import sample_records as known

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("here")
TRAIN = "meshwise.engine.frame:run_ranks"
SWEEP = "meshwise.probe.sweep:measure_ranks"
DATA = Path(__file__).parents[1] / "data"
LLAMA_1B, PRIMUS = DATA / "hugging_face" / "llama-3.2-1b.json", DATA / "primus"


@pytest.fixture
def started(monkeypatch):
    """Instead of starting ranks: the requests, and what one would have done with them."""
    from meshwise import launch
    from meshwise.engine.frame import RunRequest
    from meshwise.probe.sweep import SweepRequest

    requests = []

    def run(target, request, *, nproc, threads=None, patience=None, environment=None):
        requests.append((target, request, nproc))
        kind = RunRequest if target == TRAIN else SweepRequest
        request = msgspec.json.decode(msgspec.json.encode(request), type=kind)
        if target == TRAIN:
            sample = known.step_sample(request.plan, [0.5] * request.counts.steps, peak_bytes=1e9)
            store.append(request.run_dir, sample)
            return
        todo = [case for case in request.cases if case.id not in request.skip]
        for case in todo[:3]:
            times_s = (known.law_s(case.op),) * 4
            store.append(
                request.run_dir, Sample(case_id=case.id, case=case, status="ok", times_s=times_s)
            )
        store.finish(request.run_dir, "partial", "budget")

    monkeypatch.setattr(launch, "run", run)
    return requests


OTHERS = (  # Triton's and vLLM's
    "meshwise.reshard.transports.kernels",
    "meshwise.attention.row_kernels",
    "meshwise.parallel.token_kernels",
    "meshwise.bridges.vllm",
)


def test_every_verb_works_after_importing_every_module(started):
    for module in pkgutil.walk_packages(meshwise.__path__, "meshwise."):
        if module.name not in OTHERS:
            importlib.import_module(module.name)
    assert set(meshwise.VERBS) <= set(dir(meshwise))
    cluster = meshwise.detect(nproc=2, peak=("fp32=1e11",))
    assert cluster.num_devices == 2 and cluster.device.peak_flops == {"fp32": 1e11}
    assert meshwise.measure(dry_run=True)
    run_dir = meshwise.measure()
    known.synthetic_run(Path("runs2"))
    costs = meshwise.calibrate(runs="runs2")
    assert costs.cluster == known.CPUS
    plan = meshwise.plan("gpt-30m", gpus=2, global_batch_size=4)
    assert plan.workload.global_batch_size == 4 and plan.layout.num_devices == 2
    run_dirs = meshwise.run(rivals=1)
    assert [path.parent for path in run_dirs] == [Path("runs")] * 2
    with pytest.raises(ValueError, match="nothing to refit"):
        meshwise.refit()
    assert meshwise.compare(run_dirs[0], run_dirs[0]).ratio == 1
    assert meshwise.report().exists()
    assert meshwise.show(run_dir).info.verb == "measure"


def test_records_are_public():
    for name in spec.__all__:
        assert getattr(meshwise, name) is getattr(spec, name)
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        meshwise.plans  # noqa: B018


class TestNumRanks:
    @pytest.mark.parametrize(
        "given",
        [
            {"nproc": 4},
            {"gpus": 4},
            {"num_hosts": 2, "num_devices_per_host": 2},
            {"nproc": 4, "gpus": 4, "num_hosts": 1, "num_devices_per_host": 4},
        ],
    )
    def test_three_spellings_of_one_number(self, given):
        assert world.num_ranks(**given) == 4

    def test_none(self):
        assert world.num_ranks() is None

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"nproc": 4, "gpus": 8}, "--nproc = 4, --gpus = 8"),
            ({"gpus": 4, "num_hosts": 2, "num_devices_per_host": 4}, "--gpus = 4, --num-hosts 2"),
            ({"num_hosts": 2}, "give both"),
            ({"nproc": 0}, ">= 1"),
        ],
    )
    def test_disagreement(self, given, message):
        with pytest.raises(ValueError, match=message):
            world.num_ranks(**given)

    def test_more_ranks_than_the_cluster_or_a_host_has(self):
        with pytest.raises(ValueError, match="nproc = 3: cluster 'two-cpus' has 2 devices"):
            world.size(3, known.CPUS, default=2)
        two_hosts = msgspec.structs.replace(known.CLUSTER, num_hosts=2, num_devices_per_host=2)
        with pytest.raises(ValueError, match="with torchrun or srun"):
            world.size(None, two_hosts, default=4)

    def test_the_launcher_decides(self, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert world.size(None, known.CPUS, default=1) == 2
        with pytest.raises(ValueError, match="nproc = 1, but the launcher started 2 ranks"):
            world.size(1, known.CPUS, default=2)


class TestMeasure:
    def test_a_missing_cluster_is_detected_and_said(self, started, caplog):
        caplog.set_level("INFO", "meshwise")
        run_dir = meshwise.measure(nproc=2)
        assert Path("cluster.toml").exists()
        assert "cluster.toml does not exist" in caplog.text
        target, request, nproc = started[0]
        assert (target, nproc, request.run_dir) == (SWEEP, 2, str(run_dir))
        assert {case.world_size for case in request.cases} == {2}

    @pytest.mark.parametrize("launched", [False, True])
    @pytest.mark.parametrize(
        "start",
        [
            lambda: meshwise.measure(nproc=2),
            lambda: ring.asked(nproc=2, mode="quick"),
            lambda: measuring.place("cluster.toml", 2, keep=True),
        ],
    )
    def test_fewer_ranks_than_the_machine_has_do_not_narrow_it(
        self, started, monkeypatch, start, launched
    ):
        if launched:
            for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
                monkeypatch.setenv(name, value)
        start()
        assert store.read("cluster.toml", Cluster).num_devices == 4
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        assert measuring.place("cluster.toml", 4, keep=False)[1] == 4

    def test_more_ranks_than_usual_of_a_cpu_are_a_larger_machine(self, started):
        machine, size = measuring.place("cluster.toml", 6, keep=False)
        assert (machine.num_devices, size) == (6, 6) and not list(Path().iterdir())

    def test_a_dry_run_writes_nothing(self, started):
        cases = meshwise.measure(nproc=2, dry_run=True)
        assert all(seconds > 0 for _, seconds in cases)
        assert not started and not list(Path().iterdir())

    def test_models_budget_and_lowering_reach_the_ranks(self, started):
        store.write("cluster.toml", known.CPUS)
        meshwise.measure(model=("gpt-125m",), budget="2m", lowering="compiled")
        request = started[0][1]
        assert request.budget_s == 120
        blocks = [case for case in request.cases if isinstance(case.op, spec.Block)]
        assert {case.op.model.hidden for case in blocks} == {768}
        assert {case.lowering for case in blocks} == {"compiled"}

    @pytest.mark.parametrize(
        ("what", "odd"),
        [("profile", {"model": 5}), ("gemm", {"configs": {"a": 1}}), ("attention", {"shapes": 1.5}),
         ("collectives", {"plan": 5}), ("collectives", {"splits": [4]}),
         ("collectives", {"ranks": {"a": 1}}), ("collectives", {"sizes": [4096]})],
    )  # fmt: skip
    def test_a_value_that_is_no_such_thing_is_refused_by_its_field(self, started, what, odd):
        ((name, value),) = odd.items()
        with pytest.raises(ValueError, match=re.escape(f"{name} = {value!r}: ")):
            meshwise.measure(what, nproc=2, dry_run=True, **odd)

    def test_one_size_and_one_rank_may_stand_alone(self, started):
        one = meshwise.measure("collectives", nproc=2, ranks=1, sizes=4096, dry_run=True)
        assert {case.op.ranks for case, _ in one} == {(1,)}

    def test_resume_continues_without_repeating(self, started):
        store.write("cluster.toml", known.CPUS)
        first = meshwise.measure()
        failed = started[0][1].cases[3]
        store.append(
            first, Sample(case_id=failed.id, case=failed, status="error", reason="a hiccup")
        )
        done = {case.id for case in started[0][1].cases[:3]}
        left = [case.id for case, _ in meshwise.measure(resume=True, dry_run=True)]
        assert left == [case.id for case in started[0][1].cases if case.id not in done]
        second = meshwise.measure(resume=True)
        assert second == first
        assert set(started[1][1].skip) == done  # and the failed case is tried again
        lines = Path(first, "samples.jsonl").read_text().splitlines()
        ids = [msgspec.json.decode(line)["case_id"] for line in lines]
        assert len(ids) == 7 and ids.count(failed.id) == 2 and len(set(ids)) == 6

    def test_resume_takes_the_newest_run_of_this_cluster_and_size(self, started):
        store.write("cluster.toml", known.CPUS)
        lacking = "no run of measure profile with these options on cluster 'two-cpus' with 2 ranks"
        with pytest.raises(ValueError, match=lacking):
            meshwise.measure(resume=True)
        mine = meshwise.measure()
        began = shlex.join(store.read(Path(mine, "run.json"), RunInfo).command)
        with pytest.raises(
            ValueError, match=re.escape(f"add --resume to the newest one's, {began}")
        ):
            meshwise.measure(resume=True, model=("gpt-125m",))
        meshwise.measure(nproc=1)
        for other in ("profile-other", "gemm-two-cpus"):
            run = known.info(run_id=f"99991231T000000-measure-{other}")
            if other == "gemm-two-cpus":
                run = msgspec.structs.replace(run, cluster=known.CPUS, world_size=2)
            known.write_run(Path("runs"), run, [])
        assert meshwise.measure(resume=True) == mine

    def test_resume_with_nothing_left_starts_nothing(self, started):
        store.write("cluster.toml", known.CPUS)
        run_dir = Path(known.synthetic_run(Path("runs")))
        assert meshwise.measure(resume=True) == run_dir
        assert not started

    def test_a_run_that_goes_on_is_not_resumed(self, monkeypatch):
        from meshwise import launch

        refusals = []

        def run(target, request, **_):
            with pytest.raises(ValueError) as refused:
                meshwise.measure(resume=True)
            refusals.append(str(refused.value))

        monkeypatch.setattr(launch, "run", run)
        store.write("cluster.toml", known.CPUS)
        run_dir = meshwise.measure()
        assert meshwise.measure(resume=True) == run_dir  # nobody holds it any more
        assert refusals == [f"another process measures into {run_dir}; wait for its end, or start "
                            "a new run without --resume"] * 2  # fmt: skip

    def test_an_unwritable_directory_is_an_error_before_measuring(self, started):
        store.write("cluster.toml", known.CPUS)
        Path("runs").write_text("a file in the way")
        with pytest.raises(ValueError, match="runs cannot be written"):
            meshwise.measure()
        assert not started

    @pytest.mark.parametrize(
        ("ends", "raised", "status"),
        [
            ("ranks", "RanksFailed", "failed"),
            ("ctrl-c", "KeyboardInterrupt", "interrupted"),
            ("terminated", "SystemExit", "interrupted"),
        ],
    )
    def test_how_it_ended_is_in_the_run(self, ends, raised, status, monkeypatch):
        from meshwise import launch

        errors = {
            "ranks": launch.RanksFailed("rank 1 died of SIGKILL during case copy 1 MiB"),
            "ctrl-c": KeyboardInterrupt(),
            "terminated": SystemExit(143),
        }

        def run(*_, **__):
            raise errors[ends]

        monkeypatch.setattr(launch, "run", run)
        store.write("cluster.toml", known.CPUS)
        with pytest.raises(BaseException) as error:
            meshwise.measure()
        assert type(error.value).__name__ == raised
        info = store.read(store.newest("runs", "measure") / "run.json", RunInfo)
        assert info.status == status
        if ends == "ctrl-c":
            assert "--resume continues" in str(error.value)

    def test_sigterm_ends_a_run_unless_an_error_is_about_to(self, monkeypatch):
        """As torchrun sends it to rank 0, whose collective may have failed by then."""
        from meshwise import launch

        def working(*_, **__):
            os.kill(os.getpid(), signal.SIGTERM)

        def failing(*_, **__):
            try:
                raise launch.RanksFailed("rank 1 is gone")
            except launch.RanksFailed:
                os.kill(os.getpid(), signal.SIGTERM)
                raise

        store.write("cluster.toml", known.CPUS)
        before = signal.getsignal(signal.SIGTERM)
        for run, raised in ((working, SystemExit), (failing, launch.RanksFailed)):
            monkeypatch.setattr(launch, "run", run)
            place = Job(world_size=known.CPUS.num_devices, launched=run is failing)
            monkeypatch.setattr(Job, "here", lambda place=place: place)
            with pytest.raises(raised):
                meshwise.measure()
        infos = [store.read(path / "run.json", RunInfo) for path in store.runs_of("runs")]
        ends = [(info.status, info.reason) for info in infos]
        assert ends == [("interrupted", "ended by SIGTERM"), ("failed", "rank 1 is gone")]
        assert signal.getsignal(signal.SIGTERM) == before

    @pytest.mark.parametrize(
        ("ends", "code", "said"),
        [
            ("ranks", 4, "error: rank 1 died of SIGKILL during case copy 1 MiB"),
            ("ctrl-c", 130, "interrupted; what was measured is in runs/"),
        ],
    )
    def test_what_the_command_line_makes_of_it(self, ends, code, said, monkeypatch, capsys):
        from meshwise import launch
        from meshwise.cli import app

        def run(*_, **__):
            if ends == "ranks":
                raise launch.RanksFailed("rank 1 died of SIGKILL during case copy 1 MiB")
            raise KeyboardInterrupt

        monkeypatch.setattr(launch, "run", run)
        store.write("cluster.toml", known.CPUS)
        with pytest.raises(SystemExit) as ended:
            app.main(["measure"])
        assert ended.value.code == code
        assert capsys.readouterr().err.strip().splitlines()[-1].startswith(said)

    def test_failed_cases_are_exit_code_4(self, monkeypatch, capsys):
        from meshwise import launch
        from meshwise.cli import app

        def run(target, request, **_):
            case = request.cases[0]
            sample = Sample(case_id=case.id, case=case, status="oom", reason="too large")
            store.append(request.run_dir, sample)
            store.finish(request.run_dir, "complete")

        monkeypatch.setattr(launch, "run", run)
        store.write("cluster.toml", known.CPUS)
        with pytest.raises(SystemExit) as ended:
            app.main(["measure", "--json"])
        assert ended.value.code == 4
        assert msgspec.json.decode(capsys.readouterr().out)["cases"] == {"oom": 1}


class TestMeasureOptions:
    """What each kind of measurement takes from its options, and what it refuses."""

    @pytest.fixture(autouse=True)
    def clusters(self, here):
        store.write("cluster.toml", known.CPUS)
        store.write("gpus.toml", known.CLUSTER)

    @pytest.mark.parametrize("cluster", ["cluster.toml", "gpus.toml"])
    @pytest.mark.parametrize("what", measuring.KINDS)
    def test_every_kind_has_cases_on_cpus_and_on_gpus(self, what, cluster):
        listed = meshwise.measure(what, cluster=cluster, dry_run=True)
        world_size = store.read(cluster, spec.Cluster).num_devices
        assert {case.world_size for case, _ in listed} == {world_size}
        assert all(0 < about_s < 3600 for _, about_s in listed)
        assert len({case.id for case, _ in listed}) == len(listed)
        gpus = cluster == "gpus.toml"
        products = [c.op for c, _ in listed if isinstance(c.op, spec.Gemm)]
        assert {op.dtype for op in products} <= {"bf16" if gpus else "fp32"}
        assert gpus or not {"cold", "graph"} & {case.regime for case, _ in listed}

    @pytest.mark.parametrize("what", ["gemm", "attention", "collectives", "fsdp", "overlap"])
    @pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v2-lite", "gpt-125m"])
    def test_every_operator_is_measured_of_models_of_either_family(self, what, model):
        assert meshwise.measure(what, model=model, dry_run=True)

    @pytest.mark.parametrize(
        ("what", "options", "message"),
        [
            ("everything", {}, "what = 'everything': must be one of profile, gemm, attention"),
            ("gemm", {"colour": 1}, "colour: measure gemm has no such option; it has model, conf"),
            ("health", {"model": "gpt-30m"}, "model: measure health has no such option; it has qu"),
            ("collectives", {"tiny": True}, "tiny: measure collectives has no such option"),
            ("gemm", {"dtype": "int8"}, "dtype = 'int8': must be one of fp64, fp32, tf32"),
            ("gemm", {"model": "llama-3-8"}, "did you mean llama-3-8b"),
            ("gemm", {"model": "no/config.json"}, "no/config.json"),
            ("gemm", {"timeout": "0s"}, "timeout = '0s': must be some time, as 60s"),
            ("gemm", {"budget": 0}, "budget = 0: must be some time"),
            ("gemm", {"sustain": "soon"}, "sustain = 'soon': is not understood"),
            ("collectives", {"ranks": "0,two"}, "ranks = '0,two': must be numbers, as 0,2"),
            (
                "collectives",
                {"ranks": "0,2"},
                r"ranks = \(0, 2\): must be different numbers from 0",
            ),
            ("collectives", {"splits": "none.json"}, "none.json does not exist"),
            ("collectives", {"plan": "none.json"}, "none.json does not exist; `meshwise plan` wri"),
            ("gemm", {"configs": "none.json"}, "none.json does not exist"),
            ("overlap", {"nproc": 1}, "overlap: 1 rank has no collective; use at least 2"),
            (
                "fsdp",
                {"model": "gpt-30m", "nproc": 1},
                r"model = \('gpt-30m',\).*: no case is left; ask for more$",
            ),
            (
                "collectives",
                {"kinds": "all_reduce", "sizes": "3", "dtype": "fp32"},
                r"^sizes = '3': less than one element of 4 bytes \(fp32\) leaves no case",
            ),
            (
                "collectives",
                {"pairs": True, "sizes": "3", "dtype": "fp32", "nproc": 2},
                r"^sizes = '3': less than one element of 4 bytes \(fp32\) leaves no case",
            ),
            (
                "collectives",
                {"kinds": "all_gather", "sizes": "4", "dtype": "fp32", "nproc": 2},
                r"^sizes = '4': less than .* \(fp32\) for each of 2 ranks leaves no case",
            ),
        ],
    )
    def test_what_it_refuses_before_any_rank_starts(self, started, what, options, message):
        with pytest.raises(ValueError, match=message) as refused:
            meshwise.measure(what, **options)
        assert "\n" not in str(refused.value) and not started and not Path("runs").exists()

    def test_a_hugging_face_config_is_a_model(self, started):
        meshwise.measure("gemm", model=str(LLAMA_1B), seq_len=16, gradients=False)
        shapes = {(c.op.m, c.op.n, c.op.k) for c in started[0][1].cases}
        # 32 heads of 64 and 8 key heads; 8192 wide; tied to 128256 words
        assert shapes == {
            (16, 3072, 2048), (16, 2048, 2048), (16, 16384, 2048), (16, 2048, 8192),
            (16, 128256, 2048),
        }  # fmt: skip

    def test_files_that_options_name_are_read(self):
        store.write("plan.json", known.plan())
        Path("splits.json").write_text("[[4, 8], [0, 4]]")
        Path("models.json").write_text((PRIMUS / "model_configs.json").read_text())
        (one,) = meshwise.measure("collectives", splits="splits.json", dry_run=True)
        assert (one[0].op.kind, one[0].op.splits) == ("all_to_all_v", ((4, 8), (0, 4)))
        four = {"cluster": "gpus.toml", "dry_run": True}
        of_plan = meshwise.measure("collectives", plan="plan.json", **four)
        assert {case.op.group_size for case, _ in of_plan} == {4}  # dp4 zero2
        with pytest.raises(ValueError, match="plan: it is for 4 ranks, not 2; use --nproc 4"):
            meshwise.measure("collectives", plan="plan.json")
        named = meshwise.measure("collectives", sizes="64", backends=("torch", "gloo"), **four)
        assert {case.backend for case, _ in named} == {"", "gloo"}  # what torch picks has no name
        ranks = meshwise.measure("collectives", ranks="1,3", **four)
        assert {case.op.ranks for case, _ in ranks} == {(1, 3)}
        products = meshwise.measure("gemm", configs="models.json", dry_run=True)
        rows = {case.op.m for case, _ in products if (case.op.n, case.op.k) == (12288, 4096)}
        assert rows == {4096 * size for size in range(1, 9)}  # Llama2_7B at Primus' batches

    def test_dtype_follow_sustain_and_timeout_reach_the_ranks(self, started, monkeypatch):
        from meshwise import launch

        waits, usual = [], launch.run
        monkeypatch.setattr(
            launch, "run", lambda *a, **b: (waits.append(b["patience"]), usual(*a, **b))
        )
        meshwise.measure("gemm", dtype="bf16", square=(64,), sustain="2s", timeout="1m")
        meshwise.measure("gemm", search=True)
        meshwise.measure("gemm", search=True, follow=False)
        meshwise.measure("collectives", sizes="64K", kinds=("all_reduce",))
        meshwise.measure("collectives", sizes="64K", follow=False)
        requests = [request for _, request, _ in started]
        assert [c.op.dtype for c in requests[0].cases] == ["bf16"]
        assert [r.follow for r in requests] == [
            "nothing", "best_shape", "nothing", "bends", "nothing",
        ]  # fmt: skip
        assert [r.sustain_s for r in requests] == [2, 10, 10, 10, 10]
        assert waits == [Patience(60.0), *[Patience()] * 4]

    def test_quick_is_a_budget_but_of_health_fewer_cases(self, started):
        meshwise.measure(quick=True)
        meshwise.measure(quick=True, budget="20s")
        meshwise.measure("health", quick=True)
        budgets = [request.budget_s for _, request, _ in started]
        assert budgets == [measuring.QUICK_S, 20, None] and measuring.QUICK_S < 80
        quick, whole = (
            {case for case, _ in meshwise.measure("health", cluster="gpus.toml", quick=q,
                                                  dry_run=True)}
            for q in (True, False)
        )  # fmt: skip
        assert quick < whole
        left_out = {(c.regime, getattr(c.op, "ranks", ())) for c in whole - quick}
        opposite = {("warm", pair) for pair in ((0, 2), (2, 0), (1, 3), (3, 1))}
        assert left_out == {("sustained", ()), *opposite}


class TestCalibrateAndPlan:
    @pytest.fixture(autouse=True)
    def prices(self, here):
        known.synthetic_run(Path("runs"))
        self.costs = meshwise.calibrate()

    def test_the_newest_run_is_taken_and_said(self, caplog):
        caplog.set_level("INFO", "meshwise")
        meshwise.calibrate()
        assert "using the newest run ./runs/20260101T000000-measure-profile-two-cpus" in caplog.text
        assert meshwise.calibrate(("runs/20260101T000000-measure-profile-two-cpus",)) == self.costs

    def test_a_profile_without_collectives_or_blocks_is_warned_of_in_one_line(self, caplog):
        (run_dir,) = Path("runs").iterdir()
        info, samples, _ = store.load(run_dir)
        for name, kinds, said in (
            ("a", (Collective, Block), ["no collective was measured", "no block was measured"]),
            ("b", (Block,), ["no block was measured"]),
            ("c", (Convolution,), []),
        ):
            kept = [one for one in samples if not isinstance(one.case.op, kinds)]
            part = msgspec.structs.replace(info, run_id=f"20260102T000000-measure-profile-{name}")
            caplog.clear()
            meshwise.calibrate(known.write_run(Path("runs"), part, kept), out=f"{name}.json")
            lines = [line for line in caplog.messages if "was measured: " in line]
            assert len(lines) == bool(said) and all(words in lines[0] for words in said)
            assert all("measure profile --resume" in line for line in lines)

    def test_plan_json_is_the_plan(self):
        plan = meshwise.plan()
        assert store.read("plan.json", spec.Plan) == plan
        assert plan.model.name == "gpt-30m" and plan.runs == self.costs.runs

    def test_a_model_record_and_a_workload(self):
        model = msgspec.structs.replace(meshwise.plan().model, name="mine", layers=2)
        plan = meshwise.plan(model, seq_len=64, global_batch_size=6, top=3)
        assert plan.model == model
        assert (plan.workload.seq_len, plan.workload.global_batch_size) == (64, 6)
        assert len(plan.runners_up) == 3 and plan.runners_up[2].layout.pp == 2

    def test_longer_than_a_gpts_table_the_table_grows(self, caplog):
        caplog.set_level("INFO", "meshwise")
        plan = meshwise.plan(seq_len=2048)
        assert (plan.model.max_seq_len, plan.workload.seq_len) == (2048, 2048)
        assert "table of positions of gpt-30m: for 2048 tokens here, 1024 as publ" in caplog.text

    def test_rotary_positions_go_on(self, caplog):
        caplog.set_level("INFO", "meshwise")
        layout = '{"dp": 2, "zero": 3, "microbatch_size": 2}'
        plan = meshwise.plan("llama-2-7b", seq_len=5000, global_batch_size=4, layout=layout)
        assert (plan.model.max_seq_len, plan.workload.seq_len) == (5000, 5000)
        assert "rotary positions of llama-2-7b: for 5000 tokens here, 4096 as publ" in caplog.text

    def test_a_layout_is_json_or_a_file(self):
        text = '{"dp": 2, "zero": 3, "num_microbatches": 4}'
        Path("layout.json").write_text(text)
        for layout in (text, "layout.json"):
            plan = meshwise.plan(layout=layout, global_batch_size=8, seq_len=64)
            assert plan.layout == spec.Layout(dp=2, zero=3, num_microbatches=4)
        with pytest.raises(ValueError, match=r"layout: .*unknown field `pq`"):
            meshwise.plan(layout='{"pq": 2}')


class TestRun:
    @pytest.fixture(autouse=True)
    def plan(self, here):
        known.synthetic_run(Path("runs"))
        meshwise.calibrate()
        self.plan = meshwise.plan()

    def test_rivals_are_plans_of_their_own(self, started):
        run_dirs = meshwise.run(rivals=2, steps=5, warmup=1, seed=7, check=True)
        requests = [request for _, request, _ in started]
        rivals = [candidate.layout for candidate in self.plan.runners_up[:2]]
        assert [r.plan.layout for r in requests] == [self.plan.layout, *rivals]
        asked = [request.asked for request in requests]
        assert {(a.steps, a.warmup, a.seed, a.check) for a in asked} == {(5, 1, 7, True)}
        for run_dir, request in zip(run_dirs, requests, strict=True):
            info = store.read(run_dir / "run.json", RunInfo)
            assert info.plan == request.plan and info.status == "complete"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"nproc": 1}, "nproc = 1: plan.json is for 2 ranks"),
            ({"rivals": 99}, "rivals = 99: the plan holds 10 runners-up"),
            ({"steps": 0}, "steps = 0: must be >= 1"),
        ],
    )
    def test_refused_before_any_process_starts(self, started, options, message):
        with pytest.raises(ValueError, match=message):
            meshwise.run(**options)
        assert not started

    def test_a_plan_for_gpus_on_a_machine_without(self, started):
        store.write("gpu.json", known.plan())
        with pytest.raises(ValueError, match="describes 'Accelerator X', but here is no GPU"):
            meshwise.run("gpu.json")
        assert not started and len(store.runs_of("runs", "run")) == 0

    def test_a_dry_run_starts_nothing(self, started):
        assert meshwise.run(rivals=1, dry_run=True)[0] == self.plan
        assert not started and len(store.runs_of("runs", "run")) == 0

    def test_the_report_takes_the_runs_of_this_plan(self, started):
        from meshwise.verbs.report import gather

        meshwise.run(rivals=1)
        other = known.plan()
        known.write_run(Path("runs"), known.info("run", other, "20270101-run-other"), [])
        contents = gather("runs", "costs.json", "plan.json")
        assert [r.plan.model.name for r in contents.results] == ["gpt-30m"] * 2
        assert {info.verb for info, _ in contents.runs} == {"measure", "run"}


def test_show_tells_files_apart_by_content():
    store.write("machine.toml", known.CPUS)
    store.write("a.json", known.COSTS)
    store.write("b.json", known.plan())
    run = known.write_run(Path("runs"), known.info(), known.SAMPLES)
    assert meshwise.show("machine.toml") == known.CPUS
    assert meshwise.show("a.json") == known.COSTS
    assert meshwise.show("b.json") == known.plan()
    for path in (run, f"{run}/run.json", f"{run}/samples.jsonl"):
        assert meshwise.show(path).samples == known.SAMPLES
    Path("c.json").write_text("{}")
    with pytest.raises(ValueError, match="no file that Meshwise writes; show reads"):
        meshwise.show("c.json")


def test_a_torn_line_is_said(caplog):
    run = known.write_run(Path("runs"), known.info(), known.SAMPLES[:1])
    with open(f"{run}/samples.jsonl", "a") as file:
        file.write('{"case_id": "abc", "ca')
    caplog.set_level("WARNING", "meshwise")
    assert len(meshwise.show(run).samples) == 1
    assert "samples.jsonl:2 is truncated" in caplog.text


def test_a_cluster_that_comes_along_is_named_instead_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = files.take("h100-hgx", Cluster)
    assert (known.device.name, known.num_devices) == ("NVIDIA H100 80GB HBM3", 8)
    with pytest.raises(ValueError, match="h100-hgy does not exist; `meshwise detect` writes it"):
        files.take("h100-hgy", Cluster)
    store.write(tmp_path / "h100-hgx", msgspec.structs.replace(known, name="mine"))
    assert files.take("h100-hgx", Cluster).name == "mine"  # a file of that name comes first


def test_what_stands_in_place_of_a_run_s_samples_is_neither_followed_nor_waited_for(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="cannot be written"), Recording(tmp_path, Job()).locked():
        pass
    assert not (tmp_path / "elsewhere").exists()
    path.unlink()
    os.mkfifo(path)
    with Recording(tmp_path, Job()).locked(), pytest.raises(ValueError, match="is a FIFO"):
        read_bytes(path)
