"""Training on GPUs under a launcher."""

import json
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
COMPILED = """
import json
import sys
import meshwise
import msgspec
from meshwise.spec import Decoder, Experts, Layout, Recipe

layout = msgspec.convert(json.loads(sys.argv[1]) | {"recompute": sys.argv[2]}, Layout)
experts = Experts(num_experts=4, top_k=2, ffn=128) if layout.ep > 1 else None
model = Decoder(
    name="tiny", hidden=256, layers=2, heads=4, kv_heads=1, head_dim=64, ffn=384, vocab=61,
    max_seq_len=64, experts=experts,
)
by_sgd = Recipe(
    optimizer="sgd", learning_rate=0.5, weight_decay=0.0, async_tp=sys.argv[3] == "async"
)
meshwise.run(
    model=model, layout=layout, recipe=by_sgd, global_batch_size=4, seq_len=64, steps=2, warmup=1,
    lowering="compiled", check=True, runs="runs",
)
"""
SPLIT = {"tp": 2, "sequence_parallel": True, "microbatch_size": 4}
CUTS = {  # in which a part lies otherwise than tp has it by default
    "attention whole": {"attention": "whole"},
    "attention over batch": {"attention": "batch"},
    "vocabulary whole": {"embed": "whole", "head": "whole"},
    "feed-forward over tokens": {"stream": "seq", "feed_forward": "seq"},
}
ATTENTION = {"stream": "seq", "attention": "batch"}
EXPERTS = {"dp": 2, "ep": 2, "zero": 2, "microbatch_size": 2}


def launch(folder, script, *arguments, ranks):
    """The samples of the runs of a script under torchrun."""
    (folder / "script.py").write_text(script)
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node", str(ranks), "script.py", *map(str, arguments)],
        cwd=folder, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads(path.read_text()) for path in folder.glob("runs/*/samples.jsonl")]


def test_a_process_may_join_a_second_time(tmp_path):
    """torch 2.11 crashes where a mesh splits groups off a second world (pytorch/pytorch#192109)."""
    n = min(2, torch.cuda.device_count())
    assert len(launch(tmp_path, TWICE, n, 3 if n > 1 else 0, "runs", ranks=n)) == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
@pytest.mark.parametrize(
    ("layout", "recompute", "messages"),
    [
        (SPLIT, "none", "plain"),
        (SPLIT, "full", "plain"),
        (SPLIT, "selective", "async"),
        (EXPERTS, "selective", "plain"),
        *[
            ({"tp": 2, "microbatch_size": 4, "cuts": cuts}, "none", "plain")
            for cuts in CUTS.values()
        ],
        (SPLIT | {"tp_sums": "first"}, "none", "plain"),
        ({"tp": 2, "microbatch_size": 4, "tp_sums": "first", "cuts": ATTENTION}, "none", "plain"),
    ],
    ids=["plain", "recomputed", "async", "experts", *CUTS, "sums first", "attention's sums first"],
)
def test_compiled_layers_train_as_one_device(tmp_path, layout, recompute, messages):
    (sample,) = launch(tmp_path, COMPILED, json.dumps(layout), recompute, messages, ranks=2)
    assert sample["metrics"]["check_loss_error"] < 1e-4


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="takes four GPUs")
@pytest.mark.parametrize("parts", [{"sequence_parallel": True}, {"cuts": ATTENTION}])
def test_compiled_layers_sum_over_two_axes_at_once(tmp_path, parts):
    layout = {"dp": 2, "tp": 2, "microbatch_size": 2, "tp_sums": "together"} | parts
    (sample,) = launch(tmp_path, COMPILED, json.dumps(layout), "none", "plain", ranks=4)
    assert sample["metrics"]["check_loss_error"] < 1e-4
