"""Fit and prices on synthetic clusters whose true law is known."""

import math
import re

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise import models
from meshwise.fit import calibrate, ended_first
from meshwise.fit.curves import fit_curve
from meshwise.fit.factors import fit_factors
from meshwise.fit.laws import alpha_beta
from meshwise.prices import Prices, in_step, times_of, unmeasured
from meshwise.prices.datasheet import attainable
from meshwise.prices.measured import MOST_BEYOND
from meshwise.search.simulate import Charge, run_program
from meshwise.search.stage import kinds_of, priced
from meshwise.spec import (
    Attention,
    Block,
    Case,
    Cluster,
    Collective,
    Convolution,
    Device,
    Elementwise,
    Gemm,
    Layout,
    Model,
    Overlap,
    RunInfo,
    Sample,
    Tier,
    WideResNet,
    layer_kinds,
)
from meshwise.verbs import price

CLUSTER = Cluster(
    name="four",
    num_hosts=1,
    num_devices_per_host=4,
    device=Device(
        name="synthetic", kind="cuda", memory_bytes=80 * 10**9, peak_flops={"bf16": 1e15}
    ),
    tiers=(Tier(name="nvlink", num_devices=4),),
)
MODEL = Model(hidden=1024, layers=1, heads=16, ffn=4096)
LONG = msgspec.structs.replace(MODEL, max_seq_len=32768)
INFO = RunInfo(
    run_id="synthetic", verb="measure", command=(), started="", world_size=4, cluster=CLUSTER
)


ABOUT = {"like": Elementwise(kind="copy", read_bytes=1, write_bytes=1), "runs": ()}


def true_time(op) -> float:
    """The law of the synthetic cluster: launch + roofline; collectives alpha-beta."""
    if isinstance(op, Collective):
        return 20e-6 + op.bytes / 350e9
    if isinstance(op, Elementwise):
        return 3e-6 + op.bytes / 4e12
    return 4e-6 + max(op.flops / 700e12, op.bytes / 4e12)


def sample(op, time_s, lowering="eager", **metrics):
    """As a step runs it."""
    case = Case(op=op, world_size=4, **in_step(op, CLUSTER, lowering)._asdict())
    return Sample(case_id=case.id, case=case, status="ok", times_s=(time_s,) * 5, metrics=metrics)


def synthetic_ops():
    for power in range(16, 33, 2):
        yield Elementwise(kind="copy", read_bytes=2**power, write_bytes=2**power)
    for trans in ((False, True), (False, False), (True, False)):
        for m in (64, 512, 4096, 32768):
            for n in (256, 1024, 4096):
                for k in (256, 1024, 4096, 32768):
                    yield Gemm(m=m, n=n, k=k, trans_a=trans[0], trans_b=trans[1])
    for direction in ("forward", "backward"):
        for seq in (512, 1024, 2048):
            yield Attention(
                batch=2,
                q_len=seq,
                kv_len=seq,
                heads=16,
                kv_heads=16,
                head_dim=64,
                direction=direction,
            )
    for product in ("forward", "dgrad", "wgrad"):
        for batch in (8, 32):
            for channels in (64, 256, 1024):
                for size in (14, 28, 56):
                    yield convolution(product, batch, channels, 2 * channels, size, size)
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        for size in (2, 4):
            for power in range(10, 31, 3):
                yield collective(kind, 2**power, size)


def convolution(product, batch, in_channels, out_channels, height, width):
    return Convolution(
        batch=batch, in_channels=in_channels, out_channels=out_channels, height=height,
        width=width, kernel=3, product=product,
    )  # fmt: skip


def collective(kind, size_bytes, group_size, **more):
    place = kind == "all_reduce"
    return Collective(
        kind=kind, size_bytes=size_bytes, group_size=group_size, in_place=place, **more
    )


@pytest.fixture(scope="module")
def costs():
    samples = [sample(op, true_time(op)) for op in synthetic_ops()]
    for microbatch in (1, 2, 8):
        for direction in ("forward", "backward"):
            block = Block(
                part="layer",
                model=MODEL,
                microbatch_size=microbatch,
                seq_len=1024,
                direction=direction,
            )
            composed = sum(map(true_time, models.block_ops(block)))
            saved = 0.8 * models.saved_block_bytes(block)
            samples.append(sample(block, 1.25 * composed, "compiled", saved_bytes=saved))
    samples.append(
        Sample(case_id="x", case=Case(op=Gemm(m=9, n=9, k=9)), status="oom", reason="too large")
    )
    return calibrate([(INFO, samples)])


