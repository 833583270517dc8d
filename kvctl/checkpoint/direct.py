"""Whether a checkpoint's files are written past the page cache. They are large, in page-aligned memory, and nobody
reads them soon: O_DIRECT takes no copy, and throws nothing out of the page cache that an engine needs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Mapping

from kvctl.core.addresses import StoreConfig
from kvctl.transports.keys import TEMP_SUFFIX


def write_options(config: StoreConfig, transport: str, options: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """The transport's options with `direct` set as it is best, and a note for the report; as they are, and no note,
    where the options say it, or another transport than `file` writes.
    """
    if config.scheme != "file" or transport not in {"auto", "file"} or "direct" in options:
        return options, ""
    refusal = _refusal(config.url.removeprefix("file://") or "/")
    if refusal:
        return options, f"written through the page cache: {refusal}"
    return {**options, "direct": "true"}, ""


def _refusal(folder: str) -> str:
    """Why files in `folder` (made when missing) take no O_DIRECT; empty when they do, or cannot be made: writing will
    say that better.
    """
    path = os.path.join(folder, f".direct-{secrets.token_hex(4)}{TEMP_SUFFIX}")
    try:
        os.makedirs(folder, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o644)
    except OSError as problem:
        with contextlib.suppress(OSError):
            os.unlink(path)  # some file systems make the file before they refuse
        return "the file system takes no O_DIRECT" if problem.errno == errno.EINVAL else ""
    os.close(fd)
    os.unlink(path)
    return ""
