"""The node's transfer memory: equal pieces of one mapping, registered once per device."""

from __future__ import annotations

import mmap
import threading
from collections import deque

from kvctl.memory.buffers import HostBuffer
from kvctl_verbs.device import Device, Memory


class Pool:
    """`pieces` pieces of `piece` bytes each, behind a page of scratch. Thread-safe. Its size is all that transfers
    take, however many run.
    """

    def __init__(self, pieces: int, piece: int) -> None:
        self.piece = piece
        self._buffer = HostBuffer(mmap.PAGESIZE + pieces * piece)
        self._address = self._buffer.address
        self._free = deque(range(pieces))
        self._changed = threading.Condition()
        self._registered: dict[str, Memory] = {}
        self.waiting = 0  # threads that wait for a piece

    @property
    def scratch(self) -> int:
        """Address of a few bytes whose content nobody looks at."""
        return self._address

    def memory(self, device: Device) -> Memory:
        """The pool registered with a device. Raises CapacityError or EnvError."""
        found = self._registered.get(device.name)
        if found is not None:
            return found
        with self._changed:
            found = self._registered.get(device.name)
            if found is None:
                found = self._registered[device.name] = device.memory(self._address, self._buffer.nbytes)
            return found

    def take(self, seconds: float = 0.0) -> int | None:
        """A free piece, None when there is none in time. Who does not wait gets none that others wait for."""
        with self._changed:
            if not seconds:
                return self._free.pop() if len(self._free) > self.waiting else None
            self.waiting += 1
            try:
                return self._free.pop() if self._changed.wait_for(lambda: self._free, seconds) else None
            finally:
                self.waiting -= 1

    def give(self, piece: int) -> None:
        """Back, once no device uses it."""
        with self._changed:
            self._free.append(piece)
            self._changed.notify()

    def address(self, piece: int) -> int:
        return self._address + mmap.PAGESIZE + piece * self.piece

    def view(self, piece: int, length: int) -> memoryview:
        start = mmap.PAGESIZE + piece * self.piece
        return self._buffer.view[start : start + length]

    @property
    def free(self) -> int:
        return len(self._free)

    def close(self) -> None:
        for memory in self._registered.values():
            memory.close()
        self._registered.clear()
        self._buffer.close()
