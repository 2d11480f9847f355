"""Tables, figures and Primus' files of measured operators: golden, and rows counted by hand."""

import csv
import functools
import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from meshwise.pages import (
    collectives,
    compute,
    health,
    html,
    operators,
    primus,
    samples,
    spread,
    svg,
    table,
)
from meshwise.spec import (
    Attention,
    Case,
    Collective,
    Convolution,
    Derived,
    Elementwise,
    Gemm,
    Overlap,
    Sample,
)
from meshwise.spec.label import label
from tests import sample_records as known

CUBE = Gemm(m=8192, n=8192, k=8192)
ATTENTION = Attention(
    batch=1, q_len=16384, kv_len=16384, heads=32, kv_heads=8, head_dim=128, causal=True
)
RING = Collective(kind="all_gather", size_bytes=2**28, group_size=4)


def measured(op, times_s, rank_times_s=(), metrics=None, **how) -> Sample:
    case = Case(op=op, **({"world_size": 4} | how))
    return Sample(
        case_id=case.id, case=case, status="ok", times_s=tuple(times_s),
        rank_times_s=tuple(map(tuple, rank_times_s)), metrics=metrics or {},
    )  # fmt: skip


def of_ranks(op, each, metrics=None, **how) -> Sample:
    """``each[rank][iteration]``; the sample's times are the largest over ranks."""
    return measured(op, [max(times) for times in zip(*each, strict=True)], each, metrics, **how)


def replaced(record, **changes):
    return msgspec.structs.replace(record, **changes)


def products() -> list[Sample]:
    fp8 = replaced(CUBE, dtype="fp8", scaling="row")
    grouped = Gemm(m=32768, n=4096, k=7168, groups=256)
    clocks = {"sm_clock_mhz": (1980.0, 1410.0, 1395.0), "power_w": (540.0, 699.0, 700.0)}
    return [
        measured(CUBE, [1.40e-3, 1.42e-3, 1.38e-3], regime="cold"),
        measured(grouped, [3.2e-3] * 3, regime="cold"),
        measured(replaced(CUBE, trans_a=True, trans_b=False), [1.5e-3] * 3, regime="cold"),
        measured(fp8, [0.80e-3] * 3, regime="cold"),
        measured(CUBE, [1.57e-3] * 3, regime="sustained", metrics=clocks),
    ]


def convolutions() -> list[Sample]:
    """All of a bottleneck's widest kernel, the halving of the next, and a stem."""
    wide = Convolution(
        batch=32, in_channels=1280, out_channels=2560, height=14, width=14, kernel=3
    )  # fmt: skip
    stem = Convolution(
        batch=32, in_channels=3, out_channels=320, height=224, width=224, kernel=7, stride=2
    )  # fmt: skip
    return [
        measured(wide, [600e-6, 610e-6, 590e-6], regime="cold"),
        measured(replaced(wide, product="dgrad"), [640e-6] * 3, regime="cold"),
        measured(replaced(wide, product="wgrad"), [700e-6] * 3, regime="cold"),
        measured(replaced(wide, height=28, width=28, stride=2), [650e-6] * 3, regime="cold"),
        measured(replaced(stem, dtype="fp32"), [2e-3] * 3, regime="cold"),
    ]


def attention() -> list[Sample]:
    backward = replaced(ATTENTION, direction="backward")
    mla = Attention(
        batch=1, q_len=4096, kv_len=4096, heads=16, kv_heads=16, head_dim=192, head_dim_v=128,
        window=1024,
    )  # fmt: skip
    times = {"": 3.42e-3, "flash": 6.81e-3, "cudnn": 3.40e-3}
    return [
        *(measured(ATTENTION, [t], regime="cold", backend=name) for name, t in times.items()),
        measured(backward, [17.6e-3], regime="cold", backend="flash"),
        measured(backward, [9.2e-3], regime="cold", backend="cudnn"),
        measured(mla, [1e-3], regime="cold", backend="flex"),
    ]


def overlap() -> list[Sample]:
    pair = Overlap(compute=CUBE, collective=RING)
    metrics = {"compute_alone_s": 1.4e-3, "collective_alone_s": 0.6e-3}
    return [measured(pair, [1.61e-3] * 3, metrics={**metrics, "collective_beside_s": 0.9e-3})]


