"""Ranks on this host, through torch's elastic agent: start them, watch them, end them all.

In: an errand and a number of ranks. Out: nothing, or ``RanksFailed``. The agent notices a rank
that ends badly within 0.1 s, sends the others SIGTERM and waits 30 s for them; a stopped process
ignores that, so ``_end_stragglers`` kills it after 3 s.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
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
        with _quiet(), _own_signals(), _watch(folder) as killed:
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
def _watch(folder: Path) -> Iterator[set[int]]:
    """The ranks that had to be killed, filled while the body runs."""
    killed: set[int] = set()
    over = threading.Event()
    watcher = threading.Thread(target=_end_stragglers, args=(folder, over, killed), daemon=True)
    watcher.start()
    try:
        yield killed
    finally:
        over.set()
        watcher.join()


def _end_stragglers(folder: Path, over: threading.Event, killed: set[int]) -> None:
    """Once a rank has ended badly, kill every rank that still runs ``_PATIENCE_S`` later."""
    while not over.wait(0.2):
        fates = failures.read(folder).values()
        if any(f.state == "failed" or (f.state == "running" and not _runs(f.pid)) for f in fates):
            break
    if over.wait(_PATIENCE_S):
        return
    for fate in failures.read(folder).values():
        if _runs(fate.pid):
            killed.add(fate.rank)
            os.killpg(fate.pid, signal.SIGKILL)  # the agent gave each rank its own group


def _runs(pid: int) -> bool:
    """Whether ``pid`` is a child of ours that has not ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and int(fields[1]) == os.getpid()


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
