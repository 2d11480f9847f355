"""Runs cases within limits: many in one fork of a process that has imported everything.

A case is (seed, kind, number) and nothing else. What it may do: end with a documented exit code,
say at most one error line of 300 characters, print no control characters, use 10 CPU seconds and
1 GiB, and write into its own folder alone. Between cases the fork's folder, environment, output,
signals and limits are as before the first. A case that ends its fork is known by that: it has not
reported, all before it have, and those behind it run in a new fork.
"""

import contextlib
import faulthandler
import gc
import json
import logging
import os
import random
import re
import resource
import select
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.fuzz import inputs
from tests.fuzz.mutate import mutant

CPU_S, WALL_S, MEMORY_BYTES = 10, 120, 2**30
CODES = {0, 2, 3, 4}
LONGEST = 300
DRAWN = 20  # every twentieth case that draws
SELDOM = 0.04  # of a kind's cases, for commands that take long
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


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
        seldom = chosen.seldom and rng.random() < SELDOM
        words = rng.choice(chosen.seldom if seldom else chosen.commands).split()
        return data, [word.replace("{at}", chosen.place) for word in words]
    try:
        words = json.loads(data)
    except (ValueError, RecursionError):
        words = data.decode(errors="replace").split()
    known = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return b"", [word.replace("\0", "") for word in words[1:]] if known else []


class Place:
    """A folder that is before each case what it was first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        self._seen = self._states()

    def restore(self) -> None:
        """Undo what a case did: what is new goes, what is changed or gone is written again."""
        now = self._states()
        for name in sorted(now.keys() - self._seen.keys(), reverse=True):
            path = self.folder / name
            path.rmdir() if now[name] == () else path.unlink()
        for name, state in self._seen.items():
            if now.get(name) != state:
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir(exist_ok=True) if state == () else path.write_bytes(self._held[name])
        self._seen = self._states()

    def _states(self) -> dict[str, tuple[int, ...]]:
        """Every path; what tells that a file was written; a folder has nothing to tell."""
        found, folders = {}, [""]
        while folders:
            above = folders.pop()
            with os.scandir(self.folder / above) as entries:
                for entry in entries:
                    name = os.path.join(above, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        found[name] = ()
                        folders.append(name)
                    else:
                        state = entry.stat(follow_symlinks=False)
                        found[name] = (state.st_mtime_ns, state.st_size, state.st_ino)
        return found


def prepare(folder: Path) -> Place:
    """Import what the commands need, before the first fork, and make the session they start in."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a fork cannot use what its parent has opened
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
    place = Place(folder)
    inputs.kinds()
    with contextlib.chdir(folder), _silence():
        for line in inputs.WARM:
            call(line.split())
    logging.getLogger("meshwise").handlers = [logging.NullHandler()]
    place.restore()
    gc.freeze()
    return place