def exchanges() -> list[Sample]:
    """An all-reduce whose rank 2 comes late: 1 MiB takes 30, 34 and 32 us, of which 20 to 24 on
    the late rank; and its smallest message, 12 us on the fastest rank."""
    reduce = Collective(kind="all_reduce", size_bytes=2**20, group_size=4, dtype="fp32")
    large = [[30e-6, 34e-6, 32e-6]] * 2 + [[20e-6, 24e-6, 22e-6], [30e-6, 34e-6, 32e-6]]
    small = [[14e-6] * 3] * 2 + [[12e-6] * 3] + [[14e-6] * 3]
    halves = Collective(kind="all_gather", size_bytes=2**24, group_size=2, group_stride=2)
    uneven = Collective(
        kind="all_to_all_v", size_bytes=3000, group_size=2, ranks=(1, 3), dtype="fp32",
        splits=((1000, 2000), (500, 500)),
    )  # fmt: skip
    return [
        of_ranks(reduce, large, {"wrong": 0.0}, regime="graph"),
        of_ranks(replaced(reduce, size_bytes=8), small, {"wrong": 0.0}, regime="graph"),
        of_ranks(replaced(reduce, in_place=True), large, regime="graph", backend="one_shot"),
        measured(halves, [80e-6] * 4, regime="blocking"),
        measured(uneven, [10e-6] * 4, regime="warm"),
        measured(
            Collective(kind="broadcast", size_bytes=2**20, group_size=4), [2e-5], regime="pipelined"
        ),
    ]


def pairs() -> list[Sample]:
    size = 64 * 2**20
    rates = {(0, 1): 370e9, (1, 0): 366e9, (0, 2): 371e9, (2, 0): 40e9, (1, 2): 369e9}
    return [
        of_ranks(
            Collective(kind="send", size_bytes=size, group_size=2, ranks=pair),
            [[size / rate if rank in pair else 1e-9] * 3 for rank in range(3)],
            world_size=3,
        )
        for pair, rate in rates.items()
    ]


def fsdp() -> list[Sample]:
    """A layer of Llama-3-70B on 8 ranks: 106,956,800 elements a rank."""
    total = 106_956_800 * 8
    gather = Collective(kind="all_gather", size_bytes=2 * total, group_size=8)
    reduce = Collective(kind="reduce_scatter", size_bytes=4 * total, group_size=8, dtype="fp32")
    return [
        measured(gather, [5e-3], world_size=8),
        measured(reduce, [10e-3], world_size=8),
        measured(replaced(gather, size_bytes=2 * 8 * 262_669_312), [12e-3], world_size=8),
    ]


def fsdp_rows() -> list[Derived]:
    """The units that ``fsdp`` measured, and the root's reduce-scatter, which it did not."""
    *layers, root = (one.case for one in fsdp())
    reduce = replaced(layers[1].op, size_bytes=4 * 8 * 262_669_312)
    units = [("layers 0-79", case) for case in layers]
    units += [("root", root), ("root", replaced(root, op=reduce))]
    return [row("llama-3-70b", case, name=name) for name, case in units]


FSDP_INFO = known.info(run_id="20260101T000000-measure-fsdp-four")
TABLES = {
    "gemm": lambda: compute.products(products(), known.CLUSTER),
    "convolution": lambda: compute.products(convolutions(), known.CLUSTER, Convolution),
    "attention": lambda: [
        *compute.attention(attention()),
        *compute.attention(attention()[:1], exact=True),
    ],
    "overlap": lambda: compute.overlaps(overlap()),
    "collectives": lambda: collectives.tables(exchanges()),
    "pairs": lambda: collectives.tables(pairs()),
    "fsdp": lambda: samples.run(FSDP_INFO, fsdp(), rows=fsdp_rows())[1:],
}


def rendered(shown) -> str:
    stream = io.StringIO()
    table.write(shown, stream)
    return stream.getvalue()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_as_recorded_and_fits_a_log(name, golden):
    text = rendered(TABLES[name]())
    golden(f"operators-{name}.txt", text)
    assert max(map(len, text.splitlines())) <= table.WIDTH


