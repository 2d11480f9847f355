"""Slurm: a command as a batch job, or as a step of the allocation that this process is in."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from meshwise import files, signals
from meshwise.launch.errand import Errand, image
from meshwise.launch.failed import RanksFailed
from meshwise.launch.slurm_script import body, script
from meshwise.options.allocation import Allocation

_POLL_S = 2.0
_WAITING = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "SIGNALING",
            "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "STAGE_OUT", "STOPPED")  # fmt: skip
_NODES = "sinfo -N -o '%N %c %m %G %f' lists each node's cores, memory, GPUs and features"
_HINTS = {
    "account": "sacctmgr show associations lists yours",
    "partition": "sinfo lists the partitions",
    "time limit": "scontrol show partition says each MaxTime",
    "(gres)": f"too many GPUs, or none known to Slurm: {_NODES}",
    **dict.fromkeys(("node", "processors", "feature"), _NODES),
}


def start(errand: Errand, place: Allocation) -> int:
    """Run in the allocation that there is, else submit a script. Return the exit code."""
    if errand.is_dry:
        print(script(errand, place, errand.folder(place)), end="")
        return 0
    _check_container(place)
    if "SLURM_JOB_ID" in os.environ:
        if place.array is not None:
            raise ValueError("array: this is an allocation already; leave --array out, or exit it")
        return _step(body(errand, place))
    return _submitted(errand, place)


def _check_container(place: Allocation) -> None:
    """Refuse an image that is a file which is not here, as hosts need what this one has; and pyxis
    if srun is without it."""
    found, is_pyxis = image(place), place.container_engine == "pyxis"
    if found is None:
        return
    is_file = found.startswith(("/", "./")) or not (is_pyxis or "://" in found)
    if is_file and not Path(found).exists():
        raise ValueError(
            f"container_image = {found!r}: no such file here; name one that all hosts see, or an "
            "image of a registry"
        )
    _program("srun")
    if is_pyxis and "--container-image" not in _asked("srun", "--help"):
        raise ValueError(
            "container_engine = 'pyxis': srun has no --container-image here, which pyxis adds; "
            "install it, or give --container-engine apptainer"
        )


def _step(text: str) -> int:
    """Run the body in this allocation; signals end the ranks first."""
    _program("srun")
    process = subprocess.Popen(["bash", "-c", text], start_new_session=True)
    try:
        with signals.raised():
            return process.wait()
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise


def _submitted(errand: Errand, place: Allocation) -> int:
    """Write the script, show it, submit it, and follow it if asked."""
    _program("sbatch")
    folder = errand.folder(place)
    text = script(errand, place, folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "script.sh"
    files.write_whole(path, text.encode())
    print(text, file=sys.stderr)
    job = _asked("sbatch", "--parsable", str(path)).partition(";")[0]
    print(f"job {job}: {path}", file=sys.stderr)
    if not place.wait:
        logs = shlex.join(f"{folder}/{job}.{suffix}" for suffix in ("err", "out"))
        print(f"follow it by tail -F {logs}", file=sys.stderr)
        return 0
    try:
        with signals.raised():
            return _followed(job, folder, errand.going_on)
    except BaseException:
        subprocess.run(["scancel", job], check=False)
        raise


def _followed(job: str, folder: Path, going_on: Sequence[str]) -> int:
    """Print the job's output until it ends; return its exit code. RanksFailed says how else."""
    tails, before = _Tails(folder), ""
    while True:
        found, reason = _states(job)
        if reason != before:
            print(f"job {job} waits: {reason}" if reason else f"job {job} runs", file=sys.stderr)
        before = reason
        tails.show(one.name for one in found)
        if not any(one.state in _WAITING for one in found):
            break
        time.sleep(_POLL_S)
    time.sleep(_POLL_S)  # a shared file system may show the last lines late
    for one in found:
        log = folder / f"{one.name}.out"
        if one.began and not files.appeared(log):
            print(f"{log}: not seen here; look on the job's hosts", file=sys.stderr)
    tails.show(one.name for one in found)
    odd = [one.state for one in found if one.state not in ("COMPLETED", "FAILED")]
    if odd:
        then = f"; {' '.join(going_on)} goes on" if going_on else ""
        raise RanksFailed(f"job {job}: {odd[0]}; logs are in {folder}{then}")
    return max((one.code for one in found), default=0)


class _State(NamedTuple):
    """A job, or a job of an array. ``name``: of its logs."""

    name: str
    state: str
    code: int
    began: bool


def _states(job: str) -> tuple[list[_State], str]:
    """Return what became of a job, or of all jobs of an array; and why it waits, if so."""
    found, reason = [], ""
    for line in _asked("scontrol", "--oneliner", "show", "job", job).splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        code, _, killed_by = facts["ExitCode"].partition(":")
        task = facts.get("ArrayTaskId")
        name = f"{facts['ArrayJobId']}_{task}" if task else facts["JobId"]
        worst = int(code) or (int(killed_by) and 128 + int(killed_by))
        found.append(_State(name, facts["JobState"], worst, facts.get("BatchHost") is not None))
        if facts["JobState"] == "PENDING":
            reason = facts["Reason"]
    return found, reason


class _Tails:
    """Files of output that grow while a job runs, several for an array."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read: dict[Path, int] = {}

    def show(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            for suffix, stream in (("out", sys.stdout), ("err", sys.stderr)):
                with contextlib.suppress(FileNotFoundError):
                    self._more(self.folder / f"{name}.{suffix}", stream)

    def _more(self, path: Path, stream: TextIO) -> None:
        with path.open("rb") as file:
            file.seek(self.read.get(path, 0))
            more = file.read()
            self.read[path] = file.tell()
        print(more.decode(errors="replace"), end="", file=stream, flush=True)


def _program(name: str) -> None:
    if shutil.which(name) is None:
        raise ValueError(
            f"{name}: not found here; run this where Slurm's commands are, or leave --launcher out"
        )


def _asked(*command: str) -> str:
    """Return what a command of Slurm's prints; ValueError with its words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [re.sub(r"^\w+: (error|fatal): ", "", line) for line in done.stderr.splitlines()]
        said = f"{command[0]}: {'; '.join(lines) or f'exit code {done.returncode}'}"
        hint = next((f"; {hint}" for word, hint in _HINTS.items() if word in said.lower()), "")
        raise ValueError(f"{said}{hint}")
    return done.stdout.strip()
