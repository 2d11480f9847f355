"""Which option goes with which launcher; the others refuse it by name, and so does no launcher."""

import re
import sys

import pytest

from meshwise import store
from meshwise.cli import app
from meshwise.options.allocation import Allocation
from meshwise.spec import Layout, Model, Workload
from tests.dist.conftest import _plan

GIVEN = {
    "run_id": "mine",
    "container_image": "torch:2",
    "container_mounts": ("/a:/b",),
    "container_engine": "apptainer",
    "partition": "h100",
    "account": "me",
    "constraint": "nvl",
    "time": "2h",
    "sbatch": ("--qos=high",),
    "array": "seq-len=1,2",
    "wait": True,
    "address": "auto",
    "strategy": "spread",
    "namespace": "team",
    "nodes": 2,
    "gpus_per_node": 8,
    "nproc_per_node": 8,
    "python": "/bin/python3",
}
EVERYWHERE = {"nodes", "gpus_per_node", "nproc_per_node", "python"}
TAKEN = {  # as docs/clusters.md has it
    "slurm": EVERYWHERE | {
        "run_id", "container_image", "container_mounts", "container_engine", "partition", "account",
        "constraint", "time", "sbatch", "array", "wait",
    },
    "ray": EVERYWHERE | {"array", "wait", "address", "strategy"},
    "kubernetes": EVERYWHERE | {
        "run_id", "container_image", "container_mounts", "time", "namespace",
    },
}  # fmt: skip


@pytest.mark.parametrize("launcher", TAKEN)
def test_a_launcher_takes_its_own_options_and_refuses_others(launcher):
    assert {"launcher", *GIVEN} == {*Allocation.__dataclass_fields__}
    for name, value in GIVEN.items():
        if name in TAKEN[launcher]:
            Allocation(launcher=launcher, **{name: value})
            continue
        owners = " or ".join(each for each in TAKEN if name in TAKEN[each])
        with pytest.raises(ValueError) as refused:
            Allocation(launcher=launcher, **{name: value})
        assert str(refused.value) == (
            f"{name} = {value!r}: belongs to --launcher {owners}; give that, or leave it out"
        )


@pytest.mark.parametrize(
    ("text", "limit_s"),
    [("30m", 1800), ("2h", 7200), ("3m", 180), ("200.4s", 200), ("1.1h", 3960), ("00:03:00", 180),
     ("12:30:00", 45_000), ("1-00:00:00", 86_400), ("7-01:02:03", 608_523)],
)  # fmt: skip
def test_a_time_limit_is_ours_or_slurms(text, limit_s):
    assert Allocation(time=text).limit_s == limit_s
    assert Allocation(time=text, launcher="kubernetes").limit_s == limit_s


@pytest.mark.parametrize("time", ["30", "1.5", 30])
def test_a_time_limit_without_unit_is_refused(time):
    """It is minutes to who knows Slurm."""
    for launcher in ("slurm", "kubernetes"):
        with pytest.raises(ValueError) as refused:
            Allocation(launcher=launcher, time=time)
        assert str(refused.value) == f"time = {time!r}: has no unit; write {time}m or {time}s"


def test_a_time_limit_leaves_room_for_slurms_notice():
    for text in ("30s", "179s", "00:02:59"):
        with pytest.raises(ValueError, match=f"^time = '{text}': must be at least 3m, as Slurm"):
            Allocation(time=text)
    assert Allocation(launcher="kubernetes", time="30s").limit_s == 30
    assert Allocation(launcher="kubernetes", time="1ms").limit_s == 1  # 0 would end it at once
    for text in ("30:00", "1-00", "soon", "-3m", "0s"):
        for launcher in ("slurm", "kubernetes"):
            with pytest.raises(ValueError, match=f"^time = '{text}'"):
                Allocation(launcher=launcher, time=text)


