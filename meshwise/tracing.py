"""torch's profiler over a piece of work, stopped only once gloo's threads sleep.

A collective's thread inherits the profiler of the rank that called it. If it still frees a block
while the profiler stops, torch 2.13 corrupts the heap and the rank dies without a word.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

GLOO_THREAD = "pt_gloo_runloop"
POLL_S = 0.001
MOST_S = 5.0


@contextmanager
def profiled(device_type: str, *, memory: bool = False) -> Iterator[profile]:
    """Profile the block: operators, on a GPU its kernels, with ``memory`` every allocation. The
    block ends with the device's work done."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device_type == "cuda" else []
    with profile(activities=activities, profile_memory=memory) as profiler:
        yield profiler
        _wait_for_gloo()


def events_of(profiler: profile) -> list[dict[str, Any]]:
    """Return the trace's events, as Chrome's trace format has them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _wait_for_gloo() -> None:
    """Return once none of this process's gloo threads runs, at the latest after ``MOST_S``."""
    deadline = time.monotonic() + MOST_S
    while any(map(_runs, Path("/proc/self/task").glob("*/stat"))) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _runs(stat: Path) -> bool:
    """``stat``: a thread's line in Linux's /proc, "id (name) state ..."."""
    try:
        name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
    except OSError:  # the thread is gone
        return False
    return name == GLOO_THREAD and rest.split()[0] == "R"
