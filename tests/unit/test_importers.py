"""Results of other tools: rows, units and conventions against numbers read off the files by hand,
and what must be refused or flagged. No torch."""

import json
import logging
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise import store
from meshwise.probe import importers
from meshwise.spec import Attention, Cluster, Collective, Device, Gemm, Tier
from meshwise.verbs.imports import import_files

DATA = Path(__file__).parents[1] / "data"
A100 = sorted((DATA / "nccl_tests_a100x8").glob("*.log"))
H200 = sorted((DATA / "nccl_tests_h200x4").glob("*.txt"))
PARAM = DATA / "param_h200x4"
FOOTERS = {  # as printed
    "nccl_allgather": 58.2651, "nccl_allreduce": 68.4048, "nccl_alltoall": 58.6481,
    "nccl_broadcast": 64.8653, "nccl_reduce": 65.018, "nccl_reducescatter": 60.168,
    "nccl_tests_all_gather": 131.249, "nccl_tests_all_reduce": 155.571,
    "nccl_tests_alltoall": 135.696, "nccl_tests_reduce_scatter": 132.575,
    "nccl_tests_sendrecv": 123.602,
}  # fmt: skip
FOUR = Cluster(
    name="four",
    num_hosts=1,
    num_devices_per_host=4,
    device=Device(name="X", kind="cuda", memory_bytes=10**9),
    tiers=(Tier(name="unknown", num_devices=4),),
)


def only(found, **fields):
    """The one sample whose operation has these fields."""
    (sample,) = [
        sample
        for sample in found.samples
        if all(getattr(sample.case.op, name) == value for name, value in fields.items())
    ]
    return sample


