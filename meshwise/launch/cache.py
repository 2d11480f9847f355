"""The private folder in which torch.compile and Triton keep compiled code.

Both run the code that they find there, and another user can create Inductor's default folder,
/tmp/torchinductor_USER, first. Ours is XDG_CACHE_HOME/meshwise (~/.cache/meshwise), mode 0700.
"""

import atexit
import contextlib
import functools
import logging
import os
import stat
from pathlib import Path

from meshwise.launch import scratch

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_ALL = stat.S_IRWXG | stat.S_IRWXO
log = logging.getLogger("meshwise")


@functools.cache
def use() -> None:
    """Make this process keep its compiled code in that folder, from now to its end."""
    held = contextlib.ExitStack()
    atexit.register(held.close)
    os.environ.update(variables(held.enter_context(scratch.folder())))


def variables(spare: Path) -> dict[str, str]:
    """Return environment variables for a process that compiles. A folder that the user named is
    used if only the user, and perhaps a group of the user's choice, can write into it. ``spare``
    is used if the home cannot be written."""
    return {
        name: _folder(name, own, spare)
        for name, own in ((INDUCTOR, "inductor"), (TRITON, "triton"))
    }


def _folder(name: str, own: str, spare: Path) -> str:
    if named := os.environ.get(name):
        folder = Path(named).resolve()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check(folder, others=stat.S_IWOTH)
        return str(folder)
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().resolve()
    folder = home / "meshwise" / own
    try:
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check(each, others=_ALL)
    except OSError as error:
        log.warning("%s: %s; compiled code is not kept", folder, error.strerror)
        return str(spare / own)
    return str(folder)


def _check(folder: Path, others: int) -> None:
    """Refuse a folder that others own, may replace, or have any of the rights ``others`` to."""
    _refuse(folder, folder.lstat(), {os.geteuid()}, others)
    for parent in folder.resolve().parents:
        status = parent.stat()
        # in a sticky folder, such as /tmp, only the owner of a file may replace it
        writable = 0 if status.st_mode & stat.S_ISVTX else stat.S_IWOTH
        _refuse(parent, status, {os.geteuid(), 0}, writable)


def _refuse(folder: Path, status: os.stat_result, owners: set[int], others: int) -> None:
    if stat.S_ISLNK(status.st_mode):
        why = "is a link"
    elif status.st_uid not in owners:
        why = f"belongs to user {status.st_uid}"
    elif status.st_mode & others:
        why = f"has mode {stat.S_IMODE(status.st_mode):04o}"
    else:
        return
    raise ValueError(
        f"{folder} {why}: others could place code there that torch.compile runs; remove it, or set "
        f"{INDUCTOR} and {TRITON} to folders of yours alone"
    )
