"""Kill the compilers and whatever else ranks started when the process that started the ranks is
killed.

The kernel kills the ranks themselves (``worker``), but nobody else of their process groups. This
file runs as a program of its own, apart from the package: it reads process groups from standard
input, a line each, and kills them when that ends. A parent that ends in order ends this one first.
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
