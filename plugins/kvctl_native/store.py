"""The `node://` store: control calls to a storage node. Conditions are decided by the node, atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote

from kvctl.core.errors import ConflictError, IncompatibleError, NotFoundError, SizeMismatchError, UsageError
from kvctl.transports.api import Copied, ObjectInfo, StoreCapabilities, StoreConfig, UploadInfo
from kvctl.transports.keys import check_key
from kvctl.transports.wire import Head
from kvctl_native.client import Call, Client
from kvctl_native.route import Route
from kvctl_native.settings import NodeAccess, parse_access

_PAGE: Final = 1000


def version_of(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


class NodeStore:
    """See `kvctl.transports.api.Store`."""

    capabilities = StoreCapabilities(conditional_put=True, conditional_delete=True, uploads=True, copy=True)

    def __init__(self, access: NodeAccess) -> None:
        self.access = access
        self.url = access.url
        self.page_size = _PAGE
        self.routes = tuple(Route(access, place) for place in access.places)
        self._client = Client(self.routes, self.url)

    def full_key(self, key: str) -> str:
        """The node's key of one of ours. Raises UsageError."""
        return self.access.prefix + check_key(key)

    def stat(self, key: str) -> ObjectInfo:
        head, _ = self._client.request(Call("HEAD", self.full_key(key), key, "read"))
        size = head.content_length
        if size is None:
            raise IncompatibleError(f"{self.url}: {key}: the node does not say the object's size")
        return self._info(key, size, head)

    def _info(self, key: str, size: int, head: Head) -> ObjectInfo:
        etag = head.get("etag")
        if not etag:
            raise IncompatibleError(f"{self.url}: {key}: an answer without a version", hint="is there a storage node?")
        return ObjectInfo(key, size, version_of(etag), _time(head.get("last-modified") or head.get("date")))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        start = self.access.prefix
        after = ""
        while True:
            query = f"prefix={_quoted(start + prefix)}&after={_quoted(after)}&limit={self.page_size}"
            document = self._json(Call("GET", "", prefix, "list", query))
            objects = document["objects"]
            for item in objects:
                yield ObjectInfo(
                    item["key"].removeprefix(start),
                    item["size"],
                    item["version"],
                    datetime.fromisoformat(item["modified"]),
                )
            if not document["more"]:
                return
            after = objects[-1]["key"]

    def _json(self, call: Call) -> Any:  # Any: the node's JSON
        head, body = self._client.request(call)
        try:
            return json.loads(body)
        except ValueError:
            raise IncompatibleError(
                f"{self.url}: an answer that is no JSON", cause=f"HTTP {head.status}", hint="is there a storage node?"
            ) from None

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            self.stat(key)
            return b""
        span = None if start == 0 and length is None else (start, _last(start, length))
        try:
            _, body = self._client.request(Call("GET", self.full_key(key), key, "read", span=span))
        except SizeMismatchError:  # nothing there: the object ends before
            return b""
        return body

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        body = memoryview(data).cast("B") if len(data) else memoryview(b"")
        call = Call("PUT", self.full_key(key), key, "write", if_match=if_version, if_absent=if_absent, body=body)
        head, _ = self._client.request(call)
        return self._info(key, len(body), head)

    def copy(self, source: str, key: str, *, if_version: str) -> Copied:
        query = f"from={_quoted(self.full_key(source))}"
        call = Call("COPY", self.full_key(key), key, "write", query, if_match=if_version)
        try:
            head, body = self._client.request(call)
        except ConflictError as problem:
            raise ConflictError(f"{self.url}: {source} is not at version {if_version} any more") from problem
        try:
            said = json.loads(body)
            size, shared = int(said["size"]), bool(said["shared"])
        except (ValueError, KeyError, TypeError):
            raise IncompatibleError(f"{self.url}: {key}: a copy that the node does not describe") from None
        return Copied(self._info(key, size, head), shared)

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        if if_version is not None and len(keys) != 1:
            raise UsageError("a conditional delete takes one key")
        for key in keys:
            self._client.request(Call("DELETE", self.full_key(key), key, "delete", if_match=if_version))

    def now(self) -> datetime:
        """The node's clock, to the second."""
        try:
            head, _ = self._client.request(Call("HEAD", self.full_key("clock"), "clock", "read"))
            said = head.get("date")
        except NotFoundError as problem:  # any answer tells the time
            said = str(problem.details.get("date") or "") or None
        return _time(said)

    def uploads(self) -> Iterator[UploadInfo]:
        start = self.access.prefix
        document = self._json(Call("GET", "", "", "list", f"uploads&prefix={_quoted(start)}"))
        for item in document["uploads"]:
            yield UploadInfo(item["key"].removeprefix(start), item["id"], datetime.fromisoformat(item["started"]))

    def abort(self, upload: UploadInfo) -> None:
        self._client.request(Call("DELETE", "", upload.key, "delete", f"upload={_quoted(upload.id)}"))

    def close(self) -> None:
        self._client.close()


def _last(start: int, length: int | None) -> int:
    return start + length - 1 if length is not None else (1 << 62)


def _quoted(text: str) -> str:
    return quote(text, safe="/-._~")


def _time(text: str | None) -> datetime:
    if text is None:
        raise IncompatibleError("an answer without a date", hint="is there a storage node?")
    try:
        return parsedate_to_datetime(text).astimezone(UTC)
    except ValueError:
        raise IncompatibleError(f"an answer with the date {text[:40]!r}") from None


def open_store(config: StoreConfig) -> NodeStore:
    return NodeStore(parse_access(config))
