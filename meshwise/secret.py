"""The secret of jobs that meet: from a file that only its owner can read, or from a variable.

Its text is never an argument, and never in an error or in provenance.
"""

import contextlib
import os
import secrets
import stat
from pathlib import Path

FILE, VALUE = "MESHWISE_SECRET_FILE", "MESHWISE_SECRET"
SHORTEST, LONGEST = 32, 4096  # bytes; anyone who sees a proof can guess at it offline
OWN = "~/.meshwise/secret"
_MAKE = "openssl rand -hex 32"


def read(file: Path | str | None = None) -> bytes:
    """Return the secret in ``file``, else in MESHWISE_SECRET_FILE's file, else MESHWISE_SECRET,
    else the user's own, made at its first use. Raises a ValueError if others could read it."""
    named, value = os.environ.get(FILE), os.environ.get(VALUE)
    if not file and named and value:
        raise ValueError(f"{FILE} and {VALUE} are both set: give one")
    if file or named:
        return _checked(_contents(Path(file or named or "")), str(file or named))
    return _checked(value.encode(), VALUE) if value else _own()


def _checked(text: bytes, source: str) -> bytes:
    text = text.strip()
    if not SHORTEST <= len(text) <= LONGEST:
        raise ValueError(
            f"the secret in {source} has not {SHORTEST} to {LONGEST} characters: "
            f"make one with `{_MAKE}`"
        )
    return text


def _contents(path: Path, flags: int = 0) -> bytes:
    """Return the start of this user's regular file, which nobody else may be able to open."""
    try:
        # without O_NONBLOCK a pipe would wait for its writer; checked after opening, not before
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except OSError as error:
        raise ValueError(f"the secret's file {path} cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"the secret's file {path} is no regular file")
        if found.st_uid != os.geteuid():
            raise ValueError(f"the secret's file {path} belongs to another user: make your own")
        if found.st_mode & 0o077:
            raise ValueError(f"the secret's file {path} is open to others: chmod 600 {path}")
        return os.read(opened, LONGEST + 3)
    finally:
        os.close(opened)


def _own() -> bytes:
    """Return the secret of this user's jobs, the same on all hosts with this home folder."""
    path = Path(os.path.expanduser(OWN))
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        folder = path.parent.lstat()
        if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.geteuid():
            raise ValueError(f"{path.parent} is no folder of this user: set {FILE} instead")
        if folder.st_mode & 0o022:
            raise ValueError(f"others can write {path.parent}: chmod 700 {path.parent}")
        if not os.path.lexists(path):
            _make(path)
    except OSError as error:
        raise ValueError(
            f"{path}, the secret of jobs that meet, cannot be made: {error.strerror}; "
            f"set {FILE} to a file with mode 0600"
        ) from None
    return _checked(_contents(path, os.O_NOFOLLOW), str(path))


def _make(path: Path) -> None:
    """Write the file atomically, unless another process is first: a link never replaces a file."""
    mine = path.with_name(f".{secrets.token_hex(8)}")
    opened = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(opened, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(opened)
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
    finally:
        mine.unlink()
