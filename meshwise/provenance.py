"""Where numbers come from: versions, devices, code and settings, and a device's state right now.

Out: plain data for ``run.json``. No host names, user names or paths: settings are stored by a list
of their names, a value that looks like a path is left out, and a GPU is known by a short hash of
its UUID.
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

from meshwise.spec import DeviceState
from meshwise.text import masked, names_a_secret, plain

if TYPE_CHECKING:
    import torch

    from meshwise.ranks import Ranks

# Variables that change speed and hold neither names nor addresses. Of others of these families it
# is said that they were set.
_STORED = {
    "NCCL_": """
        ALGO BUFFSIZE CGA_CLUSTER_SIZE CHECKS_DISABLE CHECK_POINTERS COLLNET_ENABLE
        COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_SPLIT_SHARE_RESOURCES CROSS_NIC CUMEM_ENABLE
        CUMEM_HOST_ENABLE DEBUG DEBUG_SUBSYS DMABUF_ENABLE GDRCOPY_ENABLE GRAPH_HELPER_DISABLE
        GRAPH_MIXING_SUPPORT GRAPH_REGISTER IB_ADAPTIVE_ROUTING IB_AR_THRESHOLD IB_DISABLE
        IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_MERGE_VFS IB_PCI_RELAXED_ORDERING
        IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT
        IGNORE_CPU_AFFINITY LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LL128_BUFFSIZE LL_BUFFSIZE
        LL_THRESHOLD LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS MIN_CTAS MIN_NCHANNELS MNNVL_ENABLE NET
        NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_PLUGIN NET_SHARED_BUFFERS NCHANNELS_PER_NET_PEER
        NSOCKS_PERTHREAD NTHREADS NVLS_CHUNKSIZE NVLS_ENABLE NVLS_NCHANNELS P2P_DIRECT_DISABLE
        P2P_DISABLE P2P_LEVEL P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PXN_LEVEL
        P2P_USE_CUDA_MEMCPY PROTO PXN_DISABLE RINGS RUNTIME_CONNECT SHM_DISABLE SHM_USE_CUDA_MEMCPY
        SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS TREE_THRESHOLD
        TUNER_PLUGIN WIN_ENABLE WORK_FIFO_BYTES""",
    "TORCH_NCCL_": """
        ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BLOCKING_WAIT CUDA_EVENT_CACHE DESYNC_DEBUG
        ENABLE_MONITORING ENABLE_TIMING HEARTBEAT_TIMEOUT_SEC HIGH_PRIORITY TRACE_BUFFER_SIZE
        USE_COMM_NONBLOCKING USE_TENSOR_REGISTER_ALLOCATOR_HOOK""",
    "TORCH_": """
        ALLOW_TF32_CUBLAS_OVERRIDE BLAS_PREFER_CUBLASLT COMPILE_DISABLE CPP_LOG_LEVEL
        CUDNN_V8_API_DISABLED DISTRIBUTED_DEBUG LOGS SHOW_CPP_STACKTRACES
        SYMM_MEM_DISABLE_MULTICAST""",
    "TORCHINDUCTOR_": """
        COMPILE_THREADS COORDINATE_DESCENT_TUNING CUDAGRAPH_TREES FORCE_DISABLE_CACHES FREEZING
        MAX_AUTOTUNE MAX_AUTOTUNE_GEMM MAX_AUTOTUNE_GEMM_BACKENDS MAX_AUTOTUNE_POINTWISE""",
    "PYTORCH_": """
        ALLOC_CONF CUDA_ALLOC_CONF JIT NO_CUDA_MEMORY_CACHING NVFUSER_DISABLE
        NVML_BASED_CUDA_CHECK""",
    "CUDA_": """
        AUTO_BOOST CACHE_DISABLE CACHE_MAXSIZE DEVICE_MAX_CONNECTIONS DEVICE_ORDER DISABLE_PTX_JIT
        FORCE_PTX_JIT LAUNCH_BLOCKING MODULE_LOADING MPS_ACTIVE_THREAD_PERCENTAGE
        MPS_PINNED_DEVICE_MEM_LIMIT SCALE_LAUNCH_QUEUES VISIBLE_DEVICES""",
    "CUBLAS_": "WORKSPACE_CONFIG",
    "CUBLASLT_": "WORKSPACE_SIZE",
    "NVIDIA_": "TF32_OVERRIDE",
    "NVSHMEM_": """
        CUMEM_GRANULARITY DISABLE_CUDA_VMM DISABLE_NVLS DISABLE_P2P IB_ENABLE_IBGDA
        MAX_TEAMS REMOTE_TRANSPORT SYMMETRIC_SIZE""",
    "OMP_": """
        DISPLAY_ENV DYNAMIC MAX_ACTIVE_LEVELS NUM_THREADS PLACES PROC_BIND SCHEDULE STACKSIZE
        THREAD_LIMIT WAIT_POLICY""",
    "GOMP_": "CPU_AFFINITY SPINCOUNT STACKSIZE",
    "KMP_": "AFFINITY BLOCKTIME HW_SUBSET SETTINGS",
    "MKL_": "CBWR DEBUG_CPU_TYPE DYNAMIC ENABLE_INSTRUCTIONS NUM_THREADS THREADING_LAYER",
    "OPENBLAS_": "CORETYPE L2_SIZE NUM_THREADS",
    "GLOO_": "SOCKET_IFNAME",
}
_NAMES = frozenset(family + name for family, names in _STORED.items() for name in names.split())

# nvml.h, nvmlClocksEventReasons; idle and clocks set by the user are no throttling
_THROTTLE = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def collect(*, nproc: int | None = None) -> dict[str, Any]:
    """Everything that may explain a number later; works without torch and without a GPU.

    ``nproc`` ranks are about to be started on this host: says how many threads each will get.
    """
    return {
        "time_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        **_torch_versions(),
        **_gpus(),
        "host_cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_name(),
        "threads_per_rank": None if nproc is None else threads_per_rank(nproc),
        **_code(),
        "settings": settings(dict(os.environ)),
    }


def threads_per_rank(nproc: int) -> int:
    """OMP_NUM_THREADS if it is set, else an equal share of this process's cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() else max(1, len(os.sched_getaffinity(0)) // nproc)


