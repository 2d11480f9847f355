"""The command line: light help, one-line errors, exit codes, JSON, silence of other ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import meshwise
from meshwise import store, units
from meshwise.cli import app, output
from meshwise.models import catalogue
from meshwise.options import models
from meshwise.spec import RunInfo
from tests import sample_records as known

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "scipy", "matplotlib", "jinja2", "numpy"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def call(*arguments: str) -> int:
    """The exit code of ``meshwise ARGUMENTS``."""
    with pytest.raises(SystemExit) as ended:
        app.main(list(arguments))
    return ended.value.code


def files() -> None:
    """Every file of a finished session, made by hand."""
    store.write("cluster.toml", known.CLUSTER)
    store.write("costs.json", known.COSTS)
    store.write("plan.json", known.plan())
    known.write_run(Path("runs"), known.info(), known.SAMPLES)
    plan = known.plan()
    run = known.info("run", plan, "20260101T000100-run-gpt-small")
    known.write_run(Path("runs"), run, [known.step_sample(plan, [0.01] * 5, peak_bytes=4e9)])


def test_help_imports_nothing_heavy():
    code = """
import contextlib, io, sys
from meshwise.cli.app import main
for arguments in [["--help"], []] + [[verb, "--help"] for verb in sys.argv[1:]]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        main(arguments)
    assert "Usage" in out.getvalue(), arguments
