"""Layers compiled by inductor train as one device does, also from torch's cache on disk, and
async_tp lets products run beside messages."""

import os
import re

import msgspec
import pytest
import torch
from torch._inductor.utils import run_and_get_code

from meshwise.engine import data, step
from meshwise.parallel import mesh
from meshwise.spec import Decoder, Experts, Layout, Plan, Recipe, Workload
from tests.errors import loss_error

pytestmark = pytest.mark.dist

STEPS = 3
WORKLOAD = Workload(global_batch_size=4, seq_len=16)
BY_SGD = Recipe(optimizer="sgd", learning_rate=0.5, weight_decay=0.0)  # a gradient's error shows
SPLIT = Layout(tp=2, sequence_parallel=True, microbatch_size=4, recompute="selective")
CASES = {  # name -> layout, recipe, vocabulary
    "dp": (Layout(dp=2, zero=3, microbatch_size=1, num_microbatches=2), BY_SGD, 64),
    "tp": (msgspec.structs.replace(SPLIT, recompute="none"), BY_SGD, 64),
    "uneven": (SPLIT, BY_SGD, 61),
    "full": (msgspec.structs.replace(SPLIT, recompute="full"), BY_SGD, 64),
    "experts": (Layout(dp=2, ep=2, zero=2, microbatch_size=2, recompute="full"), BY_SGD, 64),
    "async": (SPLIT, msgspec.structs.replace(BY_SGD, async_tp=True), 64),
}


@pytest.fixture
def plans(plan_of):
    """case -> its plan in JSON; both ranks compute with the one key head."""

    def make(case, dtype="fp32"):
        layout, recipe, vocab = CASES[case]
        experts = Experts(num_experts=4, top_k=2, ffn=24) if case == "experts" else None
        model = Decoder(
            hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=48, vocab=vocab,
            max_seq_len=16, experts=experts,
        )  # fmt: skip
        plan = plan_of(model, WORKLOAD, layout, dtype=dtype, lowering="compiled")
        return msgspec.json.encode(msgspec.structs.replace(plan, recipe=recipe)).decode()

    return make


def prepared(ranks, plan, cache):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch._dynamo.reset()
    plan = msgspec.json.decode(plan, type=Plan)
    mine = batches(plan, step.rows(plan.layout, ranks.rank))
    place = mesh.build(plan.layout, "cpu")
    return step.prepare(plan, place, mine, ranks.device, dtype=plan.dtype, seed=0)


def batches(plan, rows):
    return data.batches(plan.model, plan.workload, steps=STEPS, seed=5, file=None, rows=rows)


def losses(ranks, plan, cache):
    """Of three steps, compiled and once more from the cache: the means over ranks."""
    found = []
    for _ in range(2):
        training = prepared(ranks, plan, cache)
        of_ranks = ranks.gather([float(step.run(training, index)) for index in range(STEPS)])
        found.append([sum(each) / len(each) for each in zip(*of_ranks, strict=True)])
    return found


@pytest.mark.parametrize(
    "case",
    [
        "dp",
        "uneven",
        "experts",
        *(pytest.param(case, marks=pytest.mark.whole) for case in ("tp", "full", "async")),
    ],
)
def test_losses_are_those_of_one_device(gloo_ranks, plans, tmp_path, case):
    check(gloo_ranks, plans(case), tmp_path, 1e-5)


def test_bf16_stays_near_them(gloo_ranks, plans, tmp_path):
    check(gloo_ranks, plans("dp", "bf16"), tmp_path, 2e-3)


def check(gloo_ranks, text, cache, bound):
    plan = msgspec.json.decode(text, type=Plan)
    alone = step.prepare_alone(plan, batches(plan, slice(None)), torch.device("cpu"), seed=0)
    due = [float(step.run(alone, index)) for index in range(STEPS)]
    for found in gloo_ranks(2, losses, plan=text, cache=str(cache))[0]:
        assert loss_error(found, due) < bound


def overlapped(ranks, plan, cache):
    """How many of a layer's messages have products between their start and their end."""
    training = prepared(ranks, plan, cache)
    _, codes = run_and_get_code(step.run, training, 0)
    starts = re.compile(r"(\w+) = torch\.ops\._c10d_functional\.\w+_tensor\.default\(")
    count = 0
    for code in codes:
        for start in starts.finditer(code):
            until = code.find(f"wait_tensor.default({start[1]})", start.end())
            count += "extern_kernels.mm(" in code[start.end() : until]
    return count


def test_async_tp_awaits_messages_late(gloo_ranks, plans, tmp_path):
    whole, asynchronous = (
        gloo_ranks(2, overlapped, plan=plans(case), cache=str(tmp_path / case))[0]
        for case in ("uneven", "async")
    )
    assert (whole, asynchronous) == (0, 4)  # of ten
