"""The examples run as their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import paced

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("options", [(), ("--train", "tp", "--infer", "whole")])
def test_reinforcement_learning_goes_on_over_refits(options):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "examples/refit_rl.py", *options],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=paced(180),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "weights of version 21" in done.stdout


@pytest.mark.parametrize("options", [(), ("--attention", "dilated")])
def test_long_context_has_the_same_losses_alone_and_on_two_ranks(options):
    losses = []
    for launcher in ((), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")):
        done = subprocess.run(
            [sys.executable, *launcher, "examples/long_context.py", "--seq-len", "255",
             "--steps", "4", *options],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=paced(180),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses.append([float(line.split("loss ")[1]) for line in done.stdout.splitlines()])
    alone, shared = losses
    assert len(alone) == 4 and alone[0] - alone[-1] > 0.1
    assert shared == pytest.approx(alone, abs=2e-4)


ATTACHES = """
import torch, torch.distributed as dist, meshwise
dist.init_process_group("gloo")
mine = {"w": torch.full((8,), 3.0 if dist.get_rank() == 0 else 4.0)}
into = {"w": torch.zeros(8)}
from meshwise.reshard.holdings import HeldTensor
from meshwise.reshard.regions import replicated
plans = [{"w": HeldTensor((8,), "fp32", replicated((8,), [rank]))} for rank in (0, 1)]
refit = meshwise.Refit(mine, plans[0], into, plans[1])
refit()
assert into["w"].eq(3).all() == (dist.get_rank() == 1)
refit.close()
dist.destroy_process_group()
print("attached")
"""


def test_a_refit_finds_the_job_that_the_program_joined_itself(tmp_path):
    (tmp_path / "attaches.py").write_text(ATTACHES)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "attaches.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=paced(120),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attached") == 2
