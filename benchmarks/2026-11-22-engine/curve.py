"""Losses of 50 bf16 steps under several layouts beside those of one device:
python curve.py RUNS [llama | moe | experts]

The noise is what one device shows against itself when only the order of its sums differs: the same
rows in other microbatches, or layers that are not compiled. Tokens are a Markov chain of 256 words
with four successors each: from ln(32000) = 10.4 there is much to learn, down to ln(4) = 1.4.
"""

import sys
from pathlib import Path

import numpy as np
import torch

import meshwise
from meshwise.spec import Decoder, Experts, Layout, Model, Recipe

LLAMA = Decoder(
    name="llama-110m", hidden=768, layers=12, heads=12, kv_heads=4, head_dim=64, ffn=2048,
    vocab=32000, max_seq_len=1024,
)  # fmt: skip
MOE = "moe-380m"
IN_EVERY_LAYER = Model(
    name="moe-80m", hidden=256, layers=6, heads=4, ffn=1024, vocab=1024,
    experts=Experts(num_experts=16, top_k=2, ffn=1024),
)  # fmt: skip
STEPS, BATCH, SEQ = 50, 32, 512
WORDS, SUCCESSORS = 256, 4
RECIPE = Recipe(learning_rate=1e-3)
ONE = Layout(microbatch_size=BATCH)
NOISE = [(Layout(microbatch_size=8, num_microbatches=4), "compiled"), (ONE, "eager")]
DENSE = [
    Layout(dp=4, zero=2, microbatch_size=8),
    Layout(dp=2, tp=2, sequence_parallel=True, zero=3, microbatch_size=16),
    Layout(
        pp=2, tp=2, sequence_parallel=True, schedule="1f1b", microbatch_size=8, num_microbatches=4
    ),
    Layout(cp=2, dp=2, zero=2, microbatch_size=16, recompute="selective"),
    Layout(cp=2, microbatch_size=BATCH, recompute="selective"),
    Layout(dp=2, zero=2, microbatch_size=16),
    Layout(tp=2, sequence_parallel=True, microbatch_size=BATCH),
    Layout(pp=2, schedule="1f1b", microbatch_size=8, num_microbatches=4),
]
EXPERTS = [
    Layout(dp=4, ep=4, zero=2, microbatch_size=8),
    Layout(dp=2, ep=2, zero=2, microbatch_size=16),
]


def tokens(path: Path) -> Path:
    rng = np.random.default_rng(0)
    successors = rng.integers(0, WORDS, (WORDS, SUCCESSORS), dtype=np.uint16)
    picks, found = rng.integers(0, SUCCESSORS, 2**20), np.zeros(2**20, dtype=np.uint16)
    for i in range(1, len(found)):
        found[i] = successors[found[i - 1], picks[i]]
    np.save(path, found)
    return path


def main() -> None:
    runs, *names = sys.argv[1:]
    Path(runs).mkdir(parents=True, exist_ok=True)
    data, gpus = tokens(Path(runs) / "tokens.npy"), torch.cuda.device_count()
    cases = {"llama": (LLAMA, DENSE), "moe": (MOE, EXPERTS), "experts": (IN_EVERY_LAYER, EXPERTS)}
    for model, layouts in map(cases.get, names or ("llama", "moe")):
        curves = {}
        for layout, lowering in [
            (ONE, "compiled"),
            *NOISE,
            *((one, "compiled") for one in layouts if one.num_devices <= gpus),
        ]:
            (run_dir,) = meshwise.run(
                model=model, layout=layout, recipe=RECIPE, global_batch_size=BATCH, seq_len=SEQ,
                dtype="bf16", lowering=lowering, steps=STEPS - 2, warmup=1, data=data, runs=runs,
                nproc=layout.num_devices,
            )  # fmt: skip
            (sample,) = meshwise.show(run_dir).samples
            name = f"{layout.name} {lowering}"
            if sample.status != "ok":
                print(f"{name}: {sample.status} {sample.reason}", flush=True)
                continue
            curves[name] = np.array(sample.metrics["losses"])
            first, *_ = curves.values()
            apart = np.abs(curves[name] - first)
            print(
                f"{name:58} loss {curves[name][0]:.3f} -> {curves[name][-1]:.3f}, from one device "
                f"at most {apart.max():.4f}, mean {apart.mean():.4f}",
                flush=True,
            )


main()
