"""Sweeps: the right samples on disk, whatever goes wrong on the way.

This file is also the script that runs as a rank: ``python test_probe.py <request.json>``.
"""

import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from meshwise import ranks as ranks_module
from meshwise import store, timing
from meshwise.launch import RanksFailed, local, order, worker
from meshwise.models import saved_block_bytes
from meshwise.probe import collectives, overlap, sweep
from meshwise.probe.cases import effort
from meshwise.ranks import Ranks
from meshwise.spec import (
    Attention,
    Block,
    Case,
    Cluster,
    Collective,
    Convolution,
    Decoder,
    Device,
    Elementwise,
    Experts,
    Gemm,
    LanguageModel,
    Model,
    Op,
    Overlap,
    Record,
    Sample,
    Tier,
    WideResNet,
)

HERE = Path(__file__)
pytestmark = pytest.mark.dist
MODEL = Model(hidden=64, layers=1, heads=4, ffn=256, vocab=128, max_seq_len=32)
LLAMA = Decoder(
    hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=128, max_seq_len=32
)
EXPERTS = msgspec.structs.replace(LLAMA, experts=Experts(num_experts=4, top_k=2, ffn=32))
IMAGES = WideResNet(blocks=(2, 2), channels=8, width_factor=2, image_size=32, num_classes=8)
GEMM = Gemm(m=64, n=32, k=16, dtype="fp32")
CONVOLUTION = Convolution(
    batch=1, in_channels=4, out_channels=4, height=8, width=8, kernel=3, product="wgrad",
    dtype="fp32",
)  # fmt: skip
SMALL_COPY = Elementwise(kind="copy", read_bytes=4096, write_bytes=4096)
TOO_LARGE = Elementwise(kind="copy", read_bytes=2**50, write_bytes=2**50)
WAYS = ("forward", "backward")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
# by hand: (size, stride) -> the groups of four ranks
GROUPS = {
    (2, 1): [[0, 1], [2, 3]],
    (2, 2): [[0, 2], [1, 3]],
    (4, 1): [[0, 1, 2, 3]],
}


