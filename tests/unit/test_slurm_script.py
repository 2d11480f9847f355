"""Slurm's scripts: golden files, and that no word of the user's is read by a shell or by sbatch."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwise.launch.errand import Errand
from meshwise.launch.slurm_script import body, script, swept
from meshwise.options.allocation import Allocation

MEASURE = ("measure", "collectives", "all_reduce", "--model", "gpt-30m", "--json")
SCRIPTS = {
    "plain": (MEASURE, Allocation(nodes=2, nproc_per_node=4, python="python3")),
    "gpus": (
        ("run", "plan.json", "--save", "my weights", "--save-every", "10"),
        Allocation(
            nodes=4, gpus_per_node=8, partition="h100", account="me", constraint="nvl&ib",
            time="2h",             sbatch=("--qos=high", "--mail-type=END"), python="python3",
        ),
    ),
    "pyxis": (
        ("refit", "--scenario", "tp2-tp4"),
        Allocation(gpus_per_node=4, container_image="/images/torch.sqsh",
                   container_mounts=("/data:/data",)),
    ),
    "apptainer": (
        MEASURE,
        Allocation(gpus_per_node=4, container_image="torch.sif", container_engine="apptainer",
                   container_mounts=("/my data:/data",)),
    ),
    "unsaved": (("run", "plan.json"), Allocation(nproc_per_node=2, python="python3")),
    "array": (MEASURE, Allocation(nproc_per_node=2, array="seq_len=1024,2048", python="python3")),
    "hostile": (
        ("measure", "gemm", "--model", "$(touch x); 'a' \"b\" `c`"),
        Allocation(partition="a; rm -rf ~", account="#x y", constraint="'$HOME'", python="/my py"),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_set(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONTAINER_IMAGE", "OUTPUT_DIR", "RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_as_before(name, golden):
    words, place = SCRIPTS[name]
    text = script(Errand(words), place, Path.cwd() / "runs/jobs/ID")
    golden(f"slurm-{name}.sh", text.replace(os.getcwd(), "/home/me"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


_TWO_RANKS = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
SLURM_LOCALID=1 "$@"
SLURM_LOCALID=0 "$@"
"""


