"""Prices by data sheets: closed forms, what others measured, what must be an error. No torch."""

import json
import math
from pathlib import Path
from statistics import median

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise import machine, search, store
from meshwise.fit import off_sheet
from meshwise.fit.curves import UNKNOWN
from meshwise.pages import prices as pages
from meshwise.prices import Datasheet, Prices, on_hosts, unmeasured
from meshwise.prices.datasheet import attainable
from meshwise.probe import importers
from meshwise.spec import (
    Attention,
    Block,
    Cluster,
    Collective,
    Convolution,
    Curve,
    Elementwise,
    Gemm,
    Layout,
    Model,
    Surface,
    Tier,
    Workload,
)
from meshwise.spec.costs import Law

DATA = Path(__file__).parents[1] / "data"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
H200_PROFILE = (
    BENCHMARKS / "2026-11-21-operators-4xh200/runs/20261121T193703-measure-profile-4x-nvidia-h200"
)
SHIPPED = sorted(machine.shipped())
MODEL = Model(name="small", hidden=1024, layers=4, heads=16, ffn=4096, vocab=1024)
WORKLOAD = Workload(global_batch_size=16, seq_len=512)


def shipped(name, hosts=1):
    return on_hosts(store.read(Path(str(machine.shipped()[name])), Cluster), hosts)


def time_s(cluster, op):
    return Datasheet(cluster).time_s(op)[0]


def without(cluster, **fields):
    device = msgspec.structs.replace(cluster.device, **fields)
    return msgspec.structs.replace(cluster, device=device)


def test_a_measured_rate_is_the_rate():
    """The data sheet's is reached in part; measured messages have the rate that they had."""
    op = Collective(kind="send_recv", size_bytes=2**30, group_size=2)
    for name in SHIPPED:
        (inner, *_) = (cluster := shipped(name)).tiers
        links = msgspec.structs.replace(inner, source="measured", bytes_per_s=5e9)
        measured = msgspec.structs.replace(cluster, num_hosts=1, tiers=(links,))
        assert time_s(measured, op) == pytest.approx(2**30 / 5e9, rel=0.01)
        assert time_s(cluster, op) > 1.1 * 2**30 / inner.bytes_per_s


@given(m=st.integers(1, 2**16), n=st.integers(1, 2**14), k=st.integers(1, 2**14))
def test_no_product_is_faster_than_the_data_sheet(m, n, k):
    for cluster in map(shipped, SHIPPED):
        device = cluster.device
        op = Gemm(m=m, n=n, k=k, dtype="fp16")
        memory_s = op.bytes / device.peak_memory_bytes_per_s
        least_s = max(op.flops / device.peak_flops["fp16"], memory_s)
        assert least_s < time_s(cluster, op) < 2 * least_s + 1e-5


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_reaches_more_of_its_peak_the_longer_it_is(direction):
    """cuDNN on H200, causal: 541 and 645 TFLOP/s forward, 424 and 524 backward, at 2k and 16k;
    the shares were measured of torch's choice."""
    h200, rates = shipped("h200-hgx"), []
    for q_len in (2048, 16384):
        op = Attention(
            batch=8, q_len=q_len, kv_len=q_len, heads=32, kv_heads=32, head_dim=128,
            direction=direction,
        )  # fmt: skip
        rates.append(op.flops / time_s(h200, op) / 1e12)
    expected = (541, 645) if direction == "forward" else (424, 524)
    assert rates == pytest.approx(expected, rel=0.08)


