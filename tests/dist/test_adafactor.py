"""Our Adafactor on shards against torch's on whole tensors."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwise.engine.adafactor import Adafactor
from tests.errors import largest

SHAPES = {"matrix": (7, 10), "vector": (5,), "experts": (4, 6, 3), "kernel": (4, 6, 3, 3)}


def differences(ranks, name, dims):
    """max |W - W of torch| over three steps of one parameter, cut by ``dims`` of each axis."""
    mesh = init_device_mesh("cpu", (2,) * len(dims))
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(SHAPES[name], generator=generator)
    whole = nn.Parameter(start.clone())
    cut = nn.Parameter(distribute_tensor(start.clone(), mesh, placements))
    theirs = torch.optim.Adafactor([whole], lr=0.1, weight_decay=0.01, foreach=False)
    ours = Adafactor([cut], lr=0.1, weight_decay=0.01)
    found = []
    for _ in range(3):
        gradient = torch.randn(start.shape, generator=generator)
        whole.grad, cut.grad = gradient, distribute_tensor(gradient, mesh, placements)
        theirs.step()
        ours.step()
        found.append(float((cut.full_tensor() - whole).detach().abs().max()))
    for key, value in theirs.state[whole].items():
        mine = ours.state[cut][key]
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        found.append(float((mine - value).abs().max()))
    return found, float((whole - start).detach().abs().max())


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("matrix", [0]),  # 7 rows over 2 ranks
        ("matrix", [1]),
        ("matrix", [None]),
        ("vector", [0]),
        ("experts", [0]),
        ("experts", [1]),
        ("kernel", [0]),
        ("matrix", [0, 1]),
    ],
)
def test_shards_are_updated_as_the_whole(gloo_ranks, name, dims):
    for found, moved in gloo_ranks(2 ** len(dims), differences, name=name, dims=dims):
        assert moved > 1e-2 and largest(found) < 1e-6