def _stubs(folder: Path) -> dict[str, str]:
    """Programs of Slurm's that only say what they were given, a word a line, NUL behind each."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in {"srun": 'printf "%s\\0" "$@"', "scontrol": "echo n1"}.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n"}


def test_without_apptainer_one_rank_of_a_host_says_what_to_do():
    text = body(Errand(("measure",)), SCRIPTS["apptainer"][1])
    bare = Path.cwd() / "bare"
    bare.mkdir()
    for name in ("bash", "hostname", "head", "sed"):
        (bare / name).symlink_to(shutil.which(name) or "")
    environment = _stubs(Path.cwd()) | {"PATH": f"{Path.cwd()}/tools:{bare}"}
    (Path.cwd() / "tools/srun").write_text(_TWO_RANKS)
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: apptainer: not found on ")
    assert line.endswith("; load it, or give --container-engine pyxis")


def _given_to_srun(text: str, **more: str) -> list[str]:
    environment = _stubs(Path.cwd()) | more
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


_WORDS = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(_WORDS, max_size=4), image=_WORDS, mount=_WORDS)
def test_every_word_reaches_the_ranks_as_it_was_typed(words, image, mount):
    errand = Errand(("measure", "gemm", *words))
    place = Allocation(container_image=image, container_mounts=(mount,), python="python3")
    found = _given_to_srun(body(errand, place))
    assert f"--container-image={image}" in found
    assert f"--container-mounts={mount},{os.getcwd()}:{os.getcwd()}" in found
    assert found[found.index("python3") :] == ["python3", "-m", "meshwise", *errand.words]
    assert errand.words == ("measure", "gemm", *words)


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (2, 1), (1, 4), (3, 2)])
def test_a_step_has_its_own_number_of_ranks_and_one_of_one_is_a_job(nodes, ranks):
    """In an allocation, srun would start as many as that has tasks (tests/slurm)."""
    text = body(Errand(("measure",)), Allocation(nodes=nodes, nproc_per_node=ranks))
    found = _given_to_srun(text, SLURM_NTASKS="7")
    assert {f"--ntasks={nodes * ranks}", f"--ntasks-per-node={ranks}"} <= {*found}
    assert ("export WORLD_SIZE=1" in text.splitlines()) == (nodes * ranks == 1)


@pytest.mark.parametrize("engine", ["pyxis", "apptainer"])
@pytest.mark.parametrize("odd", [",", ":"])
def test_a_working_directory_that_no_container_could_mount_is_refused(odd, engine, monkeypatch):
    folder = Path.cwd() / f"a{odd}b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    place = Allocation(container_image="torch:2", container_engine=engine)
    with pytest.raises(ValueError) as refused:
        body(Errand(("measure",)), place)
    said = f"{folder}: a {odd!r} in it ends a mount; work in another folder"
    assert str(refused.value) == said
    body(Errand(("measure",)), Allocation())


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("--test-only", "give --dry-run"),
        ("--test", "give --dry-run"),
        ("--array=0-3", "give --array"),
        ("-a0-3", "give --array"),
        ("--nodes=2", "give --nodes"),
        ("-N2", "give --nodes"),
        ("-N 2", "give --nodes"),
        ("--ntasks=2", "give --nproc-per-node"),
        ("-n=2", "give --nproc-per-node"),
        ("--wait", "give --wait"),
        ("--output=x", "give --run-id or OUTPUT_DIR"),
        ("--wrap=ls", "leave it out"),
        ("--parsable", "leave it out"),
    ],
)
def test_an_option_of_sbatch_that_the_launcher_decides_is_refused(line, fix):
    with pytest.raises(ValueError) as refused:
        script(Errand(("detect",)), Allocation(sbatch=("--qos=high", line)), Path("/runs"))
    assert str(refused.value) == f"sbatch = {line!r}: is the launcher's own; {fix}"


def test_other_options_of_sbatch_are_taken():
    lines = ("--qos=high", "-Jmine", "--wait-all-nodes=1", "--nodelist=n1", "--gres=gpu:8", "-H")
    text = script(Errand(("detect",)), Allocation(sbatch=lines), Path("/runs"))
    assert {f"#SBATCH {line}" for line in lines} <= {*text.splitlines()}
    for odd in ("--", "-", "high"):
        with pytest.raises(ValueError, match=f"^sbatch = '{odd}': must be an option of sbatch"):
            script(Errand(("detect",)), Allocation(sbatch=(odd,)), Path("/runs"))


def test_apptainer_gets_image_mounts_and_command():
    words, place = SCRIPTS["apptainer"]
    found = _given_to_srun(body(Errand(words), place))
    here = os.getcwd()
    assert found[found.index("apptainer") :] == [
        "apptainer", "exec", "--nv", "--bind", "/my data:/data", "--bind", f"{here}:{here}",
        "--pwd", here, "torch.sif", "python3", "-m", "meshwise", *words,
    ]  # fmt: skip


def test_a_job_that_starts_again_goes_on():
    measure = body(Errand(MEASURE), Allocation())
    assert "--resume" not in _given_to_srun(measure)
    assert _given_to_srun(measure, SLURM_RESTART_COUNT="1")[-1] == "--resume"
    asked = body(Errand((*MEASURE, "--resume")), Allocation())
    assert _given_to_srun(asked, SLURM_RESTART_COUNT="2").count("--resume") == 1
    detect = body(Errand(("detect",)), Allocation())
    assert "--resume" not in _given_to_srun(detect, SLURM_RESTART_COUNT="1")


_LATE = """#!/bin/bash
trap 'kill $!; exit 138' USR1
until read -r _ _ state _ < /proc/$PPID/stat && [ "$state" = S ]; do :; done  # it waits for this
kill -USR1 $PPID
sleep 60 & wait
"""


@pytest.mark.parametrize(
    ("words", "goes_on"),
    [
        (("measure",), True),
        (("measure", "gemm", "--resume"), True),
        (("run", "--save", "weights"), True),
        (("run", "--save=weights", "--resume"), True),
        (("run", "plan.json"), False),
        (("measure", "ring"), False),
        (("detect",), False),
        (("refit",), False),
    ],
)
def test_at_the_time_limit_a_job_is_queued_again_only_if_it_goes_on(words, goes_on):
    """Any other would start over at every limit."""
    text = script(Errand(words), Allocation(), Path("/runs"))
    assert ("#SBATCH --requeue" in text, "#SBATCH --no-requeue" in text) == (goes_on, not goes_on)
    environment = _stubs(Path.cwd())
    (Path.cwd() / "tools/srun").write_text(_LATE)
    (Path.cwd() / "tools/scontrol").write_text('#!/bin/bash\necho "$*" >> asked\necho n1\n')
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True)
    assert done.returncode == 138
    assert ("requeue 1" in Path("asked").read_text()) == goes_on
    told = "error: time limit: this command cannot go on; "
    assert (told in done.stderr) == (not goes_on)
    assert ("add --save FOLDER" in done.stderr) == (words == ("run", "plan.json"))


def test_a_job_of_an_array_has_its_value():
    text = body(Errand(("measure", "gemm")), Allocation(array="seq_len=1,a b"))
    # one word, for else a flag that is yes or no would take no value
    assert _given_to_srun(text, SLURM_ARRAY_TASK_ID="1")[-2:] == ["gemm", "--seq-len=a b"]
    for odd in ("seq-len", "=1", "seq-len=1,,2"):
        with pytest.raises(ValueError, match=r"^array = "):
            swept(odd)
    layouts = ['{"tp": 2, "stages": [{"tp": 1}, {"tp": 2}]}', '{"pp": 2}', "a.json"]
    assert swept(f"layout={','.join(layouts)}") == ("layout", layouts)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=1, max_size=30))
def test_a_value_is_one_word_of_its_line_or_refused(text):
    """sbatch splits these lines as a shell does."""
    place = Allocation(partition=text, account="me")
    try:
        lines = script(Errand(("detect",)), place, Path("/runs")).splitlines()
    except ValueError as error:
        assert str(error).startswith("partition = ")
        assert not text.isprintable()
        return
    head = [line for line in lines if line.startswith("#SBATCH --partition=")]
    assert [shlex.split(line)[1:] for line in head] == [[f"--partition={text}"]]


def test_a_command_without_ranks_is_refused():
    for words in (("plan", "gpt-30m"), ("measure", "import", "log"), (), ("--json",)):
        with pytest.raises(ValueError, match="needs no ranks; leave --launcher out"):
            Errand(words)


def test_the_folder_of_logs_has_the_names_that_the_environment_gives(monkeypatch):
    errand, here = Errand(("measure", "gemm", "--runs=mine")), Path.cwd()
    assert errand.folder(Allocation(run_id="a")) == here / "mine/jobs/a"
    monkeypatch.setenv("OUTPUT_DIR", "/out")
    monkeypatch.setenv("RUN_ID", "b")
    assert Errand(("measure",)).folder(Allocation()) == Path("/out/jobs/b")
    with pytest.raises(ValueError, match=r"^run_id = '\.\./x'"):
        errand.folder(Allocation(run_id="../x"))
