"""``run`` without a priced plan and ``run --suite``: what is built, what is refused before any
process starts, and how results without a prediction are shown."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import meshwise
from meshwise import store
from meshwise.cli.app import main
from meshwise.launcher import Job
from meshwise.models import catalogue, num_parameters, placement
from meshwise.options.run import RunOptions, Suite
from meshwise.pages import html, steps, table, tables
from meshwise.pages.html import Contents
from meshwise.pages.steps import result
from meshwise.spec import Cluster, Device, Layout, Recipe, Step, Tier, WideResNet, Workload
from meshwise.spec.phases import ADDENDS
from meshwise.verbs import apply as apply_verb
from meshwise.verbs import given
from meshwise.verbs import run as run_verb
from meshwise.verbs.suite import listed, run_suite, swept
from tests import sample_records as known
from tests.sample_records import IMAGES, LLAMA, MOE


def machine(num_devices, memory_bytes=2**30, kind="cpu"):
    return Cluster(
        name="here",
        num_hosts=1,
        num_devices_per_host=num_devices,
        device=Device(name="a device", kind=kind, memory_bytes=memory_bytes),
        tiers=(Tier(name="host", num_devices=num_devices),),
    )


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    store.write("cluster.toml", machine(4))


def call(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def planned(model, **options):
    return given.plan_of(RunOptions(model=model, **options))


class TestGivenPlans:
    def test_without_a_layout_the_batch_is_divided_over_all_devices(self):
        plan = planned(LLAMA)
        assert plan.layout == Layout(dp=4, zero=3, microbatch_size=2)
        assert plan.workload == Workload(global_batch_size=8, seq_len=64)  # no more positions
        assert (plan.dtype, plan.lowering, plan.prediction) == ("fp32", "eager", None)
        assert plan.recipe == Recipe()

    def test_a_layout_brings_its_batch(self):
        text = '{"tp": 2, "pp": 2, "schedule": "1f1b", "num_microbatches": 4}'
        plan = planned(LLAMA, layout=text, recipe='{"optimizer": "sgd"}', seq_len=32)
        assert plan.workload == Workload(global_batch_size=4, seq_len=32)
        assert len(plan.stages) == 2 and plan.recipe.optimizer == "sgd"
        Path("layout.json").write_text(text)
        assert planned(LLAMA, layout="layout.json").layout == plan.layout

    def test_gpus_compute_in_bf16_and_compile(self):
        store.write("cluster.toml", machine(4, kind="cuda"))
        plan = planned(LLAMA)
        assert (plan.dtype, plan.lowering) == ("bf16", "compiled")
        split = Layout(
            pp=4, schedule="interleaved_zero_bubble", stages_per_rank=2, num_microbatches=4
        )
        deep = msgspec.structs.replace(LLAMA, layers=8)
        assert planned(deep, layout=split).lowering == "eager"  # compiled code does not split

    def test_a_record_in_a_file_is_a_model(self, tmp_path):
        path = tmp_path / "images.json"
        path.write_bytes(msgspec.json.encode(IMAGES))
        assert planned(str(path)).model == IMAGES
        path.write_text('{"family": "wide_resnet", "colour": 8}')
        with pytest.raises(ValueError, match=r"images.json: .* unknown field `colour`"):
            planned(str(path))

    def test_images_are_sequences_of_length_1(self):
        assert planned(IMAGES).workload == Workload(global_batch_size=8, seq_len=1)

    @pytest.mark.parametrize(
        ("model", "options", "message"),
        [
            (LLAMA, {"layout": '{"tp": 3}'}, "Layout.tp = 3: must divide heads = 8"),
            (LLAMA, {"layout": '{"ep": 2, "dp": 2}'}, "Layout.ep = 2: the model has no experts"),
            (LLAMA, {"layout": '{"pp": 3, "schedule": "1f1b"}'}, "do not divide 4 layers"),
            (LLAMA, {"layout": '{"dp": 8}'}, "nproc = 8: cluster 'here' has 4 devices"),
            (LLAMA, {"layout": '{"dq": 8}'}, "unknown field `dq`"),
            (LLAMA, {"layout": "{dp: 8}"}, "is not JSON"),
            (LLAMA, {"layout": '{"dp": 2}', "global_batch_size": 5}, "make them equal"),
            (LLAMA, {"layout": '{"dp": 2}', "nproc": 4}, "the layout dp2 mb1x1 has 2 ranks"),
            (LLAMA, {"global_batch_size": 6}, "must be a multiple of the 4 devices"),
            (LLAMA, {"seq_len": 128}, "Workload.seq_len = 128: must be <= max_seq_len = 64"),
            (LLAMA, {"dtype": "fp8"}, "dtype = 'fp8': must be one of bf16, fp32"),
            (LLAMA, {"recipe": '{"optimizer": "lion"}'}, "optimizer = 'lion'"),
            (MOE, {"layout": '{"dp": 3, "ep": 3}'}, "experts.num_experts = 4"),
            (MOE, {"layout": '{"cp": 3}'}, "Layout.cp = 3: must divide seq_len"),
            (IMAGES, {"layout": '{"tp": 3}'}, "channels * width_factor = 8"),
            (IMAGES, {"layout": '{"cp": 2}'}, "images have no sequence to share"),
            (IMAGES, {"seq_len": 2}, "image models have no sequence"),
            ("moe-1.3", {}, "did you mean moe-1.3b?"),
        ],
    )
    def test_what_cannot_be_is_refused_by_name(self, model, options, message):
        with pytest.raises(ValueError) as refused:
            planned(model, **options)
        assert message in str(refused.value) and "\n" not in str(refused.value)

    def test_fewer_key_heads_than_ranks_are_repeated(self):
        work = Workload(global_batch_size=1, seq_len=64)
        for tp in (1, 2, 4, 8):
            placement.check(LLAMA, work, Layout(tp=tp))
        three = msgspec.structs.replace(LLAMA, heads=12, kv_heads=6, ffn=96)
        with pytest.raises(ValueError, match="must divide kv_heads = 6 or be a multiple"):
            placement.check(three, work, Layout(tp=4))

    def test_a_rank_without_a_share_of_the_vocabulary_is_refused(self):
        work = Workload(global_batch_size=1, seq_len=64)
        for vocab in (8, 10, 13):  # 4 ranks: 2 2 2 2, 3 3 3 1, 4 4 4 1
            placement.check(msgspec.structs.replace(LLAMA, vocab=vocab), work, Layout(tp=4))
        with pytest.raises(ValueError, match="tp = 4: some rank would have no share of vocab = 9"):
            placement.check(msgspec.structs.replace(LLAMA, vocab=9), work, Layout(tp=4))


def test_a_record_as_json_is_a_model():
    text = '{"family": "wide_resnet", "channels": 16, "image_size": 32}'
    assert catalogue.find_any(text) == WideResNet(channels=16, image_size=32)
    with pytest.raises(ValueError, match="model: family = None: must be one of gpt, decoder"):
        catalogue.find_any('{"channels": 16}')
    with pytest.raises(ValueError, match="is not JSON"):
        catalogue.find_any('{"channels": ')


def test_every_family_of_the_catalogue_has_its_size():
    """Parameters of Alpa's table, which leaves out biases, norms and positions: within 1 %."""
    billions = {"moe-380m": 0.3835, "moe-1.3b": 1.3468, "moe-140b": 139.15, "wresnet-1b": 1.00565}
    for name, size in billions.items():
        assert num_parameters(catalogue.find_any(name)) / 1e9 == pytest.approx(size, rel=0.01)
    with pytest.raises(ValueError, match="is an image model; name a language model"):
        catalogue.find("wresnet-1b")


