"""How fast one process verifies a checkpoint's file from the page cache, by threads that each read
tensors of their own as ``engine.checkpoint`` has them: python rate.py [GiB]."""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from meshwise.engine.blocks import OFFSETS, DataFile, stored

SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 2

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "data.safetensors"
    tensors = {f"weight.{n}": torch.randn(2**26) for n in range(4 * SIZE)}
    offsets = json.dumps({name: {"saved_offsets": [0]} for name in tensors})
    save_file(tensors, path, metadata={OFFSETS: offsets})
    del tensors
    record = stored(path)
    rates: dict[str, list[float]] = {}
    reads = []

    def read(name: str) -> int:
        part = file.parts[name]
        for _, first, last in part.pieces():
            file.read(first, last)
        return part.last - part.first

    for _ in range(7):
        for count in (1, 2, 4, 8):
            file = DataFile(path, record)
            began = time.perf_counter()
            with ThreadPoolExecutor(count) as threads:
                total = sum(threads.map(read, file.parts))
            rates.setdefault(str(count), []).append(total / (time.perf_counter() - began) / 1e9)
        content = np.fromfile(path, np.uint64)  # in memory: what reading alone can reach
        began = time.perf_counter()
        np.bitwise_xor.reduce(content)
        reads.append(content.nbytes / (time.perf_counter() - began) / 1e9)
        del content
print(
    json.dumps(
        {
            "GiB": SIZE,
            "median GB/s verified, by threads": {
                count: round(statistics.median(of), 2) for count, of in rates.items()
            },
            "all GB/s": {count: [round(rate, 2) for rate in of] for count, of in rates.items()},
            "one xor over memory by one thread, median GB/s": round(statistics.median(reads), 2),
            "cores": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }
    )
)
