"""A staging arena: a ring of equal slots in one buffer, reused for the whole run, so that memory is bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvctl.memory.buffers import PAGE, Buffer, HostBuffer, round_up


class Arena:
    """`slots` slots of at least `slot_bytes` each, page-aligned, with room for a destination that is congruent
    with its source modulo 4 KiB. Thread-safe. Owns its buffer, which `make` allocates: pinned memory, for a GPU."""

    def __init__(self, slots: int, slot_bytes: int, make: Callable[[int], Buffer] = HostBuffer) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stride = round_up(slot_bytes) + PAGE
        self.buffer = make(slots * self._stride)
        # the last one freed is the next one used: its pages are in the cache
        self._free = list(range(slots))
        self._lock = threading.Lock()

    def take(self, congruent_to: int = 0) -> int | None:
        """The buffer offset of a free slot, congruent to `congruent_to` modulo 4 KiB; None when all are in use."""
        with self._lock:
            if not self._free:
                return None
            return self._free.pop() * self._stride + congruent_to % PAGE

    def give(self, offset: int) -> None:
        """Return the slot that `take` gave at `offset`."""
        with self._lock:
            self._free.append(offset // self._stride)

    def close(self) -> None:
        self.buffer.close()
