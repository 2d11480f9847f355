"""Layers that are alike are compiled once, whatever is done to them."""

import msgspec
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from meshwise import ranks
from meshwise.engine import data, step
from meshwise.parallel import mesh
from meshwise.spec import Decoder, Layout, Recipe, Workload

pytestmark = pytest.mark.dist

MODEL = Decoder(
    hidden=32, layers=5, heads=2, kv_heads=1, head_dim=16, ffn=48, vocab=64, max_seq_len=16
)
WORKLOAD = Workload(global_batch_size=2, seq_len=16)
CASES = {
    "plain": (Recipe(), "none"),
    "fp8": (Recipe(fp8=True), "none"),
    "offload": (Recipe(offload=True), "none"),
    "selective": (Recipe(), "selective"),
    "full": (Recipe(), "full"),
}


@pytest.fixture(scope="module")
def one_rank():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield ranks.alone()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_layers_share_a_graph(one_rank, plan_of, monkeypatch, case):
    recipe, recompute = CASES[case]
    layout = Layout(microbatch_size=2, recompute=recompute)
    plan = plan_of(MODEL, WORKLOAD, layout, dtype="bf16", lowering="compiled")
    plan = msgspec.structs.replace(plan, recipe=recipe)
    by_inductor = nn.Module.compile

    def by_aot(module, **options):
        by_inductor(module, backend="aot_eager", **options)

    monkeypatch.setattr(nn.Module, "compile", by_aot)
    torch._dynamo.reset()
    counters.clear()
    batches = data.batches(MODEL, WORKLOAD, steps=1, seed=0, file=None, rows=slice(None))
    place = mesh.build(layout, "cpu")
    training = step.prepare(plan, place, batches, one_rank.device, dtype="bf16", seed=0)
    step.run(training, 0)
    assert counters["stats"]["unique_graphs"] == 2  # a layer's and the loss'
