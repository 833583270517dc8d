"""A buffer that notices what a transport must not do: writing outside its range, keeping views of it."""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

GUARD: Final = 0xA5
_MARGIN: Final = 4096


class GuardedBuffer:
    """Page-aligned host memory between two guard zones, filled with 0xA5 all over."""

    kind = "host"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, 2 * _MARGIN + max(nbytes, 1))
        self._map[:] = bytes([GUARD]) * len(self._map)
        self._all = memoryview(self._map)
        self.view = self._all[_MARGIN : _MARGIN + nbytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + _MARGIN

    def untouched(self, start: int = 0, end: int | None = None) -> bool:
        """Whether [start, end) of the view still holds the guard value."""
        part = self.view[start : self.nbytes if end is None else end]
        return part == bytes([GUARD]) * len(part)

    def check(self, *written: tuple[int, int]) -> None:
        """AssertionError when anything but the ranges [start, end) of `written` changed."""
        last = 0
        for start, end in sorted(written):
            assert self.untouched(last, max(last, start)), f"bytes [{last}, {start}) were touched"
            last = max(last, end)
        assert self.untouched(last), f"bytes from {last} on were touched"
        margins = bytes(self._all[:_MARGIN]) + bytes(self._all[_MARGIN + self.nbytes :])
        assert margins.count(GUARD) == len(margins), "bytes outside the buffer were touched"

    def close(self) -> None:
        """Raises BufferError when somebody still holds a view."""
        self.view.release()
        self._all.release()
        self._map.close()