def _said(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        app.main([*words])
    assert end.value.code == 2
    return str(capsys.readouterr().err)


def test_the_command_line_names_option_value_and_launcher(capsys):
    assert _said(capsys, "measure", "--launcher", "slurm", "--address", "auto") == (
        "error: --address = 'auto': belongs to --launcher ray; give that, or leave it out\n"
    )
    assert _said(capsys, "measure", "--launcher=kubernetes", "--wait", "--dry-run") == (
        "error: --wait = True: belongs to --launcher slurm or ray; give that, or leave it out\n"
    )
    assert _said(capsys, "measure", "--launcher=slurm", "--partition=", "--dry-run") == (
        "error: --partition = '': is empty; give a value, or leave it out\n"
    )


@pytest.mark.parametrize("verb", [("measure",), ("measure", "gemm"), ("run",), ("detect",)])
@pytest.mark.parametrize(
    ("option", "owners"),
    [
        (("--address", "auto"), "ray"),
        (("--namespace=team",), "kubernetes"),
        (("--time", "1h"), "slurm or kubernetes"),
        (("--nodes", "2"), "slurm or ray or kubernetes"),
    ],
)
def test_without_a_launcher_an_option_says_whose_it_is(verb, option, owners, capsys):
    said = _said(capsys, *verb, *option)
    assert said.endswith(f": belongs to --launcher {owners}; give that, or leave it out\n")
    assert said.startswith(f"error: {option[0].partition('=')[0]}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("measure", "gemm", "--modell", "x"),
         "error: Unknown option: --modell. Did you mean --model?\n"),
        (("run", "--steps", "many"), "error: --steps = 'many': must be a whole number\n"),
        (("refit", "--timeout", "0s"), "error: --timeout = '0s': must be some time, as 60s\n"),
        (("measure", "gemm", "--array", "seq-len=64,b"),
         "error: --seq-len = 'b': must be a whole number\n"),
        (("measure", "--model", "gpt-30m,lama-7b"),
         "error: model 'lama-7b' is neither in the catalogue nor a config.json; did you mean "
         "llama-2-7b?\n"),
        (("run",), "error: plan.json does not exist; `meshwise plan` writes it\n"),
        (("run", "my.json", "--save", "w"),
         "error: my.json does not exist; `meshwise plan` writes it\n"),
        (("run", "--suite", "gpt.perf_test_manual", "--nodes", "2"),
         "error: suite gpt.perf_test_manual has no case for 2 GPUs; it has cases for 1, 4, 8, "
         "64\n"),
        (("run", "--suite", "gpt.perf_test_manual", "--case", "99"),
         "error: --case = 99: gpt.perf_test_manual has cases 0 to 0 for 1 devices\n"),
        (("run", "--suite", "gpt.perf_test_manual", "--array", "case=0,99"),
         "error: case = 99: gpt.perf_test_manual has cases 0 to 0 for 1 devices\n"),
        (("detect", "--nodes", "1.5"), "error: --nodes = '1.5': must be a whole number\n"),
        (("detect", "--gpus-per-node=0.5"),
         "error: --gpus-per-node = '0.5': must be a whole number\n"),
        (("detect", "--nproc-per-node", "2."),
         "error: --nproc-per-node = '2.': must be a whole number\n"),
        (("measure", "gemm", "--array", "nodes=1,2"),
         "error: --array = 'nodes=1,2': --nodes is the launcher's own; give one value\n"),
        (("measure", "collectives", "--sizes", "4K", "--array", "sizes=1K"),
         "error: --array = 'sizes=1K': the command has --sizes, too; leave one out\n"),
        (("measure", "--sbatch", "--qos=high"),
         "error: --sbatch: no value is given; write --sbatch=--qos=high, as it begins with -\n"),
        (("measure", "--time", "400000h"),
         "error: --time = '400000h': must be below 1e9s, which is 31 years\n"),
        (("measure", "--time", "1:00:00:00"),
         "error: --time = '1:00:00:00': write 30m, 2h, 12:00:00 or 1-00:00:00\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.usefixtures("here")
def test_a_command_is_checked_before_it_is_submitted(words, said, more, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # no sbatch, which would be named otherwise
    assert _said(capsys, "--launcher", "slurm", *words, *more) == said


@pytest.mark.parametrize(
    "options",
    ["slurm --nodes 2", "ray --num-hosts 2 --num-devices-per-host 1", "ray --nproc-per-node 2",
     "slurm --gpus-per-node 2 --container-image torch:2",
     "kubernetes --nodes 2 --container-image torch:2"],
)  # fmt: skip
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.usefixtures("here")
def test_a_plan_is_for_the_ranks_that_there_will_be(options, more, capsys, monkeypatch):
    """Before anything starts, and so before Ray is imported."""
    monkeypatch.setitem(sys.modules, "ray", None)
    model = Model(name="tiny", hidden=64, layers=2, heads=4, ffn=256, vocab=128, max_seq_len=32)
    layout = Layout(dp=8, tp=2, microbatch_size=1, num_microbatches=1)
    store.write("my.json", _plan(model, Workload(global_batch_size=8, seq_len=32), layout))
    said = _said(capsys, "run", "my.json", "--launcher", *options.split(), *more)
    assert re.fullmatch(
        r"using ./my.json\n"
        r"error: my.json is for 16 ranks, and --nodes (2 x 1|1 x 2) ranks of each is 2; make these "
        r"equal, or plan anew with --gpus 2\n",
        said,
    )


@pytest.mark.parametrize("launcher", ["ray", "kubernetes"])
@pytest.mark.usefixtures("here")
def test_a_suite_has_cases_for_the_ranks_that_there_will_be(launcher, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["run", "--suite", "gpt.perf_test_manual", "--launcher", launcher, "--dry-run"]
    words += ["--num-hosts=2", "--num-devices-per-host=1"] if launcher == "ray" else ["--nodes=2"]
    assert _said(capsys, *words) == (
        "error: suite gpt.perf_test_manual has no case for 2 GPUs; it has cases for 1, 4, 8, 64\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("run", "my.json", "--container-image", "torch:2"),  # where a mount may hold it
        ("measure", "--model", "/data/config.json", "--container-image", "torch:2"),
        ("run", "--model", "gpt-30m"),
        ("run", "--suite", "gpt.perf_test_manual"),
        ("detect", "--no-measure"),
        ("measure", "gemm", "--array", "json=true,false"),  # yes or no
    ],
)
@pytest.mark.usefixtures("here")
def test_a_command_that_is_right_is_printed(words, capsys):
    with pytest.raises(SystemExit) as end:
        app.main(["--launcher", "slurm", "--dry-run", *words])
    assert end.value.code == 0
    assert f"-m meshwise {words[0]}" in capsys.readouterr().out


def test_help_lists_dry_run(capsys):
    with pytest.raises(SystemExit) as end:
        app.main(["--launcher", "slurm", "--help"])
    assert end.value.code == 0
    assert "--dry-run " in capsys.readouterr().out
