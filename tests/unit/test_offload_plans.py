"""Plans whose activations wait in host memory: copies, seconds and bytes, counted by hand."""

import math
import re
from unittest import mock

import msgspec
import pytest

from meshwise import models, search
from meshwise.models import offload
from meshwise.models.graph import elementwise
from meshwise.prices import Prices, unmeasured
from meshwise.search import stage
from meshwise.search.predict import ALL_STAY
from meshwise.search.simulate import TO_HOST, run_program
from meshwise.spec import Cluster, Decoder, Layout, Recipe, Workload, layer_kinds
from meshwise.verbs import files

MODEL = Decoder(
    hidden=2048, layers=12, heads=16, kv_heads=16, head_dim=128, ffn=5632, vocab=4096,
    max_seq_len=2048,
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=8, seq_len=2048)
INPUT = 4 * 2048 * 2048 * 2  # bytes of a layer's input in bf16, four sequences
LAYOUT = Layout(microbatch_size=4, num_microbatches=2, recompute="full")
RATE = 0.85 * 63e9


def prices(lowering="compiled", offload=True):
    costs = unmeasured(files.take("h200-hgx", Cluster))
    recipe = Recipe(offload=offload)
    return Prices(msgspec.structs.replace(costs, recipe=recipe, lowering=lowering), datasheet=True)


def told(layout=LAYOUT, **asked):
    return search.predict(MODEL, WORKLOAD, layout, prices(**asked))


def exposed_s(prediction):
    return sum(part.value for part in prediction.time_parts if part.name == TO_HOST)


def at_rate(bytes_per_s):
    """The data sheet with another rate of the host's link."""
    link = {"bytes_per_s": bytes_per_s, "share": 1.0, "devices": {}, "error": 0.0, "source": ""}
    known = Prices(unmeasured(files.take("h200-hgx", Cluster)), datasheet=True).datasheet.known
    pcie = msgspec.convert(link, type(known.pcie))
    changed = msgspec.structs.replace(known, pcie=pcie)
    return mock.patch("meshwise.prices.datasheet.attainable", return_value=changed)


def of_layer_0(task):
    """The task as if it were of the first layer; all are alike."""
    return msgspec.structs.replace(task, name=re.sub(r"^layers\.\d+", "layers.0", task.name))


def test_recomputed_layers_send_and_fetch_their_inputs_but_the_last():
    graph = models.graph(MODEL, 4, 2048, "bf16", recompute=("full",) * 12)
    program = models.program_of(graph, LAYOUT, "bf16", recipe=Recipe(offload=True))
    copies = [task for task in program.tasks if task.stream == "host"]
    for kind, layers in (("d2h", range(11)), ("h2d", [*range(10, -1, -1)])):
        found = [task for task in copies if task.op.kind == kind]
        assert [task.name for task in found] == 2 * [f"layers.{n}.{kind}" for n in layers]
        assert {task.op.read_bytes for task in found} == {INPUT}


