"""The folder of a checkpoint: read ``checkpoint.json``, and let only one run replace it.

In: a folder that all hosts see. Out: its ``Checkpoint``, if it is undamaged; or the folder, held by
one run that replaces the checkpoint. A run that ends in any way releases the folder.

A lock keeps a second run out from the start. Cluster file systems may grant a lock twice, or have
none. So a run that replaces the checkpoint first creates a file that must not exist, which is
exclusive on every file system. Then it checks that ``checkpoint.json`` is still the one that it
wrote last or found at its start. While that file exists, no other run can commit a subfolder, so
the other subfolders can be removed.
"""

import contextlib
import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from meshwise import files, store
from meshwise.engine.blocks import FIX
from meshwise.spec.checkpoint import SCHEMA_VERSION, Checkpoint

JSON = "checkpoint.json"
_MOST_JSON = 2**28  # bytes; the hashes of 10 TB are 40 MB
_LOCK, _COMMIT = ".lock", ".committing"
_OURS = re.compile(r"step-\d+-[0-9a-f]{8}")  # the only subfolders that are ever removed


def read(path: Path) -> Checkpoint:
    """Read a ``checkpoint.json`` and verify it. Raises a ValueError if it is damaged."""
    data = files.parse_json(
        files.read_bytes(path, at_most=_MOST_JSON), str(path), at_most=_MOST_JSON
    )
    old = isinstance(data, dict) and data.get("schema_version") == 1
    record = store.convert(_upgraded(data) if old else data, Checkpoint, str(path))
    found = record.sealed()
    if not old and record.digest != found.digest:
        raise ValueError(
            f"{path} is not as saved: its content has the digest {found.digest}, it says "
            f"{record.digest[:12]!r}; {FIX}"
        )
    return found


def _upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """Upgrade version 1, which stored only the size of each file."""
    sizes = data.get("files")
    if not isinstance(sizes, dict):
        return data
    stored = {name: {"bytes": size, "hashes": ""} for name, size in sizes.items()}
    return data | {"schema_version": SCHEMA_VERSION, "files": stored}


def check_files(folder: Path, record: Checkpoint, late_s: float = 0.0) -> None:
    """Check that all files exist, each within ``late_s``, and have their written sizes."""
    for name, stored in record.files.items():
        path = folder / record.data / name
        if not files.appeared(path, late_s, path.parent) or not path.is_file():
            raise ValueError(f"{path} is missing; use a folder that all hosts see, whole")
        if (found := path.stat().st_size) != stored.bytes:
            raise ValueError(f"{path} has {found} bytes of {stored.bytes}; {FIX}")


class HeldFolder:
    """A folder that one run may save into, until ``close`` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = _locked(folder)
        try:
            (folder / _COMMIT).unlink(missing_ok=True)  # left by a killed run
            self._standing = _content(folder)
        except BaseException:
            self.close()
            raise

    def replace(self, record: Checkpoint) -> None:
        """Make ``record`` the folder's checkpoint and remove the one before. If another run has
        replaced it since, keep that one, remove ``record.data`` and raise a ValueError."""
        path = self.folder / JSON
        written = msgspec.json.format(msgspec.json.encode(record.sealed()), indent=1) + b"\n"
        try:
            with self._alone():
                check_files(self.folder, record, files.LATE_S)  # other hosts wrote some just now
                if _content(self.folder) != self._standing:
                    raise ValueError(
                        f"{path} is not the one that this run wrote or found: another run saves "
                        "into this folder, and its checkpoint stays; save into a folder of your own"
                    )
                files.write_whole(path, written)
                self._standing = _digest(written)
                for other in self.folder.iterdir():
                    if other.name != record.data and _OURS.fullmatch(other.name):
                        shutil.rmtree(other, ignore_errors=True)
        except BaseException:
            with contextlib.suppress(ValueError):
                if _content(self.folder) != _digest(written):
                    shutil.rmtree(self.folder / record.data, ignore_errors=True)
            raise

    def close(self) -> None:
        os.close(self._lock)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        ticket = self.folder / _COMMIT
        try:
            os.close(os.open(ticket, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC))
        except FileExistsError:
            raise ValueError(
                f"{ticket} exists: another run replaces the checkpoint; save into another folder"
            ) from None
        try:
            yield
        finally:
            ticket.unlink(missing_ok=True)


def _content(folder: Path) -> str:
    """Return a digest of the folder's ``checkpoint.json``; empty if there is none."""
    path = folder / JSON
    return _digest(files.read_bytes(path, at_most=_MOST_JSON)) if os.path.lexists(path) else ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _locked(folder: Path) -> int:
    """Open and lock the folder's lock file. Raises a ValueError if another run holds it. If the
    file system has no locks, the check at the commit is enough."""
    path = folder / _LOCK
    try:
        lock, is_held = files.lock(path, mode=0o660)  # who can open it can hold it
    except BlockingIOError:
        who = path.read_bytes()[:100].decode(errors="replace")
        said = f" ({who})" if who and who.isprintable() else ""
        raise ValueError(
            f"another run{said} saves into {folder}; save into another folder, or end it"
        ) from None
    if is_held:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return lock
