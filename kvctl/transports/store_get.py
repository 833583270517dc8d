"""`store-get`: the generic transport over a store's own `get` and `put`. A Store alone makes a plug-in whole."""

from __future__ import annotations

from collections.abc import Mapping

from kvctl.core.errors import SizeMismatchError, UsageError, VersionChangedError
from kvctl.transports.api import Capabilities, Op, Store, StoreConfig
from kvctl.transports.threaded import ThreadedTransport


class StoreGetTransport(ThreadedTransport):
    """Correct and plain: version and size are compared by a `stat` before and after each read, since `get`
    takes no condition; that makes three requests for one range.
    """

    name = "store-get"

    def __init__(self, store: Store) -> None:
        super().__init__(Capabilities(max_in_flight=4, zero_copy=False))
        self._store = store

    def perform(self, op: Op) -> int:
        if op.kind == "write":
            if op.offset != 0 or (op.object_size is not None and op.object_size != op.length):
                raise UsageError(f"store-get writes whole objects only ({op.key})")
            self._store.put(op.key, op.view)
            return 1
        self._check(op)
        data = self._store.get(op.key, op.offset, op.length)
        if len(data) != op.length:
            size = self._store.stat(op.key).size
            raise SizeMismatchError(
                f"{self._store.url}: {op.key} ends at {size}, wanted [{op.offset}, {op.offset + op.length})"
            )
        self._check(op)
        op.view[:] = data
        return 3

    def _check(self, op: Op) -> None:
        if op.version is None and op.object_size is None:
            return
        info = self._store.stat(op.key)
        if op.version is not None and info.version != op.version:
            raise VersionChangedError(
                f"{self._store.url}: {op.key} changed while loading",
                cause=f"version {op.version} became {info.version}",
            )
        if op.object_size is not None and info.size != op.object_size:
            raise SizeMismatchError(f"{self._store.url}: {op.key} has {info.size} bytes, expected {op.object_size}")


def open_transport(
    config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]
) -> StoreGetTransport:
    # the store itself goes over its endpoints: one more of these shares it
    if options:
        raise UsageError(f"{config.url}: store-get takes no options")
    return StoreGetTransport(store)
