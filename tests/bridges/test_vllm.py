"""Weights of transformers' modules under FSDP2 into vLLM's models, through vLLM's own interface.

The judge is vLLM's loader: after each version the live parameters equal, bit for bit, what it makes
of the checkpoint that transformers saves. A launch serves all models, since imports take longer.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make test-bridges installs vLLM")

from tests.bridges.models import MODELS, written

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port with some free ones behind it: each model's ranks meet at their own."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return min(int(sock.getsockname()[1]), 60_000)


def sent(tmp_path: Path, names, trainers: int, workers: int, fault: str = "") -> str:
    """Send every model's weights from FSDP2 over ``trainers`` ranks to vLLM's tp; return what rank
    0 printed."""
    for name in names:
        written(name, tmp_path / "models")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "MESHWISE_SECRET": os.urandom(16).hex(), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    run = [sys.executable, "-m"]
    store, models = str(tmp_path / "store"), str(tmp_path / "models")
    servers = [
        subprocess.Popen(
            [*run, "tests.bridges.worker", models, store, str(rank), str(workers)],
            cwd=ROOT, env=environment, stdout=(tmp_path / f"worker-{rank}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(workers)
    ]  # fmt: skip
    try:
        ran = subprocess.run(
            [*run, "torch.distributed.run", "--standalone", "--nproc-per-node", str(trainers),
             "-m", "tests.bridges.trainer", models, store, str(free_port()), str(workers),
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


@pytest.mark.parametrize(
    ("trainers", "workers", "more"), [(2, 2, "layouts"), (3, 2, ""), (2, 1, "")]
)
def test_live_parameters_are_what_vllm_loads(trainers, workers, more, tmp_path):
    """With ``layouts`` again into workers without a second model, and into plain tensors."""
    said = sent(tmp_path, MODELS, trainers, workers, more)
    for name in MODELS:
        ((moved, least),) = re.findall(
            f"^{name}: as vLLM loads it, twice; (\\d+) of (\\d+)", said, re.M
        )
        assert moved == least  # each element of the destination once
        if more:
            assert f"{name}: saved layouts\n{name}: plain layouts\n" in said


def test_a_flipped_bit_is_caught_and_the_old_version_kept(tmp_path):
    said = sent(tmp_path, ["llama"], 2, 2, "flip")
    assert "RefitError" in said and "old version kept" in said and "next version arrived" in said


def test_a_worker_that_dies_is_named_to_every_trainer(tmp_path):
    said = sent(tmp_path, ["llama"], 2, 2, "die")
    assert len(re.findall(r"rank \d: .*server rank 1", said)) == 2
