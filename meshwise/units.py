"""Values with units: parse what users write, format what they read.

GB = 1e9 bytes, GiB = 2**30 bytes. Times are seconds, sizes bytes, rates per second; a variable's
name ends in its unit (``_s``, ``_bytes``, ``_flops``).
"""

import math
import re

GiB = 2**30

_SIZE = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_TIME = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME |= {"d": 86400.0, "day": 86400.0, "sec": 1.0, "second": 1.0, "minute": 60.0, "hour": 3600.0}
_TIME |= {f"{word}s": _TIME[word] for word in ("day", "sec", "second", "min", "minute", "hour")}
_MANY = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# (least value as printed, factor, unit), the largest first
_Ladder = tuple[tuple[float, float, str], ...]
_SECONDS: _Ladder = ((3.6e5, 86400.0, "days"), (6e3, 3600.0, "h"), (100.0, 60.0, "min"))
_SECONDS += ((1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "us"))
_RATES: _Ladder = ((1e15, 1e15, "P"), (1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"))
_RATES += ((1e3, 1e3, "k"), (0.0, 1.0, ""))
_COUNTS: _Ladder = ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (0.0, 1e6, "M"))


def parse_bytes(text: str, name: str = "") -> int:
    """Read ``"64M"`` and ``"64MiB"`` as 2**26 (as nccl-tests does), ``"64MB"`` as 64e6.

    ``name``: the option that a refusal names.
    """
    return int(_parsed(text, _SIZE, "size", name, "8, 64K, 1MiB or 2GB"))


def parse_seconds(text: str, name: str = "") -> float:
    """Read ``"120s"``, ``"2m"``, ``"0.5h"``, ``"250ms"`` or a bare number of seconds.

    ``name``: the option that a refusal names.
    """
    return _parsed(text, _TIME, "time", name, "60s, 2m or 1h")


def parse_count(text: str, name: str = "") -> float:
    """Read ``"300B"`` as 300e9, ``"1.5T"``, ``"64k"`` or a bare number.

    ``name``: the option that a refusal names.
    """
    return _parsed(text, _MANY, "count", name, "300B or 15T")


def _parsed(
    text: str, scale: dict[str, float] | dict[str, int], what: str, name: str, example: str
) -> float:
    said = f"{name} = {text!r}:" if name else f"{what} {text!r}"
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in scale:
        raise ValueError(f"{said} is not understood; write it like {example}")
    found = float(match[1]) * scale[match[2].lower()]
    if not math.isfinite(found):
        raise ValueError(f"{said} is too large; write it like {example}")
    return found


def some_seconds(name: str, given: str | float) -> float:
    """Read a time above 0 for the option ``name``. Zero or an endless time raises a ValueError."""
    found = parse_seconds(str(given), name)
    if found >= 1e9:
        raise ValueError(f"{name} = {given!r}: must be below 1e9s, which is 31 years")
    if not found > 0:
        raise ValueError(f"{name} = {given!r}: must be some time, as 60s")
    return found


def some_rate(name: str, given: str | float) -> float:
    """Read bytes a second for the option ``name``: ``"373GB/s"``, or a number above 0."""
    refused = ValueError(f"{name} = {given!r}: must be bytes a second, as 373GB/s")
    try:
        found = float(parse_bytes(given.removesuffix("/s")) if isinstance(given, str) else given)
    except (ValueError, OverflowError):
        raise refused from None
    if not 0 < found < 1e300:
        raise refused
    return found


def parse_share(given: str | float, name: str) -> float:
    """Read ``"2%"`` or 0.02 for the option ``name``. It must be above 0 and below 1."""
    number, percent, rest = str(given).partition("%")
    try:
        found = float(number) / (100 if percent else 1)
    except ValueError:
        found = 0.0
    if not 0 < found < 1 or rest.strip():
        raise ValueError(f"{name} = {given!r}: must be a share, as 2% or 0.02")
    return found


def format_bytes(size_bytes: float) -> str:
    """Show binary units with one decimal: ``3.1 GiB``."""
    value, sign = abs(float(size_bytes)), "-" if size_bytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(value, 1) < 1024:
            return f"{sign}{value:.0f} {unit}" if unit == "B" else f"{sign}{value:.1f} {unit}"
        value /= 1024
    return f"{sign}{value:.1f} TiB"


def format_seconds(time_s: float) -> str:
    """Show three digits in the unit that fits: ``18.2 us``, ``298 ms``, ``2.45 s``, ``62.0 min``,
    ``7.60 h``, ``93.0 days``. From 100 s, 100 min and 100 h on, the next unit is used."""
    return _three_digits(time_s, _SECONDS)


def format_rate(per_s: float, unit: str) -> str:
    """Show decimal rates: ``format_rate(794e12, "FLOP/s")`` is ``794 TFLOP/s``."""
    return _three_digits(per_s, _RATES) + unit


def format_count(number: float) -> str:
    """Show parameters and tokens: ``2.65 B``, ``124 M``, ``8192``."""
    return _three_digits(number, _COUNTS) if _rounded(number) >= 1e6 else f"{number:.0f}"


def _rounded(value: float) -> float:
    """Return the magnitude as printed, so that 999.9 us becomes 1.00 ms, not 1000 us."""
    return float(f"{abs(value):.3g}")


def _three_digits(value: float, ladder: _Ladder) -> str:
    reached = (each for each in ladder if _rounded(value) >= each[0])
    _, factor, unit = next(reached, ladder[-1])
    magnitude = _rounded(value / factor)
    decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2
    return f"{value / factor:.{decimals}f} {unit}"
