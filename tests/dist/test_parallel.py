"""Every layout computes what one device computes: losses, gradients, parameters, initial weights.

The oracle is a plain GPT with torch's own AdamW and clipping on the whole global batch at once.
"""

import functools

import msgspec
import pytest
import torch

from meshwise.engine import data, step
from meshwise.nn import gpt
from meshwise.nn.stage import cross_entropy
from meshwise.parallel import apply, mesh, pipeline
from meshwise.spec import Layout, Model, Plan, Recipe, Workload, stages_of
from tests.errors import largest, loss_error

# an uneven vocabulary, and fewer positions used than there are
MODEL = Model(hidden=32, layers=2, heads=4, ffn=128, vocab=101, max_seq_len=20)
WORKLOAD = Workload(global_batch_size=8, seq_len=16)
STEPS = 3
CLIP = 0.5  # below the norm of the gradients, so that clipping takes part
RECIPE = Recipe(max_grad_norm=CLIP)

pytestmark = pytest.mark.dist


def layouts(world_size):
    """All of dp x zero x tp x sequence_parallel x microbatches that fill so many ranks."""
    found = []
    for tp in (1, 2, 4):
        if world_size % tp:
            continue
        dp = world_size // tp
        for zero in range(4) if dp > 1 else (0,):
            for sp in (False, True) if tp > 1 else (False,):
                for count in (1, 2):
                    size = WORKLOAD.global_batch_size // dp // count
                    found.append((dp, tp, zero, sp, size, count))
    return [
        Layout(
            dp=dp,
            tp=tp,
            zero=zero,
            sequence_parallel=sp,
            microbatch_size=size,
            num_microbatches=count,
        )
        for dp, tp, zero, sp, size, count in found
    ]


def tokens(rows=slice(None)):
    return data.batches(MODEL, WORKLOAD, steps=STEPS, seed=5, file=None, rows=rows)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def one_device():
    """Losses of three steps, gradients of the first and parameters after the last."""
    model = gpt.GPT(MODEL)
    model.init_weights(0)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    losses, first_gradients = [], {}
    for inputs, targets in zip(*map(torch.from_numpy, tokens()), strict=True):
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        first_gradients = first_gradients or {
            name: value.grad.clone() for name, value in model.named_parameters()
        }
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert norm > CLIP
        optimizer.step()
        losses.append(loss.item())
    return start, losses, first_gradients, dict(model.named_parameters())


@pytest.fixture
def encoded_plan(plan_of):
    def encode(**changes):
        plan = plan_of(MODEL, WORKLOAD, Layout(dp=8), **changes)
        return msgspec.json.encode(plan).decode()

    return encode


@functools.cache
def place_of(dp, tp, copied):
    """Connections are made once for all layouts of the same degrees."""
    return mesh.build(Layout(dp=dp, tp=tp, zero=0 if copied or dp == 1 else 3), "cpu")


def prepared(ranks, plan, layout):
    """``plan``, in JSON, with another layout."""
    plan = msgspec.json.decode(plan, type=Plan)
    stages = stages_of(layout, MODEL)
    plan = msgspec.structs.replace(plan, layout=layout, stages=stages, recipe=RECIPE)
    place = place_of(layout.dp, layout.tp, layout.zero == 0)._replace(layout=layout)
    return step.prepare(
        plan,
        place,
        tokens(step.rows(layout, ranks.rank)),
        ranks.device,
        dtype=plan.dtype,
        seed=0,
    )


def parameters_of(training):
    return dict(training.pipeline.stages[0].module.named_parameters())


def gradients(training):
    """Whole gradients of the first batch, without an optimizer step."""
    size = training.pipeline.layout.microbatch_size
    batch = [tokens[0].split(size) for tokens in (training.inputs, training.targets)]
    with apply.loss_context(training.pipeline.layout):
        pipeline.run(training.pipeline, *batch, training.loss)
    found = {name: whole(value.grad) for name, value in parameters_of(training).items()}
    training.optimizer.zero_grad()
    return found