print(*sorted(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *meshwise.VERBS], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not {name.split(".")[0] for name in done.stdout.split()} & HEAVY


def test_help_lists_the_verbs_in_the_order_of_the_flow(capsys):
    assert call("--help") == 0
    text = capsys.readouterr().out
    places = [re.search(rf"│ {verb} ", text) for verb in meshwise.VERBS]
    assert all(places)
    assert [p.start() for p in places] == sorted(p.start() for p in places)


@pytest.mark.parametrize("verb", meshwise.VERBS)
def test_every_verb_can_print_json(verb, capsys):
    assert call(verb, "--help") == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("commas", "repeated"),
    [
        ("gemm --square 128,256 --dtypes=fp32,bf16",
         "gemm --square 128 --square 256 --dtypes fp32 --dtypes bf16"),
        ("gemm --shape 64:256:64,32,128 --shape 8,8,8",
         "gemm --shape 64,32,128 --shape 128,32,128 --shape 192,32,128 --shape 8,8,8"),
        ("gemm --model gpt-30m,gpt-125m --microbatch_size 1,2",
         "gemm --model gpt-30m --model gpt-125m --microbatch-size 1 --microbatch-size 2"),
        ("attention --seq_len 64,128 --backend flash,math",
         "attention --seq-len 64 --seq-len 128 --backend flash --backend math"),
        ("collectives all_reduce,all_gather --mode warm,blocking",
         "collectives all_reduce all_gather --mode warm --mode blocking"),
        ("overlap --kind all_reduce,all_gather", "overlap --kind all_reduce --kind all_gather"),
    ],
)  # fmt: skip
def test_every_list_takes_commas(commas, repeated, capsys):
    store.write("cluster.toml", known.CLUSTER)
    found = []
    for arguments in (commas, repeated):
        assert call("measure", *arguments.split(), "--dry-run", "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


def test_costs_as_json_say_how_far_the_data_sheet_is_off(capsys):
    run = known.write_run(Path("runs"), known.info(), known.SAMPLES)
    assert call("calibrate", str(run), "--json") == 0
    found, kept = json.loads(capsys.readouterr().out), json.loads(Path("costs.json").read_text())
    off = found.pop("datasheet")
    assert found == kept
    assert len(off) == len(kept["curves"]) + len(kept["surfaces"]) > 1
    assert {"price", "num_points", "median", "worst"} == set(off[0])


def test_a_file_whose_name_has_a_comma_is_one_file(capsys):
    Path("a,b.log").write_text("nothing\n")
    assert call("measure", "import", "a,b.log") == 2
    assert "a,b.log" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plann", "Did you mean \"plan\"?"),
        ("plan --gpu 4", "Did you mean --gpus?"),
        ("plan --gpus four", "--gpus"),
        ("plan gpt-125", "did you mean gpt-125m?"),
        ("plan --gpus 0", "--gpus = 0: must be >= 1"),
        ("plan --top 0", "error: --top = 0: must be >= 1"),
        ("plan", "costs.json does not exist; `meshwise calibrate` writes it"),
        ("calibrate", "no measure profile run under runs; run `meshwise measure profile` first"),
        ("measure profile --nproc 2 --gpus 4", "--nproc = 2, --gpus = 4: these set the same"),
        ("measure --nproc 1.5", "--nproc = '1.5': must be a whole number"),
        ("run --nproc 1.5", "--nproc = '1.5': must be a whole number"),
        ("run --steps 2.5", "--steps = '2.5': must be a whole number"),
        ("measure --cluster h100-hgx --nproc=9 --dry-run", "error: --nproc = 9: cluster"),
        ("measure --cluster h100-hgx --gpus 9 --dry-run", "error: --gpus = 9: cluster"),
        ("measure attention --full --window 7", "error: --window = (7,): "),
        ("measure gemm --microbatch_size 0", "error: --microbatch-size = 0: must be >= 1"),
        ("refit --num-benchmark-warmup -1", "error: --num-benchmark-warmup = -1: must be >= 0"),
        ("refit --tensor-model-parallel-size 2 --rl-inference-tensor-model-parallel-size 0",
         "error: --rl-inference-tensor-model-parallel-size = 0: must be >= 1"),
        ("measure ring --seq_lengths 0", "error: --seq-lengths = (0,): "),
        ("show pattern --seq-len 0", "error: --seq-len = 0: must be >= 1"),
        ("refit --list --refit-mode all", "--refit-mode: --list lists all there is; leave one"),
        ("run --list-suites --steps 3", "--steps: --list-suites lists all there is"),
        ("measure ring --verify --dry-run", "--dry-run and --verify: give one of them"),
        ("measure everything", "everything: not understood here; --help lists what is"),
        ("measure gemm --colour red", "--colour"),
        ("measure gemm --iterations 0", "error: --iterations = 0: must be >= 1"),
        ("measure gemm --iterations 3 --mode sustained --dry-run", "error: --iterations: a sust"),
        ("measure fsdp --iterations 3", "--iterations"),
        ("measure gemm --shape 64,32", "error: --shape = '64,32': must be M,N,K"),
        ("measure gemm --model llama-3-8", "did you mean llama-3-8b?"),
        ("measure gemm --mode hot", "--mode"),
        ("measure gemm --dtype int8", "--dtype"),
        ("measure gemm --model-config-path none.json", "none.json does not exist"),
        ("measure attention --shapes-json-path none.json", "none.json does not exist"),
        ("measure attention --backend fash", "error: --backend = fash: must be of flash"),
        ("measure collectives --sizes 8..4", "error: --sizes = '8..4': a range is LOW..HIGH"),
        ("measure collectives alltoal --nproc 1", "'alltoal': is no collective; did you mean all_"),
        ("measure collectives --timeout 0s", "error: --timeout = '0s': must be some time"),
        ("measure collectives --nproc 1 --groups 2", "groups = 2: must divide the 1 ranks"),
        ("measure collectives --nproc 1 --stride 2", "error: --stride = 2: must divide groups = 1"),
        ("measure fsdp --nproc 1 --replicas 2", "replicas = 2: must divide the 1 ranks"),
        ("measure overlap --nproc 1", "overlap: 1 rank has no collective"),
        ("measure import", "no file to import; name one or more"),
        ("measure import none.log", "none.log does not exist"),
        ("measure --num-hosts 2", "give both"),
        ("measure --cluster other.toml", "other.toml does not exist; `meshwise detect` writes"),
        ("measure --budget soon", "error: --budget = 'soon': is not understood"),
        ("run", "plan.json does not exist; `meshwise plan` writes it"),
        ("refit", "nothing to refit: give --scenario"),
        ("compare a b", "a is not a run directory"),
        ("compare a b c", "compare takes two sides, but 3 are given"),
        ("report", "nothing to report"),
        ("show nothing.json", "nothing.json does not exist; show reads cluster.toml"),
        ("show run.json", "run.json does not exist; show reads cluster.toml"),
        ("show none/samples.jsonl", "none/samples.jsonl does not exist; show reads"),
        ("detect --peak bf16", "write dtype=FLOP/s, as in bf16=990e12"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert call(*arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in err and err.count("error:") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        "show cluster.toml",
        "show costs.json",
        "show plan.json",
        "show runs/20260101T000000-measure-profile-four",
        "show runs/20260101T000100-run-gpt-small/run.json",
        "report",
        "run --dry-run",
        "measure --dry-run",
        "measure gemm --model deepseek-v3 --dtypes bf16 --dtypes fp8 --dry-run",
        "measure attention --window 64 --dry-run",
        "measure collectives --pairs --dry-run",
        "measure fsdp --model llama-3-70b --replicas 2 --dry-run",
        "measure overlap --sizes 1M --dry-run",
        "measure health --quick --dry-run",
        "compare runs/20260101T000100-run-gpt-small runs/20260101T000100-run-gpt-small",
    ],
)
def test_tables_or_one_json_document(arguments, capsys):
    files()
    assert call(*arguments.split()) == 0
    assert capsys.readouterr().out.strip()
    assert call(*arguments.split(), "--json") == 0
    json.loads(capsys.readouterr().out)


