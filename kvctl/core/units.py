"""Sizes, ages and rates as people type and read them. Pure; raises UsageError."""

from __future__ import annotations

import re
from typing import Final

from kvctl.core.errors import UsageError

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

# What offsets of files, and waits and dates of every kind, can hold.
MAX_SIZE: Final = (1 << 63) - 1
MAX_AGE: Final = 100 * 31_557_600.0

_DIGITS: Final = 18
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)(b?)\s*$", re.IGNORECASE)
_AGE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w|y)\s*$", re.IGNORECASE)
_POWER: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SECONDS: Final = {
    "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0, "y": 31_557_600.0,
}  # fmt: skip


def parse_size(text: str) -> int:
    """Bytes of '16MiB' (1024-based), '16MB' (1000-based), '4096'. Raises UsageError."""
    match = _SIZE.match(text)
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="write it like 16MiB, 2GB or 4096")
    number, prefix, binary, _ = match.groups()
    base = 1024 if binary else 1000
    # a whole number stays exact
    nbytes = (float(number) if "." in number else int(number[:40])) * base ** _POWER[prefix.lower()]
    if nbytes > MAX_SIZE:
        raise UsageError(f"{text!r} is more bytes than there are", hint="at most 8191PiB")
    return int(nbytes)


def is_count(text: str) -> bool:
    """Whether `text` is a whole number as programs write it: other scripts' digits, and thousands of them, are text."""
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


def parse_age(text: str) -> float:
    """Seconds of '7d', '90m', '1.5h'. Raises UsageError."""
    match = _AGE.match(text)
    if match is None:
        raise UsageError(f"{text!r} is not a time span", hint="write it like 30s, 90m, 12h or 7d")
    seconds = float(match.group(1)) * _SECONDS[match.group(2).lower()]
    if seconds > MAX_AGE:
        raise UsageError(f"{text!r} is longer than anything here lasts", hint="at most 100y")
    return seconds


def format_size(nbytes: int) -> str:
    """'1.5 GiB': three significant digits, 1024-based."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            return (
                f"{int(value)} B" if unit == "B" else f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
            )
        value /= 1024
    return f"{value:.3g} PiB"


def format_seconds(seconds: float) -> str:
    """'1.52 s', '83 ms', '12m05s'."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m{rest:02d}s" if hours else f"{minutes}m{rest:02d}s"


def gigabytes_per_second(nbytes: int, seconds: float) -> float:
    """Decimal GB/s; 0.0 for no time."""
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0
