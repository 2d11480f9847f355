"""Calls in NCCL's and RCCL's logs, and what a plan's steps should leave there. The traces of plans
are written here by hand, from sizes worked out in the comments. No torch."""

import json
import re
import sys
from pathlib import Path

import msgspec
import pytest

from meshwise import store
from meshwise.cli import app
from meshwise.models import catalogue
from meshwise.pages import show, table
from meshwise.probe import importers
from meshwise.probe.importers import nccl_trace, plan_trace
from meshwise.spec import Cluster, Collective, Device, Layout, Tier, Workload
from meshwise.spec.trace import TraceCheck
from meshwise.verbs import trace as verb
from meshwise.verbs.imports import import_files
from meshwise.verbs.run import run
from tests import sample_records as known

DATA = Path(__file__).parents[1] / "data"
TRACE = DATA / "nccl_trace" / "llama3_70b.log"
GATHERS = DATA / "nccl_tests_h200x4" / "nccl_tests_all_gather.txt"
STEPS = 5

# known.MODEL, of 4 layers, hidden 1024, ffn 4096, vocab and positions 1024, over 4 ranks:
# a layer: qkv 3072*1024 + 3072, out 1024*1024 + 1024, up 4096*1024 + 4096, down 4096*1024 + 1024,
# two norms 4*1024, in all 12,596,224, of which each rank holds 3,149,056
LAYER = 12_596_224 // 4
# the root: embedding and positions 1024*1024 each, the last norm 2*1024: 2,099,200
ROOT = 2_099_200 // 4

CPUS = msgspec.structs.replace(
    known.CLUSTER, device=Device(name="Y", kind="cpu", memory_bytes=2**30)
)


def plan(cluster=known.CLUSTER, **layout):
    layout = Layout(**{"dp": 4, "zero": 3, "microbatch_size": 2} | layout)
    return msgspec.structs.replace(known.plan(layout), cluster=cluster)


def line(kind, count, datatype=9, ranks=4, device=0, op=0):
    return (
        f"host:77:99 [{device}] NCCL INFO {kind}: opCount 1f sendbuff 0x7f0000000000 recvbuff "
        f"0x7f1000000000 count {count} datatype {datatype} op {op} root 0 comm 0x55d0 "
        f"[nranks={ranks}] stream 0x55e0\n"
    )


def step_of_zero3(microbatches=1):
    """Layers gathered forward and backward, the root forward; reduced in fp32 (datatype 7)."""
    once = line("AllGather", LAYER) * 8 + line("AllGather", ROOT)
    once += line("ReduceScatter", LAYER, 7, op=4) * 4 + line("ReduceScatter", ROOT, 7, op=4)
    return once * microbatches + line("AllReduce", 1, 7)


def check(plan, *logs):
    return plan_trace.compare(plan_trace.planned(plan), [*map(nccl_trace.calls, logs)], STEPS)


def verdicts(check):
    return {(one.kind, one.elements): one.verdict for one in check.lines}


def test_the_two_published_rccl_lines_are_read_where_they_are_cut_off():
    scatter, gather = nccl_trace.calls(TRACE.read_text())
    assert scatter[:4] == (4, 86092, "reduce_scatter", 106956800)
    assert scatter.datatype == "bf16"
    assert gather[:4] == (0, 86088, "all_gather", 106956800)
    assert (scatter.in_place, gather.in_place) == (False, True)
    assert (gather.num_ranks, gather.comm) == (0, "")


def test_a_whole_nccl_line_names_its_communicator():
    (call,) = nccl_trace.calls(line("AllReduce", 12, 7, ranks=16, device=3))
    assert (call.num_ranks, call.comm, call.datatype, call.device) == (16, "0x55d0", "fp32", 3)


def test_a_gather_in_place_sends_its_own_part_of_the_result():
    text = (
        "h:1:2 [2] NCCL INFO AllGather: opCount 0 sendbuff 0x1040 recvbuff 0x1000 count 16 "
        "datatype 9 op 0 root 0 comm 0x1 [nranks=4] stream 0x2\n"
    )
    (call,) = nccl_trace.calls(text)  # 0x40 bytes on: two parts of 16 bf16
    assert call.in_place
    (call,) = nccl_trace.calls(text.replace("0x1040", "0x1048"))
    assert not call.in_place


