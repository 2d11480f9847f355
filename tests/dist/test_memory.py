"""The high-water mark of tensor bytes against counts by hand, and against a whole life's trace."""

import msgspec
import numpy as np
import pytest
import torch

from meshwise.engine import memory, step
from meshwise.engine.data import Batches
from meshwise.parallel import mesh
from meshwise.spec import Layout, Model, Plan, Workload

MB = 10**6


def megabytes(count):
    return torch.empty(count * MB, dtype=torch.uint8)


def test_allocations_frees_and_resizes():
    held = megabytes(5)

    def work():
        first = megabytes(10)  # 5 + 10
        second = megabytes(4)  # 5 + 14
        del first  # 5 + 4
        second.untyped_storage().resize_(0)  # 5 + 0
        second.untyped_storage().resize_(20 * MB)  # 5 + 20: the most
        del second
        megabytes(16)

    assert memory.peak_tensor_bytes(work, [held]) == pytest.approx(25 * MB, rel=1e-3)


def test_a_storage_counts_once():
    base = megabytes(8)
    views = [base, base[: 2 * MB], base.view(2, -1)]
    assert memory.storage_bytes(views) == 8 * MB
    assert memory.storage_bytes([*views, megabytes(1)]) == 9 * MB
    assert memory.peak_tensor_bytes(lambda: None, views) == 8 * MB


def test_autograd_keeps_what_backward_needs():
    """100 times exp, which saves its result. At the most, in tensors of 1 MB: x, 100 results and
    two gradients, the one that comes into a node and the one that leaves it."""
    x = torch.full((MB // 4,), -1.0, requires_grad=True)

    def work():
        y = x
        for _ in range(100):
            y = y.exp()
        y.sum().backward()
        x.grad = None

    assert memory.peak_tensor_bytes(work, [x]) == pytest.approx(103 * MB, rel=0.01)


MODEL = Model(hidden=64, layers=2, heads=4, ffn=256, vocab=128, max_seq_len=32)


def life_and_step(ranks, plan):
    """Peak bytes of a training from before its model existed, and as ``run`` measures it."""
    plan = msgspec.json.decode(plan, type=Plan)
    tokens = np.zeros((1, plan.layout.microbatch_size, 32), np.int64)
    axes = mesh.build(plan.layout, "cpu")

    def live():
        training = step.prepare(
            plan, axes, Batches(tokens, tokens), ranks.device, dtype=plan.dtype, seed=0
        )
        for _ in range(2):
            step.run(training, 0)
        return training

    live()  # once, so that what torch keeps for good is there
    life = memory.peak_tensor_bytes(live, [])
    training = live()
    return life, memory.peak_tensor_bytes(lambda: step.run(training, 0), training.tensors())


@pytest.mark.dist
@pytest.mark.parametrize(("zero", "dtype"), [(0, "fp32"), (1, "bf16"), (3, "bf16")])
def test_a_traced_step_equals_a_traced_life(gloo_ranks, plan_of, zero, dtype):
    """What is held between steps is found without being told: by tracing the whole life."""
    layout = Layout(dp=2, zero=zero, microbatch_size=2)
    workload = Workload(global_batch_size=4, seq_len=32)
    plan = msgspec.json.encode(plan_of(MODEL, workload, layout, dtype)).decode()
    for life, of_step in gloo_ranks(2, life_and_step, plan=plan):
        assert of_step == pytest.approx(life, rel=0.01)
