"""Commands under torchrun on two hosts: what they measure, slow links, a host that disappears."""

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from meshwise import store
from meshwise.spec import Sample
from tests.hosts.conftest import PATIENCE_S, end

LAYOUT = '{"dp": 2, "pp": 2, "num_microbatches": 2, "schedule": "1f1b"}'
GPT = ("run", "--model", "gpt-30m", "--layout", LAYOUT,
       "--seq-len", "64", "--global-batch-size", "4", "--steps", "2")  # fmt: skip
REFIT = ("refit", "--refit-mode", "non-collocated", "--tensor-model-parallel-size", "2",
         "--rl-inference-tensor-model-parallel-size", "2", "--refit-method", "gloo",
         "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4",
         "--vocab-size", "128", "--num-benchmark-iterations", "2")  # fmt: skip


def _samples(folder: Path, verb: str) -> dict[str, Sample]:
    (run,) = {path.parent for path in folder.glob(f"runs/*-{verb}-*/run.json")}
    return {sample.case_id: sample for sample in store.load(run)[1]}


def _measure(kinds: str, sizes: str) -> tuple[str, ...]:
    return ("measure", "collectives", kinds, "--sizes", sizes, "--as-measured")


def test_all_hosts_are_detected(hosts, tmp_path):
    hosts.run(tmp_path, "detect")
    found = tomllib.loads((tmp_path / "cluster.toml").read_text())
    assert (found["num_hosts"], found["num_devices_per_host"]) == (2, 2)
    assert found["tiers"][-1]["name"] == "network"


def test_the_rate_between_hosts_is_that_of_a_slow_link(hosts, tmp_path):
    """160 Mbit/s are 20 MB/s for both ranks of a host at once. Headers take 5 % of them, what the
    limit lets through at once 0.2 %."""
    with hosts.slow(2, "160mbit"):
        hosts.run(tmp_path, "detect")
    inside, between = tomllib.loads((tmp_path / "cluster.toml").read_text())["tiers"]
    assert (inside["source"], between["source"]) == ("measured", "measured")
    assert 20e6 / 4 < 2 * between["bytes_per_s"] < 1.1 * 20e6
    assert inside["bytes_per_s"] > between["bytes_per_s"]


def test_two_hosts_measure_what_one_measures(hosts, tmp_path):
    words = _measure("all_reduce,all_to_all", "1K,64K")
    hosts.run(tmp_path, *words)
    found = {name: sample.status for name, sample in _samples(tmp_path, "measure").items()}
    alone = [sys.executable, "-m", "meshwise", *words, "--nproc", "4", "--runs", "alone/runs"]
    subprocess.run(alone, cwd=tmp_path, check=True, timeout=PATIENCE_S)
    local = _samples(tmp_path / "alone", "measure")
    assert found == {name: sample.status for name, sample in local.items()}
    assert set(found.values()) == {"ok"}


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("run", GPT),
        ("refit", REFIT),
        ("measure", ("measure", "ring", "--seq-lengths", "256", "--ring-sizes", "4")),
    ],
    ids=["gpt", "refit", "ring"],
)
def test_work_crosses_hosts(hosts, tmp_path, verb, words):
    hosts.run(tmp_path, *words)
    samples = [
        sample for path in tmp_path.glob("runs/*/run.json") for sample in store.load(path.parent)[1]
    ]
    assert samples
    assert {sample.status for sample in samples} == {"ok"}


def test_a_slow_link_is_measured_as_slow(hosts, tmp_path):
    """A message of 1 MiB at 80 Mbit/s takes 0.1 s and more; without the limit far less."""
    words = _measure("all_gather", "2M")
    (tmp_path / "fast").mkdir()
    hosts.run(tmp_path / "fast", *words)
    with hosts.slow(2, "80mbit"):
        hosts.run(tmp_path, *words)
    quick_s, slow_s = (
        min(min(sample.times_s) for sample in _samples(folder, "measure").values())
        for folder in (tmp_path / "fast", tmp_path)
    )
    assert slow_s > 0.1
    assert slow_s > 2 * quick_s


def test_a_host_that_disappears_ends_the_run_by_name_and_loses_nothing(hosts, tmp_path):
    words = ("measure", "collectives", "--timeout", "20s", "--setup-timeout", "60s")
    both = {number: hosts.start(number, tmp_path, *words) for number in (2, 1)}
    try:
        limit = time.monotonic() + PATIENCE_S
        while not any(len(_samples(tmp_path, "measure")) > 2 for _ in tmp_path.glob("runs/*")):
            assert time.monotonic() < limit
            time.sleep(0.5)
        hosts.ip("link", "set", "mw-v2", "down")
        assert both[1].wait(PATIENCE_S) != 0
    finally:
        hosts.ip("link", "set", "mw-v2", "up")
        for process in both.values():
            end(process)
    assert len(_samples(tmp_path, "measure")) > 2
    log = (tmp_path / "host1.log").read_text()
    assert "rank 2 (in case" in log
    assert "had not arrived" in log
