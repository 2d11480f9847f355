"""Temporary folders that do not outlive their process.

Each holds a locked file. The kernel releases the lock when the process ends, however it ends. So a
folder whose lock is free has no owner, and whoever makes the next folder removes it.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshwise import files

PREFIX, LOCK = "meshwise-", "in-use"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Make a folder of mode 0700, empty except for its lock. It is removed when the body ends."""
    sweep()
    made, lock = _made()
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def sweep() -> None:
    """Remove this user's folders whose processes have ended. A folder without a lock file is being
    made, or its maker died meanwhile. It is removed if empty; a live maker then makes another.
    Folders that the user made have a different mode."""
    for found in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = found.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if not ours or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                continue
            try:
                lock, is_held = files.lock(found / LOCK, create=False)
            except FileNotFoundError:
                found.rmdir()
                continue
            if is_held:
                shutil.rmtree(found, ignore_errors=True)
            os.close(lock)


def _made() -> tuple[Path, int]:
    """Make a folder and its lock. The file system may have no locks."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # swept before it was locked
            lock, _ = files.lock(made / LOCK, mode=0o600)
            if (made / LOCK).exists():
                return made, lock
            os.close(lock)