def test_measured_shapes_come_back(costs):
    prices = Prices(costs)
    for op in synthetic_ops():
        assert prices.estimate(op).time_s == pytest.approx(true_time(op), rel=0.03)


@pytest.mark.parametrize("size", [5000, 3 * 2**20, 2**30 + 1, 2**33])
def test_collectives_between_and_beyond_points(costs, size):
    op = Collective(kind="all_gather", size_bytes=size, group_size=4)
    assert Prices(costs).estimate(op).time_s == pytest.approx(true_time(op), rel=0.02)


@pytest.mark.parametrize("shape", [(2048, 2048, 2048), (8192, 3072, 1024), (1000, 1024, 3000)])
def test_gemm_between_points(costs, shape):
    op = Gemm(m=shape[0], n=shape[1], k=shape[2])
    assert Prices(costs).estimate(op).time_s == pytest.approx(true_time(op), rel=0.15)


@pytest.mark.parametrize("shape", [(16, 512, 512, 28, 28), (24, 128, 512, 40, 30)])
@pytest.mark.parametrize("product", ["forward", "dgrad", "wgrad"])
def test_convolutions_between_points(costs, product, shape):
    found = Prices(costs).estimate(convolution(product, *shape))
    assert found.source == "interpolated"
    assert found.time_s == pytest.approx(true_time(convolution(product, *shape)), rel=0.15)


def test_a_window_is_at_the_rate_of_attention_in_full_which_is_said(costs):
    full = Attention(batch=2, q_len=1024, kv_len=1024, heads=16, kv_heads=16, head_dim=64)
    windowed = msgspec.structs.replace(full, window=256)
    prices = Prices(costs)
    for op in (windowed, full):  # in this order: what is remembered is of the other
        found = prices.estimate(op)
        assert found.time_s == pytest.approx(true_time(op), rel=0.2)
        assert ("causal cold stands in" in found.note) == (op.window is not None)
        assert (found.source == "transferred") == (op.window is not None)
        assert (found.error >= 1) == (op.window is not None)
    assert windowed.flops < 0.5 * full.flops


def test_held_out_error_is_shown_and_true(costs):
    for curve in costs.curves:
        assert (
            curve.law != "cubic" and curve.held_out.median < 1e-5
        )  # tables have 64 points an octave
        assert curve.laws["lines"].held_out.median > 0.01
        tested = {law.held_out.num_points for law in curve.laws.values()}
        assert tested <= {len(curve.x_bytes) - 2, 0}
        assert curve.runs == ("synthetic",)
    for surface in costs.surfaces:
        attention = isinstance(surface.like, Attention)  # three shapes, whose law is no GPU's
        assert 0 < surface.held_out.median < (0.3 if attention else 0.2)


def factor_of(prices, block):
    return prices.factor(block, models.block_tasks(block))


def test_factor_carries_what_composition_misses(costs):
    assert costs.lowering == "compiled" and costs.dtype == "bf16"
    block = Block(part="layer", model=MODEL, microbatch_size=4, seq_len=1024)
    ratio, error = factor_of(Prices(costs), block)
    assert ratio == pytest.approx(1.25, rel=0.05)
    assert error is not None and error.num_points == 1
    assert Prices(costs).saved_ratio(block) == pytest.approx(0.8)


