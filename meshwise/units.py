"""Numbers with units: parse what users write, print what they read.

GB = 1e9 bytes, GiB = 2**30 bytes. Times are seconds, sizes bytes, rates per second; every
variable that holds one says so in its name (``_s``, ``_bytes``, ``_flops``).
"""

import math
import re

GiB = 2**30

_SIZE = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_TIME = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME |= {"d": 86400.0, "days": 86400.0}


def _scaled(text: str, scale: dict[str, float] | dict[str, int], said: str, example: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in scale:
        raise ValueError(f"{said} is not understood; write it like {example}")
    found = float(match[1]) * scale[match[2].lower()]
    if not math.isfinite(found):
        raise ValueError(f"{said} is too large; write it like {example}")
    return found


def _said(text: str, what: str, name: str) -> str:
    return f"{name} = {text!r}:" if name else f"{what} {text!r}"


def parse_bytes(text: str, name: str = "") -> int:
    """``"64M"`` and ``"64MiB"`` are 2**26 (as in nccl-tests), ``"64MB"`` is 64e6. ``name``: of the
    option, for what is refused."""
    return int(_scaled(text, _SIZE, _said(text, "size", name), "8, 64K, 1MiB or 2GB"))


def parse_seconds(text: str, name: str = "") -> float:
    """``"120s"``, ``"2m"``, ``"0.5h"``, ``"250ms"`` or a bare number of seconds. ``name``: of the
    option, for what is refused."""
    return _scaled(text, _TIME, _said(text, "time", name), "60s, 2m or 1h")


def some_seconds(name: str, given: str | float) -> float:
    """The same above 0, of the option ``name``; ValueError for no time at all or an endless one."""
    found = parse_seconds(str(given), name)
    if not 0 < found < 1e9:
        raise ValueError(f"{name} = {given!r}: must be some time, as 60s")
    return found


def format_bytes(size_bytes: float) -> str:
    """Binary units with one decimal: ``3.1 GiB``."""
    value, sign = abs(float(size_bytes)), "-" if size_bytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(value, 1) < 1024:
            return f"{sign}{value:.0f} {unit}" if unit == "B" else f"{sign}{value:.1f} {unit}"
        value /= 1024
    return f"{sign}{value:.1f} TiB"


def format_seconds(time_s: float) -> str:
    """Three significant digits in the unit that fits: ``18.2 us``, ``298 ms``, ``2.45 s``; from 100
    of a unit on the next: ``62.0 min``, ``7.60 h``, ``93.0 days``."""
    for longest_s, factor, unit in ((100.0, 1.0, "s"), (6e3, 60.0, "min"), (3.6e5, 3600.0, "h")):
        if 1 <= _rounded(time_s) < longest_s:
            return f"{_three_digits(time_s / factor)} {unit}"
    if _rounded(time_s) >= 1:
        return f"{_three_digits(time_s / 86400)} days"
    factor, unit = (1e-3, "ms") if _rounded(time_s) >= 1e-3 else (1e-6, "us")
    return f"{_three_digits(time_s / factor)} {unit}"


def format_rate(per_s: float, unit: str) -> str:
    """Decimal rates: ``format_rate(794e12, "FLOP/s")`` is ``794 TFLOP/s``."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if _rounded(per_s) >= factor:
            return f"{_three_digits(per_s / factor)} {prefix}{unit}"
    return f"{_three_digits(per_s)} {unit}"


def format_count(number: float) -> str:
    """Parameters and tokens: ``2.65 B``, ``124 M``, ``8192``."""
    for factor, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if _rounded(number) >= factor:
            return f"{_three_digits(number / factor)}{suffix}"
    return f"{number:.0f}"


def _rounded(value: float) -> float:
    """The magnitude as printed: 999.9 us must become 1.00 ms, not 1000 us."""
    return float(f"{abs(value):.3g}")


def _three_digits(value: float) -> str:
    magnitude = _rounded(value)
    return f"{value:.{0 if magnitude >= 100 else 1 if magnitude >= 10 else 2}f}"
