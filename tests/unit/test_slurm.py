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
from meshwise.launch.slurm_script import body
from meshwise.options.allocation import Allocation

MEASURE = Errand(("measure", "collectives"))
AT = '"$(dirname "$2")"'  # the folder of a job, in a stub of sbatch
WRITES = f"touch {AT}/7.out; echo 7"


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


def _shown(
    state: str, code: str = "0:0", more: str = "", name: str = "x", reason: str = "None"
) -> str:
    """A line of shell that shows a job as scontrol does."""
    began = "" if state == "PENDING" else "   BatchHost=n1\n"
    return f"""cat << 'END'
JobId=7 {more}JobName={name}
   UserId=me(1) GroupId=me(1) MCS_label=N/A
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}
   NodeList=n1
{began}   Comment={name}

END"""


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
    stub("sbatch", WRITES)
    stub("scontrol", _shown(state, "0:15"))
    folder = Path.cwd() / "runs/jobs"
    with pytest.raises(RanksFailed) as failed:
        slurm.start(MEASURE, Allocation(wait=True, run_id="a"))
    assert str(failed.value) == f"job 7: {state}; logs are in {folder}/a; --resume goes on"
    with pytest.raises(RanksFailed, match=f"logs are in {folder}/b$"):  # nothing to go on with
        slurm.start(Errand(("detect",)), Allocation(wait=True, run_id="b"))


@pytest.mark.parametrize("code", ["137:0", "0:9", "1:0"])
def test_a_job_that_a_signal_ended_says_so(code, stub):
    """A killed rank or srun: what it measured is kept, as that of a lost node."""
    stub("sbatch", WRITES)
    stub("scontrol", _shown("FAILED", code))
    with pytest.raises(RanksFailed) as failed:
        slurm.start(MEASURE, Allocation(wait=True, run_id="a"))
    number = 1 if code == "1:0" else 137
    said = f"job 7: FAILED, exit code {number}; logs are in {Path.cwd()}/runs/jobs/a; --resume"
    assert str(failed.value) == f"{said} goes on"


@pytest.mark.parametrize("code", [2, 3, 4])
def test_a_command_that_failed_by_itself_has_its_exit_code(code, stub, capsys):
    stub("sbatch", WRITES)
    stub("scontrol", _shown("FAILED", f"{code}:0"))
    assert slurm.start(MEASURE, Allocation(wait=True, run_id="a")) == code
    assert "FAILED" not in capsys.readouterr().err  # it said why


def test_a_name_cannot_say_how_its_job_ended(stub):
    stub("sbatch", WRITES)
    name = "x JobState=FAILED Reason=None ExitCode=7:0 ArrayJobId=1 ArrayTaskId=1"
    stub("scontrol", _shown("COMPLETED", name=name))
    assert slurm.start(MEASURE, Allocation(wait=True, run_id="a")) == 0


def test_a_host_that_cannot_open_the_logs_is_named_at_once(stub):
    stub("sbatch", "echo 7")
    stub("scontrol", _shown("FAILED", "0:53"))
    with pytest.raises(RanksFailed) as failed:
        slurm.start(MEASURE, Allocation(wait=True, run_id="a"))
    folder = Path.cwd() / "runs/jobs/a"
    said = f"job 7: FAILED before it wrote a line: its hosts may not see {folder}"
    assert str(failed.value) == said


def test_a_job_is_followed_although_slurm_does_not_answer_for_a_while(stub, capsys):
    stub("sbatch", WRITES)
    down = "n=$(cat n || echo 0); echo $((n + 1)) > n\n"
    down += "[ $n -lt 3 ] && { echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1; }\n"
    down += "[ $n -lt 4 ] && exit 0\n"  # said nothing
    stub("scontrol", down + _shown("COMPLETED"))
    stub("scancel", "touch cancelled")
    assert slurm.start(MEASURE, Allocation(wait=True, run_id="a")) == 0
    assert capsys.readouterr().err.count("Unable to contact; asking again") == 1
    assert not Path("cancelled").exists()


def test_a_job_that_cannot_be_followed_goes_on(stub, monkeypatch):
    monkeypatch.setattr(slurm, "_PATIENCE_S", 0.0)
    stub("sbatch", WRITES)
    stub("scontrol", "echo down >&2; exit 1")
    stub("scancel", "touch cancelled")
    with pytest.raises(ValueError, match=r"^job 7 is not followed any longer: scontrol: down$"):
        slurm.start(MEASURE, Allocation(wait=True, run_id="a"))
    assert not Path("cancelled").exists()


def test_two_jobs_never_share_a_folder(stub):
    stub("sbatch", "echo 7")
    slurm.start(MEASURE, Allocation(run_id="a"))
    text = (folder := Path.cwd() / "runs/jobs/a").joinpath("script.sh").read_text()
    with pytest.raises(ValueError) as refused:
        slurm.start(Errand(("detect",)), Allocation(run_id="a"))
    said = f"run_id = 'a': {folder} is another job's; give another --run-id"
    assert str(refused.value) == said
    assert (folder / "script.sh").read_text() == text
    for _ in range(3):
        slurm.start(MEASURE, Allocation())  # names of their own


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("echo 'sbatch: error: no' >&2; exit 1", "sbatch: no"),
        ("echo", "sbatch: said '', which is no job's number"),
        ("echo all fine", "sbatch: said 'all fine', which is no job's number"),
    ],
)
def test_a_job_that_was_not_submitted_leaves_no_folder(line, said, stub):
    stub("sbatch", line)
    stub("scontrol", "touch asked")
    with pytest.raises(ValueError) as refused:
        slurm.start(MEASURE, Allocation(run_id="a", wait=True))
    assert str(refused.value) == said
    assert not Path("runs/jobs/a").exists() and not Path("asked").exists()


