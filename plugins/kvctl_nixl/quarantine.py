"""Memory that a transfer, given up while in flight, may still write to.

NIXL has no cancel: releasing the handle of a running transfer lets its bytes land later, in memory that its owner may
long have given to somebody else. What is given up is kept here, with whatever keeps it alive, until the transfer is
seen to end; if it never does, until the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvctl.memory.buffers import Buffer


@dataclass(slots=True, eq=False)
class _Kept:
    # while a view of it is out, a buffer's `close` cannot unmap it
    view: memoryview | None
    buffer: Buffer
    tensor: object  # what holds a GPU's memory
    owner: object
    ended: Callable[[], bool]


class Quarantine:
    """Thread-safe. One for the process: see `QUARANTINE`."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._lock = threading.Lock()

    def keep(self, buffer: Buffer, owner: object, ended: Callable[[], bool]) -> None:
        """Keep `buffer`'s memory, and `owner` (the agent that moves the bytes), until `ended()` says so."""
        view = None if buffer.kind == "cuda" else buffer.view[:]
        with self._lock:
            self._kept.append(_Kept(view, buffer, getattr(buffer, "tensor", None), owner, ended))

    def release_ended(self) -> None:
        with self._lock:
            waiting = []
            for kept in self._kept:
                if kept.ended():
                    if kept.view is not None:
                        kept.view.release()
                else:
                    waiting.append(kept)
            self._kept = waiting

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)


QUARANTINE = Quarantine()
