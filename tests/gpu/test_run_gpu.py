"""Training on GPUs under a launcher."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
TWICE = """
import sys
import meshwise
from meshwise.spec import Layout, Model

model = Model(name="tiny", hidden=64, layers=2, heads=2, ffn=128, vocab=64, max_seq_len=16)
layout = Layout(dp=int(sys.argv[1]), zero=int(sys.argv[2]))
for seed in (0, 1):
    meshwise.run(
        model=model, layout=layout, seed=seed, seq_len=16, steps=2, warmup=1, lowering="eager",
        runs=sys.argv[3],
    )
"""


def test_a_process_may_join_a_second_time(tmp_path):
    """torch 2.11 crashes where a mesh splits groups off a second world (pytorch/pytorch#192109)."""
    n = min(2, torch.cuda.device_count())
    (tmp_path / "twice.py").write_text(TWICE)
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n),
         "twice.py", str(n), str(3 if n > 1 else 0), "runs"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert len(list((tmp_path / "runs").glob("*/samples.jsonl"))) == 2