def test_small_tensors_stay(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", INPUT + 1)
    graph = models.graph(MODEL, 4, 2048, "bf16", recompute=("full",) * 12)
    program = models.program_of(graph, LAYOUT, "bf16", recipe=Recipe(offload=True))
    assert not [task for task in program.tasks if task.stream == "host"]


def test_a_fast_link_is_hidden_and_a_slow_one_sets_the_pace():
    plain_s = told(offload=False).step_time_s
    with at_rate(1e15):
        assert told().step_time_s == pytest.approx(plain_s, rel=1e-3)
    with at_rate(1e8):
        copied_s = 2 * (11 + 11) * INPUT / 1e8
        assert copied_s < told().step_time_s < copied_s + plain_s
        assert exposed_s(told()) > 0.98 * copied_s - plain_s


def test_a_link_that_was_not_measured_is_missed_where_all_has_to_be():
    costs = msgspec.structs.replace(
        unmeasured(files.take("h200-hgx", Cluster)), recipe=Recipe(offload=True)
    )
    with pytest.raises(ValueError, match=r"no price for d2h.*measure health"):
        Prices(costs).estimate(elementwise("d2h", 2**30, 2**30, "forward"))


def test_the_data_sheets_rate_is_that_of_the_link():
    op = elementwise("d2h", 2**30, 2**30, "forward")
    estimate = prices().estimate(op)
    assert estimate.source == "datasheet"
    assert estimate.time_s == pytest.approx(2**30 / RATE, rel=1e-3)


def left_on_device(layout, offloaded):
    """The bytes that forward leaves of each microbatch, by stage."""
    by = prices("eager", offloaded)
    costs = [stage.stage_memory(kind, by) for kind in stage.kinds_of(MODEL, 2048, layout)]
    lives = [[live.left["activations"] for _, live in of.actions["F"]] for of in costs]
    assert all(len({*of}) == 1 for of in lives)
    return [of[0] for of in lives]


@pytest.mark.parametrize("pp", [1, 2, 3, 6, 12])
def test_microbatches_in_flight_hold_a_layers_input_and_what_the_stage_received(pp):
    """All layers are recomputed: each saves its input. The last keeps it on the device. The first
    stage makes its first layer's input, the others receive it and keep it, too."""
    layout = msgspec.structs.replace(
        LAYOUT, pp=pp, schedule="1f1b" if pp > 1 else "none", num_microbatches=12
    )
    each, plain = 12 // pp, left_on_device(layout, False)
    fewer = [
        before - after for before, after in zip(plain, left_on_device(layout, True), strict=True)
    ]
    assert fewer == [(each - 1) * INPUT, *[max(0, each - 2) * INPUT] * (pp - 1)]
    assert plain[1:-1] == [each * INPUT] * (pp - 2)


@pytest.mark.parametrize("word", ["none", "full"])
def test_stages_of_one_layer_are_as_without_offload(word):
    layout = Layout(pp=12, schedule="1f1b", microbatch_size=1, num_microbatches=8, recompute=word)
    plain, moving = told(layout, offload=False), told(layout)
    assert moving.peak_memory_bytes == plain.peak_memory_bytes
    assert moving.step_time_s == plain.step_time_s
    assert ALL_STAY in moving.notes and ALL_STAY not in (*plain.notes, *told().notes)


def test_the_search_knows_that_stages_of_one_layer_save_nothing():
    """On devices with one byte less than four stages of a layer need, only longer ones fit, and
    only under offload."""
    model = msgspec.structs.replace(MODEL, layers=4)
    workload = msgspec.structs.replace(WORKLOAD, global_batch_size=32)
    single = Layout(pp=4, schedule="1f1b", microbatch_size=1, num_microbatches=32)
    within = search.space_of(["recompute=none", "tp=1", "cp=1"])

    def found(offloaded):
        costs = prices("eager", offloaded).costs
        needs = search.predict(model, workload, single, prices("eager", offloaded))
        size = needs.peak_memory_bytes - 1 + costs.cluster.reserved_bytes
        device = msgspec.structs.replace(costs.cluster.device, memory_bytes=size)
        there = msgspec.structs.replace(costs.cluster, device=device)
        costs = msgspec.structs.replace(costs, cluster=there)
        return search.find(model, workload, costs, num_devices=4, within=within)

    with pytest.raises(search.NoLayout):
        found(False)
    plan = found(True)
    for layout in (plan.layout, *[each.layout for each in plan.runners_up]):
        assert any(len(layers) > 1 for layers in layout.stage_layers(4)), layout.name
    assert exposed_s(plan.prediction) > 0


@pytest.mark.parametrize("word", ["none", "full"])
@pytest.mark.parametrize("rate", [1e9, 1e11])
def test_layers_in_a_row_cost_what_each_of_them_costs(word, rate):
    """The stage's loop of equal layers against a program with every layer of its own."""
    layout = msgspec.structs.replace(LAYOUT, recompute=word)
    with at_rate(rate):
        by = prices("eager")
        (kind,) = stage.kinds_of(MODEL, 2048, layout)
        looped, charge = stage.priced(kind, by)
        graph = models.graph(
            MODEL, 4, 2048, "bf16", layers=layer_kinds(MODEL, 2048), recompute=(word,) * 12
        )
        whole = models.program_of(graph, layout, "bf16", recipe=Recipe(offload=True))
        beside = stage.beside_of(kind.layout, by)
        short, _ = run_program(looped, charge, beside)
        every, _ = run_program(whole, lambda task: charge(of_layer_0(task)), beside)
    for one, other in zip(short, every, strict=True):
        assert math.isclose(one.time_s, other.time_s, rel_tol=1e-9)