def test_kept_calls_have_no_addresses_and_say_the_same():
    text = TRACE.read_text() + line("AllReduce", 12) + line("ReduceScatter", 1, 0)
    text += line("AllReduce", 12).replace("0x7f1", "0x7f0").replace("0x55d0", "0x7fab12")
    text += (
        "h:1:2 [2] NCCL INFO AllGather: opCount 0 sendbuff 0x1040 recvbuff 0x1000 acc 0x7fee count "
        "16 datatype 9 op 0 root 0 comm 0x55d0 [nranks=4] stream 0x2\n"
        "h:1:2 [2] NCCL INFO Send: opCount 0 sendbuff 0x1040 recvbuff (nil) count 16 datatype 9 "
        "op 0 root 1 comm 0x55d0 [nranks=4] stream 0x2\n"
    )
    kept = nccl_trace.without_host(text)
    assert set(re.findall("0x[0-9a-f]+", kept)) == {"0x0", "0x1", "0x2"}
    before, after = nccl_trace.calls(text), nccl_trace.calls(kept)
    numbers = {"0x55d0": "0x1", "0x7fab12": "0x2", "": ""}
    assert after == [call._replace(comm=numbers[call.comm]) for call in before]
    assert {call.in_place for call in after} == {True, False}
    assert nccl_trace.without_host(kept) == kept


def test_lines_cut_off_before_their_numbers_are_counted_and_not_guessed():
    whole = line("AllGather", 1234)
    for end in range(whole.index("opCount") + 8, whole.index(" root 0")):
        assert nccl_trace.calls(whole[:end] + "\n") == []
        assert len(nccl_trace.torn(whole[:end] + "\n")) == 1
    assert len(nccl_trace.calls(whole[: whole.index(" root 0")] + " root 0\n")) == 1


def test_a_call_with_strange_pointers_is_left_out_by_its_line(tmp_path):
    path = tmp_path / "trace.log"
    path.write_text(
        line("AllGather", LAYER)
        + line("AllGather", LAYER).replace("0x7f0000000000", "garbage")
        + line("AllGather", LAYER).replace("0x7f0000000000", "(nil)")
    )
    found = importers.read(path)
    assert [sample.metrics["calls"] for sample in found.samples] == [2.0]
    assert found.warnings == ("1 lines of calls cannot be read: line 2",)


def test_a_trace_may_begin_with_a_bracket_and_without_a_case_of_ours_it_is_refused(tmp_path):
    path = tmp_path / "trace.log"
    path.write_text("[2026-01-02 03:04:05] " + line("AllGather", LAYER))
    assert len(importers.read(path).samples) == 1
    path.write_text(line("Recv", 8))
    with pytest.raises(ValueError, match=r"^trace\.log: no call .*: 1 calls left out: 1 of rec"):
        importers.read(path)


def test_an_imported_trace_is_of_calls_without_times(tmp_path):
    path = tmp_path / "trace.log"
    path.write_text(line("AllGather", LAYER) * 3 + line("Recv", 8) + line("AllReduce", 4, 4))
    found = importers.read(path)
    (sample,) = found.samples
    assert sample.case.op == Collective(kind="all_gather", size_bytes=LAYER * 4 * 2, group_size=4)
    assert (sample.status, sample.metrics) == ("skipped", {"calls": 3.0})
    assert found.warnings == ("2 calls left out: 1 of receive; 1 of all_reduce of int64",)


def test_an_imported_trace_that_hides_its_ranks_is_of_the_clusters_devices():
    eight = Cluster(
        name="eight",
        num_hosts=1,
        num_devices_per_host=8,
        device=Device(name="MI300X", kind="cuda", memory_bytes=1),
        tiers=(Tier(name="unknown", num_devices=8),),
    )
    found = importers.read(TRACE, eight)
    assert {sample.case.op.size_bytes for sample in found.samples} == {1_711_308_800}
    assert any("taken as 8, the devices of the cluster" in text for text in found.warnings)


