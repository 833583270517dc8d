"""What a key may be, the same for every store: so that a repo can move from any store to any other. Pure."""

from __future__ import annotations

from typing import Final

from kvctl.core.errors import UsageError

# of files that are being written, where a store is a folder: never listed, and no key of such a store ends so
TEMP_SUFFIX: Final = ".kvctl-tmp"


def check_key(key: str) -> str:
    """`key`, when every store can hold it. Raises UsageError for an empty one, for parts that are empty, '.' or
    '..', and for NUL.
    """
    if "\0" in key or any(part in {"", ".", ".."} for part in key.split("/")):
        raise UsageError(f"{key!r} is not a key: its parts must not be empty, '.' or '..'")
    return key
