"""Reading the options of a transport (`--transport-opt name=value`) strictly. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvctl.core.errors import UsageError


def check_names(transport: str, options: Mapping[str, str], known: Collection[str]) -> None:
    """Raises UsageError for an option that the transport does not have."""
    if unknown := sorted(set(options) - set(known)):
        raise UsageError(
            f"transport {transport} has no option {unknown[0]!r}", hint=f"it has {', '.join(sorted(known)) or 'none'}"
        )


def number(options: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    """A whole number of [low, high]. Raises UsageError."""
    text = options.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise UsageError(f"{name}={text} is not a number from {low} to {high}")
    return int(text)


def choice(options: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """One of `allowed`, the first by default. Raises UsageError."""
    value = options.get(name, allowed[0])
    if value not in allowed:
        raise UsageError(f"{name}={value} means nothing", hint=f"use {' or '.join(allowed)}")
    return value
