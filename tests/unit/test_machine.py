"""Machines as detect describes them. GPUs are acted by a small NVML and a patched torch.cuda."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from meshwise import machine, provenance, store
from meshwise.spec import DTYPE_BYTES, Cluster, Device

GiB = 2**30


@pytest.fixture(autouse=True)
def nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Nvml:
    """GPUs whose NVLink reaches within islands of ``island``; ``links`` active links each."""

    NVMLError = RuntimeError
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_FEATURE_ENABLED = 1
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90

    def __init__(self, island: int, links: int, speed_mbps: int = 0) -> None:
        self.island, self.links, self.speed_mbps = island, links, speed_mbps

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, _: int) -> int:
        return 0 if one // self.island == other // self.island else 5

    def nvmlDeviceGetNvLinkState(self, _: int, link: int) -> int:
        if link >= self.links:
            raise RuntimeError("not supported")
        return 1

    def nvmlDeviceGetFieldValues(self, _: int, fields: list[int]) -> list[Any]:
        value = SimpleNamespace(uiVal=self.speed_mbps)
        return [SimpleNamespace(nvmlReturn=0 if self.speed_mbps else 3, value=value)]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, _: int) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, _: int) -> int:
        return 16


def act(
    monkeypatch: pytest.MonkeyPatch, names: list[str], nvml: Nvml | None, peers: bool = True
) -> None:
    devices = [SimpleNamespace(name=n, total_memory=80 * GiB, uuid=i) for i, n in enumerate(names)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: devices[i])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: peers)
    monkeypatch.setattr(provenance, "nvml", lambda: nvml)


def test_a_host_of_linked_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    act(monkeypatch, ["NVIDIA H200"] * 4, Nvml(island=4, links=18))
    cluster = machine.detect_cluster()
    assert (cluster.name, cluster.num_devices, cluster.backend) == ("4x-nvidia-h200", 4, "nccl")
    assert cluster.device.peak_flops["bf16"] == 989.4e12
    assert cluster.device.peak_memory_bytes_per_s == 4.8e12
    assert [(t.name, t.num_devices, t.bytes_per_s) for t in cluster.tiers] == [("nvlink", 4, 450e9)]
    assert cluster.notes == ()


def test_bridged_pairs_reach_the_others_over_pcie(monkeypatch: pytest.MonkeyPatch) -> None:
    act(monkeypatch, ["NVIDIA A100 80GB PCIe"] * 4, Nvml(island=2, links=12), peers=False)
    cluster = machine.detect_cluster()
    assert [(t.name, t.num_devices) for t in cluster.tiers] == [("nvlink", 2), ("pcie", 4)]
    assert cluster.tiers[0].bytes_per_s == 300e9
    assert cluster.tiers[1].bytes_per_s == pytest.approx(63e9, rel=0.01)
    assert "through the host" in cluster.notes[0]


def test_an_unknown_gpu_has_no_peak_and_says_how_to_give_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    act(monkeypatch, ["NVIDIA H200 Max"] * 2, Nvml(island=2, links=4, speed_mbps=26562))
    cluster = machine.detect_cluster()
    assert cluster.device.peak_flops == {}
    assert cluster.device.peak_memory_bytes_per_s is None
    assert cluster.tiers[0].bytes_per_s == pytest.approx(4 * 26.562e9)
    assert "--peak bf16=990e12" in cluster.notes[0]
    given = machine.detect_cluster(peaks={"bf16": 990e12})
    assert given.device.peak_flops == {"bf16": 990e12}
    assert "given by the user" in given.device.peak_source
    assert given.notes == ()


def test_without_nvml_links_are_unknown_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    act(monkeypatch, ["NVIDIA H200"] * 2, None)
    cluster = machine.detect_cluster()
    assert [(t.name, t.bytes_per_s) for t in cluster.tiers] == [("host", None)]
    assert "nvidia-ml-py" in cluster.notes[0]


def test_one_gpu_without_links_is_a_cluster_too(monkeypatch: pytest.MonkeyPatch) -> None:
    act(monkeypatch, ["NVIDIA H100 PCIe"], Nvml(island=1, links=0))
    cluster = machine.detect_cluster()
    assert cluster.num_devices == 1
    assert cluster.tier_of(1, 1).name == "pcie"


def test_a_host_of_which_few_take_part_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    act(monkeypatch, ["NVIDIA H200"] * 4, Nvml(island=4, links=18))
    assert machine.detect_cluster(at_least=2).num_devices == 4
    with pytest.raises(ValueError, match="nproc = 5, but 4 GPUs are visible"):
        machine.detect_cluster(at_least=5)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    cluster = machine.detect_cluster(at_least=4)
    assert (cluster.num_hosts, cluster.num_devices_per_host) == (2, 4)


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    act(monkeypatch, ["NVIDIA H200", "NVIDIA L4"], Nvml(island=1, links=0))
    with pytest.raises(ValueError, match=r"GPUs differ .*; choose equal ones"):
        machine.detect_cluster()
    with pytest.raises(ValueError, match="nproc = 3, but 2 GPUs are visible"):
        machine.detect_cluster(nproc=3)
    for peaks, words in (({"bf17": 1.0}, "peak = 'bf17'"), ({"bf16": -1.0}, "must be > 0")):
        with pytest.raises(ValueError, match=words):
            machine.detect_cluster(nproc=1, peaks=peaks)


def test_a_cpu_is_a_device_whose_ranks_share_the_host() -> None:
    cluster = machine.detect_cluster()
    assert (cluster.num_devices, cluster.backend) == (4, "gloo")
    assert cluster.device.peak_flops == {}
    assert cluster.host_memory_bytes is not None
    assert cluster.device.memory_bytes == cluster.host_memory_bytes // 4
    assert [tier.name for tier in cluster.tiers] == ["shared memory"]
    assert machine.detect_cluster(nproc=2, name="mine").name == "mine"
    with pytest.raises(ValueError, match="nproc = 0"):
        machine.detect_cluster(nproc=0)
    with pytest.raises(ValueError, match=r"nproc = 9999999: .* cores stand for at most"):
        machine.detect_cluster(nproc=9999999)


def test_a_launcher_says_how_many_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "6"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    cluster = machine.detect_cluster()
    assert (cluster.num_hosts, cluster.num_devices_per_host) == (2, 3)
    assert [(t.name, t.num_devices) for t in cluster.tiers] == [
        ("shared memory", 3),
        ("network", 6),
    ]
    with pytest.raises(ValueError, match="nproc = 4, but the launcher started 6"):
        machine.detect_cluster(nproc=4)


def test_a_container_has_no_more_memory_than_its_limit(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       1048576 kB\nMemFree: 1 kB\n")
    limit = tmp_path / "memory.max"
    assert machine.host_memory_bytes(tmp_path, tmp_path) == GiB
    limit.write_text("max\n")
    assert machine.host_memory_bytes(tmp_path, tmp_path) == GiB
    limit.write_text(f"{GiB // 2}\n")
    assert machine.host_memory_bytes(tmp_path, tmp_path) == GiB // 2


def test_shipped_clusters_can_be_read_and_agree_with_the_peaks() -> None:
    shipped = machine.shipped()
    assert {
        "b200-hgx", "dgx-a100-80gb", "h100-hgx", "h200-hgx", "p3.16xlarge", "p4d.24xlarge",
    } == set(shipped)  # fmt: skip
    for name, file in shipped.items():
        cluster = store.read(Path(str(file)), Cluster)
        bare = Device(name=cluster.device.name, kind="cuda", memory_bytes=1)
        known = machine.with_peaks(bare, None)
        assert cluster.name == name
        assert cluster.num_devices == 8
        assert cluster.device.peak_flops == known.peak_flops
        assert cluster.device.peak_memory_bytes_per_s == known.peak_memory_bytes_per_s
        assert all(tier.bytes_per_s and tier.source for tier in cluster.tiers)


def test_peaks_are_dense_and_sourced() -> None:
    """Sparse figures are twice the dense: fp8 is twice bf16, which is twice tf32, on every GPU."""
    for entry in map(machine.known_device, ("NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA B200")):
        assert entry is not None and entry["source"]
        flops = entry["peak_flops"]
        assert set(flops) <= set(DTYPE_BYTES)
        assert flops["bf16"] / flops["tf32"] == pytest.approx(2, rel=0.03)
        assert flops.get("fp8", 2 * flops["bf16"]) / flops["bf16"] == pytest.approx(2, rel=0.01)
    assert machine.known_device("NVIDIA H200 Max") is None
