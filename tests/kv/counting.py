"""Counts what memory stores are asked: control calls, and bulk reads and writes of their transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvctl.transports.api import ObjectInfo, Op
from kvctl.transports.mem import MemStore, MemTransport


class Calls:
    """(name of the call, key) of every control call; (read | write, key, bytes) of every bulk one."""

    def __init__(self) -> None:
        self.control: list[tuple[str, str]] = []
        self.bulk: list[tuple[str, str, int]] = []
        self._lock = threading.Lock()

    def reset(self) -> None:
        self.control.clear()
        self.bulk.clear()

    def note(self, call: str, key: str) -> None:
        with self._lock:
            self.control.append((call, key))

    def count(self, call: str = "", prefix: str = "") -> int:
        return sum(name.startswith(call) and key.startswith(prefix) for name, key in self.control)

    def written(self, prefix: str = "") -> int:
        return sum(size for kind, key, size in self.bulk if kind == "write" and key.startswith(prefix))

    def reads(self, prefix: str = "") -> list[int]:
        return [size for kind, key, size in self.bulk if kind == "read" and key.startswith(prefix)]

    @property
    def total(self) -> int:
        return len(self.control) + len(self.bulk)


def install(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    in_bulk = threading.local()

    def wrap(name: str) -> None:
        real: Callable[..., Any] = getattr(MemStore, name)  # Any: whatever the call takes and gives

        def counted(self: MemStore, key: str | Sequence[str] = "", *args: Any, **more: Any) -> Any:  # Any: passed on
            if not getattr(in_bulk, "on", False):
                calls.note(name, key if isinstance(key, str) else " ".join(key))
            return real(self, key, *args, **more)

        monkeypatch.setattr(MemStore, name, counted)

    for name in ("stat", "get", "put", "delete"):
        wrap(name)
    listing = MemStore.list

    def counted_list(self: MemStore, prefix: str = "") -> Iterator[ObjectInfo]:
        calls.note("list", prefix)
        return listing(self, prefix)

    monkeypatch.setattr(MemStore, "list", counted_list)
    perform = MemTransport.perform

    def counted_perform(self: MemTransport, op: Op) -> int:
        with calls._lock:
            calls.bulk.append((op.kind, op.key, op.length))
        in_bulk.on = True
        try:
            return perform(self, op)
        finally:
            in_bulk.on = False

    monkeypatch.setattr(MemTransport, "perform", counted_perform)
    return calls