@pytest.mark.parametrize("word", ["selective", "full"])
def test_a_layer_measured_recomputed_is_its_time_in_plans(costs, word):
    """Of a stage of four layers, two recompute. Their backward, with what it computes again, takes
    the measured time of the block; other layers, and prices without such a block, stay."""
    bare = Prices(costs)
    plain = Block(part="layer", model=MODEL, microbatch_size=2, seq_len=1024, direction="backward")
    block = msgspec.structs.replace(plain, recompute=word)
    time_s = 3 * bare.composed_s(models.block_tasks(block))
    timed = (sample(block, time_s, "compiled"), time_s, 5)
    factors = fit_factors([([timed], {"like": block, "lowering": "compiled", "runs": ()})], bare)
    measured = Prices(msgspec.structs.replace(costs, factors=(*costs.factors, *factors)))
    layout = Layout(num_microbatches=1, microbatch_size=2, recompute=word, recompute_layers=2)
    (kind,) = kinds_of(msgspec.structs.replace(MODEL, layers=4), 1024, layout)
    again, rest = {}, {}
    for name, prices in (("before", bare), ("after", measured)):
        program, charge = priced(kind, prices)
        again[name] = rest[name] = 0.0
        for task in program.tasks:
            mine = task.part == "layer" and task.phase in ("recompute", "backward")
            if mine and task.name.startswith(("layers.0.", "layers.1.")):
                again[name] += charge(task).time_s
            else:
                rest[name] += charge(task).time_s
    assert again["after"] == pytest.approx(2 * time_s, rel=0.03)  # clocks are of the whole layer
    assert again["before"] < 0.6 * again["after"]
    assert rest["after"] == pytest.approx(rest["before"], rel=0.03)
    found = price.of(block, measured, in_step(block, CLUSTER, "compiled"))
    assert found.time_s == pytest.approx(time_s, rel=1e-6)
    known = price.of(block, bare, in_step(block, CLUSTER, "compiled"))
    assert 2 * known.time_s == pytest.approx(again["before"], rel=0.03)


def test_what_is_priced_once_is_noted_each_time(costs):
    prices, asked = Prices(costs), list[Block]()
    block = Block(
        part="layer", model=MODEL, microbatch_size=2, seq_len=1024, tp=4, sequence_parallel=True
    )

    def factor():
        asked.append(block)
        return factor_of(prices, block)

    found = []
    for _ in range(2):
        prices.begin()
        found.append((prices.once("this block", factor), [*prices.notes], prices.tier))
    first, again = found
    assert first == again and first[1] and first[2] == "transferred"
    assert asked == [block]


def test_the_nearest_measured_degree_stands_in(costs):
    prices = Prices(costs)
    block = Block(
        part="layer", model=MODEL, microbatch_size=2, seq_len=1024, tp=4, sequence_parallel=True
    )
    assert factor_of(prices, block)[0] == pytest.approx(1.25, rel=0.05)
    (note,) = [note for note in prices.notes if "stands in" in note and "layer" in note]
    assert re.fullmatch(
        r"no layer gpt (.*) forward bf16 tp4 sp compiled was measured; "
        r"layer gpt \1 forward bf16 tp1 compiled stands in",
        note,
    )


def test_an_unmeasured_block_is_said(costs):
    prices = Prices(costs)
    head = Block(part="head", model=MODEL, microbatch_size=1, seq_len=1024)
    ratio, error = factor_of(prices, head)
    composed_s = prices.composed_s(models.block_tasks(head))
    host_s = attainable().host.forward_s
    assert ratio * composed_s == pytest.approx((host_s**4 + composed_s**4) ** 0.25)
    assert error is not None and (error.p90, error.num_points) == (0.3, 0)
    assert any("no head was measured" in note for note in prices.notes)
    eager = Prices(msgspec.structs.replace(costs, lowering="eager"))
    ratio, error = factor_of(eager, head)
    host_s = attainable().host.launch_s * len(models.block_ops(head))
    assert ratio * composed_s == pytest.approx((host_s**4 + composed_s**4) ** 0.25)
    assert error is not None and error.p90 == 0.3  # what hosts usually take is a guess


def test_a_layer_saves_the_share_that_it_saves_where_other_ranks_share_it(costs):
    prices = Prices(costs)  # 0.8 of what is counted was saved
    here = Block(part="layer", model=MODEL, microbatch_size=4, seq_len=1024, direction="backward")
    shared = msgspec.structs.replace(here, tp=2, sequence_parallel=True, cp=2)
    other = msgspec.structs.replace(here, model=msgspec.structs.replace(MODEL, hidden=64))
    assert [prices.saved_ratio(block) for block in (here, shared, other)] == [0.8, 0.8, None]


def timed_blocks(costs, host_s, ratio, sizes, **how):
    """Blocks that take the host ``host_s`` and the device ``ratio`` of their operations' prices."""
    prices = Prices(costs)
    blocks = [
        Block(part="layer", model=MODEL, microbatch_size=size, seq_len=1024, **how)
        for size in sizes
    ]
    device_s = [
        ratio * sum(prices.estimate(op).time_s for op in models.block_ops(b)) for b in blocks
    ]
    times_s = [(host_s**4 + each**4) ** 0.25 for each in device_s]
    timed = [(sample(b, t, "compiled"), t, 5) for b, t in zip(blocks, times_s, strict=True)]
    return timed, {"like": blocks[0], "lowering": "compiled", "runs": ()}


