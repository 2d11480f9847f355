"""Who started this process: torchrun, srun, or nobody."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from meshwise import launch, launcher, ranks
from meshwise.launch import local, order
from meshwise.launcher import Job
from meshwise.spec import Workload

GLOO = "GLOO_SOCKET_IFNAME"
STEP = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_ID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "gpu[007-009,012]",
}


def test_torchrun_says_rank_host_and_port() -> None:
    found = Job.here(
        {
            "RANK": "9",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "16",
            "LOCAL_WORLD_SIZE": "8",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "1234",
        }
    )
    assert found == Job(
        rank=9,
        local_rank=1,
        world_size=16,
        num_hosts=2,
        host="10.0.0.1",
        port=1234,
        launched=True,
    )


def test_srun_says_rank_and_the_first_host_keeps_the_store() -> None:
    found = Job.here(STEP)
    assert (found.rank, found.local_rank, found.world_size) == (5, 1, 16)
    assert (found.num_hosts, found.host) == (4, "gpu007")
    assert 20000 <= found.port < 40000
    named = Job.here(STEP | {"MASTER_ADDR": "head", "MASTER_PORT": "99"})
    assert (named.host, named.port) == ("head", 99)


def test_a_step_of_one_task_is_a_job_of_one_rank_if_it_says_so() -> None:
    """As the script of --launcher slurm does: it must not start ranks of its own."""
    found = Job.here(STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "WORLD_SIZE": "1",
                             "SLURM_STEP_NUM_NODES": "1"})  # fmt: skip
    assert (found.rank, found.world_size, found.num_hosts, found.launched) == (0, 1, 1, True)
    assert 20000 <= found.port < 40000


def test_two_steps_of_one_job_keep_their_stores_apart() -> None:
    one, other = Job.here(STEP), Job.here(STEP | {"SLURM_STEP_ID": "4"})
    assert one.port != other.port


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "4711"},  # a batch script
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
    ],
)
def test_what_starts_one_process_is_no_launcher(variables: dict[str, str]) -> None:
    assert Job.here(variables) == Job() and not Job().launched


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[007-009,012],login", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]n[003,007]", "rack1n003"),
        ("a-b-[10-12].cluster", "a-b-10.cluster"),
        ("", "127.0.0.1"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert launcher.first_host(nodelist) == host


def test_the_store_of_a_step_on_one_host_is_for_that_host() -> None:
    alone = Job.here(STEP | {"SLURM_STEP_NUM_NODES": "1"})
    assert alone.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("variables", "alone"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1"}, True),  # torchrun at a host's name
        ({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node1"}, False),
        ({"MASTER_ADDR": "node1"}, False),  # mpirun says nothing of hosts
        ({"MASTER_ADDR": "localhost"}, True),
    ],
)
def test_ranks_of_one_host_use_the_loopback_interface_wherever_their_store_is(
    variables: dict[str, str], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR", *ranks.LOOPBACK):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"RANK": "0", "WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    seen: list[str | None] = []
    monkeypatch.setattr(order, "serve", lambda *_: seen.append(os.environ.get(GLOO)))
    with pytest.MonkeyPatch.context() as kept:
        kept.setattr(os, "environ", dict(os.environ))
        launch.run("meshwise.launch:run", Workload(global_batch_size=1, seq_len=1), nproc=2)
    assert seen == (["lo"] if alone else [None])


def test_srun_says_how_many_hosts() -> None:
    for nodes, alone in ("1", True), ("4", False):
        step = STEP | {"SLURM_STEP_NUM_NODES": nodes, "MASTER_ADDR": "gpu007"}
        place = Job.here(step)
        assert launcher.on_one_host(place, step) is alone


def test_an_interface_of_the_user_s_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(GLOO, "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    worker = ("-c", "import sys; sys.exit(7)")
    with pytest.raises(launch.RanksFailed, match="exited with code 7"):
        local.start(told(), 1, worker=worker)
    assert "NCCL_SOCKET_IFNAME=eth0: who reaches this interface" in caplog.text
    assert GLOO not in caplog.text


def told(**environment: str) -> order.WorkOrder:
    return order.WorkOrder(
        target="meshwise.launch:run",
        request=msgspec.Raw(b"{}"),
        threads=3,
        environment=environment,
    )


def test_ranks_meet_on_the_loopback_interface_unless_the_user_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ranks.LOOPBACK:
        monkeypatch.delenv(name, raising=False)
    found = local.variables(told(LOG="log of {rank}"), 1, 2, 4711)
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert (found["RANK"], found["WORLD_SIZE"], found["OMP_NUM_THREADS"]) == ("1", "2", "3")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "4711")
    assert found["LOG"] == "log of 1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert local.variables(told(), 1, 2, 4711)["GLOO_SOCKET_IFNAME"] == "eth0"


def test_ranks_import_from_the_working_directory_only_if_the_program_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    worker = ("-m", "meshwise.launch.worker")
    assert local._worker() == ("-P", *worker)
    monkeypatch.syspath_prepend(tmp_path)
    assert local._worker() == worker


def test_a_rank_imports_nothing_heavy_before_it_is_told_to_die_with_its_parent() -> None:
    code = "import sys; import meshwise.launch.worker; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "msgspec", "meshwise.spec"} & set(done.stdout.split())


def test_a_rank_whose_parent_is_gone_ends_at_once() -> None:
    command = [sys.executable, "-m", "meshwise.launch.worker", "no such request", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_number_of_ranks_that_the_launcher_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    request = Workload(global_batch_size=1, seq_len=1)
    with pytest.raises(ValueError, match="nproc = 4, but the launcher started 2 ranks"):
        launch.run("meshwise.launch:run", request, nproc=4)
