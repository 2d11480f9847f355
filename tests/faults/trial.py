"""One fault: start a job, strike one of its processes at a time by chance, see how all of it ends.

A trial is (seed, number) and nothing else: which job, which signal, whom it strikes and when. All
processes of a trial carry its name in their environment, so that none is overlooked.
"""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from meshwise import store
from meshwise.spec import RunInfo

ROOT = Path(__file__).resolve().parents[2]
MARK = "MESHWISE_TRIAL"
TIMEOUT = "10s"
PYTHON = (sys.executable, "-m")
TINY = '{"family":"gpt","hidden":64,"layers":4,"heads":4,"ffn":256,"vocab":128,"max_seq_len":32}'
TRAIN = (
    "run", "--model", TINY, "--seq-len", "32", "--steps", "60", "--warmup", "1",
    "--timeout", TIMEOUT,
)  # fmt: skip
JOBS: dict[str, tuple[str, ...]] = {
    "measure 2": ("measure", "collectives", "--nproc", "2", "--sizes", "4K..1M:x2",
                  "--budget", "20s", "--timeout", TIMEOUT),
    "measure 4": ("measure", "gemm", "--nproc", "4", "--square", "64", "--square", "128",
                  "--budget", "15s", "--timeout", TIMEOUT),
    "run dp2": (*TRAIN, "--layout", '{"dp":2,"zero":2}', "--global-batch-size", "2"),
    "run pp2 tp2": (*TRAIN, "--layout", '{"pp":2,"tp":2,"schedule":"1f1b","num_microbatches":2}'),
    "save dp3": (*TRAIN, "--layout", '{"dp":3,"zero":3}', "--save", "saved", "--save-every", "3"),
    "refit 2": ("refit", "--tensor-model-parallel-size", "2", "--num-layers", "2",
                "--num-benchmark-iterations", "40", "--timeout", TIMEOUT),
    "ring 2": ("measure", "ring", "2", "--seq-lengths", "256", "512", "1024", "--embed-dim", "64",
               "--num-heads", "4", "--timeout", TIMEOUT, "--benchmark-runs", "20"),
    "two jobs": (),
}  # fmt: skip
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGHUP", "SIGINT", "SIGTERM")
LATEST_S = 14.0  # when the fault comes, on an idle machine
LONGEST_S = 60.0  # from the fault to the end of all
ORPHANS_S = 5.0
ENDED_BY_PARENT = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}


class Fault(NamedTuple):
    job: str
    signal: str
    whom: str  # "parent" or "rank N"
    after_s: float


def fault(seed: int, number: int) -> Fault:
    rng = random.Random(f"{seed}/{number}")
    job = list(JOBS)[number % len(JOBS)]
    whom = rng.choice(("parent", "rank 0", "rank 1", "rank 1"))
    return Fault(job, rng.choice(SIGNALS), whom, round(LATEST_S * rng.random() ** 1.5, 2))


def trial(seed: int, number: int, folder: Path, scale: float) -> dict[str, Any]:
    """What was done and what came of it; ``wrong`` is empty if all is as it should be."""
    what, name = fault(seed, number), f"{os.getpid()}-{seed}-{number}"
    folder.mkdir(parents=True)
    parents = _started(what.job, folder, name)
    time.sleep(what.after_s * scale)
    struck = _strike(what, parents, name)
    seen = _samples(folder)
    stopped_parent = what.signal == "SIGSTOP" and what.whom == "parent"
    begin = time.monotonic()
    if stopped_parent and struck:
        time.sleep(3.0)
        parents[0].send_signal(signal.SIGCONT)
    if _stands(what) and struck:  # nobody ends it, as its parent would
        del parents[_index(what)]
    codes = _ends(parents, LONGEST_S * scale)
    took_s = time.monotonic() - begin
    left = _left(name, ORPHANS_S * scale)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    heard = (folder / "heard").read_text(errors="replace").replace(f"{ROOT}/", "")
    wrong = [*_about_ends(what, struck, codes, left, heard), *_about_files(what, folder, seen)]
    return {
        "number": number, **what._asdict(), "struck": struck, "codes": codes,
        "took_s": round(took_s, 1), "samples": len(seen), "said": heard.strip()[-300:],
        "wrong": wrong,
    }  # fmt: skip


