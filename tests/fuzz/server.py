"""Runs cases in forks of one process that has imported everything, within limits.

A case is (seed, kind, number) and nothing else. What it may do: end with a documented exit code,
say at most one error line of 300 characters, print no control characters, use 10 CPU seconds and
1 GiB, and write into its own folder alone.
"""

import contextlib
import gc
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.fuzz import inputs
from tests.fuzz.mutate import mutant

CPU_S, WALL_S, MEMORY_BYTES = 10, 120, 2**30
CODES = {0, 2, 3, 4}
LONGEST = 300
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Ended(NamedTuple):
    """How a case ended; ``wrong`` says what it may not do."""

    kind: str
    number: int
    command: tuple[str, ...]
    code: int
    cpu_s: float
    memory_bytes: int
    said: str
    wrong: str


def case(seed: int, kind: str, number: int) -> tuple[bytes, list[str]]:
    """The mutant and the command that reads it."""
    chosen, rng = inputs.kinds()[kind], random.Random(f"{seed}/{kind}/{number}")
    data = mutant(rng.choice(chosen.examples), chosen.form, rng)
    if chosen.form != "argv":
        return data, rng.choice(chosen.commands).split()
    try:
        words = json.loads(data)
    except ValueError:
        words = data.decode(errors="replace").split()
    known = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return b"", [word.replace("\0", "") for word in words[1:]] if known else []


def prepare(folder: Path) -> None:
    """Import what the commands need, before the first fork, and make the session they start in."""
    import matplotlib.pyplot
    import scipy.stats  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401

    from meshwise import launch
    from meshwise.cli import app  # noqa: F401

    def no_ranks(*_: object, **__: object) -> None:
        raise launch.RanksFailed("rank 0 was not started: this is a trial of inputs")

    launch.start = no_ranks  # type: ignore[assignment]
    matplotlib.use("svg")
    logging.getLogger("meshwise").addHandler(logging.NullHandler())
    for name, data in inputs.finished().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    inputs.kinds()
    with contextlib.chdir(folder), _silence():
        for words in (["show", "plan.json"], ["report"], ["measure", "gemm", "--dry-run"]):
            _call(words)
    logging.getLogger("meshwise").handlers = [logging.NullHandler()]
    gc.freeze()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with (
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        yield


def run(template: Path, seed: int, kind: str, number: int) -> Ended:
    """One case in a fork."""
    data, words = case(seed, kind, number)
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-case-") as name,
        tempfile.TemporaryFile() as heard,
    ):
        shutil.copytree(template, name, dirs_exist_ok=True)
        if place := inputs.kinds()[kind].place:
            path = Path(name) / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        words = [word.replace("{at}", place) for word in words]
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        child = os.fork()
        if not child:
            _child(name, words, heard.fileno())
        code, usage = _wait(child)
        heard.seek(0)
        said = heard.read(2**20).decode(errors="replace")
        cpu_s = usage.ru_utime + usage.ru_stime
        memory = max(0, usage.ru_maxrss - base) * 1024
        wrong = _wrong(code, cpu_s, memory, said)
        return Ended(kind, number, tuple(words), code, cpu_s, memory, said, wrong)


def _child(folder: str, words: list[str], heard: int) -> None:
    code = 99
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(heard, 1)
        os.dup2(heard, 2)
        os.chdir(folder)
        os.environ |= {"HOME": folder, "TMPDIR": folder, "NO_COLOR": "1", "COLUMNS": "120"}
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
        held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + 2 * MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**28, 2**28))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = _call(words)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _call(words: list[str]) -> int:
    from meshwise.cli import app

    try:
        app.main(words)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 99


def _wait(child: int) -> tuple[int, resource.struct_rusage]:
    limit = time.monotonic() + WALL_S
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status), usage
        if time.monotonic() > limit:
            os.killpg(child, signal.SIGKILL)
            limit = float("inf")
        time.sleep(0.001)


def _wrong(code: int, cpu_s: float, memory_bytes: int, said: str) -> str:
    if "Traceback (most recent call last)" in said:
        return "a traceback"
    if code == -signal.SIGXCPU or cpu_s > CPU_S:
        return f"took {cpu_s:.1f} CPU s"
    if code == -signal.SIGKILL:
        return f"still ran after {WALL_S} s"
    if memory_bytes > MEMORY_BYTES:
        return f"took {memory_bytes / 2**20:.0f} MiB"
    if code not in CODES:
        return f"exit code {code}"
    if found := _CONTROL.search(said):
        return f"prints the control character {found[0]!r}"
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if len(errors) > 1 or any(len(line) > LONGEST + len("error: ") for line in errors):
        return "an error of more than one line or 300 characters"
    if code == 2 and not errors:
        return "exit code 2 without a reason"
    return ""
