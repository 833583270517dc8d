"""The `ucx://host:port/prefix` store: what a `Source` publishes, read-only."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NoReturn

from kvctl.core.addresses import split_url
from kvctl.core.errors import ConfigError, IncompatibleError, UsageError
from kvctl.transports.api import ObjectInfo, StoreCapabilities, StoreConfig, UploadInfo
from kvctl.transports.keys import check_key
from kvctl_nixl.peer.frames import GET_LIMIT
from kvctl_nixl.peer.link import Link, pages


class PeerStore:
    """See `kvctl.transports.api.Store`. Thread-safe. Reconnects when the source was restarted."""

    capabilities = StoreCapabilities(conditional_put=False)

    def __init__(self, config: StoreConfig) -> None:
        parts = split_url(config.url, port=True)
        if not parts.hostname or parts.port is None:
            raise UsageError(f"{config.url} is not ucx://HOST:PORT[/PREFIX]")
        if config.endpoints:
            raise UsageError(f"{config.url}: a peer has no endpoints")
        if unknown := sorted(set(config.options) - {"key_file", "timeout"}):
            raise UsageError(f"{config.url}: a peer has no option {unknown[0]!r}", hint="it has key_file, timeout")
        self.url = config.url
        self.root = f"{parts.scheme}://{parts.netloc}"
        prefix = parts.path.strip("/")
        self.prefix = f"{prefix}/" if prefix else ""
        self.key = _read_key(config.options.get("key_file"))
        self.timeout = _seconds(config.url, config.options.get("timeout", "30"))
        self._link: Link | None = None
        self._lock = threading.Lock()

    def full_name(self, key: str) -> str:
        return self.prefix + check_key(key)

    def link(self) -> Link:
        """The control channel; a new one where the old one broke. Raises KvctlError."""
        with self._lock:
            if self._link is None or self._link.dead:
                self._link = Link(self.root, self.key, timeout=self.timeout)
            return self._link

    def stat(self, key: str) -> ObjectInfo:
        header, _ = self.link().question({"do": "stat", "name": self.full_name(key)})
        return ObjectInfo(key, int(header["size"]), str(header["version"]), _when(header["modified"]))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for _, blob in pages(self.link(), self.prefix + prefix):
            for name, size, version, modified in json.loads(blob):
                yield ObjectInfo(str(name).removeprefix(self.prefix), int(size), str(version), _when(modified))

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        name = self.full_name(key)
        wanted = max(0, self.stat(key).size - start) if length is None else length
        parts = []
        while wanted > 0:
            question = {"do": "get", "name": name, "offset": start, "length": min(wanted, GET_LIMIT)}
            part = self.link().question(question)[1]
            if not part:
                break
            parts.append(part)
            start, wanted = start + len(part), wanted - len(part)
        return b"".join(parts)

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        self._refuse()

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        self._refuse()

    def now(self) -> datetime:
        """The host's clock: a peer keeps none."""
        return datetime.now(UTC)

    def uploads(self) -> Iterator[UploadInfo]:
        return iter(())

    def abort(self, upload: UploadInfo) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise IncompatibleError(f"{self.url}: the memory of a peer can only be read")

    def close(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()


def _when(seconds: float) -> datetime:
    return datetime.fromtimestamp(float(seconds), UTC)


def _read_key(path: str | None) -> bytes:
    path = path or os.environ.get("KVCTL_PEER_KEY_FILE")
    if path is None:
        return b""
    try:
        with open(path, "rb") as file:
            key = file.read(4096).strip()
    except OSError as problem:
        raise ConfigError(f"the key file {path} cannot be read", cause=problem.strerror) from None
    if len(key) < 16:
        raise ConfigError(f"the key file {path} holds less than 16 bytes", hint="openssl rand -hex 32 makes one")
    return key


def _seconds(url: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise UsageError(f"{url}: timeout={text} is not a number of seconds")
    return value


def open_store(config: StoreConfig) -> PeerStore:
    return PeerStore(config)