def _started(job: str, folder: Path, name: str) -> list[subprocess.Popen[bytes]]:
    settings = {
        MARK: name, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR",
        "MESHWISE_SECRET": "a secret of thirty-two characters or more",
    }  # fmt: skip

    def started(*words: str, **more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*PYTHON, *words], cwd=folder, env=os.environ | settings | more,
            stdin=subprocess.DEVNULL, stdout=heard, stderr=heard, start_new_session=True,
        )  # fmt: skip

    with open(folder / "heard", "wb") as heard:
        if JOBS[job]:
            return [started("meshwise", *JOBS[job])]
        with socket.socket() as one, socket.socket() as two:
            for probe in (one, two):
                probe.bind(("127.0.0.1", 0))
            meeting, own = (probe.getsockname()[1] for probe in (one, two))
        words = ("tests.faults.apart", "trainer", f"127.0.0.1:{meeting}", "200")
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own)}
        trainers = [started(*words, RANK=str(rank), **place) for rank in range(2)]
        return [*trainers, started(words[0], "server", *words[2:])]


def _index(what: Fault) -> int:
    """Which of the processes that a trial starts itself."""
    return 0 if what.whom == "parent" else 1 + int(what.whom.split()[1])


def _stands(what: Fault) -> bool:
    """Whether it stops a process that nobody wakes and whose parent is the trial."""
    return what.signal == "SIGSTOP" and what.whom != "parent" and not JOBS[what.job]


def _strike(what: Fault, parents: list[subprocess.Popen[bytes]], name: str) -> bool:
    """Whether there was somebody to strike. A rank that has not started yet is waited for."""
    if what.whom == "parent" or not JOBS[what.job]:
        struck = parents[_index(what)]
        if struck.poll() is not None:
            return False
        struck.send_signal(getattr(signal, what.signal))
        return True
    while parents[0].poll() is None:
        for pid, rank in _processes(name).items():
            if rank == what.whom.split()[1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, getattr(signal, what.signal))
                    return True
        time.sleep(0.02)
    return False


def _processes(name: str) -> dict[int, str]:
    """All that live of a trial, each with its RANK (the program's own processes have none)."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if f"{MARK}={name}".encode() in variables and state not in "ZX":
                ranks = [v[5:].decode() for v in variables if v.startswith(b"RANK=")]
                found[int(process.name)] = ranks[0] if ranks else ""
    return found


def _ends(parents: list[subprocess.Popen[bytes]], limit_s: float) -> list[int | None]:
    limit = time.monotonic() + limit_s
    for parent in parents:
        with contextlib.suppress(subprocess.TimeoutExpired):
            parent.wait(max(0.1, limit - time.monotonic()))
    return [parent.poll() for parent in parents]


def _left(name: str, limit_s: float) -> list[int]:
    limit = time.monotonic() + limit_s
    while (found := list(_processes(name))) and time.monotonic() < limit:
        time.sleep(0.1)
    return found


def _about_ends(
    what: Fault, struck: bool, codes: list[int | None], left: list[int], heard: str
) -> list[str]:
    wrong = []
    single = bool(JOBS[what.job])
    if None in codes:
        wrong.append("did not end in time")
    if len(left) > (_stands(what) and struck) and "did not end in time" not in wrong:
        wrong.append(f"left {len(left)} processes")
    if single:
        ours = ENDED_BY_PARENT.get(what.signal, 0) if what.whom == "parent" else 4
        if codes[0] not in {0, ours if struck else 0, None}:
            wrong.append(f"exit code {codes[0]}")
        if "Traceback (most recent call last)" in heard:
            wrong.append("a traceback")
    elif 5 in codes:
        wrong.append("weights came wrong")
    return wrong


def _samples(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.glob("runs/*/samples.jsonl")
    }


def _about_files(what: Fault, folder: Path, seen: dict[str, bytes]) -> list[str]:
    wrong = []
    after = _samples(folder)
    for name, data in seen.items():
        if not after.get(name, b"").startswith(data[: data.rfind(b"\n") + 1]):
            wrong.append(f"{name} lost samples")
    for run in folder.glob("runs/*/run.json"):
        info = store.read(run, RunInfo)
        _, _, warnings = store.load(run.parent)
        if warnings:
            wrong.append(f"samples cannot be read: {warnings[0][:200]}")
        killed = what.whom == "parent" and what.signal == "SIGKILL"
        if not killed and (not info.ended or info.status == "running"):
            wrong.append(f"{run.parent.name} is said to be {info.status!r}, without an end")
    if (folder / "saved" / "checkpoint.json").exists():
        shown = subprocess.run(
            [*PYTHON, "meshwise", "show", "saved"], cwd=folder, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        if shown.returncode:
            wrong.append(f"checkpoint: {shown.stderr[-200:]}")
    if what.signal != "SIGKILL":
        found = [p.name for p in folder.iterdir() if re.match(r"meshwise-|\.meshwise-", p.name)]
        wrong += [f"left the temporary {name}" for name in found]
    return wrong