def test_without_a_cluster_a_trace_that_hides_its_ranks_has_those_that_made_calls():
    """Processes 86092 and 86088: a gather of 2 times 106,956,800 bf16."""
    found = importers.read(TRACE)
    assert found.world_size == 2
    assert {sample.case.op.size_bytes for sample in found.samples} == {427_827_200}
    assert any("taken as 2, so many processes made calls" in text for text in found.warnings)


def test_a_trace_that_hides_its_ranks_has_those_of_its_communicators(tmp_path):
    """``nranks`` of NCCL's lines of INIT, by communicator; where it is cut off, of the largest."""
    init = "host:77:99 [0] NCCL INFO ncclCommInitRank comm {} rank 0 nranks {} cudaDev 0 busId 7000"
    whole = line("AllGather", 100).replace("[nranks=4] ", "")
    path = tmp_path / "trace.log"
    path.write_text(
        init.format("0x55d0", 2) + " - Init COMPLETE\n" + init.format("0x66", 16) + "\n" + whole
    )
    found = importers.read(path)
    assert [sample.case.op.group_size for sample in found.samples] == [2]
    assert (found.world_size, found.warnings) == (16, ())
    path.write_text(path.read_text().replace("comm 0x55d0 stream", "com"))
    found = importers.read(path)
    assert [sample.case.op.group_size for sample in found.samples] == [16]
    assert "taken as 16, the largest communicator in the log" in found.warnings[0]


def test_a_trace_of_one_process_that_hides_its_ranks_is_refused(tmp_path):
    path = tmp_path / "one.log"
    path.write_text(TRACE.read_text().splitlines()[0])
    with pytest.raises(ValueError, match=r"one\.log: does not say how many ranks"):
        importers.read(path)


def test_a_trace_becomes_a_run_without_a_cluster_file(tmp_path):
    path = tmp_path / "trace.log"
    path.write_text(line("AllGather", LAYER, ranks=8))
    (run_dir,) = import_files(path, runs=tmp_path / "runs")
    info, samples, _ = store.load(run_dir)
    assert (info.world_size, info.cluster.num_devices, len(samples)) == (8, 8, 1)
    assert info.cluster.device.name == "unknown" and "not known" in info.cluster.notes[0]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_trace_of_zero3_is_as_planned(microbatches):
    log = step_of_zero3(microbatches) * STEPS
    found = check(plan(num_microbatches=microbatches), *[log] * 4)
    assert found.agrees and set(verdicts(found).values()) == {"as planned"}
    layers = next(one for one in found.lines if one.elements == LAYER)
    assert layers.planned == 8 * microbatches and "4 units" in layers.units
    assert layers.traced == (8 * microbatches * STEPS,) * 4


@pytest.mark.parametrize(
    ("zero", "step"),
    [
        # one gather of each unit a step; 2 microbatches: zero 2 reduces twice, zero 1 once
        (2, line("AllGather", LAYER) * 4 + line("AllGather", ROOT)
         + (line("ReduceScatter", LAYER, 7) * 4 + line("ReduceScatter", ROOT, 7)) * 2),
        (1, line("AllGather", LAYER) * 4 + line("AllGather", ROOT)
         + line("ReduceScatter", LAYER, 7) * 4 + line("ReduceScatter", ROOT, 7)),
        # copies of one shard: whole units reduced once; a group of one rank moves nothing
        (0, line("AllReduce", LAYER * 4, 7) * 4 + line("AllReduce", ROOT * 4, 7)
         + line("AllGather", LAYER * 4, ranks=1)),
    ],
)  # fmt: skip
def test_traces_of_the_other_zeros_are_as_planned(zero, step):
    log = (step + line("AllReduce", 1, 7)) * STEPS
    assert check(plan(zero=zero, num_microbatches=2), *[log] * 4).agrees


