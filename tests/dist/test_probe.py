"""Sweeps: the right samples on disk, whatever goes wrong on the way; right collectives.

This file is also the script that runs as a rank: ``python test_probe.py <request.json>``.
"""

import os
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from meshwise import ranks as ranks_module
from meshwise import store
from meshwise.launch import RanksFailed, local, worker
from meshwise.models import saved_block_bytes
from meshwise.probe import collectives, sweep
from meshwise.ranks import Ranks
from meshwise.spec import (
    Attention,
    Block,
    Case,
    Cluster,
    Collective,
    Device,
    Elementwise,
    Gemm,
    Model,
    Op,
    Record,
    Sample,
    Tier,
)

HERE = Path(__file__)
pytestmark = pytest.mark.dist
MODEL = Model(hidden=64, layers=1, heads=4, ffn=256, vocab=128, max_seq_len=32)
GEMM = Gemm(m=64, n=32, k=16, dtype="fp32")
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
ELEMENTS = 16


def attention(**changes: object) -> Attention:
    shape = {"batch": 2, "q_len": 16, "kv_len": 16, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return Attention(**(shape | {"dtype": "fp32"} | changes))


def block(part: str, direction: str, tp: int = 1) -> Block:
    return Block(
        part=part, model=MODEL, microbatch_size=2, seq_len=16, tp=tp, sequence_parallel=tp > 1,
        direction=direction, dtype="fp32",
    )  # fmt: skip


def collective(kind: str, group_size: int, stride: int = 1) -> Collective:
    return Collective(
        kind=kind, size_bytes=4 * ELEMENTS, group_size=group_size, group_stride=stride,
        dtype="fp32",
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
    errand = worker.Errand(
        target=f"{HERE.stem}:{target}",
        request=msgspec.Raw(msgspec.json.encode(request)),
        threads=1,
        timeout_s=20.0,
    )
    local.start(errand, nproc, worker=(str(HERE),))


def sweep_alone(ops: list[Op], run_dir: Path, **options: object) -> list[Sample]:
    request = sweep.SweepRequest(cases=cases_of(ops, 1), run_dir=str(run_dir), **options)
    sweep.measure_ranks(ranks_module.alone(), msgspec.json.encode(request))
    return store.load(run_dir)[1]


# --- targets: what the ranks of a job do ---


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


def communicates_once(ranks: Ranks, request: bytes) -> None:
    """Every collective over every group, on numbers that say where they come from."""
    ops = [collective(kind, *group) for group in GROUPS for kind in KINDS]
    groups = collectives.make_groups(cases_of(ops, 4), ranks.rank, 4, ranks.device)
    found = []
    for op in ops:
        source, result = collectives.allocate(op, ranks.device, seed=0)
        source.copy_(torch.arange(len(source)) + 100.0 * ranks.rank)
        group = groups[op.group_size, op.group_stride]
        collectives.communicate(op, source, result, group)
        found.append(result.tolist())
    folder = msgspec.json.decode(request, type=sweep.SweepRequest).run_dir
    (Path(folder) / f"{ranks.rank}.json").write_bytes(msgspec.json.encode(found))
    sweep.measure_ranks(ranks, request)


# --- the oracle of collectives: numpy, on the data of all ranks of a group ---


def expected(kind: str, group: list[int], at: int) -> np.ndarray:
    n = len(group)
    sent = ELEMENTS // n if kind == "all_gather" else ELEMENTS
    data = np.stack([np.arange(sent) + 100.0 * rank for rank in group])
    if kind == "all_reduce":
        return data.sum(0)
    if kind == "all_gather":
        return data.reshape(-1)
    if kind == "reduce_scatter":
        return np.split(data.sum(0), n)[at]
    if kind == "all_to_all":
        return data.reshape(n, n, -1)[:, at].reshape(-1)
    return data[0] if kind == "broadcast" else data[(at - 1) % n]


def test_four_ranks(tmp_path):
    """Collectives are right, and a sweep over every kind of operation writes its samples."""
    run_dir = new_run(tmp_path, 4)
    ops = [
        GEMM,
        SMALL_COPY,
        block("layer", "forward"),
        *(block(part, way, tp=2) for part in ("layer", "head") for way in WAYS),
        *(collective(kind, 4) for kind in KINDS),
        collective("all_gather", 2, 2),
    ]
    wanted = cases_of(ops, 4)
    start(
        "communicates_once",
        sweep.SweepRequest(cases=wanted, run_dir=str(run_dir)),
        4,
    )
    for rank in range(4):
        replies = iter(msgspec.json.decode((run_dir / f"{rank}.json").read_bytes()))
        for groups in GROUPS.values():
            group = next(group for group in groups if rank in group)
            for kind in KINDS:
                np.testing.assert_array_equal(
                    next(replies), expected(kind, group, group.index(rank)), err_msg=kind
                )
    info, samples, warnings = store.load(run_dir)
    assert (info.status, info.reason, warnings) == ("complete", "", [])
    assert [sample.case for sample in samples] == list(wanted)
    for sample in samples:
        assert (sample.status, sample.case_id) == ("ok", sample.case.id)
        assert len(sample.rank_times_s) == len(sample.before) == len(sample.after) == 4
        assert sample.times_s == tuple(map(max, zip(*sample.rank_times_s, strict=True)))
        if isinstance(sample.case.op, Block):
            # what backward reads, counted on the graph, but for scalars of the loss
            saved = sample.metrics["saved_bytes"]
            assert 0 <= saved - saved_block_bytes(sample.case.op) <= 8


def test_a_killed_rank_loses_nothing_and_resume_repeats_nothing(tmp_path):
    run_dir = new_run(tmp_path, 2)
    wanted = cases_of([GEMM, collective("all_reduce", 2), attention(), SMALL_COPY], 2)
    request = sweep.SweepRequest(cases=wanted, run_dir=str(run_dir))
    with pytest.raises(RanksFailed, match=r"rank 1.*attention b2 s16"):
        start("dies_in_the_attention", request, 2)
    info, samples, _ = store.load(run_dir)
    assert info.status == "running"  # the verb that started the ranks says how it ended
    assert [sample.case for sample in samples] == list(wanted[:2])

    done = tuple(sample.case_id for sample in samples)
    request = msgspec.structs.replace(request, skip=done)
    start("lacks_memory_on_rank_1", request, 2)
    info, samples, _ = store.load(run_dir)
    assert info.status == "complete"
    assert [sample.case for sample in samples] == list(wanted)
    assert len((run_dir / "samples.jsonl").read_text().splitlines()) == len(wanted)
    # out of memory on one rank is out of memory for all, and the sweep went on
    assert [sample.status for sample in samples] == ["ok", "ok", "oom", "ok"]
    assert samples[2].reason == "rank 1: out of memory, for this test"


def test_failures_are_data_and_the_sweep_goes_on(tmp_path):
    wrong = Elementwise(kind="copy", read_bytes=8, write_bytes=4)
    ops = [TOO_LARGE, attention(q_len=8), Gemm(m=8, n=8, k=8, dtype="fp8"), wrong, GEMM]
    found = sweep_alone(ops, new_run(tmp_path, 1))
    assert [sample.status for sample in found] == ["oom", "skipped", "skipped", "error", "ok"]
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
    op = Collective(kind="all_gather", size_bytes=20, group_size=2, dtype="fp32")
    with pytest.raises(ValueError, match="size_bytes = 20: must be a multiple of 8"):
        collectives.allocate(op, torch.device("cpu"), seed=0)


if __name__ == "__main__":
    worker.main(sys.argv[1], package=HERE.stem)