@pytest.fixture
def file(tmp_path):
    def write(text, name="results.txt"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("path", A100 + H200, ids=lambda path: path.stem)
def test_nccl_tests_footers_are_reproduced_from_the_rows(path):
    found = importers.read(path)
    (table,) = found.facts["tables"]
    assert table["rows"] == (34 if path in A100 else 12)
    assert table["average_bus_bandwidth"] == FOOTERS[path.stem]
    assert table["average_of_rows"] == pytest.approx(FOOTERS[path.stem], abs=1e-3)
    assert len(found.samples) == 2 * (table["rows"] - len(table["size_0_rows"]))
    assert not [text for text in found.warnings if "busbw" in text or "constant" in text]


@pytest.mark.parametrize(
    ("stem", "kind"),
    [
        ("nccl_allgather", "all_gather"),
        ("nccl_allreduce", "all_reduce"),
        ("nccl_alltoall", "all_to_all"),
        ("nccl_broadcast", "broadcast"),
        ("nccl_reduce", "reduce"),
        ("nccl_reducescatter", "reduce_scatter"),
    ],
)
def test_old_logs_say_their_collective_by_their_columns(stem, kind):
    found = importers.read(DATA / "nccl_tests_a100x8" / f"{stem}.log")
    assert {sample.case.op.kind for sample in found.samples} == {kind}
    assert (found.world_size, found.device, found.num_hosts) == (8, "A100-SXM4-40GB", 1)


def test_only_gathers_and_all_to_all_need_the_files_name(file):
    text = (DATA / "nccl_tests_a100x8" / "nccl_reducescatter.log").read_text()
    found = importers.read(file(text, "misleading-allgather.log"))
    assert {sample.case.op.kind for sample in found.samples} == {"reduce_scatter"}
    text = (DATA / "nccl_tests_a100x8" / "nccl_alltoall.log").read_text()
    with pytest.raises(ValueError, match=r"results\.txt: does not say which collective"):
        importers.read(file(text))


def test_a_row_of_nccl_tests_keeps_time_size_placement_and_bandwidths():
    found = importers.read(DATA / "nccl_tests_a100x8" / "nccl_allgather.log")
    sample = only(found, size_bytes=8589934592, in_place=False)
    assert sample.times_s == (pytest.approx(33646e-6, rel=1e-12),)
    assert sample.metrics["printed_busbw_bytes_per_s"] == 223.39e9
    assert "wrong" not in sample.metrics
    case = sample.case
    assert (case.regime, case.world_size, case.op.group_size, case.op.dtype) == (
        "pipelined", 8, 8, "fp32",
    )  # fmt: skip
    assert only(found, size_bytes=8589934592, in_place=True).times_s == (32669 * 1e-6,)
    found = importers.read(DATA / "nccl_tests_h200x4" / "nccl_tests_sendrecv.txt")
    sample = only(found, size_bytes=1048576, in_place=True)
    assert (sample.case.op.kind, sample.times_s) == ("send_recv", (21.40 * 1e-6,))
    assert only(found, size_bytes=1048576, in_place=False).metrics["wrong"] == 0
    assert (found.facts["nccl"], found.tool) == ("2.28.9", "nccl-tests 2.19.6")


def test_sizes_of_0_are_kept_as_facts_and_are_no_samples():
    found = importers.read(DATA / "nccl_tests_a100x8" / "nccl_alltoall.log")
    (table,) = found.facts["tables"]
    assert [row["out_of_place"]["time"] for row in table["size_0_rows"]] == [
        "1.63", "1.35", "1.35", "1.37", "1.34",
    ]  # fmt: skip
    assert min(sample.case.op.size_bytes for sample in found.samples) == 32
    assert any("5 rows of size 0" in text for text in found.warnings)


def test_columns_of_nccl_tests_are_found_by_name_and_wrong_elements_are_an_error(file):
    text = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 1 iters: 20 graph: 4
#  Rank  0 Group  0 Pid 7 on secret-host device  0 [0000:00:06] NVIDIA H200
#  Rank  1 Group  0 Pid 7 on secret-host device  1 [0000:00:07] NVIDIA H200
# size count type redop root time algbw busbw #wrong i_min i_max i_p99 i_cv% time algbw busbw #wrong i_min i_max i_p99 i_cv% timestamp
#  (B) (elements) (us) (GB/s) (GB/s) (us) (us) (us) (%) (us) (GB/s) (GB/s) (us) (us) (us) (%) %Y-%m-%d
 1024 256 float sum -1 10.24 0.10 0.10 0 9.1 11.1 11.0 1.0 20.48 0.05 0.05 3 19.1 21.1 21.0 1.0 2026-01-02 03:04:05
 2048 512 float max -1 10.24 0.20 0.20 0 9.1 11.1 11.0 1.0 20.48 0.10 0.10 0 19.1 21.1 21.0 1.0 2026-01-02 03:04:05
# Avg bus bandwidth : 0.1125
"""  # noqa: E501
    found = importers.read(file(text))
    good = only(found, in_place=False)
    assert (good.times_s, good.case.regime) == ((10.24 * 1e-6,), "graph")
    bad = only(found, in_place=True)
    assert (bad.status, bad.reason) == ("error", "3 wrong elements")
    assert "1 rows have no counterpart here: redop max at line 8" in found.warnings
    assert "secret-host" not in str(found)
    # once right and once wrong is wrong
    again = "\n".join([*text.splitlines(), text.splitlines()[6].replace(" 0.05 3 ", " 0.05 0 ")])
    bad = only(importers.read(file(again)), in_place=True)
    assert (bad.status, bad.reason, bad.times_s) == ("error", "3 wrong elements", ())
    assert len(only(importers.read(file(again)), in_place=False).times_s) == 2


@pytest.mark.parametrize(
    ("type_", "error", "status"),
    [("float", "5e-07", "ok"), ("float", "1e-05", "ok"), ("float", "2e-05", "error"),
     ("half", "1e-03", "ok"), ("half", "2e-01", "error"), ("float", "nan", "error"),
     ("float", "N/A", "ok"), ("float", "0e+00", "ok")],
)  # fmt: skip
def test_the_error_of_older_nccl_tests_is_a_distance_and_no_count(file, type_, error, status):
    """common.cu of v2.0 prints the largest |difference| and fails above DeltaMaxValue(type)."""
    text = f"""\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#  Rank  0 Pid 7 on h device  0 [0x06] NVIDIA H200
#  Rank  1 Pid 7 on h device  1 [0x07] NVIDIA H200
# size count type redop time algbw busbw error time algbw busbw error
 1024 256 {type_} sum 10.24 0.10 0.10 {error} 20.48 0.05 0.05 0e+00
"""
    found = importers.read(file(text))
    sample = only(found, in_place=False)
    assert (sample.status, "wrong" in sample.metrics) == (status, False)
    assert status == "ok" or error in sample.reason
    assert only(found, in_place=True).status == "ok"


def report(**changes):
    """What -J writes, made by hand after nccl-tests' util.cu: two processes of two GPUs."""
    half = {"time": 19.22, "alg_bw": 0.053278, "bus_bw": 0.079917, "nwrong": 0.0}
    result = {
        "size": 1024, "count": 256, "type": "float", "redop": "sum", "root": "    -1",
        "out_of_place": half, "in_place": half | {"time": 20.0, "nwrong": None},
        "out_of_place_per_iter": {"times_us": [19.0, 19.5]},
        "actual_iterations": 20, "experiment_name": "all_reduce_perf",
    }  # fmt: skip
    device = {"group": 0, "pid": 1, "hostname": "vm", "device": 0, "device_info": "NVIDIA H200"}
    config = {
        "nthreads": 1, "ngpus": 2, "graph": 0, "blocking_collectives": "false",
        "devices": [{"rank": 0} | device, {"rank": 2} | device],
    }  # fmt: skip
    return {
        "version": 3, "args": ["/opt/build/all_reduce_perf", "-J", "/home/me/x"],
        "env": ["TOKEN=hunter2"], "nccl_version": 22809, "config": config, "results": [result],
        "average_bus_bandwidth": {"bandwidth": 0.079917, "okay": "unchecked"},
    } | changes  # fmt: skip


def test_the_json_of_nccl_tests_is_read_and_its_environment_is_not(file, tmp_path):
    path = file(json.dumps(report()), "report.json")
    found = importers.read(path)
    assert (found.world_size, found.device, found.facts["nccl"]) == (4, "NVIDIA H200", "2.28.9")
    sample = only(found, in_place=False)
    assert (sample.times_s, sample.metrics["wrong"]) == ((19.22 * 1e-6,), 0)
    assert sample.metrics["iterations_s"] == (19.0 * 1e-6, 19.5 * 1e-6)
    assert "wrong" not in only(found, in_place=True).metrics
    (run_dir,) = import_files(path, runs=tmp_path / "runs")
    stored = (run_dir / "run.json").read_text() + (run_dir / "samples.jsonl").read_text()
    assert "hunter2" not in stored and "TOKEN" not in stored and "/home" not in stored


@pytest.mark.parametrize(
    ("name", "regime"), [("blocking", "blocking"), ("nonblocking", "pipelined")]
)
def test_param_logs_give_all_their_rows_in_their_regime(name, regime):
    found = importers.read(PARAM / f"comms_4xH200_{name}.txt")
    assert len(found.samples) == 198 and found.world_size == 4
    assert {sample.case.regime for sample in found.samples} == {regime}
    assert not [text for text in found.warnings if "busbw" in text or "left out" in text]


def test_a_row_of_param_is_read_by_column_names_and_not_by_position():
    found = importers.read(PARAM / "comms_4xH200_blocking.txt")
    sample = only(found, kind="all_reduce", size_bytes=2147483648)
    assert sample.times_s == (8969.0 * 1e-6,)
    assert sample.metrics["printed_busbw_bytes_per_s"] == 359.149e9  # the last column is 0.0
    assert sample.metrics["max_s"] == 8970.1 * 1e-6
    lists, tensor = [
        sample
        for sample in found.samples
        if sample.case.op.kind == "all_gather" and sample.case.op.size_bytes == 16
    ]
    assert (lists.case.backend, tensor.case.backend) == ("list", "")
    assert tensor.times_s == (37.6 * 1e-6,)  # the list form took longer
    even = only(found, kind="all_to_all_v", size_bytes=64)
    assert even.case.op.splits == ((16,) * 4,) * 4


OLD_PARAM = """\
\t PARAM COMM environment: {'world_size': 8, 'local_size': 8, 'global_rank': 0, 'local_rank': 0}
\t backend: nccl nw-stack: pytorch-dist args.data_types: ['float16'] args.b: 4 args.z: 0 args.x: 1
\t collective=reduce_scatter, src_ranks=None, dst_ranks=None
\tCOMMS-RES  size (B)  nElementsPerRank  Latency(us):p50  p75  p95  Min  Max  AlgBW(GB/s)  BusBW(GB/s)
noise of another rank
\tCOMMS-RES-reduce_scatter-float16_tag  1600000  100000  100.0  101.0  102.0  99.0  103.0  16.000  14.000
\tCOMMS-RES-QUANT-all_to_all-float32  1024  64  1.0  2.0  3.0  6.0
\tCOMMS-RES-gather-float32  1024  256  100.0  101.0  102.0  99.0  103.0  0.010  0.009
"""  # noqa: E501


def test_old_columns_of_param_are_read_and_foreign_rows_left_out_by_name(file):
    found = importers.read(file(OLD_PARAM))
    (sample,) = found.samples
    op = sample.case.op
    assert (op.kind, op.size_bytes, op.dtype, op.group_size) == (
        "reduce_scatter",
        1600000,
        "fp16",
        8,
    )
    assert (sample.times_s, sample.case.regime) == ((100.0 * 1e-6,), "pipelined")
    assert any("COMMS-RES-QUANT" in text for text in found.warnings)
    assert any("gather: no counterpart" in text for text in found.warnings)


def param(world_size, blocking, *, backend="nccl", dtype="float32", rank=0, p50=100.0, size=4096):
    """A whole log of one all_reduce."""
    return f"""\
 PARAM COMM environment: {{'world_size': {world_size}, 'global_rank': {rank}, 'local_rank': {rank}}}
 backend: {backend} args.data_types: ['{dtype}'] args.b: 4 args.z: {blocking} args.x: 1
 Hello from Rank {rank}: world_size: {world_size}, master_ip: x
 collective=all_reduce, src_ranks=None, dst_ranks=None
 COMMS-RES  size (B)  nElementsPerRank  Latency(us):p50  p75  p95  Min  Max  AlgBW(GB/s)  BusBW(GB/s)
 COMMS-RES-all_reduce-{dtype}  {size}  {size // 4}  {p50}  101.0  102.0  99.0  103.0  0.04  0.05
"""  # noqa: E501


def test_param_logs_in_one_file_keep_each_its_own_flags(file):
    """Once the first log's world size and blocking flag were taken for all."""
    logs = [param(4, 1), param(4, 0, p50=50.0), param(4, 1, size=8192, p50=200.0)]
    found = importers.read(file("".join(logs)))
    seen = {(s.case.op.size_bytes, s.case.regime, s.times_s[0] * 1e6) for s in found.samples}
    due = {(4096, "blocking", 100.0), (4096, "pipelined", 50.0), (8192, "blocking", 200.0)}
    assert {(size, regime, round(time, 6)) for size, regime, time in seen} == due
    assert found.facts["runs"] == 3 and found.world_size == 4


def test_real_param_logs_in_one_file_are_what_they_are_apart(file):
    names = [f"comms_4xH200_{name}.txt" for name in ("blocking", "nonblocking")]
    both = importers.read(file("".join((PARAM / name).read_text() for name in names)))
    apart = [sample for name in names for sample in importers.read(PARAM / name).samples]
    assert list(both.samples) == apart


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (param(4, 1) + param(8, 1), "world_size is 4 at line 1 and 8 at line 7: .* split the file"),
        (param(4, 1) + param(4, 1, backend="gloo"), "backend is nccl at line 1 and gloo at line 7"),
        # the head of the second log is lost
        (param(4, 1) + "".join(param(4, 0).splitlines(True)[1:]),
         "args.z is 1 at line 2 and 0 at line 7"),
        (param(4, 1) + "".join(param(8, 1).splitlines(True)[2:]),
         "world_size is 4 at line 1 and 8 at line 7"),
        (param(4, 1) + "".join(param(4, 1, backend="gloo").splitlines(True)[1:]),
         "backend is nccl at line 2 and gloo at line 7"),
        (param(4, 1) + "".join(param(4, 1, dtype="float16").splitlines(True)[1:]),
         "data_types is float32 at line 2 and float16 at line 7"),
        # the head of the first log is lost
        ("".join(param(8, 0).splitlines(True)[4:]) + param(4, 1), "line 1 is a row above any"),
        (param(4, 1) + " [Rank 0] num_pg 1, groupSize 8\n", "line 7 has a group of 8"),
    ],
    ids=["world", "backend", "flag", "hello", "a backend", "dtype", "headless", "group"],
)  # fmt: skip
def test_param_logs_that_disagree_are_refused_with_their_lines(file, text, message):
    with pytest.raises(ValueError, match=message):
        importers.read(file(text))


