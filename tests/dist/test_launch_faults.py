"""Jobs that go wrong: the launcher names the rank and its case, quickly, and leaves no process.

Each rank runs this file as ``python -m tests.dist.test_launch_faults <request.json> <parent>``.
"""

import atexit
import concurrent.futures
import contextlib
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from meshwise import ranks
from meshwise.launch import RanksFailed, failures, local, order, scratch, worker
from meshwise.patience import Patience
from meshwise.ranks import Ranks
from meshwise.spec import Record
from tests.pace import paced

HERE = "tests.dist.test_launch_faults"
NPROC = 2
WORKER = (  # as ours, for targets of this file
    "import sys; from meshwise.launch import worker; worker.main(*sys.argv[1:], package='tests')"
)
LEAVES = """
import os, sys
folder, told = os.environ["TMPDIR"], os.environ["TOLD"] + os.environ["RANK"]
assert os.stat(folder).st_mode & 0o777 == 0o700
open(folder + "/symm_mem-1", "a").close()
open(told, "w").write(folder)
sys.exit(7)
"""
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
    """Each rank starts a process, as compilers do, that would live on."""
    folder = Path(msgspec.json.decode(request, type=Fault).folder)
    child = subprocess.Popen(["sleep", "600"])
    (folder / f"child of {ranks.rank}.pid").write_text(str(child.pid))
    _ready(ranks, request)
    if (folder / "crash").exists() and ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    _reduce_until_the_end()


def compiles(ranks: Ranks, request: bytes) -> None:
    """Each rank has torch's compiling processes, and says which they are."""
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    pool = SubprocPool(1)
    folder = Path(msgspec.json.decode(request, type=Fault).folder)
    (folder / f"pool of {ranks.rank}.pid").write_text(str(pool.process.pid))
    (folder / f"worker of {ranks.rank}.pid").write_text(str(pool.submit(os.getpid).result()))
    _ready(ranks, request)
    _reduce_until_the_end()


def leaves(ranks: Ranks, request: bytes) -> None:
    """Rank 1 ends well before its work is done."""
    _ready(ranks, request)
    if ranks.rank == 1:
        os._exit(0)
    _reduce_until_the_end()


def does_not_end(ranks: Ranks, request: bytes) -> None:
    """Rank 1 does its work, but its process stays."""
    _ready(ranks, request)
    if ranks.rank == 1:
        atexit.register(time.sleep, 600)


def start(
    target: str,
    folder: Path,
    *,
    timeout_s: float | None = None,
    worker: tuple[str, ...] = ("-m", HERE),
) -> None:
    told = order.WorkOrder(
        target=f"{HERE}:{target}",
        request=msgspec.Raw(msgspec.json.encode(Fault(folder=str(folder)))),
        threads=1,
        patience=Patience(timeout_s),
    )
    local.start(told, NPROC, worker=worker)


def lives(pid: int) -> bool:
    """An orphan stays a zombie until init reaps it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def assert_no_rank_is_left(folder: Path, *, processes: int = NPROC) -> None:
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    assert len(pids) == processes
    assert not any(map(lives, pids))


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


def test_what_ranks_leave_in_their_temporary_folder_is_for_no_other_user_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's symmetric memory opens a socket symm_mem-<pid> in TMPDIR."""
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RanksFailed, match="exited with code 7"):
        start("works", tmp_path, worker=("-c", LEAVES))
    (folder,) = {path.read_text() for path in tmp_path.glob("told*")}
    assert Path(folder).parent == tmp_path and not Path(folder).exists()


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
    timeout_s = paced(2.0)
    with pytest.raises(RanksFailed) as failure:
        start("lingers", tmp_path, timeout_s=timeout_s)
    assert str(failure.value) == (
        "rank 0: TimeoutError: rank 1 (in case copy 1 GiB) had not arrived at a collective "
        f"after {timeout_s:g} s, during case all_reduce 4 KiB; the other ranks were ended"
    )
    assert_no_rank_is_left(tmp_path)


def test_a_rank_that_stays_stopped_is_named_and_ended(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failure:
        start("stops", tmp_path, timeout_s=paced(6.0))
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


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "crash").touch()
    with pytest.raises(RanksFailed, match="rank 1 died of SIGSEGV during case all_reduce 4 KiB"):
        start("loops", tmp_path)
    assert_no_rank_is_left(tmp_path, processes=2 * NPROC)


