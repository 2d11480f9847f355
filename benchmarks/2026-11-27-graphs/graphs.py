"""NCCL's calls in CUDA graphs, a process a GPU, without torch.distributed.

    RANK=0 WORLD_SIZE=2 IDFILE=FILE python graphs.py

Buffers of cudaMalloc (malloc) or ncclMemAlloc (nccl), 20 or 100 calls a graph. Microseconds a call:
by the host's clock over 20 replays, and the median of replays between events.
"""

import itertools
import json
import os
import time
from pathlib import Path
from statistics import median

import torch

from meshwise import nccl

RANK, WORLD, ID = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(os.environ["IDFILE"])
SIZES = (2**10, 2**16, 2**20, 2**24, 2**28)


def joined() -> nccl.Communicator:
    if RANK == 0:
        ID.with_suffix(".new").write_text(json.dumps(nccl.unique_id()))
        ID.with_suffix(".new").rename(ID)
    while not ID.exists():
        time.sleep(0.01)
    return nccl.Communicator(json.loads(ID.read_text()), RANK, WORLD)


def call_of(comm: nccl.Communicator, kind: str, length: int, empty):
    about = {"dtype": torch.float32, "device": torch.device("cuda", RANK)}
    source = empty(length // WORLD if kind == "all_gather" else length, **about).fill_(1)
    result = empty(length, **about)
    if kind in ("all_reduce", "all_gather"):
        return comm.collective(kind, source, result)
    if kind == "shift":
        ends = [(RANK + 1) % WORLD, source], [(RANK - 1) % WORLD, result]
        return comm.exchange(*([nccl.Message(*end)] for end in ends))
    parts = (torch.chunk(buffer, WORLD) for buffer in (source, result))
    return comm.exchange(*([nccl.Message(*one) for one in enumerate(part)] for part in parts))


def timed(call, batch: int, barrier) -> tuple[float, float]:
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            call()
    barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(batch):
            call()
    graph.replay()
    barrier()
    began = time.perf_counter()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    host_s = (time.perf_counter() - began) / 20
    barrier()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    graph.replay()
    for mark in marks:
        mark.record()
        graph.replay()
    barrier()
    each = [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(marks)]
    return 1e6 * host_s / batch, 1e6 * median(each) / batch


def main() -> None:
    torch.cuda.set_device(RANK)
    comm = joined()
    meet = call_of(comm, "all_reduce", 1, torch.empty)

    def barrier() -> None:
        meet()
        torch.cuda.synchronize()

    for kind, size in itertools.product(("all_reduce", "all_gather", "shift", "all_to_all"), SIZES):
        row = []
        for name, empty in (("malloc", torch.empty), ("nccl", nccl.empty)):
            call = call_of(comm, kind, size // 4, empty)
            for batch in (20, 100) if size <= 2**20 else (20,):
                host, events = timed(call, batch, barrier)
                row.append(f"{name} {batch:3}: {host:8.2f} host {events:8.2f} events")
        if RANK == 0:
            print(f"{kind:10} {size:>10}  " + "  ".join(row), flush=True)
    barrier()
    comm.close()


main()
