"""The actor of one rank: it starts the rank's process on its node, and tells of it.

The process is ``python -m meshwise WORDS``, as torchrun would start it. However the actor ends, the
keeper kills the process and all that it started.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
from typing import IO

from meshwise.launch import keeper
from meshwise.launch.errand import Errand
from meshwise.options.allocation import Allocation
from meshwise.patience import turns

_ENDING_S = 3.0  # for a rank with a core of its own to end after SIGTERM
Told = tuple[list[tuple[bool, str]], int | None]


class Rank:
    """One rank. Calls come one after the other, on one thread."""

    def __init__(self) -> None:
        self.kept = contextlib.ExitStack()
        self.lines: queue.Queue[tuple[bool, str]] = queue.Queue()
        self.process: subprocess.Popen[str] | None = None
        self.readers: list[threading.Thread] = []

    def gpus(self) -> list[str]:
        """Return the ids of the GPUs that Ray gave this actor."""
        import ray

        return [str(each) for each in ray.get_runtime_context().get_accelerator_ids()["GPU"]]

    def port(self) -> int:
        """Return a free port of this host, for the store of the ranks."""
        with socket.socket() as found:
            found.bind(("", 0))
            return int(found.getsockname()[1])

    def start(self, errand: Errand, place: Allocation, variables: dict[str, str], cwd: str) -> str:
        """Start the process in the folder ``cwd``. Return what is wrong with that, or nothing."""
        try:
            self.process = subprocess.Popen(
                errand.program(place),
                cwd=cwd,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        self.kept.enter_context(keeper.beside()).write(b"%d\n" % self.process.pid)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            is_error = stream is self.process.stderr
            reader = threading.Thread(target=self._read, args=(stream, is_error), daemon=True)
            reader.start()
            self.readers.append(reader)
        return ""

    def _read(self, stream: IO[str], is_error: bool) -> None:
        for line in stream:
            self.lines.put((is_error, line))

    def told(self, wait_s: float) -> Told:
        """Return new lines, each with whether it is of standard error, and the exit code (-9 is
        SIGKILL), None while the process runs. Waits ``wait_s`` for the first line."""
        assert self.process is not None
        code, found = self.process.poll(), []
        if code is not None:
            self._signal(signal.SIGKILL)  # what it started holds the pipes open
            for reader in self.readers:
                reader.join()
        with contextlib.suppress(queue.Empty):
            found.append(self.lines.get(timeout=wait_s if code is None else 1e-3))
            while True:
                found.append(self.lines.get_nowait())
        return found, code

    def end(self) -> None:
        """End the process: SIGTERM first; after a while SIGKILL, also to all that it started."""
        if self.process is not None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_ENDING_S * turns())
            self._signal(signal.SIGKILL)
        self.kept.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
