"""Jobs that go wrong: the launcher names the rank and its case, quickly, and leaves no process.

Each rank runs this file as ``python -m tests.dist.test_launch_faults <request.json>``.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from meshwise import ranks
from meshwise.launch import RanksFailed, failures, local, worker
from meshwise.ranks import Ranks
from meshwise.spec import Record

HERE = "tests.dist.test_launch_faults"
NPROC = 2
pytestmark = pytest.mark.dist


class Fault(Record, kw_only=True):
    """Rank 1 commits the fault; every rank leaves its pid in ``folder``."""

    folder: str


def _ready(ranks: Ranks, request: bytes) -> Path:
    folder = Path(msgspec.json.decode(request, type=Fault).folder)
    ranks.at("all_reduce 4 KiB")
    (folder / f"{ranks.rank}.pid").write_text(str(os.getpid()))
    ranks.gather(None)
    return folder


def _reduce_until_the_end() -> None:
    buffer = torch.ones(1024)
    while True:
        dist.all_reduce(buffer)
        buffer.fill_(1.0)


def works(ranks: Ranks, request: bytes) -> None:
    folder = _ready(ranks, request)
    total = torch.tensor([ranks.rank + 1.0])
    dist.all_reduce(total)
    replies = ranks.gather("x" * 10 ** (ranks.rank + 1))
    print("standard output belongs to the parent")
    if ranks.rank == 0:
        found = [total.item(), [len(reply) for reply in replies], os.environ["OMP_NUM_THREADS"]]
        (folder / "result.json").write_bytes(msgspec.json.encode(found))


def raises(ranks: Ranks, request: bytes) -> None:
    _ready(ranks, request)
    if ranks.rank == 1:
        ranks.at("gemm 4096x4096x4096")
        raise ValueError("no such shape")
    _reduce_until_the_end()


def lingers(ranks: Ranks, request: bytes) -> None:
    """The faulty rank lives, but does not take part in the collective."""
    _ready(ranks, request)
    if ranks.rank == 1:
        ranks.at("copy 1 GiB")
        time.sleep(600)
    _reduce_until_the_end()


def stops(ranks: Ranks, request: bytes) -> None:
    """Nothing that the others do has a timeout which would tell them."""
    _ready(ranks, request)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


def stays_away(ranks: Ranks, request: bytes) -> None:
    _ready(ranks, request)
    if ranks.rank == 1:
        ranks.at("compiling")
        time.sleep(600)
    ranks.arrive("warm-up", timeout_s=1.0)


def loops(ranks: Ranks, request: bytes) -> None:
    _ready(ranks, request)
    _reduce_until_the_end()


def start(target: str, folder: Path, *, timeout_s: float = 20.0) -> None:
    errand = worker.Errand(
        target=f"{HERE}:{target}",
        request=msgspec.Raw(msgspec.json.encode(Fault(folder=str(folder)))),
        threads=1,
        timeout_s=timeout_s,
    )
    local.start(errand, NPROC, worker=("-m", HERE))


def assert_no_rank_is_left(folder: Path) -> None:
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    assert len(pids) == NPROC
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")  # an orphan stays a zombie until init reaps it
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_a_good_job_agrees_and_keeps_standard_output_free(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start("works", tmp_path)
    found = msgspec.json.decode((tmp_path / "result.json").read_bytes())
    assert found == [3.0, [10, 100], "1"]
    out, err = capfd.readouterr()
    assert out == ""
    said = "standard output belongs to the parent"
    assert err.count(said) == NPROC
    assert err.replace(said, "").split() == []  # the agent and the store say nothing
    assert_no_rank_is_left(tmp_path)


def test_an_error_on_one_rank_is_the_cause_not_what_it_does_to_the_others(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failure:
        start("raises", tmp_path)
    assert str(failure.value) == (
        "rank 1: ValueError: no such shape, during case gemm 4096x4096x4096; "
        "the other ranks were ended"
    )
    assert "in raises" in failure.value.details
    assert_no_rank_is_left(tmp_path)


def test_a_rank_missing_in_a_collective_is_named_with_its_case(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failure:
        start("lingers", tmp_path, timeout_s=2.0)
    assert str(failure.value) == (
        "rank 0: TimeoutError: rank 1 (in case copy 1 GiB) had not arrived at a collective "
        "after 2 s, during case all_reduce 4 KiB; the other ranks were ended"
    )
    assert_no_rank_is_left(tmp_path)


def test_a_rank_that_stays_stopped_is_named_and_ended(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failure:
        start("stops", tmp_path, timeout_s=6.0)
    assert str(failure.value) == (
        "rank 1 had stopped during case all_reduce 4 KiB; the other ranks were ended, "
        "rank 1 did not answer and was killed"
    )
    assert_no_rank_is_left(tmp_path)


def test_a_rank_missing_at_set_up_is_named_with_its_case_and_the_phase(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failure:
        start("stays_away", tmp_path)
    assert "rank 1 (in case compiling) had not arrived at warm-up after 1 s" in str(failure.value)
    assert_no_rank_is_left(tmp_path)


def test_the_end_of_the_parent_ends_all_ranks(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", HERE, "--start", str(tmp_path)],
        env=os.environ | {"TMPDIR": str(tmp_path)},  # what a killed parent leaves behind
    )
    limit = time.monotonic() + 60
    while len(list(tmp_path.glob("*.pid"))) < NPROC:
        assert time.monotonic() < limit and parent.poll() is None
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    time.sleep(0.2)  # the kernel ends orphans after their parent
    assert_no_rank_is_left(tmp_path)


def test_ranks_that_srun_started_join_by_themselves(tmp_path: Path) -> None:
    step = {"SLURM_STEP_NUM_TASKS": str(NPROC), "SLURM_STEP_ID": "0", "OMP_NUM_THREADS": "1"}
    step |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost,other"}
    command = [sys.executable, "-m", HERE, "--join", str(tmp_path), "20.0"]
    tasks = [
        subprocess.Popen(command, env=os.environ | step | {"SLURM_PROCID": str(rank)})
        for rank in range(NPROC)
    ]
    assert [task.wait(timeout=60) for task in tasks] == [0] * NPROC
    assert msgspec.json.decode((tmp_path / "result.json").read_bytes())[0] == 3.0


def test_a_rank_that_nobody_started_is_named(tmp_path: Path) -> None:
    """Each of two ranks waits for the other, at a port of its own."""
    tasks = []
    for rank in range(NPROC):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = {"RANK": rank, "WORLD_SIZE": NPROC, "MASTER_PORT": free.getsockname()[1]}
        variables = {name: str(value) for name, value in place.items()}
        tasks.append(
            subprocess.Popen(
                [sys.executable, "-m", HERE, "--join", str(tmp_path), "1.0"],
                env=os.environ | variables,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [
        task.communicate(timeout=60)[1].splitlines()[-1].partition("Failed: ")[2] for task in tasks
    ]
    assert said[0] == (
        "rank 0: TimeoutError: rank 1 (before its first case) had not arrived at the start "
        "after 1 s, before its first case"
    )
    assert said[1].startswith(
        "rank 1: TimeoutError: rank 0 or its launcher had not arrived: their store at 127.0.0.1:"
    )
    assert [task.returncode for task in tasks] == [1] * NPROC


def test_a_rank_that_stopped_with_the_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As srun starts them: the store is in rank 0."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)
    code = (
        "import torch.distributed as dist; "
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
        "print(store.port, flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(holder.stdout.readline()), is_master=False)
    other = Ranks(1, 1, 2, torch.device("cpu"), "gloo", store)
    holder.send_signal(signal.SIGSTOP)
    absent = r"rank 0 \(its store does not answer\) had not arrived at warm-up after 1 s"
    try:
        with pytest.raises(TimeoutError, match=absent):
            other.arrive("warm-up", timeout_s=1.0)
    finally:
        holder.kill()
        holder.wait()
        for thread in threading.enumerate():  # the store's client, which complains at length
            if thread.daemon:
                thread.join(1.0)


def test_the_cause_is_found_among_what_each_rank_left_behind() -> None:
    def fate(rank: int, **rest: object) -> failures.Fate:
        return failures.Fate(rank=rank, case="copy", **rest)  # type: ignore[arg-type]

    lost = {"state": "failed", "error": "rank 0: RuntimeError: Connection closed by peer"}
    own = {"state": "failed", "error": "rank 0: KeyError: 'x', during case copy"}
    running = {rank: fate(rank) for rank in range(3)}

    both = running | {0: fate(0, time_s=1.0, **lost), 2: fate(2, time_s=2.0, **own)}
    assert failures.explain(both, {0: 1, 2: 1, 1: -15}, ()).rank == 2
    survivor = running | {0: fate(0, time_s=1.0, **lost)}
    assert (
        failures.explain(survivor, {0: 1, 1: -11, 2: -15}, ())
        .args[0]
        .startswith("rank 1 died of SIGSEGV during case copy")
    )
    assert failures.explain(running, {1: 3}, ()).args[0].startswith("rank 1 exited with code 3")
    assert failures.explain(survivor, {0: 1, 1: -9}, {1}).rank == 0
    assert str(failures.explain(running, {1: -15, 0: -15}, ())).startswith("rank 1 died of SIGTERM")


def test_only_targets_of_the_package_are_found() -> None:
    with pytest.raises(ValueError, match=r"target = 'os:system': must be meshwise"):
        worker.find("os:system")
    with pytest.raises(ValueError, match="target"):
        worker.find("meshwise.launch:run()")
    assert worker.find("meshwise.launch:run").__name__ == "run"


if __name__ == "__main__":
    if sys.argv[1] == "--start":
        start("loops", Path(sys.argv[2]))
    elif sys.argv[1] == "--join":
        request = msgspec.json.encode(Fault(folder=sys.argv[2]))
        for _ in range(2):  # a verb may join twice
            worker.serve(works, request, timeout_s=20.0, setup_s=float(sys.argv[3]))
    else:
        worker.main(sys.argv[1], package="tests")
