"""Peak memory of a training step: what the CUDA allocator counts or, on a CPU, tensor bytes.

A CPU has no such counter, so the step is traced: torch's profiler records every allocation, free
and resize of a tensor's storage. The high-water mark is the bytes held before (each storage
once) plus the largest running sum of the trace. Memory that libraries take by themselves is not
seen, neither on the GPU (NCCL's buffers, the CUDA context) nor on the CPU (gloo, BLAS).
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

NUM_TRACES = 3


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once; of a DTensor, this rank's."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.detach().untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_tensor_bytes(work: Callable[[], object], held: Iterable[Tensor]) -> int:
    """High-water mark of CPU tensor bytes while ``work`` runs; ``held`` exist before it.

    ``work`` runs three times and must leave nothing behind. A block that one of gloo's threads
    happens to free is missed by the profiler, so the trace whose sum is nearest zero counts.
    """
    before_bytes = storage_bytes(held)
    sums = [_running_sum(work) for _ in range(NUM_TRACES)]
    cleanest = min(sums, key=lambda running: abs(running[-1]))
    return before_bytes + max(cleanest)


def _running_sum(work: Callable[[], object]) -> list[int]:
    """Bytes that ``work`` holds after each of its allocations and frees; it begins with 0."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    # not "Total Allocated": it goes on from earlier traces, whose blocks were freed unseen
    return list(accumulate((int(event["args"]["Bytes"]) for event in changes), initial=0))


def cuda_peak() -> dict[str, float]:
    """Bytes in tensors, and bytes the allocator took from the device, at their highest since
    ``torch.cuda.reset_peak_memory_stats``."""
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
