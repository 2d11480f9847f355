"""Ranks on this host: start them, watch them, end them all.

In: an order and a number of ranks. Out: nothing, or ``RanksFailed``. Only this host's users can
reach the ranks' sockets: the store, which this process holds, gloo and NCCL use the loopback
interface. The thread that starts ranks waits for them, since the kernel kills them when it ends.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshwise import files, signals
from meshwise.launch import cache, failures, keeper, scratch
from meshwise.launch.failed import RanksFailed
from meshwise.launch.order import WorkOrder
from meshwise.patience import turns

log = logging.getLogger("meshwise")

_ENDING_S = 3.0  # for a rank with a core of its own to end after SIGTERM
_DYING_S = 60.0  # for the kernel to end one: a driver may take long to free its memory
_POLL_S = 0.05
_WORKER = ("-m", "meshwise.launch.worker")
USUAL = {  # of every rank, unless the user says otherwise
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # end a process whose collective failed
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # the store also warns of timeouts that we report ourselves
    "KINETO_LOG_LEVEL": "99",  # the profiler tells of every start and stop
}
_ENDED = (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED)


def start(order: WorkOrder, nproc: int, *, worker: Sequence[str] = ()) -> None:
    """Carry out the order on ``nproc`` ranks. Signals end the ranks, then act as usual.

    ``worker``: arguments to Python that start one rank, before the order's path and our process id.
    """
    from meshwise import ranks  # imports torch, which takes seconds: before signals are held

    if elsewhere := [n for n in ranks.LOOPBACK if os.environ.get(n, "lo").lstrip("=") != "lo"]:
        said = ", ".join(f"{name}={os.environ[name]}" for name in elsewhere)
        log.warning("%s: who reaches this interface reaches the ranks; unset it for lo", said)
    running = _Processes()
    with signals.held() as held, scratch.folder() as folder, keeper.beside() as groups:
        path = folder / "order.json"
        files.write_whole(path, msgspec.json.encode(order), sync=False)
        # torch's symmetric memory opens sockets in TMPDIR, with names that others can predict
        store, kept = ranks.hold_store(), cache.variables(folder) | {"TMPDIR": str(folder)}
        command = [sys.executable, *(worker or _worker()), str(path), str(os.getpid())]
        try:
            for rank in range(nproc):
                with signals.blocked():  # the worker unblocks them once they end it at once
                    started = subprocess.Popen(
                        command,
                        env=os.environ | kept | variables(order, rank, nproc, store.port),
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,  # Ctrl-C is for us; children join its group
                    )
                running.processes.append(started)
                with contextlib.suppress(BrokenPipeError):  # somebody ended the keeper
                    groups.write(b"%d\n" % started.pid)
            failed = running.wait(folder, order.patience.limits(nproc)[0], held)
        finally:
            running.end()
        if failed:
            raise failures.explain(failures.read(folder), running.codes, running.killed)
        if held.number is not None:
            raise RanksFailed(f"the ranks were {signals.describe(held.number)}")


def variables(order: WorkOrder, rank: int, nproc: int, port: int) -> dict[str, str]:
    """Return the variables to set for a rank. Of the usual ones the user's own values win."""
    from meshwise import ranks

    usual = {**ranks.LOOPBACK, **USUAL}
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": order.threads,
    }
    return {
        **{name: os.environ.get(name, value) for name, value in usual.items()},
        **{name: str(value) for name, value in place.items()},
        **{name: text.replace("{rank}", str(rank)) for name, text in order.environment.items()},
    }


def _worker() -> tuple[str, ...]:
    """Return the arguments that start a rank. It imports from the working directory, which others
    may share, only if this process does."""
    return _WORKER if {"", os.getcwd()} & {*sys.path} else ("-P", *_WORKER)


class _Processes:
    """The ranks' processes. ``codes``: exit codes from subprocess (-9 is SIGKILL) of ranks that
    ended without being told to, first to last. ``killed``: ranks that did not answer."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.codes: dict[int, int] = {}
        self.killed: set[int] = set()

    def wait(self, folder: Path, timeout_s: float, held: signals.HeldSignals) -> bool:
        """Wait until all are done, or a signal came. Return True as soon as one ended otherwise.

        A rank that stays stopped is killed: others notice it in most collectives, but NCCL waits
        for it forever while it sets up a connection. A rank that is done but does not end is
        killed, too.
        """
        seen_s = dict.fromkeys(range(len(self.processes)), time.monotonic())
        while held.number is None and len(self.codes) < len(self.processes):
            time.sleep(_POLL_S)
            states = {rank: _state(process) for rank, process in self._running().items()}
            ended = [rank for rank, state in states.items() if state in _ENDED]
            self.codes |= {rank: _reaped(self.processes[rank]) for rank in ended}
            done = failures.finished(failures.read(folder)) if self.codes else set()
            bad = {rank for rank, code in self.codes.items() if code} - self.killed
            if bad or self.codes.keys() - done:
                return True
            for rank in states.keys() - self.codes.keys():
                if states[rank] is None and rank not in done:
                    seen_s[rank] = time.monotonic()
                elif time.monotonic() - seen_s[rank] > timeout_s:
                    self._kill(rank)
        return False

    def end(self) -> None:
        """End the running ranks and all their children: SIGTERM first, SIGKILL after a while."""
        running = self._running()
        limit = time.monotonic() + _ENDING_S * turns(len(running))
        for process in running.values():
            _signal(process, signal.SIGTERM)
        while left := {r: p for r, p in running.items() if _state(p) not in _ENDED}:
            if time.monotonic() > limit:
                break
            time.sleep(_POLL_S)
        for rank in left:
            self._kill(rank)
        for rank, process in running.items():
            code = _reaped(process)
            if code not in (0, -signal.SIGTERM):
                self.codes[rank] = code

    def _running(self) -> dict[int, subprocess.Popen[bytes]]:
        return {rank: p for rank, p in enumerate(self.processes) if p.returncode is None}

    def _kill(self, rank: int) -> None:
        self.killed.add(rank)
        _signal(self.processes[rank], signal.SIGKILL)


def _state(process: subprocess.Popen[bytes]) -> int | None:
    """Return one of ``_ENDED``, or stopped; None while it runs. This does not reap it."""
    asked = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    try:
        found = os.waitid(os.P_PID, process.pid, asked)
    except ChildProcessError:  # reaped by the kernel: the user ignores SIGCHLD
        return os.CLD_EXITED
    return found.si_code if found else None


def _reaped(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code. First kill the rest of its group, while its number is still taken."""
    _signal(process, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_DYING_S)
    return -signal.SIGKILL


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
