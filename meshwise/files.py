"""The only way to read and write files: reads are bounded, writes are atomic.

Only regular files are read, without waiting: a FIFO, a device or a folder is refused. Bytes,
unpacked bytes, depth and numbers are bounded, and duplicate keys are refused. A write goes to a new
file beside the old one, which is synced to disk before it replaces the old one. A reader sees one
of the two, whole. Symbolic links are followed for reading and refused for writing: the linked file
may be anywhere. Every failure is a ValueError that begins with the file's name.
"""

import contextlib
import errno
import fcntl
import functools
import gzip
import importlib.resources
import io
import json
import math
import os
import re
import secrets
import stat
import time
import tomllib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 2**24  # of a document: parsed, JSON of 16 MiB may take 800 MiB
MOST_VALUES = 2**23  # of a longer document, and of lines: most of them is text, such as hashes
MOST_LINES_BYTES = 2**27  # of files read line by line: samples, steps, logs of other tools
DEEPEST = 64  # levels of lists and tables
LATE_S = 60.0  # until a shared file system shows what another host wrote: NFS's acdirmax
_MOST_TOML_BYTES = 2**18
_LOOK_S = 0.1
_MOST_WALKED = 2**22  # characters that are searched for the place of a refused value
_LARGEST_INT = 2**63 - 1

# tomllib needs quadratic time and memory for a key of many parts
_KEY_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_KEY_PART}){{{DEEPEST}}}")
_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*+")(\s*+:)?|([\[{])|([\]}])|([^\s,:\[\]{}"]++)', re.DOTALL)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # half a character: a surrogate, perhaps without its other
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def open_file(path: Path | str) -> BinaryIO:
    """Open a regular file for reading, without waiting."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    kind = _kind(os.fstat(descriptor))
    if kind != "file":
        os.close(descriptor)
        raise ValueError(f"{path} is a {kind}; name a file")
    return open(descriptor, "rb")


def appeared(path: Path | str, within_s: float = LATE_S, inside: Path | str = "/") -> bool:
    """Return whether a file is there that another host has just written. Wait for it, as a shared
    file system may show it late, while there is the folder ``inside``."""
    limit = time.monotonic() + within_s
    while not os.path.lexists(path) and os.path.isdir(inside) and time.monotonic() < limit:
        time.sleep(_LOOK_S)
    return os.path.lexists(path)


def read_bytes(path: Path | str, *, at_most: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most ``at_most`` bytes."""
    with open_file(path) as file:
        try:
            data = file.read(at_most + 1)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > at_most:
        raise ValueError(f"{path} is larger than {_mib(at_most)}; is it the right file?")
    return data


def read_text(path: Path | str, *, at_most: int = MOST_BYTES) -> str:
    """Read a regular file of at most ``at_most`` bytes as UTF-8."""
    return _text(read_bytes(path, at_most=at_most), str(path))


