"""Microbatches that FSDP2 does not see: the same numbers, bit for bit, as if it saw all."""

import hashlib

import msgspec
import pytest
import torch

from meshwise import torch_private
from meshwise.engine import data, step
from meshwise.parallel import mesh, pipeline
from meshwise.spec import Layout, Workload
from tests.dist.conftest import _plan
from tests.dist.matrix import FAMILIES, _fits, workload

pytestmark = pytest.mark.dist

FOUR = {"num_microbatches": 4, "microbatch_size": 2}  # of one row strides are ambiguous
DTYPES = ("bf16", "fp32")
PIPED = {"pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2, **FOUR}
# layout and how many of the four microbatches of a stage FSDP2 sees
LAYOUTS = {
    1: [(Layout(**FOUR), 0), (Layout(**FOUR, recompute="full"), 0)],
    2: [
        (Layout(tp=2, sequence_parallel=True, **FOUR), 0),
        (Layout(dp=2, zero=1, **FOUR), 2),
        (Layout(dp=2, **FOUR, recompute="selective"), 2),
        (Layout(dp=2, zero=2, **FOUR), 4),
        (Layout(cp=2, **FOUR), 2),
    ],
    4: [
        (Layout(tp=2, **PIPED), 0),
        (Layout(dp=2, zero=1, **PIPED), 2),
        (Layout(dp=2, tp=2, **FOUR), 2),
    ],
}


def trained(ranks, name, layouts, dtype):
    """[layout, results, those where FSDP2 sees all] of every layout that suits the model."""
    model, found = FAMILIES[name], []
    for layout in msgspec.json.decode(layouts, type=list[Layout]):
        rows = layout.microbatch_rows * layout.num_microbatches
        work = Workload(global_batch_size=rows, seq_len=workload(ranks.world_size, model).seq_len)
        if _fits(model, work, layout):
            results = [_trained(ranks, model, work, layout, dtype, may) for may in (True, False)]
            found.append([layout.name, *results])
    return found


def _trained(ranks, model, work, layout, dtype, may_rest):
    """Losses of two steps, what became of the weights, and how many forwards FSDP2 saw."""
    plan, place = _plan(model, work, layout), mesh.build(layout, "cpu")
    batches = data.batches(
        model, work, steps=2, seed=5, file=None, rows=step.rows(layout, ranks.rank)
    )
    seen = []
    original = pipeline.may_rest
    if not may_rest:
        pipeline.may_rest = lambda layout: False
    try:
        training = step.prepare(plan, place, batches, ranks.device, dtype=dtype, seed=0)
        for built in training.pipeline.stages.values():
            _count(built.module, seen)
        losses = [float(step.run(training, index)) for index in range(2)]
    finally:
        pipeline.may_rest = original
    hashed = hashlib.sha256()
    for parameter in training.parameters():
        local = mesh.share(parameter.detach())
        hashed.update(local.contiguous().view(torch.uint8).numpy().tobytes())
    return [losses, hashed.hexdigest(), len(seen) / 2 / len(training.pipeline.stages)]


def _count(module, seen):
    """Note every forward of a stage that FSDP2 sees."""
    number = torch_private._state(module)._pre_forward_hook_handle.id
    hook = module._forward_pre_hooks[number]
    module._forward_pre_hooks[number] = lambda *a, **k: (seen.append(0), hook(*a, **k))[1]


# FSDP2 has no part in fp32 on one device.
@pytest.mark.parametrize("world, dtype", [(1, "bf16"), *((n, d) for n in (2, 4) for d in DTYPES)])
@pytest.mark.parametrize("name", ["gpt", "llama", "deepseek", "wide-resnet"])
def test_what_fsdp2_does_not_see_is_the_same(gloo_ranks, name, world, dtype):
    cases = LAYOUTS[world]
    text = msgspec.json.encode([layout for layout, _ in cases]).decode()
    seen = {layout.name: count for layout, count in cases}
    for rank in gloo_ranks(world, trained, name=name, layouts=text, dtype=dtype):
        assert rank
        for of_layout, (losses, weights, forwards), (expected, same, every) in rank:
            assert losses == expected, of_layout
            assert weights == same, of_layout
            assert (forwards, every) == (seen[of_layout], 4), of_layout
