"""Timing, detection and failures on real GPUs. Bounds are physical: nothing beats its datasheet.

Each rank runs this file as ``python -m tests.gpu.test_timing_gpu <request.json>``.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from meshwise import machine, timing
from meshwise import ranks as ranks_module
from meshwise.launch import RanksFailed, local, order, worker
from meshwise.patience import Patience
from meshwise.ranks import Ranks
from meshwise.spec import Record
from meshwise.stats import median_interval

HERE = "tests.gpu.test_timing_gpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class Request(Record, kw_only=True):
    folder: str


def reduces(ranks: Ranks, request: bytes) -> None:
    """All-reduce 64 MiB eagerly and as a graph; leave both and the clocks in found.json."""
    found: dict[str, Any] = {}
    buffer = torch.ones(2**24, device=ranks.device)
    for regime in ("warm", "cold", "graph"):
        ranks.at(f"all_reduce 64 MiB {regime}")
        timed = timing.measure(
            [lambda: dist.all_reduce(buffer)], ranks=ranks, regime=regime, distributed=True
        )
        found[regime] = timed._asdict()
    if ranks.rank == 0:
        folder = Path(msgspec.json.decode(request, type=Request).folder)
        (folder / "found.json").write_bytes(msgspec.json.encode(found))


def lingers(ranks: Ranks, request: bytes) -> None:
    """Rank 1 goes elsewhere while the others wait for it in an NCCL kernel."""
    ranks.at("all_reduce 4 KiB")
    buffer = torch.ones(1024, device=ranks.device)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if ranks.rank == 1 and calls > 5:
            time.sleep(600)
        dist.all_reduce(buffer)

    timing.measure([call], ranks=ranks, regime="warm", distributed=True, relative_interval=0.0)


def stops(ranks: Ranks, request: bytes) -> None:
    """Rank 1 freezes while NCCL connects the ranks, for which it has no timeout."""
    ranks.at("all_reduce 4 KiB")
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1024, device=ranks.device))


def start(target: str, folder: Path, timeout_s: float = 30.0) -> None:
    told = order.WorkOrder(
        target=f"{HERE}:{target}",
        request=msgspec.Raw(msgspec.json.encode(Request(folder=str(folder)))),
        threads=1,
        patience=Patience(timeout_s),
    )
    local.start(told, 2, worker=("-m", HERE))


def median_s(call: Any, regime: str) -> float:
    alone = ranks_module.alone("cuda")
    timed = timing.measure([call], ranks=alone, regime=regime, distributed=False)
    return median_interval(timed.times_s)[0]


@pytest.mark.parametrize("regime", ["cold", "warm", "graph"])
def test_a_product_is_not_faster_than_the_datasheet(regime: str) -> None:
    peak = machine.detect_cluster(nproc=1).device.peak_flops.get("bf16")
    if peak is None:
        pytest.skip("this GPU's peak is not known")
    a = timing.randn((8192, 8192), torch.bfloat16, "cuda")
    out = torch.empty_like(a)
    flops_per_s = 2 * 8192**3 / median_s(lambda: torch.mm(a, a, out=out), regime)
    assert 0.3 * peak < flops_per_s < peak


def test_a_cold_copy_comes_from_memory() -> None:
    bandwidth = machine.detect_cluster(nproc=1).device.peak_memory_bytes_per_s
    if bandwidth is None:
        pytest.skip("this GPU's bandwidth is not known")
    source = torch.ones(2**22, device="cuda")  # 16 MiB, which the L2 cache would hold
    total = torch.empty((), device="cuda")
    assert source.nbytes / median_s(lambda: torch.sum(source, 0, out=total), "cold") < bandwidth


def test_a_graph_replays_the_call() -> None:
    counter = torch.zeros((), device="cuda")
    alone = ranks_module.alone("cuda")
    timed = timing.measure(
        [lambda: counter.add_(1)], ranks=alone, regime="graph", distributed=False
    )
    assert counter.item() > len(timed.times_s)
    state = timed.before[0]
    assert state.sm_clock_mhz and state.power_w and state.temperature_c


def test_memory_that_runs_out_is_told_from_other_errors() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        median_s(lambda: torch.empty(2**50, dtype=torch.uint8, device="cuda"), "warm")
    assert median_s(lambda: torch.zeros(1, device="cuda"), "warm") > 0


def test_detection_agrees_with_torch() -> None:
    cluster = machine.detect_cluster()
    assert cluster.num_devices == torch.cuda.device_count()
    assert cluster.device.name == torch.cuda.get_device_name(0)
    if cluster.tiers[0].name == "nvlink" and cluster.num_devices > 1:
        assert torch.cuda.can_device_access_peer(0, 1)


@two_gpus
def test_collectives_are_timed_in_every_regime(tmp_path: Path) -> None:
    start("reduces", tmp_path)
    found = msgspec.json.decode((tmp_path / "found.json").read_bytes())
    for regime in ("warm", "cold", "graph"):
        own = found[regime]["rank_times_s"]
        assert [max(times) for times in zip(*own, strict=True)] == found[regime]["times_s"]
        assert [state["rank"] for state in found[regime]["after"]] == [0, 1]


@two_gpus
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("lingers", "rank 1 (in case all_reduce 4 KiB) had not arrived at a chunk"),
        ("stops", "rank 1 had stopped during case all_reduce 4 KiB"),
    ],
)
def test_a_rank_that_the_others_wait_for_is_named(tmp_path: Path, target: str, words: str) -> None:
    with pytest.raises(RanksFailed) as failure:
        start(target, tmp_path, timeout_s=8.0)
    assert words in str(failure.value)


if __name__ == "__main__":
    worker.main(*sys.argv[1:], package="tests")
