"""Limits of how long ranks wait for each other before an error names the missing ranks.

All verbs have the same two limits. ``timeout``: for work that ranks do together, a collective or a
barrier. ``setup_timeout``: for work at each rank's own speed: the start, compiling, loading and
saving. A limit that is not given grows if processes share a core.
"""

import contextlib
import math
import os
from pathlib import Path
from typing import NamedTuple

from meshwise.units import some_seconds

STEADY_S, SETUP_S = 30.0, 600.0  # if every rank has a core
MOST_TURNS = 20.0
_CPU = "/sys/fs/cgroup/cpu"
_QUOTAS = (f"{_CPU}.max",), (f"{_CPU}/cpu.cfs_quota_us", f"{_CPU}/cpu.cfs_period_us")
Limit = str | float | None


class Patience(NamedTuple):
    """Two limits in seconds. None: a limit that suits the machine."""

    timeout_s: float | None = None
    setup_s: float | None = None

    def limits(self, ranks_here: int = 1) -> tuple[float, float]:
        """Return both limits in seconds, for ``ranks_here`` ranks on this host."""
        factor = turns(ranks_here)
        return (
            STEADY_S * factor if self.timeout_s is None else self.timeout_s,
            SETUP_S * factor if self.setup_s is None else self.setup_s,
        )


USUAL = Patience()


def parsed(timeout: Limit, setup_timeout: Limit) -> Patience:
    """Parse a user's limits, such as ``30s``. A limit that is no time above 0 is a ValueError."""
    return Patience(
        None if timeout is None else some_seconds("timeout", timeout),
        None if setup_timeout is None else some_seconds("setup_timeout", setup_timeout),
    )


def turns(ranks_here: int = 1) -> float:
    """Return how many processes share a core of this host, at most 20, with ``ranks_here`` busy
    ones among them; 1 if all have their own. Figures that the kernel does not give are left out.

    Load averages are not used: they also count processes that wait for a disk or NFS, and are wrong
    for minutes after a virtual machine was paused.
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
    """Return the cores whose time a container may use, from its cgroup (version 2 or 1)."""
    for files in _QUOTAS:
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join(Path(file).read_text() for file in files).split()
            if int(quota) > 0 and int(period) > 0:
                return int(quota) / int(period)
    return math.inf
