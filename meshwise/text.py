"""Text that others wrote, made fit to show: no control characters, no credentials, one line.

Names in files, error messages of libraries and words of a command line reach terminals, logs and
run.json. A control character there could move the cursor, recolour, forge a line or turn reading
around; it is shown as the escape that JSON has for it.
"""

import re
from collections.abc import Iterable

MOST = 293  # characters of an error: 300 behind "error: "
_LOOKED_AT = 20 * MOST

# C0, delete and C1; what joins, turns or hides letters; line ends of Unicode; halves of characters
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff]"
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# the user of a URL, also where a path left one slash of it; user:password@ before a host where
# there is no scheme
_USER = re.compile(
    r"(?:(?<=://)|(?<=:/))[^\s/?#'\"]+@|(?<![^\s=,;'\"(])[^\s/@:=,;'\"]+:[^\s/@,;'\"]+@(?=[\w\[])"
)
_SECRET = r"(?:token|secret|passw(?:or)?d|passphrase|pwd|[_-]key|auth|credentials?|signature)"
_NAMED = re.compile(rf"(?<![\w.-])([\w.-]*{_SECRET}=)[^\s&,;'\"]+", re.IGNORECASE)
_OPTION = re.compile(rf"--?[\w-]*{_SECRET}", re.IGNORECASE)
_DOOR = re.compile("token|secret|passw|pwd|key|auth|cred", re.IGNORECASE)


def plain(text: str, keep: str = "") -> str:
    """Control characters as escapes; those in ``keep`` stay."""

    def escape(found: re.Match[str]) -> str:
        one = found[0]
        return one if one in keep else _SHORT.get(one, f"\\u{ord(one):04x}")

    return _CONTROL.sub(escape, text)


def one_line(text: str, most: int = MOST) -> str:
    """The same without what logs in, in one line of ``most`` characters."""
    return _cut(plain(masked(_cut(" ".join(text.split()), _LOOKED_AT))), most)


def _cut(line: str, most: int) -> str:
    """Cut in the middle: the end has the remedy."""
    if len(line) <= most:
        return line
    tail = most // 3
    return f"{line[: most - tail - 5].rstrip()} ... {line[-tail:].lstrip()}"


def names_a_secret(name: str) -> bool:
    """Whether a variable of this name may open a door."""
    return _DOOR.search(name) is not None


def masked(text: str) -> str:
    """Without what logs in: the user of a URL, ``user:password@host``, ``token=...``."""
    return _NAMED.sub(r"\1***", _USER.sub("***@", text))


def masked_words(words: Iterable[str]) -> tuple[str, ...]:
    """The words of a command without what logs in, that behind ``--token`` included."""
    found, hide = [], False
    for word in words:
        found.append("***" if hide and not word.startswith("-") else masked(plain(word)))
        hide = _OPTION.fullmatch(word) is not None
    return tuple(found)
