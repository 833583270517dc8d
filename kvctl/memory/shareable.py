"""Memory of a device that one process allocates and others map, by a descriptor that passes over a unix socket.

`kvctl.memory.libcuda` has a GPU's. `HostShareable` is that of the stand-in `hostdev`: memfds, for tests and where there
is no GPU.
"""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable
from typing import Protocol

from kvctl.core.errors import CapacityError, EnvError
from kvctl.memory.buffers import address_of, address_of_readonly, round_up


class Mapped(Protocol):
    """Shared memory in this process. `lease`: whatever has to live as long as it is mapped."""

    lease: object

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def unmap(self) -> None:
        """End the mapping; may be called again. Nothing may use the memory any more."""
        ...


class Shareable(Protocol):
    """`ident` names the device itself, whatever number (`name`) it has in this process."""

    @property
    def name(self) -> str: ...
    @property
    def ident(self) -> str: ...
    def size_of(self, nbytes: int) -> int:
        """What so many bytes take, in the device's pages."""
        ...

    def allocate(self, nbytes: int) -> int:
        """A descriptor of fresh memory, of a size that `size_of` gave. The memory is freed with the last descriptor and
        the last mapping of it. Raises CapacityError.
        """
        ...

    def map(self, fd: int, nbytes: int, *, writable: bool) -> Mapped:
        """The memory behind a descriptor, which stays the caller's. Raises EnvError."""
        ...


def make_memfd(name: str, nbytes: int) -> int:
    """A descriptor of fresh memory of this size. Pages are taken as they are written. Raises CapacityError."""
    try:
        fd = os.memfd_create(f"kvctl:{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise CapacityError(f"no memory for {name}", cause=error.strerror, hint="raise `ulimit -n`") from error
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise CapacityError(f"no memory for {name}", cause=f"{nbytes} bytes: {error.strerror}") from error
    return fd


def end_mapping(close: Callable[[], None]) -> None:
    """Call `close`, which ends a mapping. Raises EnvError while somebody holds a view of it."""
    try:
        close()
    except BufferError:
        gc.collect()  # a finished transfer's views may hang in a cycle
        try:
            close()
        except BufferError as error:
            raise EnvError("memory of a slot is still in use by its loader", cause=str(error)) from error


class HostMapped(mmap.mmap):
    """See `Mapped`. The CPU can look at it, through `view`."""

    lease: object = None

    @classmethod
    def make(cls, fd: int, nbytes: int, *, writable: bool) -> HostMapped:
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        return cls(fd, nbytes, flags=mmap.MAP_SHARED, prot=access)

    @property
    def address(self) -> int:
        return address_of_readonly(self)

    @property
    def nbytes(self) -> int:
        return len(self)

    def unmap(self) -> None:
        end_mapping(self.close)


class HostShareable:
    """See `Shareable`."""

    def __init__(self, name: str) -> None:
        self.name = self.ident = name

    def size_of(self, nbytes: int) -> int:
        return round_up(max(nbytes, 1))

    def allocate(self, nbytes: int) -> int:
        return make_memfd(self.name, nbytes)

    def map(self, fd: int, nbytes: int, *, writable: bool) -> HostMapped:
        return HostMapped.make(fd, nbytes, writable=writable)


class MappedHostBuffer:
    """A buffer over memory of `hostdev` that was mapped for writing. Takes it over. See `memory.buffers.Buffer`."""

    kind = "host"

    def __init__(self, mapped: HostMapped) -> None:
        self.nbytes = mapped.nbytes
        self.view = memoryview(mapped)
        self.address = address_of(self.view)
        self._mapped = mapped

    def close(self) -> None:
        self.view.release()
        self._mapped.unmap()