def test_other_ranks_may_tell_the_environment_of_the_same_run(file):
    first, *rest = param(4, 1).splitlines(True)
    others = "".join(first.replace("_rank': 0", f"_rank': {rank}") for rank in (2, 1, 3))
    found = importers.read(file(first + others + "".join(rest)))
    assert (len(found.samples), found.facts["runs"]) == (1, 1)


def test_a_failed_check_of_param_makes_its_collective_an_error(file):
    said = "ValueError: [4096-bytes all_reduce] Wrong value at [1][7] = 3.0, expected 4.0\n"
    found = importers.read(file(param(4, 1) + said + param(4, 0)))
    bad, good = found.samples
    assert (bad.status, good.status) == ("error", "ok")
    assert bad.reason == "wrong elements: PARAM's check failed at line 7"
    assert any("1 rows cannot be used" in text for text in found.warnings)


TRACE = "h:7:8 [0] NCCL INFO AllReduce: opCount {} sendbuff 0x10 recvbuff 0x20 count 4 datatype 7 op 0 root 0 comm 0xa{}"  # noqa: E501
JOINED = "h:7:8 [0] NCCL INFO ncclCommInitRank comm 0xa rank 0 nranks {} cudaDev 0"
GEMM_CSV = "m,n,k,transA,transB,dtype,Time(s)\n8,8,8,T,N,bfloat16,0.001\n"
GATHERED = "Model,MBS,Seq,HiddenSize,DataType,WorldSize,Time(s),Bandwidth(GB/s)\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (H200[0].read_text() + (PARAM / "comms_4xH200_blocking.txt").read_text(),
         r"nccl-tests at line \d+ and one of PARAM at line \d+; split"),
        (H200[0].read_text() + H200[1].read_text().replace("Rank  3", "Rank  7"),
         r"number of ranks is 4 at line \d+ and 8 at"),
        (re.sub(r"Rank  3(.* on +)vm", r"Rank  2\1other", H200[0].read_text()),
         "list of devices has a rank twice"),
        (H200[0].read_text() + re.sub(r"#  Rank  3.*\n", "", H200[1].read_text()),
         r"number of ranks is 4 at line \d+ and 3 at line \d+: logs of two runs"),
        (H200[0].read_text() + re.sub(r"( on +)\S+( device)", r"\1other\2", H200[1].read_text()),
         r"lines? \d+ and line \d+ are of different hosts"),
        (H200[0].read_text() + H200[1].read_text().replace("nccl-library=", "nccl-library=1"),
         r"nccl-library is \d+ at line \d+ and 1\d+ at"),
        # the settings of the second, then of the first, are lost
        (H200[0].read_text() + H200[1].read_text().replace("# nThread", "# "),
         r"table at line \d+ has no settings"),
        (H200[0].read_text().replace("# nThread", "# ") + H200[1].read_text(),
         r"table at line \d+ has no settings"),
        (GEMM_CSV * 2, "line 3 is a second header"),
        (GEMM_CSV + "\nbtd,size_bytes,latency_us\n", "line 4 is a second header"),
        (GATHERED + "x,1,4,8,bfloat16,2,0.001,0.000064\nx,1,4,8,bfloat16,4,0.001,0.000096\n",
         "WorldSize is 2 at line 2 and 4 at line 3"),
        ('btd,size_bytes,latency_us\n"4,1-1,8",128,9.0\n"4,1-1-1-1,8",128,9.0\n',
         "number of ranks is 2 at line 2 and 4 at line 3"),
        ("\n".join([JOINED.format(4), TRACE.format(1, ""), JOINED.format(8)]),
         "comm 0xa of process 7 has 4 ranks, and 8 at line 3"),
    ],
    ids=[
        "tools", "more", "twice", "fewer", "hosts", "versions", "second", "first", "header",
        "other header", "world sizes", "tables", "trace",
    ],
)  # fmt: skip
def test_files_of_several_runs_are_refused_where_they_disagree(file, text, message):
    with pytest.raises(ValueError, match=message):
        importers.read(file(text, "allgather_benchmark.csv"), FOUR)


