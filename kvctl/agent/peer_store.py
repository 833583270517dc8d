"""`peer://HOST:PORT/SLOT`: a slot of another host's agent as a store, over the storage node's client. Pinned at opening
to the generation that serves then: when it is swapped and freed meanwhile, reads fail, and never mix.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from kvctl.agent.peer_tree import SLOT_DOCUMENT
from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import AuthError, FormatError, NotFoundError, VersionChangedError
from kvctl.transports.api import ObjectInfo, Store, StoreCapabilities, UploadInfo
from kvctl.transports.registry import open_store as open_any


class PeerStore:
    """See `kvctl.transports.api.Store`. `inner` is the node's store over the generation, for the transports."""

    capabilities = StoreCapabilities(conditional_put=False)

    def __init__(self, config: StoreConfig) -> None:
        self.url = config.url
        base = StoreConfig(config.url.replace("peer://", "node://", 1), config.endpoints, config.options)
        slot = open_any(base)
        try:
            try:
                document = json.loads(slot.get(SLOT_DOCUMENT))
                self.ident = str(document["ident"])
                self._sizes = {str(name): int(size) for name, size, _ in document["files"]}
            except NotFoundError as error:
                raise NotFoundError(f"{self.url}: no such slot, or nothing serves in it", cause=str(error)) from error
            except (ValueError, KeyError, TypeError) as error:
                raise FormatError(f"{self.url} is no agent's slot", cause=str(error)) from error
        finally:
            slot.close()
        self.inner: Store = open_any(StoreConfig(f"{base.url}/{self.ident}", base.endpoints, base.options))

    def stat(self, key: str) -> ObjectInfo:
        size = self._sizes.get(key)
        if size is None:
            raise NotFoundError(f"{self.url}/{key}: no such file")
        return ObjectInfo(key, size, self.ident, datetime.fromtimestamp(0, UTC))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for name in sorted(self._sizes):
            if name.startswith(prefix):
                yield self.stat(name)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            return self.inner.get(key, start, length)
        except NotFoundError as error:
            raise VersionChangedError(
                f"{self.url} was swapped or unloaded while it was read", cause=str(error), hint="load again"
            ) from error

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        raise AuthError(f"{self.url} is read only")

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        raise AuthError(f"{self.url} is read only")

    def now(self) -> datetime:
        return self.inner.now()

    def uploads(self) -> Iterator[UploadInfo]:
        return iter(())

    def abort(self, upload: UploadInfo) -> None:
        return

    def close(self) -> None:
        self.inner.close()


def open_store(config: StoreConfig) -> PeerStore:
    return PeerStore(config)