def test_small_layers_take_what_the_host_takes(costs):
    """Four sizes tell the host's time. A layer over tp, measured at one size where the host
    is late, is right at sixteen times that size, where it is not."""
    bare = msgspec.structs.replace(costs, factors=())
    host_s = 2e-3
    alone = timed_blocks(bare, host_s, 1.1, (1, 2, 4, 8))
    split = timed_blocks(bare, 1.5 * host_s, 1.1, (1,), tp=4, sequence_parallel=True)
    factors = fit_factors([alone, split], Prices(bare))
    for factor, wanted_s in zip(factors, (host_s, 1.5 * host_s), strict=True):
        assert factor.host_s == pytest.approx(len(factor.host_s) * [wanted_s], rel=0.05)
    prices = Prices(msgspec.structs.replace(bare, factors=factors))
    ((wanted, time_s, _),), _ = timed_blocks(
        bare, 1.5 * host_s, 1.1, (16,), tp=4, sequence_parallel=True
    )
    block = wanted.case.op
    ratio, _ = factor_of(prices, block)
    assert ratio * prices.composed_s(models.block_tasks(block)) == pytest.approx(time_s, rel=0.02)


def test_small_layers_say_nothing_of_what_the_host_hides(costs):
    """The host takes 2 ms once and 3 ms once; the device is the longer at no measured size."""
    bare = msgspec.structs.replace(costs, factors=())
    alone = timed_blocks(bare, 1e-3, 1.1, (1, 2, 4, 8))
    over_tp = {"tp": 4, "sequence_parallel": True}
    (first,), about = timed_blocks(bare, 2e-3, 1.1, (1,), **over_tp)
    (second,), _ = timed_blocks(bare, 3e-3, 1.1, (2,), **over_tp)
    factors = fit_factors([alone, ([first, second], about)], Prices(bare))
    prices = Prices(msgspec.structs.replace(bare, factors=factors))
    (large,), _ = timed_blocks(bare, 2e-3, 1.1, (1024,), **over_tp)
    for (timed, time_s, _), near in ((first, 1e-6), (second, 1e-6), (large, 0.05)):
        block = timed.case.op
        composed_s = prices.composed_s(models.block_tasks(block))
        assert factor_of(prices, block)[0] * composed_s == pytest.approx(time_s, rel=near)


def test_blocks_whose_messages_have_no_price_have_no_factor(costs):
    curves = tuple(curve for curve in costs.curves if not isinstance(curve.like, Collective))
    bare = msgspec.structs.replace(costs, curves=curves, factors=())
    alone = timed_blocks(bare, 1e-3, 1.1, (1, 2, 4))
    split = timed_blocks(costs, 1e-3, 1.1, (1,), tp=2)
    assert [factor.like.tp for factor in fit_factors([split, alone], Prices(bare))] == [1]


def test_prices_rise_with_bytes_where_the_data_sheet_takes_over():
    """A curve that ends where latency rules is steeper than the data sheet."""
    tiers = (Tier(name="nvlink", num_devices=4, bytes_per_s=450e9),)
    cluster = msgspec.structs.replace(CLUSTER, tiers=tiers)
    ops = [collective("all_gather", 2**power, 4) for power in range(10, 17)]
    slow = [sample(op, 30e-6 + op.bytes / 1e9) for op in ops]
    costs = calibrate([(msgspec.structs.replace(INFO, cluster=cluster), slow)])
    prices = Prices(costs, datasheet=True)
    found = [
        prices.estimate(collective("all_gather", MOST_BEYOND * 2**16 + more, 4))
        for more in (0, 64, 2**40)
    ]
    assert [one.source for one in found] == ["extrapolated", "datasheet", "datasheet"]
    assert found[0].time_s <= found[1].time_s < found[2].time_s


