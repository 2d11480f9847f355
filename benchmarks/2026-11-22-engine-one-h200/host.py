"""Host and device time of a microbatch of GPT-350M on one GPU, 32 of 2 x 1024 tokens a step:

    python -m torch.distributed.run --nproc-per-node 1 host.py RUNS [seen | unsharded]

``seen``: FSDP2's hooks run in every microbatch. ``unsharded``: without FSDP2, weights in bf16.
"""

import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

import meshwise
from meshwise.engine import step
from meshwise.parallel import data, pipeline
from meshwise.spec import Layout, Recipe

COUNT = 32
runs, *words = sys.argv[1:]
recipe = Recipe()
if "seen" in words:
    pipeline.may_rest = lambda layout: False
if "unsharded" in words:
    data.is_needed = lambda layout, dtype: False
    recipe = Recipe(weights="bf16", reduce="bf16")

inner, times = step.run, []


def run(training, index, *mark):
    """The fourth and the sixth step begin with an idle device; the seventh is profiled."""
    if len(times) in (3, 5):
        torch.cuda.synchronize()
    start = time.perf_counter()
    if len(times) == 6:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            total = inner(training, index, *mark)
            torch.cuda.synchronize()
        kernels = [e for e in seen.events() if e.device_type.name == "CUDA"]
        busy = sum(kernel.device_time_total for kernel in kernels) / 1e3 / COUNT
        print(f"{words} {len(kernels) / COUNT:.0f} kernels and {busy:.1f} ms a microbatch")
    else:
        total = inner(training, index, *mark)
    times.append(1e3 * (time.perf_counter() - start) / COUNT)
    return total


step.run = run
(run_dir,) = meshwise.run(
    model="gpt-350m", layout=Layout(microbatch_size=2, num_microbatches=COUNT), recipe=recipe,
    dtype="bf16", lowering="compiled", seq_len=1024, steps=6, warmup=2, runs=runs,
)  # fmt: skip
print(f"{words} host, ms a microbatch:", [round(one, 1) for one in times])
print(f"{words} steps, s:", [round(one, 3) for one in meshwise.show(run_dir).samples[0].times_s])
