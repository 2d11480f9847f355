"""Slurm's commands, replaced by stubs with the words of Slurm 22.05: what a user is told."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from meshwise import files
from meshwise.launch import RanksFailed, slurm
from meshwise.launch.errand import Errand
from meshwise.options.allocation import Allocation

MEASURE = Errand(("measure", "collectives"))


@pytest.fixture(autouse=True)
def stub(here: None, monkeypatch: pytest.MonkeyPatch):
    """Put a program in the way that runs a line of shell."""
    tools = Path.cwd() / "tools"
    tools.mkdir()
    for name in ("CONTAINER_IMAGE", "OUTPUT_DIR", "RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_POLL_S", 0.01)

    def put(name: str, line: str) -> None:
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)

    return put


def _shown(state: str, code: str = "0:0", more: str = "") -> str:
    began = "" if state == "PENDING" else "BatchHost=n1 "
    return f"echo 'JobId=7 {more}JobName=x JobState={state} Reason=None {began}ExitCode={code} '"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("invalid partition specified: x", "sinfo lists the partitions"),
        ("Batch job submission failed: Invalid account or account/partition combination specified",
         "sacctmgr show associations lists yours"),
        ("Invalid generic resource (gres) specification", "too many GPUs, or none known to Slurm: "
         "sinfo -N -o '%N %c %m %G %f' lists each node's cores, memory, GPUs and features"),
        ("Batch job submission failed: Requested node configuration is not available",
         "sinfo -N -o '%N %c %m %G %f' lists each node's cores, memory, GPUs and features"),
        ("Batch job submission failed: More processors requested than permitted",
         "sinfo -N -o '%N %c %m %G %f' lists each node's cores, memory, GPUs and features"),
        ("Batch job submission failed: Invalid feature specification",
         "sinfo -N -o '%N %c %m %G %f' lists each node's cores, memory, GPUs and features"),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some "
         "limit)", "scontrol show partition says each MaxTime"),
    ],
)  # fmt: skip
def test_what_sbatch_refuses_is_one_line_with_where_to_look(said, line, stub):
    stub("sbatch", f"echo 'sbatch: error: {said}' >&2; exit 1")
    with pytest.raises(ValueError) as refused:
        slurm.start(MEASURE, Allocation())
    assert str(refused.value) == f"sbatch: {said}; {line}"


def test_without_slurm_the_line_says_where_to_go(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for inside in (False, True):
        if inside:
            monkeypatch.setenv("SLURM_JOB_ID", "7")
        with pytest.raises(ValueError, match=r"^s(batch|run): not found here; run this where"):
            slurm.start(MEASURE, Allocation())


def test_an_image_that_is_not_there_is_refused_before_anything_is_submitted(stub):
    stub("sbatch", "echo submitted >&2; exit 1")
    stub("srun", "echo '  --container-image=IMAGE'")
    for image, engine in (("/no.sqsh", "pyxis"), ("./no.sqsh", "pyxis"), ("no.sif", "apptainer")):
        with pytest.raises(ValueError, match=f"^container_image = '{image}': no such file here"):
            slurm.start(MEASURE, Allocation(container_image=image, container_engine=engine))
    Path("no.sif").touch()
    for image, engine in (("nvcr.io#a/b", "pyxis"), ("no.sif", "apptainer"),
                          ("docker://a/b", "apptainer")):  # fmt: skip
        with pytest.raises(ValueError, match="submitted"):
            slurm.start(MEASURE, Allocation(container_image=image, container_engine=engine))


def test_without_pyxis_an_image_is_refused(stub, monkeypatch):
    stub("srun", "echo '      --container             Path to OCI container bundle'")
    monkeypatch.setenv("CONTAINER_IMAGE", "torch:2")
    with pytest.raises(ValueError, match="srun has no --container-image here, which pyxis adds"):
        slurm.start(MEASURE, Allocation())


@pytest.mark.parametrize("state", ["CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"])
def test_a_job_that_did_not_end_by_itself_says_where_to_look_and_how_to_go_on(state, stub):
    stub("sbatch", "echo 7")
    stub("scontrol", _shown(state, "0:15"))
    folder = Path.cwd() / "runs/jobs/a"
    folder.mkdir(parents=True)
    (folder / "7.out").touch()
    with pytest.raises(RanksFailed) as failed:
        slurm.start(MEASURE, Allocation(wait=True, run_id="a"))
    assert str(failed.value) == f"job 7: {state}; logs are in {folder}; --resume goes on"
    with pytest.raises(RanksFailed, match=f"logs are in {folder}$"):  # nothing to go on with
        slurm.start(Errand(("detect",)), Allocation(wait=True, run_id="a"))


def test_output_that_a_file_system_shows_late_is_printed(stub, capsys):
    """A job of an array ended; its log is seen a second later."""
    stub("sbatch", "echo 7")
    stub("scontrol", _shown("FAILED", "3:0", "ArrayJobId=7 ArrayTaskId=1 "))
    folder = Path("runs/jobs/a")

    def late() -> None:
        time.sleep(1.0)
        (folder / "7_1.err").write_text("why\n")
        (folder / "7_1.out").write_text("table\n")

    writing = threading.Thread(target=late)
    writing.start()
    assert slurm.start(MEASURE, Allocation(wait=True, run_id="a", array="a=1,2")) == 3
    writing.join()
    told = capsys.readouterr()
    assert told.out == "table\n" and told.err.endswith("why\n")


def test_output_that_is_never_seen_is_said(stub, capsys, monkeypatch):
    stub("sbatch", "echo 7")
    stub("scontrol", _shown("COMPLETED"))
    monkeypatch.setattr(files, "appeared", lambda path: Path(path).exists())
    assert slurm.start(MEASURE, Allocation(wait=True, run_id="a")) == 0
    told = f"{Path.cwd()}/runs/jobs/a/7.out: not seen here; look on the job's hosts\n"
    assert capsys.readouterr().err.endswith(told)


def test_ctrl_c_cancels_the_job_that_is_followed(stub):
    stub("sbatch", "echo 7")
    stub("scontrol", _shown("RUNNING"))
    stub("scancel", 'echo "$@" > cancelled')
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        slurm.start(MEASURE, Allocation(wait=True))
    assert Path("cancelled").read_text() == "7\n"


def test_the_command_that_follows_a_job_can_be_pasted(stub, capsys):
    stub("sbatch", "echo 7")
    slurm.start(Errand(("measure", "--runs", "my; runs")), Allocation(run_id="a"))
    line = capsys.readouterr().err.splitlines()[-1]
    folder = f"{Path.cwd()}/my; runs/jobs/a"
    assert line == f"follow it by tail -F '{folder}/7.err' '{folder}/7.out'"


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/"])
def test_the_folder_of_a_job_is_below_that_of_all_jobs(name):
    with pytest.raises(ValueError, match=r"run_id = .*: is the name of a folder"):
        MEASURE.folder(Allocation(run_id=name))


def test_the_name_of_a_folder_can_be_one(monkeypatch):
    with pytest.raises(ValueError, match=r"^run_id = 'a\\nb': is the name of a folder, without"):
        MEASURE.folder(Allocation(run_id="a\nb"))
    assert MEASURE.folder(Allocation(run_id="x" * 255)).name == "x" * 255
    monkeypatch.setenv("RUN_ID", "é" * 128)
    with pytest.raises(ValueError, match=r"^run_id = 'é+': must be at most 255 bytes long$"):
        MEASURE.folder(Allocation())
