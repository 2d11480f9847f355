"""Layers that are alike are compiled once, whatever is done to them."""

import msgspec
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from meshwise import ranks
from meshwise.engine import data, step
from meshwise.parallel import apply, mesh
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


@pytest.fixture
def compiled(one_rank, plan_of, monkeypatch):
    """model, recipe, recompute -> dynamo's counters after one step."""
    by_inductor, alone = nn.Module.compile, torch.compile

    def by_aot(module, **how):
        by_inductor(module, backend="aot_eager", **how)

    monkeypatch.setattr(nn.Module, "compile", by_aot)
    monkeypatch.setattr(
        apply.torch, "compile", lambda what, **how: alone(what, **{**how, "backend": "aot_eager"})
    )

    def counted(model, recipe, recompute):
        layout = Layout(microbatch_size=2, recompute=recompute)
        plan = plan_of(model, WORKLOAD, layout, dtype="bf16", lowering="compiled")
        plan = msgspec.structs.replace(plan, recipe=recipe)
        torch._dynamo.reset()
        counters.clear()
        batches = data.batches(model, WORKLOAD, steps=1, seed=0, file=None, rows=slice(None))
        place = mesh.build(layout, "cpu")
        training = step.prepare(plan, place, batches, one_rank.device, dtype="bf16", seed=0)
        step.run(training, 0)
        return counters["stats"]

    return counted


@pytest.mark.parametrize("case", CASES)
def test_layers_share_a_graph(compiled, case):
    assert compiled(MODEL, *CASES[case])["unique_graphs"] == 2  # a layer's and the loss'


def test_recomputed_layers_of_several_graphs_are_compiled(compiled):
    """Attention with a window is not compiled; what is around it is, recomputed or not."""
    model = msgspec.structs.replace(MODEL, window=8)
    plain, again = (compiled(model, Recipe(), of) for of in ("none", "full"))
    assert again["unique_graphs"] == plain["unique_graphs"] > 2
