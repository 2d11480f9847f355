"""Ranks on this host, through torch's elastic agent: start them, watch them, end them all.

In: an errand and a number of ranks. Out: nothing, or ``RanksFailed``. The agent notices a rank
that ends badly within 0.1 s, sends the others SIGTERM and waits 30 s for them; a stopped process
ignores that, so ``_end_stragglers`` kills it after 3 s.
"""

import contextlib
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from meshwise.launch import failures
from meshwise.launch.worker import Errand

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torchelastic-events-null")
_PATIENCE_S = 3.0
_WORKER = ("-m", "meshwise.launch.worker")


def start(errand: Errand, nproc: int, *, worker: tuple[str, ...] = _WORKER) -> None:
    """Run the errand on ``nproc`` ranks to its end. Ctrl-C ends them and raises as usual.

    ``worker`` are the arguments to Python that start one rank, before the request's path.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
        folder = Path(name)
        request = folder / "request.json"
        request.write_bytes(msgspec.json.encode(errand))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            max_restarts=0,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        )
        with _quiet(), _own_signals(), _watch(request, nproc, errand.timeout_s) as killed:
            try:
                elastic_launch(config, sys.executable)(*worker, str(request))
            except ChildFailedError as error:
                codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
                raise failures.explain(failures.read(folder), codes, killed) from None
            except SignalException as caught:
                if caught.sigval == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise SystemExit(128 + caught.sigval) from None


@contextlib.contextmanager
def _watch(request: Path, nproc: int, timeout_s: float) -> Iterator[set[int]]:
    """The ranks that had to be killed, filled while the body runs."""
    killed: set[int] = set()
    over = threading.Event()
    arguments = (request, nproc, timeout_s, over, killed)
    watcher = threading.Thread(target=_end_stragglers, args=arguments, daemon=True)
    watcher.start()
    try:
        yield killed
    finally:
        over.set()
        watcher.join()


def _end_stragglers(
    request: Path, nproc: int, timeout_s: float, over: threading.Event, killed: set[int]
) -> None:
    """Kill a rank that stays stopped, and once one has ended badly all that run on after it.

    Others notice a stopped rank in most collectives, but NCCL waits for it without end while it
    sets up a connection.
    """
    pids: dict[int, int] = {}
    stopped_since: dict[int, float] = {}
    gone: list[int] = []
    while not over.wait(0.2):
        if len(pids) < nproc:
            pids |= _started(request)
        fates = failures.read(request.parent)
        lost = [rank for rank in gone if rank not in fates or fates[rank].state == "running"]
        if lost or any(fate.state == "failed" for fate in fates.values()):
            break
        for rank, pid in pids.items():
            if _process_state(pid) != "T":
                stopped_since.pop(rank, None)
            elif time.monotonic() - stopped_since.setdefault(rank, time.monotonic()) > timeout_s:
                _kill(rank, pid, killed)
        # a rank says that it is done before it ends: look at what it said after this
        gone = [rank for rank, pid in pids.items() if not _process_state(pid)]
    if not over.wait(_PATIENCE_S):
        for rank, pid in (pids | _started(request)).items():
            _kill(rank, pid, killed)


def _started(request: Path) -> dict[int, int]:
    """The processes of the ranks. One that never gets to say anything has one as well."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        with contextlib.suppress(OSError):
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(request) in arguments and _process_state(pid):
                rank = re.search(rb"(?:^|\0)RANK=(\d+)", (process / "environ").read_bytes())
                assert rank is not None
                found[int(rank[1])] = pid
    return found


def _kill(rank: int, pid: int, killed: set[int]) -> None:
    if _process_state(pid):
        killed.add(rank)
        os.killpg(pid, signal.SIGKILL)  # the agent gave each rank its own group


def _process_state(pid: int) -> str:
    """The kernel's letter for a child of ours (R, S, T for stopped, ...); empty when it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" or int(fields[1]) != os.getpid() else fields[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the agent's log lines from the terminal: ``RanksFailed`` says what matters."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    silence, before = logging.NullHandler(), [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(silence)
            logger.propagate = propagate


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Put back the signal handlers that the agent replaces (it does so on the main thread)."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