def test_a_rank_that_ends_well_amid_its_work_has_failed(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1 exited with code 0 during case all_reduce 4"):
        start("leaves", tmp_path)
    assert_no_rank_is_left(tmp_path)


def test_a_rank_that_is_done_and_does_not_end_is_ended(tmp_path: Path) -> None:
    start("does_not_end", tmp_path, timeout_s=paced(3.0))
    assert_no_rank_is_left(tmp_path)


@pytest.mark.parametrize("thread", ["helper", "pool"])
def test_ranks_live_as_long_as_the_thread_that_started_them(tmp_path: Path, thread: str) -> None:
    """The kernel ends them with their thread, so it waits for them."""
    if thread == "helper":
        helper = threading.Thread(target=start, args=("works", tmp_path), daemon=True)
        helper.start()
        helper.join()
    else:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(start, "works", tmp_path).result()
    assert (tmp_path / "result.json").exists()
    assert_no_rank_is_left(tmp_path)


def test_a_parent_killed_at_any_time_leaves_no_process(tmp_path: Path) -> None:
    """Ten times, from the first instant on: while ranks are begun, import, join, work."""
    rounds = 10
    done = subprocess.run(
        [sys.executable, "-m", HERE, "--killed", str(tmp_path), str(rounds)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=paced(600),
    )
    waited_s = [float(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(waited_s) == rounds
    assert max(waited_s) < paced(30)  # of a few milliseconds on an idle machine


def test_torch_s_compiling_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-m", HERE, "--start", "compiles", str(tmp_path)])
    limit = time.monotonic() + paced(120)
    while len(list(tmp_path.glob("?.pid"))) < NPROC:
        assert time.monotonic() < limit and parent.poll() is None
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    while any(map(lives, pids)):
        assert time.monotonic() < limit
        time.sleep(0.1)
    assert_no_rank_is_left(tmp_path, processes=3 * NPROC)


def _killed(folder: Path, rounds: int) -> None:
    """Start ranks and kill the process that did, ``rounds`` times; print how long anything of them
    lived on, the folder that each leaves behind swept with them."""
    chance = random.Random(7)
    for number in range(rounds):
        here = folder / str(number)
        here.mkdir()
        parent = os.fork()  # torch is imported already: ranks are started at once
        if parent == 0:
            os.environ["MESHWISE_TRIAL"] = tempfile.tempdir = str(here)
            start("loops", here, worker=("-c", WORKER))
            os._exit(0)
        time.sleep(chance.uniform(0, 0.1) if number % 2 == 0 else chance.uniform(0, 6))
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        killed_s = time.monotonic()
        tempfile.tempdir = str(here)
        while left := _left(here):
            assert time.monotonic() - killed_s < paced(60), left
            time.sleep(0.01)
        print(time.monotonic() - killed_s, flush=True)


def _left(here: Path) -> list[object]:
    """The folder, swept, and the processes of a trial. A rank forked and not yet executed has the
    environment of this process, but holds the lock of the folder: so the folder comes first."""
    scratch.sweep()
    return [*here.glob("meshwise-*")] or [*_with_environment(f"MESHWISE_TRIAL={here}")]


def _with_environment(entry: str) -> list[int]:
    """Living processes whose environment began with ``entry``: the ranks and all they started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return [pid for pid in found if lives(pid)]


def test_ranks_that_srun_started_join_by_themselves(tmp_path: Path) -> None:
    step = {"SLURM_STEP_NUM_TASKS": str(NPROC), "SLURM_STEP_ID": "0", "OMP_NUM_THREADS": "1"}
    step |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost,other"}
    command = [sys.executable, "-m", HERE, "--join", str(tmp_path), str(paced(20.0))]
    tasks = [
        subprocess.Popen(command, env=os.environ | step | {"SLURM_PROCID": str(rank)})
        for rank in range(NPROC)
    ]
    assert [task.wait(timeout=paced(60)) for task in tasks] == [0] * NPROC
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
        task.communicate(timeout=paced(60))[1].splitlines()[-1].partition("Failed: ")[2]
        for task in tasks
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


def test_a_rank_that_lost_rank_0_says_so_in_a_line(tmp_path: Path) -> None:
    """As srun starts them: rank 0 holds the store, and its disk is full after some samples."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    full = (4 << 10, resource.RLIM_INFINITY)
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "meshwise", "measure", "collectives", "all_reduce", "broadcast",
             "--sizes", "4K..1M:x2"],
            cwd=tmp_path,
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NPROC),
                              "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""},
            preexec_fn=None if rank else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, full),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NPROC)
    ]  # fmt: skip
    cause, after = [task.communicate(timeout=paced(120))[1] for task in tasks]
    assert "samples.jsonl cannot be written: File too large, during case" in cause.splitlines()[-1]
    assert re.fullmatch(
        r"error: rank 1: RuntimeError: rank 0 \(its store does not answer\) had not arrived at "
        r"(a collective|a gather), during case .*\n",
        after,
    ), after


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
        order.find("os:system")
    with pytest.raises(ValueError, match="target"):
        order.find("meshwise.launch:run()")
    assert order.find("meshwise.launch:run").__name__ == "run"


if __name__ == "__main__":
    if sys.argv[1] == "--killed":
        _killed(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "--start":
        start(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1] == "--join":
        request = msgspec.json.encode(Fault(folder=sys.argv[2]))
        for _ in range(2):  # a verb may join twice
            order.serve(works, request, Patience(paced(20.0), float(sys.argv[3])))
    else:
        worker.main(*sys.argv[1:], package="tests")
