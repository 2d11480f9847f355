"""One rank's process: ``python -m meshwise.launch.worker ORDER.json PARENT``.

The kernel kills it when the thread that started it ends; this is set up before any heavy import. If
the parent died before that, the process has another parent and exits. Standard output is for the
parent's documents, so a rank's output goes to standard error.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

from meshwise.signals import ENDING

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(request: str, parent: str, package: str = "meshwise") -> None:
    """Carry out the order, if the process ``parent`` still exists."""
    end_with(int(parent))
    os.dup2(2, 1)
    from meshwise.launch import order

    order.run(Path(request), package)


def end_with(parent: int) -> None:
    """End this process when its parent ends, or now if it has ended. Ctrl-C and SIGTERM end this
    process at once, also in the middle of a collective."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


if __name__ == "__main__":
    main(*sys.argv[1:])
