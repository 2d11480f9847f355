"""Every device verb under every fault: it ends within the timeout, exits with a code that is not
zero, says in one line which rank it was and what that rank was doing, keeps the samples that were
finished and leaves no process.

A rank that stops amid a measurement is no end: the case is recorded, the ranks are started again.

The command line runs as users run it (this file started as a program is ``meshwise``), but for two
things: ranks time out after ``TIMEOUT_S``, and a file ``raise`` makes rank 1 raise an error, a file
``stop`` makes it stop, when it comes to its next case.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from meshwise import store
from meshwise.launch import failures
from meshwise.spec import Candidate, Cluster, Device, Layout, Model, RunInfo, Tier, Workload
from tests.pace import paced

pytestmark = pytest.mark.dist
HERE, ROOT = "tests.dist.test_faults", Path(__file__).resolve().parents[2]
TIMEOUT_S = paced(4.0)
ENDING_S = paced(
    8.0
)  # beyond the timeout: who is missing is asked, ranks that do not answer are killed
CLUSTER = Cluster(
    name="here",
    num_hosts=1,
    num_devices_per_host=2,
    device=Device(name="cpu", kind="cpu", memory_bytes=2**30),
    tiers=(Tier(name="host", num_devices=2),),
)
MODEL = Model(name="tiny", hidden=64, layers=2, heads=4, ffn=256, vocab=128, max_seq_len=32)
MARK = "MESHWISE_TRIAL"
PLANNED, RIVAL = Layout(dp=2, microbatch_size=2), Layout(tp=2, microbatch_size=4)


class Job:
    """A verb that runs in the folder ``here``; what its ranks leave behind is there as well."""

    def __init__(self, here: Path, arguments: str, *launcher: str, module: str = HERE) -> None:
        self.here = here
        settings = {"PYTHONPATH": str(ROOT), "TMPDIR": str(here), MARK: str(here)}
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "-m", module, *arguments.split()],
            cwd=here,
            env=os.environ | settings | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the whole group
        )

    def wait_for(self, ready: Callable[["Job"], bool]) -> None:
        limit = time.monotonic() + paced(300)
        while not ready(self):
            if self.process.poll() is not None or time.monotonic() > limit:
                pytest.fail("\n".join(["too late", *self.end(0)]))
            time.sleep(0.02)

    def end(self, within_s: float) -> list[str]:
        """The lines on standard error."""
        try:
            return self.process.communicate(timeout=within_s)[1].splitlines()
        except subprocess.TimeoutExpired:
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"no end after {within_s} s: {self.process.communicate()[1]}")

    def pids(self) -> dict[int, int | None]:
        """The processes of this job and their ranks; what starts ranks has none."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (process / "environ").read_text().split("\0")
                if f"{MARK}={self.here}" in environ:
                    ranks = [int(entry[5:]) for entry in environ if entry.startswith("RANK=")]
                    found[int(process.name)] = ranks[0] if ranks else None
        return found

    def kill(self, rank: int, number: signal.Signals) -> None:
        (pid,) = (pid for pid, its_rank in self.pids().items() if its_rank == rank)
        os.kill(pid, number)

    def interrupt_twice(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)
        time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def case(self) -> str:
        """What rank 1 is doing."""
        for folder in self.here.glob("meshwise-*"):
            with contextlib.suppress(OSError, KeyError):  # it has just ended
                return failures.read(folder)[1].case
        return ""

    def samples(self) -> list[str]:
        files = sorted(self.here.glob("runs/*/samples.jsonl"))
        return [line for file in files for line in file.read_text().splitlines()]

    def runs(self) -> list[RunInfo]:
        return [store.read(file, RunInfo) for file in sorted(self.here.glob("runs/*/run.json"))]


class Verb(NamedTuple):
    """``busy``: whether its ranks are amid their work; ``case``: what that work is called."""

    arguments: str
    busy: Callable[[Job], bool]
    case: str


class Fault(NamedTuple):
    """``said`` is the last line on standard error."""

    commit: Callable[[Job], None]
    said: str
    early: bool = False  # when ranks start, else amid their work
    code: int = 4
    status: str = "failed"


def in_a_step(job: Job) -> bool:
    return re.match("step [1-9]", job.case()) is not None


def past_the_first_layout(job: Job) -> bool:
    return len(job.runs()) == 2 and job.case() != ""


