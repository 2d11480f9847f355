"""What a plan is said to hold is what the ranks' live tensors hold, element by element."""

import msgspec
import pytest
import torch

from meshwise.nn import ModelStage, gpt
from meshwise.parallel import apply, mesh
from meshwise.reshard.holdings import buffers, of_plan
from meshwise.spec import Layout, Model, Plan, Workload

# an uneven vocabulary: tp cuts it in 51 and 50 rows, FSDP2 these in 26, 25 and 25, 25
MODEL = Model(hidden=16, layers=4, heads=4, ffn=24, vocab=101, max_seq_len=7)
WORKLOAD = Workload(global_batch_size=8, seq_len=4)
LAYOUTS = {
    "tp2 zero3": Layout(dp=2, tp=2, zero=3, microbatch_size=4),
    "tp2 zero0": Layout(dp=2, tp=2, microbatch_size=4),
    "zero1": Layout(dp=4, zero=1, microbatch_size=2),
    "zero2 repeated": Layout(dp=4, zero=2, replicas=2, microbatch_size=2),
    "tp4": Layout(tp=4, microbatch_size=8),
    "looped": Layout(
        dp=2, pp=2, zero=3, schedule="interleaved_1f1b", stages_per_rank=2, microbatch_size=1,
        num_microbatches=4,
    ),
    "V": Layout(pp=2, tp=2, schedule="zbv", stages_per_rank=2, num_microbatches=8),
    "uneven": Layout(
        pp=3, meshes=((1, 1), (2, 1), (1, 1)), layers=(1, 2, 1), zero=3, schedule="1f1b",
        microbatch_size=2, num_microbatches=4,
    ),
}  # fmt: skip

pytestmark = pytest.mark.dist


def numbers(name, shape):
    """Other values in every element of every parameter; all are exact in fp32."""
    if name == "head.projection.weight":
        name = "embed.weight"
    start = 4096 * sorted(n for n, _ in gpt.GPT(MODEL).named_parameters()).index(name)
    return torch.arange(start, start + shape.numel(), dtype=torch.float32).view(shape)


def live(ranks, plan):
    """The rank's parameters as they are, and the kinds of placement of its embedding."""
    plan = msgspec.json.decode(plan, type=Plan)
    place = mesh.build(plan.layout, "cpu")
    found, kinds = {}, []
    original = ModelStage.initial_value
    ModelStage.initial_value = lambda stage, name, *_: numbers(
        name, stage.get_parameter(name).shape
    )
    try:
        for stage in plan.stages:
            if stage.pipeline_rank == place.pipeline_rank:
                with torch.device("meta"):
                    module = gpt.GPT(MODEL, range(stage.first_layer, stage.last_layer))
                apply.parallelize(module, place, dtype="fp32", lowering="eager")
                for name, parameter in module.named_parameters():
                    assert name not in found
                    local = getattr(parameter, "_local_tensor", parameter).detach()
                    found[name] = [list(local.shape), local.flatten().tolist()]
                    if name == "embed.weight":
                        kinds = [type(p).__name__ for p in getattr(parameter, "placements", ())]
    finally:
        ModelStage.initial_value = original
    return found, kinds


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_holds_what_live_tensors_hold(gloo_ranks, plan_of, name):
    plan = plan_of(MODEL, WORKLOAD, LAYOUTS[name])
    held = of_plan(plan)
    logical = {name: numbers(name, torch.Size(tensor.shape)) for name, tensor in held.items()}
    returned = gloo_ranks(4, live, plan=msgspec.json.encode(plan).decode())
    for rank, (found, kinds) in enumerate(returned):
        shapes = {name: list(shape) for name, (shape, _) in buffers(held, rank).items()}
        assert shapes == {name: shape for name, (shape, values) in found.items() if values}
        told = {name: torch.full(shape, -1.0) for name, shape in shapes.items()}
        for tensor, (_, _, layout, *_) in held.items():
            for piece in layout:
                if piece.rank == rank:
                    low, high = piece.offset, piece.local(piece.box).high
                    there = tuple(map(slice, low, high))
                    here = tuple(map(slice, *piece.box))
                    told[piece.buffer or tensor][there] = logical[tensor][here]
        for buffer, values in told.items():
            assert values.flatten().tolist() == found[buffer][1], buffer
        if name == "tp2 zero3":
            assert kinds == ["_StridedShard", "Shard"]