def test_files_of_several_runs_that_agree_are_as_apart(file):
    both = importers.read(file(H200[0].read_text() + H200[1].read_text()))
    assert both.samples == tuple(s for path in H200[:2] for s in importers.read(path).samples)
    assert (both.num_hosts, both.world_size) == (1, 4)
    trace = "\n".join([JOINED.format(4), TRACE.format(1, " [nranks=4]"), JOINED.format(8)])
    (sample,) = importers.read(file(trace)).samples  # the call says it itself
    assert sample.case.op.group_size == 4


def test_param_point_to_point_is_a_send_between_its_ranks(file):
    text = """\
 PARAM COMM environment: {'world_size': 4}
 backend: nccl args.data_types: ['float32'] args.z: 1
 collective=pt2pt, src_ranks=[0], dst_ranks=[3]
 COMMS-RES size (B) pingLatency(us):p50 p75 p95 pingPongLatency(us):p50 p75 p95 avgUniBW(GB/s) avgBiBW(GB/s) totalUniBW(GB/s) totalBiBW(GB/s)
 COMMS-RES-pt2pt-float32 4096 10.5 10.6 10.7 21.0 21.1 21.2 0.390 0.780 0.390 0.780
"""  # noqa: E501
    (sample,) = importers.read(file(text)).samples
    op = sample.case.op
    assert (op.kind, op.size_bytes, op.group_size, op.ranks) == ("send", 4096, 2, (0, 3))
    assert (sample.times_s, sample.metrics["p75_s"]) == ((10.5 * 1e-6,), 10.6 * 1e-6)
    assert sample.metrics["ping_pong_s"] == 21.0 * 1e-6


def test_a_table_of_batch_tables_and_dimension_becomes_a_split_matrix():
    found = importers.read(PARAM / "general_all_to_allv_v100x4_head.csv")
    *_, even, uneven = found.samples
    assert even.case.op.splits == ((65536,) * 4,) * 4  # 256/4 * 1 * 256 * 4 bytes
    assert uneven.case.op.splits == ((8192,) * 4,) * 3 + ((16384,) * 4,)
    assert uneven.case.op.size_bytes == 65536  # rank 3 sends 4 * 16384; each receives 40960
    assert uneven.metrics["output_bytes"] == 40960
    assert uneven.times_s == (91.00755 * 1e-6,)


def test_the_same_table_in_params_text_keeps_every_ranks_time(file):
    text = """\
 PARAM COMM environment: {'world_size': 4}
 backend: nccl args.data_types: ['float32'] args.z: 1
 COMMS-RES size (B) btd Latency(us) AlgBW(GB/s) BusBW(GB/s)
 COMMS-RES-all_to_allv-float32 40960 256,1-1-1-2,32 90.0-91.0-93.0-92.0 0.455-0.450-0.440-0.445 0.341-0.337-0.330-0.333
"""  # noqa: E501
    (sample,) = importers.read(file(text)).samples
    assert sample.times_s == (93.0 * 1e-6,)
    assert sample.rank_times_s == ((90.0 * 1e-6,), (91.0 * 1e-6,), (93.0 * 1e-6,), (92.0 * 1e-6,))
    with pytest.raises(ValueError, match=r"line 4: batch = 255: is not divisible by 4 ranks"):
        importers.read(file(text.replace("256,1-1", "255,1-1")))
    with pytest.raises(ValueError, match=r"size = 40964, but .* gives an output of 40960 B"):
        importers.read(file(text.replace("40960", "40964")))


