"""The plain Wide-ResNet: counts on the meta device, batch norm against torch's, an independent
forward, stages against the whole, and recomputation against none."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from meshwise.models import counts, decoder, stream_shape
from meshwise.models.catalogue import find_any
from meshwise.nn.stage import cross_entropy
from meshwise.nn.wide_resnet import BatchNorm, WideResNetModule
from meshwise.spec.vision import WideResNet as Model

GFLOP = {  # of one forward, Alpa's table
    "wresnet-250m": 83.6,
    "wresnet-500m": 163.5,
    "wresnet-1b": 333.2,
    "wresnet-2b": 652.5,
    "wresnet-4b": 1330.6,
    "wresnet-6.8b": 2203.5,
    "wresnet-13b": 4518.2,
}
TINY = Model(blocks=(2, 1, 2), channels=4, width_factor=2, image_size=33, num_classes=7)


def built(model=TINY, layers=None, dtype=torch.float64):
    """With norms away from 1 and 0, so that a wrong one shows."""
    module = WideResNetModule(model, layers)
    module.init_weights(0)
    for name, parameter in module.named_parameters():
        if "norm" in name:
            own = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter.data.add_(torch.randn(parameter.shape, generator=own), alpha=0.2)
    return module.to(dtype)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("name", GFLOP)
def test_module_has_the_weights_and_flops_of_the_table(name):
    model = find_any(name)
    with torch.device("meta"):
        module = WideResNetModule(model)
        images = torch.empty(2, 3, 224, 224)
    named = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    assert named == [(weight.name, weight.shape) for weight in decoder.weights(model)]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(images)
    assert counter.get_total_flops() == counts.forward_flops(model, 2)
    assert counter.get_total_flops() == pytest.approx(2e9 * GFLOP[name], rel=1e-3)


@pytest.mark.parametrize(
    "model",
    [find_any("wresnet-250m"), find_any("wresnet-13b"), TINY, replace(TINY, image_size=97)],
)
def test_real_shapes_between_blocks_are_those_counted(model):
    with torch.device("meta"):
        module = WideResNetModule(model)
        x = module.begin(torch.empty(2, 3, model.image_size, model.image_size))
    for index, layer in enumerate(module.layers.values()):
        assert tuple(x.shape) == stream_shape(model, 2, 1, index)
        x = layer(x)
    assert tuple(x.shape) == stream_shape(model, 2, 1, model.layers)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("offset", [0, 1000])  # a mean far above the deviation
def test_batch_norm_is_that_of_torch(training, offset):
    ours, theirs = BatchNorm(5), nn.BatchNorm2d(5)
    for tensor, scale in ((theirs.weight, 1), (theirs.bias, 2), (theirs.running_mean, 3)):
        tensor.data.copy_(random(5, seed=scale, dtype=torch.float32))
    theirs.running_var.copy_(1 + random(5, seed=4, dtype=torch.float32).square())
    ours.load_state_dict(theirs.state_dict(), strict=False)
    ours.train(training), theirs.train(training)
    x = random(3, 5, 4, 6, dtype=torch.float32) + offset
    weight_of_y = random(3, 5, 4, 6, seed=9, dtype=torch.float32)
    before = theirs.running_var.clone()
    gradients = []
    for module in (ours, theirs):
        own = x.clone().requires_grad_()
        y = module(own)
        (y * weight_of_y).sum().backward()
        gradients.append((y, own.grad, module.weight.grad, module.bias.grad))
    close = {"rtol": 1e-4, "atol": 1e-4} if not offset else {"rtol": 2e-3, "atol": 2e-3}
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, **close)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    seen = (theirs.running_var - 0.9 * before) / 0.1 if training else before
    n = 3 * 4 * 6
    expected = 0.9 * before + 0.1 * seen * (n - 1) / n if training else before
    torch.testing.assert_close(ours.running_var, expected, rtol=1e-4, atol=1e-5)


def test_batch_norm_in_double_is_its_definition_exactly():
    norm, x = BatchNorm(3).double(), random(2, 3, 2, 2).requires_grad_()
    weight, bias = random(3, seed=1), random(3, seed=2)
    norm.weight.data.copy_(weight), norm.bias.data.copy_(bias)
    y = norm(x)
    for channel in range(3):
        own = x[:, channel].detach()
        mean = own.sum() / 8
        variance = ((own - mean) ** 2).sum() / 8
        expected = (own - mean) / (variance + 1e-5).sqrt() * weight[channel] + bias[channel]
        torch.testing.assert_close(y[:, channel], expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(norm, (x,))


def test_batch_norm_of_halves_in_bf16_computes_in_float32():
    norm, x = BatchNorm(3), random(8, 3, 16, 16, dtype=torch.float32).add(5).bfloat16()
    y = norm(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(norm.running_mean, 0.1 * x.float().mean((0, 2, 3)))
    expected = F.batch_norm(x.float(), None, None, training=True).bfloat16()
    torch.testing.assert_close(y, expected)


def test_a_channel_of_one_value_gives_its_bias_and_no_nan():
    norm = BatchNorm(2)
    norm.bias.data.copy_(torch.tensor([3.0, -1.0]))
    x = torch.full((4, 2, 3, 3), 1e4).requires_grad_()
    y = norm(x)
    torch.testing.assert_close(y[0, :, 0, 0], norm.bias, rtol=0, atol=1e-2)
    y.square().sum().backward()
    assert x.grad.isfinite().all()


def test_statistics_over_ranks_are_those_of_the_whole_batch():
    """Two shares in turn, each told the means of both, give what the whole batch gives."""
    x, dy = random(6, 4, 3, 3) + random(6, 4, 1, 1, seed=1), random(6, 4, 3, 3, seed=2)
    whole = BatchNorm(4).double()
    own = x.clone().requires_grad_()
    expected = whole(own)
    (expected * dy).sum().backward()

    shares = [half.clone().requires_grad_() for half in x.split(3)]
    told = [[] for _ in shares]
    for share, heard in zip(shares, told, strict=True):
        norm = BatchNorm(4).double()
        norm.mean_over_ranks = lambda moments, heard=heard: heard.append(moments) or moments
        norm.statistics(share)
    mean = (told[0][0] + told[1][0]) / 2  # differentiable in both shares
    assert mean.shape == (3, 4)
    outputs = []
    for share in shares:
        norm = BatchNorm(4).double()
        norm.mean_over_ranks = lambda _: mean
        outputs.append(norm(share))
    (torch.cat(outputs) * dy).sum().backward()
    torch.testing.assert_close(torch.cat(outputs), expected)
    torch.testing.assert_close(torch.cat([share.grad for share in shares]), own.grad)
    torch.testing.assert_close(norm.running_var, whole.running_var)


def test_rounding_of_the_means_over_ranks_gives_no_nan():
    """Equal rows on all ranks, whose mean of squares came out a little below the squared mean."""
    norm = BatchNorm(2)
    norm.mean_over_ranks = lambda moments: moments * torch.tensor([1, 1, 1 - 1e-6])[:, None]
    assert norm(torch.full((2, 2, 3, 3), 100.0)).isfinite().all()


def test_forward_and_gradients_against_layers_of_torch():
    """The network written down once more from torch's own norm and functions."""
    module, images = built(), random(3, 3, 33, 33)
    weights = dict(module.named_parameters())

    def conv(x, name, stride=1):
        weight = weights[f"{name}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    def norm(x, name):
        own = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return F.batch_norm(x, None, None, *own, training=True, eps=1e-5)

    x = F.max_pool2d(F.relu(norm(conv(images, "stem", 2), "stem_norm")), 3, 2, 1)
    for index in range(5):
        at, stride = f"layers.{index}", 2 if index in (2, 3) else 1
        y = F.relu(norm(conv(x, f"{at}.conv1"), f"{at}.norm1"))
        y = F.relu(norm(conv(y, f"{at}.conv2", stride), f"{at}.norm2"))
        y = norm(conv(y, f"{at}.conv3"), f"{at}.norm3")
        if index in (0, 2, 3):
            x = norm(conv(x, f"{at}.shortcut", stride), f"{at}.shortcut_norm")
        x = F.relu(x + y)
    expected = F.linear(x.flatten(2).mean(-1), weights["head.weight"], weights["head.bias"])
    logits = module(images)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(y.sin().sum(), weights.values()) for y in (logits, expected)]
    for name, mine, theirs in zip(weights, *gradients, strict=True):
        assert theirs.any(), name
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9, msg=name)


