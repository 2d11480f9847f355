"""How fast one process verifies a checkpoint's file from the page cache: python rate.py [GiB]."""

import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from meshwise.engine.blocks import BLOCK, OFFSETS, DataFile, stored

SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 2

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "data.safetensors"
    tensors = {f"weight.{n}": torch.randn(2**26) for n in range(4 * SIZE)}
    offsets = json.dumps({name: {"saved_offsets": [0]} for name in tensors})
    save_file(tensors, path, metadata={OFFSETS: offsets})
    del tensors
    record, rates, reads = stored(path), [], []
    for _ in range(7):
        file = DataFile(path, record)
        last = max(part.last for part in file.parts.values())
        began = time.perf_counter()
        for first in range(0, last, BLOCK):
            file.read(first, min(first + BLOCK, last))
        rates.append(last / (time.perf_counter() - began) / 1e9)
        content = np.fromfile(path, np.uint64)  # in memory: what reading alone can reach
        began = time.perf_counter()
        np.bitwise_xor.reduce(content)
        reads.append(content.nbytes / (time.perf_counter() - began) / 1e9)
        del content
print(
    json.dumps(
        {
            "GiB": SIZE,
            "verified GB/s": [round(rate, 2) for rate in rates],
            "median GB/s": round(statistics.median(rates), 2),
            "one xor over memory, median GB/s": round(statistics.median(reads), 2),
            "threads of torch": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    )
)