def test_primus_gemm_and_attention_become_our_operations(file):
    text = """\
model,m,n,k,transA,transB,dtype,Time(s),TFLOPS,Bandwidth(GB/s)
Llama3.1_8B,8192,6144,4096,N,T,torch.bfloat16,0.00055,749.6,339.0
Llama3.1_8B,6144,4096,8192,T,N,torch.bfloat16,0.00060,687.2,310.8
"""
    forward, weight = importers.read(file(text, "any.csv")).samples
    assert forward.case.op == Gemm(m=8192, n=6144, k=4096)
    assert weight.case.op == Gemm(m=6144, n=4096, k=8192, trans_a=True, trans_b=False)
    assert (forward.times_s, forward.case.regime) == ((0.00055,), "cold")
    text = """\
model,batch_size,seqlen_q,seqlen_kv,num_head_q,num_head_kv,head_dim_qk,head_dim_v,causal,fwd_tflops,fwd_time,bwd_tflops,bwd_time,backend
deepseek,2,8192,8192,16,16,192,128,True,500,0.0014,0,0.0,flash_attn
"""
    forward, backward = importers.read(file(text, "any.csv")).samples
    assert forward.case.op == Attention(
        batch=2, q_len=8192, kv_len=8192, heads=16, kv_heads=16, head_dim=192, head_dim_v=128
    )
    assert (forward.times_s, forward.case.backend) == ((0.0014,), "flash_attn")
    assert (backward.status, backward.times_s) == ("error", ())
    assert "the kernel failed there" in backward.reason


HEAD = "Model,MBS,Seq,HiddenSize,DataType,WorldSize,Time(s),Bandwidth(GB/s)\n"


@pytest.mark.parametrize(
    ("name", "text", "kind", "size_bytes", "time_s"),
    [
        # llama-3-70B at mbs 1: 134,217,728 bytes; bus 2 S 7/8 / 1 ms = 234.881024 GB/s
        ("x.csv", HEAD + "l,1,8192,8192,torch.float16,8,0.001,234.881024\n",
         "all_reduce", 134217728, 0.001),
        ("allgather_benchmark.csv", HEAD + "l,1,8192,8192,torch.float16,8,0.001,117.440512\n",
         "all_gather", 134217728, 0.001),
        ("reducescatter_benchmark.csv", HEAD + "l,1,8192,8192,torch.float16,8,0.001,117.440512\n",
         "reduce_scatter", 134217728, 0.001),
        # deepseek-v3: 32768 rows of 7168, 469,762,048 bytes
        ("x.csv", "Model,MBS,Seq,HiddenSize,DataType,EP-Size,TopK,Time(s),Bandwidth(GB/s)\n"
         "d,1,4096,7168,torch.bfloat16,8,8,0.002,205.520896\n", "all_to_all", 469762048, 0.002),
        # a ping-pong of 2 ms: 33,554,432 bytes in 1 ms
        ("x.csv", "Model,MBS,Seq,HiddenSize,DataType,Time(s),Bandwidth(GB/s)\n"
         "l,1,4096,4096,torch.float16,0.002,33.554432\n", "send", 33554432, 0.001),
        # fsdp of llama3-70B: 855,638,016 elements, 1,711,276,032 bytes
        ("allgather_fsdp.csv", "Model,Layer Weight,DataType,WorldSize,Time(s),Bandwidth(GB/s)\n"
         "l,855638016,torch.float16,8,0.01,149.7366528\n", "all_gather", 1711276032, 0.01),
    ],
)  # fmt: skip
def test_primus_collectives_become_nccl_tests_sizes(file, name, text, kind, size_bytes, time_s):
    found = importers.read(file(text, name))
    (sample,) = found.samples
    assert (sample.case.op.kind, sample.case.op.size_bytes) == (kind, size_bytes)
    assert sample.times_s == (time_s,) and not found.warnings


def test_primus_bandwidth_that_does_not_follow_is_an_error_of_its_row(file):
    text = HEAD + "l,1,8192,8192,torch.float16,8,0.001,500.0\n"
    found = importers.read(file(text, "allgather_benchmark.csv"))
    assert found.samples[0].status == "error"
    assert "does not follow" in found.warnings[0]
    with pytest.raises(ValueError, match="same columns; name the file as Primus does"):
        importers.read(file(HEAD + "l,1,8192,8192,torch.float16,8,0.001,117.44\n", "x.csv"))


def broken(stem, old, new):
    text = (DATA / "nccl_tests_h200x4" / f"nccl_tests_{stem}.txt").read_text()
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (("    65536         16384     float     sum      -1    20.69    3.17    3.17",
          "    65536         16384     float     sum      -1    40.69    3.17    3.17"),
         "busbw does not follow from size and time in 1 rows: line 17"),
        (("    65536         16384     float", "     4096          1024     float"), "duplicated"),
        (("24.27    2.70    2.70    N/A", "24.27"), "1 rows cannot be read: line 17"),
        (("    65536         16384     float", "      512           128     float"),
         "not ascending: 1 sizes: 512 B at line 17 comes after 16384 B"),
        ((": 123.602", ": 125.602"),
         "1 footers differ from the mean busbw of their rows: 125.602 beside 123.6"),
    ],
)  # fmt: skip
def test_suspicious_rows_of_nccl_tests_are_flagged(file, change, warning):
    found = importers.read(file(broken("sendrecv", *change)))
    assert any(warning in text for text in found.warnings)


@pytest.mark.parametrize("time", ["0.00", "-17.9", "1e-20"])
def test_a_row_of_an_impossible_time_is_an_error_beside_the_others(file, time):
    rows = "".join(f" {8 << i} {2 << i} float sum -1 {20 + i}.1 0.00 0.00 0\n" for i in range(6))
    text = f"# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 2\n{TWO}{rows}"
    bad, *good = importers.read(file(text.replace("20.1", time))).samples
    assert bad.status == "error" and bad.reason.startswith("the printed time is ")
    assert {sample.status for sample in good} == {"ok"}


def test_constant_and_quantised_times_are_flagged(file):
    rows = "".join(f" {8 << i} {2 << i} float sum -1 20 0.00 0.00 0\n" for i in range(6))
    text = f"# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 2\n{TWO}{rows}"
    assert importers.read(file(text)).warnings == (
        "constant: 1 stretches: 6 sizes from line 7 on have the time 20 (all_reduce out of place)",
        "quantised: 6 of 6 times have fewer than three digits: all_reduce out of place",
    )


