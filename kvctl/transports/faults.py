"""`FaultyStore` and `FaultyTransport`: any store or transport that fails on purpose, the same way for a seed.

For tests of whatever runs above; never chosen by a user's command. Each rule counts its own matching calls.
"""

from __future__ import annotations

import fnmatch
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, TypeVar

from kvctl.core.errors import KvctlError, TransientError
from kvctl.transports.api import (
    Completion,
    Copied,
    ObjectInfo,
    Op,
    Status,
    Store,
    StoreCapabilities,
    Transport,
    UploadInfo,
)
from kvctl.transports.wrapper import TransportWrapper, copier

T = TypeVar("T")


def injected() -> KvctlError:
    return TransientError("a fault was injected")


@dataclass
class Rule:
    """Which calls it hits: `call` ('put', 'get', .. or 'read', 'write'; '*' all) on keys like the glob `key`; of
    those the `nth` (1 is the first), and `times` - 1 after it (None: all).

    before: fail without effect. after: take effect, then fail (the answer is lost). delay: wait `seconds`. do:
    call `action(key)` first, for example to replace the object. corrupt: flip one bit of what a transport read.
    """

    kind: Literal["before", "after", "delay", "do", "corrupt"]
    call: str = "*"
    key: str = "*"
    nth: int = 1
    times: int | None = 1
    error: Callable[[], KvctlError] = injected
    seconds: float = 0.0
    action: Callable[[str], None] | None = None
    seen: int = 0

    def hits(self, call: str, key: str) -> bool:
        if self.call not in {"*", call} or not fnmatch.fnmatchcase(key, self.key):
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


class _Injector:
    """Rules, and a share `rate` of calls that fail at random."""

    def __init__(self, rules: Sequence[Rule], seed: int, rate: float) -> None:
        self.rules = list(rules)
        self._random = random.Random(seed)
        self._rate = rate
        self._lock = threading.Lock()

    def draw(self, call: str, key: str) -> list[Rule]:
        with self._lock:
            found = [rule for rule in self.rules if rule.hits(call, key)]
            if self._random.random() < self._rate:
                found.append(Rule("after" if self._random.random() < 0.5 else "before"))
        return found

    def place(self, limit: int) -> int:
        with self._lock:
            return self._random.randrange(limit)


class FaultyStore:
    """See `kvctl.transports.api.Store`."""

    def __init__(self, inner: Store, rules: Sequence[Rule] = (), *, seed: int = 0, rate: float = 0.0) -> None:
        self.inner = inner
        self.faults = _Injector(rules, seed, rate)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> StoreCapabilities:
        return self.inner.capabilities

    def stat(self, key: str) -> ObjectInfo:
        return self._call("stat", key, lambda: self.inner.stat(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        rules = self.faults.draw("list", prefix)
        _prepare(rules, prefix)
        lost = next((rule for rule in rules if rule.kind == "after"), None)
        stop = self.faults.place(8) if lost is not None else -1
        for number, item in enumerate(self.inner.list(prefix)):
            if lost is not None and number == stop:
                raise lost.error()
            yield item

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._call("get", key, lambda: self.inner.get(key, start, length))

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        return self._call("put", key, lambda: self.inner.put(key, data, if_absent=if_absent, if_version=if_version))

    def copy(self, source: str, key: str, *, if_version: str) -> Copied:
        inner = copier(self.inner)
        return self._call("copy", key, lambda: inner.copy(source, key, if_version=if_version))

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        self._call("delete", keys[0] if keys else "", lambda: self.inner.delete(keys, if_version=if_version))

    def now(self) -> datetime:
        return self._call("now", "", self.inner.now)

    def uploads(self) -> Iterator[UploadInfo]:
        return iter(self._call("uploads", "", lambda: [*self.inner.uploads()]))

    def abort(self, upload: UploadInfo) -> None:
        self._call("abort", upload.key, lambda: self.inner.abort(upload))

    def close(self) -> None:
        self.inner.close()

    def _call(self, call: str, key: str, function: Callable[[], T]) -> T:
        rules = self.faults.draw(call, key)
        _prepare(rules, key)
        result = function()
        for rule in rules:
            if rule.kind == "after":
                raise rule.error()
        return result


class FaultyTransport(TransportWrapper):
    """See `kvctl.transports.api.Transport`. 'delay' holds completions back, nothing else waits for it."""

    def __init__(self, inner: Transport, rules: Sequence[Rule] = (), *, seed: int = 0, rate: float = 0.0) -> None:
        super().__init__(inner)
        self.faults = _Injector(rules, seed, rate)
        self._pending: dict[int, tuple[Op, list[Rule]]] = {}
        self._ended: list[tuple[float, Completion]] = []
        self._lock = threading.Lock()

    def submit(self, ops: Sequence[Op]) -> None:
        passed: list[Op] = []
        for op in ops:
            rules = self.faults.draw(op.kind, op.key)
            failed = False
            for rule in rules:
                if rule.kind == "do" and rule.action is not None:
                    rule.action(op.key)
                failed = failed or rule.kind == "before"
            if failed:
                now = time.monotonic()
                error = next(rule.error() for rule in rules if rule.kind == "before")
                with self._lock:
                    self._ended.append((now, Completion(op.id, Status.FAILED, 0, error, now, now, 1)))
                continue
            if rules:
                self._pending[op.id] = (op, rules)
                op = replace(op, landed=None)  # what lands is not yet what the rules make of it
            passed.append(op)
        self.inner.submit(passed)

    def poll(self, timeout: float | None) -> list[Completion]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            now = time.monotonic()
            with self._lock:
                ready = [item for due, item in self._ended if due <= now]
                self._ended = [(due, item) for due, item in self._ended if due > now]
                held = min((due for due, _ in self._ended), default=None)
            limits = [max(0.0, value - now) for value in (deadline, held) if value is not None]
            for item in self.inner.poll(0.0 if ready else min(limits) if limits else None):
                self._finish(item, ready)
            if ready or (deadline is not None and time.monotonic() >= deadline):
                return ready

    def _finish(self, item: Completion, ready: list[Completion]) -> None:
        op, rules = self._pending.pop(item.id, (None, []))
        due = time.monotonic()
        for rule in rules:
            if item.status is not Status.DONE or op is None:
                break
            if rule.kind == "after":
                item = replace(item, status=Status.FAILED, nbytes=0, error=rule.error())
            elif rule.kind == "corrupt" and op.kind == "read":
                at = self.faults.place(op.length)
                for view in op.views:
                    if 0 <= at < len(view):
                        view[at] ^= 1
                    at -= len(view)
            elif rule.kind == "delay":
                due += rule.seconds
        if due > time.monotonic():
            with self._lock:
                self._ended.append((due, item))
        else:
            ready.append(item)


def _prepare(rules: Sequence[Rule], key: str) -> None:
    """What happens before a store's call."""
    for rule in rules:
        if rule.kind == "delay":
            time.sleep(rule.seconds)
        elif rule.kind == "do" and rule.action is not None:
            rule.action(key)
        elif rule.kind == "before":
            raise rule.error()