def test_shards_and_replicas_are_told_apart():
    # two replicas of two shards: gathered and scattered among 2, halves all-reduced among 2
    step = line("AllGather", LAYER * 2, ranks=2) * 4 + line("AllGather", ROOT * 2, ranks=2)
    for kind in ("ReduceScatter", "AllReduce"):
        step += line(kind, LAYER * 2, 7, ranks=2) * 4 + line(kind, ROOT * 2, 7, ranks=2)
    log = (step + line("AllReduce", 1, 7)) * STEPS
    assert check(plan(zero=2, replicas=2), *[log] * 4).agrees
    assert not check(plan(zero=2), *[log] * 4).agrees


def test_a_missing_call_and_one_of_another_size_are_found():
    good = step_of_zero3() * STEPS
    lost = good.replace(line("ReduceScatter", ROOT, 7, op=4), "", 1)
    found = check(plan(), good, lost, good, good)
    assert found.agrees is False
    assert verdicts(found)["reduce_scatter", ROOT] == "too few"
    assert [v for v in verdicts(found).values() if v != "as planned"] == ["too few"]

    other = good.replace(f"count {LAYER} ", f"count {LAYER - 1024} ")  # norms forgotten
    found = check(plan(), *[other] * 4)
    assert verdicts(found)["all_gather", LAYER] == "missing"
    assert verdicts(found)["all_gather", LAYER - 1024] == "not planned"

    once = good.replace(f"count {LAYER} ", f"count {LAYER - 1} ", 1)
    found = check(plan(), once, good, good, good)
    assert verdicts(found)["all_gather", LAYER] == "too few"
    assert verdicts(found)["all_gather", LAYER - 1] == "outside the steps"
    assert found.agrees is False


def test_a_call_too_many_and_one_before_the_steps_are_told_apart():
    good = step_of_zero3() * STEPS
    assert check(plan(), *[line("Broadcast", 7) + good] * 4).agrees
    found = check(plan(), *[good + line("AllReduce", 1, 7)] * 4)
    assert verdicts(found)["all_reduce", 1] == "too many"


def test_other_axes_are_listed_and_not_judged():
    text = line("AllReduce", 4096) * STEPS
    found = check(plan(dp=2, tp=2), *[text] * 4)
    assert found.agrees is None and found.lines[0].verdict == "not judged"
    assert "tensor parallelism" in found.notes[0]


def test_the_table_shows_plan_and_trace_side_by_side(capsys):
    good = step_of_zero3() * STEPS
    lost = good.replace(line("ReduceScatter", ROOT, 7, op=4), "", 1)
    table.write(show.trace(check(plan(), good, lost, good, good), "title"), sys.stdout)
    shown = capsys.readouterr().out
    row = next(text for text in shown.splitlines() if "too few" in text)
    assert row.split() == [
        "root",
        "reduce_scatter",
        "fp32",
        "4",
        "524,800",
        "8.40",
        "MB",
        "1",
        "0.8",
        "–",
        "1",
        "too",
        "few",
    ]
    assert "NOT as planned" in shown


def test_a_run_leaves_its_check_and_logs_without_the_hosts_name(tmp_path):
    variables = verb.environment(tmp_path)
    assert variables["NCCL_DEBUG_SUBSYS"] == "COLL"
    assert Path(variables["NCCL_DEBUG_FILE"]) == tmp_path / "nccl" / "rank-{rank}.log"
    for rank in range(4):
        noise = "host:77:99 [0] NCCL WARN something at host\n"
        (tmp_path / "nccl" / f"rank-{rank}.log").write_text(noise + step_of_zero3() * STEPS)
    verb.keep_calls(tmp_path)
    assert verb.write_check(tmp_path, plan(), STEPS).agrees
    assert verb.read_check(tmp_path).agrees
    assert json.loads((tmp_path / verb.CHECK).read_text())["steps"] == STEPS
    kept = (tmp_path / "nccl" / "rank-3.log").read_text()
    assert "host" not in kept and len(nccl_trace.calls(kept)) == len(
        nccl_trace.calls(step_of_zero3() * STEPS)
    )


def test_ranks_without_logs_do_not_agree(tmp_path):
    verb.environment(tmp_path)
    found = verb.write_check(tmp_path, plan(), STEPS)
    assert found.agrees is False and set(verdicts(found).values()) == {"missing"}


