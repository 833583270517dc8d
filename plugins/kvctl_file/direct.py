"""O_DIRECT, as far as this plug-in knows it: whether a folder takes it, and writes that bypass the page cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets

from kvctl.memory.buffers import PAGE, HostBuffer
from kvctl.transports.api import StoreConfig
from kvctl.transports.keys import TEMP_SUFFIX
from kvctl_file.paths import root_of


def unusable(config: StoreConfig) -> str:
    """Why files in a store's folder (made when missing) take no O_DIRECT; empty when they do, or cannot be made:
    writing will say that better.
    """
    folder = root_of(config.url)
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


class Direct:
    """While it lasts, writes to the descriptor bypass the page cache. Raises OSError where they cannot."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._flags = fcntl.fcntl(fd, fcntl.F_GETFL)

    def __enter__(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags | os.O_DIRECT)

    def __exit__(self, *_: object) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags)
