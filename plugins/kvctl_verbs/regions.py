"""Which registered memory an operation's range is in, per device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from kvctl_verbs.device import Device, Memory
from kvctl_verbs.token import MAX_SIZE
from kvctl_verbs.windows import Windows

PIECE: Final = 1 << 30  # bytes of one registration: pinning holds the interpreter's lock, so not too much at once
OVERLAP: Final = 64 << 20  # so that an operation of up to this many bytes lies in one registration


class Region:
    """A buffer registered with some devices, in pieces. `close` ends all access to it."""

    def __init__(self, owner: Regions, address: int, nbytes: int, devices: Sequence[Device]) -> None:
        self._owner = owner
        self.memories: dict[str, list[Memory]] = {device.name: [] for device in devices}
        try:
            for start, length in pieces(nbytes):
                for device in devices:
                    memory = device.memory(address + start, length, windows=device.name in owner.windows)
                    self.memories[device.name].append(memory)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        memories, self.memories = self.memories, {}
        for found in memories.values():
            for memory in found:
                memory.close()

    def close(self) -> None:
        self._owner.remove(self)
        self.end()


def pieces(nbytes: int, piece: int = PIECE, overlap: int = OVERLAP) -> list[tuple[int, int]]:
    """(start, length) of the registrations of so many bytes: neighbours overlap. Pure."""
    found = []
    start = 0
    while start < nbytes:
        length = min(piece + overlap, nbytes - start)
        found.append((start, length))
        if start + length == nbytes:
            break
        start += piece
    return found


class Regions:
    """Thread-safe. `windows`, by device, set before the first region is added: what a region lets in is then a window
    of it, bound for the one operation.
    """

    def __init__(self) -> None:
        self.windows: dict[str, Windows] = {}
        self._lock = threading.Lock()
        self._regions: tuple[Region, ...] = ()  # replaced, never changed: whoever looks needs no lock

    def add(self, address: int, nbytes: int, devices: Sequence[Device]) -> Region:
        """Raises CapacityError or EnvError."""
        made = Region(self, address, nbytes, devices)
        with self._lock:
            self._regions = (*self._regions, made)
        return made

    def remove(self, region: Region) -> None:
        with self._lock:
            self._regions = tuple(one for one in self._regions if one is not region)

    @contextlib.contextmanager
    def covering(self, device: Device, address: int, length: int, *, writable: bool) -> Iterator[int]:
        """The rkey of the registration that has all of the range, or of a window of it; where none has, of one for this
        operation alone that lets the other end do no more than it has to.
        """
        assert length <= MAX_SIZE
        found = self.find(device.name, address, length)
        if found is not None and device.name in self.windows:
            with self.windows[device.name].bound(found, address, length, writable=writable) as rkey:
                yield rkey
            return
        if found is not None:
            yield found.rkey
            return
        memory = device.memory(address, length, writable=writable)
        try:
            yield memory.rkey
        finally:
            memory.close()

    def find(self, name: str, address: int, length: int) -> Memory | None:
        """The registration with a device that has all of the range."""
        for region in self._regions:
            for memory in region.memories.get(name, ()):
                if memory.address <= address and address + length <= memory.address + memory.length:
                    return memory
        return None

    def end_windows(self) -> None:
        """After all operations have ended: memory with a window cannot be let go, nor a device with queue pairs."""
        for windows in self.windows.values():
            windows.close()
        self.windows.clear()

    def close(self) -> None:
        with self._lock:
            ended, self._regions = self._regions, ()
        for region in ended:
            region.end()
