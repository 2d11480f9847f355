"""Provenance of measurements: versions, devices, code, settings, and a device's current state.

Out: plain data for ``run.json``, without host names, user names or paths. Settings are stored if
their name is on a list, a value that looks like a path is left out, and a GPU is identified by a
short hash of its UUID.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise import files
from meshwise.spec import DeviceState
from meshwise.text import masked, names_a_secret, plain

if TYPE_CHECKING:
    import torch

    from meshwise.ranks import Ranks

# nvml.h, nvmlClocksEventReasons; idle and clocks set by the user are no throttling
_THROTTLE = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def collect(*, nproc: int | None = None) -> dict[str, Any]:
    """Collect everything that may explain a measurement later. Works without torch and a GPU.

    ``nproc``: ranks that will be started on this host; it sets the number of threads of each.
    """
    return {
        "time_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        **_torch_versions(),
        **_gpus(),
        "host_cores": len(os.sched_getaffinity(0)),
        "host_load": round(os.getloadavg()[0], 2),  # of the last minute, before the ranks start
        "cpu": cpu_name(),
        "threads_per_rank": None if nproc is None else threads_per_rank(nproc),
        **_code(),
        "settings": settings(dict(os.environ)),
    }


def here(kind: str) -> dict[str, str]:
    """Return what prices of this machine's devices of a ``kind`` (cuda, cpu) depend on: device,
    torch, nccl, driver. Unknown ones are left out. Fast: torch is not imported, packages say their
    versions."""
    known: dict[str, str | None] = {"device": cpu_name(), "torch": _installed("torch")}
    if kind == "cuda":
        needs = importlib.metadata.requires("torch") or [] if known["torch"] else []
        nccl = re.search(r"^nvidia-nccl-cu\d+", "\n".join(needs), re.MULTILINE)
        found = _gpus()
        known |= {
            "device": next((gpu["name"] for gpu in found["gpus"]), None),
            "nccl": _installed(nccl[0]) if nccl else None,
            "driver": found["driver"],
        }
    return {name: version for name, version in known.items() if version}


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def threads_per_rank(nproc: int) -> int:
    """Return OMP_NUM_THREADS if it is set, else an equal share of this process's cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() else max(1, len(os.sched_getaffinity(0)) // nproc)


def settings(variables: dict[str, str]) -> dict[str, str]:
    """Return variables that change speed. Unlisted values and paths are hidden, secrets dropped."""
    families: dict[str, str] = files.own_data("settings.toml")
    stored = {family + name for family, names in families.items() for name in names.split()}
    return {
        name: _setting(value) if name in stored else "(not stored)"
        for name, value in sorted(variables.items())
        if name.startswith(tuple(families)) and not names_a_secret(name)
    }


def _setting(value: str) -> str:
    return "(a path)" if "/" in value or "\\" in value else masked(plain(value))


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model name from Linux, else the architecture."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def device_state(ranks: "Ranks") -> DeviceState:
    """Return clocks, power, temperature and throttling of this rank's device; None if unknown."""
    handle = _handle(ranks.device) if ranks.device.type == "cuda" else None
    if handle is None:
        return DeviceState(rank=ranks.rank)
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    power_mw = ask("nvmlDeviceGetPowerUsage", handle)
    return DeviceState(
        rank=ranks.rank,
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", handle, nvml().NVML_CLOCK_SM),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", handle, nvml().NVML_CLOCK_MEM),
        power_w=None if power_mw is None else power_mw / 1000,
        temperature_c=ask("nvmlDeviceGetTemperature", handle, nvml().NVML_TEMPERATURE_GPU),
        throttle=tuple(word for bit, word in _THROTTLE.items() if reasons & bit),
    )


@functools.cache
def nvml() -> Any:
    """Return the initialised NVML binding, or None without a binding or a driver."""
    try:
        binding = importlib.import_module("pynvml")
        binding.nvmlInit()
    except Exception:  # ImportError, or any of NVML's own errors when there is no driver
        return None
    return binding


def ask(question: str, *arguments: Any) -> Any:
    """Return NVML's answer as text, number or handle; None if this device or driver has none."""
    binding = nvml()
    if binding is None:
        return None
    try:
        answer = getattr(binding, question)(*arguments)
    except binding.NVMLError:
        return None
    return answer.decode() if isinstance(answer, bytes) else answer  # old bindings give bytes


def nvml_handle(uuid: str) -> Any:
    """Return NVML's handle of the GPU with torch's UUID; indices differ between the two."""
    uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    return ask("nvmlDeviceGetHandleByUUID", uuid)


@functools.cache
def _handle(device: "torch.device") -> Any:
    import torch

    return nvml_handle(str(torch.cuda.get_device_properties(device).uuid))


def _torch_versions() -> dict[str, str | None]:
    try:
        import torch
    except ImportError:
        return {"torch": None}
    nccl = None
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"torch": str(torch.__version__), "cuda": torch.version.cuda, "nccl": nccl}


def _gpus() -> dict[str, Any]:
    handles = [ask("nvmlDeviceGetHandleByIndex", i) for i in range(ask("nvmlDeviceGetCount") or 0)]
    gpus = []
    for handle in handles:
        uuid = ask("nvmlDeviceGetUUID", handle) or ""
        short = hashlib.sha256(uuid.encode()).hexdigest()[:8]
        gpus.append({"name": ask("nvmlDeviceGetName", handle), "uuid_hash": short})
    return {"driver": ask("nvmlSystemGetDriverVersion"), "gpus": gpus}


def _code() -> dict[str, Any]:
    """Return Meshwise's version and, if it runs from its own checkout, commit and dirty flag."""
    version = _installed("meshwise")
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return {"meshwise": version, "git_commit": None, "git_dirty": None}
    changes = _git(root, "status", "--porcelain", "--", "meshwise")
    return {
        "meshwise": version,
        "git_commit": _git(root, "rev-parse", "HEAD"),
        "git_dirty": None if changes is None else bool(changes),
    }


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
