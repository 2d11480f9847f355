"""The peak memory that is predicted for a layout, against what its ranks' tensors take at most.

Random layouts over pipelines, ZeRO, tensor, sequence and expert parallelism and recomputation.
"""

import random
from statistics import mean

import msgspec
import pytest
from msgspec.structs import replace

from meshwise.engine import data as engine_data
from meshwise.engine import step, train
from meshwise.parallel import mesh
from meshwise.prices import Prices, unmeasured
from meshwise.search.predict import memory_of
from meshwise.search.space import legal_layouts
from meshwise.spec import (
    Cluster,
    Decoder,
    Device,
    Experts,
    Layout,
    Mla,
    Model,
    Plan,
    Recipe,
    Tier,
    Workload,
    stages_of,
)
from meshwise.spec.layout import SPLIT

pytestmark = pytest.mark.dist

WORKLOAD = Workload(global_batch_size=8, seq_len=64)
GPT = Model(hidden=128, layers=4, heads=4, ffn=512, vocab=1024, max_seq_len=64)
LLAMA = Decoder(
    hidden=128, layers=4, heads=8, kv_heads=4, head_dim=16, ffn=352, vocab=1024, max_seq_len=64
)
LATENT = Mla(kv_lora_rank=32, nope_head_dim=16, rope_head_dim=8, v_head_dim=24)
FAMILIES = {
    "gpt": GPT,
    "llama": LLAMA,
    "qwen": replace(LLAMA, qkv_bias=True, qk_norm=True, tied=True),
    "mixtral": replace(LLAMA, experts=Experts(num_experts=4, top_k=2, ffn=256)),
    "deepseek": replace(
        LLAMA, kv_heads=8, mla=LATENT,
        experts=Experts(
            num_experts=8, top_k=2, ffn=128, shared_ffn=128, first_dense=1, router_bias=True
        ),
    ),
    "gpt experts": replace(GPT, experts=Experts(num_experts=4, top_k=2, ffn=256, every=2)),
}  # fmt: skip
HOST = Cluster(
    name="here",
    num_hosts=1,
    num_devices_per_host=4,
    device=Device(
        name="cpu", kind="cpu", memory_bytes=2**34, peak_flops={"bf16": 1e12}, peak_source="none"
    ),
    tiers=(Tier(name="host", num_devices=4),),
)


def measured(ranks, plan, layouts):
    """The highest of all ranks' peaks, by layout."""
    plan, found = msgspec.json.decode(plan, type=Plan), []
    for layout in msgspec.json.decode(layouts, type=list[Layout]):
        stages = stages_of(layout, plan.model)
        changed = replace(plan, layout=layout, stages=stages)
        place = mesh.build(layout, "cpu")
        rows = step.rows(layout, ranks.rank)
        batch = engine_data.batches(plan.model, WORKLOAD, steps=1, seed=0, file=None, rows=rows)
        training = step.prepare(changed, place, batch, ranks.device, dtype=plan.dtype, seed=0)
        for _ in range(2):
            step.run(training, 0)
        found.append(train._peak(ranks, training)["peak_bytes"])
    return found


def drawn(model, dtype, count, seed):
    """Layouts of four ranks, of which no two are alike but for their schedule."""
    costs = replace(unmeasured(HOST), dtype=dtype, lowering="eager", memory_overhead_bytes=0)
    layouts, _ = legal_layouts(model, WORKLOAD, costs, 4)
    chance, found = random.Random(seed), []
    for layout in chance.sample(layouts, count):
        words = ["none"] if layout.schedule in SPLIT else ["none", "selective", "full"]
        found.append(replace(layout, recompute=chance.choice(words)))
    return costs, found


def errors(gloo_ranks, plan_of, name, dtype, count, seed):
    """(layout, predicted / measured - 1) of random layouts."""
    model = FAMILIES[name]
    costs, layouts = drawn(model, dtype, count, seed)
    plan = plan_of(model, WORKLOAD, layouts[0], dtype=dtype)
    plan = replace(plan, recipe=Recipe(routing="balanced"))
    given = {"plan": plan, "layouts": layouts}
    given = {key: msgspec.json.encode(value).decode() for key, value in given.items()}
    replies = gloo_ranks(4, measured, **given)
    prices = Prices(costs)
    found = []
    for layout, *peaks in zip(layouts, *replies, strict=True):
        predicted = memory_of(model, WORKLOAD, layout, prices)[1].total_bytes
        found.append((f"{name} {dtype} {layout.name}", predicted / max(peaks) - 1))
    return found


@pytest.mark.whole
@pytest.mark.xfail(reason="of 6 layouts two are 16 and 12 % low (bf16: tp with sp; pp with ZeRO-3)")
@pytest.mark.parametrize("count", [1, 7])
def test_predicted_peaks_are_those_of_the_ranks(gloo_ranks, plan_of, count):
    found = []
    for number, name in enumerate(FAMILIES):
        dtype = ("fp32", "bf16")[number % 2]
        found += errors(gloo_ranks, plan_of, name, dtype, count, number)
    for name, error in found:
        print(f"{100 * error:6.2f} %  {name}")
    assert max(abs(error) for _, error in found) <= 0.06, found
    assert mean(abs(error) for _, error in found) <= 0.02, found
