"""Probes on GPUs: every kind of case, memory by hooks against the allocator, NCCL groups."""

from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

from meshwise import launch, models, store  # noqa: E402
from meshwise import ranks as ranks_module  # noqa: E402
from meshwise.probe import block, sweep, work  # noqa: E402
from meshwise.spec import (  # noqa: E402
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
    Sample,
    Tier,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
MODEL = Model(hidden=512, layers=1, heads=8, ffn=2048, vocab=1024, max_seq_len=256)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


def a_block(part: str, direction: str = "forward", tp: int = 1) -> Block:
    return Block(
        part=part, model=MODEL, microbatch_size=4, seq_len=256, tp=tp, sequence_parallel=tp > 1,
        direction=direction,
    )  # fmt: skip


def new_run(folder: Path, world_size: int) -> Path:
    cluster = Cluster(
        name="test",
        num_hosts=1,
        num_devices_per_host=world_size,
        device=Device(name="gpu", kind="cuda", memory_bytes=2**36),
        tiers=(Tier(name="host", num_devices=world_size),),
    )
    return store.create(
        folder, verb="measure", slug="test", cluster=cluster, world_size=world_size,
        command=("test",), provenance={},
    )  # fmt: skip


def sweep_alone(cases: list[Case], folder: Path) -> list[Sample]:
    run_dir = new_run(folder, 1)
    request = sweep.SweepRequest(cases=tuple(cases), run_dir=str(run_dir))
    sweep.measure_ranks(ranks_module.alone("cuda"), msgspec.json.encode(request))
    return store.load(run_dir)[1]


def test_every_kind_of_case_on_one_gpu(tmp_path):
    gemm = Gemm(m=512, n=256, k=1024, trans_a=True, trans_b=False)
    attention = {"batch": 2, "q_len": 256, "kv_len": 256, "heads": 8, "kv_heads": 2}
    cases = [
        *(Case(op=gemm, regime=regime) for regime in ("cold", "warm", "graph")),
        *(
            Case(op=Attention(**attention, head_dim=64, direction=way), regime="cold")
            for way in ("forward", "backward")
        ),
        Case(op=Elementwise(kind="copy", read_bytes=2**20, write_bytes=2**20), regime="cold"),
        Case(op=Elementwise(kind="adamw", read_bytes=2**20, write_bytes=2**18 * 3), regime="cold"),
        *(
            Case(op=a_block(part, way), lowering=lowering)
            for lowering in ("eager", "compiled")
            for part in ("layer", "head")
            for way in ("forward", "backward")
        ),
    ]
    found = sweep_alone(cases, tmp_path)
    assert [(sample.status, sample.reason) for sample in found] == [("ok", "")] * len(cases)
    assert [sample.case for sample in found] == cases


def test_out_of_memory_is_data_and_gives_the_memory_back(tmp_path):
    too_large = Elementwise(kind="copy", read_bytes=2**45, write_bytes=2**45)
    held = torch.cuda.memory_allocated()
    small = Elementwise(kind="copy", read_bytes=2**20, write_bytes=2**20)
    found = sweep_alone([Case(op=too_large), Case(op=small)], tmp_path)
    assert [sample.status for sample in found] == ["oom", "ok"]
    assert torch.cuda.memory_allocated() <= held + 2**20


@pytest.mark.parametrize("part", ["layer", "head"])
def test_saved_bytes_are_those_of_the_graph(part):
    """Eager: what the operation graph counts. Compiled: never more, the partitioner saves less."""
    op = a_block(part)
    found = {}
    for lowering in ("eager", "compiled"):
        made = block.Blocks(ranks_module.alone("cuda")).build(Case(op=op, lowering=lowering))
        assert made.metrics is not None
        found[lowering] = made.metrics()["saved_bytes"]
    counted = models.saved_block_bytes(op)
    assert found["eager"] == pytest.approx(counted, rel=0.001)  # the loss saves its divisor
    assert 0.3 * found["eager"] < found["compiled"] <= 1.01 * found["eager"]


def test_cold_cases_rotate_through_more_than_the_cache_holds():
    device = torch.device("cuda", torch.cuda.current_device())
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    case = Case(op=Gemm(m=2048, n=2048, k=2048), regime="cold")
    assert work.num_buffers(case, case.op.bytes, device) * case.op.bytes > cache_bytes
    assert work.num_buffers(Case(op=case.op, regime="warm"), case.op.bytes, device) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_groups_and_split_blocks_over_nccl(tmp_path):
    world_size = 4 if torch.cuda.device_count() >= 4 else 2
    groups = {(2, 1), (2, world_size // 2), (world_size, 1)}
    ops: list[Op] = [
        *(
            Collective(
                kind=kind,
                size_bytes=2**20,
                group_size=size,
                group_stride=stride,
                in_place=kind in ("all_reduce", "broadcast"),
            )
            for kind in KINDS
            for size, stride in sorted(groups)
        ),
        *(
            a_block(part, way, tp=2)
            for part in ("layer", "head")
            for way in ("forward", "backward")
        ),
    ]
    cases = tuple(
        Case(op=op, lowering=lowering, world_size=world_size)
        for op in ops
        for lowering in (("eager", "compiled") if isinstance(op, Block) else ("eager",))
    )
    run_dir = new_run(tmp_path, world_size)
    request = sweep.SweepRequest(cases=cases, run_dir=str(run_dir))
    launch.run("meshwise.probe.sweep:measure_ranks", request, nproc=world_size)
    info, samples, _ = store.load(run_dir)
    assert info.status == "complete"
    assert [(sample.status, sample.reason) for sample in samples] == [("ok", "")] * len(cases)


@pytest.mark.parametrize(
    ("replay", "status"), [(torch.cuda.CUDAGraph.replay, "ok"), (lambda _: None, "error")]
)
def test_a_replay_that_does_nothing_is_an_error(tmp_path, monkeypatch, replay, status):
    """The eager call is right; what the graph's replay leaves is looked at as well."""
    source, result = torch.arange(100.0, device="cuda"), torch.empty(100, device="cuda")
    check = work.Check(lambda: result.fill_(-1), lambda: int((source != result).sum()))
    copies = work.Work(calls=(lambda: result.copy_(source),), check=lambda _: check, batch=20)
    monkeypatch.setattr(sweep.Bench, "build", lambda *_: copies)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    (sample,) = sweep_alone([Case(op=Gemm(m=8, n=8, k=8), regime="graph")], tmp_path)
    assert (sample.status, sample.metrics["wrong"]) == (status, 0)
    assert sample.metrics["wrong_as_timed"] == (0 if status == "ok" else 100)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_replays_over_nccl_and_symmetric_memory_are_checked_and_right(tmp_path):
    in_place = ("all_reduce", "broadcast", "reduce")
    of = {
        "": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"),
        "nccl": ("all_reduce", "reduce_scatter", "send_recv"),
        "one_shot": ("all_reduce",), "two_shot": ("all_reduce",), "peer_copy": ("all_gather",),
    }  # fmt: skip
    cases = tuple(
        Case(
            op=Collective(
                kind=kind, size_bytes=2**20, group_size=2,
                in_place=kind in in_place and backend in ("", "two_shot"),
            ),
            regime="graph", backend=backend, world_size=2,
        )
        for backend, kinds in of.items()
        for kind in kinds
    )  # fmt: skip
    cases += tuple(
        Case(op=Collective(kind=kind, size_bytes=2**20, group_size=2, in_place=True),
             regime="graph", backend="nccl", world_size=2)
        for kind in ("all_reduce", "reduce_scatter", "reduce")
    )  # fmt: skip
    # buffers of each size lie where others were, whose graphs NCCL may still know
    cases += tuple(
        Case(op=Collective(kind=kind, size_bytes=2**power, group_size=2),
             regime="graph", backend="nccl", world_size=2)
        for power in range(12, 28, 2) for kind in ("all_reduce", "all_gather", "send_recv")
    )  # fmt: skip
    run_dir = new_run(tmp_path, 2)
    request = sweep.SweepRequest(cases=tuple(dict.fromkeys(cases)), run_dir=str(run_dir))
    launch.run("meshwise.probe.sweep:measure_ranks", request, nproc=2)
    for sample in store.load(run_dir)[1]:
        if sample.status != "skipped":  # this machine has no symmetric memory
            assert sample.status == "ok", (sample.case, sample.reason)
            assert sample.metrics["wrong"] == sample.metrics["wrong_as_timed"] == 0