def test_an_all_reduce_between_hosts_is_its_closed_form():
    """2 hosts of 8 A100, all 16: NVLink gives 0.72 x 300 GB/s, the network 8 x 0.8 x 25. A ring
    sends 30/16 of the bytes through the slower; a tree 14/8 through NVLink, and 1 out of two."""
    there, launch_s = shipped("dgx-a100-80gb", 2), 5.1e-6
    op = Collective(kind="all_reduce", size_bytes=2**30, group_size=16)
    ring_s = 8.4e-6 + 2 * (14 * 3.4e-6 + 14e-6) + 2**30 * 30 / 16 / min(160e9, 216e9)
    tree_s = 8.4e-6 + 2 * (7 * 4e-6 + 14e-6) + 2**30 / 0.92 * max(14 / 8 / 216e9, 1 / 160e9)
    assert tree_s < 0.8 * ring_s
    assert time_s(there, op) == pytest.approx(launch_s + tree_s)
    # of four a host sends the bytes twice, to the one above and the two below: a ring is faster
    four = Collective(kind="all_reduce", size_bytes=2**30, group_size=32)
    ring_s = 8.4e-6 + 2 * (28 * 3.4e-6 + 3 * 14e-6) + 2**30 * 62 / 32 / 160e9
    assert time_s(shipped("dgx-a100-80gb", 4), four) == pytest.approx(launch_s + ring_s)
    # gathers have rings alone
    gather = msgspec.structs.replace(op, kind="all_gather")
    ring_s = 8.4e-6 + 14 * 3.4e-6 + 14e-6 + 2**30 * 15 / 16 / 160e9
    assert time_s(there, gather) == pytest.approx(launch_s + ring_s)
    # one rank a host has the NIC of one
    apart = msgspec.structs.replace(op, group_size=2, group_stride=8)
    assert time_s(there, apart) == pytest.approx(launch_s + 8.4e-6 + 2 * 14e-6 + 2**30 / 20e9)
    # a small one goes by LL, in a tree: 6.8 + 2 (7 * 0.6 + log2(2) * 5) us, a ring takes 28.8
    small = msgspec.structs.replace(op, size_bytes=2)
    tree_s = 6.8e-6 + 2 * (7 * 0.6e-6 + 5e-6)
    assert time_s(there, small) == pytest.approx(launch_s + tree_s, rel=1e-4)
    swap = Collective(kind="all_to_all", size_bytes=2**30, group_size=16)
    ring_s = 8.4e-6 + 14 * 3.4e-6 + 14e-6 + 2**29 / 20e9
    assert time_s(there, swap) == pytest.approx(launch_s + ring_s)


@pytest.mark.parametrize(
    ("size", "measured_s"), [(2**28, 2.361e-3), (2**30, 6.759e-3), (2**33, 47.54e-3)]
)
def test_two_hosts_all_reduce_faster_than_a_ring_through_their_network(size, measured_s):
    """nccl-tests on 2 a3-megagpu-8g, 8 H100 with 200 Gb/s each, as published in the repository
    lessizzmore/create-a3mega-ztan-fork. At the network's full rate a ring takes 9.4 us a MB."""
    there = shipped("h100-hgx", 2)
    network = msgspec.structs.replace(there.tiers[1], bytes_per_s=25e9)
    there = msgspec.structs.replace(there, tiers=(there.tiers[0], network))
    op = Collective(kind="all_reduce", size_bytes=size, group_size=16, dtype="fp32")
    assert size < 2**30 or measured_s < 9.375e-12 * size
    assert abs(math.log(time_s(there, op) / measured_s)) < math.log(1.3)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all", "send_recv"])
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_groups_that_work_at_once_share_the_network_of_a_host(kind, stride):
    """Four hosts of 8 A100, groups of every ``stride``-th rank, all at once: what leaves a host
    goes at 0.8 of its NICs together, 8 x 25 GB/s, however many groups it is of. A ring sends each
    byte of its 32 / stride parts but one over a host's border, an exchange the three quarters of
    what each rank has that are for other hosts; pairs are one message of each rank."""
    there, size = shipped("dgx-a100-80gb", 4), 2**34
    ranks = 32 // stride
    sent = stride * size * (ranks - 1) / ranks  # as many groups touch a host
    if kind == "all_to_all":
        sent = 8 * size * 3 / 4
    if kind == "send_recv":
        ranks, stride, sent = 2, 8, 8 * size
    op = Collective(kind=kind, size_bytes=size, group_size=ranks, group_stride=stride)
    assert sent / time_s(there, op) == pytest.approx(0.8 * 8 * 25e9, rel=0.01)


