"""Slurm: a command as a batch job, or as a step of the allocation that this process is in."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from meshwise import files, signals
from meshwise.launch.errand import Errand
from meshwise.launch.failed import RanksFailed
from meshwise.launch.slurm_script import body, script
from meshwise.options.allocation import Allocation

_POLL_S = 2.0
_WAITING = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "SIGNALING",
            "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "STAGE_OUT", "STOPPED")  # fmt: skip
_HINTS = {
    "partition": "sinfo lists the partitions",
    "account": "sacctmgr show associations lists yours",
    "node": "sinfo -N -l lists the nodes and what they have",
}


def start(errand: Errand, place: Allocation) -> int:
    """Run in the allocation that there is, else submit a script. Return the exit code."""
    if errand.is_dry:
        print(script(errand, place, errand.folder(place)), end="")
        return 0
    if "SLURM_JOB_ID" in os.environ:
        if place.array is not None:
            raise ValueError("array: this is an allocation already; leave --array out, or exit it")
        return _step(body(errand, place))
    return _submitted(errand, place)


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
        print(f"follow it by tail -F {folder}/{job}.err {folder}/{job}.out", file=sys.stderr)
        return 0
    try:
        with signals.raised():
            return _followed(job, folder)
    except BaseException:
        subprocess.run(["scancel", job], check=False)
        raise


def _followed(job: str, folder: Path) -> int:
    """Print the job's output until it ends; return its exit code. RanksFailed says how else."""
    tails, before = _Tails(folder, job), ""
    while True:
        found, reason = _states(job)
        if reason != before:
            print(f"job {job} waits: {reason}" if reason else f"job {job} runs", file=sys.stderr)
        before = reason
        tails.show()
        if not any(state in _WAITING for state, _ in found):
            break
        time.sleep(_POLL_S)
    time.sleep(_POLL_S)  # a shared file system may show the last lines late
    tails.show()
    odd = [state for state, _ in found if state not in ("COMPLETED", "FAILED")]
    if odd:
        raise RanksFailed(f"job {job}: {odd[0]}; logs are in {folder}")
    return max((code for _, code in found), default=0)


def _states(job: str) -> tuple[list[tuple[str, int]], str]:
    """Return state and exit code of a job, or of all jobs of an array; and why it waits, if so."""
    found, reason = [], ""
    for line in _asked("scontrol", "--oneliner", "show", "job", job).splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        code, _, killed_by = facts["ExitCode"].partition(":")
        found.append((facts["JobState"], int(code) or (int(killed_by) and 128 + int(killed_by))))
        if facts["JobState"] == "PENDING":
            reason = facts["Reason"]
    return found, reason


class _Tails:
    """Files of output that grow while a job runs, several for an array."""

    def __init__(self, folder: Path, job: str) -> None:
        self.folder, self.job = folder, job
        self.read: dict[Path, int] = {}

    def show(self) -> None:
        for suffix, stream in (("out", sys.stdout), ("err", sys.stderr)):
            for path in sorted(self.folder.glob(f"{self.job}*.{suffix}")):
                self._more(path, stream)

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