class TestRun:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("run plan.json --model gpt-30m", "plan.json is a plan and has its model"),
            ("run --seq-len 8", "--seq-len = 8: a plan has its own; give it with --model"),
            ("run --model gpt-30m --save-every 2", "--save-every = 2: there is no folder"),
            ("run --model gpt-30m --mode infer --check", "--check: only training has it"),
            ("run --model gpt-30m --steps 0", "steps = 0: must be >= 1"),
            ("run --model gpt-30m --resume-from none", "checkpoint.json does not exist"),
            (
                'run --model gpt-30m --recipe {"fp32_precision":"tf32"}',
                "Recipe.fp32_precision = 'tf32': it is for GPUs",
            ),
            ("run --model wresnet-1b --data a.bin", "images are random numbers here"),
            ("run --model wresnet-1b --mode decode", "images have no next token"),
            ("run --model gpt-30m --mode decode --new-tokens 1", "--new-tokens = 1: must be >= 2"),
            ("run --suite gpt.perf_tes_auto", "did you mean gpt.perf_test_auto?"),
            ("run --suite unet.perf_test_auto", "UNet is not built"),
            ("run --suite gpt.grid_search_auto --space zero-4", "did you mean zero-3?"),
            ("run --suite gpt.grid_search_auto --costs lost.json", "lost.json does not exist"),
            ("run --suite moe_inference.profile --space uniform", "searches are for training"),
            ("run --suite gpt.perf_test_fast_2d", "has no case for 4 GPUs; it has cases for 1, 8"),
            ("run --suite gpt.perf_test_manual --niter 1", "niter = 1: must be >= 2"),
            ("run --suite gpt.perf_test_manual --shard-only", "run it without --shard-only"),
            ("run --suite gpt.perf_test_manual --exp-name a/b", "must be a file's name"),
            ("run --suite gpt.perf_test_manual --num-hosts 2", "give both"),
            (
                "run --suite gpt.perf_test_manual --num-hosts 2 --num-devices-per-host 2",
                "--num-hosts = 2: start this command on every host with torchrun or srun",
            ),
            ("run --suite gpt.perf_test_manual --gpus 8", "cluster 'here' has 4 devices"),
            (
                "run --suite gpt.perf_test_manual --profile-stage-execution-time",
                "it is for the suites of inference",
            ),
            ("run --suite gpt.tmp --sweep gpt", "leave out --suite"),
            ("run --suite gpt.tmp --model gpt-30m", "--suite has its own; leave out --model\n"),
            ("run --suite gpt.tmp --steps 2 --mode infer --save x", "--mode, --steps, --save\n"),
            ("run plan.json --suite gpt.tmp", "leave out the plan\n"),
            ("run --suite gpt.tmp --layout {}", "--suite has its own; leave out --layout\n"),
            (
                "run --sweep gpt --niter 2 --gpus 2",
                "--sweep has its own; leave out --niter, --gpus",
            ),
            ("run --suite gpt.grid_search_auto --space pp=3 --space tp=4 --dry-run", "is legal"),
            ("run --sweep moe_inference --niter 3 --dry-run", "leave out --niter\n"),
            (
                "run --model gpt-30m --niter 3",
                "--niter: only suites have it; give --suite or --sweep",
            ),
            ("run --scale-to-fit", "--scale-to-fit: only suites have it; give --suite"),
            ("run --case 0", "--case: only suites have it; give --suite, or leave it out"),
            (
                "run --model gpt-30m --in-flight 4",
                "--in-flight: only inference has it; leave it out",
            ),
            (
                "run --model gpt-30m --new-tokens 8",
                "--new-tokens: only decoding has it; leave it out",
            ),
            (
                "run --model gpt-30m --mode infer --new-tokens 8",
                "--new-tokens: only decoding has it",
            ),
            ("run --model gpt-30m --mode decode --steps 8", "steps: decoding counts tokens"),
            ("run --sweep gtp", "sweep = 'gtp': must be one of gpt, moe"),
        ],
    )
    def test_refused_in_one_line(self, arguments, message, capsys):
        pytest.importorskip("torch")
        assert call(*arguments.split()) == 2
        out, err = capsys.readouterr()
        assert out == "" and message in err.splitlines(keepends=True)[-1]
        assert "Traceback" not in err
        assert not Path("runs").exists() and not Path("default.tsv").exists()

    def test_a_dry_run_shows_the_plan(self, capsys):
        pytest.importorskip("torch")
        layout = '{"tp": 2, "microbatch_size": 4}'
        assert call("run", "--model", "llama-2-7b", "--layout", layout, "--dry-run") == 0
        out = capsys.readouterr().out
        assert "llama-2-7b on 2 devices of here: batch 4 x 128, fp32, eager" in out
        assert call("run", "--model", "llama-2-7b", "--layout", layout, "--dry-run", "--json") == 0
        (plan,) = json.loads(capsys.readouterr().out)
        assert plan["prediction"] is None and plan["layout"]["tp"] == 2

    def test_a_dry_run_says_what_a_step_is(self, capsys, golden):
        pytest.importorskip("torch")
        for model, layout in (
            (
                "gpt-1.3b",
                '{"pp": 4, "schedule": "1f1b", "microbatch_size": 2, "num_microbatches": 8}',
            ),
            (
                "gpt-30m",
                '{"pp": 2, "meshes": [[1, 1], [2, 1]], "layers": [2, 4], "schedule": "1f1b",'
                '"microbatch_size": 2, "num_microbatches": 4}',
            ),
            ("wresnet-250m", '{"dp": 2, "zero": 2}'),
        ):
            assert call("run", "--model", model, "--layout", layout, "--dry-run") == 0
        out = capsys.readouterr().out
        golden("dry_run.txt", out)
        assert max(map(len, out.splitlines())) <= 110 and not Path("runs").exists()


