"""Gradients of one batch with tp's messages beside products, against the plain order, on 2 GPUs:
torchrun --nproc-per-node 2 gradients.py

`beside` is Recipe.async_tp; `torch` is torch's own async tensor parallelism, which cuts products
and their messages to pieces through symmetric memory. Six layers each of README.md's two models.
"""

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from meshwise import ranks
from meshwise.engine import data, step
from meshwise.parallel import apply, mesh, pipeline
from meshwise.parallel.mesh import share
from meshwise.spec import Decoder, Layout, Recipe, Workload
from tests.dist.conftest import _plan

SMALL = Decoder(
    hidden=2560, layers=6, heads=32, kv_heads=32, head_dim=80, ffn=6912, vocab=51200,
    max_seq_len=1024,
)  # fmt: skip
LARGE = Decoder(
    hidden=4096, layers=6, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256,
    max_seq_len=8192,
)  # fmt: skip
MODELS = {"2.6b none": (SMALL, 16, "none"), "8b selective": (LARGE, 2, "selective")}
REPEATS = 6


def gradients(joined, model, rows, recompute, asynchronous, by_torch):
    """The loss and {name: this rank's gradient}, again and again."""
    layout = Layout(tp=2, sequence_parallel=True, microbatch_size=rows, recompute=recompute)
    work = Workload(global_batch_size=rows, seq_len=model.max_seq_len)
    plan = _plan(model, work, layout, dtype="bf16", lowering="compiled")
    plan = msgspec.structs.replace(plan, recipe=Recipe(async_tp=asynchronous))
    place = mesh.build(layout, "cuda")
    torch._inductor.config._micro_pipeline_tp = by_torch
    if by_torch:
        _symmetric_memory.enable_symm_mem_for_group(place.mesh["tp"].get_group().group_name)
    torch.compiler.reset()
    batches = data.batches(model, work, steps=1, seed=0, file=None, rows=slice(None))
    training = step.prepare(plan, place, batches, joined.device, dtype="bf16", seed=0)
    module = training.pipeline.stages[0].module
    for _ in range(REPEATS):
        with apply.loss_context(layout):
            batch = (whole[0].split(rows) for whole in (training.inputs, training.targets))
            loss = pipeline.run(training.pipeline, *batch, training.loss)
        yield float(loss), {n: share(p.grad).clone() for n, p in module.named_parameters()}
        training.optimizer.zero_grad()


def main():
    joined = ranks.join()
    for name, (model, rows, recompute) in MODELS.items():
        due = None
        for variant, *how in (
            ("plain", False, False), ("plain again", False, False), ("beside", True, False),
            ("torch", False, True), ("both", True, True),
        ):  # fmt: skip
            found = []
            for loss, each in gradients(joined, model, rows, recompute, *how):
                due = due or each
                errors = {n: float((each[n] - g).norm() / g.norm()) for n, g in due.items()}
                where = max(errors, key=errors.get)
                found.append(f"{loss:.5f} {errors[where]:.1e} {where}")
            for rank in range(2):
                if joined.rank == rank:
                    print(name, variant, f"rank {rank}", *found, sep=" | ", flush=True)
                dist.barrier()
            torch.cuda.empty_cache()
    joined.leave()


main()
