"""A Wide-ResNet under every parallelism computes what one device computes.

The oracle is the plain module with torch's own optimizer and clipping on the whole global batch, in
the same number of microbatches, because batch statistics are of a microbatch. All are compared in
float64 (``check.in_float64``).
"""

import functools
from functools import partialmethod
from unittest import mock

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from meshwise.engine import checkpoint, data, step
from meshwise.engine.check import in_float64
from meshwise.nn import wide_resnet
from meshwise.parallel import apply, mesh
from meshwise.spec import Layout, Plan, Recipe, WideResNet, Workload, stages_of
from tests.errors import largest, loss_error

# blocks of every kind: with a shortcut, without, with a stride; classes uneven over 4 ranks
MODEL = WideResNet(blocks=(2, 1, 1), channels=8, width_factor=2, image_size=32, num_classes=10)
WORKLOAD = Workload(global_batch_size=16, seq_len=1)
STEPS = 3
BACKEND = "aot_eager"  # for inductor a block takes a quarter of a minute
CLIP = 1.0  # below the norm of the gradients, so that clipping takes part
RECIPES = {
    "adamw": Recipe(max_grad_norm=CLIP),
    "sgd": Recipe(optimizer="sgd", learning_rate=0.02, weight_decay=0.01, max_grad_norm=0.0),
}
TORCHS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1),
    "sgd": functools.partial(
        torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
}
LAYERS = {1: (), 2: (1, 3), 3: (1, 2, 1), 4: ()}

pytestmark = pytest.mark.dist


def laid(dp=1, pp=1, count=2, **changes):
    """A layout of ``WORKLOAD`` in ``count`` microbatches, its pipeline uneven if it is short."""
    stages = pp * changes.get("stages_per_rank", 1)
    changes = {"schedule": "1f1b" if pp > 1 else "none", "layers": LAYERS[stages]} | changes
    return Layout(
        dp=dp, pp=pp, num_microbatches=count, microbatch_size=16 // dp // count, **changes
    )


def uneven(*meshes, count=4, **changes):
    return laid(pp=len(meshes), meshes=meshes, count=count, **changes)


LAYOUTS = [
    laid(recompute="selective"),
    laid(recompute="full", recompute_layers=2),
    *(laid(dp=2, zero=zero, recompute="selective" if zero else "none") for zero in range(4)),
    laid(dp=2, count=4, zero=3, recompute="full"),
    *(laid(tp=2, recompute=recompute) for recompute in ("none", "selective", "full")),
    laid(pp=2),
    laid(pp=2, count=4, schedule="gpipe", recompute="selective"),
    uneven((1, 1), (1, 1), (1, 1)),
    uneven((1, 1), (2, 1), layers=(3, 1), zero=2),
    uneven((1, 2), (1, 1), recompute="full"),
    laid(pp=4, count=4),
    laid(dp=4, zero=2, replicas=2),
    laid(dp=2, tp=2, recompute="selective"),
    laid(dp=2, tp=2, count=4, zero=3, recompute="full"),
    laid(dp=2, pp=2, zero=3),
    laid(dp=2, pp=2, schedule="zbv", stages_per_rank=2, zero=2),
    laid(tp=2, pp=2, schedule="interleaved_zero_bubble", stages_per_rank=2, recompute="selective"),
    uneven((1, 1), (1, 1), (1, 2)),
    uneven((1, 1), (1, 1), (2, 1), zero=3, recompute="selective"),
    uneven((4, 1), (1, 4)),  # Alpa's plan of the 2B model on 8 GPUs
    uneven((1, 1), (1, 1), (1, 2), (2, 2), zero=1, recompute="full"),
    laid(dp=2, tp=2, pp=2, zero=3, recompute="selective"),
    laid(dp=4, tp=2, zero=3, replicas=2),
]


def images(count, rows=slice(None)):
    return data.batches(MODEL, WORKLOAD, steps=count, seed=5, file=None, rows=rows)


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


@functools.cache
def one_device(optimizer, num_microbatches, dtype):
    """Losses of three steps, the gradients that each one's update got, and the buffers at last."""
    model = wide_resnet.WideResNetModule(MODEL)
    model.init_weights(0)
    model.to(dtype)
    optimizer = TORCHS[optimizer](model.parameters())
    clipped = isinstance(optimizer, torch.optim.AdamW)
    losses, gradients = [], []
    for batch in zip(*map(torch.from_numpy, images(STEPS)), strict=True):
        optimizer.zero_grad()
        losses.append(0.0)
        for x, target in zip(*(part.chunk(num_microbatches) for part in batch), strict=True):
            loss = F.cross_entropy(model(x.to(dtype)), target) / num_microbatches
            loss.backward()
            losses[-1] += loss.item()
        if clipped:
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        gradients.append({name: whole(value.grad) for name, value in model.named_parameters()})
        optimizer.step()
    return losses, gradients, dict(model.named_buffers())


