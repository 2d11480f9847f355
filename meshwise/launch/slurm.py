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
from meshwise.launch.slurm_script import body, script, swept
from meshwise.options.allocation import Allocation

_POLL_S = 2.0
_PATIENCE_S = 600.0  # while Slurm's controller is down
_OWN_CODES = (2, 3, 4)  # of the command, which said why; others are of ranks that were ended
_NO_LOG = 128 + 53  # Slurm's code of a host that could not open the logs
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
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(
            f"run_id = {folder.name!r}: {folder} is another job's; give another --run-id"
        ) from None
    path = folder / "script.sh"
    try:
        files.write_whole(path, text.encode())
        print(text, file=sys.stderr)
        answer = _asked("sbatch", "--parsable", str(path))
        job = answer.partition(";")[0]
        if not job.isdecimal():
            raise ValueError(f"sbatch: said {answer!r}, which is no job's number")
    except ValueError:
        shutil.rmtree(folder)
        raise
    print(f"job {job}: {path}", file=sys.stderr)
    if not place.wait:
        logs = shlex.join(f"{folder}/{job}.{suffix}" for suffix in ("err", "out"))
        print(f"follow it by tail -F {logs}", file=sys.stderr)
        return 0
    try:
        with signals.raised():
            return _followed(job, folder, errand.going_on, place.array)
    except (KeyboardInterrupt, signals.Ended):
        with signals.held():
            done = subprocess.run(["scancel", job], check=False)
        print(f"job {job} {'goes on' if done.returncode else 'was cancelled'}", file=sys.stderr)
        raise


def _followed(job: str, folder: Path, going_on: Sequence[str], array: str | None) -> int:
    """Print the job's output until it ends, of an array each job's as it ends. Return the exit
    code; RanksFailed says how else it ended."""
    tails, before = _Tails(folder, array), ""
    while True:
        found = _patiently(job)
        waiting = [one for one in found if one.state in _WAITING]
        tails.show(one for one in found if array is None or one not in waiting)
        if not waiting:
            break
        reasons = [one.reason for one in waiting if one.state == "PENDING"]
        now = f"job {job} waits{reasons[-1]}" if reasons else f"job {job} runs"
        if now != before:
            print(now, file=sys.stderr)
        before = now
        time.sleep(_POLL_S)
    time.sleep(_POLL_S)  # a shared file system may show the last lines late
    for one in found:
        log = folder / f"{one.name}.out"
        if one.began and one.code != _NO_LOG and not files.appeared(log, inside=folder):
            print(f"{log}: not seen here; look on the job's hosts", file=sys.stderr)
    tails.show(found)
    bad = [one for one in found if one.state != "COMPLETED"]
    said = f"job {job}: {_ends(bad, tails)}"
    if any(one.code != _NO_LOG for one in bad):
        said += f"; logs are in {folder}"
        said += f"; {' '.join(going_on)} goes on" if going_on else ""
    if any(one.state != "FAILED" or one.code not in _OWN_CODES for one in bad):
        raise RanksFailed(said)
    if bad and array:
        print(f"error: {said}", file=sys.stderr)
    return max((one.code for one in bad), default=0)


class _State(NamedTuple):
    """A job, or a job of an array. ``name``: of its logs. ``reason``: of its waiting."""

    name: str
    state: str
    reason: str
    code: int
    began: bool


def _ends(bad: Iterable[_State], tails: "_Tails") -> str:
    """Say how jobs that did not succeed ended; of an array with their values."""
    ends = dict[str, list[str]]()
    for one in bad:
        how = one.state
        if one.code == _NO_LOG:
            how += f" before it wrote a line: its hosts may not see {tails.folder}"
        elif how == "FAILED":
            how += f", exit code {one.code}"
        ends.setdefault(how, []).append(tails.value(one))
    return "; ".join(
        f"{tails.flag} = {', '.join(values)}: {how}" if tails.flag else how
        for how, values in ends.items()
    )


def _patiently(job: str) -> list[_State]:
    """Return what became of a job, although Slurm's controller may not answer for some minutes."""
    limit, is_said = time.monotonic() + _PATIENCE_S, False
    while True:
        try:
            return _states(job)
        except ValueError as error:
            if time.monotonic() > limit:
                raise ValueError(f"job {job} is not followed any longer: {error}") from None
            if not is_said:
                print(f"job {job}: {error}; asking again", file=sys.stderr)
            is_said = True
        time.sleep(_POLL_S)


def _states(job: str) -> list[_State]:
    """Return what became of a job, or of all jobs of an array. Text of the user's, such as a name,
    is only ever behind what is matched on its line."""
    found = []
    for text in re.split(r"\n(?=JobId=)", _asked("scontrol", "show", "job", job)):
        line = re.match(r"JobId=(\d+)(?: ArrayJobId=(\d+) ArrayTaskId=(\S+))? ", text)
        state = re.search(r"^ +JobState=(\S+) Reason=(\S+)", text, re.M)
        code = re.search(r"^ +Requeue=.* ExitCode=(\d+):(\d+)", text, re.M)
        if not (line and state and code):
            raise ValueError(f"scontrol: says nothing of job {job}")
        name = f"{line[2]}_{line[3]}" if line[2] else line[1]
        worst = int(code[1]) or (int(code[2]) and 128 + int(code[2]))
        reason = "" if state[2] == "None" else f": {state[2]}"
        began = re.search(r"^ +BatchHost=", text, re.M) is not None
        found.append(_State(name, state[1], reason, worst, began))
    return sorted(found, key=lambda one: (len(one.name), one.name))


class _Tails:
    """Files of output that grow while a job runs, several for an array, each under its value."""

    def __init__(self, folder: Path, array: str | None) -> None:
        self.folder, self.last = folder, ""
        self.flag, self.values = swept(array) if array else ("", [])
        self.read: dict[Path, int] = {}

    def value(self, one: _State) -> str:
        """Return a job's value of an array; of jobs that never began together "the rest"."""
        number = one.name.partition("_")[2]
        return self.values[int(number)] if number.isdecimal() else "the rest" * bool(number)

    def show(self, found: Iterable[_State]) -> None:
        for one in found:
            for suffix, stream in (("out", sys.stdout), ("err", sys.stderr)):
                with contextlib.suppress(FileNotFoundError):
                    self._more(self.folder / f"{one.name}.{suffix}", stream, self.value(one))

    def _more(self, path: Path, stream: TextIO, value: str) -> None:
        with path.open("rb") as file:
            file.seek(self.read.get(path, 0))
            more = file.read()
            self.read[path] = file.tell()
        if more and value != self.last:
            print(f"--- {self.flag} = {value}", file=sys.stderr, flush=True)
            self.last = value
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
