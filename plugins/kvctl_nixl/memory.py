"""What buffers an agent knows: registered once for as long as their owner says, found again for each operation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvctl.memory.buffers import Buffer
from kvctl.transports.threaded import AbandonedError
from kvctl_nixl.agent import Agent, NixlError

# Of NIXL's memory kinds; pinned and shared memory is host memory to it.
KINDS: Final = {"host": "DRAM", "pinned": "DRAM", "shared": "DRAM", "cuda": "VRAM"}


class Known:
    """The buffers that were registered with a transport. Thread-safe. `device`: the GPU of an address."""

    def __init__(self, device: Callable[[int], int] | None = None) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._places: dict[int, tuple[str, int, int]] = {}  # kind, address, length
        self._next = 0
        self._desks: list[Desk] = []

    def add(self, buffer: Buffer) -> Registered:
        with self._lock:
            self._next += 1
            self._places[self._next] = (buffer.kind, buffer.address, buffer.nbytes)
            return Registered(self, self._next)

    def drop(self, number: int) -> None:
        with self._lock:
            self._places.pop(number, None)
            desks = list(self._desks)
        for desk in desks:
            desk.forget(number)

    def covering(self, kind: str, start: int, end: int) -> tuple[int, int, int] | None:
        """(number, address, length) of a registered buffer that holds [start, end)."""
        with self._lock:
            for number, (own, address, length) in self._places.items():
                if own == kind and address <= start and end <= address + length:
                    return number, address, length
        return None

    def device(self, kind: str, address: int) -> int:
        return self._device(address) if kind == "cuda" and self._device is not None else 0

    def attach(self, desk: Desk) -> None:
        with self._lock:
            self._desks.append(desk)

    def detach(self, desk: Desk) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._desks.remove(desk)


class Registered:
    """See `kvctl.transports.api.Registration`."""

    def __init__(self, known: Known, number: int) -> None:
        self._known = known
        self._number = number

    def close(self) -> None:
        self._known.drop(self._number)


class Desk:
    """An agent with the lock that its thread and those that drop buffers share."""

    def __init__(self, agent: Agent, known: Known) -> None:
        self.agent = agent
        self.lock = threading.RLock()
        self.generation = 0  # of what is registered, for those who tell others
        self._known = known
        self._held: dict[int, Any] = {}  # Any: NIXL's lists
        known.attach(self)

    @contextlib.contextmanager
    def memory(self, buffer: Buffer, offset: int, length: int) -> Iterator[tuple[str, int, int]]:
        """(NIXL's kind, address, device) of the range, registered while the block runs: for good where its buffer is,
        else for this time. Raises NixlError.
        """
        start = buffer.address + offset
        kind, device = KINDS[buffer.kind], self._known.device(buffer.kind, start)
        found = self._known.covering(buffer.kind, start, start + length)
        once = None
        with self.lock:
            if found is None:
                once = self.agent.register(kind, [(start, length, device, "")])
                self.generation += 1
            elif found[0] not in self._held:
                self._held[found[0]] = self.agent.register(kind, [(found[1], found[2], device, "")])
                self.generation += 1
        try:
            yield kind, start, device
        except AbandonedError:
            raise  # what is in flight still needs its registration
        except BaseException:
            self._undo(once)
            raise
        else:
            self._undo(once)

    def _undo(self, once: Any) -> None:
        if once is not None:
            with self.lock, contextlib.suppress(NixlError):
                self.agent.deregister(once)

    def forget(self, number: int) -> None:
        with self.lock:
            held = self._held.pop(number, None)
            if held is not None:
                with contextlib.suppress(NixlError):
                    self.agent.deregister(held)

    def close(self) -> None:
        """The agent goes with it. Nothing of it may be in flight."""
        self._known.detach(self)
        for number in list(self._held):
            self.forget(number)
        self.agent.close()
