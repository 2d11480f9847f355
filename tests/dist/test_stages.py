"""The stages of a plan are what runs: each in a way of its own, as the oracle trains."""

import json

import msgspec
import pytest

from meshwise.spec import Cuts, Layout, Plan, Way
from tests.dist import matrix

pytestmark = pytest.mark.dist

PIPELINE = Layout(pp=2, dp=2, tp=2, schedule="1f1b", microbatch_size=2, num_microbatches=2)
EDITS = {  # of the second stage, in plan.json
    "vocabulary whole": {"placements": {"head": {"batch": ["dp"]}, "embed": {"batch": ["dp"]}}},
    "attention over batch": {"placements": {"attention": {"batch": ["dp", "tp"]}}},
    "sequence parallelism": {"placements": {"stream": {"batch": ["dp"], "seq": ["tp"]}}},
    "ZeRO-3": {"zero": 3},
    "recomputed": {"recompute": ["full", "none"]},
}


def edited(plan, change):
    """The plan as a user changes it in its file."""
    data = json.loads(msgspec.json.encode(plan))
    stage = data["stages"][1]
    stage |= {key: value for key, value in change.items() if key != "placements"}
    stage["placements"] |= change.get("placements", {})
    return msgspec.convert(data, Plan)


@pytest.mark.parametrize("name", EDITS)
def test_a_stage_runs_as_the_plan_says(gloo_ranks, tmp_path, name):
    family = matrix.FAMILIES["llama"]
    plan = edited(matrix.plan_of(family, PIPELINE, "adamw"), EDITS[name])
    assert len(plan.layout.ways) == 2 and plan.layout.ways[0] == Way()
    loss, value, where = matrix.run(gloo_ranks, plan, tmp_path)
    assert matrix.is_right(plan, loss, value), (loss, value, where)


def test_stages_of_unequal_degrees(gloo_ranks, tmp_path):
    """The first stage divides the batch, the second the weights, whose attention is whole."""
    layout = Layout(
        pp=2, schedule="1f1b", meshes=((2, 1), (1, 2)), microbatch_size=4, num_microbatches=2,
        ways=(Way(), Way(cuts=Cuts(attention="whole", head="whole", embed="whole"))),
    )  # fmt: skip
    plan = matrix.plan_of(matrix.FAMILIES["llama"], layout, "adamw")
    loss, value, where = matrix.run(gloo_ranks, plan, tmp_path)
    assert matrix.is_right(plan, loss, value), (loss, value, where)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(
            pp=3, schedule="1f1b", meshes=((1, 1), (1, 2), (1, 1)), microbatch_size=2,
            num_microbatches=4, layers=(1, 2, 1), sequence_parallel=True, recompute="full",
            ways=(Way(), Way(recompute_layers=1, recompute="selective"), Way(recompute="none")),
        ),
        Layout(
            pp=2, schedule="interleaved_1f1b", stages_per_rank=2, meshes=((2, 1), (1, 2)), zero=3,
            microbatch_size=4, num_microbatches=2, layers=(1, 1, 1, 1),
            ways=(Way(), Way(recompute="full"), Way(recompute="selective"), Way()),
        ),
    ],
    ids=lambda layout: layout.name,
)  # fmt: skip
def test_what_the_search_of_uneven_pipelines_may_choose(gloo_ranks, tmp_path, layout):
    plan = matrix.plan_of(matrix.FAMILIES["llama"], layout, "adamw")
    loss, value, where = matrix.run(gloo_ranks, plan, tmp_path)
    assert matrix.is_right(plan, loss, value), (loss, value, where)


def test_another_order_of_sums_alone_is_refused_since_its_price_is_another():
    plan = matrix.plan_of(matrix.FAMILIES["llama"], PIPELINE, "adamw")
    data = json.loads(msgspec.json.encode(plan))
    data["layout"]["tp_sums"] = "first"
    with pytest.raises(msgspec.ValidationError, match=r"tp_sums of stage 0.*plan --layout"):
        msgspec.convert(data, Plan)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"placements": {"attention": {"seq": ["tp"]}}}, "stage 1"),
        ({"placements": {"head": {"vocab": ["dp"]}}}, "stage 1"),
        ({"recompute": ["none", "full"]}, "stage 1"),
        ({"first_layer": 1}, "stage 1"),
    ],
)
def test_what_cannot_be_is_refused_by_its_stage(change, message):
    plan = matrix.plan_of(matrix.FAMILIES["llama"], PIPELINE, "adamw")
    with pytest.raises((ValueError, msgspec.ValidationError), match=message):
        edited(plan, change)