@contextlib.contextmanager
def _drawn(really: bool) -> Iterator[None]:
    """What a figure shows is always worked out; turning it into a picture takes ten times that."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    def print_svg(_: object, file: Any, **__: object) -> None:
        file.write('<svg width="1"></svg>')

    def savefig(_: object, file: Any, **__: object) -> None:
        file.write(b"PNG")

    with contextlib.ExitStack() as stack:
        if not really:
            stack.enter_context(mock.patch.object(FigureCanvasSVG, "print_svg", print_svg))
            stack.enter_context(mock.patch.object(Figure, "savefig", savefig))
        yield


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with (
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        yield


def run(place: Place, seed: int, kind: str, numbers: Iterable[int]) -> list[Ended]:
    """Cases one after another in a fork; behind one that ended its fork, in a new one."""
    numbers, found = list(numbers), []
    while len(found) < len(numbers):
        found += _fork(place, seed, kind, numbers[len(found) :])
    return found


def _fork(place: Place, seed: int, kind: str, numbers: Sequence[int]) -> list[Ended]:
    """The cases that one fork came to, of which the last may have ended it."""
    told, tell = os.pipe()
    with tempfile.TemporaryFile() as heard:
        if not (child := os.fork()):
            os.close(told)  # writing ends this process when the other has ended
            _child(place, seed, kind, numbers, heard.fileno(), tell)
        os.close(tell)
        with open(told, "rb", buffering=0) as pipe:
            found = list(_heard(pipe, kind, len(numbers)))
        with contextlib.suppress(ProcessLookupError):  # its own children, too
            os.killpg(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        if len(found) == len(numbers):
            return found
        number, cpu_s = numbers[len(found)], usage.ru_utime + usage.ru_stime
        heard.seek(0)
        _, words = case(seed, kind, number)
        ended = Ended(
            kind, number, tuple(words), os.waitstatus_to_exitcode(status),
            cpu_s - sum(e.cpu_s for e in found), 0, heard.read(2**20).decode(errors="replace"), "",
        )  # fmt: skip
        return [*found, ended._replace(wrong=_wrong(ended) or "ended its process")]


def _heard(pipe: Any, kind: str, most: int) -> Iterator[Ended]:
    """What a fork reports, until it has reported all, has ended or is silent for ``WALL_S``."""
    begun = b""
    while most and select.select([pipe], [], [], WALL_S)[0] and (data := pipe.read(2**16)):
        *lines, begun = (begun + data).split(b"\n")
        for line in lines:
            number, words, *rest = json.loads(line)
            ended = Ended(kind, number, tuple(words), *rest, wrong="")
            yield ended._replace(wrong=_wrong(ended))
            most -= 1


def _child(
    place: Place, seed: int, kind: str, numbers: Sequence[int], heard: int, tell: int
) -> None:
    try:
        faulthandler.disable()  # pytest's
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(heard, 1)
        os.dup2(heard, 2)
        home = {"HOME": str(place.folder), "TMPDIR": str(place.folder)}
        environment = dict(os.environ) | home | {"NO_COLOR": "1", "COLUMNS": "120"}
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**28, 2**28))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        before = _memory("VmRSS")
        for number in numbers:
            place.restore()
            data, words = case(seed, kind, number)
            if at := inputs.kinds()[kind].place:
                (place.folder / at).parent.mkdir(parents=True, exist_ok=True)
                (place.folder / at).write_bytes(data)
            os.chdir(place.folder)
            os.environ.clear()
            os.environ |= environment
            os.ftruncate(heard, 0)
            os.lseek(heard, 0, os.SEEK_SET)
            with _drawn(number % DRAWN == 0):
                code, cpu_s = _within_limits(words)
            memory = max(0, _memory("VmHWM") - before)
            said = os.pread(heard, 2**20, 0).decode(errors="replace")
            line = json.dumps([number, words, code, cpu_s, memory, said]) + "\n"
            with open(tell, "wb", closefd=False) as pipe:
                pipe.write(line.encode())
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(99)


def _within_limits(words: list[str]) -> tuple[int, float]:
    """The exit code and the CPU seconds of a command, its children's included."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    start = _cpu_s()
    resource.setrlimit(resource.RLIMIT_CPU, (int(start) + CPU_S + 1, resource.RLIM_INFINITY))
    held = _memory("VmSize") + 2 * MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (held, resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")  # the peak, VmHWM, begins anew
    with (
        open(1, "w", encoding="utf-8", closefd=False) as sys.stdout,
        open(2, "w", encoding="utf-8", closefd=False, buffering=1) as sys.stderr,
        warnings.catch_warnings(),
    ):
        try:
            code = call(words)
        except BaseException:
            traceback.print_exc()
            code = 99
    return code, _cpu_s() - start


def _cpu_s() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _memory(name: str) -> int:
    """A line of this process's status in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:", 1)[1].split(None, 1)[0]) * 1024


def call(words: list[str]) -> int:
    """The exit code of a command."""
    from meshwise.cli import app

    try:
        app.main(words)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 99


def _wrong(ended: Ended) -> str:
    """What the case did that it may not."""
    code, said = ended.code, ended.said
    if "Traceback (most recent call last)" in said:
        return "a traceback"
    if ended.memory_bytes > MEMORY_BYTES:
        return f"took {ended.memory_bytes / 2**20:.0f} MiB"
    if code == -signal.SIGXCPU or ended.cpu_s > CPU_S:
        return f"took {ended.cpu_s:.1f} CPU s"
    if code == -signal.SIGKILL:
        return f"still ran after {WALL_S} s"
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