class TestSuites:
    def test_the_list_names_all_and_says_where_they_run(self, capsys):
        assert call("run", "--list-suites") == 0
        out = capsys.readouterr().out
        assert "gpt.perf_test_manual" in out and "1, 4, 8, 64" in out
        assert out.count("not built: UNet") == 2 and "gpt_inference_streaming" in out
        assert out.count("not built") == 2
        assert "gpt.tmp_auto" in out and "none" not in out
        assert call("run", "--list-suites", "--json") == 0
        first, *_ = json.loads(capsys.readouterr().out)["suites"]
        assert first == {"suite": "gpt.tmp", "devices": [1, 8], "lacks": ""}

    def test_a_dry_run_of_a_sweep_lists_its_cases_and_writes_nothing(self, capsys, monkeypatch):
        def run(*_):
            raise AssertionError("it ran")

        monkeypatch.setattr("meshwise.verbs.suite.run_suite", run)
        before = set(Path().iterdir())
        assert call("run", "--sweep", "gpt_inference", "--dry-run") == 0
        out = capsys.readouterr().out
        titles = [line for line in out.splitlines() if "nothing was run" in line]
        assert [title.split(";")[0] for title in titles] == [
            "60 cases on 4 devices",
            "40 cases on 2 devices",
            "20 cases on 1 device",
        ]
        assert "8 x 8 devices: num_hosts = 8" in out
        assert call("run", "--sweep", "gpt_inference", "--dry-run", "--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert [case["devices"] for case in document] == [4] * 60 + [2] * 40 + [1] * 20
        assert set(Path().iterdir()) == before

    def test_what_cannot_fit_is_marked(self):
        """4 CPU ranks share 4 GiB: 1.3B in fp32 needs 5.2 GB, and to train 16 bytes each."""
        found = listed("gpt_inference.profile", Suite())
        assert all("does not fit: " in note for *_, note in found)
        assert "4.9 GiB of its memory, and here are 4.0 GiB" in found[0][3]
        store.write("cluster.toml", machine(4, memory_bytes=2**31))
        found = listed("gpt_inference.profile", Suite())
        fits = {plan.model.name for *_, plan, note in found if not note}
        assert fits == {"gpt-1.3b"}
        ((*_, trained),) = listed("gpt.perf_test_manual", Suite())
        assert "19.6 GiB of its memory, and here are 8.0 GiB" in trained
        scaled = listed("gpt_inference.profile", Suite(scale_to_fit=True))
        assert not any("does not fit" in note for *_, note in scaled)

    def test_cpus_get_sizes_that_take_seconds(self):
        """Their memory of 80 GiB would hold what keeps them busy for minutes; a GPU's holds it."""
        changed = {}
        for kind in ("cpu", "cuda"):
            store.write("cluster.toml", machine(4, memory_bytes=80 * 2**30, kind=kind))
            ((*_, changed[kind]),) = listed("gpt.perf_test_auto", Suite(scale_to_fit=True))
        assert changed["cpu"].endswith("to 0.2 TFLOP an iteration of each device")
        assert changed["cuda"] == ""

    @pytest.mark.parametrize("name", ["gpt", "moe", "wresnet"])
    def test_cases_shrink_to_the_memory_of_a_device(self, name):
        store.write("cluster.toml", machine(4, memory_bytes=50_000_000))
        ((*_, plan, changes),) = listed(f"{name}.perf_test_auto", Suite(scale_to_fit=True))
        ((*_, whole, none),) = listed(f"{name}.perf_test_auto", Suite())
        assert "does not fit" in none and changes
        assert num_parameters(plan.model) < num_parameters(whole.model) / 10
        assert plan.layout.num_devices == 4 and plan.layout.pp == whole.layout.pp

    def test_a_pipeline_is_skipped_where_others_can_run(self):
        found = listed("gpt_inference.profile", Suite(shard_only=True))
        kept = [plan.layout.pp for *_, plan, _ in found if plan is not None]
        refused = [why for *_, plan, why in found if plan is None]
        assert set(kept) == {1} and all("run it without --shard-only" in why for why in refused)
        assert (len(kept), len(refused)) == (20, 40)

    def test_some_cases_of_a_suite(self):
        name = "gpt_inference.profile"
        everything = [(number, case) for number, case, *_ in listed(name, Suite())]
        assert [number for number, _ in everything] == list(range(60))
        some = listed(name, Suite(cases=(41, 3)))
        assert [(number, case) for number, case, *_ in some] == [everything[41], everything[3]]
        with pytest.raises(ValueError, match=f"case = 60: {name} has cases 0 to 59 for 4 devices"):
            run_suite(name, Suite(cases=(3, 60)))

    def test_a_table_of_another_kind_is_not_added_to(self):
        Path("mine.tsv").write_text("a\tb\n")
        with pytest.raises(ValueError, match=r"mine\.tsv has other columns"):
            run_suite("gpt.perf_test_manual", Suite(exp_name="mine"))

    @pytest.mark.parametrize("name", ["gpt", "moe"])
    def test_a_sweep_of_searches_has_a_plan_for_each_case(self, name, caplog):
        lines = []
        found = swept(name, Suite(scale_to_fit=True), lines.append, listed)
        assert [*found] == [4, 2] and len(lines) == 6  # of the eight shapes
        for size, cases in found.items():
            assert all(plan.layout.num_devices == size for *_, plan, _ in cases)
            assert all(plan.prediction is None for *_, plan, _ in cases)  # priced as V100s
        assert "layouts are searched by the data sheet of p3.16xlarge" in caplog.text

    def test_local_ranks_are_not_those_of_a_launcher(self, monkeypatch):
        monkeypatch.setattr(Job, "here", lambda: Job(launched=True))
        with pytest.raises(ValueError, match="local: starts the ranks on this host alone"):
            run_suite("gpt.perf_test_manual", Suite(local=True))


def ran_once(model, layout, mode="train", **metrics):
    """The result of a run whose numbers are known."""
    workload = Workload(global_batch_size=8, seq_len=1 if model is IMAGES else 64)
    device = msgspec.structs.replace(machine(4).device, kind="cuda", peak_flops={"bf16": 1e14})
    plan = given.build(
        model,
        workload,
        layout,
        msgspec.structs.replace(machine(4), device=device),
        dtype="bf16",
        lowering="compiled",
        recipe=Recipe(),
    )
    op = Step(model=model, workload=workload, layout=layout, mode=mode)
    times_s = [0.010, 0.011, 0.012]
    sample = known.sample(op, times_s, peak_bytes=float(2**30), **metrics)
    return result(known.info("run", plan, f"run-{mode}-{model.name}"), [sample])


SHARDED = Layout(dp=4, zero=3, microbatch_size=2)
PIPED = Layout(pp=2, tp=2, schedule="gpipe", microbatch_size=4, num_microbatches=2)
STAGES = {
    "streamed_s": 0.004,
    "tokens_per_s": 128_000.0,
    "stage_s": (0.004, 0.005),
    "stage_weight_bytes": (1e9, 2e9),
    "stage_peak_bytes": (2e9, 3e9),
}
TOKENS = {
    "time_to_first_token_s": 0.03,
    "tokens_per_s": 727.0,
    "weight_bytes": 1e9,
    "cache_bytes": 2e8,
}
PHASES = {
    "forward_s": 0.003,
    "backward_s": 0.005,
    "optimizer_s": 0.001,
    "exposed_communication_s": 0.001,
    "bubble_s": 0.0,
    "other_s": 0.0005,
    "phases_step_s": 0.0105,
}
PHASES |= {f"largest_{name}": 1.1 * PHASES[name] for name in ADDENDS}


def all_results():
    return [
        ran_once(LLAMA, SHARDED, **PHASES, losses=(4.87, 4.5, 4.25)),
        ran_once(LLAMA, PIPED, "infer", **STAGES),
        ran_once(LLAMA, PIPED, "decode", **TOKENS),
    ]


def test_what_was_measured_is_shown_alone(golden):
    stream = io.StringIO()
    table.write([*steps.tables(all_results()), *steps.tables([ran_once(IMAGES, SHARDED)])], stream)
    golden("unpriced.txt", stream.getvalue())
    assert "predicted" not in stream.getvalue()


def test_runs_of_different_models_are_in_tables_of_their_own():
    shown = steps.tables(
        [ran_once(LLAMA, SHARDED), ran_once(IMAGES, SHARDED), ran_once(LLAMA, PIPED)]
    )
    times = [one for one in shown if one.title.startswith("Step time")]
    assert [len(one.rows) for one in times] == [2, 1]
    for one, model in zip(times, (LLAMA, IMAGES), strict=True):
        assert f"measured: {model.name} on" in one.title


def test_a_report_of_a_map_says_which_layers_are_cut_how():
    cut = [(f"l.{i}.up", "8 x 4", "col" if i % 2 else "row") for i in range(4)]
    mapped, left = apply_verb._alike(
        [*cut, ("l.0.down", "4", "row"), ("l.1.down", "4", "row")], [("l.4.up", "8 x 4", "why")]
    )
    assert [name for name, *_ in mapped] == ["l.*.up, * = 0, 2", "l.*.up, * = 1, 3", "l.*.down (2)"]
    assert left == (("l.*.up, * = 4", "8 x 4", "why"),)


def test_streamed_batches_that_are_slower_are_marked_and_explained():
    slow = ran_once(LLAMA, PIPED, "infer", **(STAGES | {"streamed_s": 0.0115}))
    forward, *_ = steps.tables([ran_once(LLAMA, PIPED, "infer", **STAGES), slow])
    assert [row[-2] for row in forward.rows] == ["4.00 ms", "11.5 ms *"]
    assert "slower than one by one" in " ".join(forward.legend)


def test_a_loop_timed_alone_is_not_called_one_by_one():
    looped = ran_once(LLAMA, PIPED, "infer", **(STAGES | {"streamed_s": 0.011}))
    *_, speed = steps.tables([looped])
    assert speed.columns[1] == "tokens/s, streamed"


def test_rates_are_of_what_one_time_is_of():
    trained, inferred, decoded = all_results()
    assert inferred.flops_per_device_per_s == pytest.approx(trained.flops_per_device_per_s / 3)
    assert trained.tokens_per_s == pytest.approx(8 * 64 / 0.011)
    assert decoded.tokens_per_s == pytest.approx(8 / 0.011)
    assert ran_once(IMAGES, SHARDED).tokens_per_s == pytest.approx(8 / 0.011)
    assert trained.time.predicted is None and trained.memory.measured == 2**30


def test_pages_cope_with_a_plan_without_prices():
    (done, *_) = all_results()
    plan = done.plan
    (only,) = tables.plan(plan)
    assert "given, not priced" in " ".join(only.legend)
    text = html.page(Contents(plan, None, (done,), ()))
    assert "given, not priced" in text and plan.layout.name in text
    assert "predicted" not in text.lower()


@pytest.mark.parametrize("number", range(3), ids=["train", "infer", "decode"])
def test_a_page_of_a_run_alone_shows_the_plan_that_ran_and_speaks_of_no_prediction(number):
    done = all_results()[number]
    text = html.page(Contents(None, None, (done,), ()))
    for wrong in ("predicted", "no plan", "no prices", "6 per parameter" if number else "2 per p"):
        assert wrong not in text.lower(), wrong
    assert "The plan that ran" in text and "8 sequences of 64 tokens in a batch" in text
    assert ("optimizer adamw" in text) == (number == 0)
    last = len(done.plan.stages) - 1
    assert f"stage {last}" in text and f"stage {last + 1}" not in text


def test_a_plan_file_without_prices_runs_and_shows(capsys):
    pytest.importorskip("torch")
    store.write("plan.json", planned(MOE, layout='{"dp": 2, "ep": 2}'))
    assert meshwise.run(dry_run=True)[0].prediction is None
    assert call("show", "plan.json") == 0
    assert "dp2 ep2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("done", "then"),
    [(0, (3, 5)), (2, (3, 3)), (4, (3, 1)), (5, (2, 1)), (6, (1, 1)), (7, (1, 1)), (8, (1, 1))],
)
def test_a_training_goes_on_to_the_step_that_was_asked_for(done, then, tmp_path, monkeypatch):
    """Steps of warm-up, one, and those that are timed: 3 + 1 + 5 end at step 9."""
    (tmp_path / "checkpoint.json").write_text("{}")
    found = SimpleNamespace(step=done)
    monkeypatch.setattr("meshwise.engine.checkpoint.checked", lambda *_: found)
    asked = RunOptions(model=known.MODEL, save=tmp_path, resume=True, warmup=3, steps=5)
    plan = SimpleNamespace(cluster=machine(2))
    on = run_verb._going_on(asked, plan)
    assert (on.warmup, on.steps) == then and on.resume_from == str(tmp_path) and not on.resume
    found.step = 9
    assert run_verb._going_on(asked, plan) is None
