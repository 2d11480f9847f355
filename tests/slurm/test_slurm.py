"""Commands on a real Slurm of two nodes: batch, in place, arrays, failures, requeues."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwise import store
from meshwise.spec import Cluster

ELSEWHERE = ("--launcher", "slurm", "--nodes", "2", "--nproc-per-node", "2")
COLLECTIVES = ("measure", "collectives", "all_reduce", "all_to_all", "--sizes", "1K,4K",
               "--as-measured")  # fmt: skip


def _runs(folder: Path, verb: str) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"runs/*-{verb}*/run.json"))


def _cases(run: Path) -> dict[str, str]:
    """The status of every case, by its id."""
    return {sample.case_id: sample.status for sample in store.load(run)[1]}


def _told(slurm: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=slurm, capture_output=True, text=True, check=True).stdout


def _squeue(slurm: dict[str, str], what: str = "%i") -> list[str]:
    return _told(slurm, "squeue", "--noheader", f"--format={what}").split()


def _limit_is_near(slurm: dict[str, str], job: str) -> None:
    _told(slurm, "scancel", "--signal=USR1", "--batch", job)
    _until(lambda: _squeue(slurm, "%T") == ["PENDING"])


def _a_node_is_lost(slurm: dict[str, str], job: str) -> None:
    _told(slurm, "scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
    _until(lambda: _squeue(slurm, "%T") == ["PENDING"])  # the node comes back by itself


def _start_again(slurm: dict[str, str], job: str, happens=_limit_is_near) -> None:
    """Let happen what puts a job into the queue, and start it again earlier than Slurm would, but
    once its nodes have ended what it did before: they refuse a job that they still end."""
    happens(slurm, job)
    idle = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    _until(lambda: len(_told(slurm, *idle).split()) == 2)
    time.sleep(15.0)
    _told(slurm, "scontrol", "update", f"JobId={job}", "StartTime=now")


def _until(holds, seconds: float = 300.0) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.5)


def test_a_batch_job_measures_what_local_ranks_measure(meshwise, tmp_path):
    far = meshwise(*COLLECTIVES, *ELSEWHERE, "--wait", "--json", "--run-id", "first")
    assert far.returncode == 0, far.stderr
    found = json.loads(far.stdout)
    assert found["status"] == "complete"
    (run,) = _runs(tmp_path, "measure")
    assert run == tmp_path / found["run_dir"]
    assert store.load(run)[0].world_size == 4
    logs = {path.suffix for path in (tmp_path / "runs/jobs/first").iterdir()}
    assert logs == {".sh", ".out", ".err"}

    near = meshwise(*COLLECTIVES, "--nproc", "4", "--runs", "near")
    assert near.returncode == 0, near.stderr
    (local,) = (tmp_path / "near").iterdir()
    assert _cases(run) == _cases(local)
    assert set(_cases(run).values()) == {"ok"}


def test_in_an_allocation_the_ranks_start_in_place(meshwise, tmp_path):
    done = meshwise(*COLLECTIVES, *ELSEWHERE, before=("salloc", "--nodes=2", "--ntasks-per-node=2"))
    assert done.returncode == 0, done.stderr
    assert "all_to_all" in done.stdout
    assert not (tmp_path / "runs/jobs").exists()
    (run,) = _runs(tmp_path, "measure")
    assert set(_cases(run).values()) == {"ok"}
    one_each = (*COLLECTIVES, "--launcher", "slurm", "--nodes", "2", "--runs", "two")
    done = meshwise(*one_each, before=("salloc", "--nodes=2", "--ntasks-per-node=2"))
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "two").iterdir()
    assert store.load(run)[0].world_size == 2  # not the allocation's four
    fewer = meshwise(*COLLECTIVES, *ELSEWHERE, before=("salloc", "--nodes=1"))
    assert fewer.returncode != 0
    assert "Only allocated 1 nodes asked for 2" in fewer.stderr


def test_the_hosts_of_a_job_are_detected_and_their_links_measured(meshwise, tmp_path):
    done = meshwise("detect", *ELSEWHERE, "--wait")
    assert done.returncode == 0, done.stderr
    found = store.read(tmp_path / "cluster.toml", Cluster)
    assert (found.num_hosts, found.num_devices_per_host) == (2, 2)
    assert [tier.source for tier in found.tiers] == ["measured", "measured"]
    one = meshwise(*COLLECTIVES, "--launcher", "slurm", "--wait")  # a part of that cluster
    assert one.returncode == 0, one.stderr
    (run,) = _runs(tmp_path, "measure")
    assert store.load(run)[0].world_size == 1


def test_an_array_has_a_job_for_each_value(meshwise, tmp_path):
    done = meshwise(
        "measure", "collectives", "all_reduce", *ELSEWHERE, "--array", "sizes=1K,2K,4K", "--wait"
    )
    assert done.returncode == 0, done.stderr
    sizes = [
        {sample.case.op.size_bytes for sample in store.load(run)[1]}
        for run in _runs(tmp_path, "measure")
    ]
    assert sorted(map(tuple, sizes)) == [(1024,), (2048,), (4096,)]
    heads = [line for line in done.stderr.splitlines() if line.startswith("---")]
    assert sorted(heads) == ["--- sizes = 1K", "--- sizes = 2K", "--- sizes = 4K"]


def test_an_array_over_a_flag_that_is_yes_or_no(meshwise, tmp_path):
    few = ("measure", "collectives", "all_reduce", "--sizes", "1K")
    done = meshwise(*few, "--launcher", "slurm", "--array", "json=true,false", "--wait")
    assert done.returncode == 0, done.stderr
    assert '"status": "complete"' in done.stdout and "all_reduce" in done.stdout
    assert len(_runs(tmp_path, "measure")) == 2


def test_what_slurm_refuses_is_one_line(meshwise):
    nowhere = meshwise(*COLLECTIVES, *ELSEWHERE, "--partition", "a; rm -rf ~")
    assert nowhere.returncode == 2
    assert "invalid partition specified: a; rm -rf ~" in nowhere.stderr.splitlines()[-1]
    large = meshwise(*COLLECTIVES, "--launcher", "slurm", "--nodes", "3")
    assert large.returncode == 2
    assert "Node count specification invalid" in large.stderr.splitlines()[-1]
    gpus = meshwise(*COLLECTIVES, "--launcher", "slurm", "--gpus-per-node", "4")
    assert gpus.returncode == 2
    assert "Invalid generic resource" in (last := gpus.stderr.splitlines()[-1])
    assert "too many GPUs, or none known to Slurm: sinfo -N -o" in last
    no_pyxis = meshwise(*COLLECTIVES, *ELSEWHERE, "--container-image", "torch:2")
    assert no_pyxis.returncode == 2
    (line,) = no_pyxis.stderr.splitlines()
    assert "srun has no --container-image here, which pyxis adds" in line
    none = meshwise(*COLLECTIVES, *ELSEWHERE, PATH="/usr/bin-none")
    assert none.returncode == 2
    assert none.stderr.startswith("error: sbatch: not found here")


@pytest.mark.skipif(shutil.which("apptainer") is not None, reason="apptainer is installed")
def test_each_host_without_apptainer_says_so(meshwise):
    inside = ("--container-engine", "apptainer", "--container-image", "docker://torch")
    done = meshwise(*COLLECTIVES, *ELSEWHERE, *inside, "--wait")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: apptainer: ")]
    assert len(lines) == 2 and all("give --container-engine pyxis" in line for line in lines)


def test_a_failed_job_has_its_exit_code(meshwise):
    done = meshwise(*COLLECTIVES, "--nproc", "7", *ELSEWHERE, "--wait")
    assert done.returncode == 2
    assert "nproc = 7, but the launcher started 4 ranks" in done.stderr


def test_a_job_whose_hosts_do_not_see_its_folder_says_so(slurm, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    words = (*COLLECTIVES, "--launcher", "slurm", "--wait", "--run-id", "a", "--sbatch=--hold")
    told = subprocess.Popen(
        [sys.executable, "-m", "meshwise", *words], cwd=folder, env=slurm, text=True,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    _until(lambda: _squeue(slurm))
    (job,) = _squeue(slurm)
    shutil.rmtree(folder)
    _told(slurm, "scontrol", "release", job)
    last = told.communicate(timeout=300.0)[1].splitlines()[-1]
    assert last == (
        f"error: job {job}: FAILED before it wrote a line: its hosts may not see "
        f"{folder}/runs/jobs/a"
    )
    assert told.returncode == 4


def test_a_name_that_looks_like_an_end_is_only_a_name(meshwise):
    odd = "x JobState=FAILED Reason=None ExitCode=7:0"
    done = meshwise(
        *COLLECTIVES, *ELSEWHERE, "--wait", "--run-id", odd, f"--sbatch=--job-name={odd}"
    )
    assert done.returncode == 0, done.stderr
    assert "all_to_all" in done.stdout


def test_a_step_that_is_killed_ends_with_a_line(slurm, tmp_path):
    words = ("measure", "collectives", *ELSEWHERE, "--wait", "--run-id", "a")
    told = subprocess.Popen(
        [sys.executable, "-m", "meshwise", *words], cwd=tmp_path, env=slurm, text=True,
        stderr=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    _until(lambda: any(len(_cases(run)) > 2 for run in _runs(tmp_path, "measure")))
    (job,) = _squeue(slurm)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if path.read_bytes().startswith(b"srun\0") and (
                f"SLURM_JOB_ID={job}".encode()
                in path.with_name("environ").read_bytes().split(b"\0")
            ):
                os.kill(int(path.parent.name), signal.SIGKILL)
    last = told.communicate(timeout=300.0)[1].splitlines()[-1]
    assert last.startswith(f"error: job {job}: FAILED, exit code 137; logs are in ")
    assert last.endswith("; --resume goes on")
    assert told.returncode == 4


def _begun(meshwise, slurm, folder: Path) -> tuple[str, Path]:
    """Submit a job of many cases; return it and its run once some of them are measured."""
    done = meshwise("measure", "collectives", *ELSEWHERE, "--run-id", "long")
    assert done.returncode == 0, done.stderr
    (job,) = _squeue(slurm)
    _until(lambda: any(len(_cases(run)) > 2 for run in _runs(folder, "measure")))
    (run,) = _runs(folder, "measure")
    return job, run


def test_a_cancelled_job_keeps_what_it_measured(meshwise, slurm, tmp_path):
    job, run = _begun(meshwise, slurm, tmp_path)
    subprocess.run(["scancel", job], env=slurm, check=True)
    _until(lambda: not _squeue(slurm))
    info = store.load(run)[0]
    # Slurm's signal and the script's race; a rank that others left before either came says so
    ended = ("ended by SIGTERM", "ended by SIGUSR1")
    assert info.reason in ended or "had not arrived" in info.reason
    assert info.status in ("interrupted", "failed")
    assert 2 < len(before := store.load(run)[1]) < 35
    on = meshwise("measure", "collectives", *ELSEWHERE, "--resume", "--wait")
    assert on.returncode in (0, 4), on.stderr  # 4: what was under way counts as hung, see above
    assert len(store.load(run)[1]) > len(before) and store.load(run)[1][: len(before)] == before


@pytest.mark.parametrize("happens", [_limit_is_near, _a_node_is_lost])
def test_a_job_is_requeued_and_goes_on(happens, meshwise, slurm, tmp_path):
    job, run = _begun(meshwise, slurm, tmp_path)
    before = store.load(run)[1]
    _start_again(slurm, job, happens)
    _until(lambda: "start 1" in (tmp_path / f"runs/jobs/long/{job}.err").read_text())
    _until(lambda: len(_cases(run)) > len(before) + 1)
    assert store.load(run)[1][: len(before)] == before  # nothing is measured twice
    assert _runs(tmp_path, "measure") == [run]
    subprocess.run(["scancel", job], env=slurm, check=True)
    _until(lambda: not _squeue(slurm))


GPT = ("run", "--model", "gpt-30m", "--layout", '{"dp": 2, "tp": 2}', "--seq-len", "64",
       "--global-batch-size", "2", "--seed", "3")  # fmt: skip


def _losses(run: Path) -> list[float]:
    (sample,) = store.load(run)[1]
    return list(sample.metrics["losses"])


def test_a_requeued_training_goes_on_as_if_it_had_not_ended(meshwise, slurm, tmp_path):
    sent = meshwise(*GPT, "--steps", "14", "--save", "weights", *ELSEWHERE, "--run-id", "train")
    assert sent.returncode == 0, sent.stderr
    (job,) = _squeue(slurm)
    log = tmp_path / f"runs/jobs/train/{job}.err"
    _until(lambda: log.exists() and "step 3: " in log.read_text())
    _start_again(slurm, job)
    _until(lambda: not _squeue(slurm))
    first, second = _runs(tmp_path, "run")
    assert store.load(first)[0].status == "interrupted"
    (step,) = map(int, re.findall(r"^going on with step (\d+) of weights", log.read_text(), re.M))

    whole = meshwise(*GPT, "--steps", "14", "--runs", "near")
    assert whole.returncode == 0, whole.stderr
    (near,) = (tmp_path / "near").iterdir()
    assert 3 < step < 13
    # here and there ranks have other numbers of threads
    assert _losses(second) == pytest.approx(_losses(near)[step:], rel=1e-6)


def test_a_training_that_saves_nothing_ends_at_the_time_limit(meshwise, slurm, tmp_path):
    sent = meshwise(*GPT, "--steps", "1000", *ELSEWHERE, "--run-id", "unsaved")
    assert sent.returncode == 0, sent.stderr
    (job,) = _squeue(slurm)
    log = tmp_path / f"runs/jobs/unsaved/{job}.err"
    _until(lambda: log.exists() and "step 3: " in log.read_text())
    _told(slurm, "scancel", "--signal=USR1", "--batch", job)
    _until(lambda: not _squeue(slurm))
    assert "this command cannot go on; add --save FOLDER" in log.read_text()
    assert "start 1" not in log.read_text()


def test_ring_attention_and_refits_cross_hosts(meshwise, tmp_path):
    ring = meshwise("measure", "ring", *ELSEWHERE, "--seq-lengths", "256", "--ring-sizes", "4",
                    "--wait")  # fmt: skip
    assert ring.returncode == 0, ring.stderr
    refit = meshwise(
        "refit", "--tensor-model-parallel-size", "2", "--rl-inference-tensor-model-parallel-size",
        "2", "--refit-mode", "non-collocated", "--refit-method", "gloo", "--num-layers", "2",
        "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "128",
        "--num-benchmark-iterations", "2", *ELSEWHERE, "--wait",
    )  # fmt: skip
    assert refit.returncode == 0, refit.stderr
    assert "Mean refit time" in refit.stdout + refit.stderr


def test_sixteen_ranks_move_weights_from_tp4_pp2_to_tp8(meshwise, tmp_path):
    done = meshwise(
        "refit", "--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2",
        "--rl-inference-tensor-model-parallel-size", "8",
        "--rl-inference-pipeline-model-parallel-size", "1", "--refit-mode", "non-collocated",
        "--refit-method", "gloo", "--num-layers", "4", "--hidden-size", "64",
        "--num-attention-heads", "8", "--vocab-size", "128", "--num-benchmark-iterations", "1",
        "--launcher", "slurm", "--nodes", "2", "--nproc-per-node", "8", "--wait",
        "--setup-timeout", "20m", "--timeout", "5m",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
