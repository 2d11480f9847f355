"""Measure a step's peak memory: by the CUDA allocator or, on a CPU, by tracing tensor bytes.

A CPU has no such counter, so the step is traced: torch's profiler records every allocation, free
and resize of a tensor's storage. The peak is the bytes held before (each storage once) plus the
largest running sum of the trace. Memory that libraries allocate themselves is not counted, neither
on the GPU (NCCL's buffers, the CUDA context) nor on the CPU (gloo, BLAS).
"""

from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import itemgetter

import torch
from torch import Tensor

from meshwise.parallel.mesh import share
from meshwise.tracing import events_of, profiled

NUM_TRACES = 6


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of the tensors' storages, each once; for a DTensor, this rank's part."""
    storages = {}
    for tensor in tensors:
        storage = share(tensor).detach().untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_tensor_bytes(work: Callable[[], object], held: Iterable[Tensor]) -> int:
    """Return the peak of CPU tensor bytes while ``work`` runs. ``held``: tensors that exist before.

    ``work`` runs six times, the same each time, and must leave nothing behind. The profiler misses
    the free of a block whose last holder is one of gloo's threads. It misses blocks at random, so a
    free that any trace has seen counts for all.
    """
    before_bytes = storage_bytes(held)
    first, *others = [_trace(work) for _ in range(NUM_TRACES)]
    sizes = [size for size, _ in first]
    alike = [first, *(blocks for blocks in others if [size for size, _ in blocks] == sizes)]
    ends = [min(end for _, end in same) for same in zip(*alike, strict=True)]
    changes = [*sizes, 0]  # of the sum when block i appears, after earlier frees
    for size, end in zip(sizes, ends, strict=True):
        changes[end] -= size
    return before_bytes + max(accumulate(changes, initial=0))


def _trace(work: Callable[[], object]) -> list[tuple[int, int]]:
    """Return every block that ``work`` allocates, in order: its bytes, and the index of the next
    block allocated after it was freed (the number of blocks if it was not)."""
    with profiled("cpu", memory=True) as profiler:
        work()
    events = events_of(profiler)
    sizes: list[int] = []
    ends: dict[int, int] = {}
    living: dict[int, int] = {}
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=itemgetter("ts")):
        size, address = int(event["args"]["Bytes"]), event["args"]["Addr"]
        if size > 0:
            living[address] = len(sizes)
            sizes.append(size)
        elif address in living:
            ends[living.pop(address)] = len(sizes)
    return [(size, ends.get(index, len(sizes))) for index, size in enumerate(sizes)]


def cuda_peak() -> dict[str, int]:
    """Return the peak bytes of tensors, and of memory that the allocator took from the device,
    since ``torch.cuda.reset_peak_memory_stats``."""
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
