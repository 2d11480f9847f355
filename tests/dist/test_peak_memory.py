"""The peak memory that is predicted for a layout, against what its ranks' tensors take at most.

Random layouts over pipelines, ZeRO, tensor, sequence and expert parallelism and recomputation.
"""

import functools
import random
from statistics import mean

import msgspec
import pytest
from msgspec.structs import replace

from meshwise.engine import data as engine_data
from meshwise.engine import memory, step
from meshwise.models import offload as planned
from meshwise.parallel import mesh, offload
from meshwise.prices import Prices, unmeasured
from meshwise.search.predict import memory_of
from meshwise.search.space import legal_layouts
from meshwise.spec import (
    Cluster,
    Cuts,
    Decoder,
    Device,
    Experts,
    Layout,
    Mla,
    Model,
    Plan,
    Recipe,
    Tier,
    WideResNet,
    Workload,
    stages_of,
)
from meshwise.spec.layout import SPLIT

pytestmark = pytest.mark.dist

LARGE = 2**14  # bytes of a tensor that is offloaded; 1 MiB would leave most of them in place
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
IMAGES = WideResNet(blocks=(2, 2), channels=16, width_factor=2, image_size=64, num_classes=64)
AXES = (
    "pp", "schedule", "stages_per_rank", "tp", "zero", "replicas", "ep", "sequence_parallel",
    "microbatch_size",
)  # fmt: skip
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
    offload.MIN_BYTES = LARGE
    for layout in msgspec.json.decode(layouts, type=list[Layout]):
        stages = stages_of(layout, plan.model)
        changed = replace(plan, layout=layout, stages=stages)
        place = mesh.build(layout, "cpu")
        rows = step.rows(layout, ranks.rank)
        batch = engine_data.batches(
            plan.model, plan.workload, steps=1, seed=0, file=None, rows=rows
        )
        training = step.prepare(changed, place, batch, ranks.device, dtype=plan.dtype, seed=0)
        for _ in range(2):
            step.run(training, 0)
        again = functools.partial(step.run, training, len(training.inputs) - 1)
        found.append(memory.peak_tensor_bytes(again, training.tensors()))
    return found


def costs_in(dtype, hosts=1):
    cluster = replace(HOST, num_hosts=hosts, num_devices_per_host=4 // hosts)
    costs = replace(unmeasured(HOST), dtype=dtype, lowering="eager", memory_overhead_bytes=0)
    return replace(costs, cluster=cluster)


def drawn(model, count, seed):
    """Layouts of four ranks, on one host or on two, which have replicas. Axis by axis, in any
    order, a value is drawn among those that are left: what few layouts have is drawn as often."""
    spaces = [legal_layouts(model, WORKLOAD, costs_in("fp32", hosts), 4)[0] for hosts in (1, 2)]
    layouts = {layout.name: layout for space in spaces for layout in space}
    chance, found = random.Random(seed), []
    for _ in range(count):
        left = list(layouts.values())
        for axis in chance.sample(AXES, len(AXES)):
            value = chance.choice(sorted({getattr(layout, axis) for layout in left}))
            left = [layout for layout in left if getattr(layout, axis) == value]
        layout = layouts.pop(chance.choice(left).name)
        words = ["none"] if layout.schedule in SPLIT else ["none", "selective", "full"]
        found.append(replace(layout, recompute=chance.choice(words)))
    return found


def errors(gloo_ranks, plan_of, name, dtype, layouts, **recipe):
    """(layout, predicted / measured - 1) of each."""
    model = FAMILIES.get(name, IMAGES)
    workload = replace(WORKLOAD, seq_len=1) if model is IMAGES else WORKLOAD
    plan = plan_of(model, workload, layouts[0], dtype=dtype)
    plan = replace(plan, recipe=Recipe(routing="balanced", **recipe))
    given = {"plan": plan, "layouts": layouts}
    given = {key: msgspec.json.encode(value).decode() for key, value in given.items()}
    replies = gloo_ranks(4, measured, **given)
    prices, found = Prices(replace(costs_in(dtype), recipe=plan.recipe)), []
    for layout, *peaks in zip(layouts, *replies, strict=True):
        predicted = memory_of(model, workload, layout, prices)[1].total_bytes
        found.append((f"{name} {dtype} {layout.name}", predicted / max(peaks) - 1))
    return found


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.whole)])
def test_gradients_wait_for_the_end_of_a_backward_that_fsdp2_does_not_see(
    gloo_ranks, plan_of, dtype
):
    layouts = [
        Layout(tp=4, sequence_parallel=True, microbatch_size=4, num_microbatches=2),
        Layout(tp=4, microbatch_size=4, num_microbatches=2, recompute="full"),
        Layout(dp=2, tp=2, zero=1, microbatch_size=1, num_microbatches=4),
    ]
    found = errors(gloo_ranks, plan_of, "llama", dtype, layouts)
    assert max(abs(error) for _, error in found) <= 0.02, found


