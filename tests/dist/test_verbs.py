"""Real ranks under the command line: a rank that is killed, a resumed sweep, a plan that runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from meshwise import store
from meshwise.spec import Candidate, Layout, Model, Workload
from meshwise.verbs import ties
from tests.pace import paced

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[2]


def meshwise(folder, *arguments) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "meshwise", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return sorted(found)


def lines(folder) -> list[dict]:
    return [
        json.loads(line)
        for path in folder.glob("runs/*-measure-*/samples.jsonl")
        for line in path.read_text().splitlines()
    ]


def test_a_killed_rank_loses_nothing_and_resume_repeats_nothing(tmp_path):
    first = meshwise(tmp_path, "measure", "profile", "--nproc", "2")
    deadline = time.monotonic() + paced(90)
    while len(lines(tmp_path)) < 3:
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.1)
    os.kill(children(first.pid)[-1], signal.SIGKILL)
    out, err = first.communicate(timeout=paced(60))
    assert first.returncode == 4
    assert "error: rank " in err and "SIGKILL during case" in err and "Traceback" not in err
    kept = lines(tmp_path)
    assert len(kept) >= 3
    (run_dir,) = tmp_path.glob("runs/*")
    assert store.load(run_dir)[0].status == "failed"

    second = meshwise(tmp_path, "measure", "--resume", "--budget", "2s", "--json")
    out, err = second.communicate(timeout=paced(90))
    assert second.returncode == 0, err
    summary = json.loads(out)
    assert (summary["status"], Path(summary["run_dir"]).name) == ("partial", run_dir.name)
    after = lines(tmp_path)
    assert after[: len(kept)] == kept and len(after) > len(kept)
    ids = [line["case_id"] for line in after]
    assert len(ids) == len(set(ids))


def test_run_prints_predicted_beside_measured(tmp_path, plan_of):
    model = Model(name="tiny", hidden=64, layers=2, heads=4, ffn=256, vocab=128, max_seq_len=32)
    layout = Layout(dp=2, zero=2, microbatch_size=2)
    plan = plan_of(model, Workload(global_batch_size=4, seq_len=32), layout)
    store.write(tmp_path / "plan.json", plan)
    done = meshwise(tmp_path, "run", "--steps", "3", "--warmup", "1", "--check", "--json")
    out, err = done.communicate(timeout=paced(120))
    assert done.returncode == 0, err
    (result,) = json.loads(out)
    assert result["status"] == "ok" and result["num_steps"] == 3
    assert result["time"]["predicted"] == 1.0
    assert result["time"]["error"] == pytest.approx(1 / result["time"]["measured"] - 1)
    assert result["memory"]["measured"] > 16 * result["num_parameters"] / 2  # AdamW over two ranks
    assert result["check_loss_error"] <= 1e-5
    info, _, _ = store.load(next(tmp_path.glob("runs/*")))
    assert info.status == "complete" and info.plan == plan


def test_layouts_that_tie_rank_by_what_they_take(tmp_path, plan_of, monkeypatch):
    """64 microbatches of one sequence take much longer than one of 64, whatever was told."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = Model(name="tiny", hidden=64, layers=4, heads=4, ffn=256, vocab=128, max_seq_len=32)
    slow = Layout(dp=2, zero=2, microbatch_size=1, num_microbatches=32)
    fast = Layout(dp=2, zero=2, microbatch_size=32)
    plan = plan_of(model, Workload(global_batch_size=64, seq_len=32), slow)
    rival = Candidate(layout=fast, prediction=plan.prediction, ties=True)
    found = ties.measured(msgspec.structs.replace(plan, runners_up=(rival,)), 60.0, "plan.json")
    assert found.layout == fast and found.runners_up[0].layout == slow
    took = {tie.layout: tie.measured_s for tie in found.answers.ties}
    assert took[fast] < took[slow] and len(list(tmp_path.glob("runs/*"))) == 2
