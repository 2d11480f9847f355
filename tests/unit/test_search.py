"""The search against brute force and closed forms, on the synthetic cluster of test_prices."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise import models, search
from meshwise.models.apply import Program
from meshwise.models.shard import Buffer, Task
from meshwise.prices import Prices
from meshwise.search.simulate import peak_memory, run_program
from meshwise.search.space import legal_layouts
from meshwise.spec import Elementwise, Layout, Model, Workload
from tests.unit.test_prices import CLUSTER, costs  # noqa: F401

MODEL = Model(name="small", hidden=1024, layers=4, heads=16, ffn=4096, vocab=1024)
WORKLOAD = Workload(global_batch_size=8, seq_len=512)


def brute_force_layouts(num_devices, batch, max_tp):
    """Every combination, filtered by the definitions."""
    for dp, tp, mb, n, zero, sp in itertools.product(
        range(1, num_devices + 1), range(1, num_devices + 1), range(1, batch + 1),
        range(1, batch + 1), range(4), (False, True),
    ):  # fmt: skip
        if dp * tp != num_devices or dp * mb * n != batch or tp > max_tp:
            continue
        if (zero and dp == 1) or (sp and tp == 1) or (zero == 1 and n == 1):
            continue
        yield (dp, tp, zero, sp, mb, n)


@pytest.mark.parametrize(("num_devices", "batch"), [(1, 4), (2, 4), (4, 8), (8, 8)])
def test_every_legal_layout_once(num_devices, batch):
    workload = Workload(global_batch_size=batch, seq_len=512)
    layouts, removed = legal_layouts(MODEL, workload, num_devices, max_tp=4)
    found = [
        (x.dp, x.tp, x.zero, x.sequence_parallel, x.microbatch_size, x.num_microbatches)
        for x in layouts
    ]
    assert sorted(found) == sorted(brute_force_layouts(num_devices, batch, 4))
    assert bool([r for r in removed if "would leave the host" in r.constraint]) == (
        num_devices == 8
    )


def test_heads_that_do_not_divide_are_counted():
    model = msgspec.structs.replace(MODEL, hidden=960, heads=15)
    layouts, removed = legal_layouts(model, WORKLOAD, 4, max_tp=4)
    assert {layout.tp for layout in layouts} == {1}
    assert any(r.constraint == "tp = 2 does not divide heads = 15" for r in removed)


def test_plan_is_the_fastest_that_fits(costs):  # noqa: F811
    plan = search.find(MODEL, WORKLOAD, costs, num_devices=4)
    layouts, _ = legal_layouts(MODEL, WORKLOAD, 4, 4)
    times = {x: search.predict(MODEL, WORKLOAD, x, Prices(costs)).step_time_s for x in layouts}
    assert plan.prediction.step_time_s == min(times.values())
    ranked = [plan.prediction.step_time_s, *(c.prediction.step_time_s for c in plan.runners_up)]
    assert ranked == sorted(times.values())[:10]
    assert plan.prediction.low_s <= plan.prediction.step_time_s <= plan.prediction.high_s


def test_parts_add_up(costs):  # noqa: F811
    plan = search.find(MODEL, WORKLOAD, costs, num_devices=4)
    for candidate in plan.runners_up:
        p = candidate.prediction
        assert sum(part.value for part in p.time_parts) == pytest.approx(p.step_time_s)
        assert sum(part.value for part in p.memory_parts) == pytest.approx(p.peak_memory_bytes)
        assert p.tokens_per_s == pytest.approx(WORKLOAD.tokens / p.step_time_s)
        flops = models.step_flops(MODEL, WORKLOAD)
        assert p.mfu == pytest.approx(flops / p.step_time_s / 4 / 1e15)


def test_memory_falls_with_zero_and_grows_with_the_microbatch(costs):  # noqa: F811
    prices = Prices(costs)

    def memory(**layout):
        return search.predict(MODEL, WORKLOAD, Layout(**layout), prices).peak_memory_bytes

    by_zero = [memory(dp=4, zero=zero, num_microbatches=2) for zero in range(4)]
    assert by_zero == sorted(by_zero, reverse=True)
    assert memory(dp=4, microbatch_size=4) > memory(dp=4, microbatch_size=1)


def test_too_small_a_device_names_what_is_missing(costs):  # noqa: F811
    def on_memory(limit):
        device = msgspec.structs.replace(CLUSTER.device, memory_bytes=limit)
        return msgspec.structs.replace(
            costs, cluster=msgspec.structs.replace(CLUSTER, device=device)
        )

    needs = sorted(
        search.predict(MODEL, WORKLOAD, layout, Prices(costs)).peak_memory_bytes
        for layout in legal_layouts(MODEL, WORKLOAD, 4, 4)[0]
    )
    plan = search.find(MODEL, WORKLOAD, on_memory(int(needs[3])), num_devices=4)
    assert plan.nearest_infeasible is not None
    assert plan.nearest_infeasible.missing_bytes == pytest.approx(needs[4] - int(needs[3]), abs=1)
    assert any(r.constraint.startswith("memory") and r.count > 0 for r in plan.removed)
    with pytest.raises(
        ValueError, match=r"no layout of small fits 4 devices; .* rank 0 needs .* more"
    ):
        search.find(MODEL, WORKLOAD, on_memory(1000), num_devices=4)


def test_more_devices_than_the_cluster_has(costs):  # noqa: F811
    with pytest.raises(ValueError, match="gpus = 8: cluster 'four' has 4 devices"):
        search.find(MODEL, WORKLOAD, costs, num_devices=8)


def task(name, stream, reads=(), writes=(), phase="forward"):
    op = Elementwise(kind="copy", read_bytes=1, write_bytes=1)
    return Task(name, op, stream, "layer", phase, tuple(reads), tuple(writes))


def test_two_streams_overlap_and_waiting_is_counted():
    """gather (4) runs beside a (3); b needs both: it waits 1, then takes 2."""
    seconds = {"a": 3.0, "gather": 4.0, "b": 2.0}
    program = Program(
        (
            task("gather", "dp", writes="w"),
            task("a", "compute", writes="x"),
            task("b", "compute", "xw"),
        ),
        {"w": Buffer(1, "weights"), "x": Buffer(1, "activation")}, {}, frozenset(),
    )  # fmt: skip
    two = run_program(program, lambda t: seconds[t.name], lambda t: t.name, one_stream=False)
    assert two.time_s == 6 and two.parts == {
        "data-parallel communication (exposed)": 1, "a": 3, "b": 2,
    }  # fmt: skip
    one = run_program(program, lambda t: seconds[t.name], lambda t: t.name, one_stream=True)
    assert one.time_s == 9


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 50)), min_size=1, max_size=8
    )
)
def test_peak_memory_equals_a_count_at_every_moment(spans):
    """Buffers written at one task and last read at another; counted moment by moment."""
    buffers = {f"b{i}": Buffer(size, "activation") for i, (_, _, size) in enumerate(spans)}
    life = {f"b{i}": (min(a, b), max(a, b)) for i, (a, b, _) in enumerate(spans)}
    tasks = tuple(
        task(
            str(at), "compute",
            [name for name, (first, last) in life.items() if first < at == last],
            [name for name, (first, _) in life.items() if first == at],
        )
        for at in range(10)
    )  # fmt: skip
    expected = max(
        sum(buffers[name].num_bytes for name, (first, last) in life.items() if first <= at <= last)
        for at in range(10)
    )
    program = Program(tasks, buffers, {"parameters": 7}, frozenset())
    assert peak_memory(program, lambda name: 1.0).total_bytes == expected + 7


def test_one_gemm_from_the_model_to_the_plan(costs):  # noqa: F811
    plan = search.find(MODEL, WORKLOAD, costs, num_devices=4)
    rows = search.explain(plan, costs, "layers.0.up")
    assert [row.task for row in rows] == [
        f"layers.0.up{x}" for x in ("", ".dgrad", ".wgrad", ".bgrad")
    ]
    up = rows[0]
    tokens = plan.layout.microbatch_size * WORKLOAD.seq_len
    assert (up.op.m, up.op.n, up.op.k) == (tokens, MODEL.ffn // plan.layout.tp, MODEL.hidden)
    assert up.price_s == Prices(costs).estimate(up.op).time_s
    assert up.seconds == pytest.approx(up.price_s * up.factor * plan.layout.num_microbatches)
    with pytest.raises(
        ValueError, match=r"no operation 'layers.9.up' in small; for example layers.0"
    ):
        search.explain(plan, costs, "layers.9.up")