def test_a_product_by_hand():
    cold, sustained = compute.products(products(), known.CLUSTER)
    # 2 * 8192^3 = 1.0995 TFLOP in 1.40 ms is 785 TFLOP/s, of 1 PFLOP/s; 3 * 128 MiB in 1.40 ms
    assert cold.title == "Matrix products, cold"
    assert cold.rows[0][:6] == ("8192x8192x8192", "bf16", "nt", "1.40 ms", "785 TFLOP/s", "78.5 %")
    assert cold.rows[0][6:9] == ("288 GB/s", "3", "1.4 %")  # 1.38 to 1.42 ms
    # fp8: 1.0995 TFLOP in 0.80 ms; its peak is not known
    assert cold.rows[3][1:6] == ("fp8 row", "nt", "800 us", "1.37 PFLOP/s", "–")
    assert cold.legend[:2] == (
        "Best bf16: 8192x8192x8192 nt, 785 TFLOP/s, 78.5 % of peak.",
        "Best fp8 row: 8192x8192x8192 nt, 1.37 PFLOP/s.",
    )
    assert sustained.rows[0][4:] == (
        "700 TFLOP/s", "70.0 %", "256 GB/s", "3", "1410 (1395)", "699 (700)",
    )  # fmt: skip


def test_a_convolution_by_hand():
    """2 * 32 * 14^2 * 2560 * 1280 * 9 = 370 GFLOP in 0.6 ms is 617 TFLOP/s, of 1 PFLOP/s; bf16:
    32 * 14^2 * (1280 + 2560) + 2560 * 1280 * 9 elements, 107 MB in 0.6 ms."""
    info = known.info()
    shown = samples.run(info, [*convolutions(), *products()])
    assert [each.title for each in shown[1:4]] == [
        "Matrix products, cold", "Matrix products, sustained", "Convolutions, cold",
    ]  # fmt: skip
    assert shown[3].rows[0][:7] == (
        "b32 1280x14x14 -> 2560 3x3", "bf16", "forward", "600 us", "617 TFLOP/s", "61.7 %",
        "179 GB/s",
    )  # fmt: skip
    (first, *_) = samples.document(Path("x"), info, convolutions())["results"]
    assert first["flops_per_s"] == pytest.approx(616.6e12, rel=1e-3)


def test_where_convolutions_have_no_place_they_are_left_out(tmp_path):
    """Health and Primus' files know none."""
    info, both = known.info(), [*convolutions(), *products()]
    assert rendered(health.tables(info, both)) == rendered(health.tables(info, products()))
    rows = [row("m", one.case) for one in both]
    (path, _) = primus.gemm(rows, {one.case_id: one for one in both}, tmp_path)
    assert len(written(path)[1]) == len(products())