def attention(**changes: object) -> Attention:
    shape = {"batch": 2, "q_len": 16, "kv_len": 16, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return Attention(**(shape | {"dtype": "fp32"} | changes))


def block(part: str, direction: str, tp: int = 1, model: LanguageModel = MODEL) -> Block:
    return Block(
        part=part, model=model, microbatch_size=2, seq_len=16, tp=tp, sequence_parallel=tp > 1,
        direction=direction, dtype="fp32",
    )  # fmt: skip


def shared(model: LanguageModel, form: str = "", **degrees: int) -> Block:
    return Block(
        part="layer", form=form, model=model, microbatch_size=2, seq_len=16, direction="backward",
        dtype="fp32", **degrees,
    )  # fmt: skip


DIFFERENT = msgspec.structs.replace(
    LLAMA,
    layers=2,
    window=8,
    full_layers=(1,),
    experts=Experts(num_experts=4, top_k=2, ffn=32, first_dense=1),
)
SHARED_BLOCKS = (
    shared(MODEL, cp=2),
    shared(LLAMA, cp=4),
    shared(LLAMA, cp=2, tp=2),
    shared(EXPERTS, ep=2),
    shared(EXPERTS, ep=4),
    shared(EXPERTS, cp=2, ep=4),
    shared(DIFFERENT, "dense w8", cp=2),
    shared(DIFFERENT, "experts", ep=2),
)


def of_images(form: str, tp: int) -> Block:
    return Block(
        part="layer", form=form, model=IMAGES, microbatch_size=2, seq_len=1, tp=tp,
        direction="backward", dtype="fp32",
    )  # fmt: skip


def collective(kind: str, group_size: int, stride: int = 1, **rest: object) -> Collective:
    return Collective(
        kind=kind, size_bytes=64, group_size=group_size, group_stride=stride, dtype="fp32",
        in_place=kind in ("all_reduce", "broadcast"), **rest,
    )  # fmt: skip


def cases_of(ops: list[Op], world_size: int) -> tuple[Case, ...]:
    return tuple(Case(op=op, world_size=world_size) for op in ops)


def new_run(folder: Path, world_size: int) -> Path:
    cluster = Cluster(
        name="test",
        num_hosts=1,
        num_devices_per_host=world_size,
        device=Device(name="cpu", kind="cpu", memory_bytes=2**33),
        tiers=(Tier(name="host", num_devices=world_size),),
    )
    return store.create(
        folder, verb="measure", slug="test", cluster=cluster, world_size=world_size,
        command=("test",), provenance={},
    )  # fmt: skip


def start(target: str, request: Record, nproc: int) -> None:
    told = order.WorkOrder(
        target=f"{HERE.stem}:{target}",
        request=msgspec.Raw(msgspec.json.encode(request)),
        threads=1,
    )
    local.start(told, nproc, worker=(str(HERE),))


def sweep_alone(ops: list[Op], run_dir: Path, **options: object) -> list[Sample]:
    request = sweep.SweepRequest(cases=cases_of(ops, 1), run_dir=str(run_dir), **options)
    sweep.measure_ranks(ranks_module.alone(), msgspec.json.encode(request))
    return store.load(run_dir)[1]


# --- targets: what the ranks of a job do ---


def sweeps(ranks: Ranks, request: bytes) -> None:
    sweep.measure_ranks(ranks, request)


def dies_in_the_attention(ranks: Ranks, request: bytes) -> None:
    build = sweep.Bench.build

    def fatal(bench: sweep.Bench, case: Case) -> sweep.Work:
        if ranks.rank == 1 and isinstance(case.op, Attention):
            os.kill(os.getpid(), signal.SIGKILL)
        return build(bench, case)

    sweep.Bench.build = fatal
    sweep.measure_ranks(ranks, request)


def lacks_memory_on_rank_1(ranks: Ranks, request: bytes) -> None:
    build = sweep.Bench.build

    def lacking(bench: sweep.Bench, case: Case) -> sweep.Work:
        if ranks.rank == 1 and isinstance(case.op, Attention):
            raise torch.OutOfMemoryError("out of memory, for this test")
        return build(bench, case)

    sweep.Bench.build = lacking
    sweep.measure_ranks(ranks, request)


def scrambles(ranks: Ranks, request: bytes) -> None:
    """Every element of every result is wrong, on all ranks but for broadcasts on rank 1 alone."""
    communicate = collectives.communicate

    def scrambled(op, buffers, party):
        communicate(op, buffers, party)
        if op.kind != "broadcast" or ranks.rank == 1:
            buffers.result.add_(3)

    collectives.communicate = scrambled
    sweep.measure_ranks(ranks, request)


def repeats_nothing(ranks: Ranks, request: bytes) -> None:
    """Calls in a row, as a replay that does nothing, leave what was there."""
    timing._repeat = lambda call, times: None
    sweep.measure_ranks(ranks, request)


def scrambles_beside(ranks: Ranks, request: bytes) -> None:
    """Right alone, wrong while other work runs."""
    communicate, start, state = collectives.communicate, overlap._Others.start, []

    def started(others):
        state.append(others)
        start(others)

    def scrambled(op, buffers, party):
        communicate(op, buffers, party)
        if state:
            buffers.result.add_(3)

    collectives.communicate, overlap._Others.start = scrambled, started
    sweep.measure_ranks(ranks, request)


def test_users_may_count_the_timed_and_the_untimed_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[int]()
    warm_up = sweep._warm_up

    def counted(work: sweep.Work, bench: sweep.Bench) -> None:
        calls = tuple(lambda i=i: made.append(i) for i in (0, 1))
        warm_up(work._replace(calls=calls), bench)

    monkeypatch.setattr(sweep, "_warm_up", counted)
    (sample,) = sweep_alone([GEMM], new_run(tmp_path, 1), iterations=107, warmup=23)
    assert (len(sample.times_s), len(sample.rank_times_s[0]), len(made)) == (107, 107, 23)
    assert made[:4] == [0, 1, 0, 1]


def test_wrong_elements_are_an_error_and_the_sweep_goes_on(tmp_path):
    """Once the sample was ok, with the count among its metrics."""
    run_dir = new_run(tmp_path, 2)
    ops = [*(collective(kind, 2) for kind in KINDS), collective("send", 2, ranks=(0, 1)), GEMM]
    overlapped = Overlap(compute=GEMM, collective=collective("all_gather", 2))
    wanted = cases_of([*ops, overlapped], 2)
    start("scrambles", sweep.SweepRequest(cases=wanted, run_dir=str(run_dir)), 2)
    info, (*found, beside), _ = store.load(run_dir)
    assert (info.status, info.reason) == ("partial", "8 of 9 cases failed: 8 error")
    for sample in found[: len(KINDS)]:
        assert (sample.status, sample.times_s) == ("error", ()), sample.case.op
        op = sample.case.op
        each = 16 // (2 if op.kind == "reduce_scatter" else 1)  # elements of a rank's result
        if op.kind == "broadcast":
            assert (sample.reason, sample.metrics["wrong"]) == ("wrong elements: 16 on rank 1", 16)
        else:
            told = f"wrong elements: {each} on rank 0, {each} on rank 1"
            assert (sample.reason, sample.metrics["wrong"]) == (told, 2 * each)
    sent, product = found[len(KINDS) :]
    assert (sent.status, sent.reason) == ("error", "wrong elements: 16 on rank 1")
    assert (product.status, beside.status) == ("ok", "error")


def test_what_is_timed_is_checked_also_where_one_call_was_right(tmp_path):
    run_dir = new_run(tmp_path, 2)
    regimes = ("warm", "pipelined")
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
    wanted = tuple(
        Case(op=collective(kind, 2), regime=regime, world_size=2)
        for kind in kinds
        for regime in regimes
    )
    start("repeats_nothing", sweep.SweepRequest(cases=wanted, run_dir=str(run_dir)), 2)
    for sample in store.load(run_dir)[1]:
        assert sample.metrics["wrong"] == 0
        if sample.case.regime == "pipelined":
            assert sample.status == "error"
            assert "wrong elements after 20 calls, as timed: " in sample.reason
            assert sample.metrics["wrong_as_timed"] > 0
        else:
            assert sample.status == "ok"


def test_a_collective_that_is_wrong_beside_other_work_only_is_seen(tmp_path):
    run_dir = new_run(tmp_path, 2)
    op = Overlap(compute=GEMM, collective=collective("all_reduce", 2))
    request = sweep.SweepRequest(cases=cases_of([op], 2), run_dir=str(run_dir))
    start("scrambles_beside", request, 2)
    (sample,) = store.load(run_dir)[1]
    assert (sample.status, sample.metrics["wrong"]) == ("error", 0)
    assert sample.metrics["wrong_as_timed"] == 32


def test_four_ranks(tmp_path):
    """A sweep over every kind of operation and regime writes its samples."""
    run_dir = new_run(tmp_path, 4)
    ops = [
        GEMM,
        SMALL_COPY,
        block("layer", "forward"),
        *(block(part, way, tp=2) for part in ("layer", "head") for way in WAYS),
        *(block(part, "backward", tp=2, model=LLAMA) for part in ("layer", "head")),
        *(block("layer", way, tp, EXPERTS) for way in WAYS for tp in (1, 2)),
        *SHARED_BLOCKS,
        block("head", "backward", model=DIFFERENT),
        *(of_images(form, tp) for form in ("0.rest", "1.first") for tp in (1, 2)),
        *(collective(kind, 4) for kind in KINDS),
        collective("all_gather", 2, 2),
        collective("all_to_all", 2, ranks=(0, 2)),  # while 1 and 3 are idle
        Overlap(compute=GEMM, collective=collective("all_gather", 4)),
    ]
    regimes = ("blocking", "pipelined", "sustained", "graph")
    wanted = cases_of(ops, 4)
    wanted += tuple(Case(op=collective("send_recv", 4), regime=r, world_size=4) for r in regimes)
    request = sweep.SweepRequest(cases=wanted, run_dir=str(run_dir), sustain_s=0.1)
    start("sweeps", request, 4)
    info, samples, warnings = store.load(run_dir)
    assert (info.status, info.reason, warnings) == ("complete", "", [])
    assert not (run_dir / sweep.CURRENT).exists()
    assert [sample.case for sample in samples] == list(wanted)
    *samples, captured = samples
    assert (captured.status, captured.reason) == ("skipped", "graph replay needs a CUDA device")
    for sample in samples:
        assert (sample.status, sample.case_id) == ("ok", sample.case.id)
        assert len(sample.rank_times_s) == len(sample.before) == len(sample.after) == 4
        assert sample.times_s == tuple(map(max, zip(*sample.rank_times_s, strict=True)))
        if isinstance(sample.case.op, Block):
            # what backward reads, counted on the graph, but for scalars of the loss and for
            # rotary tables, which all layers share; of experts the graph counts the groups' ends,
            # 4 x int32, which autograd keeps in none of the storages here, and not two places of
            # each row in an exchange (int64)
            of = sample.case.op
            tables = 2 * of.seq_len * LLAMA.head_dim // 2 * 4 if of.part == "layer" else 0
            more = sample.metrics["saved_bytes"] - saved_block_bytes(of, "cpu")
            more -= tables if isinstance(of.model, Decoder) else 0
            more -= 16 * 2 * of.microbatch_size * of.seq_len // of.cp if of.ep > 1 else 0
            assert 0 <= more <= 8 or (more == -16 and of.model in (EXPERTS, DIFFERENT))
        if isinstance(sample.case.op, Collective):
            assert sample.metrics["wrong"] == 0
            assert sample.metrics.get("wrong_as_timed", 0) == 0
            assert ("wrong_as_timed" in sample.metrics) == (sample.case.regime == "pipelined")
            calls = sample.case.regime in ("warm", "blocking")
            # a single call varies; with barriers between calls, on a busy machine, time may be over
            is_over = sum(sample.times_s) >= effort.max_seconds(sample.case) / 4
            assert not calls or is_over or len(sample.times_s) >= 20
        if isinstance(sample.case.op, Overlap):
            assert sample.metrics["compute_slowdown"] > 0
            assert sample.metrics["wrong"] == sample.metrics["wrong_as_timed"] == 0


def test_recomputed_layers_save_less(tmp_path):
    """Two ranks share the layer. Full recomputation keeps its input alone; what is computed again
    adds to the backward's time, so the sample is of one case with it."""
    run_dir = new_run(tmp_path, 2)
    plain = block("layer", "backward", tp=2)
    words = ("none", "selective", "full")
    ops = [msgspec.structs.replace(plain, recompute=word) for word in words]
    start("sweeps", sweep.SweepRequest(cases=cases_of(ops, 2), run_dir=str(run_dir)), 2)
    _, samples, _ = store.load(run_dir)
    assert [one.status for one in samples] == ["ok"] * 3
    none, selective, full = (one.metrics["saved_bytes"] for one in samples)
    assert full == 2 * 16 * MODEL.hidden * 4 / 2  # rows, positions, width, fp32; over two ranks
    assert full < selective < none


def test_layers_of_images_of_every_shape(tmp_path):
    """What autograd keeps is what the graph counts, to the byte."""
    run_dir = new_run(tmp_path, 1)
    ops = [of_images(form, 1) for form in ("0.first", "0.rest", "1.first", "1.rest")]
    for sample in sweep_alone(ops, run_dir):
        assert sample.metrics["saved_bytes"] == saved_block_bytes(sample.case.op, "cpu")


def test_a_killed_rank_loses_nothing_and_resume_repeats_nothing(tmp_path):
    run_dir = new_run(tmp_path, 2)
    wanted = cases_of([GEMM, collective("all_reduce", 2), attention(), SMALL_COPY], 2)
    request = sweep.SweepRequest(cases=wanted, run_dir=str(run_dir))
    with pytest.raises(RanksFailed, match=r"rank 1.*attention b2 s16"):
        start("dies_in_the_attention", request, 2)
    info, samples, _ = store.load(run_dir)
    assert info.status == "running"  # the verb that started the ranks says how it ended
    assert [sample.case for sample in samples] == list(wanted[:2])
    assert store.read(run_dir / sweep.CURRENT, Case) == wanted[2]

    done = tuple(sample.case_id for sample in samples)
    request = msgspec.structs.replace(request, skip=done)
    start("lacks_memory_on_rank_1", request, 2)
    info, samples, _ = store.load(run_dir)
    assert (info.status, info.reason) == ("partial", "1 of 4 cases failed: 1 oom")
    assert not (run_dir / sweep.CURRENT).exists()
    assert [sample.case for sample in samples] == list(wanted)
    assert len((run_dir / "samples.jsonl").read_text().splitlines()) == len(wanted)
    # out of memory on one rank is out of memory for all, and the sweep went on
    assert [sample.status for sample in samples] == ["ok", "ok", "oom", "ok"]
    assert samples[2].reason == "rank 1: out of memory, for this test"


def test_failures_are_data_and_the_sweep_goes_on(tmp_path):
    wrong = Elementwise(kind="copy", read_bytes=8, write_bytes=4)
    unaligned = Gemm(m=8, n=8, k=8, dtype="fp8", scaling="tensor")
    ops = [TOO_LARGE, attention(q_len=8), unaligned, wrong, GEMM, CONVOLUTION]
    found = sweep_alone(ops, new_run(tmp_path, 1))
    assert [sample.status for sample in found] == ["oom", "skipped", "skipped", "error", "ok", "ok"]
    assert "allocate memory" in found[0].reason
    assert "q_len != kv_len" in found[1].reason
    assert "fp8" in found[2].reason
    assert "a copy writes what it reads" in found[3].reason


def test_a_block_too_large_leaves_room_for_the_next(tmp_path):
    huge = Model(hidden=2**26, layers=1, heads=1, ffn=2**26, vocab=128, max_seq_len=32)
    ops = [
        block("layer", "forward"),
        msgspec.structs.replace(block("layer", "forward"), model=huge),
        block("layer", "backward"),
    ]
    found = sweep_alone(ops, new_run(tmp_path, 1))
    assert [sample.status for sample in found] == ["ok", "oom", "ok"]


def test_what_the_budget_leaves_is_counted_and_resumed(tmp_path):
    run_dir = new_run(tmp_path, 1)
    ops: list[Op] = [GEMM, SMALL_COPY, attention(causal=False)]
    first = sweep_alone(ops, run_dir, budget_s=1e-6)
    assert [sample.case.op for sample in first] == [GEMM]
    info = store.load(run_dir)[0]
    assert info.status == "partial"
    assert info.reason == "budget: 2 of 3 cases not measured; --resume continues"

    resumed = sweep_alone(ops, run_dir, skip=(first[0].case_id,))
    assert [sample.case.op for sample in resumed] == ops
    assert (run_dir / "samples.jsonl").read_text().count("\n") == 3
    assert store.load(run_dir)[0].status == "complete"


def test_another_number_of_ranks_is_refused(tmp_path):
    request = sweep.SweepRequest(cases=cases_of([GEMM], 4), run_dir=str(new_run(tmp_path, 1)))
    with pytest.raises(ValueError, match=r"world_size = 4: 1 ranks.*--nproc 4"):
        sweep.measure_ranks(ranks_module.alone(), msgspec.json.encode(request))


def test_groups_that_do_not_tile_are_refused():
    with pytest.raises(ValueError, match=r"group_size = 4.*do not tile 6 ranks"):
        collectives.members(6, 4, 1)
    for (size, stride), groups in GROUPS.items():
        assert collectives.members(4, size, stride) == groups


def test_a_size_that_does_not_divide_is_refused():
    cpu = torch.device("cpu")
    op = Collective(kind="all_gather", size_bytes=20, group_size=2, dtype="fp32")
    with pytest.raises(ValueError, match="size_bytes = 20: must be a multiple of 8"):
        collectives.allocate(op, 0, cpu)
    halves = Collective(
        kind="all_to_all_v", size_bytes=8, group_size=2, dtype="fp32", splits=((4, 2), (4, 4))
    )
    with pytest.raises(ValueError, match=r"splits: must be multiples of 4 bytes \(fp32\)"):
        collectives.allocate(halves, 0, cpu)


def test_cases_that_follow_from_samples_are_measured_in_rounds(tmp_path, monkeypatch):
    """Each round sees all samples so far; the sweep ends when nothing follows."""
    heard = []

    def following(how: str, samples: list[Sample]) -> list[Case]:
        heard.append((how, len(samples)))
        more = {1: [SMALL_COPY, attention()], 3: [block("head", "forward")]}
        return list(cases_of(more.get(len(samples), []), 1))

    monkeypatch.setattr(sweep, "next_cases", following)
    found = sweep_alone([GEMM], run_dir := new_run(tmp_path, 1), follow="bends")
    assert heard == [("bends", 1), ("bends", 3), ("bends", 4)]
    assert [type(sample.case.op) for sample in found] == [Gemm, Elementwise, Attention, Block]
    assert store.load(run_dir)[0].status == "complete"


if __name__ == "__main__":
    worker.main(*sys.argv[1:], package=HERE.stem)