def step(modules, images, labels):
    """Loss and gradients by name of stages run one behind the other."""
    x = images
    for module in modules:
        x = module(x)
    loss = cross_entropy(x, labels)
    loss.backward()
    named = itertools.chain(*(module.named_parameters() for module in modules))
    return loss, {name: parameter.grad for name, parameter in named}


IMAGES, LABELS = random(4, 3, 33, 33, seed=5), torch.tensor([0, 6, 2, 2])


@pytest.mark.parametrize("cuts", [(2,), (1, 2, 4), (1, 2, 3, 4)])
def test_stages_behind_each_other_are_the_whole(cuts):
    whole = built()
    loss, gradients = step([whole], IMAGES, LABELS)
    edges = itertools.pairwise((0, *cuts, TINY.layers))
    stages = [built(layers=range(*edge)) for edge in edges]
    cut_loss, cut_gradients = step(stages, IMAGES, LABELS)
    assert torch.equal(cut_loss, loss)
    assert cut_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.any(), name
        assert torch.equal(cut_gradients[name], gradient), name
    running = {name: value for stage in stages for name, value in stage.named_buffers()}
    assert running.keys() == dict(whole.named_buffers()).keys()
    for name, value in whole.named_buffers():
        assert torch.equal(running[name], value), name


def recomputing(kind):
    module = built()
    for layer in module.layers.values():
        setattr(layer, kind, lambda f, x: checkpoint(f, x, use_reentrant=False))
    return module


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["part", "whole"])
def test_recomputation_changes_nothing_and_keeps_statistics_once(kind, compiled):
    plain, module = built(), recomputing(kind)
    expected, gradients = step([plain], IMAGES, LABELS)
    if compiled:
        torch._dynamo.reset()
        module.layers["2"].compile(backend="aot_eager", fullgraph=True)  # has a shortcut
    loss, again = step([module], IMAGES, LABELS)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-9, atol=1e-12)
    for (name, a), (_, b) in zip(plain.named_buffers(), module.named_buffers(), strict=True):
        assert a.any() and not (a == 1).all(), name
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_selective_recomputation_forgets_two_activations_and_repeats_no_convolution():
    x = random(2, 16, 9, 9)

    def measure(module):
        saved, layer = {}, module.layers["1"]

        def count(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            out = layer(x)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        weights = [p.untyped_storage().data_ptr() for p in layer.parameters()]
        return sum(bytes_ for at, bytes_ in saved.items() if at not in weights), counter

    plain, flops = measure(built())
    less, again = measure(recomputing("part"))
    inputs_of_conv2_and_conv3 = 2 * (4 + 8) * 9 * 9 * 8
    assert plain - less == pytest.approx(inputs_of_conv2_and_conv3, abs=500)  # some bytes a channel
    assert again.get_total_flops() == flops.get_total_flops()


def test_eval_uses_the_running_statistics_and_leaves_them():
    module = built()
    module(IMAGES)
    module.eval()
    before = {name: value.clone() for name, value in module.named_buffers()}
    one, both = module(IMAGES[:1]), module(IMAGES[:2])
    torch.testing.assert_close(one, both[:1])  # rows no longer know of each other
    for name, value in module.named_buffers():
        assert torch.equal(value, before[name]), name


def test_reset_buffers_fills_what_was_built_on_meta():
    with torch.device("meta"):
        module = WideResNetModule(TINY)
    module.to_empty(device="cpu")
    module.init_weights(0)
    for name, value in module.named_buffers():
        assert (value == (1 if name.endswith("var") else 0)).all(), name
