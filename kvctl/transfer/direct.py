"""Whether large files are written past the page cache. They come from memory that stays as it is, and nobody reads
all of them soon: O_DIRECT takes no copy, and throws nothing out of the page cache that engines need.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Mapping, Sequence

from kvctl.core.addresses import StoreConfig
from kvctl.memory.buffers import PAGE, HostBuffer
from kvctl.transports.keys import TEMP_SUFFIX


def write_options(
    configs: Sequence[StoreConfig], transport: str, options: Mapping[str, str]
) -> tuple[Mapping[str, str], str]:
    """The transport's options with `direct` set as it is best for these stores, and a note for the report; as they are,
    and no note, where the options say it, or another transport than `file` writes.
    """
    files = all(config.scheme == "file" for config in configs)
    if not files or transport not in {"auto", "file"} or "direct" in options:
        return options, ""
    for config in configs:
        refusal = _refusal(config.url.removeprefix("file://") or "/")
        if refusal:
            return options, f"written through the page cache: {refusal}"
    return {**options, "direct": "true"}, ""


def _refusal(folder: str) -> str:
    """Why files in `folder` (made when missing) take no O_DIRECT; empty when they do, or cannot be made: writing will
    say that better.
    """
    path = os.path.join(folder, f".direct-{secrets.token_hex(4)}{TEMP_SUFFIX}")
    page = HostBuffer(PAGE)
    try:
        os.makedirs(folder, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, page.view)  # some file systems say no only now
        finally:
            os.close(fd)
    except OSError as problem:
        return "the file system takes no O_DIRECT" if problem.errno == errno.EINVAL else ""
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)  # some make the file before they refuse
        page.close()
    return ""