def test_groups_of_ranks_some_apart_have_a_price_of_their_own_over_other_links():
    """2 ranks 2 apart: on two hosts of 2 over the network, on one host of 4 over its own links."""
    hosts = msgspec.structs.replace(
        CLUSTER,
        num_hosts=2,
        num_devices_per_host=2,
        tiers=(Tier(name="nvlink", num_devices=2), Tier(name="network", num_devices=4)),
    )
    samples = [
        sample(collective("all_gather", 2**power, 2, group_stride=stride), stride * 2**power / 1e9)
        for stride in (1, 2)
        for power in range(14, 23)
    ]

    def times_s(cluster):
        info = msgspec.structs.replace(INFO, cluster=cluster)
        prices, op = Prices(calibrate([(info, samples)])), collective("all_gather", 2**18, 2)
        apart = msgspec.structs.replace(op, group_stride=2)
        return [prices.estimate(each).time_s for each in (op, apart)]

    assert times_s(hosts) == pytest.approx([2**18 / 1e9, 2**19 / 1e9])
    near_s, apart_s = times_s(CLUSTER)
    assert near_s == apart_s


def test_a_group_of_other_ranks_starts_as_late_and_runs_at_the_data_sheets_rate(costs):
    """A group of 4 was measured, of 8 not: small messages take what the smallest of 4 take."""
    cluster = msgspec.structs.replace(
        CLUSTER,
        num_devices_per_host=8,
        tiers=(Tier(name="nvlink", num_devices=8, bytes_per_s=450e9),),
    )
    there = msgspec.structs.replace(costs, cluster=cluster)
    (known,) = [
        curve for curve in costs.curves
        if getattr(curve.like, "kind", "") == "all_gather" and curve.like.group_size == 4
    ]  # fmt: skip
    prices, sheet = Prices(there, datasheet=True), Prices(unmeasured(cluster), datasheet=True)

    def gather(size):
        return msgspec.structs.replace(known.like, group_size=8, size_bytes=size)

    small, large = prices.estimate(gather(2**10)), prices.estimate(gather(2**30))
    assert small.time_s == pytest.approx(min(known.time_s), rel=0.2)
    assert large.time_s == pytest.approx(sheet.estimate(gather(2**30)).time_s, rel=0.05)
    assert small.source == large.source == "datasheet"
    (note,) = [note for note in prices.notes if "below 64 MiB" in note]
    assert "the least time of all_gather 4 by nvlink" in note


@given(st.floats(1e-6, 1), st.floats(0, 1))
def test_products_at_the_power_cap_leave_its_mean_power(products_s, others_s):
    known = attainable().clocks
    s = known.stretch("NVIDIA H200", products_s, others_s)
    assert 1 <= s <= known.sustained["NVIDIA H200"] * (1 + 1e-9)
    power = known.sustained["NVIDIA H200"] ** 3
    energy = power * products_s / s**2 + known.other_power * others_s
    if s > 1:
        assert energy == pytest.approx(s * products_s + others_s, rel=1e-6)
    else:
        assert energy <= (products_s + others_s) * (1 + 1e-9)
    assert known.stretch("NVIDIA H200", products_s, 0.0) == pytest.approx(
        known.sustained["NVIDIA H200"]
    )
    assert known.stretch("another", products_s, others_s) == 1


@pytest.mark.parametrize(("kind", "lowering"), [("cuda", "compiled"), ("cpu", "eager")])
def test_plans_run_as_models_usually_do_where_no_block_was_measured(kind, lowering):
    device = msgspec.structs.replace(CLUSTER.device, kind=kind)
    cluster = msgspec.structs.replace(CLUSTER, device=device)
    info = msgspec.structs.replace(INFO, cluster=cluster)
    copies = [op for op in synthetic_ops() if isinstance(op, Elementwise)]
    assert calibrate([(info, [sample(op, true_time(op)) for op in copies])]).lowering == lowering


def test_the_layer_of_another_shape_stands_in_with_an_error_that_one_ratio_cannot_tell(costs):
    """One of the third resolution was measured, one of the first not."""
    model = WideResNet(channels=64, width_factor=2, image_size=64)
    shape = {"part": "layer", "model": model, "microbatch_size": 8, "seq_len": 1}
    block = Block(form="2.rest", **shape)
    composed = sum(Prices(costs).estimate(op).time_s for op in models.block_ops(block))
    timed = [(sample(block, 0.6 * composed, "compiled"), 0.6 * composed, 5)]
    about = {"like": block, "lowering": "compiled", "runs": ()}
    (factor,) = fit_factors([(timed, about)], Prices(costs))
    prices = Prices(msgspec.structs.replace(costs, factors=(*costs.factors, factor)))
    assert factor_of(prices, block)[0] == pytest.approx(0.6)
    ratio, error = factor_of(prices, Block(form="0.first", **shape))
    assert ratio == pytest.approx(0.6, rel=0.05) and error is not None and error.p90 == 0.3
    (note,) = [note for note in prices.notes if "stands in" in note and "layer" in note]
    assert note.startswith("no layer 0.first wide_resnet c64") and "; layer 2.rest" in note


