"""docs/compare.md: the recipes for CI, run as a shell runs them, on a CPU of little memory."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise import store
from meshwise.spec import Cluster, Device

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[2]
CHAPTER = (ROOT / "docs/compare.md").read_text()


def blocks(title: str, language: str) -> list[str]:
    part = CHAPTER[CHAPTER.index(f"{title}\n") :]
    return re.findall(rf"```{language}\n(.*?)```", part, re.DOTALL)


def scripts(text: str) -> list[str]:
    """The blocks behind ``|`` in YAML, without their indentation."""
    found = re.findall(r"^( *)(?:run:|-) \|\n((?:\1 .*\n)+)", text, re.MULTILINE)
    return [re.sub(rf"^{' ' * _indent(body)}", "", body, flags=re.MULTILINE) for _, body in found]


def _indent(text: str) -> int:
    return min(len(line) - len(line.lstrip()) for line in text.splitlines())


GITHUB = scripts(blocks("### GitHub Actions", "yaml")[0])


def test_gitlab_runs_the_same_commands():
    def commands(parts):
        found = [line.strip() for part in parts for line in part.splitlines()]
        found = [re.sub(r" >> ?.*| > .*", "", line) for line in found]
        return [line for line in found if line.startswith(("meshwise", "python3", "for", "done"))]

    gitlab = scripts(blocks("### GitLab CI", "yaml")[0])
    assert len(GITHUB) == len(gitlab) == 4 and commands(GITHUB) == commands(gitlab)
    (shown, *_) = blocks("## A performance regression test", "")
    assert commands([shown])[:3] == commands(GITHUB)[:3]
    assert shown.splitlines()[3] in GITHUB[1]


def bash(script: str) -> subprocess.CompletedProcess:
    """Run a step, shorter: one launch of few iterations, rings of few tokens."""
    shorter = {
        "1 2 3 4 5 6": "1",
        "--niter 12": "--niter 8",
        "--quick": "--dense --seq-lengths 512",
    }
    for long, short in shorter.items():
        script = script.replace(long, short)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"PATH": path, "PYTHONPATH": str(ROOT), "GITHUB_STEP_SUMMARY": "summary.md"}
    command = ["bash", "-e", "-c", script]
    return subprocess.run(command, env=os.environ | given, capture_output=True, text=True)


def done(script: str) -> str:
    found = bash(script)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def slowed(factor: float) -> None:
    """Add a run to the newest one that takes ``factor`` of its time."""
    run_dir = store.runs_of("runs")[-1]
    copy = run_dir.with_name(f"9{run_dir.name}")
    copy.mkdir()
    (copy / "run.json").write_text((run_dir / "run.json").read_text())
    sample = json.loads((run_dir / "samples.jsonl").read_text())
    sample["times_s"] = [factor * time for time in sample["times_s"]]
    (copy / "samples.jsonl").write_text(json.dumps(sample) + "\n")


def test_the_performance_regression_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    device = Device(name="a CPU", kind="cpu", memory_bytes=30_000_000)
    store.write(
        "cluster.toml",
        Cluster(name="small", num_hosts=1, num_devices_per_host=1, device=device, tiers=()),
    )
    measure, gate, _, keep = GITHUB
    done(measure)
    done(keep)
    assert bash(gate).returncode == 2  # nothing is newer
    slowed(1.01)
    done(gate)
    assert "unclear" in Path("summary.md").read_text()  # one launch a side
    slowed(1000.0)  # so far that a busy host's times cannot hide it
    caught = bash(gate.replace("main", "main runs/99*"))
    assert caught.returncode == 3, caught.stdout + caught.stderr
    assert "slower (fails)" in Path("summary.md").read_text()


def test_the_gate_of_efficiency(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("efficiency.py").write_text(blocks("### Efficiency above a bound", "python")[0])
    measure, gate = GITHUB[2].splitlines()
    done(f"{measure} --nproc 2 --batch-size 1 --num-heads 2 --embed-dim 32")
    latest = Path("benchmark_results/ring_v2_collective/latest.json")
    document = json.loads(latest.read_text())
    measured = [row for row in document["results"] if row["status"] == "ok"]
    assert {row["ring_size"] for row in measured} == {1, 2}
    for efficiency, code in ((0.8, 0), (0.6, 1)):
        for row in measured:
            assert row["strong_efficiency"] is not None
            row["strong_efficiency"] = efficiency
        latest.write_text(json.dumps(document))
        assert bash(gate).returncode == code