def test_a_small_collective_in_a_graph_takes_what_the_data_sheet_says():
    """Read off the samples of 4 H200: one call a graph, no symmetric memory, below 64 KiB."""
    folder = BENCHMARKS / "2026-11-27-four/collectives/runs"
    off = []
    for path in sorted(folder.glob("*")):
        info, samples, _ = store.load(path)
        for one in samples:
            op = one.case.op
            if one.case.regime == "graph" and not one.case.backend and op.size_bytes < 2**16:
                off.append(time_s(info.cluster, op) / median(one.times_s))
    assert len(off) > 10
    assert 0.9 < median(off) < 1.1


def sheet_errors(costs):
    return [(one.num_points, one.median, one.worst) for one in off_sheet(costs)]


def test_how_far_the_data_sheet_is_off():
    """Times by hand from H200's peaks, made as long and as short as the errors say."""
    h200 = shipped("h200-hgx")
    copies = [5.1e-6 + x / (0.88 * 4.8e12) for x in (2e6, 2e9)]
    gathers = [5.1e-6 + 8.4e-6 + 3 * 3.4e-6 + 0.75 * x / (0.72 * 450e9) for x in (2**30, 2**33)]
    product_s = 5.1e-6 + 2 * 8192**3 / (0.78 * 989.4e12)
    copy = Elementwise(kind="copy", read_bytes=1, write_bytes=1)
    gather = Collective(kind="all_gather", size_bytes=8, group_size=4)
    to_device = msgspec.structs.replace(copy, kind="h2d")
    about = {"runs": ("made",)}
    law = {"law": "cubic", "laws": {"cubic": Law(held_out=UNKNOWN)}, "beyond": UNKNOWN}
    law |= {"end_s_per_byte": 0.0, "end_range_s_per_byte": (0.0, 0.0), **about}
    curves = (
        Curve(like=copy, x_bytes=(2e6, 2e9), time_s=(2 * copies[0], copies[1]), **law),
        Curve(like=gather, x_bytes=(2**30, 2**33), time_s=(gathers[0], gathers[1] / 1.5), **law),
        Curve(like=to_device, x_bytes=(1e6,), time_s=(1e-3,), **law),
    )
    surface = Surface(
        like=Gemm(m=1, n=1, k=1), dims=("m", "n", "k"), shapes=((8192,) * 3,),
        time_s=(product_s / 0.9,), floor_s=0.0, flops_per_s=1e15, bytes_per_s=1e12,
        held_out=UNKNOWN, **about,
    )  # fmt: skip
    costs = msgspec.structs.replace(unmeasured(h200), curves=curves, surfaces=(surface,))
    copied, gathered, moved, product = sheet_errors(costs)
    assert copied == (2, pytest.approx(-0.25), pytest.approx(-0.5))
    assert gathered == (2, pytest.approx(0.25), pytest.approx(0.5))
    link = pytest.approx((5.1e-6 + 5e5 / (0.85 * 63e9)) / 1e-3 - 1)  # reads half of the bytes
    assert moved == (1, link, link)
    assert product == (1, pytest.approx(-0.1), pytest.approx(-0.1))
    *_, shown = pages.of(costs)[:-1]
    cells = [row[1:] for row in shown.rows]
    assert cells == [
        ("2", "-25.0 %", "-50.0 %"), ("2", "+25.0 %", "+50.0 %"), ("1", "-98.6 %", "-98.6 %"),
        ("1", "-10.0 %", "-10.0 %"),
    ]  # fmt: skip
    cpus = msgspec.structs.replace(h200.device, kind="cpu", peak_memory_bytes_per_s=None)
    cpus = msgspec.structs.replace(costs, cluster=msgspec.structs.replace(h200, device=cpus))
    bare = msgspec.structs.replace(cpus, surfaces=())
    assert [one[1:] for one in sheet_errors(bare)] == [(None, None)] * 3
    assert not any("data sheet" in table.title for table in pages.of(bare))


@given(
    kind=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]),
    power=st.integers(0, 34),
    ranks=st.sampled_from([2, 4, 8, 16, 64]),
    stride=st.sampled_from([1, 2, 8]),
)
def test_collectives_grow_with_bytes_and_hosts(kind, power, ranks, stride):
    there = shipped("h100-hgx", 64)
    op = Collective(kind=kind, size_bytes=2**power, group_size=ranks, group_stride=stride)
    more = msgspec.structs.replace(op, size_bytes=2 ** (power + 1))
    assert time_s(there, op) <= time_s(there, more) <= 2 * time_s(there, op)
    assert power < 20 or time_s(there, op) < time_s(there, more)
    apart = msgspec.structs.replace(op, group_stride=8)
    assert time_s(there, op) <= time_s(there, apart) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["dgx-a100-80gb", "h200-hgx"])
