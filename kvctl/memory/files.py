"""A buffer over a file's pages: bytes that land in it are the file's, however large, since the kernel can write
pages back and drop them. Space is reserved up front, so a full disk is an error before the first byte.
"""

from __future__ import annotations

import errno
import mmap
import os

from kvctl.core.errors import AuthError, CapacityError, EnvError
from kvctl.memory.buffers import address_of


class FileBuffer:
    """The whole of `path`, `nbytes` long, created or reopened (for resuming) for reading and writing.

    Raises CapacityError when the space cannot be reserved, AuthError when the place is read-only.
    """

    kind = "shared"

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise cannot_write(path, error) from error
        try:
            os.ftruncate(self._fd, nbytes)
            if nbytes:
                # without it a full disk is a SIGBUS in the middle of the load
                os.posix_fallocate(self._fd, 0, nbytes)
            self._map = mmap.mmap(self._fd, nbytes) if nbytes else None
        except OSError as error:
            os.close(self._fd)
            raise cannot_write(path, error) from error
        self.view = memoryview(self._map) if self._map is not None else memoryview(bytearray())

    @property
    def address(self) -> int:
        return address_of(self.view) if self.nbytes else 0

    def sync(self) -> None:
        """Make the content durable. Raises EnvError when the device failed to write it."""
        try:
            if self._map is not None:
                self._map.flush()
            os.fsync(self._fd)
        except OSError as error:
            raise EnvError(f"{self.path} could not be written", cause=error.strerror) from error

    def close(self) -> None:
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        try:
            self.view.release()
            if self._map is not None:
                self._map.close()
        except BufferError:
            pass  # a view is still out: the mapping goes with it


def cannot_write(path: str, error: OSError) -> CapacityError | EnvError | AuthError:
    """The kvctl error for a system error while making or growing `path`."""
    reason = error.strerror or str(error)
    if error.errno in {errno.EACCES, errno.EPERM}:
        return AuthError(f"cannot write {path}", cause=reason, hint="check the folder's owner and mode")
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return CapacityError(f"no space for {path}", cause=reason, hint="free space or choose another target")
    if error.errno == errno.EROFS:
        return AuthError(f"{path} is on a read-only file system", hint="choose a writable target")
    return EnvError(f"{path} cannot be written", cause=reason)
