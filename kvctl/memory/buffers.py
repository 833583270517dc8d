"""Host buffers: page-aligned, allocated once, reused. (Buffers over files and shared memory: `kvctl.memory.files`.)

Fresh anonymous memory costs 2-3 s per GiB of page faults on small machines, so a load allocates its memory
once and a staging arena is a ring of slots that are reused (`kvctl.memory.arena`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Final, Protocol

from kvctl.core.errors import CapacityError, UsageError

PAGE: Final = 4096


class Buffer(Protocol):
    """A piece of memory that bytes land in.

    `view` is a flat, writable byte view for memory the CPU can touch; `kind` is 'host', 'pinned', 'shared' or
    'cuda'. A cuda buffer's `view` raises TypeError: paths that write to it use `address`.
    """

    @property
    def kind(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def view(self) -> memoryview: ...
    @property
    def address(self) -> int: ...
    def close(self) -> None: ...


def address_of(view: memoryview) -> int:
    """The address of a writable view's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class _Buffer(ctypes.Structure):
    """Py_buffer, of which we want the first field."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of_readonly(memory: memoryview | mmap.mmap) -> int:
    """The address of memory that may be read-only: ctypes' own from_buffer takes writable memory only."""
    found = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(found), 0)
    address = int(found.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
    return address


def round_up(nbytes: int, to: int = PAGE) -> int:
    return (nbytes + to - 1) // to * to


class HostBuffer:
    """Anonymous page-aligned memory of this process. Freed by `close`, or when the last view of it goes."""

    kind = "host"

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise UsageError(f"a buffer of {nbytes} bytes makes no sense")
        self.nbytes = nbytes
        try:
            # MAP_PRIVATE: children of a fork do not write into our load
            self._map = mmap.mmap(-1, max(round_up(nbytes), PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise CapacityError(
                f"cannot allocate {nbytes} bytes of host memory",
                cause=str(error),
                hint="free memory or load less",
            ) from error
        self.view = memoryview(self._map)[:nbytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def prefault(self) -> None:
        """Touch every page now, so that a timed transfer does not pay for it."""
        with contextlib.suppress(OSError):  # a kernel before 5.14
            self._map.madvise(getattr(mmap, "MADV_POPULATE_WRITE", 23))  # the name came with Python 3.13
            return
        for offset in range(0, len(self._map), PAGE):
            self._map[offset] = 0

    def close(self) -> None:
        """Give the memory back now; views that others still hold keep it alive instead (no error)."""
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # somebody's tensor still looks at it: it lives as long as that