@pytest.mark.parametrize("count", [1, pytest.param(7, marks=pytest.mark.whole)])
def test_predicted_peaks_are_those_of_the_ranks(gloo_ranks, plan_of, count):
    found = []
    for number, (name, model) in enumerate(FAMILIES.items()):
        layouts, dtypes = drawn(model, count, number), ("fp32", "bf16")
        for start in range(min(2, count)):  # every second layout in the other dtype
            dtype = dtypes[(number + start) % 2]
            found += errors(gloo_ranks, plan_of, name, dtype, layouts[start::2])
    for name, error in sorted(found, key=lambda each: abs(each[1])):
        print(f"{100 * error:6.2f} %  {name}")
    sizes = [abs(error) for _, error in found]
    print(f"{len(found)} layouts: mean {100 * mean(sizes):.2f} %, worst {100 * max(sizes):.2f} %")
    assert max(sizes) <= 0.06, found
    assert mean(sizes) <= 0.02, found


WHOLE_EXPERTS = Cuts(stream="seq", experts="experts")
SHARED = {
    "gpt": [
        Layout(cp=4, zero=3, microbatch_size=8),
        Layout(dp=2, cp=2, zero=2, microbatch_size=2, num_microbatches=2, recompute="full"),
    ],
    "llama": [
        Layout(cp=4, zero=2, microbatch_size=8),
        Layout(cp=2, tp=2, sequence_parallel=True, microbatch_size=8, recompute="selective"),
    ],
    "qwen": [Layout(cp=2, pp=2, schedule="1f1b", microbatch_size=2, num_microbatches=4)],
    "mixtral": [
        Layout(dp=2, cp=2, ep=4, zero=3, microbatch_size=4),
        Layout(dp=2, tp=2, ep=2, zero=3, cuts=WHOLE_EXPERTS, microbatch_size=4),
    ],
    "deepseek": [
        Layout(cp=4, zero=3, microbatch_size=2, num_microbatches=4),
        Layout(dp=2, cp=2, ep=2, zero=2, microbatch_size=4),
        Layout(cp=2, tp=2, cuts=WHOLE_EXPERTS, microbatch_size=4, num_microbatches=2),
    ],
}


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.whole)])
@pytest.mark.parametrize("name", SHARED)
def test_peaks_where_ranks_share_sequences(gloo_ranks, plan_of, name, dtype):
    found = errors(gloo_ranks, plan_of, name, dtype, SHARED[name])
    for layout, error in found:
        print(f"{100 * error:6.2f} %  {layout}")
    assert max(abs(error) for _, error in found) <= 0.06, found


@pytest.mark.parametrize(
    ("weights", "reduce"),
    [
        ("bf16", "bf16"),
        *[
            pytest.param(*each, marks=pytest.mark.whole)
            for each in (("bf16", "fp32"), ("fp32", "bf16"))
        ],
    ],
)
def test_peaks_with_weights_and_reductions_in_bf16(gloo_ranks, plan_of, weights, reduce):
    layouts = [
        Layout(dp=4, zero=3, microbatch_size=2),
        Layout(dp=4, zero=2, microbatch_size=1, num_microbatches=2),
        Layout(dp=4, microbatch_size=1, num_microbatches=2),
        Layout(dp=2, tp=2, zero=1, microbatch_size=1, num_microbatches=4),
        Layout(pp=2, dp=2, zero=1, schedule="1f1b", microbatch_size=1, num_microbatches=4),
    ]
    dtypes = {"weights": weights, "reduce": reduce}
    found = errors(gloo_ranks, plan_of, "llama", "bf16", layouts, **dtypes)
    assert max(abs(error) for _, error in found) <= 0.06, found
    assert mean([abs(error) for _, error in found]) <= 0.025, found


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.whole)])
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_peaks_of_other_optimizers(gloo_ranks, plan_of, optimizer, dtype):
    """The last peaks in the update: by SGD's copies of gradients, and Adafactor's parameter."""
    layouts = [
        Layout(dp=4, zero=3, microbatch_size=2),
        Layout(dp=2, tp=2, zero=2, microbatch_size=2, num_microbatches=2),
        Layout(pp=2, dp=2, zero=1, schedule="1f1b", microbatch_size=1, num_microbatches=4),
        Layout(tp=4, microbatch_size=1, num_microbatches=8, recompute="full"),
        Layout(pp=4, schedule="1f1b", microbatch_size=1, num_microbatches=8, recompute="full"),
    ]
    found = errors(gloo_ranks, plan_of, "llama", dtype, layouts, optimizer=optimizer)
    for layout, error in found:
        print(f"{100 * error:6.2f} %  {layout}")
    assert max(abs(error) for _, error in found) <= 0.06, found


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.whole)])
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt", marks=pytest.mark.whole)])
def test_peaks_where_activations_wait_on_the_host(gloo_ranks, plan_of, monkeypatch, name, dtype):
    """Hosts' copies are memory of the ranks here: they add what the layers save once more. Gate
    and up of eager layers stay on the device under selective recomputation, unlike in plans. The
    pipeline of a GPT in bf16 is told 2.1 % too small, and 2.9 % without offload."""
    monkeypatch.setattr(planned, "MIN_BYTES", LARGE)
    layouts = [
        Layout(dp=4, zero=3, microbatch_size=2),
        Layout(dp=4, microbatch_size=2),
        Layout(dp=2, tp=2, zero=2, microbatch_size=2, num_microbatches=2),
        Layout(dp=2, tp=2, sequence_parallel=True, microbatch_size=4),
        Layout(dp=4, zero=1, microbatch_size=2, recompute="full"),
        Layout(pp=2, dp=2, zero=1, schedule="1f1b", microbatch_size=1, num_microbatches=4),
    ]
    if name == "gpt":
        layouts.append(Layout(dp=4, zero=1, microbatch_size=2, recompute="selective"))
    found = errors(gloo_ranks, plan_of, name, dtype, layouts, offload=True)
    for layout, error in found:
        print(f"{100 * error:6.2f} %  {layout}")
    assert max(abs(error) for _, error in found) <= 0.025, found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_peaks_of_pipelines_whose_activations_wait(gloo_ranks, plan_of, monkeypatch, recompute):
    """The second stage has the peak. Its first layer's input stays, and all that its last saves."""
    monkeypatch.setattr(planned, "MIN_BYTES", LARGE)
    monkeypatch.setitem(FAMILIES, "gpt", replace(GPT, layers=9, hidden=64, ffn=256, vocab=128))
    layout = Layout(
        pp=4, layers=(1, 6, 1, 1), schedule="1f1b", microbatch_size=4, num_microbatches=8,
        recompute=recompute,
    )  # fmt: skip
    monkeypatch.setattr(
        "tests.dist.test_peak_memory.WORKLOAD", replace(WORKLOAD, global_batch_size=32)
    )
    ((_, error),) = errors(gloo_ranks, plan_of, "gpt", "fp32", [layout], offload=True)
    print(f"{100 * error:6.2f} %")
    assert abs(error) <= 0.02


