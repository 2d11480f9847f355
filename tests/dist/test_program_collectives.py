"""The collectives of a real step, forward and backward, are those of the program that is priced.

They are recorded in the dispatcher, as in ``test_fsdp_collectives``; DTensor's pass it under names
of their own.
"""

from collections import Counter

import msgspec
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwise import models
from meshwise.engine import data as engine_data
from meshwise.engine import step
from meshwise.parallel import apply, mesh, pipeline
from meshwise.probe.importers import plan_trace
from meshwise.spec import (
    DTYPE_BYTES,
    Collective,
    Cuts,
    Decoder,
    Experts,
    Layout,
    Mla,
    Model,
    Plan,
    Recipe,
    WideResNet,
    Workload,
    stages_of,
)

pytestmark = pytest.mark.dist

WORKLOAD = Workload(global_batch_size=4, seq_len=16)
LLAMA = Decoder(
    hidden=32, layers=2, heads=8, kv_heads=4, head_dim=4, ffn=48, vocab=96, max_seq_len=16
)
LATENT = Mla(kv_lora_rank=20, nope_head_dim=4, rope_head_dim=2, v_head_dim=6)
FAMILIES = {
    "gpt": Model(hidden=32, layers=2, heads=4, ffn=128, vocab=96, max_seq_len=16),
    "llama": LLAMA,
    "qwen": replace(LLAMA, qkv_bias=True, qk_norm=True),
    "latent": replace(LLAMA, kv_heads=8, mla=LATENT),
    "latent q": replace(LLAMA, kv_heads=8, mla=replace(LATENT, q_lora_rank=24), qkv_bias=True),
    "gemma": replace(
        LLAMA,
        norms="both",
        qk_norm=True,
        activation="gelu",
        embed_scale=8.0,
        softmax_scale=0.1,
        residual_scale=0.5,
        logits_scale=0.5,
        window=6,
        full_layers=(1,),
    ),
    "ungated": replace(LLAMA, gated=False, mlp_bias=True, out_bias=True, kv_heads=8),
}
SHARED = Experts(
    num_experts=4, top_k=2, ffn=24, shared_ffn=16, first_dense=1, router_bias=True, shared_gate=True
)
EXPERTS = {
    "gpt experts": replace(FAMILIES["gpt"], experts=Experts(num_experts=4, top_k=2, ffn=16)),
    "experts": replace(LLAMA, experts=Experts(num_experts=4, top_k=2, ffn=24, every=2)),
    "shared experts": replace(LLAMA, experts=SHARED),
    "biased experts": replace(LLAMA, experts=SHARED, mlp_bias=True, gated=False),
}
PLACES = Experts(num_experts=4, top_k=2, ffn=16, capacity_factor=1.0, group_size=4)
CAPACITY = {
    "gpt experts with capacity": replace(FAMILIES["gpt"], experts=PLACES),
    "experts with capacity": replace(LLAMA, experts=replace(PLACES, shared_ffn=16)),
}
FAMILIES |= EXPERTS
IMAGES = WideResNet(blocks=(2, 1), channels=8, width_factor=2, image_size=20, num_classes=6)
WHOLE_EXPERTS = Cuts(stream="seq", experts="experts")
UNEVEN = {  # few first dims divide by 4, and by 2
    "gpt": Model(hidden=30, layers=2, heads=3, ffn=54, vocab=101, max_seq_len=17),
    "llama": Decoder(
        hidden=10, layers=2, heads=3, kv_heads=1, head_dim=6, ffn=9, vocab=11, max_seq_len=16,
        qkv_bias=True, qk_norm=True,
    ),
}  # fmt: skip
FUNCTIONAL = {
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
}
AGREED = 2048  # bytes of what gloo's ranks tell each other before attention, NCCL's only once
LAYOUTS = {
    2: [
        Layout(tp=2, microbatch_size=4),
        Layout(tp=2, sequence_parallel=True, microbatch_size=2, num_microbatches=2),
        Layout(tp=2, sequence_parallel=True, microbatch_size=4, recompute="selective"),
        Layout(tp=2, microbatch_size=4, recompute="full"),
    ],
    4: [
        Layout(tp=4, sequence_parallel=True, microbatch_size=4),
        Layout(dp=2, tp=2, zero=3, microbatch_size=1, num_microbatches=2),
        Layout(dp=2, tp=2, zero=2, sequence_parallel=True, microbatch_size=2, recompute="full"),
    ],
}