@functools.cache
def place_of(layout):
    """Connections are made once for all layouts of the same shape."""
    return mesh.build(msgspec.json.decode(layout, type=Layout), "cpu")


def shape_of(layout):
    """The layout with the fewest differences that has the same meshes and links."""
    shape = msgspec.structs.replace(
        layout,
        schedule={(1, False): "none", (1, True): "1f1b"}.get(
            (layout.stages_per_rank, layout.pp > 1), layout.schedule
        ),
        zero=3 if layout.zero else 0,
        num_microbatches=4,
        recompute="none",
        recompute_layers=None,
        layers=(),
    )
    return msgspec.json.encode(shape)


def prepared(ranks, plan, layout, dtype):
    """As the engine prepares it; it trains in float64 if that is the dtype."""
    plan = msgspec.structs.replace(plan, layout=layout, stages=stages_of(layout, MODEL))
    place = place_of(shape_of(layout))
    place = place._replace(layout=layout.of_rank(place.pipeline_rank))
    mine = images(STEPS, step.rows(layout, ranks.rank))
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    training = step.prepare(plan, place, mine, ranks.device, dtype=name, seed=0)
    return in_float64(training) if dtype == torch.float64 else training


def errors(ranks, plan, layouts, dtype):
    """Relative errors of each layout, the largest that this rank sees: of losses, of the gradients
    [of the first step, of the last], of the buffers at last."""
    plan, dtype, found = msgspec.json.decode(plan, type=Plan), getattr(torch, dtype), []
    for layout in msgspec.json.decode(layouts, type=list[Layout]):
        reference = torch.float32 if dtype == torch.bfloat16 else dtype
        optimizer, count = plan.recipe.optimizer, layout.num_microbatches
        losses, gradients, buffers = one_device(optimizer, count, reference)
        training = prepared(ranks, plan, layout, dtype)
        modules = [stage.module for stage in training.pipeline.stages.values()]
        named = [pair for module in modules for pair in module.named_parameters()]
        seen = []

        def keep(*_, named=named, seen=seen):
            seen.append({name: whole(value.grad) for name, value in named})

        mine = []
        for index in range(STEPS):
            if index in (0, STEPS - 1):
                hook = training.optimizer.register_step_pre_hook(keep)
            mine.append(float(step.run(training, index)))
            hook.remove()
        reports = [m for m in ranks.gather(mine if training.reports else []) if m]
        means = [sum(of_step) / len(of_step) for of_step in zip(*reports, strict=True)]
        held = {name: whole(v) for module in modules for name, v in module.named_buffers()}
        loss = loss_error(means, losses)
        ends = gradients[0], gradients[-1]
        gradient = [distance(a, b) for a, b in zip(seen, ends, strict=True)]
        found.append([loss, gradient, distance(held, buffers)])
    return found


def distance(found, expected):
    """The largest of |found - expected| / |expected| of any tensor."""
    assert found
    return largest(
        ((value - expected[name]).norm() / expected[name].norm()).item()
        for name, value in found.items()
    )


def found(gloo_ranks, plan_of, layouts, *, dtype="float64", recipe="adamw", **choices):
    """(what, loss, gradients, buffers) of each layout and rank; all layouts are of one size."""
    plan = plan_of(MODEL, WORKLOAD, Layout(dp=16), **choices)
    plan = msgspec.structs.replace(plan, recipe=RECIPES[recipe])
    every = gloo_ranks(
        layouts[0].num_devices,
        errors,
        plan=msgspec.json.encode(plan).decode(),
        layouts=msgspec.json.encode(layouts).decode(),
        dtype=dtype,
    )
    for rank, of_rank in enumerate(every):
        for layout, of_layout in zip(layouts, of_rank, strict=True):
            yield f"{layout.name} on rank {rank}", *of_layout


@pytest.mark.parametrize(
    "size", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.whole) for n in (4, 8))]
)
def test_equal_to_one_device(gloo_ranks, plan_of, size):
    layouts = [layout for layout in LAYOUTS if layout.num_devices == size]
    for what, loss, gradients, buffer in found(gloo_ranks, plan_of, layouts):
        assert loss <= 1e-6, what  # it is added up in float32
        assert largest([*gradients, buffer]) <= 1e-9, (what, gradients, buffer)


@pytest.mark.whole
def test_sgd_with_nesterov_momentum(gloo_ranks, plan_of):
    layouts = [laid(dp=2, tp=2, zero=3)]
    for what, loss, gradients, buffer in found(gloo_ranks, plan_of, layouts, recipe="sgd"):
        assert loss <= 1e-6, what
        assert largest([*gradients, buffer]) <= 1e-9, (what, gradients, buffer)