def test_attention_by_hand():
    (shown,) = compute.attention(attention())
    # 2 * 32 heads * 16384^2 * (128 + 128), halved, is 2.199 TFLOP forward and 5.498 backward
    assert [row[1] for row in shown.rows] == ["torch's choice", "flash", "cudnn", "flex"]
    assert shown.rows[0][2:] == ("3.42 ms", "643 TFLOP/s", "–", "–", "")
    assert shown.rows[1][3:] == ("323 TFLOP/s", "17.6 ms", "312 TFLOP/s", "")
    assert shown.rows[2][3:] == ("647 TFLOP/s", "9.20 ms", "598 TFLOP/s", "both")
    # exactly 1024 * 1025 / 2 + 3072 * 1024 pairs, 16 heads, 192 + 128 wide
    flops = 2 * 16 * (1024 * 1025 // 2 + 3072 * 1024) * (192 + 128)
    assert flops == pytest.approx(37.59e9, rel=1e-3)
    assert shown.rows[3][3] == "37.6 TFLOP/s"
    (exact,) = compute.attention(attention()[:1], exact=True)
    assert compute.CONVENTION[False] in shown.legend[0]
    assert compute.CONVENTION[True] in exact.legend[0]
    tiny = replaced(ATTENTION, q_len=2, kv_len=2)  # 3 of 4 pairs, of which the half is 2
    half, whole = (
        compute.contests([measured(tiny, [1.0])], exact=exact)[0].rate("", "forward")
        for exact in (False, True)
    )
    assert whole / half == 1.5


def test_an_overlap_by_hand():
    (shown,) = compute.overlaps(overlap())
    assert shown.rows[0][2:] == ("1.40 ms", "1.61 ms", "1.15 x", "600 us", "900 us", "1.50 x")
    partly = overlap()[0]
    partly = replaced(partly, metrics={**partly.metrics, "collective_covered": 0.0})
    (marked,) = compute.overlaps([partly])
    assert marked.rows[0][-1] == "1.50 x *" and "ended alone" in marked.legend[-1]
    assert "ended alone" not in shown.legend[-1]
    bare = measured(Overlap(compute=CUBE, collective=RING), [1e-3])
    assert compute.overlaps([bare])[0].rows[0][2:] == ("–", "1.00 ms", "–", "–", "–", "–")
    assert compute.overlaps(products()) == []


def test_an_overlap_apart_from_its_clocks():
    """Alone at 1,500 MHz and 1.25 times as long at 1,800: 1.5 times as long at one clock."""
    (one, *_) = overlap()
    metrics = {**one.metrics, "alone_mhz": 1500.0, "beside_mhz": 1800.0}
    slow = msgspec.structs.replace(one, metrics=metrics, times_s=(1.75e-3,) * 3)
    (shown,) = compute.overlaps([slow])
    assert [shown.columns[4], *shown.rows[0][4:6]] == ["slowdown", "1.25 x", "1.50 x"]


def test_collectives_by_hand():
    shown = {one.title: one for one in collectives.tables(exchanges())}
    graph = shown["all_reduce, 4 ranks, graph"]
    assert graph.columns[:9] == (
        "size(B)", "count", "type", "redop", "root", "time(us)", "algbw", "busbw", "#wrong",
    )  # fmt: skip
    assert [row[0] for row in graph.rows] == ["8", "1048576"]
    # 1 MiB in a mean of 32 us is 32.77 GB/s; times 2 * 3/4; p95 is 9/10 from 32 to 34
    assert graph.rows[1] == (
        "1048576", "262144", "float", "sum", "-1", "32.00", "32.77", "49.15", "0", "32.00",
        "33.80", "0 (+45 %)",
    )  # fmt: skip
    assert graph.rows[0][8] == "0"
    halves = shown["all_gather, 2 groups of 2 ranks 2 apart, blocking"]
    assert halves.rows[0][:7] == (
        "16777216", "4194304", "bfloat16", "-1", "80.00", "209.72", "104.86",
    )  # fmt: skip
    assert halves.rows[0][7] == "–"  # not checked
    assert "all_reduce, 4 ranks, graph, one_shot, in place" in shown
    # the busiest rank sends 2000 of its 3000 bytes to the other
    uneven = shown["all_to_all_v, ranks 1, 3 alone, warm"].rows[0]
    assert (*uneven[:3], *uneven[4:6]) == ("3000", "sent 1000-3000", "float", "0.30", "0.20")
    # one time has no quantiles, but four equal ones do
    once = shown["broadcast, 4 ranks, pipelined"]
    assert once.rows[0][3] == "0" and once.rows[0][8:10] == ("–", "–")
    assert halves.rows[0][8:10] == ("80.00", "80.00")
    # 8 B in 14 us are 0.00057143 GB/s; half of 1.5 times that and 49.152
    assert graph.legend == ("# Avg bus bandwidth    : 24.5764",)
    assert once.legend[0] == "# Avg bus bandwidth    : 52.4288"
    assert any("depends on which sizes" in line for line in once.legend)
    assert any("mean over iterations" in line for line in once.legend)


def test_the_times_of_an_import_are_what_its_file_says():
    source = {"file": "a.txt", "tool": "PARAM comms", "size_kind": "total", "warnings": []}
    source["time_kind"] = "median over ranks of each rank's mean"
    info = replaced(known.info(), provenance={"imported": source})
    (shown,) = collectives.tables(exchanges()[-1:], info)
    text = " ".join(shown.legend)
    assert "as PARAM comms gives it: median over ranks of each rank's mean" in text
    assert "mean over iterations" not in text


def test_a_group_of_one_rank_moves_nothing_and_is_left_out():
    alone = measured(Collective(kind="all_reduce", size_bytes=64, group_size=1), [1e-6] * 3)
    assert collectives.tables([alone]) == []
    assert len(collectives.tables([alone, exchanges()[-1]])) == 1
    gather = measured(Collective(kind="all_gather", size_bytes=64, group_size=1), [1e-6])
    reduce = measured(Collective(kind="all_reduce", size_bytes=64, group_size=4), [1e-6])
    units, commands = collectives.fsdp_tables([], [gather, reduce])
    assert units.title == "FSDP units, 4 replicas"
    assert len(units.rows) == len(commands.rows) == 1


def test_the_time_of_a_collective_is_split_by_its_ranks():
    *_, parts = collectives.tables(exchanges())
    rows = {(row[2], row[3]): row[4:] for row in parts.rows if row[0] == "all_reduce"}
    # the late rank needs 22 us, 12 of them for the smallest message; the others wait 10
    assert rows["graph", "1048576"] == ("12.00", "10.00", "10.00")
    assert rows["graph", "8"] == ("12.00", "0.00", "2.00")
    assert rows["graph, one_shot, in place", "1048576"] == ("–", "22.00", "10.00")  # none is small
    assert all(row[0] == "all_reduce" for row in parts.rows)  # the others have no ranks' times
    assert "other\ngroups(us)" not in parts.columns


def test_the_floor_is_the_least_of_the_series_and_the_parts_add_up():
    """The smallest message takes 14 us, one of 1 KiB only 11: no transfer is below zero."""
    op = Collective(kind="all_reduce", size_bytes=8, group_size=2)
    each = {8: (14e-6, 17e-6), 1024: (11e-6, 12e-6), 4096: (13e-6, 20e-6)}
    found = [
        of_ranks(replaced(op, size_bytes=size), [[a] * 3, [b] * 3], world_size=2)
        for size, (a, b) in each.items()
    ]
    listed, parts = collectives.tables(found)
    assert [row[3:] for row in parts.rows] == [
        ("8", "11.00", "3.00", "3.00"),
        ("1024", "11.00", "0.00", "1.00"),
        ("4096", "11.00", "2.00", "7.00"),
    ]
    p50 = [row[listed.columns.index("p50(us)")] for row in listed.rows]
    assert p50 == ["17.00", "12.00", "20.00"]


def test_what_groups_differ_by_is_a_part_and_no_rank_of_another_group_is_a_peer():
    """Ranks 0, 1 need 10 and 12 us, ranks 2, 3 in the other group 20 and 25."""
    op = Collective(kind="all_gather", size_bytes=64, group_size=2)
    sample = of_ranks(op, [[t] * 3 for t in (10e-6, 12e-6, 20e-6, 25e-6)])
    listed, parts = collectives.tables([sample])
    assert listed.rows[0][-1] == "3 (+25 %)"
    assert parts.columns[4:] == ("floor(us)", "transfer(us)", "waiting(us)", "other\ngroups(us)")
    assert parts.rows[0][4:] == ("10.00", "0.00", "5.00", "10.00")  # 25 us in all
    # the slower group in turns: both have a median of 20 us, the whole takes 25
    turns = [[10e-6] * 3, [20e-6, 25e-6, 20e-6], [10e-6] * 3, [25e-6, 20e-6, 25e-6]]
    assert spread.split(of_ranks(op, turns)) == pytest.approx((10e-6, 15e-6, 0), abs=1e-12)


def test_only_ranks_that_take_part_are_slow_or_waited_for():
    slow = pairs()[3]  # 2 -> 0 of three ranks; rank 1 has no work
    assert spread.members(slow.case) == [(2, 0)]
    assert spread.split(slow) == (64 * 2**20 / 40e9, 0, None)
    assert "(+0 %)" in spread.slowest(slow)
    stride = Case(op=Collective(kind="broadcast", size_bytes=8, group_size=2, group_stride=2),
                  world_size=8)  # fmt: skip
    assert spread.members(stride) == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_pairs_are_a_matrix():
    (shown,) = collectives.tables(pairs())
    assert shown.columns == ("from, to", "0", "1", "2")
    assert shown.rows == (
        ("0", "–", "370.0", "371.0"), ("1", "366.0", "–", "369.0"), ("2", "40.0", "–", "–"),
    )  # fmt: skip


def test_fsdp_units_with_their_names_and_commands():
    units, commands = samples.run(FSDP_INFO, fsdp(), rows=fsdp_rows())[1:3]
    assert units.title == "FSDP units of llama-3-70b, 8 ranks"
    # 1,711,308,800 B gathered in 5 ms, twice that reduced in 10 ms: both 342.26 GB/s x 7/8
    layer, total = ("106956800", "1711308800"), "3422617600"
    assert units.rows[:2] == (
        ("layers 0-79", "all_gather", "bf16", "warm", *layer, "5000.0", "299.48"),
        ("layers 0-79", "reduce_scatter", "fp32", "warm", layer[0], total, "10000.0", "299.48"),
    )
    assert units.rows[2][4:] == ("262669312", "4202708992", "12000.0", "306.45")
    assert units.rows[3][5:] == ("8405417984", "–", "–")
    assert commands.rows[1] == (
        "layers 0-79", "reduce_scatter",
        "reduce_scatter_perf -b 3422617600 -e 3422617600 -g 8 -d float",
    )  # fmt: skip


def test_fsdp_units_of_a_stored_run_have_no_names():
    units = samples.run(FSDP_INFO, fsdp())[1]
    assert units.title == "FSDP units, 8 ranks"
    assert [one[0] for one in units.rows] == ["–"] * 3
    assert not [t for t in samples.run(known.info(), fsdp()) if t.title.startswith("FSDP")]


def test_fsdp_replicas_are_a_row_of_their_own_and_a_failure_is_said():
    """A unit of 4 MiB in bf16 on 2 groups of 4 ranks: each holds 524,288 elements."""
    gather = Collective(kind="all_gather", size_bytes=2**22, group_size=4)
    reduce = Collective(kind="all_reduce", size_bytes=2**20, group_size=2, group_stride=4)
    hung = Sample(case_id="", case=Case(op=gather, world_size=8), status="hung", reason="rank 1")
    hung = replaced(hung, case_id=hung.case.id)
    both = [row("m", one, name="root") for one in (hung.case, Case(op=reduce, world_size=8))]
    shown = collectives.fsdp_tables(both, [hung, measured(reduce, [1e-3], world_size=8)])
    assert shown[0].title == "FSDP units of m, 2 groups of 4 ranks"
    assert shown[0].rows == (
        ("root", "all_gather", "bf16", "warm", "524288", "4194304", "hung", "–"),
        ("root", "all_reduce", "bf16", "warm", "524288", "1048576", "1000.0", "1.05"),
    )
    assert shown[1].rows[1][2] == "all_reduce_perf -b 1048576 -e 1048576 -g 2 -d bfloat16"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (Case(op=CUBE, regime="cold"), "gemm 8192x8192x8192 bf16"),
        (Case(op=CUBE, regime="sustained"), "gemm 8192x8192x8192 bf16 sustained"),
        (
            Case(op=Gemm(m=8, n=4, k=2, dtype="fp8", scaling="tensor", groups=2, trans_a=True)),
            "gemm 8x4x2 fp8 tensor 2 groups tt",
        ),
        (
            Case(op=replaced(ATTENTION, head_dim_v=64, window=512), backend="flex"),
            "attention b1 s16384 h32/8x128/64 bf16 causal window 512 forward flex",
        ),
        (
            Case(op=replaced(RING, in_place=True, ranks=(0, 2, 4, 6)), regime="pipelined"),
            "all_gather 256.0 MiB ranks 0,2,4,6 in place pipelined",
        ),
        (
            Case(op=Overlap(compute=CUBE, collective=RING), regime="blocking"),
            "gemm 8192x8192x8192 bf16 beside all_gather 256.0 MiB x4 blocking",
        ),
        (
            Case(
                op=Collective(
                    kind="all_to_all_v",
                    size_bytes=3072,
                    group_size=2,
                    splits=((1024, 2048), (512, 512)),
                )
            ),
            "all_to_all_v 3.0 KiB x2 sent 1024-3072",
        ),
        (
            Case(
                op=Collective(
                    kind="all_to_all_v", size_bytes=513, group_size=2, splits=((512, 0), (1, 511))
                )
            ),
            "all_to_all_v 513 B x2 received 511-513",
        ),
        (
            convolutions()[3].case,
            "convolution b32 1280x28x28 -> 2560 3x3 /2 bf16 forward",
        ),
        (Case(op=Elementwise(kind="copy", read_bytes=2**20, write_bytes=2**20)), "copy 2.0 MiB"),
        (Case(op=Elementwise(kind="h2d", read_bytes=2**20, write_bytes=2**20)), "h2d 1.0 MiB"),
    ],
)
def test_a_case_in_words(case, text):
    assert label(case) == text