def test_a_job_that_waits_without_a_reason_has_none(stub, capsys):
    stub("sbatch", WRITES)
    waits = f"if [ ! -e 1 ]; then touch 1\n{_shown('PENDING')}\nexit; fi\n"
    waits += f"if [ ! -e 2 ]; then touch 2\n{_shown('PENDING', reason='Resources')}\nexit; fi\n"
    stub("scontrol", waits + _shown("COMPLETED"))
    assert slurm.start(MEASURE, Allocation(wait=True, run_id="a")) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[-2:] == ["job 7 waits", "job 7 waits: Resources"]


def test_jobs_of_an_array_have_their_values_and_failures_are_last(stub, capsys):
    """Each is printed whole; while one runs, nothing of it."""
    writes = [f"echo out{n} > {AT}/7_{n}.out; echo err{n} > {AT}/7_{n}.err" for n in range(4)]
    stub("sbatch", "\n".join([*writes, "echo 7"]))
    shown = [_shown(state, code, f"ArrayJobId=7 ArrayTaskId={n} ") for n, state, code in
             [(3, "RUNNING", "0:0"), (2, "FAILED", "2:0"), (1, "COMPLETED", "0:0"),
              (0, "FAILED", "2:0")]]  # fmt: skip
    ended = [*shown[1:], _shown("CANCELLED", "0:15", "ArrayJobId=7 ArrayTaskId=3 ")]
    first = "\n".join(["if [ ! -e 1 ]; then touch 1", *shown, "exit; fi"])
    stub("scontrol", "\n".join([first, *ended]))
    place = Allocation(wait=True, run_id="a", array="seq_len=8,16,32,64")
    with pytest.raises(RanksFailed) as failed:
        slurm.start(MEASURE, place)
    said = "job 7: seq-len = 8, 32: FAILED, exit code 2; seq-len = 64: CANCELLED; logs are in "
    assert str(failed.value) == f"{said}{Path.cwd()}/runs/jobs/a; --resume goes on"
    told = capsys.readouterr()
    assert told.out.split() == ["out0", "out1", "out2", "out3"]
    lines = [line for line in told.err.splitlines() if line.startswith(("---", "err", "job 7 "))]
    assert lines == [
        "--- seq-len = 8", "err0", "--- seq-len = 16", "err1", "--- seq-len = 32", "err2",
        "job 7 runs", "--- seq-len = 64", "err3",
    ]  # fmt: skip


def test_the_last_line_of_an_array_names_values_whose_command_failed(stub, capsys):
    stub("sbatch", f"touch {AT}/7_0.out {AT}/7_1.out; echo 7")
    shown = [_shown(state, code, f"ArrayJobId=7 ArrayTaskId={n} ") for n, state, code in
             [(1, "FAILED", "3:0"), (0, "COMPLETED", "0:0")]]  # fmt: skip
    stub("scontrol", "\n".join(shown))
    assert slurm.start(MEASURE, Allocation(wait=True, run_id="a", array="a=1,2")) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: job 7: a = 2: FAILED, exit code 3; logs are in ")


def test_a_removed_working_directory_is_named(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    with monkeypatch.context() as inside:
        inside.chdir(gone)
        inside.setenv("PWD", str(gone))
        gone.rmdir()
        for use in (lambda: MEASURE.folder(Allocation()), lambda: body(MEASURE, Allocation())):
            with pytest.raises(ValueError) as refused:
                use()
            assert str(refused.value) == f"{gone}: was removed; cd to a folder that is there"


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
    assert told.out == "table\n" and "\n--- a = 2\n" in told.err and "\nwhy\n" in told.err


def test_output_that_is_never_seen_is_said(stub, capsys, monkeypatch):
    stub("sbatch", "echo 7")
    stub("scontrol", _shown("COMPLETED"))
    monkeypatch.setattr(files, "appeared", lambda path, inside: Path(path).exists())
    assert slurm.start(MEASURE, Allocation(wait=True, run_id="a")) == 0
    told = f"{Path.cwd()}/runs/jobs/a/7.out: not seen here; look on the job's hosts\n"
    assert capsys.readouterr().err.endswith(told)


def test_ctrl_c_cancels_the_job_that_is_followed(stub, capsys):
    stub("sbatch", "echo 7")
    stub("scontrol", _shown("RUNNING"))
    stub("scancel", 'echo "$@" > cancelled')
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        slurm.start(MEASURE, Allocation(wait=True))
    assert Path("cancelled").read_text() == "7\n"
    assert capsys.readouterr().err.endswith("job 7 was cancelled\n")
    stub("scancel", "exit 1")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        slurm.start(MEASURE, Allocation(wait=True))
    assert capsys.readouterr().err.endswith("job 7 goes on\n")


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