BY_TOKENS = Cuts(stream="seq", attention="batch", embed="seq", head="seq")


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.whole)])
@pytest.mark.parametrize("name", ["llama", pytest.param("mixtral", marks=pytest.mark.whole)])
def test_peaks_where_gradients_are_sums_over_two_axes(gloo_ranks, plan_of, name, dtype):
    """Where all weights are FSDP2's, and where it does not see those that tp repeats."""
    shape = {"dp": 2, "tp": 2, "microbatch_size": 2, "num_microbatches": 2}
    layouts = [
        Layout(**shape, sequence_parallel=True, zero=2, tp_sums="first"),
        Layout(**shape, cuts=BY_TOKENS, zero=3),
        Layout(**shape, sequence_parallel=True, tp_sums="together"),
        Layout(**shape, cuts=BY_TOKENS, tp_sums="together"),
        Layout(**shape, cuts=BY_TOKENS, tp_sums="together", recompute="full"),
    ]
    found = errors(gloo_ranks, plan_of, name, dtype, layouts)
    for layout, error in found:
        print(f"{100 * error:6.2f} %  {layout}")
    assert max(abs(error) for _, error in found) <= 0.06, found


@pytest.mark.parametrize(
    ("dtype", "every"),
    [("fp32", 3), *(pytest.param(dtype, 1, marks=pytest.mark.whole) for dtype in ("fp32", "bf16"))],
)
def test_peaks_of_images(gloo_ranks, plan_of, dtype, every):
    layouts = [
        Layout(dp=4, microbatch_size=2),
        Layout(dp=4, zero=3, microbatch_size=1, num_microbatches=2, recompute="full"),
        Layout(dp=4, zero=2, microbatch_size=2, recompute="selective"),
        Layout(tp=4, microbatch_size=4, num_microbatches=2),
        Layout(dp=2, tp=2, zero=1, microbatch_size=2, num_microbatches=2),
        Layout(pp=2, schedule="1f1b", dp=2, zero=2, microbatch_size=1, num_microbatches=4),
        Layout(pp=2, schedule="1f1b", tp=2, microbatch_size=2, num_microbatches=4),
        Layout(pp=2, stages_per_rank=2, schedule="looped_bfs", dp=2, zero=3, microbatch_size=2,
            num_microbatches=2, recompute="full"),
    ]  # fmt: skip
    found = errors(gloo_ranks, plan_of, "images", dtype, layouts[::every])
    for layout, error in found:
        print(f"{100 * error:6.2f} %  {layout}")
    sizes = [abs(error) for _, error in found]
    assert max(sizes) <= 0.06, found
    assert mean(sizes) <= 0.02, found