def test_a_hung_case_is_named_with_its_reason():
    case = Case(op=RING, world_size=4)
    hung = Sample(case_id=case.id, case=case, status="hung", reason="ranks 2, 3 had not arrived")
    shown = samples.run(known.info(), [hung])
    assert shown[1].rows == (("all_gather 256.0 MiB x4", "hung", "ranks 2, 3 had not arrived"),)


@functools.cache
def drawn() -> dict[str, svg.Figure]:
    done = [*products(), *convolutions(), *attention(), *overlap(), *exchanges(), *pairs()]
    sizes = [replaced(one, case=replaced(one.case, regime="pipelined")) for one in exchanges()[:2]]
    shown = operators.figures(known.info(), done, reference=sizes, reference_name="nccl-tests")
    return dict(shown) | dict(operators.figures(FSDP_INFO, fsdp()))


def test_every_operator_has_its_figures():
    assert set(drawn()) == {
        "gemm", "convolution", "attention-forward-cold", "attention-backward-cold", "overlap",
        "fsdp",
        "collectives-all_reduce-4_ranks-time", "collectives-all_reduce-4_ranks-busbw",
        "collectives-all_reduce-4_ranks-in_place-time",
        "collectives-all_reduce-4_ranks-in_place-busbw",
    }  # fmt: skip
    for figure in drawn().values():
        ET.fromstring(figure.svg.replace("xlink:href", "href"))
        assert not any(colour in figure.svg for colour in (svg.INK, svg.MUTED, *svg.SERIES))
    assert "nccl-tests, pipelined" in drawn()["collectives-all_reduce-4_ranks-busbw"].svg
    assert "datasheet" in drawn()["gemm"].caption
    assert "best 32768x4096x7168 256 groups nt" not in drawn()["gemm"].svg
    assert "best 8192x8192x8192 nt" in drawn()["gemm"].svg
    assert operators.figures(known.info(), [known.SAMPLES[-1]]) == []


