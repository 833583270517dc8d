"""The `s3` transport: signed ranged requests over persistent connections, bodies straight into memory.

One transport per endpoint; each of its threads owns one connection. Every answer is checked before its bytes
count: status, length, `Content-Range` against the size that the object must have, ETag against the version.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping
from typing import Final

from kvctl.core.errors import (
    IncompatibleError,
    KvctlError,
    SizeMismatchError,
    TransientError,
    UsageError,
    VersionChangedError,
)
from kvctl.transports.api import Capabilities, Op, Store, StoreConfig
from kvctl.transports.options import check_names, choice, number
from kvctl.transports.threaded import OpCancelledError, ThreadedTransport
from kvctl.transports.wire import ClosedError, Connection, Head, ProtocolError
from kvctl_s3.errors import from_connection, from_status, parse_error_body
from kvctl_s3.route import Route
from kvctl_s3.settings import check_endpoint
from kvctl_s3.signing import EMPTY_PAYLOAD, UNSIGNED_PAYLOAD, Signer
from kvctl_s3.store import S3Store, version_of

_MOST: Final = 5 << 30
_WANTS_HASH: Final = frozenset(
    {"XAmzContentSHA256Mismatch", "InvalidRequest", "InvalidArgument", "MissingContentSHA256"}
)
_RANGE: Final = re.compile(r"^bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")
_NOT_S3: Final = "what is in between, a proxy or a cache, changes answers: use the server's own endpoint"


class _Worker(threading.local):
    """What one thread keeps between operations."""

    connection: Connection | None = None
    signer: Signer | None = None


class S3Transport(ThreadedTransport):
    """See `kvctl.transports.api.Transport`."""

    name = "s3"

    def __init__(
        self, store: S3Store, endpoint: str, *, threads: int = 4, sign_payload: bool = False, receive_buffer: int = 0
    ) -> None:
        super().__init__(Capabilities(max_in_flight=threads, zero_copy=endpoint.startswith("http://"), scatter=True))
        self.endpoint = endpoint
        self._store = store
        self._route = Route(store.access, endpoint)
        self._sign_payload = sign_payload
        self._receive_buffer = receive_buffer
        self._worker = _Worker()
        self._active: dict[int, Connection] = {}
        self._active_lock = threading.Lock()

    def perform(self, op: Op) -> int:
        if op.kind == "write" and (op.offset != 0 or (op.object_size is not None and op.object_size != op.length)):
            raise UsageError(f"{self._store.url}: {op.key}: s3 writes whole objects only")
        if op.kind == "read" and op.length <= 0:
            raise UsageError(f"{self._store.url}: {op.key}: a read of {op.length} bytes makes no sense")
        if op.kind == "write" and op.length > _MOST:
            raise UsageError(
                f"{self._store.url}: {op.key}: an object of {op.length} bytes, S3 takes {_MOST} in one request",
                hint="push it into a repo: that stores it in stripes",
            )
        key = self._store.full_key(op.key)
        requests = 0
        while True:
            connection, reused = self._connect(op)
            requests += 1
            try:
                with _Interruptible(self, op, connection):
                    serve = self._read if op.kind == "read" else self._write
                    keep = serve(op, key, connection)
            except ClosedError as problem:
                self._drop()
                if self.is_cancelled(op.id):
                    raise OpCancelledError from None
                # an idle connection that the server closes at the same moment says nothing about the request
                if problem.before_answer and reused and requests == 1:
                    continue
                raise from_connection(self.endpoint, problem, doing=f"{op.kind} {op.key}") from problem
            except KvctlError as problem:
                self._drop()
                if op.kind == "write" and not self._sign_payload and problem.details.get("code") in _WANTS_HASH:
                    self._sign_payload = True  # this server takes no unsigned uploads: from now on they are hashed
                    continue
                raise
            except (OSError, ProtocolError) as problem:
                self._drop()
                if self.is_cancelled(op.id):
                    raise OpCancelledError from None
                if isinstance(problem, ProtocolError):
                    raise IncompatibleError(
                        f"{self.endpoint}: {op.key}: not an answer of an S3 server", cause=str(problem)
                    ) from problem
                raise from_connection(self.endpoint, problem, doing=f"{op.kind} {op.key}") from problem
            except BaseException:
                self._drop()
                raise
            if not keep or connection.interrupted:
                self._drop()
            return requests

    def describe(self, op: Op) -> str:
        """The request an operation becomes, for -v: method, URL and range."""
        url = self._route.url(self._store.full_key(op.key))
        return f"PUT {url}" if op.kind == "write" else f"GET {url} bytes={op.offset}-{op.offset + op.length - 1}"

    def interrupt(self, op_id: int) -> None:
        with self._active_lock:
            connection = self._active.get(op_id)
            if connection is not None:
                connection.shutdown()

    def close_worker(self) -> None:
        self._drop()

    def _connect(self, op: Op) -> tuple[Connection, bool]:
        """The connection of this thread, and whether it served before."""
        connection = self._worker.connection
        if connection is not None:
            if not connection.is_stale():
                return connection, True
            self._drop()
        try:
            connection = self._route.connect(self._receive_buffer)
        except OSError as problem:
            raise from_connection(self.endpoint, problem, doing=f"{op.kind} {op.key}") from problem
        self._worker.connection = connection
        return connection, False

    def _drop(self) -> None:
        connection, self._worker.connection = self._worker.connection, None
        if connection is not None:
            connection.close()

    def _head(self, method: str, key: str, extra: str, payload: str = EMPTY_PAYLOAD) -> bytes:
        if self._worker.signer is None:
            self._worker.signer = self._route.signer()
        return self._route.head(self._worker.signer, method, key, extra, payload=payload)

    def _read(self, op: Op, key: str, connection: Connection) -> bool:
        condition = "" if op.version is None else f'if-match: "{op.version}"\r\n'
        extra = f"range: bytes={op.offset}-{op.offset + op.length - 1}\r\naccept-encoding: identity\r\n{condition}"
        connection.send(self._head("GET", key, extra))
        head = connection.read_head()
        if head.status not in {200, 206}:
            raise self._refusal(op, head, connection)
        self._check(op, head)
        if len(head.rest) > op.length:
            raise SizeMismatchError(
                f"{self._store.url}: {op.key}: the server sent more than it announced",
                cause=f"{op.length} bytes",
                hint=_NOT_S3,
            )
        got = connection.read_parts(head, op.parts) if op.parts else connection.read_body(head, op.view)
        if got != op.length:
            if connection.interrupted:
                raise OpCancelledError
            raise TransientError(
                f"{self._store.url}: {op.key}: the answer ended early",
                cause=f"{got} of {op.length} bytes at {op.offset}",
            )
        return head.keep_alive

    def _check(self, op: Op, head: Head) -> None:
        """That the body to come is exactly the range of the object and version that was asked for."""
        name = f"{self._store.url}: {op.key}"
        etag = head.get("etag")
        if op.version is not None and etag is not None and version_of(etag) != op.version:
            raise VersionChangedError(
                f"{name} changed while loading",
                cause=f"ETag {op.version} became {version_of(etag)}",
                hint="run it again to load the new version",
            )
        if head.chunked:
            raise IncompatibleError(f"{name}: the server answers a range in chunks, so its length cannot be checked")
        length = head.content_length
        if head.status == 200:
            self._check_whole(op, length, name)
        else:
            self._check_range(op, head.get("content-range") or "", name)
        if length != op.length:
            raise SizeMismatchError(
                f"{name}: the server sends {length} bytes for a range of {op.length}",
                hint=_NOT_S3,
                details={"actual": length, "expected": op.length},
            )

    def _check_whole(self, op: Op, length: int | None, name: str) -> None:
        if op.object_size is not None and length is not None and length != op.object_size:
            raise _wrong_size(name, length, op.object_size)
        if op.offset != 0 or length != op.length:
            raise IncompatibleError(
                f"{name}: the server ignores Range",
                cause=f"asked for {op.length} bytes at {op.offset}, it sends all {length}",
                hint="a proxy in between? use the server's own endpoint",
            )

    def _check_range(self, op: Op, content_range: str, name: str) -> None:
        match = _RANGE.match(content_range)
        if match is None or match.group(1) is None:
            raise IncompatibleError(f"{name}: a partial answer without a range", cause=repr(content_range))
        first, last, total = int(match.group(1)), int(match.group(2)), match.group(3)
        if op.object_size is not None:
            if total == "*":
                raise IncompatibleError(f"{name}: the server does not say the object's size", cause=content_range)
            if int(total) != op.object_size:
                raise _wrong_size(name, int(total), op.object_size)
        if (first, last) != (op.offset, op.offset + op.length - 1):
            raise SizeMismatchError(
                f"{name}: the server sends another range",
                cause=f"asked for {op.offset}-{op.offset + op.length - 1}, got {content_range}",
                hint=_NOT_S3,
            )

    def _write(self, op: Op, key: str, connection: Connection) -> bool:
        view = op.view
        payload = hashlib.sha256(view).hexdigest() if self._sign_payload else UNSIGNED_PAYLOAD
        extra = f"content-length: {op.length}\r\ncontent-type: application/octet-stream\r\n"
        broken: OSError | None = None
        try:
            connection.send(self._head("PUT", key, extra, payload), view)
        except OSError as problem:
            broken = problem  # a server that refuses answers before it has read all, and then closes
        try:
            head = connection.read_head()
        except OSError as problem:
            raise broken or problem from None
        if not 200 <= head.status < 300 or broken:
            raise self._refusal(op, head, connection)
        body = connection.read_small(head) if head.status != 204 else b""
        if body:
            code, message, _ = parse_error_body(body)
            if code:  # some servers find out after they have sent the status
                raise from_status(self._store.url, op.key, 500, code, message, doing="write")
        return head.keep_alive and body is not None

    def _refusal(self, op: Op, head: Head, connection: Connection) -> KvctlError:
        try:
            body = connection.read_small(head) or b""
        except (OSError, ProtocolError):
            body = b""
        code, message, fields = parse_error_body(body)
        actual = (_RANGE.match(head.get("content-range") or "") or [None] * 4)[3] or fields.get("ActualObjectSize")
        return from_status(
            self._store.url,
            op.key,
            head.status,
            code,
            message,
            doing=op.kind,
            region=head.get("x-amz-bucket-region") or fields.get("Region"),
            object_size=max(op.object_size or 0, op.offset + op.length),
            actual_size=int(actual) if actual and actual.isdigit() else None,
        )


class _Interruptible:
    """While an operation is on a connection, `interrupt` can find it."""

    def __init__(self, transport: S3Transport, op: Op, connection: Connection) -> None:
        self._transport = transport
        self._id = op.id
        self._connection = connection

    def __enter__(self) -> None:
        with self._transport._active_lock:
            self._transport._active[self._id] = self._connection
        if self._transport.is_cancelled(self._id):
            self._connection.shutdown()
            raise OpCancelledError

    def __exit__(self, *_: object) -> None:
        with self._transport._active_lock:
            self._transport._active.pop(self._id, None)


def _wrong_size(name: str, actual: int, expected: int) -> SizeMismatchError:
    return SizeMismatchError(
        f"{name} has {actual} bytes, expected {expected}",
        hint="the object was replaced or cut off: upload it again",
        details={"actual_size": actual, "expected_size": expected},
    )


def _bare_store(store: Store, config: StoreConfig) -> S3Store:
    """The S3 store inside whatever wraps it, so that credentials are looked up once."""
    inner: object = store
    while inner is not None and not isinstance(inner, S3Store):
        inner = getattr(inner, "inner", None)
    return inner if inner is not None else S3Store(config)


def open_transport(config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]) -> S3Transport:
    """Options: threads, payload=unsigned|signed, receive_buffer (bytes, 0: the kernel's own)."""
    check_names("s3", options, ("threads", "payload", "receive_buffer"))
    payload = choice(options, "payload", ("unsigned", "signed"))
    bare = _bare_store(store, config)
    return S3Transport(
        bare,
        check_endpoint(endpoint) if endpoint is not None else bare.access.endpoints[0],
        threads=number(options, "threads", 4, 1, 256),
        sign_payload=payload == "signed",
        receive_buffer=number(options, "receive_buffer", 0, 0, 1 << 30),
    )
