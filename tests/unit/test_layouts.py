"""Layouts of loaders in files: equal when read, refused by name if they are hostile, or of another
model or checkpoint. The loader is a stand-in of vLLM's kind."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwise.bridges import layouts
from meshwise.bridges.loader import holdings_of_loader
from meshwise.bridges.weights import joined
from meshwise.reshard.holdings import HeldTensor
from meshwise.spec import loader
from tests.unit.test_hostile_files import BAD

SHAPES = {"gate": (4, 6), "up": (4, 6), "down": (6, 4), "table": (10, 6), "rope": (3,)}
CHECKPOINT = {name: (shape, torch.bfloat16) for name, shape in SHAPES.items()}


class Served(nn.Module):
    """The second of two tp ranks: gate and up fused, down transposed, a table with padding."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(4, 6, dtype=dtype))
        self.down = nn.Parameter(torch.zeros(2, 6, dtype=dtype))
        self.table = nn.Parameter(torch.zeros(6, 6, dtype=dtype))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in ("gate", "up"):
                self.gate_up.data[2 * (name == "up") :][:2].copy_(tensor[2:])
            elif name == "down":
                self.down.data.copy_(tensor[:, 2:].t())
            elif name == "table":
                self.table.data[:4].copy_(tensor[6:])


@pytest.fixture
def path(tmp_path):
    read = holdings_of_loader(Served(), CHECKPOINT)
    return layouts.write(layouts.file_of(tmp_path / "made", 0), read, loader="Served 1")


def test_a_layout_is_the_same_when_read(path):
    assert path.name == "rank-0.json"
    for rank in (0, 3):
        read = holdings_of_loader(Served(), CHECKPOINT, rank=rank)
        assert layouts.loaded(layouts.read(path), rank) == read
    assert (read.turned, read.unread, read.unfilled) == ({"down": (1, 0)}, ("rope",), {"table": 12})


def test_tensors_of_a_layout_are_the_parameters(path):
    made = layouts.tensors(layouts.read(path))
    for name, parameter in Served().named_parameters():
        assert made[name].shape == parameter.shape and made[name].dtype == parameter.dtype


class Alone:
    """A Ranks of one process, as far as planning asks."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def together(self, work, told):
        try:
            return work(), [None]
        except ValueError as error:
            return None, [told(error)]

    def gather(self, value):
        return [value]


def refusal(server, layout, checkpoint=SHAPES) -> str:
    from meshwise.bridges.weights import _destination

    tensors = {name: HeldTensor(shape, "bf16", ()) for name, shape in checkpoint.items()}
    read = layout and (lambda _, rank: layouts.loaded(layout, rank))
    with pytest.raises(ValueError) as error:
        _destination(Alone(), server, read, tensors, {"num_hidden_layers": 2})
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_a_layout_is_not_of_is_refused_by_name(path):
    layout = layouts.read(path)
    wide = refusal(Served(torch.float32), layout)
    assert "gate_up: fp32 [4, 6] is served, the loader fills bf16 [4, 6]" in wide
    more = refusal(Served(), layout, SHAPES | {"bias": (4,)})
    assert "bias: the layout does not know this tensor of the checkpoint" in more
    fewer = refusal(Served(), layout, {k: v for k, v in SHAPES.items() if k != "up"})
    assert "up: the layout has this tensor, the trainer's checkpoint has not" in fewer
    taller = refusal(Served(), layout, SHAPES | {"table": (12, 6)})
    assert "table: (12, 6) in the checkpoint, (10, 6) in the layout" in taller
    lacking = {"down": Served().down, "extra": torch.zeros(1)}
    assert "gate_up: only the layout has such a parameter" in refusal(lacking, layout)
    assert "extra: only the model has such a parameter" in refusal(lacking, layout)
    deeper = loader.LoaderLayout(
        parameters=layout.parameters, tensors=layout.tensors, unread=layout.unread,
        config={"num_hidden_layers": 3},
    )  # fmt: skip
    told = "num_hidden_layers: 2 in the trainer's configuration, 3 in the server's"
    assert told in refusal(Served(), deeper)
    assert "parameters by name have no loader" in refusal(layouts.tensors(layout), None)


@pytest.mark.parametrize("kind", [*BAD, "FIFO", "device", "folder", "none"])
def test_hostile_files(kind, tmp_path):
    path = tmp_path / "rank-0.json"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind != "none":
        path.write_bytes(BAD[kind] if isinstance(BAD[kind], bytes) else BAD[kind].encode())
    with pytest.raises(ValueError, match=r"rank-0\.json") as error:
        layouts.read(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (("schema_version",), 2, "schema_version is 2, this version reads 1"),
        (("colour",), 1, "colour"),
        (("tensors", "gate", "shape"), [4], "must hold the box that ends at (4, 6)"),
        (("tensors", "gate", "shape"), [4, 5], "must hold the box that ends at (4, 6)"),
        (("tensors", "gate", "boxes"), [], "must be one at least"),
        (("tensors", "gate", "boxes", 0, "high"), [2, 6], "must be above low = (2, 0)"),
        (("tensors", "gate", "boxes", 0, "low"), [2], "must have the 1 dims of low"),
        (("tensors", "gate", "boxes", 0, "low"), [-1, 0], ">= 0"),
        (("tensors", "gate", "boxes", 0, "parameter"), "none", "no parameter none"),
        (("tensors", "gate", "boxes", 0, "parameter"), 3, "Expected `str`"),
        (("parameters", "down", "order"), [1, 1], "each once"),
        (("parameters", "down", "dtype"), "int3", "down: dtype 'int3' cannot be moved"),
        (("parameters", "down", "shape"), [1e30, 6], "Expected `int`, got `float`"),
        (("unread",), "rope", "Expected `array`"),
    ],
)
def test_fields_that_do_not_fit_are_named(field, value, said, path):
    data = json.loads(path.read_text())
    at = data
    for part in field[:-1]:
        at = at[part]
    at[field[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        layouts.read(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_the_documentation_names_every_field():
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    for kind in (loader.LoaderLayout, loader.Filled, loader.Loadable, loader.LoadedBox):
        entry = re.search(rf"^- `{kind.__name__}`.*?(?=^- |^$|^#)", text, re.M | re.S)
        assert set(re.findall(r"`(\w+)`", entry[0])) >= set(kind.__struct_fields__)


def test_nothing_of_vllm_is_needed():
    import subprocess
    import sys

    code = "import sys; sys.modules['vllm'] = None; from meshwise.bridges import layouts, weights"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert joined