def test_a_kind_of_doubt_is_one_warning_of_a_file_with_its_count(file):
    """Two tables, each of one case six times, with times of two digits."""
    row = " 4096 1024 float sum -1 {} 0.05 0.05 0\n"
    table = "# nThread 1 nGpus 2\n" + TWO + "".join(row.format(11 + i) for i in range(6))
    table = "# Collective test starting: all_reduce_perf\n" + table
    assert importers.read(file(table + table.replace("float", "half"))).warnings == (
        "quantised: 12 of 12 times have fewer than three digits: all_reduce out of place",
        "duplicated: 2 cases are repeated and keep all times: "
        "6 times from line 7 out of place on; 6 times from line 19 out of place on",
    )


@pytest.mark.parametrize("path", H200, ids=lambda path: path.stem)
def test_bandwidths_of_two_decimals_are_how_nccl_tests_prints_and_no_doubt(path):
    assert " 0.0" in path.read_text()
    assert importers.read(path).warnings == ()


TWO = """\
# Rank 0 Pid 1 on a device 0 [0x00] NVIDIA H200
# Rank 1 Pid 1 on a device 1 [0x00] NVIDIA H200
# size count type redop root time algbw busbw #wrong
# (B) (elements) (us) (GB/s) (GB/s)
"""


def test_a_row_in_milliseconds_is_left_out_and_named_and_several_are_refused(file):
    text = broken("sendrecv", "20.69    3.17    3.17", "20690    3.17    3.17")
    usual, found = importers.read(file(broken("sendrecv", "", ""))), importers.read(file(text))
    (said,) = found.warnings
    assert said.startswith("1 rows are left out, their times are in another unit: line 17 out of")
    lost = only(usual, size_bytes=65536, in_place=False)
    assert found.samples == tuple(one for one in usual.samples if one != lost)
    lines = broken("sendrecv", "", "").splitlines()
    rows = [at for at, line in enumerate(lines) if " sum " in line][-8:]
    for at in rows:
        cells = lines[at].split()
        lines[at] = " ".join([*cells[:5], str(1000 * float(cells[5])), *cells[6:]])
    with pytest.raises(ValueError, match="mixed units"):
        importers.read(file("\n".join(lines)))


def test_a_duplicated_row_keeps_both_times(file):
    text = broken("sendrecv", "    65536         16384", "    16384          4096")
    found = importers.read(file(text))
    assert only(found, size_bytes=16384, in_place=False).times_s == (19.46 * 1e-6, 20.69 * 1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "results.txt: is empty"),
        (" \n", "results.txt: is empty"),
        ("hello\nworld\n", "results.txt: not a result that measure import can read"),
        ('[{"model": "Llama2_7B", "seqlen": 4096}]', "is JSON, but not a report of nccl-tests"),
        ('{"results": [', "is not JSON"),
        ('{"results": [], "config": {}}', "not the JSON of nccl-tests version 3"),
        (broken("sendrecv", "(us)  (GB/s)  (GB/s)             (us)",
                "(ms)  (GB/s)  (GB/s)             (ms)"), r"\(ms\) is not a unit of nccl-tests"),
        (broken("sendrecv", "", "") + broken("all_reduce", "(us)", "(ms)"), "mixed units"),
        (broken("sendrecv", "364.90  364.90", "2919.2  2919.2"),
         r"mixed units \(GB/s from line \d+, Gbit/s from line 25\)"),
        (OLD_PARAM + OLD_PARAM.replace("Latency(us)", "Latency(ms)"), "12: .ms. is not a unit"),
        (OLD_PARAM.split("reduce_scatter-float16_tag")[0], "line 6: 1 values under 10 columns"),
        ("# size count type time algbw busbw error\n", "has a header and no rows"),
        (HEAD, "a header and no rows"),
        (broken("sendrecv", "#  Rank", "#"), "list of devices is missing"),
        (HEAD + "l,1,8192,x,torch.float16,8,0.001,1\n", "line 2: HiddenSize = 'x': must be"),
        (HEAD + "l,1,8192\n", "line 2: 3 values under 8 columns"),
        ("btd,size_bytes,latency_us\n\"7,1-1,4\",1,1\n", "line 2: batch = 7: is not divisible"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_refused_by_name(file, text, message):
    with pytest.raises(ValueError, match=message) as error:
        importers.read(file(text))
    assert "results.txt" in str(error.value) and "\n" not in str(error.value)


GEMM = """model,m,n,k,transA,transB,dtype,Time(s),TFLOPS,Bandwidth(GB/s)
Llama,8192,6144,4096,N,T,torch.bfloat16,0.00055,749.6,339.0
Llama,6144,4096,8192,T,N,torch.bfloat16,0.00060,687.2,310.8
"""
ATTENTION = """model,batch_size,seqlen_q,seqlen_kv,num_head_q,num_head_kv,head_dim_qk,head_dim_v,causal,fwd_time,bwd_time
deepseek,2,8192,8192,16,16,192,128,True,0.0014,0.0035
"""  # noqa: E501


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (",N,T,", ",C,T,", "line 2: transA = 'C': must be T or True or N or False"),
        (",0.00055,", ",nan,", "line 2: Time(s) = 'nan': must be a number"),
        (",0.00055,", ",inf,", "line 2: Time(s) = 'inf': must be a number"),
        (",0.00055,", ",0,", "line 2: Time(s) = '0': a time must be > 0"),
        (",0.00055,", ",-0.1,", "line 2: Time(s) = '-0.1': a time must be > 0"),
        (",0.00055,", ",,", "line 2: Time(s) = '': must be a number"),
        (",0.00055,", ",0,00055,", "line 2: 11 values under 10 columns"),
        (",8192,6144", "," + "9" * 400 + ",6144", "line 2: m = '999"),
        (",8192,6144", ',"8192,6144', "line 2: a quote is open"),
        ("Llama,8192", "x" * 200_000 + ",8192", "line 2: a quote is open or a cell is too long"),
        ("bfloat16,0.00055", "int7,0.00055", "line 2: dtype = 'torch.int7'"),
    ],
)
def test_a_row_of_primus_that_cannot_be_read_is_left_out_by_its_line(file, old, new, said):
    assert GEMM.count(old) == 1
    found = importers.read(file(GEMM.replace(old, new)))
    assert [sample.times_s for sample in found.samples] == [(0.0006,)]
    assert found.warnings[0].startswith(f"1 rows cannot be read: {said}")


