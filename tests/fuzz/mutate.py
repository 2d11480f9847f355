"""Damage to valid inputs that knows their structure, so that most of it passes the parser.

``mutant(data, form, rng)`` changes a few places of one example. Forms: ``json``, ``jsonl``,
``toml``, ``text`` (lines of words and numbers), ``bytes`` and ``argv`` (a JSON list of words).
"""

import gzip
import io
import json
import os
import random
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

_NUMBERS = (
    0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e-300, 1e308, 10**12, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63,
    10**320, float("nan"), float("inf"), 1e18, 64, 4096,
)  # fmt: skip
_STRINGS = (
    "", " ", "x", "0", "-1", "1e9", "none", "null", "../..", "/dev/null", "a" * 5000, "é",
    "\x1b[31mred", "\u202eevil", "line\nbreak", "\x00", "{rank}", "%s%n", "'; rm", "nan", "١٢",
    "gpt-30m", "bf16",
)  # fmt: skip
_TOKENS = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?|\w+|[^\w\s]")


def mutant(data: bytes, form: str, rng: random.Random) -> bytes:
    """One to four changes to ``data``; one time in eight, bytes are damaged whatever the form."""
    change = _BYTES if form == "bytes" or rng.random() < 0.125 else _FORMS[form]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = change(data, rng)
    return data


def _json(data: bytes, rng: random.Random) -> bytes:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return _BYTES(data, rng)
    return _written(_changed(found, rng), rng)


def _written(data: Any, rng: random.Random) -> bytes:
    try:
        text = json.dumps(data)
    except RecursionError:  # nested again and again
        return b"[" * 5000
    if rng.random() < 0.03:  # a key twice, which json.dumps cannot say
        text = re.sub(r'("[^"]+": )', r"\g<1>0, \g<1>", text, count=1)
    return text.encode()


def _changed(data: Any, rng: random.Random) -> Any:
    places = list(_places(data))
    if not places:
        return _value(data, rng)
    holder, key = rng.choice(places)
    old, kind = holder[key], rng.random()
    if kind < 0.6:
        holder[key] = _value(old, rng)
    elif kind < 0.7:
        del holder[key]
    elif kind < 0.76 and isinstance(holder, dict):
        holder[rng.choice((f"{key}_", key.upper(), "schema_version", "\x1b[2J", ""))] = old
    elif kind < 0.82 and isinstance(holder, list):
        holder[key:key] = [old] * rng.choice((1, 2, 300))
    elif kind < 0.86:
        for _ in range(rng.choice((2, 70, 300))):
            old = [old]
        holder[key] = old
    else:
        other, at = rng.choice(places)
        holder[key] = other[at]
        if _holds(holder[key], holder):
            holder[key] = old
    return data


def _holds(data: Any, sought: Any) -> bool:
    return data is sought or any(holder[key] is sought for holder, key in _places(data))


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place for a value, however deep, the outer before the inner."""
    waiting = [data]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, tuple):
            yield holder
            holder = holder[0][holder[1]]
        if isinstance(holder, dict | list):
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            waiting += [(holder, key) for key in reversed(keys)]


def _value(old: Any, rng: random.Random) -> Any:
    """A value near the old one, or far from any that is meant."""
    kind = rng.random()
    if isinstance(old, bool) and kind < 0.5:
        return not old
    if isinstance(old, int | float) and abs(old) < 1e300 and kind < 0.75:
        nearby = (old * 2, old + 1, old - 1, -old, old / 2, old * 1000, float(old), str(old))
        return rng.choice(nearby)
    if isinstance(old, str) and kind < 0.3:
        return old[: len(old) // 2] or "x"
    return rng.choice((*_NUMBERS, *_STRINGS, None, True, [], {}, [1], {"a": 1}))


def _lines(change: Callable[[bytes, random.Random], bytes]) -> Callable[..., bytes]:
    def changed(data: bytes, rng: random.Random) -> bytes:
        lines = data.split(b"\n")
        at = rng.randrange(len(lines))
        kind = rng.random()
        if kind < 0.6:
            lines[at] = change(lines[at], rng)
        elif kind < 0.7:
            del lines[at]
        elif kind < 0.8:
            lines[at:at] = [lines[at]] * rng.choice((1, 50))
        elif kind < 0.9:
            lines.insert(at, rng.choice(lines))
        else:
            lines = lines[at:] + lines[: rng.choice((0, at))]
        return b"\n".join(lines)

    return changed


def _words(line: bytes, rng: random.Random) -> bytes:
    text = line.decode(errors="replace")
    tokens = list(_TOKENS.finditer(text))
    if not tokens:
        return _BYTES(line, rng)
    token = rng.choice(tokens)
    new = rng.choice((str(rng.choice(_NUMBERS)), rng.choice(_STRINGS), token[0] * 2, ""))
    return (text[: token.start()] + new + text[token.end() :]).encode()


def _bytes(data: bytes, rng: random.Random) -> bytes:
    at, kind = rng.randrange(len(data) + 1), rng.random()
    if kind < 0.3:
        return data[:at]
    if kind < 0.6:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind < 0.7:
        return data[:at] + rng.randbytes(rng.choice((1, 16, 4096))) + data[at:]
    if kind < 0.8:
        return data[:at] + data[at + rng.choice((1, 8, 512)) :]
    if kind < 0.9:
        return data + data
    if kind < 0.95:
        return rng.choice((b"", b"\xff\xfe", b"[" * 100_000, b"9" * 100_000, b"\x93NUMPY", b"{}"))
    return gzip.compress(bytes(2**26) if data[:2] == b"\x1f\x8b" else data)


def _argv(data: bytes, rng: random.Random) -> bytes:
    words = json.loads(data)
    kind, at = rng.random(), rng.randrange(1, len(words) + 1)
    word = rng.choice((*_STRINGS, *map(str, _NUMBERS), "--", "-", "--json", "--no-such"))
    if kind < 0.5 and at < len(words):
        changed = os.fsdecode(_words(os.fsencode(words[at]), rng))  # as a shell hands over bytes
        words[at] = word if kind < 0.35 else changed
    elif kind < 0.7 and at < len(words):
        del words[at]
    elif kind < 0.85:
        words.insert(at, word)
    else:
        words.insert(at, rng.choice(words))
    return json.dumps(words).encode()


def _packed(data: bytes, rng: random.Random) -> bytes:
    """What is inside of gzip changed, or the archive."""
    if rng.random() < 0.5:
        return _bytes(data, rng)
    try:
        inside = gzip.GzipFile(fileobj=io.BytesIO(data)).read(2**20)  # it may be a bomb already
        return gzip.compress(_FORMS["jsonl"](inside, rng))
    except (OSError, EOFError, zlib.error):
        return _bytes(data, rng)


_BYTES = _bytes
_FORMS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "json": _json,
    "jsonl": _lines(_json),
    "toml": _lines(_words),
    "text": _lines(_words),
    "packed": _packed,
    "bytes": _bytes,
    "argv": _argv,
}