def test_an_axis_of_values_that_hardly_differ_has_several_ticks():
    """2.1 to 2.9 ms, 1 to 1.4 GB/s of busbw, and one point of a product."""
    op = Collective(kind="all_reduce", size_bytes=2**20, group_size=4)
    close = [measured(op, [2.1e-3]), measured(replaced(op, size_bytes=2**21), [2.9e-3])]
    tiny = measured(Gemm(m=512, n=512, k=512), [1e-3])
    shown = dict(operators.figures(known.info(), [*close, tiny]))

    def named(figure, unit: str) -> set[str]:
        return set(re.findall(rf">([\d.]+{unit})</text>", shown[figure].svg))

    assert named("collectives-all_reduce-4_ranks-time", " ms") == {"1.00 ms", "2.00 ms", "5.00 ms"}
    assert len(named("collectives-all_reduce-4_ranks-busbw", " [GM]B/s")) >= 2
    assert len(named("gemm", " ?")) >= 2  # FLOPs a byte have no unit


def test_bars_that_are_too_many_are_named():
    many = [measured(replaced(ATTENTION, batch=batch), [batch * 1e-3]) for batch in range(1, 21)]
    ((_, figure),) = operators.figures(known.info(), many)
    assert "the first 12 of 20" in figure.caption
    assert "b12 " in figure.svg and "b13 " not in figure.svg


