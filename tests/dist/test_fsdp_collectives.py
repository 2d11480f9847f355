"""The collectives that FSDP2 really issues in a step's forward and backward are those planned.

They are recorded where every call of torch.distributed passes, in the dispatcher (``c10d::``), so
that nothing is missed that has another name in Python.
"""

from collections import Counter

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwise.engine import data as engine_data
from meshwise.engine import step
from meshwise.models import fsdp
from meshwise.parallel import apply, data, mesh, pipeline
from meshwise.spec import Decoder, Experts, Layout, Mla, Model, Plan, Recipe, Workload, stages_of

pytestmark = pytest.mark.dist

WORKLOAD = Workload(global_batch_size=8, seq_len=16)
GPT = Model(hidden=30, layers=2, heads=3, ffn=54, vocab=101, max_seq_len=17)  # 17: uneven

# No first dim but the experts' divides by 4, and few by 2.
DENSE = Decoder(
    hidden=10, layers=2, heads=3, kv_heads=1, head_dim=5, ffn=9, vocab=11, max_seq_len=8
)
DECODERS = {
    "untied": DENSE,
    "tied, biases, norms": msgspec.structs.replace(
        DENSE, tied=True, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True
    ),
    "experts, latent attention": msgspec.structs.replace(
        DENSE,
        layers=3,
        kv_heads=3,
        mla=Mla(q_lora_rank=7, kv_lora_rank=5, nope_head_dim=3, rope_head_dim=2, v_head_dim=5),
        experts=Experts(
            num_experts=6, top_k=2, ffn=5, shared_ffn=3, first_dense=1, router_bias=True
        ),
    ),
}

KINDS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
}


class Recorded(TorchDispatchMode):
    """[kind, ranks, elements of a rank, dtype] of every collective while it is active."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        if name.startswith("c10d"):
            kind = KINDS.get(name, name)
            tensors = {"all_gather": args[1:2], "reduce_scatter": args[:1]}.get(kind, args[0])
            (held,) = tensors
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            ranks = dist.ProcessGroup.unbox(group).size()
            self.calls.append([kind, ranks, held.numel(), str(held.dtype)])
        return func(*args, **(kwargs or {}))


def layouts(world_size):
    """Every ZeRO with and without replicas, one microbatch and two."""
    found = []
    for zero in range(4):
        for replicas in (1, 2) if zero and world_size == 4 else (1,):
            for count in (1, 2):
                size = WORKLOAD.global_batch_size // world_size // count
                found.append(
                    Layout(
                        dp=world_size,
                        zero=zero,
                        replicas=replicas,
                        microbatch_size=size,
                        num_microbatches=count,
                    )
                )
    return found


def expected(model, layout, dtype):
    """What the plan of this layout says, as ``Recorded`` does, counted."""
    plan = fsdp.planned(
        model,
        shard=layout.shards,
        replicas=layout.dp // layout.shards,
        param_dtype=dtype,
        reduce_dtype="fp32",
        reshard=layout.zero == 3,
        microbatches=layout.num_microbatches if layout.zero >= 2 else 1,
    )
    names = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
    found = Counter()
    for each in plan:
        op = each.collective
        key = (op.kind, op.group_size, each.elements_per_rank, names[op.dtype])
        found[key] += each.count
        # the record that is timed and priced has the same size
        gathered = 1 if op.kind == "all_reduce" else op.group_size
        width = 4 if op.dtype == "fp32" else 2
        assert op.size_bytes == each.elements_per_rank * gathered * width
    return found


def counted(calls):
    return Counter(tuple(call) for call in calls)


def of_a_gpt(ranks, plan):
    """{layout: calls} of the project's GPT, as the engine trains it."""
    plan, found = msgspec.json.decode(plan, type=Plan), {}
    for layout in layouts(ranks.world_size):
        stages = stages_of(layout, GPT)
        changed = msgspec.structs.replace(plan, layout=layout, stages=stages)
        place = mesh.build(layout, "cpu")
        rows = step.rows(layout, ranks.rank)
        batch = engine_data.batches(GPT, WORKLOAD, steps=1, seed=0, file=None, rows=rows)
        training = step.prepare(changed, place, batch, ranks.device, dtype=plan.dtype, seed=0)
        batch = [
            each[0].split(layout.microbatch_size) for each in (training.inputs, training.targets)
        ]
        with Recorded() as recorded, apply.loss_context(layout):
            pipeline.run(training.pipeline, *batch, training.loss)
        found[layout.name] = recorded.calls
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_of_a_gpt_issues_what_is_planned(gloo_ranks, plan_of, world_size, dtype):
    plan = msgspec.json.encode(plan_of(GPT, WORKLOAD, Layout(dp=8), dtype=dtype)).decode()
    for found in gloo_ranks(world_size, of_a_gpt, plan=plan):
        assert list(found) == [layout.name for layout in layouts(world_size)]
        for layout in layouts(world_size):
            assert counted(found[layout.name]) == expected(GPT, layout, dtype), layout.name


class Unit(nn.Module):
    """Some weights, each of which takes part in the result."""

    def __init__(self, weights):
        super().__init__()
        self.held = nn.ParameterList(torch.ones(weight.shape) for weight in weights)

    def add(self, x):
        return x + sum(weight.sum() for weight in self.held)

    def forward(self, x):
        return self.add(x)


class Whole(Unit):
    """The layers between two uses of the root's weights, as embedding and head."""

    def __init__(self, units):
        *layers, root = units
        super().__init__(root.weights)
        self.layers = nn.ModuleList(Unit(layer.weights) for layer in layers)

    def forward(self, x):
        x = self.add(x)
        for layer in self.layers:
            x = layer(x)
        return self.add(x)


def of_decoders(ranks, dtype):
    """{decoder: {layout: calls}} of modules with the parameters of decoders."""
    found = {}
    for layout in layouts(ranks.world_size):
        place = mesh.build(layout, "cpu")
        for name, model in DECODERS.items():
            module = Whole(fsdp.units(model))
            for layer in module.layers:
                data.shard(layer, place, dtype, Recipe(), root=False)
            data.shard(module, place, dtype, Recipe(), root=True)
            with Recorded() as recorded:
                for index in range(layout.num_microbatches):
                    last = index + 1 == layout.num_microbatches
                    data.before_backward(module, layout, last=last)
                    module(torch.ones(3)).sum().backward()
            found.setdefault(name, {})[layout.name] = recorded.calls
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_of_a_decoder_issues_what_is_planned(gloo_ranks, world_size, dtype):
    for found in gloo_ranks(world_size, of_decoders, dtype=dtype):
        for name, model in DECODERS.items():
            for layout in layouts(world_size):
                calls = counted(found[name][layout.name])
                assert calls == expected(model, layout, dtype), (name, layout.name)


def test_these_decoders_are_padded():
    """So that the tests above see padding: a rank's share is more than an even one."""
    for model in DECODERS.values():
        for unit in fsdp.units(model):
            assert 4 * fsdp.shard_elements(unit, 4) > fsdp.num_elements(unit)