def test_what_was_never_measured_is_an_error_with_the_command(costs):
    with pytest.raises(
        ValueError,
        match=r"no price for all_to_all 4 by nvlink; measure it: meshwise .* or one near: "
        "measure collectives all_to_all --nproc 4$",
    ):
        Prices(costs).estimate(Collective(kind="all_to_all", size_bytes=8, group_size=4))
    with pytest.raises(ValueError, match=r"no price for gemm fp8 nt row cold"):
        Prices(costs).estimate(Gemm(m=1, n=1, k=1, dtype="fp8", scaling="row"))


def test_a_run_without_copies_prices_what_it_measured():
    one = Gemm(m=64, n=64, k=64)
    prices = Prices(calibrate([(INFO, [sample(one, 1.0)])]))
    assert prices.estimate(one).time_s == 1.0
    with pytest.raises(ValueError, match="no price for add cold; measure it"):
        prices.estimate(Elementwise(kind="add", read_bytes=8, write_bytes=4))


def on(**fields) -> RunInfo:
    return msgspec.structs.replace(INFO, cluster=msgspec.structs.replace(CLUSTER, **fields))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"num_devices_per_host": 2}, "num_devices_per_host = 4, 2"),
        ({"tiers": (Tier(name="pcie", num_devices=4),)}, r"tiers\[0\].name = nvlink, pcie"),
        ({"device": Device(name="Y", kind="cuda", memory_bytes=1)}, "device.name = .*, Y"),
    ],
)
def test_runs_of_two_clusters_are_not_mixed_and_what_differs_is_named(other, told):
    with pytest.raises(ValueError, match=f"different clusters: .*{told}.*; name those of one"):
        calibrate([(INFO, []), (on(**other), [])])


def test_cores_and_memory_of_hosts_do_not_matter_to_prices_of_gpus():
    """They do to those of CPUs, whose ranks compute on the cores."""
    one = Gemm(m=64, n=64, k=64)
    sheet = CLUSTER.tiers[0]
    tier = msgspec.structs.replace(
        sheet,
        source="measured",
        bytes_per_s=1e9,
        latency_s=1e-6,
        sheet_bytes_per_s=sheet.bytes_per_s,
    )
    other = on(name="another", host_cores=32, host_memory_bytes=2**38, tiers=(tier,), notes=("b",))
    told = calibrate([(INFO, [sample(one, 1.0)]), (other, [sample(one, 3.0)])])
    assert told.cluster == CLUSTER and Prices(told).estimate(one).time_s == 2.0
    cpu = Device(name="X", kind="cpu", memory_bytes=2**30)
    with pytest.raises(ValueError, match="clusters: host_cores = None, 32; name"):
        calibrate([(on(device=cpu), []), (on(device=cpu, host_cores=32), [])])


@given(
    alpha=st.floats(1e-6, 1e-3),
    rate=st.floats(1e9, 1e12),
    first=st.integers(3, 10),
    n=st.integers(4, 12),
)
def test_alpha_beta_recovers_the_line(alpha, rate, first, n):
    x = 2.0 ** np.arange(first, first + 2 * n, 2)
    found = alpha_beta(x, alpha + x / rate)
    assert np.allclose([found[0] + at * found[1] for at in x], alpha + x / rate, rtol=1e-6)


@given(st.dictionaries(st.integers(1, 2**40), st.floats(1e-6, 10), min_size=1, max_size=9))
def test_a_measured_size_costs_what_was_measured(points):
    """Whatever the law, and however far off it is."""
    curve = fit_curve(points, {**ABOUT, "regime": "cold"})
    for law in set(curve.laws) - {"sigmoid"}:
        costs = unmeasured(CLUSTER)
        either = msgspec.structs.replace(curve, law=law)
        prices = Prices(msgspec.structs.replace(costs, curves=(either,)))
        for size, time_s in zip(curve.x_bytes, curve.time_s, strict=True):
            assert time_s == points[int(size)]
            found = prices.estimate(Elementwise(kind="copy", read_bytes=0, write_bytes=int(size)))
            assert (found.time_s, found.source) == (time_s, "measured")
            assert times_of(either)(size) == pytest.approx(time_s)


