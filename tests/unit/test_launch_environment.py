"""Who started this process: torchrun, srun, or nobody."""

import pytest

pytest.importorskip("torch")

from meshwise import launch, ranks
from meshwise.spec import Workload

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
    found = ranks.environment(
        {
            "RANK": "9",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "16",
            "LOCAL_WORLD_SIZE": "8",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "1234",
        }
    )
    assert found == {
        "rank": 9,
        "local_rank": 1,
        "world_size": 16,
        "num_hosts": 2,
        "host": "10.0.0.1",
        "port": 1234,
    }


def test_srun_says_rank_and_the_first_host_keeps_the_store() -> None:
    found = ranks.environment(STEP)
    assert found is not None
    assert (found["rank"], found["local_rank"], found["world_size"]) == (5, 1, 16)
    assert (found["num_hosts"], found["host"]) == (4, "gpu007")
    assert 20000 <= found["port"] < 40000
    named = ranks.environment(STEP | {"MASTER_ADDR": "head", "MASTER_PORT": "99"})
    assert named is not None
    assert (named["host"], named["port"]) == ("head", 99)


def test_two_steps_of_one_job_keep_their_stores_apart() -> None:
    one, other = ranks.environment(STEP), ranks.environment(STEP | {"SLURM_STEP_ID": "4"})
    assert one is not None and other is not None
    assert one["port"] != other["port"]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "4711"},  # a batch script
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
    ],
)
def test_what_starts_one_process_is_no_launcher(variables: dict[str, str]) -> None:
    assert ranks.environment(variables) is None


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
    assert ranks.first_host(nodelist) == host


def test_a_number_of_ranks_that_the_launcher_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    request = Workload(global_batch_size=1, seq_len=1)
    with pytest.raises(ValueError, match="nproc = 4, but the launcher started 2 ranks"):
        launch.run("meshwise.launch:run", request, nproc=4)
