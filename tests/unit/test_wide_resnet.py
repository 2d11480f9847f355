"""Wide-ResNet's counts against Alpa's table, and against a count of its own for other sizes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.models import catalogue, num_parameters, step_flops, stream_shape
from meshwise.models.counts import forward_flops
from meshwise.models.decoder import weights as weights_of
from meshwise.spec import Workload
from meshwise.spec.record import digest
from meshwise.spec.vision import WideResNet

TABLE = {  # depth, parameters, forward GFLOP of one image (2 * MAC)
    "wresnet-250m": (50, 254_123_104, 83.6),
    "wresnet-500m": (50, 495_046_176, 163.5),
    "wresnet-1b": (50, 1_005_653_184, 333.2),
    "wresnet-2b": (50, 1_965_011_008, 652.5),
    "wresnet-4b": (50, 4_000_937_344, 1330.6),
    "wresnet-6.8b": (50, 6_727_679_424, 2203.5),
    "wresnet-13b": (101, 12_633_386_944, 4518.2),
}

sizes = st.builds(
    WideResNet,
    blocks=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
    channels=st.integers(1, 5),
    width_factor=st.integers(1, 3),
    image_size=st.integers(1, 70),
    num_classes=st.integers(1, 9),
)


@pytest.mark.parametrize("name", TABLE)
def test_parameters_and_flops_are_those_of_the_table(name):
    model = catalogue.find_any(name)
    depth, parameters, gflop = TABLE[name]
    assert (model.name, model.depth) == (name, depth)
    assert num_parameters(model) == parameters
    assert forward_flops(model, 1) == pytest.approx(gflop * 1e9, rel=1e-3)


def test_the_catalogue_has_the_whole_table():
    assert [name for name in catalogue.all_names() if "wresnet" in name] == list(TABLE)


def test_resnet_50_has_its_published_parameters():
    """He et al.'s ResNet-50 with 1000 classes: 25,557,032 in torchvision."""
    assert num_parameters(WideResNet(channels=64, num_classes=1000)) == 25_557_032


def test_the_blocks_of_depths_50_and_101_are_layers():
    assert [catalogue.find_any(name).layers for name in ("wresnet-4b", "wresnet-13b")] == [16, 33]


def test_a_step_is_three_forwards():
    model = catalogue.find_any("wresnet-250m")
    step = step_flops(model, Workload(global_batch_size=32, seq_len=1))
    assert step == 96 * forward_flops(model, 1)


def test_shapes_between_the_blocks_of_the_smallest():
    model = catalogue.find_any("wresnet-250m")
    shapes = [stream_shape(model, 8, 1, layer) for layer in range(17)]
    assert shapes == (
        [(8, 160, 56, 56)]
        + 3 * [(8, 640, 56, 56)]
        + 4 * [(8, 1280, 28, 28)]
        + 6 * [(8, 2560, 14, 14)]
        + 3 * [(8, 5120, 7, 7)]
    )


@given(sizes)
def test_parameters_are_their_closed_form(model):
    """Bottleneck by bottleneck: convolutions, and two numbers a channel for each norm."""
    total = model.channels * 3 * 49 + 2 * model.channels
    inputs = model.channels
    for resolution, count in enumerate(model.blocks):
        f = model.channels * 2**resolution
        inner = model.width_factor * f
        for _ in range(count):
            total += inputs * f + 9 * f * inner + inner * 4 * f + 2 * (f + inner + 4 * f)
            total += inputs * 4 * f + 2 * 4 * f if inputs != 4 * f else 0
            inputs = 4 * f
    total += inputs * model.num_classes + model.num_classes
    assert num_parameters(model) == total


@given(sizes)
def test_weights_have_distinct_names_and_the_unit_of_their_block(model):
    weights = weights_of(model)
    assert len({weight.name for weight in weights}) == len(weights)
    for weight in weights:
        block = weight.name.startswith("layers.")
        assert weight.unit == (".".join(weight.name.split(".")[:2]) if block else "root")
    units = {weight.unit for weight in weights}
    assert units == {"root", *(f"layers.{i}" for i in range(model.layers))}


def test_a_record_comes_back_from_its_json():
    model = catalogue.find_any("wresnet-13b")
    text = msgspec.json.encode(model)
    assert b'"family":"wide_resnet"' in text
    again = msgspec.json.decode(text, type=WideResNet)
    assert again == model
    assert digest(again) == digest(model) != digest(catalogue.find_any("wresnet-6.8b"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"blocks": ()}, r"WideResNet.blocks = \(\): must be 1 to 8 numbers"),
        ({"blocks": (3, 0)}, r"WideResNet.blocks = \(3, 0\): each must be >= 1"),
        ({"blocks": (3, 10**300)}, r"WideResNet.blocks = \(3, 10+ \.\.\.: each must be <= 1048576"),
        ({"channels": 0}, "WideResNet.channels = 0: must be >= 1"),
        ({"width_factor": 0}, "WideResNet.width_factor = 0: must be >= 1"),
    ],
)
def test_impossible_sizes_are_refused_by_name(wrong, said):
    with pytest.raises(ValueError, match=said):
        WideResNet(**{"channels": 8} | wrong)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(
        ValueError, match=r"'wresnet-3b' is neither in the catalogue.*; did you mean w"
    ):
        catalogue.find_any("wresnet-3b")
