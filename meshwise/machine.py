"""Detect this machine: devices, the links between them, and known datasheet peaks.

In: torch, NVML (optional), /proc, the launcher's variables. Out: a ``Cluster``. Nothing is
guessed: a peak or a rate without a source is absent, and a note says how to supply it. Peaks come
from ``data/peaks.toml``, matched by the exact device name.

Tiers are named after the slowest link inside them: ``nvlink`` reaches the first devices that are
all linked to each other, ``pcie`` (or ``shared memory`` on a CPU) the host, ``network`` all hosts.
"""

import functools
import importlib.resources
import os
import re
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_args

import msgspec

from meshwise import files, provenance
from meshwise.launcher import Job
from meshwise.spec import Cluster, Device, Tier
from meshwise.spec.op import Dtype

CPU_RANKS = 4
_MAX_LINKS = 18
_PCIE_LANE_BITS_PER_S = {1: 2e9, 2: 4e9, 3: 7.877e9, 4: 15.754e9, 5: 31.508e9, 6: 60.5e9}
_PEAK_FIX = "give one with --peak bf16=990e12"
_DATA = importlib.resources.files("meshwise") / "data"


def detect_cluster(
    *,
    nproc: int | None = None,
    peaks: Mapping[str, float] | None = None,
    name: str | None = None,
    at_least: int | None = None,
) -> Cluster:
    """Return the cluster that this process would run on, with ``nproc`` devices per host if given.

    Under torchrun or srun the job's ranks and hosts count. ``at_least``: describe whole
    hosts, with devices for that many ranks, even if fewer take part. ``peaks`` (FLOP/s by dtype)
    override the datasheet. An unknown dtype, or more ranks than GPUs, raises a ValueError.
    """
    import torch

    job = Job.here()
    job.check(nproc)
    num_hosts = job.num_hosts
    per_host = job.world_size // num_hosts if job.launched else nproc
    if per_host is not None and per_host < 1:
        raise ValueError(f"nproc = {per_host}: must be >= 1")
    on_gpus = torch.cuda.is_available()
    if at_least is not None:
        usual = torch.cuda.device_count() if on_gpus else CPU_RANKS
        per_host = max(usual, per_host or 1, -(-at_least // num_hosts))
    found = _gpus(per_host) if on_gpus else _cpus(per_host)
    device, tiers, notes = found
    device = with_peaks(device, peaks)
    if not device.peak_flops:
        notes = (*notes, f"no datasheet peak is known for {device.name!r}: {_PEAK_FIX}")
    per_host = tiers[-1].num_devices
    if num_hosts > 1:
        unknown = "rate not known; `detect` on all hosts measures it"
        tiers = (*tiers, Tier(name="network", num_devices=num_hosts * per_host, source=unknown))
    return Cluster(
        name=name or _name(device, num_hosts, per_host),
        num_hosts=num_hosts,
        num_devices_per_host=per_host,
        device=device,
        tiers=tiers,
        host_memory_bytes=host_memory_bytes(),
        host_cores=len(os.sched_getaffinity(0)),
        notes=notes,
    )


def with_peaks(device: Device, peaks: Mapping[str, float] | None) -> Device:
    """Return the device with the datasheet peaks of its exact name, overridden by the user's."""
    known = known_device(device.name) or {}
    flops, source = dict(known.get("peak_flops", {})), [known.get("source", "")]
    for dtype, peak in (peaks or {}).items():
        if dtype not in get_args(Dtype):
            raise ValueError(f"peak = {dtype!r}: must be one of {', '.join(get_args(Dtype))}")
        if not peak > 0:
            raise ValueError(f"peak = {dtype}={peak}: must be > 0 FLOP/s")
        flops[dtype] = float(peak)
        source.append(f"{dtype} given by the user")
    return msgspec.structs.replace(
        device,
        peak_flops=flops,
        peak_memory_bytes_per_s=known.get("memory_bytes_per_s"),
        peak_source="; ".join(filter(None, source)),
    )


@functools.cache
def _known_devices() -> dict[str, dict[str, Any]]:
    listed = files.own_data("peaks.toml")["device"]
    return {name: entry for entry in listed for name in entry["names"]}


def known_device(name: str) -> dict[str, Any] | None:
    """Return the entry of ``peaks.toml`` for exactly this device, or None: no similar one."""
    return _known_devices().get(name)


def shipped() -> dict[str, Traversable]:
    """Return the package's cluster files by name: ``h100-hgx``, ``p4d.24xlarge``, ..."""
    files = sorted((_DATA / "clusters").iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): file for file in files}


def _name(device: Device, num_hosts: int, per_host: int) -> str:
    kind = "cpu" if device.kind == "cpu" else re.sub(r"[^a-z0-9]+", "-", device.name.lower())
    hosts = f"{num_hosts}x" if num_hosts > 1 else ""
    return f"{hosts}{per_host}x-{kind.strip('-')}"


Found = tuple[Device, tuple[Tier, ...], tuple[str, ...]]


def _cpus(nproc: int | None) -> Found:
    """Describe CPU ranks: each is a device with an equal share of the host's memory."""
    per_host, cores = nproc or CPU_RANKS, len(os.sched_getaffinity(0))
    if per_host > (most := max(64, 8 * cores)):
        raise ValueError(f"nproc = {per_host}: {cores} cores stand for at most {most} devices")
    notes = [] if per_host <= cores else [f"{per_host} gloo ranks share {cores} cores"]
    if Path("/sys/hypervisor").exists() or "hypervisor" in _read("/proc/cpuinfo"):
        notes.append("a virtual machine: its memory may grow with use, beyond what is read here")
    device = Device(
        name=provenance.cpu_name(), kind="cpu", memory_bytes=host_memory_bytes() // per_host
    )
    return device, (Tier(name="shared memory", num_devices=per_host),), tuple(notes)


def host_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory of the host, or of the container if its limit is lower."""
    total = re.search(r"^MemTotal:\s+(\d+) kB", _read(proc / "meminfo"), re.MULTILINE)
    amounts = [int(total[1]) * 1024] if total else []
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(cgroup / limit).strip()
        amounts += [int(text)] if text.isdigit() else []  # "max" is no limit
    if not amounts:
        raise ValueError(f"{proc / 'meminfo'} does not say how much memory this host has")
    return min(amounts)


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _gpus(nproc: int | None) -> Found:
    """Describe the first ``nproc`` visible GPUs, which must be equal."""
    import torch

    visible = torch.cuda.device_count()
    count = nproc or visible
    if count > visible:
        raise ValueError(
            f"nproc = {count}, but {visible} GPUs are visible; use at most {visible}, "
            "or set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    devices = [torch.cuda.get_device_properties(i) for i in range(count)]
    names = sorted({device.name for device in devices})
    if len(names) > 1:
        raise ValueError(
            f"GPUs differ ({', '.join(names)}); choose equal ones with CUDA_VISIBLE_DEVICES"
        )
    device = Device(
        name=names[0], kind="cuda", memory_bytes=min(device.total_memory for device in devices)
    )
    handles = [provenance.nvml_handle(str(device.uuid)) for device in devices]
    if any(handle is None for handle in handles):
        reach = f"peer access {'between all' if _all_peers(count) else 'missing between some'} GPUs"
        note = f"NVML is not available, so links are unknown ({reach}); install nvidia-ml-py"
        return device, (Tier(name="host", num_devices=count),), (note,)
    return device, *_tiers(handles, names[0])


def _all_peers(count: int) -> bool:
    import torch

    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    return all(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)


def _tiers(handles: list[Any], name: str) -> tuple[tuple[Tier, ...], tuple[str, ...]]:
    """Return the tiers: NVLink over the first GPUs that are all linked, PCIe over the host."""
    count, tiers, notes = len(handles), [], []
    linked = 1
    while linked < count and all(_linked(handles[linked], other) for other in handles[:linked]):
        linked += 1
    if linked > 1 or count == 1:
        tier = _nvlink(handles[0], name, linked)
        tiers += [] if tier is None else [tier]
    if not tiers or linked < count:
        tiers.append(_pcie(handles[0], count))
    if count > 1 and not _all_peers(count):
        notes.append("some GPUs cannot access each other's memory: traffic goes through the host")
    return tuple(tiers), tuple(notes)


def _linked(one: Any, other: Any) -> bool:
    nvml = provenance.nvml()
    link = nvml.NVML_P2P_CAPS_INDEX_NVLINK
    status = provenance.ask("nvmlDeviceGetP2PStatus", one, other, link)
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _nvlink(handle: Any, name: str, num_devices: int) -> Tier | None:
    """Return the NVLink tier: active links times the datasheet's rate of one, else NVML's."""
    nvml, ask = provenance.nvml(), provenance.ask
    states = [ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(_MAX_LINKS)]
    links = states.count(nvml.NVML_FEATURE_ENABLED)
    if not links:
        return None
    rate, source = (known_device(name) or {}).get("nvlink_bytes_per_s"), "datasheet"
    if rate is None:
        field = nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
        answers = ask("nvmlDeviceGetFieldValues", handle, [field])
        told = answers[0].value.uiVal if answers and answers[0].nvmlReturn == 0 else 0
        rate = told * 1e6
        source = "NVML, signalling rate"
    if not rate:
        return Tier(name="nvlink", num_devices=num_devices, source=f"{links} links of unknown rate")
    source = f"{links} active links of {rate / 1e9:g} GB/s each way ({source})"
    return Tier(name="nvlink", num_devices=num_devices, bytes_per_s=links * rate, source=source)


def _pcie(handle: Any, num_devices: int) -> Tier:
    """Return the PCIe tier: lanes times the generation's rate, minus the line code (PCI-SIG)."""
    generation = provenance.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = provenance.ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
    if generation not in _PCIE_LANE_BITS_PER_S or not width:
        return Tier(name="pcie", num_devices=num_devices)
    return Tier(
        name="pcie",
        num_devices=num_devices,
        bytes_per_s=width * _PCIE_LANE_BITS_PER_S[generation] / 8,
        source=f"PCIe generation {generation}, {width} lanes (NVML)",
    )
