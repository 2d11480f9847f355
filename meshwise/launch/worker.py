"""One rank's process: ``python -m meshwise.launch.worker ORDER.json PARENT``.

The kernel kills it when the thread that started it ends: that is asked for before anything heavy is
imported. A parent that died earlier is no longer the parent. Standard output belongs to the
parent's documents, so a rank's goes to standard error.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(request: str, parent: str, package: str = "meshwise") -> None:
    """Carry out the order, if the process ``parent`` still waits for it."""
    end_with(int(parent))
    os.dup2(2, 1)
    from meshwise.launch import order

    order.run(Path(request), package)


def end_with(parent: int) -> None:
    """End this process when its parent ends, now if it has. Ctrl-C and SIGTERM end it at once,
    also in the middle of a collective."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


if __name__ == "__main__":
    main(*sys.argv[1:])
