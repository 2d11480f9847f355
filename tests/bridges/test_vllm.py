"""Weights of transformers' modules under FSDP2 into vLLM's models, through vLLM's own interface.

The judge is vLLM's loader: after each version the live parameters equal, bit for bit, what it makes
of the checkpoint that transformers saves. A launch serves all models, since imports take longer.
"""

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make test-bridges installs vLLM")

from tests.bridges.models import MODELS, UNLIKE, written

AT_ONCE = 50  # ports of a launch: one a model
ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port with free ones behind it, since each model's ranks meet at their own. All lie below
    those that the system gives to whoever asks for any."""
    for first in random.sample(range(12_000, 30_000, AT_ONCE), 100):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + AT_ONCE):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError("no free ports")


def sent(
    tmp_path: Path, names, trainers: int, workers: int, fault="", stages=1, program="trainer"
) -> str:
    """Send every model's weights from ``trainers`` ranks to vLLM's tp, or pp; return what they
    printed."""
    for name in names:
        mine, servers, _ = UNLIKE.get(name, ({}, {}, ""))
        written(name, tmp_path / "models", mine)
        written(name, tmp_path / "served", servers)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "MESHWISE_SECRET": os.urandom(16).hex(), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    run = [sys.executable, "-m"]
    store, models, served = (str(tmp_path / name) for name in ("store", "models", "served"))
    servers = [
        subprocess.Popen(
            [*run, "tests.bridges.worker", served, store, str(rank), str(workers), str(stages)],
            cwd=ROOT, env=environment, stdout=(tmp_path / f"worker-{rank}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(workers)
    ]  # fmt: skip
    try:
        ran = subprocess.run(
            [*run, "torch.distributed.run", "--standalone", "--nproc-per-node", str(trainers),
             "-m", f"tests.bridges.{program}", models, store, str(free_port()), str(workers),
             *([fault] if fault else [])],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
    finally:
        for server in servers:
            if fault == "die" or server.poll() is None:
                server.terminate()
            server.wait(60)
    assert ran.returncode == 0, ran.stderr[-6000:]
    return ran.stdout


WAYS = [
    "llama-tied@hsdp", "qwen3-moe@hsdp", "llama@tp", "qwen2@tp", "mistral@transformers",
    "qwen3-moe@transformers", "deepseek-v3@transformers", "gpt-oss@transformers",
]  # fmt: skip


def as_loaded(said: str, name: str) -> str:
    """Check that a model is what vLLM loads, each element of the destination sent once. Return its
    line of the table of bytes."""
    line = f"^{name}: as vLLM loads it, twice; (\\d+) of (\\d+) bytes, nccl (\\d+), m2n (\\d+)"
    ((moved, least, nccl, m2n),) = re.findall(line, said, re.M)
    assert moved == least
    times = f"{int(nccl) / int(moved):.2f} | {int(m2n) / int(moved):.2f}"
    return f"| {name} | {int(moved):,} | {int(nccl):,} | {int(m2n):,} | {times} |"


@pytest.mark.parametrize(
    ("trainers", "workers", "more"), [(2, 2, "layouts"), (3, 2, ""), (2, 1, "")]
)
def test_live_parameters_are_what_vllm_loads(trainers, workers, more, tmp_path):
    """With ``layouts`` again into workers without a second model, and into plain tensors."""
    said = sent(tmp_path, MODELS, trainers, workers, more)
    for name in MODELS:
        line = as_loaded(said, name)
        if more:
            assert line in (ROOT / "docs" / "bridges.md").read_text()
            assert f"{name}: saved layouts\n{name}: plain layouts\n" in said


def test_sources_of_hsdp_and_of_tp_after_a_step_of_adamw(tmp_path):
    said = sent(tmp_path, WAYS, 4, 2)
    for name in WAYS:
        as_loaded(said, name)


def test_a_flipped_bit_is_caught_and_the_old_version_kept(tmp_path):
    said = sent(tmp_path, ["llama"], 2, 2, "flip")
    assert "RefitError" in said and "old version kept" in said and "next version arrived" in said


def test_a_trainer_that_disappears_leaves_the_old_version_served(tmp_path):
    said = sent(tmp_path, ["llama"], 2, 2, "trainer")
    assert "old version kept" in said
    for worker in range(2):
        log = (tmp_path / f"worker-{worker}.log").read_text()
        assert re.search(
            "^[A-Z]\\w*Error: .*trainer rank 1.*; the server has version 2$", log, re.M
        )


def test_what_trainer_and_server_disagree_about_is_named_on_all_ranks(tmp_path):
    said = sent(tmp_path, UNLIKE, 2, 2, "refuse")
    for name, (_, _, line) in UNLIKE.items():
        told = re.findall(f"^{name} rank (\\d): (.*)$", said, re.M)
        assert sorted(rank for rank, _ in told) == ["0", "1"]
        for rank, text in told:  # rank 0 is told by both workers
            assert len(re.findall(f"ValueError: .*{re.escape(line)}", text)) == 1
            assert rank == "1" or text.count("worker ") == 2


def test_stages_of_a_pipeline(tmp_path):
    names = ["deepseek-v3", "llama", "llama-tied"]
    said = sent(tmp_path, names, 2, 2, stages=2)
    for name in names:
        as_loaded(said, name)


def test_the_example_serves_each_step(tmp_path):
    said = sent(tmp_path, ["llama"], 2, 2, program="loop")
    assert "versions ['1', '2'], as vLLM loads the last" in said and "step 2: reward 0." in said
    assert len((ROOT / "examples" / "vllm_rl.py").read_text().splitlines()) <= 60


def test_a_worker_that_dies_is_named_to_every_trainer(tmp_path):
    said = sent(tmp_path, ["llama"], 2, 2, "die")
    assert len(re.findall(r"rank \d: .*server rank 1", said)) == 2