def settings(variables: dict[str, str]) -> dict[str, str]:
    """The variables that change speed, without those that tell who or where, or open a door."""
    return {
        name: _setting(name, value)
        for name, value in sorted(variables.items())
        if name.startswith(tuple(_STORED)) and not names_a_secret(name)
    }


def _setting(name: str, value: str) -> str:
    if name not in _NAMES:
        return "(not stored)"
    return "(a path)" if "/" in value or "\\" in value else masked(plain(value))


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model name as Linux tells it, else the architecture."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def device_state(ranks: "Ranks") -> DeviceState:
    """Clocks, power, temperature and throttling of this rank's device; None where unknown."""
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
    """The started NVML binding, or None where there is no binding or no driver."""
    try:
        binding = importlib.import_module("pynvml")
        binding.nvmlInit()
    except Exception:  # ImportError, or any of NVML's own errors when there is no driver
        return None
    return binding


def ask(question: str, *arguments: Any) -> Any:
    """NVML's answer as text, number or handle; None where this device or driver has none."""
    binding = nvml()
    if binding is None:
        return None
    try:
        answer = getattr(binding, question)(*arguments)
    except binding.NVMLError:
        return None
    return answer.decode() if isinstance(answer, bytes) else answer  # old bindings give bytes


def nvml_handle(uuid: str) -> Any:
    """NVML's handle of the GPU that torch calls by this UUID: indices differ between the two."""
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
    """Meshwise's version and, when it runs from its own checkout, commit and dirty flag."""
    try:
        version = importlib.metadata.version("meshwise")
    except importlib.metadata.PackageNotFoundError:
        version = None
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