def row(model: str, case: Case, **changes) -> Derived:
    return Derived(model, 2, 4096, 8192, 6, "x", case)._replace(**changes)


def written(path) -> tuple[list[str], list[list[str]]]:
    header, *rows = csv.reader(path.read_text().splitlines())
    return header, rows


def test_a_run_without_prices_shows_its_operators_on_the_page():
    info = known.info(run_id="20260101T000000-measure-gemm-four")
    text = html.page(html.Contents(None, None, (), ((info, (*products(), *overlap())),)))
    assert text.count("<svg") == 2 + 1  # and the links
    assert "Best bf16" in text and "1.15 x" in text
    priced = (known.info(), (*products(), *overlap()))
    assert "Best bf16" not in html.page(html.Contents(None, known.COSTS, (), (priced,)))


def test_what_was_imported_is_said_with_its_doubts(tmp_path):
    source = {
        "file": "a.txt", "tool": "nccl-tests 2.19", "size_kind": "total", "time_kind": "mean",
        "warnings": ["row 3: printed with one digit"],
    }  # fmt: skip
    info = known.info(run_id="20260101T000000-measure-import-a")
    info = replaced(info, provenance={"imported": source})
    run_dir = tmp_path / info.run_id
    known.write_run(tmp_path, info, exchanges()[:2])
    made, doubts = samples.imported([run_dir])
    assert made.rows == (("a.txt", "nccl-tests 2.19", "2"),)
    assert made.legend == (f"into {run_dir}",)
    assert doubts.rows == (("a.txt", "row 3: printed with one digit"),)
    stated = dict(samples.state(info, []).rows)
    assert stated["imported"] == "a.txt of nccl-tests 2.19; size: total; time: mean"
    assert stated["suspicious"] == "row 3: printed with one digit"


