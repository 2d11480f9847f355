"""Limits of how long ranks wait for each other before an error names who is missing.

Two limits, alike in all verbs. ``timeout``: of what ranks do in step, a collective or a barrier.
``setup_timeout``: of what each does at its own speed, the start, compiling, loading and saving.
A limit that is not given grows where processes take turns on a core.
"""

import contextlib
import math
import os
from pathlib import Path
from typing import NamedTuple

from meshwise.units import some_seconds

STEADY_S, SETUP_S = 30.0, 600.0  # where every rank has a core
MOST_TURNS = 20.0
_CPU = "/sys/fs/cgroup/cpu"
_QUOTAS = (f"{_CPU}.max",), (f"{_CPU}/cpu.cfs_quota_us", f"{_CPU}/cpu.cfs_period_us")
Limit = str | float | None


class Patience(NamedTuple):
    """Two limits in seconds; None is what suits the machine."""

    timeout_s: float | None = None
    setup_s: float | None = None

    def limits(self, ranks_here: int = 1) -> tuple[float, float]:
        """Both limits in seconds, for ``ranks_here`` ranks on this host."""
        factor = turns(ranks_here)
        return (
            STEADY_S * factor if self.timeout_s is None else self.timeout_s,
            SETUP_S * factor if self.setup_s is None else self.setup_s,
        )


USUAL = Patience()


def parsed(timeout: Limit, setup_timeout: Limit) -> Patience:
    """The limits that a user wrote, as ``30s``; ValueError names one that is no time above 0."""
    return Patience(
        None if timeout is None else some_seconds("timeout", timeout),
        None if setup_timeout is None else some_seconds("setup_timeout", setup_timeout),
    )


def turns(ranks_here: int = 1) -> float:
    """Count the processes that share a core of this host, ``ranks_here`` busy ones among them: 1
    where all have their own, at most 20. What the kernel does not tell does not count.

    Not by load averages: they count what waits for a disk or NFS too, and are wrong for minutes
    after a virtual machine was paused.
    """
    busy = [ranks_here / min(len(os.sched_getaffinity(0)), _quota())]
    with contextlib.suppress(OSError, ValueError, IndexError):  # now
        runnable = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        busy.append(int(runnable) / (os.cpu_count() or 1))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # since this process began
        ran_ns, waited_ns, _ = map(int, Path("/proc/self/schedstat").read_text().split())
        busy.append((ran_ns + waited_ns) / ran_ns)
    return min(MOST_TURNS, max(1.0, *busy))


def _quota() -> float:
    """Cores whose time a container may use: its cgroup's, of version 2 or 1."""
    for files in _QUOTAS:
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join(Path(file).read_text() for file in files).split()
            if int(quota) > 0 and int(period) > 0:
                return int(quota) / int(period)
    return math.inf
