"""Make foreign text safe to show: no control characters, no credentials, one line.

Names in files, error messages of libraries and words of a command line reach terminals, logs and
run.json. A control character in them could move the cursor, change colours, forge a line or reverse
the reading direction. It is shown as its JSON escape.
"""

import re
from collections.abc import Iterable

MOST = 293  # characters of an error: 300 with "error: " before it
_LOOKED_AT = 20 * MOST

# C0, delete and C1; letters that join, turn or hide others; Unicode's line ends; lone surrogates
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff]"
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# the user of a URL, even if "//" was normalised to "/"; user:password@ before a host without a
# scheme
_USER = re.compile(
    r"(?:(?<=://)|(?<=:/))[^\s/?#'\"]+@|(?<![^\s=,;'\"(])[^\s/@:=,;'\"]+:[^\s/@,;'\"]+@(?=[\w\[])"
)
_SECRET = r"(?:token|secret|passw(?:or)?d|passphrase|pwd|[_-]key|auth|credentials?|signature)"
_NAMED = re.compile(rf"(?<![\w.-])([\w.-]*{_SECRET}=)[^\s&,;'\"]+", re.IGNORECASE)
_OPTION = re.compile(rf"--?[\w-]*{_SECRET}", re.IGNORECASE)
_DOOR = re.compile("token|secret|passw|pwd|key|auth|cred", re.IGNORECASE)


def plain(text: str, keep: str = "") -> str:
    """Escape control characters except those in ``keep``."""

    def escape(found: re.Match[str]) -> str:
        one = found[0]
        return one if one in keep else _SHORT.get(one, f"\\u{ord(one):04x}")

    return _CONTROL.sub(escape, text)


def one_line(text: str, most: int = MOST) -> str:
    """Return ``text`` without credentials, in one line of at most ``most`` characters."""
    return _shortened(plain(masked(_shortened(" ".join(text.split()), _LOOKED_AT))), most)


def _shortened(line: str, most: int) -> str:
    """Cut a line in the middle, between words unless they are long: its end has the fix."""
    if len(line) <= most:
        return line
    size = most // 3
    head = re.sub(r" \S{0,20}$", "", line[: most - size - 5])
    tail = re.sub(r"^\S{0,20} ", "", line[-size:])
    return f"{head} ... {tail}"


def names_a_secret(name: str) -> bool:
    """Return whether a variable of this name may hold a credential."""
    return _DOOR.search(name) is not None


def masked(text: str) -> str:
    """Mask credentials: the user of a URL, ``user:password@host``, ``token=...``."""
    return _NAMED.sub(r"\1***", _USER.sub("***@", text))


def masked_words(words: Iterable[str]) -> tuple[str, ...]:
    """Mask credentials in the words of a command, also the word after ``--token``."""
    found, hide = [], False
    for word in words:
        found.append("***" if hide and not word.startswith("-") else masked(plain(word)))
        hide = _OPTION.fullmatch(word) is not None
    return tuple(found)
