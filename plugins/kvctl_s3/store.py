"""The `s3://` store: control calls through boto3, on any S3 server.

Endpoints of one store stand in for each other: a call that cannot connect goes to the next one, and the one
that answered is asked first from then on. A version is the ETag, compared and never interpreted.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import botocore.exceptions as boto_errors
from botocore.parsers import ResponseParserError

from kvctl.core.errors import (
    AuthError,
    ConfigError,
    ConflictError,
    EnvError,
    IncompatibleError,
    KvctlError,
    MemberDownError,
    TransientError,
    UsageError,
)
from kvctl.transports.api import ObjectInfo, StoreCapabilities, StoreConfig, UploadInfo
from kvctl.transports.keys import check_key
from kvctl.transports.retry import from_pages
from kvctl_s3.access import Access, no_credentials
from kvctl_s3.errors import Doing, from_status, redact
from kvctl_s3.settings import parse_settings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
_DELETE_BATCH: Final = 1000  # limit of DeleteObjects
_PROBE: Final = ".kvctl-probe-"
_UNSENT: Final = (boto_errors.EndpointConnectionError, boto_errors.ConnectTimeoutError)


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
        self._lock = threading.Lock()
        switch = settings.conditional_put
        # AWS documents it; elsewhere it is tried once, when first asked for
        self._conditional_put = True if self.access.is_aws() else None
        if switch != "auto":
            self._conditional_put = switch == "true"

    @property
    def capabilities(self) -> StoreCapabilities:
        """May write (and delete) one small object, once, to learn whether the server honours conditional puts."""
        return StoreCapabilities(conditional_put=self._has_conditional_put(), uploads=True)

    def full_key(self, key: str) -> str:
        """The object's key in the bucket. Raises UsageError for keys that S3 or a proxy would change."""
        full = self._prefix + check_key(key)
        if len(full.encode()) > 1024:
            raise UsageError(f"the key {key[:60]!r}.. is longer than S3's 1,024 bytes")
        return full

    def stat(self, key: str) -> ObjectInfo:
        full = self.full_key(key)

        def head(client: S3Client) -> ObjectInfo:
            answer = client.head_object(Bucket=self._bucket, Key=full)
            return ObjectInfo(
                key, answer["ContentLength"], version_of(answer["ETag"]), answer["LastModified"].astimezone(UTC)
            )

        try:
            info = self._call(head, key)
        except KvctlError as problem:
            # a HEAD's answer has no body and so no code: where that matters, ask again in a way that has one
            if problem.details.get("status") in {400, 403, 404} and not (self._bucket_seen and problem.exit_code == 4):
                self._explain(key, full)
            raise
        self._bucket_seen = True
        return info

    def _explain(self, key: str, full: str) -> None:
        def get(client: S3Client) -> None:
            client.get_object(Bucket=self._bucket, Key=full, Range="bytes=0-0")["Body"].close()

        try:
            self._call(get, key)
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
        where = {"ContinuationToken": token} if token else {}

        def page(client: S3Client) -> Any:  # Any: boto's TypedDict
            return client.list_objects_v2(
                Bucket=self._bucket,
                Prefix=self._prefix + prefix,
                MaxKeys=self.page_size,
                **where,  # type: ignore[arg-type] # a TypedDict by name
            )

        answer = self._call(page, prefix, "list")
        items = [
            ObjectInfo(
                item["Key"][len(self._prefix) :],
                item["Size"],
                version_of(item["ETag"]),
                item["LastModified"].astimezone(UTC),
            )
            for item in answer.get("Contents", [])
        ]
        following = answer.get("NextContinuationToken", "") if answer.get("IsTruncated") else ""
        return [item for item in items if not item.key.startswith(_PROBE)], following

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        full = self.full_key(key)
        if start < 0 or (length is not None and length < 0):
            raise UsageError(f"{self.url}: {key}: a range of {length} bytes at {start} makes no sense")
        if length == 0:
            self.stat(key)
            return b""
        wanted = (
            "" if start == 0 and length is None else f"bytes={start}-{'' if length is None else start + length - 1}"
        )

        def read(client: S3Client) -> bytes:
            extra: dict[str, Any] = {"Range": wanted} if wanted else {}  # Any: boto's keywords by name
            answer = client.get_object(Bucket=self._bucket, Key=full, **extra)
            with contextlib.closing(answer["Body"]) as body:
                if wanted and answer["ResponseMetadata"]["HTTPStatusCode"] == 200:  # the server ignored the range
                    data = body.read() if length is None else body.read(start + length)
                    return data[start:]
                return body.read()

        try:
            return self._call(read, key)
        except KvctlError as problem:
            if problem.details.get("status") == 416:
                return b""  # it ends before `start`
            raise

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
        extra: dict[str, Any] = {}  # Any: boto's keywords by name
        if if_absent:
            extra["IfNoneMatch"] = "*"
        if if_version is not None:
            extra["IfMatch"] = f'"{if_version}"'

        def write(client: S3Client) -> ObjectInfo:
            answer = client.put_object(Bucket=self._bucket, Key=full, Body=data, **extra)
            return ObjectInfo(key, len(data), version_of(answer["ETag"]), _date(answer["ResponseMetadata"]))

        try:
            # a conditional put that may have landed is not sent again from here: whoever retries must know
            return self._call(write, key, "write", once=bool(extra))
        except KvctlError as problem:
            if (
                if_version is not None
                and problem.details.get("status") == 404
                and problem.details["code"] != "NoSuchBucket"
            ):
                raise ConflictError(f"{self.url}: {key} is not at version {if_version} any more: it is gone") from None
            raise

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        if if_version is not None:
            raise UsageError(f"{self.url} has no conditional delete")
        full = [self.full_key(key) for key in keys]
        if len(full) == 1:
            self._call(lambda client: client.delete_object(Bucket=self._bucket, Key=full[0]), keys[0], "delete")
            return
        for start in range(0, len(full), _DELETE_BATCH):
            self._delete_batch(full[start : start + _DELETE_BATCH])

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

        def ask(client: S3Client) -> datetime:
            try:
                return _date(client.head_bucket(Bucket=self._bucket)["ResponseMetadata"])
            except boto_errors.ClientError as problem:
                if problem.response["ResponseMetadata"].get("HTTPStatusCode") == 403:
                    return _date(problem.response["ResponseMetadata"])  # no right to list, yet it told the time
                raise

        return self._call(ask, "")

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
        self.access.close()

    def _has_conditional_put(self) -> bool:
        if self._conditional_put is None:
            with self._lock:
                if self._conditional_put is None:
                    self._conditional_put = self._try_conditional_put()
        return self._conditional_put is not False

    def _try_conditional_put(self) -> bool | None:
        """Whether a second if-absent put is refused; None where nobody can tell now (read-only, server away)."""
        key = f"{_PROBE}{secrets.token_hex(8)}"
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

    def _call(self, function: Callable[[S3Client], T], key: str, doing: Doing = "read", *, once: bool = False) -> T:
        """`function` with a client of the endpoint that answered last, then of the others while none connects.
        `once`: not again when the request may have arrived.
        """
        endpoints = self.access.endpoints
        first = self._first
        for turn in range(len(endpoints)):
            number = (first + turn) % len(endpoints)
            try:
                result = function(self.access.client(endpoints[number]))
            except (boto_errors.BotoCoreError, boto_errors.ClientError) as problem:
                error = self._error_from(problem, key, doing, endpoints[number])
                if isinstance(error, MemberDownError):
                    self._first = (number + 1) % len(endpoints)
                    if turn + 1 < len(endpoints) and (not once or isinstance(problem, _UNSENT)):
                        continue
                raise error from None  # botocore's chain may quote a signed URL
            self._first = number
            return result
        raise AssertionError("a store has an endpoint")

    def _error_from(self, problem: Exception, key: str, doing: Doing, endpoint: str) -> KvctlError:
        if isinstance(problem, boto_errors.ClientError):
            return self._from_answer(problem, key, doing)
        said = redact(str(problem))
        name = f"{self.url}: {key}" if key else self.url
        if isinstance(problem, boto_errors.NoCredentialsError):
            return no_credentials(self.url)
        if isinstance(problem, boto_errors.SSLError):
            return EnvError(
                f"{endpoint}: TLS failed",
                cause=said,
                hint="name the server's CA with ca_bundle=FILE (or AWS_CA_BUNDLE), or check http:// against https://",
            )
        if isinstance(problem, (*_UNSENT, boto_errors.ConnectionError, boto_errors.HTTPClientError)):
            hint = "is the server running, and the address right?"
            return MemberDownError(
                f"{endpoint}: the connection failed ({f'{doing} {key}'.strip()})", cause=said, hint=hint
            )
        if isinstance(problem, ResponseParserError):
            return IncompatibleError(f"{name}: an answer that S3 does not give", cause=said[:200])
        if isinstance(problem, (boto_errors.ParamValidationError, boto_errors.InvalidRegionError)):
            return ConfigError(f"{name}: the request cannot be made", cause=said)
        if isinstance(problem, boto_errors.IncompleteReadError):
            return TransientError(f"{name}: the answer ended early", cause=said)
        if "redential" in type(problem).__name__ or "Token" in type(problem).__name__:
            return AuthError(f"{self.url}: the credentials cannot be used", cause=said, hint="log in again")
        return TransientError(f"{name}: the request failed", cause=said)

    def _from_answer(self, problem: boto_errors.ClientError, key: str, doing: Doing) -> KvctlError:
        meta = problem.response.get("ResponseMetadata", {})
        error = problem.response.get("Error", {})
        code = str(error.get("Code", ""))
        headers = meta.get("HTTPHeaders", {})
        return from_status(
            self.url,
            key,
            int(meta.get("HTTPStatusCode", 0)),
            "" if code.isdigit() else code,
            str(error.get("Message", "")),
            doing=doing,
            region=headers.get("x-amz-bucket-region") or error.get("Region"),  # type: ignore[arg-type] # botocore adds it
        )


def _date(meta: Any) -> datetime:  # Any: boto's ResponseMetadata
    text = meta.get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(text).astimezone(UTC) if text else datetime.now(UTC)


def open_store(config: StoreConfig) -> S3Store:
    return S3Store(config)
