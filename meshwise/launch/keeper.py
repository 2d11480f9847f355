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
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def beside() -> Iterator[IO[bytes]]:
    """Start the program. Yield the file for process groups that must not outlive this process."""
    import subprocess

    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        yield process.stdin
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


if __name__ == "__main__":
    groups = [int(line) for line in sys.stdin]
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
