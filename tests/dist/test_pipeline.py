"""Every schedule, alone and with every other axis, computes what one device computes.

The oracle is a plain GPT with torch's own AdamW and clipping on the whole global batch at once.
"""

import functools
import types

import msgspec
import pytest
import torch

from meshwise.engine import data, step
from meshwise.nn import gpt
from meshwise.nn.stage import cross_entropy
from meshwise.parallel import mesh, pipeline
from meshwise.schedule import table
from meshwise.spec import Layout, Model, Plan, Recipe, Workload, stages_of
from tests.errors import largest, loss_error

# an uneven vocabulary, and fewer positions used than there are
MODEL = Model(hidden=16, layers=4, heads=4, ffn=32, vocab=101, max_seq_len=12)
WORKLOAD = Workload(global_batch_size=8, seq_len=8)
STEPS = 3
CLIP = 0.5  # below the norm of the gradients, so that clipping takes part
RECIPE = Recipe(max_grad_norm=CLIP)

pytestmark = pytest.mark.dist

SCHEDULES = {  # name: stages on a rank
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}


def piped(schedule, pp=2, dp=1, **changes):
    """A layout of ``WORKLOAD`` in four microbatches, or as many as there are rows."""
    count = min(4 if pp == 2 else 8, 8 // dp)
    return Layout(
        pp=pp,
        dp=dp,
        schedule=schedule,
        stages_per_rank=SCHEDULES[schedule],
        num_microbatches=count,
        microbatch_size=8 // dp // count,
        **changes,
    )


def uneven(schedule, meshes, **changes):
    changes = {"num_microbatches": 4, "microbatch_size": 2} | changes
    stages_per_rank = SCHEDULES[schedule]
    return Layout(
        pp=len(meshes), meshes=meshes, schedule=schedule, stages_per_rank=stages_per_rank, **changes
    )


ALONE = [piped(schedule) for schedule in SCHEDULES]
RECOMPUTED = [
    piped(schedule, recompute=recompute, recompute_layers=some)
    for schedule in ("1f1b", "interleaved_zero_bubble", "zbv")
    for recompute, some in (("selective", None), ("full", None), ("full", 1))
]
ONE_MICROBATCH = [
    msgspec.structs.replace(piped(schedule), num_microbatches=1, microbatch_size=8)
    for schedule in ("1f1b", "interleaved_1f1b", "looped_bfs", "zbv")
]
DEEP = [piped(schedule, pp=4) for schedule, number in SCHEDULES.items() if number == 1]
DATA = [piped(schedule, dp=2, zero=zero) for schedule in SCHEDULES for zero in range(4)]
TENSOR = [
    piped(schedule, tp=2, sequence_parallel=index % 2 == 1)
    for index, schedule in enumerate(SCHEDULES)
]
UNEVEN = [
    uneven("1f1b", ((1, 1), (1, 1), (1, 2)), layers=(1, 2, 1)),
    uneven("1f1b", ((1, 1), (1, 1), (2, 1)), layers=(1, 2, 1)),
    uneven("1f1b", ((1, 1), (1, 1), (2, 1)), layers=(1, 2, 1), zero=3),
    uneven("gpipe", ((1, 2), (1, 1), (1, 1)), layers=(2, 1, 1), sequence_parallel=True),
    uneven("interleaved_1f1b", ((2, 1), (1, 2)), zero=2, recompute="selective"),
    uneven("looped_bfs", ((1, 1), (1, 2)), layers=(1, 1, 1, 1)),
    uneven("zbv", ((1, 1), (2, 1)), zero=1),
    uneven("dualpipev", ((1, 2), (2, 1)), zero=2),
    uneven("interleaved_zero_bubble", ((2, 1), (1, 1))),
]
ALL_AXES = [
    piped("1f1b", dp=2, tp=2, zero=1, sequence_parallel=True, recompute="full"),
    piped("1f1b", pp=4, dp=2, zero=2),
    piped("zbv", dp=4, zero=3, replicas=2),
    uneven("1f1b", ((1, 1), (1, 1), (1, 2), (2, 2)), zero=2),
]
HYBRID = [
    Layout(dp=4, zero=zero, replicas=2, microbatch_size=1, num_microbatches=2) for zero in (1, 2, 3)
]
FLAT = [
    Layout(dp=2, zero=2, microbatch_size=2, num_microbatches=2, recompute=recompute)
    for recompute in ("selective", "full")
]


def tokens(rows=slice(None)):
    return data.batches(MODEL, WORKLOAD, steps=STEPS, seed=5, file=None, rows=rows)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@functools.cache
def one_device(layers):
    """Losses of three steps and parameters after the last."""
    model = gpt.GPT(msgspec.structs.replace(MODEL, layers=layers))
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for inputs, targets in zip(*map(torch.from_numpy, tokens()), strict=True):
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


@functools.cache
def place_of(layout):
    """Connections are made once for all layouts of the same shape."""
    return mesh.build(msgspec.json.decode(layout, type=Layout), "cpu")


def shape_of(layout):
    """The layout with the fewest differences that has the same meshes and links."""
    alike = {2: "interleaved_1f1b", 1: "1f1b" if layout.pp > 1 else "none"}
    v_shaped = layout.schedule in ("zbv", "dualpipev")
    shape = msgspec.structs.replace(
        layout,
        schedule="zbv" if v_shaped else alike[layout.stages_per_rank],
        zero=3 if layout.zero else 0,
        microbatch_size=2,
        num_microbatches=4,
        sequence_parallel=False,
        recompute="none",
        recompute_layers=None,
        layers=(),
    )
    return msgspec.json.encode(shape)


def errors(ranks, plan, layouts, dtype="fp32"):
    """[error of losses, of parameters] of each layout, as this rank sees them."""
    plan = msgspec.json.decode(plan, type=Plan)
    layers = plan.model.layers
    losses, parameters = one_device(layers)
    found = []
    for layout in msgspec.json.decode(layouts, type=list[Layout]):
        stages = stages_of(layout, plan.model)
        plan = msgspec.structs.replace(plan, layout=layout, stages=stages, recipe=RECIPE)
        place = place_of(shape_of(layout))
        place = place._replace(layout=layout.of_rank(place.pipeline_rank))
        training = step.prepare(
            plan, place, tokens(step.rows(layout, ranks.rank)), ranks.device,
            dtype=dtype, seed=0,
        )  # fmt: skip
        mine = [float(step.run(training, index)) for index in range(STEPS)]
        reports = [m for m in ranks.gather(mine if training.reports else []) if m]
        means = [sum(of_step) / len(of_step) for of_step in zip(*reports, strict=True)]
        loss = loss_error(means, losses)
        found.append([loss, distance(training, parameters)])
    return found


def distance(training, expected):
    """The largest over this rank's parameters of |found - expected| / |expected|."""
    found = []
    for stage in training.pipeline.stages.values():
        for name, value in stage.module.named_parameters():
            name = "embed.weight" if name == "head.projection.weight" else name
            reference = expected[name].detach()
            difference = whole(value).detach() - reference
            if name.endswith("qkv.bias"):  # softmax ignores key biases: their updates are noise
                shape = (MODEL.heads, 3, MODEL.head_dim)
                difference = difference.view(shape)[:, ::2]
                reference = reference.view(shape)[:, ::2]
            found.append((difference.norm() / reference.norm().clamp_min(1e-12)).item())
    return largest(found)


@pytest.mark.parametrize(
    "layouts",
    # what data and tensor parallelism do to the schedules is a part of the matrix, too
    [ALONE, FLAT, UNEVEN, HYBRID, ONE_MICROBATCH]
    + [pytest.param(each, marks=pytest.mark.whole) for each in (DATA, TENSOR, RECOMPUTED)]
    + [pytest.param(each, marks=pytest.mark.whole) for each in (DEEP, ALL_AXES)],
    ids=[
        *("alone", "flat", "uneven", "hybrid", "one-microbatch"),
        *("data", "tensor", "recomputed", "deep", "all-axes"),
    ],
)
def test_equal_to_one_device(gloo_ranks, plan_of, layouts, layers=MODEL.layers):
    model = msgspec.structs.replace(MODEL, layers=layers)
    plan = msgspec.json.encode(plan_of(model, WORKLOAD, Layout(dp=8))).decode()
    for size in sorted({layout.num_devices for layout in layouts}):
        of_size = [layout for layout in layouts if layout.num_devices == size]
        encoded = msgspec.json.encode(of_size).decode()
        found = gloo_ranks(size, errors, plan=plan, layouts=encoded)
        for rank, of_rank in enumerate(found):
            for layout, (loss, parameters) in zip(of_size, of_rank, strict=True):
                assert loss <= 1e-5, (layout.name, rank)
                assert parameters <= 1e-4, (layout.name, rank)


@pytest.mark.parametrize("layout", [*ALONE, *ONE_MICROBATCH], ids=lambda layout: layout.name)
def test_no_receive_starts_before_what_it_waits_for(layout):
    """All work of a microbatch waits for what was done before of the same one."""
    size = layout.num_microbatches
    for row in table(layout.schedule, layout.pp, layout.stages_per_rank, size):
        messages = pipeline.Messages(types.SimpleNamespace(row=row))
        begun = []
        messages.expect = begun.append
        for action in messages.actions():
            assert begun[0] == action
            assert all(each.microbatch != action.microbatch for each in begun[1:])
            begun.clear()


def test_dualpipev_on_an_odd_number_of_ranks(gloo_ranks, plan_of):
    """The rank at the turn does B on one of its stages and I and W on the other."""
    layout = piped("dualpipev", pp=3)
    test_equal_to_one_device(gloo_ranks, plan_of, [layout], layers=6)


def test_bf16_stays_near_fp32(gloo_ranks, plan_of):
    """Weights' gradients of a split backward are added up in fp32 too."""
    layouts = [piped(schedule, dp=2, zero=2) for schedule in ("1f1b", "zbv")]
    arguments = {
        "plan": msgspec.json.encode(plan_of(MODEL, WORKLOAD, Layout(dp=8), "bf16")).decode(),
        "layouts": msgspec.json.encode(layouts).decode(),
    }
    for loss, _ in gloo_ranks(4, errors, **arguments, dtype="bf16")[0]:
        assert 0 < loss <= 2e-3