def test_trailing_commas_do_no_harm_and_blank_lines_are_counted(file):
    head, *lines = GEMM.splitlines()
    found = importers.read(file("\n".join([head, "", *(f"{line},," for line in lines), "x"])))
    assert len(found.samples) == 2
    assert found.warnings == ("1 rows cannot be read: line 5: 1 values under 10 columns: x",)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (GEMM.encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (GEMM.encode("utf-16-be"), "is UTF-16; save it as UTF-8"),
        (GEMM.replace(",", ";").encode(), "separated by semicolons; save it with commas"),
        (GEMM.replace(",", "\t").encode(), "separated by tabs; save it with commas"),
        (GEMM.replace("transB", "B").encode(), "Primus gemm benchmark but has no column transB"),
        (
            ATTENTION.replace("seqlen_kv", "kv").encode(),
            "attention benchmark but has no column seqlen_kv",
        ),
        (b"btd,size_bytes,us\n", "batch, tables and dimension but has no column latency_us"),
    ],
)
def test_a_table_that_was_saved_otherwise_is_refused_with_the_way_out(tmp_path, data, said):
    (tmp_path / "table.csv").write_bytes(data)
    with pytest.raises(ValueError, match=f"^table.csv: .*{said}"):
        importers.read(tmp_path / "table.csv")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("algbw   busbw  #wrong     time   algbw   busbw", "algbw   busbw  #wrong     time",
         "line 14: the header's columns out of place and in place differ"),
        ("busbw", "bandwidth", "line 14: the header has no column busbw"),
        ("algbw", "", "line 14: the header has no column algbw"),
        ("time", "walltime", "line 14: the header has no column time"),
    ],
)  # fmt: skip
def test_a_damaged_header_of_nccl_tests_is_refused_by_its_column(file, old, new, said):
    with pytest.raises(ValueError, match=f"^results.txt: no row can be read: {said}; nor can the"):
        importers.read(file(broken("sendrecv", old, new)))


def test_numbers_that_are_no_measurements_spoil_their_row_alone(file):
    text = broken("sendrecv", "    65536         16384", "9" * 400 + "         16384")
    found = importers.read(file(text))
    assert len(found.samples) == 22
    assert "1 rows cannot be read: line 17: size = '999" in found.warnings[0]
    found = importers.read(file(broken("sendrecv", " 20.69    3.17    3.17", " 20.69 1e400 nan")))
    assert found.warnings[0] == (
        "1 rows cannot be read: line 17: time, algbw or busbw is not a number"
    )


def test_a_rank_that_the_list_of_devices_lost_is_taken_as_there(file):
    """Rank 2 of 4; the busbw of a gather over three would be 8/9 of that printed."""
    text = broken("all_gather", "#  Rank  2", "#  Ra")
    found = importers.read(file(text))
    whole = importers.read(DATA / "nccl_tests_h200x4" / "nccl_tests_all_gather.txt")
    assert (found.world_size, found.samples) == (4, whole.samples)
    assert found.warnings == (
        "1 ranks are not in the list of devices and are taken as there: rank 2",
    )
    with pytest.raises(ValueError, match=r"results\.txt: the list of devices lacks 6 ranks"):
        importers.read(file(text.replace("#  Rank  3", "#  Rank  8")))


def test_missing_bandwidths_of_the_json_leave_out_their_half(file):
    (result,) = report()["results"]
    lost = result | {"out_of_place": result["out_of_place"] | {"alg_bw": None, "bus_bw": None}}
    del result["count"]
    text = json.dumps(report(results=[lost, result, 7]))
    found = importers.read(file(text, "report.json"))
    assert [sample.case.op.in_place for sample in found.samples] == [True]
    assert found.warnings[0] == (
        "3 rows cannot be read: result 1 out of place: algbw = None; "
        "result 2: 'count' is missing; result 3: 'int' object has no attribute 'get'"
    )
    with pytest.raises(ValueError, match=r"report\.json: no row can be read: result 1: 'count'"):
        importers.read(file(json.dumps(report(results=[result])), "report.json"))


def test_values_of_param_that_are_none_are_left_out_and_without_a_time_the_row_is(file):
    row = OLD_PARAM.splitlines()[5]
    text = OLD_PARAM + row.replace("16.000  14.000", "N/A  N/A") + "\n"
    text += row.replace("100.0  101.0", "N/A  101.0") + "\n"
    found = importers.read(file(text))
    (sample,) = found.samples
    assert sample.times_s == (100.0 * 1e-6,) * 2
    assert sample.metrics["p75_s"] == (101.0 * 1e-6,) * 2
    assert "1 rows cannot be read: line 10: p50 = 'N/A': must be a number" in found.warnings
    with pytest.raises(ValueError, match=r"line 6: the header above it has no column Latency"):
        importers.read(file(OLD_PARAM.replace("Latency(us):p50", "Latency(us)")))


@pytest.mark.parametrize(
    "text",
    ["x" * 2_000_000, "1" * 2_000_000, "1" * 2_000_000 + ": opCount ", "a" + "\n" * 500_000 + "b"],
    ids=["letters", "digits", "digits of a trace", "blank lines"],
)
def test_a_long_word_is_refused_and_does_not_hang(file, text):
    """Patterns without bounds took the square of its length, which is hours."""
    with pytest.raises(ValueError, match=r"^results\.txt: .{1,300}$"):
        importers.read(file(text))


ODD = ("N/A", "nan", "inf", "-1", "0", "1e400", "9" * 400, "9" * 5000, "x", "", "null", "0x1", '"')


def mutated(text, chance):
    """A line cut, lost, doubled or with a word replaced, a column dropped, or the end lost."""
    lines = text.split("\n")
    at, how = chance.randrange(len(lines)), chance.randrange(6)
    line = lines[at]
    if how == 0:
        lines[at] = line[: chance.randrange(len(line) + 1)]
    elif how == 1:
        lines[at : at + 1] = [line] * chance.choice((0, 2))
    elif how in (2, 3) and (words := [*re.finditer(r"[^\s,]+" if how == 2 else r"\d+", line)]):
        word = chance.choice(words)
        lines[at] = line[: word.start()] + chance.choice(ODD) + line[word.end() :]
    elif how == 4:
        column, separator = chance.randrange(12), "," if "," in lines[0] else None
        rows = [line.split(separator) for line in lines]
        lines = [(separator or " ").join(row[:column] + row[column + 1 :]) for row in rows]
    elif how == 5:
        return text[: chance.randrange(len(text))]
    return "\n".join(lines)


