"""Conditional puts for stores that have none: a ticket lock made of plain puts and a strong list.

To put KEY under a condition, a writer
  1. puts a ticket `locks/<key>/<random>`,
  2. waits `settle` seconds: longer than the resolution of the store's clock, so that tickets with one and the
     same time have all seen each other when anyone decides,
  3. lists the tickets until its own is the oldest (store's `modified`, then name); a ticket older than `ttl` by
     the store's clock belongs to a dead writer and is removed,
  4. checks the condition, puts KEY, and reads it back,
  5. deletes its ticket.
Who comes later can only have a younger ticket, so one writer at a time is in step 4. A writer that spent more
than half of `ttl` between its ticket and step 4 gives up. What stays open: a put that hangs on its way to the
store for longer than the other half of `ttl`.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from kvctl.core.errors import ConflictError, NotFoundError, StalledError
from kvctl.repo.layout import LOCKS, short_part
from kvctl.transports.api import Copied, ObjectInfo, Store, StoreCapabilities, UploadInfo
from kvctl.transports.wrapper import copier

SETTLE: Final = 1.5  # seconds; S3's clock shows whole seconds
TTL: Final = 60.0


class LockingStore:
    """A store with `conditional_put`, made of any: where the store has it, this adds nothing. Whether it has is
    asked at the first conditional put, not before: finding out may cost a write. See `kvctl.transports.api.Store`.
    """

    def __init__(self, inner: Store, *, settle: float = SETTLE, ttl: float = TTL) -> None:
        self.inner = inner
        self.settle = settle
        self.ttl = ttl

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> StoreCapabilities:
        return replace(self.inner.capabilities, conditional_put=True)

    def stat(self, key: str) -> ObjectInfo:
        return self.inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(self.inner.list(prefix))

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.inner.get(key, start, length)

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        if not if_absent and if_version is None:
            return self.inner.put(key, data)
        if self.inner.capabilities.conditional_put:
            return self.inner.put(key, data, if_absent=if_absent, if_version=if_version)
        self._check(key, if_absent, if_version)  # most losers see it here, without a ticket
        with self._locked(key):
            self._check(key, if_absent, if_version)
            info = self.inner.put(key, data)
            if self.inner.get(key) != bytes(data):
                raise ConflictError(f"{self.url}: {key} was written by two writers at once")
            return info

    def _check(self, key: str, if_absent: bool, if_version: str | None) -> None:
        try:
            version: str | None = self.inner.stat(key).version
        except NotFoundError:
            version = None
        if if_absent and version is not None:
            raise ConflictError(f"{self.url}: {key} exists already")
        if if_version is not None and version != if_version:
            raise ConflictError(f"{self.url}: {key} is not at version {if_version} any more")

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        folder = f"{LOCKS}{short_part(key)}/"
        ticket = f"{folder}{secrets.token_hex(8)}"
        started = time.monotonic()
        self.inner.put(ticket, b"kvctl lock\n")
        try:
            while True:
                time.sleep(self.settle)
                if self._oldest(folder) == ticket:
                    break
                if time.monotonic() - started > self.ttl / 2:
                    raise StalledError(
                        f"{self.url}: no turn to write {key}",
                        cause=f"waited {self.ttl / 2:.0f} s for other writers",
                        hint="run it again",
                    )
            yield
        finally:
            self.inner.delete([ticket])

    def _oldest(self, folder: str) -> str | None:
        tickets = list(self.inner.list(folder))
        if not tickets:
            return None
        now = self.inner.now()
        expired = [item.key for item in tickets if (now - item.modified).total_seconds() > self.ttl]
        if expired:
            self.inner.delete(expired)
        alive = [item for item in tickets if item.key not in expired]
        return min(alive, key=lambda item: (item.modified, item.key)).key if alive else None

    def copy(self, source: str, key: str, *, if_version: str) -> Copied:
        return copier(self.inner).copy(source, key, if_version=if_version)

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        self.inner.delete(keys, if_version=if_version)

    def now(self) -> datetime:
        return self.inner.now()

    def uploads(self) -> Iterator[UploadInfo]:
        return iter(self.inner.uploads())

    def abort(self, upload: UploadInfo) -> None:
        self.inner.abort(upload)

    def close(self) -> None:
        self.inner.close()