class TestPrimus:
    def test_gemm(self, tmp_path):
        done = products()[0]
        missing = Case(op=replaced(CUBE, trans_a=True, trans_b=False))
        rows = [row("Llama2_7B", done.case), row("Llama2_7B", missing), row("Other", done.case)]
        csv_path, json_path, *_ = primus.gemm(rows, {done.case_id: done}, tmp_path / "new")
        assert csv_path.name == "benchmark_gemm_Llama2_7B.csv"
        header, (first, second) = written(csv_path)
        assert header == [
            "model", "m", "n", "k", "transA", "transB", "dtype", "Time(s)", "TFLOPS",
            "Bandwidth(GB/s)",
        ]  # fmt: skip
        assert first[:8] == [
            "Llama2_7B", "8192", "8192", "8192", "N", "T", "torch.bfloat16", "0.0014",
        ]  # fmt: skip
        assert float(first[8]) == pytest.approx(2 * 8.192**3 / 1.4)  # TFLOP/s
        assert float(first[9]) == pytest.approx(3 * 2 * 8192**2 / 1.4e-3 / 1e9)
        assert second[4:] == ["T", "N", "torch.bfloat16", "", "", ""]
        assert [one["Time(s)"] for one in json.loads(json_path.read_text())] == [0.0014, None]

    def test_attention(self, tmp_path):
        done = attention()
        rows = [row("Llama3_8B", one.case) for one in done if one.case.backend == "flash"]
        rows.append(row("Llama3_8B", done[0].case))
        path = primus.attention(rows, {one.case_id: one for one in done}, tmp_path / "a.csv")
        header, (flash, default) = written(path)
        assert header == [
            "model", "batch_size", "seqlen_q", "seqlen_kv", "num_head_q", "num_head_kv",
            "head_dim_qk", "head_dim_v", "causal", "fwd_tflops", "fwd_time", "bwd_tflops",
            "bwd_time", "backend",
        ]  # fmt: skip
        assert flash[:9] == ["Llama3_8B", "1", "16384", "16384", "32", "8", "128", "128", "True"]
        assert float(flash[9]) == pytest.approx(32 * 16384**2 * 256 / 6.81e-3 / 1e12)
        assert (flash[10], flash[12], flash[13]) == ("0.00681", "0.0176", "flash")
        assert default[11:] == ["", "", "default"]

    def test_collectives(self, tmp_path):
        # DeepSeek-V2-Lite, mbs 1: 4096 x 6 rows of 2048 in bf16 over 8 ranks are 100,663,296 B
        exchange = Collective(kind="all_to_all", size_bytes=100_663_296, group_size=8)
        reduce = Collective(kind="all_reduce", size_bytes=2**27, group_size=8, dtype="fp16")
        send = replaced(reduce, kind="send", group_size=2)
        done = [measured(op, [1e-3], world_size=8) for op in (exchange, reduce, send)]
        rows = [row("m", one.case) for one in done]
        paths = primus.collectives(rows, {one.case_id: one for one in done}, tmp_path)
        found = {path.name: written(path) for path in paths}
        shared = ["Model", "MBS", "Seq", "HiddenSize", "DataType"]
        times = ["Time(s)", "Bandwidth(GB/s)"]
        header, (cells,) = found["all2all_benchmark.csv"]
        assert header == [*shared, "EP-Size", "TopK", *times]
        assert cells[:8] == ["m", "2", "4096", "8192", "torch.bfloat16", "8", "6", "0.001"]
        assert float(cells[8]) == pytest.approx(100.663296 * 7 / 8)
        header, (cells,) = found["allreduce_benchmark.csv"]
        assert header == [*shared, "WorldSize", *times]
        assert float(cells[7]) == pytest.approx(2 * 134.217728 * 7 / 8)
        header, (cells,) = found["send_recv_benchmark.csv"]
        assert header == [*shared, *times]
        assert float(cells[6]) == pytest.approx(134.217728)

    def test_fsdp(self, tmp_path):
        done = fsdp()
        rows = [row("llama3-70B", one.case) for one in done[:2]]
        by_id = {one.case_id: one for one in done}
        path = primus.fsdp(rows, by_id, "all_gather", tmp_path / "g.csv")
        assert written(path) == (
            ["Model", "Layer Weight", "DataType", "WorldSize", "Time(s)", "Bandwidth(GB/s)"],
            [["llama3-70B", "855654400", "torch.bfloat16", "8", "0.005", "299.47904"]],
        )
        with pytest.raises(ValueError, match="no case of this run"):
            primus.fsdp([], by_id, "all_gather", tmp_path / "g.csv")

    def test_a_file_that_cannot_be_written_is_said(self, tmp_path):
        done = products()[0]
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="cannot be written"):
            primus.gemm([row("m", done.case)], {done.case_id: done}, tmp_path / "file" / "x")
