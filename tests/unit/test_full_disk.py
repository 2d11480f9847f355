"""A full disk at every kind of file that the package writes: the old one is whole, nothing else is
left, and the error is one line that names the file."""

import ast
import errno
import os
from pathlib import Path

import pytest

import meshwise
from meshwise import store, timeline
from meshwise.engine import folder
from meshwise.launch import failures
from meshwise.pages import primus
from meshwise.spec import StepLine
from meshwise.spec.checkpoint import Checkpoint
from meshwise.suites import tsv
from meshwise.verbs import refit, report, ring, show, trace
from tests import sample_records as known

RUN = "runs/20260101T000100-run-gpt-small"
PACKAGE = Path(meshwise.__file__).parent


def _checkpoint():
    held = folder.HeldFolder(Path("saved"))
    try:
        held.replace(
            Checkpoint(
                step=3, seed=0, layout="dp1", optimizer="adamw", model=known.MOE,
                workload=known.WORKLOAD, data="step-3-00", files={}, tensors={}, numbers={},
            )
        )  # fmt: skip
    finally:
        held.close()


def _tensors():
    import torch

    from meshwise.engine import checkpoint

    checkpoint._write(Path("saved"), 0, {"a": torch.zeros(9)})


def _trace():
    trace.keep_calls(Path(RUN))


def _scaling():
    source = PACKAGE.parent / "benchmarks" / "2026-11-22-ring-2xh200" / "results"
    report.scaling(source, "res")


# the file that stands there before, and what writes it
WRITERS = {
    "cluster.toml": lambda: store.write("cluster.toml", known.CPUS),
    "costs.json": lambda: store.write("costs.json", known.COSTS),
    "plan.json": lambda: store.write("plan.json", known.plan()),
    f"{RUN}/run.json": lambda: store.finish(RUN, "failed", "a reason"),
    f"{RUN}/samples.jsonl": lambda: store.append(RUN, known.SAMPLES[0]),
    f"{RUN}/steps.jsonl": lambda: store.append_step(RUN, StepLine(step=9, loss=1.0, time_s=1.0)),
    f"{RUN}/timeline.json": lambda: timeline.write(Path(RUN) / "timeline.json", known.LAYOUT, []),
    f"{RUN}/nccl/rank-0.log": _trace,
    "report.html": lambda: report.write(
        report.Contents(plan=None, costs=None, results=(), runs=()), "report.html"
    ),
    "res/scaling_efficiency_analysis.png": _scaling,
    "pattern.svg": lambda: show.pattern(
        ranks=4, batch=1, seq_len=512, heads=4, head_dim=8, figure="pattern.svg",
        segment_lengths=(64,), dilation_rates=(1,),
    ),
    "suite.tsv": lambda: tsv.append(Path("suite.tsv"), {"old": "new"}),
    "logs/refit.log": lambda: refit._write(Path("logs/refit.log"), ["new"]),
    "res/latest.json": lambda: ring.write_whole(Path("res/latest.json"), "{}\n"),
    "gemm.csv": lambda: primus._write(Path("gemm.csv"), [{"m": 1}]),
    "saved/checkpoint.json": _checkpoint,
    "saved/00000-000.safetensors": _tensors,
    "rank-0.json": lambda: failures.write(Path(), failures.Fate(rank=0)),
}  # fmt: skip
OURS = (f"{RUN}/run.json", f"{RUN}/samples.jsonl")  # as the fixture leaves them


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = known.info("run", known.plan(), Path(RUN).name)
    known.write_run(Path("runs"), ran, [known.step_sample(known.plan(), [0.01] * 5)])
    return tmp_path


def content():
    """Every file with bytes in it but locks."""
    paths = (path for path in Path().rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path): data for path in paths if (data := path.read_bytes())}


class Full:
    """The ``number``-th write or sync of a file in the folder fails."""

    def __init__(self, place, number):
        self.place, self.number, self.struck = str(place), number, False

    def failing(self, do):
        def call(descriptor, *rest):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(self.place + "/"):
                self.number -= 1
                if self.number == 0:
                    self.struck = True
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return do(descriptor, *rest)

        return call


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_what_was(name, here, monkeypatch):
    act, path = WRITERS[name], Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if name not in OURS:
        path.write_text("old\n")
    before, number = content(), 0
    while True:
        number += 1
        full = Full(here, number)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full.failing(os.write))
            patch.setattr(os, "fsync", full.failing(os.fsync))
            if name == "rank-0.json":  # of a folder that goes with its job: nothing is synced
                patch.setattr(os, "replace", _no_space)
                full.struck = True
            try:
                act()
            except ValueError as error:
                told = str(error)
                assert "No space left on device" in told
                assert path.name in told or (number > 2 and "res/" in told)  # its others
                assert "\n" not in told and len(told) <= 293
            else:
                assert not full.struck
                break
        after = content()
        assert not [other for other in after if ".meshwise-" in other]
        if number == 1:  # later ones come when a first file, or the new one, is there already
            assert after == before
        for other in after.keys() - before.keys():
            os.unlink(other)
        for other, data in before.items():
            Path(other).write_bytes(data)
        if name == "rank-0.json":
            break
    assert number > 1 or name == "rank-0.json"
    act()
    assert content() != before


def _no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Temporary folders of profilers, a lock, a ticket and a probe of a folder; the secret by a link.
WRITES_ITSELF = {
    "engine/folder.py", "tracing.py", "files.py", "launch/scratch.py",
    "secret.py", "verbs/files.py", "verbs/recording.py", "probe/ring.py",
    "engine/checkpoint.py", "pages/svg.py",
}  # fmt: skip
_NAMES = {"write_text", "write_bytes", "touch", "TemporaryFile", "NamedTemporaryFile", "mkstemp",
          "save_file", "savefig", "export_chrome_trace"}  # fmt: skip


def _writes(tree):
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        modes = [a.value for a in [*node.args[1:2], *(k.value for k in node.keywords)]
                 if isinstance(a, ast.Constant) and isinstance(a.value, str)]  # fmt: skip
        if called in _NAMES or (called == "open" and any(set("wax+") & set(m) for m in modes)):
            yield node
        if called == "open" and "O_CREAT" in ast.dump(node):
            yield node


def test_no_other_module_writes_files_past_the_one_writer():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(_writes(ast.parse(path.read_text())))
    }
    assert found - WRITES_ITSELF == set()
    assert "files.py" in found
