"""Training steps of README.md's table, each a run directory: torchrun table.py RUNS NAME...

Sizes: 2.6B (Llama-type: hidden 2560, 32 layers and heads, SwiGLU 6912, vocabulary 51200), batch 8 x
1024 a GPU; Llama-3-8B, batch 2 x 8192 a GPU; MoE of Alpa's table, batch 32 x 1024 a GPU.
"""

import sys
import time

import torch

import meshwise
from meshwise.spec import Decoder, Experts, Layout, Model, Recipe, WideResNet
from meshwise.verbs import job

LLAMA = Decoder(
    name="llama-2.6b", hidden=2560, layers=32, heads=32, kv_heads=32, head_dim=80, ffn=6912,
    vocab=51200, max_seq_len=1024,
)  # fmt: skip
LLAMA_8B = Decoder(
    name="llama-3-8b", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336,
    vocab=128256, max_seq_len=8192, rope_theta=500_000.0,
)  # fmt: skip
BF16 = Recipe(weights="bf16", reduce="bf16")
ASYNC = Recipe(async_tp=True)
BALANCED, SKEWED = Recipe(routing="balanced"), Recipe(routing="skewed")


def moe(hidden: int) -> Model:
    experts = Experts(num_experts=16, top_k=2, ffn=8 * hidden, every=2)
    return Model(
        name=f"moe-{hidden}", hidden=hidden, layers=16, heads=16, ffn=8 * hidden, vocab=32000,
        experts=experts,
    )  # fmt: skip


def rows(gpus: int):
    """name -> model, sequence length, layout, recipe, data type."""
    small, big = (LLAMA, 1024), (LLAMA_8B, 8192)
    dp = {"dp": gpus, "zero": 2 if gpus > 1 else 0}
    half = {"dp": max(1, gpus // 2), "zero": 2 if gpus > 2 else 0}
    piped = {"pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2}
    four = {"microbatch_size": 4, "num_microbatches": 4}
    found = {}
    for name, (model, seq), batch in (("2.6b", small, 8), ("8b", big, 2)):
        deep = {**piped, "layers": (9, 8, 8, 7)}
        micro = four if batch == 8 else {"microbatch_size": 1, "num_microbatches": 4}
        both = {"microbatch_size": batch, "num_microbatches": gpus}
        for word in ("none", "selective", "full"):
            found[f"{name}-fsdp-{word}"] = (
                model,
                seq,
                Layout(**dp, microbatch_size=batch, recompute=word),
                Recipe(),
            )
        word = "none" if batch == 8 else "selective"
        tp = {"tp": 2, "sequence_parallel": True, "recompute": word}
        cut = Layout(**half, **tp, microbatch_size=2 * batch)
        found[f"{name}-tp"] = (model, seq, cut, Recipe())
        found[f"{name}-tp-async"] = (model, seq, cut, ASYNC)
        once = {**half, "zero": min(half["zero"], 1)}  # gradients are reduced once a step
        found[f"{name}-pp"] = (
            model,
            seq,
            Layout(**once, **deep, **micro, recompute=word),
            Recipe(),
        )
        flat = Layout(tp=2, sequence_parallel=True, **deep, **both, recompute="selective")
        if gpus == 4:
            found[f"{name}-tp-pp"] = (model, seq, flat, Recipe())
            short = {"stages_per_rank": 4, "layers": (5, 4, 4, 4, 4, 4, 4, 3)}
            many = {**both, "microbatch_size": 1, "num_microbatches": 8} if batch == 2 else both
            deeper = Layout(
                tp=2, sequence_parallel=True, **{**deep, **short, **many}, recompute="selective"
            )
            found[f"{name}-tp-pp-x4"] = (model, seq, deeper, Recipe())
            found[f"{name}-tp-pp-bf16"] = (model, seq, flat, BF16)
            found[f"{name}-tp-pp-async"] = (model, seq, deeper if batch == 2 else flat, ASYNC)
    for hidden in (768, 1024):
        ep = Layout(**dp, ep=gpus, microbatch_size=32)
        found[f"moe-{hidden}-dp"] = (moe(hidden), 1024, Layout(**dp, microbatch_size=32), BALANCED)
        found[f"moe-{hidden}-ep"] = (moe(hidden), 1024, ep, BALANCED)
        found[f"moe-{hidden}-dp-skewed"] = (*found[f"moe-{hidden}-dp"][:3], SKEWED)
        found[f"moe-{hidden}-ep-skewed"] = (moe(hidden), 1024, ep, SKEWED)
    images = WideResNet(name="wresnet-1b", channels=320, width_factor=2)
    sgd = Recipe(optimizer="sgd", learning_rate=0.1, weight_decay=0.0, max_grad_norm=0.0)
    found["wresnet-1b"] = (images, 1, Layout(dp=gpus, microbatch_size=32), sgd)
    return found


def main() -> None:
    runs, *names = sys.argv[1:]
    table = rows(torch.cuda.device_count())
    for name in names or table:
        model, seq, layout, recipe = table[name]
        start = time.time()
        try:
            (run_dir,) = meshwise.run(
                model=model,
                layout=layout,
                recipe=recipe,
                global_batch_size=layout.microbatch_rows * layout.num_microbatches,
                seq_len=seq,
                dtype="bf16",
                lowering="compiled",
                steps=10,
                warmup=3,
                runs=runs,
            )
            if not job.leads():
                continue
            (sample,) = meshwise.show(run_dir).samples
            told = f"{sample.status} {sample.reason}"
            if sample.times_s:
                middle = sorted(sample.times_s)[len(sample.times_s) // 2]
                told = f"{1e3 * middle:.1f} ms, {sample.metrics['peak_bytes'] / 2**30:.1f} GiB"
        except Exception as error:
            told = repr(error)[:300]
        if job.leads():
            print(f"{name:22} {layout.name:62} {told} ({time.time() - start:.0f} s)", flush=True)


main()
