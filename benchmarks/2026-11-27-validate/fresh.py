"""Measure, price and run models on two GPUs, so that prices are tested on steps they never saw.

    python benchmarks/2026-11-27-validate/fresh.py FOLDER SECONDS MODEL[=PROFILE_SECONDS]...

For each model: a profile, layers beside messages, costs, then each layout, planned and run. What
would begin after SECONDS is named and left to the next call, which goes on in the same folder. The
folder is one for `calibrate --validate`.
"""

import json
import os
import sys
import time
from pathlib import Path

import msgspec

import meshwise
from meshwise.options.measure import OverlapOptions
from meshwise.spec import Layout
from meshwise.verbs import files

STEPS = {"steps": 10, "warmup": 3}
SHARD = {"dp": 2, "zero": 2}
PIPE = {"pp": 2, "schedule": "1f1b"}
SEQUENCES = {"tp": 2, "sequence_parallel": True}
# model: batch, tokens, seconds of its profile, and its layouts
MODELS = {
    "gpt-1.3b": (32, 1024, 60, [
        {**SHARD, "microbatch_size": 16}, {"dp": 2, "zero": 3, "microbatch_size": 16},
        {**SEQUENCES, "microbatch_size": 32},
        {**PIPE, "microbatch_size": 8, "num_microbatches": 4},
        {**SHARD, "microbatch_size": 8, "num_microbatches": 2, "recompute": "full"},
    ]),
    "gpt-2.6b": (32, 1024, 60, [
        {**SHARD, "microbatch_size": 16}, {"dp": 2, "zero": 3, "microbatch_size": 16},
        {"tp": 2, "microbatch_size": 32},
        {**PIPE, "microbatch_size": 8, "num_microbatches": 4},
        {**SHARD, "microbatch_size": 16, "recompute": "selective"},
    ]),
    "gpt-6.7b": (16, 1024, 60, [
        {**SHARD, "microbatch_size": 8}, {**SEQUENCES, "microbatch_size": 16},
        {**PIPE, "microbatch_size": 4, "num_microbatches": 4},
    ]),
    "llama-3-8b": (4, 8192, 120, [
        {"dp": 2, "zero": 3, "microbatch_size": 1, "num_microbatches": 2, "recompute": "full"},
        {**SEQUENCES, "microbatch_size": 1, "num_microbatches": 4, "recompute": "selective"},
        {"cp": 2, "zero": 3, "microbatch_size": 1, "num_microbatches": 4, "recompute": "selective"},
        {**PIPE, "microbatch_size": 1, "num_microbatches": 4, "recompute": "full"},
    ]),
    "moe-2.4b": (64, 1024, 125, [
        {**SHARD, "microbatch_size": 32}, {**SHARD, "ep": 2, "microbatch_size": 32},
        {**SEQUENCES, "microbatch_size": 64},
        {**SHARD, "ep": 2, "microbatch_size": 16, "num_microbatches": 2, "recompute": "full"},
    ]),
    "wresnet-1b": (64, None, 80, [
        {**SHARD, "microbatch_size": 32}, {"dp": 2, "zero": 3, "microbatch_size": 32},
        {"tp": 2, "microbatch_size": 64},
    ]),
    "gpt-30m": (8, 128, 20, [{**SHARD, "microbatch_size": 4}, {"tp": 2, "microbatch_size": 8}]),
}  # fmt: skip


def main(folder: Path, limit_s: float, *models: str) -> None:
    for word in models:
        model, _, asked_s = word.partition("=")
        (folder / model).mkdir(parents=True, exist_ok=True)
        os.chdir(folder / model)
        batch, tokens, budget_s, layouts = MODELS[model]
        budget_s = int(asked_s or budget_s)
        if not Path("costs.json").exists():
            if time.monotonic() - BEGUN > limit_s - 2 * budget_s:
                print(f"not begun: {model}", flush=True)
                continue
            _measure(model, budget_s, tokens)
        for number, layout in enumerate(layouts):
            if Path(f"plan-{number}.json").exists():
                continue
            if time.monotonic() - BEGUN > limit_s:
                print(f"not run: {model} {layout}", flush=True)
                continue
            _run(number, model, layout, {"global_batch_size": batch, "seq_len": tokens})


def _measure(model: str, budget_s: int, tokens: int | None) -> None:
    print(f"--- {model}: profile ({time.monotonic() - BEGUN:.0f} s)", flush=True)
    meshwise.measure("profile", model=(model,), budget=f"{budget_s}s", seq_len=tokens, nproc=2)
    if "wresnet" not in model:
        print(f"--- {model}: overlap ({time.monotonic() - BEGUN:.0f} s)", flush=True)
        meshwise.measure(OverlapOptions(model=(model,), layers=True, nproc=2, seq_len=tokens))
    meshwise.calibrate(tuple(sorted(Path("runs").iterdir())))


def _run(number: int, model: str, layout: dict, work: dict) -> None:
    began = time.monotonic()
    plan = meshwise.plan(model, layout=Layout(**layout), gpus=2, out=f"plan-{number}.json", **work)
    told = plan.prediction.step_time_s
    if "moe" in model:  # prices are of balanced experts
        recipe = msgspec.structs.replace(plan.recipe, routing="balanced")
        files.replace(f"plan-{number}.json", msgspec.structs.replace(plan, recipe=recipe))
    try:
        (run_dir,) = meshwise.run(f"plan-{number}.json", **STEPS)
    except Exception as error:  # the other layouts go on
        print(f"failed: {model} {plan.layout.name}: {error}", flush=True)
        return
    lines = (run_dir / "steps.jsonl").read_text().splitlines()
    took = sorted(json.loads(line).get("time_s", 0) for line in lines)
    print(
        f"{model} {plan.layout.name}: predicted {1e3 * told:.1f} ms, ran "
        f"{1e3 * took[len(took) // 2]:.1f}, in {time.monotonic() - began:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    BEGUN = time.monotonic()
    main(Path(sys.argv[1]).resolve(), float(sys.argv[2]), *sys.argv[3:])
