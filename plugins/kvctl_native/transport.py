"""The `native-tcp` transport: one lean request per range over persistent connections, bodies straight into memory.

One transport per endpoint; each of its threads owns one connection. Every answer is checked before its bytes
count: status, length, `Content-Range` against the size that the object must have, ETag against the version.
"""

from __future__ import annotations

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
from kvctl.transports.threaded import OpCancelledError, ThreadedTransport
from kvctl.transports.wire import ClosedError, Connection, Head, ProtocolError
from kvctl_native.client import converse
from kvctl_native.errors import from_connection, from_status, parse_error_body
from kvctl_native.route import Route, encode_key
from kvctl_native.settings import Place, parse_access, parse_place
from kvctl_native.store import NodeStore, version_of

_RANGE: Final = re.compile(r"^bytes (?:(\d+)-(\d+)|\*)/(\d+)$")
_OPTIONS: Final = ("receive_buffer", "threads")
_HINT: Final = "what is in between, a proxy or a cache, changes answers: use the node's own endpoint"


class _Worker(threading.local):
    """What one thread keeps between operations."""

    connection: Connection | None = None


class NativeTcp(ThreadedTransport):
    """See `kvctl.transports.api.Transport`."""

    name = "native-tcp"

    def __init__(self, store: NodeStore, place: Place, *, threads: int = 4, receive_buffer: int = 0) -> None:
        super().__init__(Capabilities(max_in_flight=threads, zero_copy=not place.tls))
        self.endpoint = place.url
        self._store = store
        self._route = Route(store.access, place)
        self._receive_buffer = receive_buffer
        self._worker = _Worker()
        self._active: dict[int, Connection] = {}
        self._active_lock = threading.Lock()

    def describe(self, op: Op) -> str:
        """The request an operation becomes, for -v: method, URL and range."""
        url = f"{self.endpoint}/v1/{encode_key(self._store.full_key(op.key))}"
        return f"PUT {url}" if op.kind == "write" else f"GET {url} bytes={op.offset}-{op.offset + op.length - 1}"

    def perform(self, op: Op) -> int:
        if op.kind == "write" and (op.offset != 0 or (op.object_size is not None and op.object_size != op.length)):
            raise UsageError(f"{self._store.url}: {op.key}: a node takes whole objects only")
        if op.kind == "read" and op.length <= 0:
            raise UsageError(f"{self._store.url}: {op.key}: a read of {op.length} bytes makes no sense")
        key = self._store.full_key(op.key)
        requests = 0
        while True:
            connection, reused = self._connect(op)
            requests += 1
            try:
                with self._interruptible(op, connection):
                    keep = self._read(op, key, connection) if op.kind == "read" else self._write(op, key, connection)
            except (OSError, ProtocolError) as problem:
                self._drop()
                if self.is_cancelled(op.id):
                    raise OpCancelledError from None
                if isinstance(problem, ClosedError) and problem.before_answer and reused and requests == 1:
                    continue  # an idle connection, closed by the node at the same moment
                if isinstance(problem, ProtocolError):
                    raise IncompatibleError(
                        f"{self.endpoint}: {op.key}: not an answer of a storage node", cause=str(problem)
                    ) from problem
                raise from_connection(self.endpoint, problem, doing=f"{op.kind} {op.key}") from problem
            except BaseException:
                self._drop()
                raise
            if not keep or connection.interrupted:
                self._drop()
            return requests

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

    def _interruptible(self, op: Op, connection: Connection) -> _Interruptible:
        return _Interruptible(self, op.id, connection)

    def _read(self, op: Op, key: str, connection: Connection) -> bool:
        span = (op.offset, op.offset + op.length - 1)
        connection.send(self._route.head("GET", key, span=span, if_match=op.version))
        head = connection.read_head()
        if head.status not in {200, 206}:
            raise self._refusal(op, head, connection)
        self._check(op, head)
        view = op.view
        if len(head.rest) > len(view):
            raise SizeMismatchError(
                f"{self._store.url}: {op.key}: the node sent more than it announced",
                cause=f"{len(view)} bytes",
                hint=_HINT,
            )
        got = connection.read_body(head, view)
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
        if op.version is not None and (etag is None or version_of(etag) != op.version):
            raise VersionChangedError(
                f"{name} changed while loading",
                cause=f"version {op.version} became {etag}",
                hint="run it again to load the new version",
            )
        match = _RANGE.match(head.get("content-range") or "")
        if head.status == 200 or head.chunked or match is None or match[1] is None:
            raise IncompatibleError(f"{name}: an answer without a range", hint=_HINT)
        first, last, total = int(match[1]), int(match[2]), int(match[3])
        if op.object_size is not None and total != op.object_size:
            raise SizeMismatchError(
                f"{name} has {total} bytes, expected {op.object_size}",
                hint="the object was replaced or cut off: upload it again",
                details={"actual_size": total, "expected_size": op.object_size},
            )
        wanted = (op.offset, op.offset + op.length - 1)
        if (first, last) != wanted or head.content_length != op.length:
            short = last + 1 == total and first == op.offset
            raise SizeMismatchError(
                f"{name} has {total} bytes" if short else f"{name}: the node sends another range",
                cause=f"asked for {wanted[0]}-{wanted[1]}, got {first}-{last} in {head.content_length} bytes",
                hint="the object is cut off: upload it again" if short else _HINT,
                details={"actual_size": total, "expected_size": op.object_size},
            )

    def _write(self, op: Op, key: str, connection: Connection) -> bool:
        head = converse(connection, self._route.head("PUT", key, length=op.length), op.view)
        if not 200 <= head.status < 300:
            raise self._refusal(op, head, connection)
        return connection.read_small(head) is not None and head.keep_alive

    def _refusal(self, op: Op, head: Head, connection: Connection) -> KvctlError:
        try:
            body = connection.read_small(head) or b""
        except (OSError, ProtocolError):
            body = b""
        code, message = parse_error_body(body)
        match = _RANGE.match(head.get("content-range") or "")
        return from_status(
            self._store.url,
            op.key,
            head.status,
            code,
            message,
            doing=op.kind,
            object_size=max(op.object_size or 0, op.offset + op.length),
            actual_size=int(match[3]) if match else None,
        )


class _Interruptible:
    """While an operation is on a connection, `interrupt` can find it."""

    def __init__(self, transport: NativeTcp, op_id: int, connection: Connection) -> None:
        self._transport = transport
        self._id = op_id
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


def _bare_store(store: Store, config: StoreConfig) -> NodeStore:
    """The node's store inside whatever wraps it, so that the key file is read once."""
    inner: object = store
    while inner is not None and not isinstance(inner, NodeStore):
        inner = getattr(inner, "inner", None)
    return inner if inner is not None else NodeStore(parse_access(config))


def open_transport(config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]) -> NativeTcp:
    """Options: threads, receive_buffer (bytes, 0: the kernel's own)."""
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise UsageError(f"transport native-tcp has no option {unknown[0]!r}", hint=f"it has {', '.join(_OPTIONS)}")
    bare = _bare_store(store, config)
    places = bare.access.places
    place = places[0] if endpoint is None else parse_place(endpoint, tls=places[0].tls)
    return NativeTcp(
        bare,
        place,
        threads=_number(options, "threads", 4, 1, 256),
        receive_buffer=_number(options, "receive_buffer", 0, 0, 1 << 30),
    )


def _number(options: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = options.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise UsageError(f"{name}={text} is not a number from {low} to {high}")
    return int(text)
