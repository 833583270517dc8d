"""What a source publishes: names, the ranges of memory behind them, their versions. Thread-safe, no I/O."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from datetime import UTC, datetime

from kvctl.core.errors import NotFoundError, SizeMismatchError, UsageError, VersionChangedError
from kvctl.memory.buffers import Buffer
from kvctl.transports.api import ObjectInfo
from kvctl.transports.keys import check_key


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """`length` bytes of `buffer` from `offset` on."""

    info: ObjectInfo
    buffer: Buffer
    offset: int

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset


class Table:
    def __init__(self) -> None:
        self._run = secrets.token_hex(8)  # versions of another run never match
        self._count = 0
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()

    def put(self, name: str, buffer: Buffer, offset: int, length: int) -> Entry:
        """A new version of `name`. Raises UsageError for what is not inside the buffer."""
        if offset < 0 or length < 0 or offset + length > buffer.nbytes:
            raise UsageError(f"{name}: [{offset}, {offset + length}) is not inside its buffer of {buffer.nbytes} bytes")
        with self._lock:
            self._count += 1
            info = ObjectInfo(check_key(name), length, f"{self._run}-{self._count}", datetime.now(UTC))
            entry = self._entries[name] = Entry(info, buffer, offset)
        return entry

    def remove(self, name: str) -> Entry | None:
        with self._lock:
            return self._entries.pop(name, None)

    def get(self, name: str) -> Entry:
        """Raises NotFoundError."""
        with self._lock:
            entry = self._entries.get(name)
        if entry is None:
            raise NotFoundError(f"{name} is not published")
        return entry

    def page(self, prefix: str, after: str, most: int) -> list[ObjectInfo]:
        """The first `most` entries in order of name (bytewise) that start with `prefix` and come after `after`."""
        with self._lock:
            found = [entry.info for name, entry in self._entries.items() if name.startswith(prefix) and name > after]
        return sorted(found, key=lambda info: info.key.encode())[:most]

    def uses(self, buffer: Buffer) -> bool:
        with self._lock:
            return any(entry.buffer is buffer for entry in self._entries.values())

    def wanted(self, name: str, version: str | None, size: int | None, offset: int, length: int) -> Entry:
        """The entry, when it is what a reader wants. Raises NotFoundError, VersionChangedError or SizeMismatchError."""
        entry = self.get(name)
        info = entry.info
        if version is not None and info.version != version:
            raise VersionChangedError(
                f"{name} changed while loading",
                cause=f"version {version} became {info.version}",
                hint="run it again to load the new version",
            )
        if size is not None and info.size != size:
            raise SizeMismatchError(f"{name} has {info.size} bytes, expected {size}")
        if offset + length > info.size:
            raise SizeMismatchError(f"{name} ends at byte {info.size}, wanted up to {offset + length}")
        return entry