def unpack(data: bytes, path: Path | str, *, at_most: int = MOST_BYTES) -> bytes:
    """Unpack ``gzip`` data to at most ``at_most`` bytes. Errors name ``path``."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            found = file.read(at_most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged gzip ({error}); copy it again") from None
    if len(found) > at_most:
        raise ValueError(f"{path} unpacks to more than {_mib(at_most)}; is it the right file?")
    return found


def parse_json(data: bytes | str, source: str, *, at_most: int = MOST_BYTES) -> Any:
    """Parse JSON to plain data. Errors name line and field. Refused: duplicate keys, more than
    ``DEEPEST`` levels, NaN and Infinity, integers of 2^63 and more, lone surrogates."""
    if len(data) > at_most:
        raise ValueError(f"{source} is larger than {_mib(at_most)}; is it the right file?")
    text = _text(data, source) if isinstance(data, bytes) else data
    if len(text) > MOST_BYTES and sum(map(text.count, ",:[{")) > MOST_VALUES:
        raise ValueError(f"{source} holds more than {MOST_VALUES:,} values; is it the right file?")
    try:
        found = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_int,
            parse_float=_float,
            parse_constant=_float,
        )
        _check_depth(found)
        if _HALF.search(text) and _SURROGATE.search(json.dumps(found, ensure_ascii=False)):
            raise _Refused("holds half a character (a lone surrogate)")
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not JSON: {error}") from None
    except (_Refused, RecursionError) as error:
        told = str(error) if isinstance(error, _Refused) else f"has more than {DEEPEST} levels"
        where = _refused(text) if len(text) <= _MOST_WALKED else None
        raise ValueError(f"{source}: {where or told}") from None
    return found


def own_data(name: str) -> dict[str, Any]:
    """Read a TOML file that comes with the package, as plain data."""
    return parse_toml((importlib.resources.files("meshwise") / "data" / name).read_bytes(), name)


def parse_toml(data: bytes | str, source: str) -> dict[str, Any]:
    """Parse TOML to plain data, within the same bounds."""
    if len(data) > _MOST_TOML_BYTES:
        raise ValueError(f"{source} is larger than {_mib(_MOST_TOML_BYTES)}; write it as JSON")
    text = _text(data, source) if isinstance(data, bytes) else data
    if long := _LONG_KEY.search(text):
        line = text.count("\n", 0, long.start()) + 1
        raise ValueError(f"{source}: line {line}: a key has more than {DEEPEST} parts")
    try:
        found = tomllib.loads(text)
        _check_depth(found)
    except RecursionError:
        raise ValueError(f"{source}: has more than {DEEPEST} levels; write it flatter") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source} is not TOML: {error}") from None
    except ValueError:  # int() of thousands of digits
        raise ValueError(f"{source}: an integer is not below 2^63") from None
    for field, value in leaves(found):
        if isinstance(value, int | float) and (wrong := _out_of_range(value)):
            raise ValueError(f"{source}: {field}: {wrong}")
    return found


@contextlib.contextmanager
def replacing(path: Path | str, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file in the same folder; it may also be written through its ``name``. When the
    body ends, it replaces ``path``, with ``sync`` on disk. If the body fails, it is removed."""
    path = Path(path)
    with _errors_named(path):
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        mode = _mode_of(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    temporary = str(path.parent / f".meshwise-{secrets.token_hex(8)}")
    try:
        with _errors_named(path, temporary):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o666)
            try:
                # by its name, which os.fdopen would not know
                with open(temporary, "w+b", opener=lambda *_: descriptor) as file:
                    if mode is not None:
                        os.fchmod(descriptor, mode)
                    yield file
                    file.flush()
                    if sync:
                        os.fsync(descriptor)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            if sync:
                _sync(folder)
    finally:
        os.close(folder)


def write_whole(path: Path | str, data: bytes | str, *, sync: bool = True) -> Path:
    """Write a file, whole or not at all, and return its path. Text is written as UTF-8."""
    content = data.encode() if isinstance(data, str) else data
    with replacing(path, sync=sync) as file:
        file.write(content)
    return Path(path)