VERBS = {
    "measure": Verb(
        f"measure --timeout {TIMEOUT_S}s", lambda job: job.samples() != [], r"copy \S+ .iB"
    ),
    "run": Verb(f"run --steps 500 --timeout {TIMEOUT_S}s", in_a_step, r"step \d+( \(warm-up\))?"),
    "run two": Verb(
        f"run --steps 3 --rivals 1 --timeout {TIMEOUT_S}s", past_the_first_layout, ".+"
    ),
}
OTHERS = "; the other ranks were ended"
# the launcher says so or, when its time is over a little earlier, the rank that waits
STOPPED = (
    r"error: (rank 1 had stopped|rank 0: TimeoutError: rank 1 \(.+\) had not arrived at .+,) "
    f"(before its first case|during case CASE){OTHERS}, rank 1 did not answer and was killed"
)
KEPT = "(what was measured is in runs/.+, --resume continues|finished: (no layout|runs/.+-dp2-.+))"
FAULTS = {
    "killed": Fault(  # the rank that writes the samples
        lambda job: job.kill(0, signal.SIGKILL),
        f"error: rank 0 died of SIGKILL during case CASE{OTHERS}",
    ),
    "stopped": Fault(lambda job: job.kill(1, signal.SIGSTOP), STOPPED),
    "never joins": Fault(lambda job: job.kill(1, signal.SIGSTOP), STOPPED, early=True),
    "raises": Fault(
        lambda job: (job.here / "raise").touch(),
        f"error: rank 1: ValueError: no such shape, during case CASE{OTHERS}",
    ),
    "ctrl-c": Fault(
        lambda job: os.killpg(job.process.pid, signal.SIGINT),
        f"interrupted; {KEPT}",
        code=130,
        status="interrupted",
    ),
    "ctrl-c twice": Fault(  # the second is late, or all there is
        lambda job: job.interrupt_twice(),
        f"interrupted(; {KEPT})?",
        early=True,
        code=130,
        status="interrupted",
    ),
    "terminated": Fault(
        lambda job: job.process.terminate(),
        f"ended by SIGTERM; {KEPT}",
        code=143,
        status="interrupted",
    ),
    "hung up": Fault(  # the terminal is closed
        lambda job: os.killpg(job.process.pid, signal.SIGHUP),
        f"ended by SIGHUP; {KEPT}",
        early=True,
        code=129,
        status="interrupted",
    ),
}
MATRIX = [("run two" if each == "ctrl-c" else "run", each) for each in FAULTS]
ON_CASES = (
    "killed",
    "never joins",
    "raises",
    "ctrl-c",
    "terminated",
)  # stopped: a hung case, below
MATRIX += [("measure", each) for each in ON_CASES]


@pytest.fixture
def here(tmp_path: Path, plan_of) -> Path:  # type: ignore[no-untyped-def]
    plan = plan_of(MODEL, Workload(global_batch_size=4, seq_len=32), PLANNED)
    rival = Candidate(layout=RIVAL, prediction=plan.prediction)
    store.write(tmp_path / "cluster.toml", CLUSTER)
    store.write(tmp_path / "plan.json", msgspec.structs.replace(plan, runners_up=(rival,)))
    return tmp_path


@pytest.mark.parametrize(("name", "happens"), MATRIX)
def test_a_fault_ends_the_verb_and_loses_nothing(here: Path, name: str, happens: str) -> None:
    verb, fault = VERBS[name], FAULTS[happens]
    job = Job(here, verb.arguments)
    job.wait_for((lambda job: 1 in job.pids().values()) if fault.early else verb.busy)
    finished = job.samples()
    fault.commit(job)
    errors = job.end(TIMEOUT_S + ENDING_S)

    assert job.process.returncode == fault.code
    assert re.fullmatch(fault.said.replace("CASE", verb.case), errors[-1]), errors
    assert sum("interrupted" in line or "ended by" in line for line in errors) <= 1
    assert "Traceback" not in "".join(errors)
    assert job.samples()[: len(finished)] == finished
    assert finished or fault.early or name == "run"  # whose only sample comes at the end
    *earlier, hit = job.runs()
    assert (hit.status, bool(hit.reason)) == (fault.status, True)
    assert [run.status for run in earlier] == ["complete"] * (len(job.runs()) - 1)
    assert not job.pids()


def test_a_run_that_breaks_off_keeps_the_steps_before(here: Path) -> None:
    job = Job(here, VERBS["run"].arguments)
    job.wait_for(lambda job: any(len(store.steps(run)) > 1 for run in here.glob("runs/*")))
    job.kill(1, signal.SIGKILL)
    job.end(TIMEOUT_S + ENDING_S)

    (run_dir,) = here.glob("runs/*")
    info, (sample,), _ = store.load(run_dir)
    steps = store.steps(run_dir)
    assert (info.status, sample.status) == ("failed", "error")
    assert sample.reason == f"it broke off: {info.reason}" and "rank 1" in info.reason
    assert sample.times_s == tuple(step.time_s for step in steps) and len(steps) > 1
    assert all(step.loss is not None for step in steps)