def test_lines_are_exact_on_a_power_law():
    curve = fit_curve({4.0**i: 1e-6 * 4.0 ** (0.5 * i) for i in range(8)}, ABOUT)
    assert curve.laws["lines"].held_out.p90 < 1e-9 and curve.held_out.p90 < 1e-9
    assert math.isclose(curve.time_s[3], 8e-6)


def beside(compute, kind, slower, covered=1.0):
    op = Overlap(compute=compute, collective=collective(kind, 2**20, 4))
    metrics = dict(zip(("compute_slowdown", "collective_slowdown"), slower, strict=True))
    metrics |= dict.fromkeys(("compute_covered", "collective_covered"), covered)
    return sample(op, 1.0, **metrics)


def test_slowdowns_are_medians_of_samples_that_ran_beside_each_other():
    block = Block(part="layer", model=MODEL, microbatch_size=1, seq_len=1024)
    product = Gemm(m=64, n=64, k=64)
    samples = [
        *(beside(block, "all_gather", (1 + x / 10, 2 + x)) for x in (1, 2, 9)),
        beside(block, "all_gather", (9.0, 9.0), covered=0.5),
        beside(block, "reduce_scatter", (1.5, 3.0)),
        beside(product, "all_gather", (1.25, 1.75)),
    ]
    assert [*map(ended_first, samples)] == [False] * 3 + [True] + [False] * 2
    found = calibrate([(INFO, samples)]).slowdowns
    assert [(type(of.like.compute), of.like.collective.kind) for of in found] == [
        (Block, "all_gather"), (Block, "reduce_scatter"), (Gemm, "all_gather")
    ]  # fmt: skip
    assert [(of.compute, of.collective) for of in found] == [(1.2, 4), (1.5, 3), (1.25, 1.75)]
    backward = msgspec.structs.replace(block, direction="backward")
    samples.append(beside(backward, "reduce_scatter", (2.0, 2.0)))
    samples.append(beside(product, "reduce_scatter", (4.0, 5.0)))
    there = Prices(calibrate([(INFO, samples)])).beside
    gather, reduce = (pytest.approx(1 / 1.2), 0.25), (pytest.approx(7 / 12), pytest.approx(5 / 12))
    for op in (product, Elementwise(kind="copy", read_bytes=8, write_bytes=8)):
        assert there.speed(op, "all_gather") == gather
        assert there.speed(op, "reduce_scatter") == reduce
    alone = Prices(calibrate([(INFO, samples[-1:])])).beside  # without layers
    assert alone.speed(product, "reduce_scatter") == (0.25, 0.2)
    assert alone.speed(op, "reduce_scatter") == (alone.memory, alone.collective)
    assert alone.speed(product, "all_gather") == (alone.products, alone.collective)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_messages_of_cp_pass_beside_attention_as_in_a_step(cp, direction):
    """The simulation of a whole stage of one layer takes as long."""
    device = msgspec.structs.replace(
        CLUSTER.device, peak_flops={"bf16": 1e15}, peak_memory_bytes_per_s=4e12
    )
    tiers = tuple(msgspec.structs.replace(tier, bytes_per_s=450e9) for tier in CLUSTER.tiers)
    known = msgspec.structs.replace(CLUSTER, device=device, tiers=tiers)
    prices = Prices(unmeasured(known), datasheet=True)
    block = Block(
        part="layer", model=LONG, microbatch_size=1, seq_len=LONG.max_seq_len, cp=cp,
        direction=direction,
    )  # fmt: skip
    tasks = models.block_tasks(block)
    assert any(task.stream == "cp" for task in tasks)
    of = models.graph(
        LONG, 1, LONG.max_seq_len, "bf16", layers=layer_kinds(LONG, LONG.max_seq_len),
        first=False, last=False,
    )  # fmt: skip
    program = models.program_of(of, block.layout, "bf16")

    def charge(task):
        found = prices.estimate(task.op)
        return Charge(found.time_s if task.part == "layer" else 0.0, "", "", 0.0)

    spent, _ = run_program(program, charge, attainable().beside)
    (step,) = [
        one for one, span in zip(spent, program.actions, strict=True)
        if {"F": "forward", "B": "backward"}[span.kind] == direction
    ]  # fmt: skip
    assert prices.composed_s(tasks, 1.0) == pytest.approx(step.time_s, rel=1e-9)
    alone_s = sum(prices.estimate(task.op).time_s for task in tasks)
    assert step.time_s < alone_s
