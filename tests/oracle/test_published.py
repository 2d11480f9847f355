"""Plans by data sheet against published ones: are they legal, near our best, as long as measured?

Layouts and iteration times of Megatron-LM (SC'21, and with selective recomputation) and MT-NLG, and
Alpa's 21 plans for p3.16xlarge. benchmarks/2026-11-28-published has the tables.
"""

from statistics import mean

import pytest
from msgspec.structs import replace

from meshwise import search
from tests.oracle.published import (
    OTHERWISE,
    ROWS,
    as_run_s,
    compared,
    found_by_alpa,
    likely,
    mfu_s,
    predicted,
    step_of,
)

STEPS = [step_of(row) for row in ROWS]
FOUND = dict(found_by_alpa())
# Theirs over ours. Cut by channel, we compute most of a layer whole on every tp rank, and send each
# a copy of every image; Alpa divides all of it, and sends an image once to a host. README.md has
# the terms.
SLOWER = {"wresnet-2b, 8 GPUs": 1.52, "wresnet-4b, 16 GPUs": 1.11, "wresnet-13b, 64 GPUs": 1.37}
FASTER = {"wresnet-6.8b, 32 GPUs": 0.996}  # than the best of its kind that was found


def of_table(source):
    return [step for step in STEPS if step.source == source]


def off(step, time_s):
    return abs(time_s / step.iter_s - 1)


def as_run(source):
    """The errors of a table's steps, with what their systems did counted."""
    steps = of_table(source)
    return [off(step, sum(as_run_s(step, predicted(step)).values())) for step in steps]


def test_selective_recomputation_is_predicted_within_6_percent():
    """8 % in the mean and 15 % at worst are asked for; a constant MFU is 18 % off."""
    errors = as_run("selective table")
    assert len(errors) == 8 and mean(errors) <= 0.06 and max(errors) <= 0.10
    constant = [off(step, mfu_s(step, STEPS)) for step in of_table("selective table")]
    assert mean(constant) > 2 * mean(errors)


def test_sc21_is_predicted_within_10_percent():
    """12 % in the mean of table 1 are asked for."""
    errors = as_run("sc21 table 1")
    assert len(errors) == 10 and mean(errors) <= 0.10 and max(errors) <= 0.14
    errors = as_run("sc21 table 2")
    assert len(errors) == 6 and mean(errors) <= 0.09


def test_attention_then_is_counted_in_bytes():
    """GPT-22B, tp 8, 4 sequences. A pair of query and key is 13 bytes forward (the scores, softmax
    4, dropout 5, the product with v), twice, and 21 backward; the flash kernels priced go off."""
    step = of_table("selective table")[1]
    pairs, bytes_per_s = 4 * 8 * 2048**2, 0.88 * 2039e9
    all_s = 48 * pairs * (2 * 13 + 21) / bytes_per_s
    assert 0.7 < as_run_s(step, predicted(step))["attention"] / all_s < 1.0


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_published_layouts_are_legal(step):
    search.check(step.model, step.workload, step.layout)
    assert step.layout.batch_size == step.workload.global_batch_size


@pytest.mark.parametrize("name", FOUND)
def test_plans_that_alpa_found_are_legal(name):
    model, workload, _, layouts, _ = FOUND[name]
    for layout in layouts:
        search.check(model, workload, layout)


def beside_ours(of):
    """Check that a layout never beats our best, and return its seconds and those over our best of
    its kind's."""
    found = compared(*of)
    *like, best = found.times_ours()
    assert best >= 1 - 1e-9
    return found.theirs, like[0]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_published_layouts_are_near_ours_and_never_faster(step):
    about = step.model, step.workload, step.costs
    _, share = beside_ours((*about, [step.layout], likely(step.layout)[:1]))
    assert 1 - 1e-9 <= share <= 1.10


@pytest.mark.parametrize("name", FOUND)
def test_plans_that_alpa_found_are_near_ours_and_never_faster(name):
    """Three Wide-ResNets lose more. With stages cut by images, or without the unevenness of Alpa's
    layers, they do not: 1.07, 1.02 and 1.01."""
    theirs, share = beside_ours(FOUND[name])
    assert FASTER.get(name, 1 - 1e-9) <= share <= SLOWER.get(name, 1.10)
    other = search.given(*FOUND[name][:3], replace(theirs.layout, **OTHERWISE.get(name, {})))
    share *= other.prediction.step_time_s / theirs.prediction.step_time_s
    assert share <= 1.10