def test_float32_and_bf16_stay_near(gloo_ranks, plan_of):
    """As the engine prepares them; statistics are of float32 in both."""
    layouts = [laid(dp=2, tp=2, zero=3, count=1)]
    for what, loss, gradients, buffer in found(gloo_ranks, plan_of, layouts, dtype="float32"):
        assert loss <= 1e-5 and gradients[0] <= 1e-4 and buffer <= 1e-5, what
    halves = found(gloo_ranks, plan_of, layouts, dtype="bfloat16")
    for what, loss, _, buffer in halves:
        assert 0 < loss <= 2e-2 and buffer <= 2e-2, what


def trained(ranks, layout, lowering):
    """Gradients and buffers of a small model in float64 after a forward and a backward."""
    layout = msgspec.json.decode(layout, type=Layout)
    place = place_of(shape_of(layout))._replace(layout=layout)
    with torch.device("meta"):
        model = wide_resnet.WideResNetModule(msgspec.structs.replace(MODEL, blocks=(1, 1)))
    with mock.patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend=BACKEND)):
        apply.parallelize(model, place, dtype="fp32", lowering=lowering)
    model.double()
    generator = torch.Generator().manual_seed(ranks.rank if layout.dp > 1 else 0)
    images = torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64)
    model(images).square().mean().backward()
    gradients = {f"{name}.grad": whole(value.grad) for name, value in model.named_parameters()}
    return gradients | {name: whole(value) for name, value in model.named_buffers()}


def compiled_error(ranks, layout):
    before = counters["stats"]["unique_graphs"]
    error = distance(trained(ranks, layout, "compiled"), trained(ranks, layout, "eager"))
    return error, counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize("axis", ["dp", pytest.param("tp", marks=pytest.mark.whole)])
def test_compiled_layers_are_one_graph_each_and_equal_to_eager_ones(gloo_ranks, axis):
    layout = msgspec.json.encode(Layout(**{axis: 2}, recompute="selective")).decode()
    for error, num_graphs in gloo_ranks(2, compiled_error, layout=layout):
        assert error <= 1e-12
        assert num_graphs == 2


class AllReduces(TorchDispatchMode):
    """Counts them; CommDebugMode does not know the modules of a backward."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.c10d.allreduce_.default
        return function(*args, **(kwargs or {}))


def costs(ranks, layout):
    """All-reduces of one forward and one backward, and convolutions' FLOPs of the backward, without
    recomputation and with the selective one."""
    layout, found = msgspec.json.decode(layout, type=Layout), []
    for recompute in ("none", "selective"):
        place = place_of(shape_of(layout))
        place = place._replace(layout=msgspec.structs.replace(layout, recompute=recompute))
        with torch.device("meta"):
            model = wide_resnet.WideResNetModule(MODEL)
        apply.parallelize(model, place, dtype="fp32", lowering="eager")
        x = torch.randn(4, 3, 32, 32)
        with AllReduces() as forward:
            loss = model(x).sum()
        with AllReduces() as backward, FlopCounterMode(display=False) as counter:
            loss.backward()
        found.append([forward.count, backward.count, counter.get_total_flops()])
    return found


def test_a_bottleneck_over_tp_has_one_all_reduce_each_way_and_repeats_no_convolution(gloo_ranks):
    layout = msgspec.json.encode(laid(tp=2)).decode()
    plain, selective = gloo_ranks(2, costs, layout=layout)[0]
    assert plain[:2] == [MODEL.layers, MODEL.layers]
    assert selective == plain


def moved(ranks, plan, layouts, folder):
    """Whether what one layout saved after a step is what the other one loads."""
    plan, held = msgspec.json.decode(plan, type=Plan), []
    for layout in msgspec.json.decode(layouts, type=list[Layout]):
        plan = msgspec.structs.replace(plan, layout=layout, stages=stages_of(layout, MODEL))
        training = prepared(ranks, plan, layout, torch.float32)
        if held:
            assert checkpoint.load(ranks, training, folder, plan, seed=0) == 1
        else:
            step.run(training, 0)
            with checkpoint.saving(ranks, folder) as save:
                save(training, plan, step=1, seed=0)
        (stage,) = training.pipeline.stages.values()
        tensors = [*stage.module.named_parameters(), *stage.module.named_buffers()]
        held.append({name: whole(value) for name, value in tensors})
    return [name for name, value in held[0].items() if not torch.equal(value, held[1][name])]


def test_running_statistics_go_with_a_checkpoint_into_another_layout(gloo_ranks, plan_of, tmp_path):
    layouts = [laid(dp=2, tp=2, zero=2), laid(dp=4, zero=3)]
    arguments = {
        "plan": msgspec.json.encode(plan_of(MODEL, WORKLOAD, Layout(dp=16))).decode(),
        "layouts": msgspec.json.encode(layouts).decode(),
    }
    assert gloo_ranks(4, moved, **arguments, folder=str(tmp_path)) == [[]] * 4