def distance(found, expected):
    """The largest over tensors of |found - expected| / |expected|."""
    found_errors = []
    for name, reference in expected.items():
        difference, reference = found[name].detach() - reference.detach(), reference.detach()
        if name.endswith("qkv.bias"):  # softmax ignores key biases: their updates are noise
            shape = (MODEL.heads, 3, MODEL.head_dim)
            difference = difference.view(shape)[:, ::2]
            reference = reference.view(shape)[:, ::2]
        found_errors.append((difference.norm() / reference.norm().clamp_min(1e-12)).item())
    return largest(found_errors)


def mean_over_ranks(ranks, losses):
    return [sum(found) / len(found) for found in zip(*ranks.gather(losses), strict=True)]


def errors(ranks, plan, layout_names):
    """Of each layout: [error of initial weights, losses, gradients, parameters]."""
    start, losses, first_gradients, parameters = one_device()
    found = {}
    for layout in layouts(ranks.world_size):
        if layout.name not in layout_names:
            continue
        training = prepared(ranks, plan, layout)
        named = parameters_of(training)
        # the cut of the batch is nothing to the weights, and two microbatches are the harder sum
        initial = gradient = 0.0
        if layout.num_microbatches == 1:
            differences = [(whole(value) - start[name]).abs() for name, value in named.items()]
            initial = largest(difference.max().item() for difference in differences)
        else:
            gradient = distance(gradients(training), first_gradients)
        mine = [float(step.run(training, index)) for index in range(STEPS)]
        means = mean_over_ranks(ranks, mine)
        loss = loss_error(means, losses)
        after = distance({name: whole(value) for name, value in named.items()}, parameters)
        found[layout.name] = [initial, loss, gradient, after]
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layouts_equal_one_device(gloo_ranks, encoded_plan, world_size):
    names = [layout.name for layout in layouts(world_size)]
    found = gloo_ranks(world_size, errors, plan=encoded_plan(), layout_names=names)[0]
    assert list(found) == names
    assert len(names) == {1: 2, 2: 12, 4: 28}[world_size]
    for name, (initial, loss, gradient, after) in found.items():
        assert initial == 0, name
        assert loss <= 1e-5, name
        assert gradient <= 1e-4, name
        assert after <= 1e-4, name


def bf16_losses(ranks, plan, layout_names):
    found = {}
    for layout in layouts(ranks.world_size):
        if layout.name in layout_names:
            training = prepared(ranks, plan, layout)
            kept = {str(value.dtype) for value in training.parameters()}
            mine = [float(step.run(training, index)) for index in range(STEPS)]
            found[layout.name] = [mean_over_ranks(ranks, mine), sorted(kept)]
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bf16_stays_near_fp32(gloo_ranks, encoded_plan, world_size):
    """bf16 computes with 8 bits of mantissa and fp32 masters: 1 % of the loss is far too much."""
    names = [each.name for each in layouts(world_size) if each.num_microbatches == 2]
    names = [name for name in names if "zero1" not in name and "zero2" not in name]
    expected = one_device()[1]
    plan = encoded_plan(dtype="bf16")
    found = gloo_ranks(world_size, bf16_losses, plan=plan, layout_names=names)[0]
    assert list(found) == names
    for losses, dtypes in found.values():
        assert losses == pytest.approx(expected, rel=2e-3)
        assert losses != expected
        assert dtypes == ["torch.float32"]


def refusals(ranks):
    heads = Layout(tp=2, microbatch_size=8)
    model = Model(hidden=33, layers=1, heads=3, ffn=64, vocab=8, max_seq_len=16)
    cases = [
        lambda: step.placement.check(model, WORKLOAD, heads),
        lambda: step.placement.check(MODEL, Workload(global_batch_size=8, seq_len=32), heads),
        lambda: mesh.build(Layout(dp=8), "cpu"),
    ]
    messages = []
    for case in cases:
        with pytest.raises(ValueError) as caught:
            case()
        messages.append(str(caught.value))
    return messages


def test_impossible_layouts_are_named(gloo_ranks):
    heads, positions, ranks = gloo_ranks(2, refusals)[0]
    assert heads == "Layout.tp = 2: must divide heads = 3"
    assert positions.startswith("Workload.seq_len = 32: must be <= max_seq_len = 20")
    assert "needs 8 ranks, but 2 joined" in ranks