class Recorded(TorchDispatchMode):
    """(kind, ranks, bytes of nccl-tests' size) of every collective while it is active."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # what it does with its parts comes here again
            return NotImplemented
        name = func.name().split(".")[0]
        if kind := FUNCTIONAL.get(name):
            if name.startswith("_"):
                held, ranks = args[0], dist.distributed_c10d._resolve_process_group(args[-1]).size()
                size = held.nbytes * (ranks if kind == "all_gather" else 1)
            else:
                group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
                ranks = dist.ProcessGroup.unbox(group).size()
                held = args[0][0] if kind == "all_reduce" else args[kind == "reduce_scatter"]
                size = max(held.nbytes, args[1].nbytes) if kind == "all_to_all" else held.nbytes
                if kind == "all_gather" and not held.is_floating_point() and size == ranks * AGREED:
                    size = 0
            if size:  # of a ring's messages some are empty
                self.calls.append((kind, ranks, size))
        elif "c10d" in name and not name.endswith(("wait_tensor", "_wrap_tensor_autograd")):
            raise AssertionError(f"{name} was not expected")
        return func(*args, **(kwargs or {}))


def issued(ranks, plan, layouts):
    """{layout: calls} of steps as the engine makes them."""
    plan, found = msgspec.json.decode(plan, type=Plan), {}
    for layout in msgspec.json.decode(layouts, type=list[Layout]):
        stages = stages_of(layout, plan.model)
        changed = replace(plan, layout=layout, stages=stages)
        place = mesh.build(layout, "cpu")
        rows = step.rows(layout, ranks.rank)
        batch = engine_data.batches(
            plan.model, plan.workload, steps=1, seed=0, file=None, rows=rows
        )
        training = step.prepare(changed, place, batch, ranks.device, dtype=plan.dtype, seed=0)
        batch = [
            each[0].split(layout.microbatch_size) for each in (training.inputs, training.targets)
        ]
        with Recorded() as recorded, apply.loss_context(layout):
            pipeline.run(training.pipeline, *batch, training.loss)
        found[layout.name] = recorded.calls
    return found


def programmed(model, layout, dtype, rank=0, seq_len=WORKLOAD.seq_len):
    """The same of the program of a rank, but for the loss, whose three numbers a row torch sends
    apart, and for messages of a ring, which are an all-to-all of all that share a sequence."""
    words = layout.recomputed(model.layers)
    graph = models.graph(model, layout.microbatch_size, seq_len, dtype, recompute=words)
    found = Counter()
    cp_rank = rank // layout.tp % layout.cp
    for task in models.program_of(graph, layout, dtype, cp_rank=cp_rank).tasks:
        if not isinstance(task.op, Collective) or task.op.group_size == 1:
            continue
        if task.stream == "cp":
            found["all_to_all", layout.cp, task.op.size_bytes] += 1
            continue
        apart = 3 if task.name.startswith("loss") and layout.placed.head == "vocab" else 1
        found[task.op.kind, task.op.group_size, task.op.size_bytes // apart] += apart
    return found


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.whole)])
@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_issues_what_its_program_has(gloo_ranks, plan_of, world_size, model, dtype):
    compare(gloo_ranks, plan_of, model, LAYOUTS[world_size], dtype)


@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
def test_gradients_that_are_sums_over_two_axes(gloo_ranks, plan_of, model):
    """Each order of the sums issues its own collectives. Sequence parallelism leaves norms and
    routers whole on tp ranks; ``cuts`` leaves attention, embedding and head whole, too."""
    dealt = {"dp": 2, "tp": 2, "microbatch_size": 2}
    cuts = Cuts(stream="seq", attention="batch", embed="seq", head="seq")
    layouts = [
        Layout(**dealt, tp_sums="first", sequence_parallel=True),
        Layout(**dealt, tp_sums="first", cuts=cuts, zero=3),
        Layout(**dealt, tp_sums="last", cuts=cuts, zero=3),
        Layout(**dealt, tp_sums="together", sequence_parallel=True, recompute="full"),
        Layout(**dealt, tp_sums="together", cuts=cuts),
    ]
    first_shard = 2  # of one row of a weight the other ranks have nothing
    compare(gloo_ranks, plan_of, model, layouts, "bf16", first_shard)


@pytest.mark.parametrize("model", [FAMILIES["gpt"], LLAMA, EXPERTS["experts"]])
def test_what_traces_are_compared_with_is_what_a_step_issues(gloo_ranks, plan_of, model):
    """Without the gradient norm, which the optimizer takes."""
    layouts = [*LAYOUTS[4], Layout(dp=4, zero=3, replicas=2, microbatch_size=1)]
    if model.experts:
        layouts = [Layout(dp=2, tp=2, ep=2, zero=2, sequence_parallel=True, microbatch_size=2)]
    plan = plan_of(model, WORKLOAD, Layout(dp=4), dtype="bf16")
    plan = replace(plan, recipe=Recipe(routing="balanced", max_grad_norm=0))
    given = {"plan": plan, "layouts": layouts}
    given = {name: msgspec.json.encode(value).decode() for name, value in given.items()}
    issued_by_rank_0, *_ = gloo_ranks(4, issued, **given)
    for layout in layouts:
        due = Counter()
        for one in plan_trace.expected(model, layout, WORKLOAD.seq_len, "bf16", plan.recipe):
            op = one.collective
            parts = 1 if op.kind == "all_reduce" else op.group_size
            size = one.elements_per_rank * parts * DTYPE_BYTES[op.dtype]
            due[op.kind, op.group_size, size] += one.count
        assert due == Counter(map(tuple, issued_by_rank_0[layout.name])), layout.name


CONTEXT = {
    2: [
        Layout(cp=2, microbatch_size=4),
        Layout(cp=2, zero=2, microbatch_size=2, num_microbatches=2),
        Layout(cp=2, zero=3, microbatch_size=4, recompute="full"),
        Layout(cp=2, microbatch_size=1, num_microbatches=4, recompute="selective"),
    ],
    4: [
        Layout(cp=4, zero=3, microbatch_size=4),
        Layout(dp=2, cp=2, zero=2, microbatch_size=1, num_microbatches=2),
        Layout(dp=2, cp=2, zero=3, replicas=2, microbatch_size=2, recompute="full"),
        Layout(cp=2, tp=2, microbatch_size=4),
        Layout(cp=2, tp=2, zero=3, sequence_parallel=True, microbatch_size=2, num_microbatches=2),
        Layout(cp=2, tp=2, zero=2, cuts=Cuts(feed_forward="seq"), microbatch_size=4),
    ],
}  # fmt: skip
RINGS = {
    "one kv head": replace(FAMILIES["llama"], kv_heads=1),
    "three kv heads": replace(FAMILIES["llama"], heads=6, kv_heads=3, head_dim=8),
    "five heads": replace(FAMILIES["gpt"], hidden=40, heads=5),
    "narrow values": replace(LLAMA, kv_heads=8, mla=replace(LATENT, v_head_dim=4)),
    "narrow values in a ring": replace(
        LLAMA, heads=3, kv_heads=3, mla=replace(LATENT, v_head_dim=4)
    ),
}


@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_share_sequences(gloo_ranks, plan_of, world_size, model):
    compare(gloo_ranks, plan_of, model, CONTEXT[world_size], "bf16")


@pytest.mark.parametrize("model", RINGS.values(), ids=RINGS)
def test_every_way_of_attention_over_ranks(gloo_ranks, plan_of, model):
    layouts = [
        Layout(cp=4, zero=3, microbatch_size=4),
        Layout(dp=2, cp=2, zero=2, microbatch_size=2, recompute="full"),
    ]
    compare(gloo_ranks, plan_of, model, layouts, "bf16")


@pytest.mark.parametrize(
    "model", [*EXPERTS.values(), *CAPACITY.values()], ids=[*EXPERTS, *CAPACITY]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_hold_different_experts(gloo_ranks, plan_of, world_size, model):
    layouts = {
        2: [
            Layout(dp=2, ep=2, microbatch_size=2),
            Layout(dp=2, ep=2, zero=3, microbatch_size=1, num_microbatches=2),
            Layout(dp=2, ep=2, zero=2, microbatch_size=2, recompute="full"),
        ],
        4: [
            Layout(dp=4, ep=2, zero=3, microbatch_size=1),
            Layout(dp=4, ep=2, microbatch_size=1),
            Layout(dp=4, ep=2, zero=1, replicas=2, microbatch_size=1),
            Layout(dp=2, tp=2, ep=2, zero=2, sequence_parallel=True, microbatch_size=2),
            Layout(dp=2, tp=2, ep=2, microbatch_size=1, num_microbatches=2),
            Layout(dp=2, tp=2, ep=2, zero=3, cuts=WHOLE_EXPERTS, microbatch_size=2),
            Layout(dp=2, tp=2, cuts=WHOLE_EXPERTS, microbatch_size=1, num_microbatches=2),
            Layout(cp=2, tp=2, ep=2, zero=2, cuts=WHOLE_EXPERTS, microbatch_size=4),
            Layout(tp=4, cuts=WHOLE_EXPERTS, microbatch_size=4, recompute="full"),
        ],
    }
    compare(gloo_ranks, plan_of, model, layouts[world_size], "bf16")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_see_other_images_or_have_other_channels(gloo_ranks, plan_of, world_size, dtype):
    layouts = {
        2: [
            Layout(tp=2, microbatch_size=4),
            Layout(tp=2, microbatch_size=2, num_microbatches=2, recompute="selective"),
            Layout(tp=2, microbatch_size=4, recompute="full"),
            Layout(dp=2, microbatch_size=1, num_microbatches=2),
            Layout(dp=2, zero=2, microbatch_size=1, num_microbatches=2, recompute="selective"),
            Layout(dp=2, zero=3, microbatch_size=2, recompute="full"),
        ],
        4: [
            Layout(tp=4, microbatch_size=4),
            Layout(dp=4, zero=1, microbatch_size=1),
            Layout(dp=4, zero=3, replicas=2, microbatch_size=1, recompute="full"),
            Layout(dp=2, tp=2, zero=3, microbatch_size=1, num_microbatches=2),
            Layout(dp=2, tp=2, microbatch_size=2, recompute="full"),
        ],
    }
    compare(gloo_ranks, plan_of, IMAGES, layouts[world_size], dtype)


@pytest.mark.parametrize("model", UNEVEN.values(), ids=UNEVEN)
def test_shards_are_padded_as_fsdp2_pads_them(gloo_ranks, plan_of, model):
    layouts = [
        Layout(dp=4, zero=3, microbatch_size=1),
        Layout(dp=4, zero=2, replicas=2, microbatch_size=1),
        Layout(dp=4, zero=1, microbatch_size=1),
    ]
    compare(gloo_ranks, plan_of, model, layouts, "bf16")


def compare(gloo_ranks, plan_of, model, layouts, dtype, ranks=None):
    images = isinstance(model, WideResNet)
    workload = replace(WORKLOAD, seq_len=1) if images else WORKLOAD
    plan = plan_of(model, workload, Layout(dp=4), dtype=dtype)
    plan = replace(plan, recipe=Recipe(routing="balanced"))
    given = {"plan": plan, "layouts": layouts}
    given = {name: msgspec.json.encode(value).decode() for name, value in given.items()}
    for rank, found in enumerate(gloo_ranks(layouts[0].num_devices, issued, **given)[:ranks]):
        for layout in layouts:
            calls = Counter(tuple(call) for call in found[layout.name])
            due = programmed(model, layout, dtype, rank)
            assert calls == due, (layout.name, calls - due, due - calls)
