"""What parameters begin with, by statistics: which numbers each kind of weight is drawn from.

The kinds are written down here by name, as papers and model cards have them. Each bound is six
standard deviations of the estimator under that distribution: a right model fails at one seed in
some 100,000, and the seed here is fixed.
"""

import re
from math import erf, log, sqrt

import pytest
import torch

from meshwise.nn import build, initial
from meshwise.spec import Decoder, Experts, Mla, Model, WideResNet

SIZES = {"hidden": 64, "layers": 2, "heads": 4, "vocab": 211, "max_seq_len": 64}
LLAMA = SIZES | {"ffn": 160, "head_dim": 16, "kv_heads": 4}
MOE = Experts(num_experts=16, top_k=2, ffn=96)
LATENT = Mla(q_lora_rank=40, kv_lora_rank=48, nope_head_dim=16, rope_head_dim=8, v_head_dim=16)
MODELS = {
    "gpt": Model(ffn=256, **SIZES),
    "gpt with experts": Model(ffn=256, experts=MOE, **SIZES),
    "llama": Decoder(**LLAMA),
    "gqa": Decoder(**LLAMA | {"kv_heads": 2}, tied=True),
    "qwen": Decoder(**LLAMA, qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True),
    "latent": Decoder(**LLAMA, mla=LATENT),
    "latent without its first projection": Decoder(
        **LLAMA, qkv_bias=True, mla=Mla(**{n: getattr(LATENT, n) for n in LATENT.__struct_fields__}
                                        | {"q_lora_rank": None})
    ),
    "mixtral": Decoder(**LLAMA | {"kv_heads": 2}, experts=MOE),
    "experts with biases": Decoder(**LLAMA, mlp_bias=True, experts=MOE),
    "experts without gate": Decoder(**LLAMA, gated=False, experts=MOE),
    "deepseek": Decoder(
        **LLAMA,
        mla=LATENT,
        experts=Experts(
            num_experts=8, top_k=2, ffn=32, shared_ffn=64, first_dense=1, router_bias=True,
            groups=4, top_groups=2,
        ),
    ),
    "shared gate": Decoder(
        **LLAMA, experts=Experts(num_experts=4, top_k=2, ffn=64, shared_ffn=64, shared_gate=True)
    ),
    "wide-resnet": WideResNet(
        blocks=(2, 1, 1), channels=16, width_factor=2, image_size=32, num_classes=100
    ),
}  # fmt: skip
CONVOLUTION = re.compile(r"(stem|shortcut|conv\d)\.weight")
NORM = re.compile(r".*norm\d?\.weight")
BIAS = re.compile(r"(^|[._])bias")
PRODUCT = re.compile(
    r"(embed|positions|projection|head|qkv|out|up|down|gate|score|router|[qkv]|q_up|q_down|kv_up"
    r"|kv_down)\.weight|experts\.(first|down)"
)
SIGMAS = 6.0


def due(name, shape):
    """Mean and standard deviation of the parameter's numbers."""
    own = ".".join(name.split(".")[-2:])
    found = [kind for kind in (CONVOLUTION, NORM, PRODUCT) if kind.fullmatch(own)]
    if BIAS.search(own):
        assert not found, name
        return 0.0, 0.0
    (kind,) = found
    if kind is NORM:
        return 1.0, 0.0
    if kind is PRODUCT:
        return 0.0, 0.02
    outputs, _, height, width = shape
    return 0.0, sqrt(2 / (outputs * height * width))


def deviations(value, std):
    """How many standard deviations each statistic of the numbers is off normal(0, ``std``)."""
    n, z = value.numel(), value.double().flatten() / std
    found = {"mean": z.mean() * sqrt(n), "std": (z.square().mean() - 1) * sqrt(n / 2)}
    if n >= 2000:  # the fourth moment's own distribution is skewed below
        centred = (z - z.mean()) / z.std()
        found["skewness"] = centred.pow(3).mean() * sqrt(n / 6)
        found["kurtosis"] = (centred.pow(4).mean() - 3) * sqrt(n / 24)
    return {name: abs(float(number)) for name, number in found.items()}


def farthest_apart(value, std):
    """Kolmogorov and Smirnov's distance to normal(0, ``std``), times sqrt(n)."""
    z = value.double().flatten().sort().values / std
    n, steps = len(z), torch.arange(len(z) + 1, dtype=torch.float64) / len(z)
    below = 0.5 * (1 + torch.erf(z / sqrt(2)))
    return float(torch.maximum(below - steps[:-1], steps[1:] - below).max()) * sqrt(n)


@pytest.mark.parametrize("family", MODELS)
def test_every_kind_of_weight_is_drawn_from_its_distribution(family):
    module = build(MODELS[family])
    module.init_weights(3)
    chance = 1 - erf(SIGMAS / sqrt(2))
    most_apart = sqrt(log(2 / chance) / 2)  # P(distance * sqrt(n) > x) <= 2 exp(-2 x^2)
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        mean, std = due(name, value.shape)
        if not std:
            assert (value == mean).all(), name
            continue
        parts = value.unbind() if ".experts." in name else [value]
        for of in (value, *parts):  # all, and each expert alone
            found = deviations(of, std)
            assert max(found.values()) <= SIGMAS, (name, found)
            assert farthest_apart(of, std) <= most_apart, name


@pytest.mark.parametrize("family", ["llama", "mixtral", "wide-resnet"])
def test_no_two_weights_have_the_same_numbers(family):
    """Layers, projections and experts, gate and up: none is another's copy, in part or scaled."""
    module = build(MODELS[family])
    module.init_weights(3)
    rows = {}
    for name, parameter in module.named_parameters():
        if not due(name, parameter.shape)[1]:
            continue
        value = parameter.detach().double()
        parts = value.flatten(0, 1 if name.endswith("first") else 0).unbind()
        for part, numbers in enumerate(parts if ".experts." in name else [value]):
            rows[name, part] = numbers.flatten()[:576]
    short = {key: row for key, row in rows.items() if len(row) == 576}
    together = torch.stack([row / row.norm() for row in short.values()])
    alike = (together @ together.T).fill_diagonal_(0).abs()
    assert len(short) > 10 and float(alike.max()) * sqrt(576) <= SIGMAS


def test_numbers_depend_on_seed_and_name_alone():
    """A stage draws what the whole model has; another seed draws other numbers."""
    model = MODELS["mixtral"]
    whole, last, other = build(model), build(model, range(1, 2)), build(model)
    for module, seed in ((whole, 3), (last, 3), (other, 4)):
        module.init_weights(seed)
    values = dict(whole.named_parameters())
    for name, parameter in last.named_parameters():
        assert torch.equal(parameter, values[name]), name
    first = "layers.0.moe.experts.first"
    assert not torch.equal(values[first], other.get_parameter(first))


def test_a_parameter_that_nobody_speaks_for_is_refused():
    class Module(torch.nn.Module):
        starts = {"weight": initial.WEIGHT}

    assert initial.start(Module(), "weight") == initial.WEIGHT
    for module, name in ((Module(), "scale"), (torch.nn.Conv2d(1, 1, 1), "weight")):
        with pytest.raises(AssertionError, match=f"{name}: say in `starts`"):
            initial.start(module, name)
