"""The `s3` transport: S3's dialect of the bulk transport over HTTP, with signed requests."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import Final

from kvctl.core.errors import KvctlError, UsageError
from kvctl.transports.api import Op, Store, StoreConfig
from kvctl.transports.http.bulk import HttpTransport
from kvctl.transports.http.pump import wanted
from kvctl.transports.http.ranges import check_read, expected_read, object_size
from kvctl.transports.options import check_names, choice, number
from kvctl.transports.wire import Connection, Head
from kvctl.transports.wrapper import innermost
from kvctl_s3.errors import from_connection, from_status, parse_error_body
from kvctl_s3.route import Route
from kvctl_s3.settings import check_endpoint
from kvctl_s3.signing import EMPTY_PAYLOAD, UNSIGNED_PAYLOAD, Signer
from kvctl_s3.store import S3Store

_MOST: Final = 5 << 30
_WANTS_HASH: Final = frozenset(
    {"XAmzContentSHA256Mismatch", "InvalidRequest", "InvalidArgument", "MissingContentSHA256"}
)
_NOT_S3: Final = "what is in between, a proxy or a cache, changes answers: use the server's own endpoint"


class _Thread(threading.local):
    """What one thread keeps between requests."""

    signer: Signer | None = None


class S3Dialect:
    """See `kvctl.transports.http.dialect.Dialect`."""

    server = "an S3 server"

    def __init__(self, store: S3Store, endpoint: str, *, sign_payload: bool, receive_buffer: int) -> None:
        self.endpoint = endpoint
        self.url = store.url
        self.timeout = store.access.settings.timeout
        self._store = store
        self._route = Route(store.access, endpoint)
        self._sign_payload = sign_payload
        self._receive_buffer = receive_buffer
        self._thread = _Thread()

    def describe(self, op: Op) -> str:
        url = self._route.url(self._store.full_key(op.key))
        return f"PUT {url}" if op.kind == "write" else f"GET {url} bytes={op.offset}-{op.offset + op.length - 1}"

    def refuse(self, op: Op) -> None:
        if op.length > _MOST:
            raise UsageError(
                f"{self.url}: {op.key}: an object of {op.length} bytes, S3 takes {_MOST} in one request",
                hint="push it into a repo: that stores it in stripes",
            )

    def connect(self) -> Connection:
        return self._route.connect(self._receive_buffer)

    def _head(self, method: str, op: Op, extra: str, payload: str = EMPTY_PAYLOAD) -> bytes:
        if self._thread.signer is None:
            self._thread.signer = self._route.signer()
        return self._route.head(self._thread.signer, method, self._store.full_key(op.key), extra, payload=payload)

    def read_head(self, op: Op) -> bytes:
        condition = "" if op.version is None else f'if-match: "{op.version}"\r\n'
        span = f"range: bytes={op.offset}-{op.offset + op.length - 1}\r\n"
        return self._head("GET", op, f"{span}accept-encoding: identity\r\n{condition}")

    def write_head(self, op: Op) -> bytes:
        payload = UNSIGNED_PAYLOAD
        if self._sign_payload:
            digest = hashlib.sha256()
            for view in op.views:
                digest.update(view)
            payload = digest.hexdigest()
        extra = f"content-length: {op.length}\r\ncontent-type: application/octet-stream\r\n"
        return self._head("PUT", op, extra, payload)

    def fits(self, op: Op, head: bytes) -> bool:
        return False

    def expected(self, op: Op) -> tuple[bytes, bytes]:
        return expected_read(op)

    def check(self, op: Op, head: Head) -> None:
        check_read(op, head, f"{self.url}: {op.key}", whole=True, versions=False, hint=_NOT_S3)

    def check_written(self, op: Op, body: bytes) -> None:
        """Some servers find out after they have sent the status."""
        code, message, _ = parse_error_body(body) if body else ("", "", {})
        if code:
            raise from_status(self.url, op.key, 500, code, message, doing="write")

    def refusal(self, op: Op, head: Head, body: bytes) -> KvctlError:
        code, message, fields = parse_error_body(body)
        actual = object_size(head)
        if actual is None and (said := fields.get("ActualObjectSize", "")).isdigit():
            actual = int(said)
        return from_status(
            self.url, op.key, head.status, code, message, doing=op.kind,
            region=head.get("x-amz-bucket-region") or fields.get("Region"),
            object_size=max(op.object_size or 0, op.offset + op.length), actual_size=actual,
        )  # fmt: skip

    def broken(self, op: Op, problem: Exception) -> KvctlError:
        return from_connection(self.endpoint, problem, doing=f"{op.kind} {op.key}")

    def try_differently(self, op: Op, problem: KvctlError) -> bool:
        """A server that takes no unsigned uploads: from now on they are hashed."""
        if op.kind != "write" or self._sign_payload or problem.details.get("code") not in _WANTS_HASH:
            return False
        self._sign_payload = True
        return True


def _bare_store(store: Store, config: StoreConfig) -> S3Store:
    """The S3 store inside whatever wraps it, so that credentials are looked up once."""
    inner = innermost(store)
    return inner if isinstance(inner, S3Store) else S3Store(config)


def open_transport(
    config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]
) -> HttpTransport:
    """Options: threads, payload=unsigned|signed, receive_buffer (bytes, 0: the kernel's own),
    compiled=auto|true|false.
    """
    check_names("s3", options, ("compiled", "threads", "payload", "receive_buffer"))
    payload = choice(options, "payload", ("unsigned", "signed"))
    bare = _bare_store(store, config)
    place = check_endpoint(endpoint) if endpoint is not None else bare.access.endpoints[0]
    receive_buffer = number(options, "receive_buffer", 0, 0, 1 << 30)
    dialect = S3Dialect(bare, place, sign_payload=payload == "signed", receive_buffer=receive_buffer)
    threads = number(options, "threads", 4, 1, 256)
    return HttpTransport(
        dialect, name="s3", threads=threads, plain=place.startswith("http://"), compiled=wanted(options)
    )
