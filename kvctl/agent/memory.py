"""Memory that can be handed over: memfds. Filled by one loader through a writable mapping, then sealed; after that
nobody, the owner included, can change a byte, and whoever has a descriptor can map it read-only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterable
from typing import Final

from kvctl.core.errors import EnvError
from kvctl.memory.buffers import address_of, address_of_readonly
from kvctl.memory.shareable import end_mapping

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_SEAL_SECONDS: Final = 5.0


def dup_all(fds: Iterable[int]) -> list[int]:
    """Descriptors of our own. Raises EnvError when there are too few, and takes none then."""
    found: list[int] = []
    try:
        for fd in fds:
            found.append(os.dup(fd))  # noqa: PERF401 - it may fail half way
    except OSError as error:
        for fd in found:
            os.close(fd)
        raise EnvError(
            "the agent has too few file descriptors", cause=error.strerror, hint="raise its `ulimit -n`"
        ) from error
    return found


def seal(fd: int, name: str, *, seconds: float = _SEAL_SECONDS) -> None:
    """Make the memory immutable. Waits `seconds` for writable mappings to go, which their owner has just given up.
    Raises EnvError when one is left: then somebody could still change the bytes.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return
        except OSError as error:
            if error.errno == errno.EPERM and is_sealed(fd):
                return
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise EnvError(
                    f"{name} cannot be sealed", cause=f"{error.strerror}: somebody still maps it for writing"
                ) from error
        time.sleep(0.01)


def is_sealed(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS


class MemfdBuffer:
    """A writable mapping of a memfd that is not sealed yet. Takes the descriptor over. See `memory.buffers.Buffer`."""

    kind = "shared"

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes) if nbytes else None
        self.view = memoryview(self._map) if self._map is not None else memoryview(bytearray())

    @property
    def address(self) -> int:
        return address_of(self.view) if self.nbytes else 0

    def unmap(self) -> None:
        """End the mapping, as sealing needs it gone. Raises EnvError while somebody holds a view of it."""
        end_mapping(self._unmap)

    def _unmap(self) -> None:
        self.view.release()
        if self._map is not None:
            self._map.close()

    def close(self) -> None:
        """Give the mapping and the descriptor up; views that are still out keep the mapping alive."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(BufferError):
            self._unmap()


class SealedBuffer:
    """A read-only mapping of a sealed memfd, for transports that send it; writing to it is a fault. The descriptor
    stays the caller's. `nbytes` is positive. See `kvctl.memory.buffers.Buffer`.
    """

    kind = "shared"

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.view = memoryview(self._map)
        self.address = address_of_readonly(self._map)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view that is still out keeps the mapping alive
            self.view.release()
            self._map.close()


class LeasedMap(mmap.mmap):
    """A read-only mapping that keeps its lease: as long as any tensor over it lives, the lease is held."""

    lease: object = None


def map_shared(fd: int, nbytes: int, lease: object, *, private: bool = False) -> LeasedMap:
    """The memory of a sealed memfd, read-only; `private`: copy-on-write, so that the mapper may write for itself. Takes
    the descriptor over. `nbytes` is positive.
    """
    try:
        access = mmap.PROT_READ | mmap.PROT_WRITE if private else mmap.PROT_READ
        found = LeasedMap(fd, nbytes, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED, prot=access)
    finally:
        os.close(fd)
    found.lease = lease
    return found
