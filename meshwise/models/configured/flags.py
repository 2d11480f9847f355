"""Megatron-LM's flags: the list of its parser, and command lines or shell scripts of them.

``data/megatron.toml`` has the list, with its source. No script is run: arrays and strings of flags
are read, with the variables that the script itself sets.
"""

import re
import shlex
from collections.abc import Iterable, Iterator
from functools import cache

from meshwise.files import own_data
from meshwise.models.configured import unknown

_TORCHRUN = (
    "nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "rdzv-backend",
    "rdzv-endpoint", "rdzv-id", "max-restarts", "tee", "log-dir", "redirects",
)  # fmt: skip
_SET = re.compile(r"(?:export\s+)?(\w+)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


@cache
def takes() -> dict[str, str]:
    """Return what stands behind each flag: nothing (switches), one word (values), or any number of
    words (lists)."""
    lists = own_data("megatron.toml")
    kinds = {"switches": "switches", "values": "values", "lists": "lists", "benchmark": "switches"}
    return {
        f"--{name.replace('_', '-')}": kind
        for of, kind in kinds.items()
        for name in lists[of].split()
    }


def split(words: Iterable[str], also: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words behind it that are its own, and ("", [word]) for a word that
    belongs to none. ``also``: further flags, as ``takes`` has them. Underscores do for hyphens."""
    known, rest = takes() | also, list(words)
    while rest:
        flag, given, value = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            yield "", [f"{flag}{given}{value}"]
            continue
        if (name := flag.replace("_", "-")) not in known:
            raise unknown(flag, known, "flag of Megatron-LM")
        kind, own = known[name], [value] if given else []
        if kind == "values" and not given:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"{flag}: no value is given")
            own = [rest.pop(0)]
        while kind == "lists" and not given and rest and rest[0] != ")" and rest[0][:2] != "--":
            own.append(rest.pop(0))
        yield name, own


def parsed(text: str) -> tuple[dict[str, str | bool], int | None]:
    """Return the flags of a command line or a script, and the number of ranks if torchrun's flags
    beside them say it. An unknown flag raises a ValueError with the nearest."""
    words, is_script = _words(text)
    found: dict[str, str | bool] = {}
    for name, own in split(words, {f"--{name}": "values" for name in _TORCHRUN}):
        if name:
            found[name] = " ".join(own) if own or takes().get(name) != "switches" else True
        elif not (is_script or own[0].endswith(".py") or own[0] == "torchrun"):
            raise ValueError(f"{own[0]!r}: belongs to no flag; leave it out")
    of_torchrun = {name: found.pop(f"--{name}", "1") for name in _TORCHRUN}
    sizes = [str(of_torchrun[name]) for name in ("nproc-per-node", "nnodes")]
    if sizes[0] == "1" or not all(size.isdecimal() for size in sizes):
        return found, None
    return found, int(sizes[0]) * int(sizes[1])


def _words(text: str) -> tuple[list[str], bool]:
    """Return the words among which the flags are, and whether the text is a script."""
    try:
        words = shlex.split(text, comments=True)
        sets, found = dict[str, str](), list[str]()
        for word in words:
            whole = _VARIABLE.sub(lambda m: _value(m, sets), word)
            if word.startswith("--") or not (given := _SET.fullmatch(whole)):
                found.append(whole)
                continue
            sets[given[1]] = given[2]
            if "--" in given[2]:  # NAME="--flag value", or the first of NAME=(--flag
                found += shlex.split(given[2].removeprefix("("), comments=True)
    except ValueError as error:
        raise ValueError(f"no words of a shell: {error}; give the flags alone") from None
    closed = (part for word in found for part in _closed(word))
    return list(closed), bool(sets) or text.startswith("#!")


def _value(match: "re.Match[str]", sets: dict[str, str]) -> str:
    usual = match[0] if match[2] is None else match[2]
    return sets.get(match[1] or match[3], usual)


def _closed(word: str) -> list[str]:
    """Cut off the bracket that ends an array; it may touch the last word."""
    if word.endswith(")") and word.count(")") > word.count("(") and word != ")":
        return [word[:-1], ")"]
    return [word]