def test_a_case_that_hangs_is_recorded_and_the_others_are_measured(here: Path) -> None:
    job = Job(
        here,
        "measure collectives all_reduce --sizes 4K..1M:x4 --as-measured --nproc 2 "
        f"--timeout {TIMEOUT_S}s",
    )
    job.wait_for(VERBS["measure"].busy)
    (here / "stop").touch()
    errors = job.end(paced(90))

    assert job.process.returncode == 4 and not job.pids()
    assert not any("Traceback" in line or line.startswith("error:") for line in errors)
    (run,) = job.runs()
    assert (run.status, run.reason.endswith(" hung")) == ("partial", True)
    _, samples, warnings = store.load(next(here.glob("runs/*")))
    assert not warnings and not (here / "stop").exists()
    sizes = sorted(sample.case.op.size_bytes for sample in samples)
    assert sizes == [4096 * 4**power for power in range(5)]
    statuses = [sample.status for sample in samples]
    assert sorted(statuses) == ["hung", *["ok"] * 4] and statuses[-1] == "ok"
    (hung,) = (sample for sample in samples if sample.status == "hung")
    case = rf"all_reduce {hung.case.op.size_bytes // 1024}\.0 KiB fp32 x2 in place"
    said = STOPPED.removeprefix("error: ").replace("CASE", case)
    assert re.fullmatch(said, hung.reason), hung.reason
    (again,) = (line for line in errors if "the ranks are started again" in line)
    assert again.startswith(hung.reason)


def test_the_run_says_why_torchrun_ended_it(here: Path) -> None:
    """torchrun sends rank 0 SIGTERM when rank 1 is gone, which a collective has noticed by then."""
    arguments = f"measure collectives all_reduce --sizes 4K..4M:x2 --timeout {TIMEOUT_S}s"
    job = Job(here, arguments, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    job.wait_for(VERBS["measure"].busy)
    job.kill(1, signal.SIGKILL)
    errors = job.end(TIMEOUT_S + ENDING_S)
    (run,) = job.runs()
    assert run.status == "failed" and f"error: {run.reason}" in errors
    assert re.match(r"rank 0: .*rank 1 \(in case all_reduce .+\) had not arrived at ", run.reason)
    assert job.samples() and not job.pids()


def test_a_signal_at_any_time_is_one_line_and_no_traceback(here: Path) -> None:
    """From the first instant on: while the program or its ranks import, start, measure, end."""
    for number, name in enumerate([signal.SIGINT, signal.SIGTERM, signal.SIGHUP] * 3):
        for old in here.glob("runs/*/*"):
            old.unlink()
        arguments = "measure collectives all_reduce --sizes 4K..64K:x4 --nproc 2"
        job = Job(here, arguments, module="meshwise")
        while not _catches(job.process.pid, signal.SIGTERM) and job.process.poll() is None:
            time.sleep(0.001)
        time.sleep(number * 0.75)
        os.killpg(job.process.pid, name)
        errors = job.end(paced(60))
        if job.process.returncode == 0:  # it was over by then
            continue
        assert job.process.returncode == 128 + name, errors
        said = "interrupted" if name == signal.SIGINT else f"ended by {name.name}"
        assert re.match(said, errors[-1]) and sum(said in line for line in errors) == 1
        assert "Traceback" not in "".join(errors)
        assert not job.pids()
        for info in job.runs():
            told = "stopped by the user" if name == signal.SIGINT else said
            if info.status == "complete":  # all was measured, and not yet shown
                sizes = {json.loads(line)["case"]["op"]["size_bytes"] for line in job.samples()}
                assert sizes == {2**12, 2**14, 2**16}
                continue
            assert (info.status, info.reason, bool(info.ended)) == ("interrupted", told, True)


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _work(*arguments: str) -> None:
    """One rank; rank 1 may raise or stop."""
    from meshwise.launch import worker
    from meshwise.ranks import Ranks

    usual = Ranks.at

    def at(ranks: Ranks, name: str) -> None:
        usual(ranks, name)
        if ranks.rank == 1 and Path("raise").exists():
            raise ValueError("no such shape")
        if ranks.rank == 1 and Path("stop").exists():
            Path("stop").unlink()  # those that are started in its place go on
            os.kill(os.getpid(), signal.SIGSTOP)

    Ranks.at = at  # type: ignore[method-assign]
    worker.main(*arguments)


def _command_line(arguments: list[str]) -> None:
    """``meshwise`` with short timeouts and ranks that may raise or stop."""
    from meshwise import signals
    from meshwise.cli import app
    from meshwise.launch import local

    signals.quit_at_once()
    local.start = functools.partial(local.start, worker=("-m", HERE, "--rank"))
    app.main(arguments)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        _work(*sys.argv[2:])
    else:
        _command_line(sys.argv[1:])
