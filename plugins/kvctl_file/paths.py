"""How keys become paths under a store's root, and why none can leave it. Pure but for the names it knows."""

from __future__ import annotations

import os

from kvctl.core.errors import UsageError
from kvctl.transports.keys import TEMP_SUFFIX


def root_of(url: str) -> str:
    """The absolute directory behind 'file:///dir' or 'file://relative/dir'."""
    path = url.removeprefix("file://")
    return os.path.abspath(path or "/")


def check_key(key: str) -> str:
    """`key`, when it names a file inside the root. Raises UsageError for '..', '', absolute and temp names."""
    parts = key.split("/")
    if any(part in {"", ".", ".."} for part in parts) or "\0" in key:
        raise UsageError(f"{key!r} is not a key: it could leave the store's directory")
    if parts[-1].endswith(TEMP_SUFFIX):
        raise UsageError(f"{key!r} is not a key: {TEMP_SUFFIX} is for files being written")
    return key