def append_line(path: Path | str, data: bytes | str, *, sync: bool = True) -> None:
    """Append a line, whole or not at all; with ``sync`` it is on disk when this returns. A torn
    last line is ended, not overwritten. ``data`` must have no line end."""
    path = Path(path)
    line = (data.encode() if isinstance(data, str) else data) + b"\n"
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with _errors_named(path):
        _mode_of(path)
        descriptor = os.open(path, flags, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            try:
                _write(descriptor, line)
                if sync:
                    os.fsync(descriptor)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        if sync and not size:
            sync_folder(path.parent)


def sync_folder(folder: Path | str) -> None:
    """Sync a folder's names to disk."""
    with _errors_named(Path(folder)):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(descriptor)
        finally:
            os.close(descriptor)


def lock(path: Path | str, *, create: bool = True, mode: int = 0o666) -> tuple[int, bool]:
    """Open a file and lock it for this process, until its end or until the descriptor is closed.

    Return the descriptor and whether it is locked: some file systems have no locks. Raises a
    BlockingIOError if another process holds it, another OSError if it cannot be opened.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags | (os.O_CREAT if create else 0), mode)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        return descriptor, False
    return descriptor, True


class _Refused(ValueError):
    """The error for a value that JSON allows and we do not. It gives the reason."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Refused("an object has a key twice")
    return found


def _number(literal: str, kind: Callable[[str], int | float]) -> int | float:
    value = kind(literal) if len(literal) <= 20 or kind is float else 10**20
    if wrong := _out_of_range(value):
        raise _Refused(f"{literal[:24]} {wrong}")
    return value


_int, _float = functools.partial(_number, kind=int), functools.partial(_number, kind=float)


def _out_of_range(value: int | float) -> str:
    """Return why a number is refused, or "" if it is fine."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else "is not a finite number"
    return "" if abs(value) <= _LARGEST_INT else "is not below 2^63"


def _check_depth(data: Any) -> None:
    """Raise a RecursionError if plain data has more than ``DEEPEST`` levels."""
    level = [data]
    for _ in range(DEEPEST + 1):
        held = [item for item in level if isinstance(item, dict | list)]
        if not held:
            return
        level = [x for item in held for x in (item.values() if isinstance(item, dict) else item)]
    raise RecursionError


def leaves(data: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf value with its field: ``tiers[0].num_devices``."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, f"{field}.{key}" if field else key)
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from leaves(value, f"{field}[{index}]")
    else:
        yield field, data


def _refused(text: str) -> str | None:
    """Return line, field and reason of the first value of a JSON text that is refused."""
    at: list[str | int] = []  # the field in each object, the index in each list
    keys: list[set[str] | None] = []

    def wrong(token: "re.Match[str]", reason: str) -> str:
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in at)
        field = "".join(parts).lstrip(".")
        field = field if len(field) <= 80 else f"{field[:38]} ... {field[-37:]}"
        line = text.count("\n", 0, token.start()) + 1
        return f"line {line}: {f'{field}: ' if field else ''}{reason}"

    for token in _TOKEN.finditer(text):
        string, colon, opening, closing, literal = token.groups()
        if closing:
            if not keys:
                return None
            keys.pop()
            at.pop()
            continue
        is_key = colon is not None and bool(keys) and keys[-1] is not None
        if keys and keys[-1] is None:
            at[-1] = int(at[-1]) + 1
        if string and _HALF.search(string) and _SURROGATE.search(json.loads(string, strict=False)):
            return wrong(token, "holds half a character (a lone surrogate)")
        if is_key:
            at[-1] = json.loads(string, strict=False)
            if at[-1] in keys[-1]:  # type: ignore[operator]
                return wrong(token, "stands twice")
            keys[-1].add(at[-1])  # type: ignore[union-attr, arg-type]
        elif opening:
            if len(keys) == DEEPEST:
                return wrong(token, f"is deeper than {DEEPEST} levels; write it flatter")
            keys.append(set() if opening == "{" else None)
            at.append("" if opening == "{" else -1)
        elif literal and literal not in ("true", "false", "null"):
            try:
                (_int if literal.lstrip("-").isdigit() else _float)(literal)
            except ValueError as error:
                return wrong(token, str(error))
    return None


def _text(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{source} is not a text file (line {line} is not UTF-8)") from None


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:g} MiB"


def _kind(status: os.stat_result) -> str:
    letter = stat.filemode(status.st_mode)[0]
    kinds = {"-": "file", "d": "folder", "l": "symbolic link", "p": "FIFO", "s": "socket"}
    return kinds.get(letter, "device")


def _mode_of(path: Path) -> int | None:
    """Return the permissions of the file to replace, or None if there is none. Refuse anything
    else than a file. The set-user and set-group bits are dropped."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    kind = _kind(status)
    if kind == "symbolic link":
        raise ValueError(f"{path} is a symbolic link; name the file that it means")
    if kind != "file":
        raise ValueError(f"{path} is a {kind}, which is not written over; name a file")
    return stat.S_IMODE(status.st_mode) & ~(stat.S_ISUID | stat.S_ISGID)


@contextlib.contextmanager
def _errors_named(path: Path, temporary: str | None = None) -> Iterator[None]:
    """Turn an OSError into a ValueError that names the file. With ``temporary``, errors of other
    files pass unchanged."""
    try:
        yield
    except OSError as error:
        named = error.filename
        if temporary is not None and named is not None and str(named) not in (str(path), temporary):
            raise
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot
            raise