def test_what_nccl_tests_measured_inside_a_host_is_within_the_error(name):
    """From 16 MiB on, 9 of 10 points; the figures were read off other tables."""
    folder = DATA / {"dgx-a100-80gb": "nccl_tests_a100x8", "h200-hgx": "nccl_tests_h200x4"}[name]
    cluster, off = shipped(name), []
    for path in sorted(folder.glob("nccl_*")):
        for sample in importers.read(path).samples:
            op = sample.case.op
            if isinstance(op, Collective) and op.size_bytes >= 2**24 and sample.times_s:
                off.append(abs(math.log(time_s(cluster, op) / min(sample.times_s))))
    assert len(off) > 40
    assert sorted(off)[len(off) * 9 // 10] < math.log(1 + attainable().links.error)


def test_our_own_products_are_within_the_error():
    """Cold products of 4 H200: 9 of 10 shapes."""
    info, samples, _ = store.load(H200_PROFILE)
    off = [
        abs(math.log(time_s(info.cluster, sample.case.op) / median(sample.times_s)))
        for sample in samples
        if isinstance(sample.case.op, Gemm) and sample.case.regime == "cold" and sample.times_s
    ]
    assert len(off) > 100
    assert sorted(off)[len(off) * 9 // 10] < math.log(1 + attainable().gemm.error)


def convolutions(dtype):
    """The convolutions of Wide-ResNet 1B over 32 images, as ``convolutions.py`` timed them: at the
    size of their results, the images' gradient left out."""

    def products(out, n, size, kernel, stride=1):
        for product in ("forward", "wgrad", "dgrad") if n > 3 else ("forward", "wgrad"):
            yield Convolution(
                batch=32, in_channels=n, out_channels=out, height=size, width=size, kernel=kernel,
                stride=stride, product=product, dtype=dtype,
            )  # fmt: skip

    yield from products(320, 3, 224, 7, stride=2)
    before = 320
    for resolution, blocks in enumerate((3, 4, 6, 3)):
        f, size = 320 * 2**resolution, 56 >> resolution
        for block in range(blocks):
            first = 2 * size if resolution and not block else size
            yield from products(f, before, first, 1)
            yield from products(2 * f, f, size, 3)
            yield from products(4 * f, 2 * f, size, 1)
            if not block:
                yield from products(4 * f, before, size, 1)
            before = 4 * f


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 0.02), ("tf32", 0.5)])
def test_our_own_convolutions_are_within_the_error(dtype, error):
    """The one sum that was measured; the share is that of bf16."""
    text = (BENCHMARKS / "2026-11-22-engine/convolutions.txt").read_text()
    lines = dict(line.split(": ") for line in text.splitlines())
    said = lines[{"bf16": "torch.bfloat16", "tf32": "torch.float32"}[dtype]]
    measured_s, rate = float(said.split()[0]) / 1e3, float(said.split()[-2]) * 1e12
    ops, h200 = list(convolutions(dtype)), shipped("h200-hgx")
    stem = next(op.flops for op in ops if op.kernel == 7)  # the rate counts its third product
    assert sum(op.flops for op in ops) + stem == pytest.approx(rate * measured_s, rel=0.005)
    assert sum(time_s(h200, op) for op in ops) == pytest.approx(measured_s, rel=error)
    assert error <= attainable().convolution.error


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        (Gemm(m=1, n=1, k=1), {"peak_flops": {}}, "does not say device.peak_flops of bf16"),
        (Gemm(m=1, n=1, k=1, dtype="fp64"), {"peak_flops": {"bf16": 1.0}}, "peak_flops of fp64"),
        (
            Elementwise(kind="copy", read_bytes=1, write_bytes=1),
            {"peak_memory_bytes_per_s": None},
            "does not say device.peak_memory_bytes_per_s",
        ),
        (Elementwise(kind="h2d", read_bytes=1, write_bytes=1), {"kind": "cpu"}, "no rate of h2d"),
        (Collective(kind="all_reduce", size_bytes=8, group_size=2), {"kind": "cpu"}, "CPU ranks"),
        (Block(part="head", model=MODEL, microbatch_size=1, seq_len=8), {}, "Block has no price"),
    ],
)
def test_without_a_roofline_it_is_an_error(op, changes, message):
    cluster = without(shipped("h100-hgx"), **changes)
    with pytest.raises(ValueError, match=message):
        Datasheet(cluster).time_s(op)
    prices = Prices(unmeasured(shipped("h100-hgx")), datasheet=True)
    if not isinstance(op, Block) and changes:
        assert prices.estimate(op).source == "datasheet"


