"""`mem://NAME`: a store in this process's memory, shared by all who open the same name. Exact, for tests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from kvctl.core.errors import ConflictError, NotFoundError, SizeMismatchError, UsageError, VersionChangedError
from kvctl.transports.api import (
    Capabilities,
    Copied,
    ObjectInfo,
    Op,
    Store,
    StoreCapabilities,
    StoreConfig,
    UploadInfo,
)
from kvctl.transports.keys import check_key
from kvctl.transports.threaded import ThreadedTransport


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    version: str
    modified: datetime


class _Space:
    """The objects of one name. `clock_skew` moves its clock, for tests of leases and grace periods."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[str, _Object] = {}
        self.versions = itertools.count(1)
        self.clock_skew = timedelta(0)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.clock_skew


_SPACES: dict[str, _Space] = {}
_SPACES_LOCK = threading.Lock()


def space(name: str) -> _Space:
    with _SPACES_LOCK:
        return _SPACES.setdefault(name, _Space())


class MemStore:
    """See `kvctl.transports.api.Store`."""

    def __init__(self, name: str, *, conditional_put: bool = True) -> None:
        self.url = f"mem://{name}"
        root, _, prefix = name.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self.space = space(root)
        self.capabilities = StoreCapabilities(conditional_put=conditional_put, conditional_delete=True, copy=True)

    def stat(self, key: str) -> ObjectInfo:
        return self._info(key, self._find(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        start = self._prefix + prefix
        with self.space.lock:
            found = sorted((key, item) for key, item in self.space.objects.items() if key.startswith(start))
        for key, item in found:
            yield self._info(key[len(self._prefix) :], item)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data = self._find(key).data
        return data[start:] if length is None else data[start : start + length]

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        check_key(key)
        with self.space.lock:
            old = self.space.objects.get(self._prefix + key)
            if self.capabilities.conditional_put:
                if if_absent and old is not None:
                    raise ConflictError(f"{self.url}: {key} exists already")
                if if_version is not None and (old is None or old.version != if_version):
                    raise ConflictError(f"{self.url}: {key} is not at version {if_version} any more")
            elif if_absent or if_version is not None:
                raise UsageError(f"{self.url} has no conditional put")
            new = _Object(bytes(data), f"v{next(self.space.versions)}", self.space.now())
            self.space.objects[self._prefix + key] = new
        return self._info(key, new)

    def copy(self, source: str, key: str, *, if_version: str) -> Copied:
        check_key(key)
        with self.space.lock:
            old = self._find(source)
            if old.version != if_version:
                raise ConflictError(f"{self.url}: {source} is not at version {if_version} any more")
            new = _Object(old.data, f"v{next(self.space.versions)}", self.space.now())
            self.space.objects[self._prefix + key] = new
        return Copied(self._info(key, new), shared=True)

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        if if_version is not None and len(keys) != 1:
            raise UsageError("a conditional delete takes one key")
        with self.space.lock:
            for key in keys:
                check_key(key)
                old = self.space.objects.get(self._prefix + key)
                if if_version is not None and old is not None and old.version != if_version:
                    raise ConflictError(f"{self.url}: {key} is not at version {if_version} any more")
                self.space.objects.pop(self._prefix + key, None)

    def now(self) -> datetime:
        return self.space.now()

    def uploads(self) -> Iterator[UploadInfo]:
        return iter(())

    def abort(self, upload: UploadInfo) -> None:
        raise UsageError(f"{self.url} has no unfinished uploads ({upload.id})")

    def close(self) -> None:
        return

    def _find(self, key: str) -> _Object:
        check_key(key)
        with self.space.lock:  # which may be held: it is one that can be taken again
            found = self.space.objects.get(self._prefix + key)
        if found is None:
            raise NotFoundError(f"{self.url}: no object {key}")
        return found

    def _info(self, key: str, item: _Object) -> ObjectInfo:
        return ObjectInfo(key, len(item.data), item.version, item.modified)


class MemTransport(ThreadedTransport):
    name = "mem"

    def __init__(self, store: MemStore) -> None:
        super().__init__(Capabilities(max_in_flight=4, durable=False, scatter=True, gather=True))
        self._store = store

    def perform(self, op: Op) -> int:
        if op.kind == "write":
            if op.offset != 0 or (op.object_size is not None and op.object_size != op.length):
                raise UsageError(f"{self._store.url}: mem writes whole objects only ({op.key})")
            self._store.put(op.key, op.view if not op.parts else b"".join(op.parts))
            return 1
        item = self._store._find(op.key)
        if op.version is not None and item.version != op.version:
            raise VersionChangedError(f"{self._store.url}: {op.key} changed while loading")
        if op.object_size is not None and len(item.data) != op.object_size:
            raise SizeMismatchError(
                f"{self._store.url}: {op.key} has {len(item.data)} bytes, expected {op.object_size}"
            )
        part = memoryview(item.data)[op.offset : op.offset + op.length]
        if len(part) != op.length:
            raise SizeMismatchError(
                f"{self._store.url}: {op.key} ends at {len(item.data)}, wanted [{op.offset}, {op.offset + op.length})"
            )
        at = 0
        for view in op.views:
            view[:] = part[at : at + len(view)]
            at += len(view)
        return 1


def open_store(config: StoreConfig) -> MemStore:
    return MemStore(
        config.url.partition("://")[2],
        conditional_put=config.options.get("conditional_put", "true") != "false",
    )


def open_transport(config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]) -> MemTransport:
    if endpoint is not None or options:
        raise UsageError(f"{config.url} takes no endpoint and no transport options")
    return MemTransport(store if isinstance(store, MemStore) else open_store(config))
