"""Temporary folders that do not outlive their process.

Each holds a locked file. The kernel lets go of the lock when the process ends, however it ends, so
a folder whose lock is free belongs to nobody: whoever makes the next one removes it.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX, LOCK = "meshwise-", "in-use"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty folder (but for its lock) of mode 0700, gone when the body ends."""
    sweep()
    made, lock = _made()
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def sweep() -> None:
    """Remove this user's folders whose processes have ended. One without a lock is being made, or
    its maker died amid that: it goes if it is empty, and a maker that lives makes another. Folders
    of the user's making have another mode."""
    for found in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = found.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if not ours or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                continue
            try:
                lock = _locked(found, os.O_RDWR)
            except FileNotFoundError:
                found.rmdir()
                continue
            shutil.rmtree(found, ignore_errors=True)
            os.close(lock)


def _made() -> tuple[Path, int]:
    while True:
        made = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # swept before it was locked
            lock = _locked(made, os.O_RDWR | os.O_CREAT)
            if (made / LOCK).exists():
                return made, lock
            os.close(lock)


def _locked(path: Path, flags: int) -> int:
    """The folder's lock, held; BlockingIOError if another process holds it."""
    lock = os.open(path / LOCK, flags | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if flags & os.O_CREAT and not isinstance(error, BlockingIOError):
            return lock  # a file system without locks: nobody else gets one either
        os.close(lock)
        raise
    return lock