def test_a_dry_run_lists_what_would_be_measured(capsys):
    files()
    assert (
        call(
            *["measure", "collectives", "all_reduce", "--sizes", "8..64:x2", "--dry-run", "--json"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [one["case"]["op"]["size_bytes"] for one in found] == [8, 16, 32, 64]
    assert all(one["about_s"] > 0 and len(one["id"]) == 12 for one in found)
    assert call(*["measure", "gemm", "--model", "gpt-30m", "--gpus", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "gemm 1024x1152x384 bf16" in out and "nothing was measured" in out
    assert [path.name for path in Path("runs").iterdir()] == [
        "20260101T000000-measure-profile-four", "20260101T000100-run-gpt-small",
    ]  # fmt: skip


def test_a_dry_run_lists_what_the_budget_leaves(capsys):
    files()
    asked = ["measure", "profile", "--dry-run", "--json"]
    assert call(*asked) == 0
    every = json.loads(capsys.readouterr().out)
    assert call(*asked, "--budget", "20s") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert 1 < len(found) < len(every) and sum(one["about_s"] for one in found) <= 20
    assert found[0] == every[0] and all(one in every for one in found)
    assert {"copies", "layers", "heads", "products of the model"} < {one["use"] for one in every}
    assert f"the budget is likely to leave out {len(every) - len(found)} of {len(every)}" in err
    assert call(*asked, "--quick") == 0
    quick = json.loads(capsys.readouterr().out)
    assert 20 < sum(one["about_s"] for one in quick) <= 65 and len(quick) < len(every)


def test_an_imported_log_is_a_run_that_show_prints(capsys):
    log = Path(__file__).parents[1] / "data" / "nccl_tests_h200x4" / "nccl_tests_all_reduce.txt"
    table = Path(__file__).parents[1] / "data" / "primus" / "model_configs.json"
    assert call("measure", "import", str(log), "--json") == 0
    (run_dir,) = json.loads(capsys.readouterr().out)
    info, samples, _ = store.load(run_dir)
    assert info.status == "complete" and info.verb == "measure" and info.world_size == 4
    kinds = {(s.case.op.kind, s.case.op.dtype, s.case.op.group_size) for s in samples}
    assert kinds == {("all_reduce", "fp32", 4)} and len(samples) == 24  # 12 rows, both places
    assert info.provenance["imported"]["tool"] == "nccl-tests 2.19.6"
    assert call("show", run_dir) == 0
    out = capsys.readouterr().out
    assert "nccl_tests_all_reduce.txt of nccl-tests" in out and "busbw" in out
    assert call("measure", "import", str(log), str(table)) == 2  # the log is stored again
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and "model_configs.json" in last
    assert "1 of 2 files refused, the other 1 are stored" in last
    assert len(list(Path("runs").iterdir())) == 2


def test_json_of_a_file_is_the_record_on_disk(capsys):
    files()
    assert call("show", "plan.json", "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("plan.json").read_text())


def test_defaults_are_announced(capsys):
    files()
    assert call("report") == 0
    out, err = capsys.readouterr()
    assert "using ./costs.json" in err and "using ./plan.json" in err
    assert "predicted beside measured" in out
    assert out.strip().splitlines()[-1] == "report.html"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show costs.json --node layers.0.up", "--node needs a plan.json"),
        ("show runs/20260101T000100-run-gpt-small --node up", "--node needs a plan.json"),
        ("show plan.json --node layers.0.upp", "did you mean layers.0.up?"),
        ("show plan.json --node nothing", "for example layers.0"),
    ],
)
def test_a_node_that_cannot_be_followed(arguments, message, capsys):
    files()
    assert call(*arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


def test_rivals_can_be_compared_on_one_cluster(capsys):
    runs = []
    for plan in (known.plan(), known.plan(known.RIVAL)):
        info = known.info("run", plan, f"run-{plan.layout.name}")
        runs.append(known.write_run(Path("runs"), info, [known.step_sample(plan, [0.01] * 6)]))
    assert call("compare", *runs) == 0
    out = capsys.readouterr().out
    assert known.LAYOUT.name in out and known.RIVAL.name in out
    run_json = Path(runs[1], "run.json")
    info = store.read(run_json, RunInfo)
    cluster = msgspec.structs.replace(info.cluster, name="another")
    store.write(run_json, msgspec.structs.replace(info, cluster=cluster))
    assert call("compare", *runs) == 2
    assert "share no case" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["measure", "measure gemm", "measure ring", "refit", "run"])
def test_all_verbs_that_start_ranks_say_how_long_they_wait(verb, capsys):
    assert call(*verb.split(), "--help") == 0
    told = capsys.readouterr().out
    assert "--timeout" in told and "--setup-timeout" in told


def test_help_names_the_models_of_the_catalogue(capsys):
    assert catalogue.names() == models.MODELS
    assert catalogue.decoder_names() == models.DECODERS
    for verb in ("plan", "measure"):
        assert call(verb, "--help") == 0
        assert "gpt-2.6b" in capsys.readouterr().out


def test_only_rank_0_prints(monkeypatch, capsys):
    files()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert call("show", "plan.json") == 0
    assert capsys.readouterr().out == ""


def test_python_dash_m_and_version():
    done = subprocess.run(
        [sys.executable, "-m", "meshwise", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*|a checkout .*", done.stdout.strip())


def test_no_color_and_width(capsys, monkeypatch):
    files()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    assert call("show", "plan.json") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "dp2 tp2+sp zero3 mb4x1   12.0 ms" in out  # not folded into 40 columns


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("measure gem", "gem: not understood here (did you mean gemm?); --help lists what is"),
        ("plan --top x", "--top = 'x': must be a whole number"),
        ("run --steps 1.5", "--steps = '1.5': must be a whole number"),
        ("plan --costs plan.json", "plan.json: holds a plan, not costs; name another file"),
    ],
)
def test_what_was_typed_wrongly_is_said_in_words_and_as_json(typed, said, capsys):
    store.write("plan.json", known.plan())
    assert call(*typed.split()) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {said}"
    assert call(*typed.split(), "--json") == 2
    assert json.loads(capsys.readouterr().out) == {"error": said, "exit_code": 2}


def test_lengths_beyond_the_workload_name_their_own_option(capsys):
    Path("lens.txt").write_text("512 5000")
    asked = "plan gpt-125m --cluster h100-hgx --seq-lens lens.txt --seq-len 4096"
    assert call(*asked.split()) == 2
    said = "error: --seq-lens: lens.txt has 5000, beyond --seq-len 4096"
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_units_and_ranges_as_people_type_them(capsys):
    assert call(*["measure", "collectives", "all_reduce", "--sizes", "4K-16K", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert all(size in out for size in ("4.0 KiB", "8.0 KiB", "16.0 KiB"))
    assert [units.parse_seconds(text) for text in ("1 minute", "2 hours", "90 secs")] == [
        60.0, 7200.0, 90.0,
    ]  # fmt: skip


def test_help_shows_no_empty_default(capsys):
    for verb in ("plan", "refit", "run", "detect"):
        assert call(verb, "--help") == 0
        out = capsys.readouterr().out
        assert "default: ()" not in out and "default: False" not in out


def test_no_edit_by_hand_is_lost(capsys):
    store.write("cluster.toml", known.CLUSTER)
    edits = [Path("cluster.toml").read_text(), "# not yet TOML =\n[", "name = 'mine'\n"]
    for edit in (*edits, edits[1]):  # the last one is kept already
        Path("cluster.toml").write_text(edit)
        assert call("detect", "--nproc", "2") == 0
    kept = [Path(f"cluster.toml.bak{number}").read_text() for number in ("", 1, 2)]
    assert kept == edits and not Path("cluster.toml.bak3").exists()
    capsys.readouterr()
    commented = "# bought in May\n" + Path("cluster.toml").read_text()
    Path("cluster.toml").write_text(commented)
    assert call("detect", "--nproc", "2") == 0  # the same machine: the file stays as it is
    assert Path("cluster.toml").read_text() == commented
    assert "cluster.toml needs no change" in capsys.readouterr().err
    assert not Path("cluster.toml.bak3").exists()


def test_the_docs_have_every_exit_code():
    table = (ROOT / "docs" / "formats.md").read_text().partition("## Exit codes")[2]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    named = {int(code) for row in rows[2:] for code in row.split(",") if code.strip().isdigit()}
    codes = {output.DONE, output.BAD_INPUT, output.GATE_FAILED, output.SOME_FAILED}
    assert named >= codes | {output.INTERRUPTED, 143, 129}
