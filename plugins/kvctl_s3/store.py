"""The `s3://` store: control calls on any S3 server, over our own connections; batches of deletions and unfinished
uploads through boto3.

Endpoints of one store stand in for each other: a call that cannot connect goes to the next one, and the one
that answered is asked first from then on. A version is the ETag, compared and never interpreted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

from kvctl.core.errors import (
    AuthError,
    ConflictError,
    IncompatibleError,
    KvctlError,
    MemberDownError,
    TransientError,
    UsageError,
)
from kvctl.transports.api import Copied, ObjectInfo, StoreCapabilities, StoreConfig, UploadInfo
from kvctl.transports.keys import check_key
from kvctl.transports.retry import from_pages
from kvctl.transports.wire import Head
from kvctl_s3.access import Access
from kvctl_s3.client import Client
from kvctl_s3.errors import Doing, from_status, parse_error_body
from kvctl_s3.listing import parse_list
from kvctl_s3.route import Route
from kvctl_s3.settings import parse_settings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
_DELETE_BATCH: Final = 1000  # limit of DeleteObjects
_PROBE: Final = ".kvctl-probe-"
_SEEN: Final[dict[tuple[tuple[str, ...], str], float]] = {}  # endpoints and bucket -> when conditional puts were seen
_SEEN_FOR: Final = 600.0  # seconds: another server may stand there one day


def version_of(etag: str) -> str:
    """The ETag as an opaque version: without its quotes, which servers set in some answers and not in others."""
    return etag[1:-1] if len(etag) >= 2 and etag[0] == etag[-1] == '"' else etag


class S3Store:
    """See `kvctl.transports.api.Store`."""

    def __init__(self, config: StoreConfig) -> None:
        settings = parse_settings(config)
        self.url = settings.url
        self.access = Access(settings)
        self._bucket = settings.bucket
        self._prefix = settings.prefix
        self.page_size = 1000  # the most that S3 gives
        self._first = 0  # the endpoint that answered last
        self._bucket_seen = False
        self._readers: dict[str, Client] = {}
        self._lock = threading.Lock()  # while it is found out whether the server has conditional puts
        self._readers_lock = threading.Lock()
        switch = settings.conditional_put
        # AWS documents it; elsewhere it is tried once, when first asked for
        self._conditional_put = True if self.access.is_aws() else None
        if switch != "auto":
            self._conditional_put = switch == "true"

    @property
    def capabilities(self) -> StoreCapabilities:
        """May write (and delete) one small object, once, to learn whether the server honours conditional puts."""
        return StoreCapabilities(conditional_put=self._has_conditional_put(), uploads=True, copy=True)

    def full_key(self, key: str) -> str:
        """The object's key in the bucket. Raises UsageError for keys that S3 or a proxy would change."""
        full = self._prefix + check_key(key)
        if len(full.encode()) > 1024:
            raise UsageError(f"the key {key[:60]!r}.. is longer than S3's 1,024 bytes")
        return full

    def stat(self, key: str) -> ObjectInfo:
        full = self.full_key(key)
        try:
            head, _ = self._ask("HEAD", full, shown=key)
        except KvctlError as problem:
            # a HEAD's answer has no body and so no code: where that matters, ask again in a way that has one
            if problem.details.get("status") in {400, 403, 404} and not (self._bucket_seen and problem.exit_code == 4):
                self._explain(key, full)
            raise
        self._bucket_seen = True
        size, etag = head.content_length, head.get("etag")
        if size is None or not etag:
            raise IncompatibleError(f"{self.url}: {key}: the server tells no {'size' if size is None else 'ETag'}")
        return ObjectInfo(key, size, version_of(etag), _parse_date(head.get("last-modified")))

    def _explain(self, key: str, full: str) -> None:
        try:
            self._ask("GET", full, "range: bytes=0-0\r\n", shown=key)
        except KvctlError as problem:
            self._bucket_seen = problem.details.get("code") == "NoSuchKey"
            if problem.exit_code in {2, 4, 5}:
                raise problem from None

    @property
    def lists_in_order(self) -> bool:
        """AWS documents it. Servers over a file tree (SeaweedFS) list 'a/x' before 'a-b': those are sorted here."""
        return self.access.is_aws()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return from_pages(lambda token: self.list_page(prefix, token), in_order=self.lists_in_order)

    def list_page(self, prefix: str, token: str) -> tuple[Sequence[ObjectInfo], str]:
        """One request: up to `page_size` objects, and the token of the next page ('' for the last)."""
        fields = {"encoding-type": "url", "list-type": "2", "max-keys": str(self.page_size)}
        fields |= {"prefix": self._prefix + prefix} | ({"continuation-token": token} if token else {})
        query = "&".join(f"{name}={quote(value, safe='-._~')}" for name, value in sorted(fields.items()))
        _, body = self._ask("GET", None, query=query, shown=prefix, doing="list")
        items, following = parse_list(body, self.url)
        cut = len(self._prefix)
        return [
            ObjectInfo(key[cut:], size, version_of(etag), modified)
            for key, size, etag, modified in items
            if not key.startswith(self._prefix + _PROBE)
        ], following

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        full = self.full_key(key)
        if start < 0 or (length is not None and length < 0):
            raise UsageError(f"{self.url}: {key}: a range of {length} bytes at {start} makes no sense")
        if length == 0:
            self.stat(key)
            return b""
        last = "" if length is None else start + length - 1
        ranged = start > 0 or length is not None
        try:
            head, data = self._ask("GET", full, f"range: bytes={start}-{last}\r\n" if ranged else "", shown=key)
        except KvctlError as problem:
            if problem.details.get("status") == 416:
                return b""  # it ends before `start`
            raise
        if ranged and head.status == 200:  # the server ignored the range
            return data[start:] if length is None else data[start : start + length]
        return data

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        full = self.full_key(key)
        conditional = if_absent or if_version is not None
        if conditional and not self._has_conditional_put():
            raise UsageError(f"{self.url} has no conditional put")
        return self._put(key, full, bytes(data), if_absent=if_absent, if_version=if_version)

    def _put(
        self, key: str, full: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        extra = "if-none-match: *\r\n" if if_absent else ""
        if if_version is not None:
            extra = f'if-match: "{if_version}"\r\n'
        try:
            # a conditional put that may have landed is not sent again from here: whoever retries must know
            head, body = self._ask("PUT", full, extra, shown=key, doing="write", data=data, once=bool(extra))
            code, message, _ = parse_error_body(body) if body else ("", "", {})
            if code:  # some servers find out after they have sent the status
                raise from_status(self.url, key, 500, code, message, doing="write")
            etag = head.get("etag")
            if not etag:
                raise IncompatibleError(f"{self.url}: {key}: the server tells no ETag")
            return ObjectInfo(key, len(data), version_of(etag), _parse_date(head.get("date")))
        except KvctlError as problem:
            if (
                if_version is not None
                and problem.details.get("status") == 404
                and problem.details["code"] != "NoSuchBucket"
            ):
                raise ConflictError(f"{self.url}: {key} is not at version {if_version} any more: it is gone") from None
            raise

    def copy(self, source: str, key: str, *, if_version: str) -> Copied:
        """By CopyObject, which takes 5 GiB at most."""
        origin, full = self.full_key(source), self.full_key(key)
        changed = ConflictError(f"{self.url}: {source} is not at version {if_version} any more")
        before = self.stat(source)  # not every server knows the condition
        if before.version != if_version:
            raise changed
        try:
            _, body = self._ask("PUT", full, shown=key, doing="write", data=b"", copy=(origin, if_version))
            code, message, _ = parse_error_body(body)
            if code:  # it may be found out after the status has been sent
                raise from_status(self.url, key, 500, code, message, doing="write")
        except ConflictError:
            raise changed from None
        made = self.stat(key)
        if made.size != before.size:
            raise IncompatibleError(
                f"{self.url}: {key} has {made.size} bytes after it was copied from {source}, which has {before.size}",
                hint="this server does not copy objects",
            )
        return Copied(made, shared=False)

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        if if_version is not None:
            raise UsageError(f"{self.url} has no conditional delete")
        full = [self.full_key(key) for key in keys]
        if len(full) == 1:
            self._delete_one(keys[0], full[0])
            return
        for start in range(0, len(full), _DELETE_BATCH):
            self._delete_batch(full[start : start + _DELETE_BATCH])

    def _delete_one(self, key: str, full: str) -> None:
        try:
            self._ask("DELETE", full, shown=key, doing="delete")
        except KvctlError as problem:
            if problem.details.get("code") != "NoSuchKey":
                raise

    def _delete_batch(self, full: Sequence[str]) -> None:
        answer = self._call(
            lambda client: client.delete_objects(
                Bucket=self._bucket, Delete={"Objects": [{"Key": key} for key in full], "Quiet": True}
            ),
            "",
            "delete",
        )
        for failed in answer.get("Errors", []):
            code = failed.get("Code", "")
            if code != "NoSuchKey":
                status = {"AccessDenied": 403, "SlowDown": 503}.get(code, 500)
                raise from_status(
                    self.url,
                    failed.get("Key", "")[len(self._prefix) :],
                    status,
                    code,
                    failed.get("Message", ""),
                    doing="delete",
                )

    def now(self) -> datetime:
        """The `Date` of an answer: whole seconds."""
        try:
            head, _ = self._ask("HEAD", None)
        except AuthError as problem:
            date = problem.details.get("date")  # no right to list, yet it told the time
            if not isinstance(date, str):
                raise
            return _parse_date(date)
        return _parse_date(head.get("date"))

    def uploads(self) -> Iterator[UploadInfo]:
        marker: dict[str, str] = {}
        while True:

            def page(client: S3Client, marker: dict[str, str] = marker) -> Any:  # Any: boto's TypedDict
                return client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._prefix, **marker)  # type: ignore[arg-type] # a TypedDict by name

            answer = self._call(page, "", "list")
            for item in answer.get("Uploads", []):
                yield UploadInfo(item["Key"][len(self._prefix) :], item["UploadId"], item["Initiated"].astimezone(UTC))
            if not answer.get("IsTruncated") or not answer.get("NextKeyMarker"):
                return
            marker = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer.get("NextUploadIdMarker", "")}

    def abort(self, upload: UploadInfo) -> None:
        full = self.full_key(upload.key)
        self._call(
            lambda client: client.abort_multipart_upload(Bucket=self._bucket, Key=full, UploadId=upload.id),
            upload.key,
            "delete",
        )

    def close(self) -> None:
        for client in self._readers.values():
            client.close()
        self.access.close()

    def _has_conditional_put(self) -> bool:
        if self._conditional_put is None:
            place = (self.access.endpoints, self._bucket)
            with self._lock:
                if self._conditional_put is None and _SEEN.get(place, 0.0) > time.monotonic() - _SEEN_FOR:
                    self._conditional_put = True
                if self._conditional_put is None:
                    self._conditional_put = self._try_conditional_put()
                    if self._conditional_put:
                        _SEEN[place] = time.monotonic()
        return self._conditional_put is not False

    def _try_conditional_put(self) -> bool | None:
        """Whether a second if-absent put is refused; None where nobody can tell now (read-only, server away)."""
        key = f"{_PROBE}{os.urandom(8).hex()}"
        full = self.full_key(key)
        try:
            self._put(key, full, b"1", if_absent=True)
            try:
                self._put(key, full, b"2", if_absent=True)
            except ConflictError:
                return True
            return False
        except IncompatibleError:
            return False
        except UsageError as problem:
            return False if problem.details.get("status") == 400 else None
        except KvctlError:
            return None
        finally:
            self._remove_probe(key)

    def _remove_probe(self, key: str) -> None:
        """What is left in spite of this is in no list."""
        for _ in range(3):
            try:
                self.delete([key])
            except TransientError:
                continue
            except KvctlError:
                return
            return

    def _ask(
        self,
        method: str,
        full: str | None,
        extra: str = "",
        *,
        query: str = "",
        shown: str = "",
        doing: Doing = "read",
        data: bytes | None = None,
        once: bool = False,
        copy: tuple[str, str] | None = None,
    ) -> tuple[Head, bytes]:
        """A request to the endpoint that answers. See `Client.request`."""

        def attempt(endpoint: str) -> tuple[Head, bytes]:
            return self._reader(endpoint).request(
                method, full, extra, query=query, shown=shown, doing=doing, data=data, once=once, copy=copy
            )

        return self._each_endpoint(attempt, once=once)

    def _reader(self, endpoint: str) -> Client:
        with self._readers_lock:
            found = self._readers.get(endpoint)
            if found is None:
                found = self._readers[endpoint] = Client(Route(self.access, endpoint), self.url)
            return found

    def _call(self, function: Callable[[S3Client], T], key: str, doing: Doing = "read") -> T:
        """`function` with a boto3 client of the endpoint that answers."""
        import botocore.exceptions as boto_errors

        from kvctl_s3.boto_errors import from_boto

        def attempt(endpoint: str) -> T:
            try:
                return function(self.access.aws.client(endpoint, self.access.region))
            except (boto_errors.BotoCoreError, boto_errors.ClientError) as problem:
                # botocore's chain may quote a signed URL
                raise from_boto(problem, self.url, key, doing, endpoint) from None

        return self._each_endpoint(attempt)

    def _each_endpoint(self, attempt: Callable[[str], T], *, once: bool = False) -> T:
        """`attempt` with the endpoint that answered last, then with the others while none connects. `once`: not again
        when the request may have arrived.
        """
        endpoints = self.access.endpoints
        first = self._first
        for turn in range(len(endpoints)):
            number = (first + turn) % len(endpoints)
            try:
                result = attempt(endpoints[number])
            except MemberDownError as problem:
                self._first = (number + 1) % len(endpoints)
                if turn + 1 == len(endpoints) or (once and not problem.details.get("unsent")):
                    raise
                continue
            self._first = number
            return result
        raise AssertionError("a store has an endpoint")


def _parse_date(text: str | None) -> datetime:
    """An HTTP date; this host's clock where the server tells no time."""
    try:
        return parsedate_to_datetime(text).astimezone(UTC) if text else datetime.now(UTC)
    except ValueError:
        return datetime.now(UTC)


def open_store(config: StoreConfig) -> S3Store:
    return S3Store(config)
