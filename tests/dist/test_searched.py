"""Plans that the search finds, and that no uniform layout equals, train as the oracle does."""

import msgspec
import pytest

from meshwise import search
from meshwise.prices.datasheet import unmeasured
from meshwise.search import space
from meshwise.spec import Cluster
from meshwise.verbs import files
from tests.dist import matrix

pytestmark = pytest.mark.dist


def a_slow_host(num_devices, links_by=100):
    """A host of V100 whose every rate is so low that small models are bound by it."""
    host = files.take("p3.16xlarge", Cluster)
    device, (links, *_) = host.device, host.tiers
    slow = msgspec.structs.replace(
        device,
        peak_flops={dtype: rate / 1e5 for dtype, rate in device.peak_flops.items()},
        peak_memory_bytes_per_s=device.peak_memory_bytes_per_s / 1e5,
    )
    links = msgspec.structs.replace(
        links, num_devices=num_devices, bytes_per_s=links.bytes_per_s / links_by
    )
    return msgspec.structs.replace(
        host, num_devices_per_host=num_devices, device=slow, tiers=(links,)
    )


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        *((name, 3) for name in ("gpt", "llama", "gshard", "mixtral", "deepseek", "wide-resnet")),
        *((name, 5) for name in ("gpt", "gshard", "wide-resnet")),
    ],
)
def test_a_plan_of_unlike_stages(gloo_ranks, plan_of, tmp_path, name, num_devices):
    """Eight sequences for three or five devices, which no uniform layout keeps busy."""
    model = matrix.FAMILIES[name]
    usual = matrix.workload(num_devices, model)
    workload = msgspec.structs.replace(usual, global_batch_size=8)
    costs = unmeasured(a_slow_host(num_devices))
    layout = search.find(model, workload, costs, num_devices=num_devices).layout
    assert len({dp * tp for dp, tp in layout.meshes}) > 1, layout.name
    train(gloo_ranks, plan_of(model, workload, layout), tmp_path)


@pytest.mark.parametrize(("name", "num_devices"), [("deepseek", 4), ("mixtral", 2)])
def test_a_plan_whose_parts_have_cuts_of_their_own(
    gloo_ranks, plan_of, tmp_path, name, num_devices
):
    """Two sequences on links so slow that some parts are computed by every rank, without pipelines,
    which such links suit better."""
    model = matrix.FAMILIES[name]
    usual = matrix.workload(num_devices, model)
    workload = msgspec.structs.replace(usual, global_batch_size=2)
    costs = unmeasured(a_slow_host(num_devices, links_by=1e6))
    within = search.space_of(["pp=1"])
    layout = search.find(model, workload, costs, num_devices=num_devices, within=within).layout
    assert layout.cuts not in [each.cuts for each in space.shared(1, 1, 2, has_experts=True)]
    train(gloo_ranks, plan_of(model, workload, layout), tmp_path)


def train(gloo_ranks, plan, folder):
    plan = msgspec.structs.replace(plan, recipe=matrix.RECIPES["adamw"])
    loss, value, where = matrix.run(gloo_ranks, plan, folder)
    assert matrix.is_right(plan, loss, value), (loss, value, where)
