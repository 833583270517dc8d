"""Sizes, ages and rates as people type and read them. Pure; raises UsageError."""

from __future__ import annotations

import re
from typing import Final

from kvctl.core.errors import UsageError

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

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
    return int(float(number) * base ** _POWER[prefix.lower()])


def parse_age(text: str) -> float:
    """Seconds of '7d', '90m', '1.5h'. Raises UsageError."""
    match = _AGE.match(text)
    if match is None:
        raise UsageError(f"{text!r} is not a time span", hint="write it like 30s, 90m, 12h or 7d")
    return float(match.group(1)) * _SECONDS[match.group(2).lower()]


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