def test_there_is_no_trace_on_cpus_beside_a_check_or_under_a_launcher(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="--nccl-trace needs GPUs: gloo writes no trace"):
        verb.check_possible(CPUS, check=False)
    with pytest.raises(ValueError, match="run them separately"):
        verb.check_possible(known.CLUSTER, check=True)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="without torchrun or srun"):
        verb.check_possible(known.CLUSTER, check=False)
    store.write(tmp_path / "plan.json", plan(cluster=CPUS))
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match="gloo writes no trace"):
        run(tmp_path / "plan.json", nccl_trace=True, dry_run=True)


# --- measure import --model, --plan: traces of other programs ---

# known.MODEL over tp 2 and data ranks 2: matrices and the biases of qkv and up halved, then all
# halved again; positions, norms and the other biases are whole on both tp ranks
TP_LAYER = ((3072 + 4096) * 1025 // 2 + (1024 + 4096) * 1024 // 2 + 2 * 1024 + 4 * 1024) // 2
TP_ROOT = (1024 * 1024 // 2 + 1024 * 1024 + 2 * 1024) // 2
SENT = 2 * 512 * 1024  # activations of 2 sequences of 512 tokens


def call(*words):
    """The exit code of ``meshwise WORDS``."""
    with pytest.raises(SystemExit) as ended:
        app.main(list(words))
    return ended.value.code


def imported(tmp_path, capsys, *logs, model=known.MODEL, **options):
    """Exit code, check and text of ``measure import`` of these ranks' logs."""
    if "plan" not in options:
        options["model"] = msgspec.json.encode(model).decode()
    paths = [tmp_path / f"rank{rank}.log" for rank in range(len(logs))]
    for path, log in zip(paths, logs, strict=True):
        path.write_text(log)
    words = ["measure", "import", *map(str, paths), "--runs", str(tmp_path / "runs")]
    for name, value in options.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words += [f"--{name.replace('_', '-')}", text]
    code = call(*words)
    shown = capsys.readouterr()
    if code:
        return code, None, shown.err
    assert call(*words, "--json") == 0
    found = msgspec.convert(json.loads(capsys.readouterr().out)["check"], TraceCheck)
    return code, found, " ".join(shown.out.split())


def test_a_training_by_fsdp2_is_found_in_its_trace_with_its_number_of_steps(tmp_path, capsys):
    """Broadcasts before the steps do not matter."""
    log = line("Broadcast", 77) + step_of_zero3() * STEPS
    code, found, shown = imported(tmp_path, capsys, *[log] * 4)
    assert (code, found.agrees, found.steps) == (0, True, STEPS)
    assert f"The trace of {STEPS} steps is as planned." in shown
    gathered = next(one for one in found.lines if one.elements == LAYER and "gather" in one.kind)
    assert (gathered.planned, gathered.size_bytes) == (8, LAYER * 4 * 2)
    assert gathered.traced == (8 * STEPS,) * 4
    # a step's all-gathers: 8 layers and the root, in bf16
    assert f"all_gather 4 {(8 * LAYER + ROOT) * 8 / 1e6:.0f} MB" in shown


def test_ranks_in_one_log_are_told_apart_by_host_process_and_device(tmp_path, capsys):
    log = step_of_zero3() * STEPS
    others = [
        log.replace(*words) for words in (("host:", "node:"), (":77:", ":78:"), ("[0]", "[1]"))
    ]
    _, found, _ = imported(tmp_path, capsys, "".join([log, *others]))
    assert (found.agrees, found.steps, len(found.lines[0].traced)) == (True, STEPS, 4)


def test_a_trace_of_fewer_layers_says_of_what_there_are_how_many(tmp_path, capsys):
    """Two layers more would be gathered twice and reduced once more; the rest agrees."""
    deeper = msgspec.structs.replace(known.MODEL, layers=6)
    code, found, shown = imported(tmp_path, capsys, step_of_zero3() * STEPS, model=deeper)
    assert (code, found.agrees, found.steps) == (0, False, STEPS)
    assert verdicts(found) == {
        ("all_gather", LAYER): "too few",
        ("reduce_scatter", LAYER): "too few",
        ("all_gather", ROOT): "as planned",
        ("reduce_scatter", ROOT): "as planned",
        ("all_reduce", 1): "as planned",
    }
    said = "all_gather bf16 of 25.2 MB, 4 ranks: the trace has 8 a step, planned are 12."
    assert said in shown


def test_gradients_in_another_dtype_are_other_messages(tmp_path, capsys):
    log = step_of_zero3().replace("datatype 7 op 4", "datatype 9 op 4") * STEPS
    _, found, _ = imported(tmp_path, capsys, log)
    said = {(one.kind, one.dtype, one.verdict) for one in found.lines if one.elements == LAYER}
    assert said == {
        ("all_gather", "bf16", "as planned"),
        ("reduce_scatter", "fp32", "missing"),
        ("reduce_scatter", "bf16", "not planned"),
    }
    _, found, _ = imported(tmp_path, capsys, log, reduce_dtype="bf16")
    assert found.agrees


def test_microbatches_look_like_steps_but_for_the_gradient_norm(tmp_path, capsys):
    log = step_of_zero3(microbatches=3) * STEPS
    _, found, _ = imported(tmp_path, capsys, log)
    assert (found.steps, found.agrees) == (3 * STEPS, False)
    assert verdicts(found)["all_reduce", 1] == "too few"
    _, found, _ = imported(tmp_path, capsys, log, steps=STEPS)
    assert verdicts(found)["all_gather", LAYER] == "too many"
    layout = {"dp": 4, "zero": 3, "num_microbatches": 3}
    _, found, _ = imported(tmp_path, capsys, log, layout=layout)
    assert (found.steps, found.agrees) == (STEPS, True)


def test_tensor_parallelism_as_megatron_sends_it(tmp_path, capsys):
    """Activations are summed twice in each layer forward and twice backward, once more behind the
    embedding and before the head; three numbers a token for the loss. ZeRO 1 sends the rest."""
    step = line("AllReduce", SENT, ranks=2) * (4 * 4 + 2)
    step += line("AllReduce", 2 * 512, 7, ranks=2) * 3
    for kind, dtype in (("AllGather", 9), ("ReduceScatter", 7)):
        step += line(kind, TP_LAYER, dtype, ranks=2) * 4 + line(kind, TP_ROOT, dtype, ranks=2)
    log = (step + line("AllReduce", 1, 7)) * STEPS
    layout = {"dp": 2, "tp": 2, "zero": 1, "microbatch_size": 2}
    _, found, _ = imported(tmp_path, capsys, *[log] * 4, layout=layout, seq_len=512)
    assert (found.steps, found.agrees) == (STEPS, True), found.lines
    _, found, _ = imported(tmp_path, capsys, *[log] * 4, layout=layout, seq_len=1024)
    assert verdicts(found)["all_reduce", SENT] == "not planned"
    assert verdicts(found)["all_reduce", 2 * SENT] == "missing"


def test_ranks_of_a_pipeline_count_by_their_mean(tmp_path, capsys):
    """Two stages of two layers, each on two data ranks with ZeRO 1, two microbatches: activations
    go forward from the first stage, gradients back from the second. Both hold the embedding, the
    first the positions, the second the last norm."""
    roots = 2 * 1024 * 1024 // 2, (1024 * 1024 + 2 * 1024) // 2
    logs = []
    for root in roots:
        step = line("Send", SENT, ranks=4) * 2 + line("Recv", SENT, ranks=4) * 2
        for kind, dtype in (("AllGather", 9), ("ReduceScatter", 7)):
            step += line(kind, 2 * LAYER, dtype, ranks=2) * 2 + line(kind, root, dtype, ranks=2)
        logs += [(step + line("AllReduce", 1, 7)) * STEPS] * 2
    layout = Layout(
        pp=2, schedule="1f1b", dp=2, zero=1, microbatch_size=2, num_microbatches=2
    )  # fmt: skip
    made = msgspec.structs.replace(
        known.plan(layout), workload=Workload(global_batch_size=8, seq_len=512)
    )
    store.write(tmp_path / "plan.json", made)
    logs = [line("Broadcast", 7, ranks=2) * 2 + log for log in logs]  # before the steps
    _, found, _ = imported(tmp_path, capsys, *logs, plan=str(tmp_path / "plan.json"))
    assert (found.steps, found.agrees) == (STEPS, True), found.lines
    gathered = {one.elements: one for one in found.lines if one.kind == "all_gather"}
    assert {elements: one.planned for elements, one in gathered.items()} == {
        2 * LAYER: 2, roots[0]: 0.5, roots[1]: 0.5
    }  # fmt: skip
    assert gathered[2 * LAYER].units == "layers.0 to layers.3 (4 units)"
    _, found, shown = imported(tmp_path, capsys, *logs[:2], plan=str(tmp_path / "plan.json"))
    assert not found.agrees and "It needs 4 ranks' logs; there are 2." in shown


def test_the_published_lines_are_of_a_layer_of_llama_3_70b(tmp_path, capsys):
    """Cut off before the number of ranks, which the layout says."""
    layout = {"dp": 8, "zero": 3}
    given = {"layout": layout, "model": catalogue.find("llama-3-70b"), "reduce_dtype": "bf16"}
    _, found, _ = imported(tmp_path, capsys, TRACE.read_text(), **given)
    said = {one.kind: one for one in found.lines if one.elements == 106_956_800}
    assert {kind: (one.planned, sum(one.traced)) for kind, one in said.items()} == {
        "all_gather": (160, 1), "reduce_scatter": (80, 1),
    }  # fmt: skip
    assert "not planned" not in verdicts(found).values()


def test_of_a_log_of_times_it_is_said_which_messages_it_has(tmp_path, capsys):
    """A table of nccl-tests whose last size is made that of a layer, in fp32."""
    log = GATHERS.read_text()
    log = log.replace("4294967296     268435456", f"{LAYER * 4 * 4} {LAYER}")
    _, found, shown = imported(tmp_path, capsys, log, param_dtype="fp32")
    said = verdicts(found)
    assert said.pop(("all_gather", LAYER)) == "as planned"
    assert {kind: said[kind] for kind in said if said[kind] == "missing"}.keys() == {
        ("all_gather", ROOT), ("reduce_scatter", LAYER), ("reduce_scatter", ROOT), ("all_reduce", 1)
    }  # fmt: skip
    assert sum(verdict == "not planned" for verdict in said.values()) == 11  # the other sizes
    assert {one.planned for one in found.lines} == {0, 1} and "each counts 1" in shown
    code, _, said = imported(tmp_path, capsys, log, step_of_zero3())
    assert code == 2 and "traces of calls beside logs of times" in said


@pytest.mark.parametrize(
    ("log", "options", "message"),
    [
        (line("AllGather", 8), {"layout": {"tp": 3}}, "tp = 3: must divide"),
        (line("AllGather", 8), {"steps": 0}, "--steps = 0: must be >= 1"),
        (TRACE.read_text(), {}, "layout: the trace does not say how many ranks there were; give"),
        ("some text", {}, "rank0.log: not a result that measure import can read"),
        (line("Recv", 8), {}, "rank0.log: no call has a counterpart here"),
        (line("AllGather", 8), {"plan": "none.json"}, "none.json does not exist; `meshwise plan`"),
        (line("AllGather", 8), {"plan": "x.json", "seq_len": 8}, "--seq-len: the plan says it"),
    ],
)
def test_what_cannot_be_compared_is_refused_and_nothing_is_stored(
    tmp_path, capsys, log, options, message
):
    code, _, said = imported(tmp_path, capsys, log, **options)
    assert code == 2 and message in said
    assert not (tmp_path / "runs").exists()


def test_a_number_of_steps_alone_is_refused(tmp_path, capsys):
    (tmp_path / "a.log").write_text(line("AllGather", 8))
    assert call("measure", "import", str(tmp_path / "a.log"), "--steps", "3") == 2
    assert "--steps: of which training? give model or plan" in capsys.readouterr().err
