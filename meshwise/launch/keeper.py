"""Kill the compilers and other children of ranks if the process that started the ranks is killed.

The kernel kills the ranks themselves (``worker``), but not the rest of their process groups. This
file runs as a separate program, without the package. It reads process groups from standard input,
one per line, and kills them when the input ends. A parent that ends normally ends this program
first.
"""

import contextlib
import os
import signal
import sys

if __name__ == "__main__":
    groups = [int(line) for line in sys.stdin]
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
