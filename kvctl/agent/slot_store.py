"""A slot of this host's agent as a store, so that weights load from it as from any folder. It is leased at opening, so
every read is of one generation, whatever is swapped meanwhile; the bytes come straight from the agent's memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from kvctl.agent.client import AgentClient, OpenedFile
from kvctl.agent.target import close_files
from kvctl.core.errors import AuthError, NotFoundError, SizeMismatchError, UsageError, VersionChangedError
from kvctl.transports.api import Capabilities, ObjectInfo, Op, Store, StoreCapabilities, StoreConfig, UploadInfo
from kvctl.transports.options import check_names
from kvctl.transports.threaded import OpCancelledError, ThreadedTransport
from kvctl.transports.wrapper import innermost

_PIECE = 64 << 20


class SlotStore:
    """See `kvctl.transports.api.Store`. Holds a lease from opening to `close`."""

    capabilities = StoreCapabilities(conditional_put=False)

    def __init__(self, slot: str, *, socket: str | None = None, ident: str | None = None) -> None:
        self.url = f"slot://{slot}"
        self._client = AgentClient(socket, label="reader")
        try:
            self.opened = self._client.open(slot, ident)
        except BaseException:
            self._client.close()
            raise
        self._files = {file.name: file for file in self.opened.files}
        self._closed = False

    def file(self, key: str) -> OpenedFile:
        """Raises NotFoundError."""
        found = self._files.get(key)
        if found is None:
            raise NotFoundError(f"{self.url}/{key}: no such file")
        return found

    def stat(self, key: str) -> ObjectInfo:
        return self._info(self.file(key))

    def _info(self, file: OpenedFile) -> ObjectInfo:
        return ObjectInfo(file.name, file.size, self.opened.ident, datetime.fromtimestamp(0, UTC))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for name in sorted(self._files):
            if name.startswith(prefix):
                yield self._info(self._files[name])

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        file = self.file(key)
        end = file.size if length is None else min(file.size, start + length)
        data = bytearray(max(0, end - start))
        _read(file.fd, memoryview(data), start)
        return bytes(data)

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        raise AuthError(f"{self.url} is read only", hint="load into it: --into slot:NAME, or kvctl swap")

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        raise AuthError(f"{self.url} is read only", hint="kvctl agent unload frees a slot")

    def now(self) -> datetime:
        return datetime.now(UTC)

    def uploads(self) -> Iterator[UploadInfo]:
        return iter(())

    def abort(self, upload: UploadInfo) -> None:
        return

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            close_files(self.opened)
            self._client.close()


def _read(fd: int, view: memoryview, start: int) -> None:
    done = 0
    while done < len(view):
        moved = os.preadv(fd, [view[done : done + _PIECE]], start + done)
        if moved == 0:
            raise SizeMismatchError("a slot's memory ended early")
        done += moved


class SlotTransport(ThreadedTransport):
    name = "slot"

    def __init__(self, store: SlotStore, *, threads: int) -> None:
        super().__init__(Capabilities(max_in_flight=2 * threads, writes=False), threads=threads)
        self._store = store

    def perform(self, op: Op) -> int:
        if op.kind == "write":
            raise UsageError(f"{self._store.url} is read only")
        file = self._store.file(op.key)
        if op.version not in {None, self._store.opened.ident}:
            raise VersionChangedError(f"{self._store.url}/{op.key} is of another generation")
        if op.object_size not in {None, file.size} or op.offset + op.length > file.size:
            raise SizeMismatchError(f"{self._store.url}/{op.key} has {file.size} bytes")
        if self.is_cancelled(op.id):
            raise OpCancelledError
        _read(file.fd, op.view, op.offset)
        return 1


def open_store(config: StoreConfig) -> SlotStore:
    check_names("slot", config.options, ("socket", "generation"))
    name = config.url.removeprefix("slot://")
    return SlotStore(name, socket=config.options.get("socket"), ident=config.options.get("generation"))


def open_transport(
    config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]
) -> SlotTransport:
    check_names("slot", options, ())
    inner = innermost(store)
    if not isinstance(inner, SlotStore):
        raise UsageError(f"{config.url} is no slot")
    return SlotTransport(inner, threads=max(2, min(8, os.cpu_count() or 2)))
