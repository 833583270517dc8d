"""One writer of a name at a time: a lock object with expiry, put only if absent, renewed by a thread while it is held,
as a paced checkpoint may spend hours on one object.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from datetime import timedelta
from typing import Final, Self

from kvctl.checkpoint.names import LOCK
from kvctl.core.errors import ConflictError, KvctlError, NotFoundError
from kvctl.repo.moments import parse_moment
from kvctl.repo.process import identity, is_gone
from kvctl.transports.api import Store

TTL: Final = 120.0
RENEWALS: Final = 3  # in a lock's time: two may fail


class Lock:
    """Held from `take` to `release`. A holder that died is recognised (on this host), or expires."""

    def __init__(self, store: Store, key: str, ttl: float) -> None:
        self._store = store
        self._key = key
        self._ttl = ttl
        self._version = ""
        self._renewed = 0.0
        self._lost: KvctlError | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="kvctl-lock", daemon=True)

    @classmethod
    def take(cls, store: Store, *, ttl: float = TTL) -> Self:
        """`store`: of the name's folder, with conditional puts. Raises ConflictError while another one is written."""
        lock = cls(store, LOCK, ttl)
        version: str | None = None
        try:
            version = store.stat(LOCK).version
            held = json.loads(store.get(LOCK))
            expires, process = parse_moment(held["expires"]), str(held["process"])
            if expires > store.now() and not is_gone(process):
                raise ConflictError(
                    f"another checkpoint is being written to {store.url}",
                    cause=f"its lock expires at {expires:%Y-%m-%d %H:%M:%S} UTC",
                    hint="wait for it to end; the lock of one that died expires by itself",
                )
        except NotFoundError:
            version = None
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            pass  # a torn or foreign lock: whoever replaces this very version has it
        try:
            lock._put(version)
        except ConflictError as error:
            raise ConflictError(f"another checkpoint has just begun at {store.url}", hint="wait for it") from error
        lock._thread.start()
        return lock

    def _put(self, version: str | None) -> None:
        started = time.monotonic()
        expires = self._store.now() + timedelta(seconds=self._ttl)
        data = json.dumps({"expires": expires.isoformat(), "process": identity(), "at": time.time_ns()}).encode()
        self._version = self._store.put(self._key, data, if_absent=version is None, if_version=version).version
        self._renewed = started

    def _beat(self) -> None:
        while not self._over.wait(self._ttl / RENEWALS):
            try:
                self._put(self._version)
            except ConflictError as error:
                self._lost = error
                return
            except KvctlError as error:
                # the store may come back in time
                if time.monotonic() - self._renewed > self._ttl:
                    self._lost = error
                    return

    def check(self) -> None:
        """Raises ConflictError when somebody took the lock, or it could not be renewed in time."""
        if self._lost is not None:
            raise ConflictError(
                f"the lock of {self._store.url} was lost", cause=str(self._lost), hint="run the same command again"
            ) from self._lost

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(KvctlError):  # else it expires
            if self._store.stat(self._key).version == self._version:
                self._store.delete([self._key])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
