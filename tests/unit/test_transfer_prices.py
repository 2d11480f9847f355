"""Prices of one machine from measurements of another, against proportions of their data sheets."""

import msgspec
import pytest

from meshwise.fit import calibrate, completed, transfer
from meshwise.models import block_ops, block_tasks
from meshwise.prices import Prices, in_step
from meshwise.spec import (
    Block,
    Case,
    Cluster,
    Collective,
    Device,
    Elementwise,
    Gemm,
    Layout,
    Model,
    RunInfo,
    Sample,
    Step,
    Tier,
    Workload,
)

MODEL = Model(hidden=256, layers=1, heads=4, ffn=1024, vocab=512, max_seq_len=64)
PRODUCT = Gemm(m=8192, n=8192, k=8192)
COPY = Elementwise(kind="copy", read_bytes=2**30, write_bytes=2**30)


def machine(name, times=1.0, devices=4):
    return Cluster(
        name=name,
        num_hosts=1,
        num_devices_per_host=devices,
        device=Device(
            name=name,
            kind="cuda",
            memory_bytes=2**36,
            peak_flops={"bf16": times * 1e15},
            peak_memory_bytes_per_s=times * 4e12,
        ),
        tiers=(Tier(name="nvlink", num_devices=devices, bytes_per_s=times * 450e9),),
    )


OLD, TWICE = machine("old"), machine("twice", 2.0)


def gather(size_bytes, ranks=4):
    return Collective(kind="all_gather", size_bytes=size_bytes, group_size=ranks)


def run(cluster, ops):
    info = RunInfo(
        run_id=f"run-{cluster.name}", verb="measure", cluster=cluster, world_size=4, command=(),
        started="2026-11-27T00:00:00Z",
    )  # fmt: skip
    samples = []
    for op, time_s in ops.items():
        case = Case(op=op, world_size=4, **in_step(op, cluster, "compiled")._asdict())
        times_s = (time_s,) * 5
        samples.append(Sample(case_id=case.id, case=case, status="ok", times_s=times_s))
    return info, samples


@pytest.mark.parametrize(
    ("op", "time_s"), [(PRODUCT, 1.7e-3), (COPY, 0.9e-3), (gather(2**33), 25e-3)]
)
def test_what_the_data_sheets_bound_scales_as_they_do(op, time_s):
    prices = Prices(transfer([run(OLD, {op: time_s})], TWICE))
    found = prices.estimate(op)
    assert found.time_s == pytest.approx(time_s / 2, rel=0.01)
    assert found.source == "transferred"
    assert found.error >= 0.25
    assert "measured on old, and scaled by data sheets" in found.note


def test_a_launch_takes_as_long_on_any_machine():
    small = Elementwise(kind="copy", read_bytes=32, write_bytes=32)
    found = Prices(transfer([run(OLD, {small: 6e-6})], TWICE)).estimate(small)
    assert found.time_s == pytest.approx(6e-6, rel=0.01)


def test_layers_take_their_ratio_along():
    block = Block(part="layer", model=MODEL, microbatch_size=64, seq_len=64)
    parts = {op: 1e-4 * (1 + at) for at, op in enumerate(dict.fromkeys(block_ops(block)))}
    measured = {**parts, block: 1.5 * sum(parts[op] for op in block_ops(block))}
    here = calibrate([run(OLD, measured)])
    there = transfer([run(OLD, measured)], TWICE)
    assert there.factors[0].ratio[0] == pytest.approx(here.factors[0].ratio[0], rel=0.25)
    ratio, held_out = Prices(there).factor(block, block_tasks(block))
    assert ratio == pytest.approx(there.factors[0].ratio[0], rel=0.01)
    assert held_out.p90 >= 0.25


def test_a_layer_that_waits_for_the_host_does_so_on_a_faster_device():
    block = Block(part="layer", model=MODEL, microbatch_size=4096, seq_len=64)
    parts = dict.fromkeys(block_ops(block), 1e-4)
    tasks, host_s = block_tasks(block), 0.1
    prices = Prices(transfer([run(OLD, {**parts, block: host_s})], TWICE))
    time_s = prices.factor(block, tasks)[0] * prices.composed_s(tasks)
    assert time_s == pytest.approx(host_s, rel=0.01)


def test_what_was_measured_there_is_kept():
    own = calibrate([run(TWICE, {COPY: 0.5e-3})])
    others = transfer([run(OLD, {COPY: 0.9e-3, PRODUCT: 1.7e-3})], TWICE)
    prices = Prices(completed(own, others))
    assert prices.estimate(COPY) == Prices(own).estimate(COPY)
    assert prices.estimate(PRODUCT).source == "transferred"
    assert prices.costs.runs == ("run-twice", "run-old")


def test_groups_that_the_other_machine_cannot_have_are_left_out():
    ops = {gather(2**30, 2): 2e-3, gather(2**30, 4): 3e-3}
    found = transfer([run(OLD, ops)], machine("pair", devices=2))
    assert [curve.like.group_size for curve in found.curves] == [2]


def test_machines_without_a_data_sheet_are_refused():
    bare = msgspec.structs.replace(OLD, device=Device(name="x", kind="cuda", memory_bytes=1))
    with pytest.raises(ValueError, match="no operation is in both data sheets, 'old' and"):
        transfer([run(OLD, {PRODUCT: 1e-3})], bare)
    with pytest.raises(ValueError, match="different clusters"):
        transfer([run(OLD, {PRODUCT: 1e-3}), run(TWICE, {PRODUCT: 1e-3})], TWICE)


def test_a_training_among_the_runs_has_no_price():
    info, samples = run(OLD, {PRODUCT: 1.7e-3})
    layout = Layout(num_microbatches=1)
    step = Step(model=MODEL, workload=Workload(global_batch_size=1, seq_len=64), layout=layout)
    case = Case(op=step)
    trained = Sample(case_id=case.id, case=case, status="ok", times_s=(1.0,))
    found = transfer([(info, [*samples, trained])], TWICE)
    assert (len(found.surfaces), len(found.curves)) == (1, 0)


def test_runs_without_a_sample_are_refused_as_such():
    with pytest.raises(ValueError, match="these runs hold no ok sample; name runs of measure prof"):
        transfer([run(machine("old"), {})], machine("new"))