REAL = {
    **{path.name: path.read_text() for path in (*H200[:2], *A100[:2], *PARAM.glob("[cg]*"))},
    "trace.log": (DATA / "nccl_trace" / "llama3_70b.log").read_text(),
    "report.json": json.dumps(report(), indent=1),
    "old_param.txt": OLD_PARAM,
    "gemm.csv": GEMM,
    "attention.csv": ATTENTION,
    "reducescatter.csv": HEAD + "l,1,8192,8192,torch.float16,8,0.001,117.440512\n" * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REAL))
def test_a_damaged_file_is_read_or_refused_in_one_line_by_its_name(file, name):
    chance, read = random.Random(name), 0
    for _ in range(60):
        text = "\n".join(REAL[name].split("\n")[:90])
        for _ in range(chance.randint(1, 3)):
            text = mutated(text, chance) or "x"
        try:
            found = importers.read(file(text, name))
        except ValueError as error:
            said = str(error)
            assert said.startswith(f"{name}: ") and "\n" not in said
            assert "does not write" not in said, "an error that no reader foresaw"
        else:
            assert found.samples
            read += 1
    assert read  # not everything is refused


def test_missing_and_binary_files_are_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        importers.read(tmp_path / "none.log")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match="not a result that measure import"):
        importers.read(tmp_path / "binary")


def test_an_import_is_a_run_directory_of_the_devices_that_the_file_names(tmp_path, caplog):
    path = DATA / "nccl_tests_a100x8" / "nccl_allreduce.log"
    with caplog.at_level(logging.WARNING, "meshwise"):
        (run_dir,) = import_files((path,), runs=tmp_path)
    info, samples, warnings = store.load(run_dir)
    assert "measure-import-nccl-allreduce" in run_dir.name and info.status == "complete"
    assert len(samples) == 64 and not warnings and info.world_size == 8
    device = info.cluster.device
    assert (device.name, device.peak_flops["bf16"]) == ("A100-SXM4-40GB", 312e12)
    assert info.cluster.tiers == (Tier(name="unknown", num_devices=8),)
    imported = info.provenance["imported"]
    assert imported["file"] == "nccl_allreduce.log" and "nccl-tests' size" in imported["size_kind"]
    assert imported["tables"][0]["average_bus_bandwidth"] == 68.4048
    assert any("size 0" in text for text in imported["warnings"])
    assert any("size 0" in record.message for record in caplog.records)
    assert "localhost" not in (run_dir / "run.json").read_text()


def test_a_file_that_names_no_device_asks_for_the_cluster(tmp_path):
    path = PARAM / "comms_4xH200_blocking.txt"
    with pytest.raises(ValueError, match=r"blocking\.txt: names no device; give .* --cluster"):
        import_files(path, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    store.write(tmp_path / "cluster.toml", FOUR)
    (run_dir,) = import_files(path, cluster=tmp_path / "cluster.toml", runs=tmp_path / "runs")
    info, samples, _ = store.load(run_dir)
    assert info.cluster == FOUR and len(samples) == 198
    eight = DATA / "nccl_tests_a100x8" / "nccl_allreduce.log"
    with pytest.raises(ValueError, match="8 ranks took part, but cluster 'four' has 4 devices"):
        import_files(eight, cluster=tmp_path / "cluster.toml", runs=tmp_path / "runs")


@pytest.mark.parametrize(
    ("cluster", "is_other"), [("dgx-a100-80gb", False), ("p4d.24xlarge", False), ("h100-hgx", True)]
)
def test_a_log_of_another_machine_than_the_cluster_is_said(cluster, is_other, tmp_path):
    path = DATA / "nccl_tests_a100x8" / "nccl_allreduce.log"
    (run_dir,) = import_files(path, cluster=cluster, runs=tmp_path)
    warnings = " ".join(store.load(run_dir)[0].provenance["imported"]["warnings"])
    said = "was measured on A100-SXM4-40GB, and cluster 'h100-hgx' has NVIDIA H100 80GB HBM3"
    assert (said in warnings) == ("was measured on" in warnings) == is_other


def test_a_bad_file_is_named_and_the_good_ones_are_stored(tmp_path, monkeypatch, caplog):
    good = [str(path) for path in H200[:2]]
    bad = {"empty.log": "", "table.csv": "a,b\n", "also.csv": "a,b\n"}
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
    files = [good[0], *(str(tmp_path / name) for name in bad), good[1], "gone.txt"]
    argv = ["meshwise", "measure", "import", *files, "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", argv)
    caplog.set_level(logging.INFO, "meshwise")
    with pytest.raises(ValueError) as error:
        import_files(files, runs=tmp_path / "runs")
    said = str(error.value)
    assert said.startswith("4 of 6 files refused, the other 2 are stored: ") and "\n" not in said
    assert f"{tmp_path / 'empty.log'}: is empty" in said and "gone.txt: does not exist" in said
    assert f"{tmp_path / 'table.csv'}, {tmp_path / 'also.csv'}: not a result that" in said
    runs = store.runs_of(tmp_path / "runs")
    infos = [store.load(run_dir)[0] for run_dir in runs]
    assert [info.provenance["imported"]["file"] for info in infos] == [
        Path(path).name for path in good
    ]
    assert all(str(run_dir) in caplog.text for run_dir in runs)
    assert [info.command for info in infos] == [
        ("meshwise", "measure", "import", path, "--runs", str(tmp_path / "runs")) for path in good
    ]


def test_importers_do_without_torch():
    modules = "meshwise.probe.importers, meshwise.verbs.imports, sys"
    code = f"import {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_imported_collective_has_the_bus_factor_that_its_file_printed():
    for path in A100 + H200:
        for sample in importers.read(path).samples:
            op = sample.case.op
            assert isinstance(op, Collective)
            printed = sample.metrics["printed_busbw_bytes_per_s"]
            assert op.size_bytes * op.bus_factor / sample.times_s[0] == pytest.approx(
                printed, rel=2e-3, abs=6e6
            )