def test_links_of_unknown_rate_are_an_error():
    cluster = shipped("h100-hgx")
    tiers = (msgspec.structs.replace(cluster.tiers[0], bytes_per_s=None), cluster.tiers[1])
    op = Collective(kind="all_reduce", size_bytes=8, group_size=2)
    prices = Prices(unmeasured(msgspec.structs.replace(cluster, tiers=tiers)), datasheet=True)
    with pytest.raises(
        ValueError, match=r"no price for all_reduce bf16 2 by nvlink; .*tier 'nvlink'"
    ):
        prices.estimate(op)


def test_between_hosts_of_unknown_links_a_tree_is_as_fast_as_a_ring():
    """NCCL's law is fitted to what was measured, with the shares alone."""
    there = shipped("h100-hgx", 2)
    tiers = (msgspec.structs.replace(there.tiers[0], bytes_per_s=None), there.tiers[1])
    there = msgspec.structs.replace(there, tiers=tiers)
    op = Collective(kind="all_reduce", size_bytes=8, group_size=16)
    shares = [share for _, share in Datasheet(there).lines(op)]
    assert shares == [0.5, 0.92, 1.0, 0.46, 0.85, 0.92]


def test_the_16_bit_dtype_of_the_cluster():
    assert unmeasured(shipped("h100-hgx")).dtype == "bf16"
    assert unmeasured(shipped("p3.16xlarge")).dtype == "fp16"
    with pytest.raises(ValueError, match=r"does not say device\.peak_flops of bf16 or fp16"):
        unmeasured(without(shipped("h100-hgx"), peak_flops={"fp32": 1e12}))
    plan = search.find(MODEL, WORKLOAD, unmeasured(shipped("p3.16xlarge")), num_devices=8)
    assert plan.dtype == "fp16"
    assert plan.prediction.notes[0].startswith(
        "`meshwise run` refuses this plan: it trains in fp32"
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_any_number_of_hosts(name):
    for hosts in (1, 3, 129, 100_000):
        there = shipped(name, hosts)
        assert there.num_devices == 8 * hosts <= there.tiers[-1].num_devices
        assert there.tier_of(8 * hosts, 1).name == ("nvlink" if hosts == 1 else "network")
    with pytest.raises(ValueError, match="hosts = 0: must be >= 1"):
        shipped(name, 0)


def test_hosts_need_something_between_them():
    host = shipped("h100-hgx")
    bare = msgspec.structs.replace(host, name="mine", tiers=host.tiers[:1])
    with pytest.raises(
        ValueError, match="hosts = 2: cluster 'mine' says nothing of the links betw"
    ):
        on_hosts(bare, 2)
    assert on_hosts(bare, 2, host).tiers == host.tiers
    assert on_hosts(bare, 1) == bare


def test_measured_first_then_the_data_sheet():
    held_out = {"median": 0.1, "p90": 0.1, "num_points": 3}
    surface = {
        "like": {"op": "gemm", "m": 1, "n": 1, "k": 1}, "regime": "cold",
        "dims": ("m", "n", "k"), "shapes": ((1024, 1024, 1024),),
        "time_s": (2e-5,), "floor_s": 5e-6, "flops_per_s": 7e14, "bytes_per_s": 3e12,
        "held_out": held_out, "runs": ("made",),
    }  # fmt: skip
    bare = unmeasured(shipped("h100-hgx"))
    costs = msgspec.structs.replace(
        bare, surfaces=(msgspec.convert(surface, Surface),), runs=("made",)
    )
    prices = Prices(costs, datasheet=True)
    op = Gemm(m=1024, n=1024, k=1024)
    near, far = (msgspec.structs.replace(op, m=m) for m in (1025, 4096))
    attention = Attention(batch=1, q_len=512, kv_len=512, heads=8, kv_heads=8, head_dim=64)
    seen = []
    for asked in (op, far, attention):
        prices.begin()
        seen.append((prices.estimate(asked).source, prices.tier, bool(prices.notes)))
    assert prices.estimate(near).source == "extrapolated"
    assert seen == [
        ("measured", "measured", False),
        ("extrapolated", "extrapolated", False),
        ("datasheet", "datasheet", True),
    ]
    prices.estimate(op)  # the tier is the lowest since begin
    assert prices.tier == "datasheet"
    with pytest.raises(
        ValueError, match="no price for attention bf16 forward causal cold; measure it"
    ):
        Prices(costs).estimate(attention)


def test_a_plan_names_its_lowest_tier():
    costs = unmeasured(shipped("h100-hgx", 2))
    plan = search.find(MODEL, WORKLOAD, costs, num_devices=16)
    assert {c.prediction.tier for c in plan.runners_up} | {plan.prediction.tier} == {"datasheet"}
    prediction = plan.prediction
    assert prediction.high_s - prediction.low_s > 0.2 * prediction.step_time_s  # wide
    assert json.loads(msgspec.json.encode(plan))["prediction"]["tier"] == "datasheet"
    layout = Layout(dp=4, tp=2, pp=2, schedule="1f1b", num_microbatches=4)
    assert search.given(MODEL, WORKLOAD, costs, layout).prediction.tier == "datasheet"
    with pytest.raises(ValueError, match=r"no price for .*; measure it: meshwise measure profile"):
        search.given(MODEL, WORKLOAD, costs, layout, measured_only=True)
    with pytest.raises(ValueError, match=r"no price for .*; measure it: meshwise measure profile"):
        search.find(MODEL, WORKLOAD, costs, num_devices=16, measured_only=True)


def test_every_figure_has_a_source():
    known = attainable()
    for name in known.__struct_fields__:
        if name != "protocols":
            assert len(getattr(known, name).source) > 20
    for share in (known.gemm, known.memory, known.links, known.network):
        assert 0 < max(share.share, *share.devices.values(), 0.0) <= 1


@pytest.mark.parametrize("near", [None, 20e-6])
def test_a_slow_message_between_hosts_is_slow_at_every_hop(near):
    """Eight bytes over four hosts of 8 GPUs: 3 hops of a ring; there and back over 2 of a tree."""
    host = on_hosts(shipped("h100-hgx"), 4)

    def small_s(kind, far):
        tiers = [
            msgspec.structs.replace(tier, latency_s=latency_s)
            for tier, latency_s in zip(host.tiers, (near, far), strict=True)
        ]
        there = msgspec.structs.replace(host, tiers=tuple(tiers))
        return time_s(there, Collective(kind=kind, size_bytes=8, group_size=32))

    for kind, hops in (("all_gather", 3), ("all_reduce", 4)):
        usual_s = small_s(kind, None)
        assert small_s(kind, 10e-6) == usual_s  # as quick as NCCL's figures
        assert small_s(kind, 1e-3) - usual_s == pytest.approx(hops * 1e-3, rel=0.03)


def test_tiers_of_a_host_in_pairs():
    """A tier of pairs inside a host has its own rate."""
    host = shipped("h100-hgx")
    pairs = (Tier(name="pair", num_devices=2, bytes_per_s=4e11), *host.tiers)
    slow = msgspec.structs.replace(host.tiers[0], bytes_per_s=2e10)
    there = msgspec.structs.replace(host, tiers=(pairs[0], slow, host.tiers[1]))
    op = Collective(kind="all_gather", size_bytes=2**30, group_size=2)
    across = msgspec.structs.replace(op, group_stride=2)
    assert 10 * time_s(there, op) < time_s(there, across)
