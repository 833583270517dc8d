"""Small requests (HEAD, GET, list, PUT, DELETE) over a few kept connections: a fraction of boto3's CPU, and nothing to
import before the first byte.
"""

from __future__ import annotations

import hashlib
import threading

from kvctl.core.errors import IncompatibleError, KvctlError, TransientError
from kvctl.transports.wire import ClosedError, Connection, Head, ProtocolError
from kvctl_s3.errors import Doing, from_connection, from_status, parse_error_body
from kvctl_s3.route import Route
from kvctl_s3.signing import EMPTY_PAYLOAD, Signer

_BODY_LIMIT = 1 << 31  # of a chunked answer
_COPY_SECONDS = 600.0  # of silence: 5 GiB, the most that one copy takes, at 9 MB/s


class Client:
    """Thread-safe: each request in flight has a connection of its own."""

    def __init__(self, route: Route, url: str) -> None:
        self._route = route
        self._url = url
        self._idle: list[tuple[Connection, Signer]] = []
        self._lock = threading.Lock()
        self._closed = False

    def request(
        self,
        method: str,
        key: str | None,
        extra: str = "",
        *,
        query: str = "",
        shown: str = "",
        doing: Doing = "read",
        data: bytes | None = None,
        once: bool = False,
        copy: tuple[str, str] | None = None,
    ) -> tuple[Head, bytes]:
        """A 2xx answer and its body. `shown` is the key in messages. `data` is what a PUT sends. `once`: not sent
        again when it may have arrived. `copy`: key and version of an object that the server copies, which may take it
        long. Raises KvctlError for any other answer; its details say `unsent` when no
        connection could be made.
        """
        what = f"{doing} {shown}".strip()
        payload = EMPTY_PAYLOAD
        if data is not None:
            payload = hashlib.sha256(data).hexdigest()
            extra = f"content-length: {len(data)}\r\ncontent-type: application/octet-stream\r\n{extra}"
        amz: list[tuple[str, str]] = []
        if copy is not None:
            origin, version = copy
            amz = [("x-amz-copy-source", self._route.source(origin)), ("x-amz-copy-source-if-match", f'"{version}"')]
        tries = 0
        while True:
            tries += 1
            try:
                connection, signer, reused = self._take() if copy is None else self._patient()
            except OSError as problem:
                error = from_connection(self._route.endpoint, problem, doing=what)
                error.details["unsent"] = True
                raise error from None
            keep = False
            try:
                request = self._route.head(signer, method, key, extra, query=query, payload=payload, amz=amz)
                head = _exchange(connection, request, data)
                body = b"" if method == "HEAD" or head.status == 204 else self._body(connection, head, shown)
                keep = head.keep_alive and not (method == "HEAD" and head.rest) and copy is None
            except ClosedError as problem:
                # an idle connection that the server closes at the same moment says nothing about the request
                if problem.before_answer and reused and tries == 1 and not once:
                    continue
                raise from_connection(self._route.endpoint, problem, doing=what) from None
            except OSError as problem:
                raise from_connection(self._route.endpoint, problem, doing=what) from None
            except ProtocolError as problem:
                raise IncompatibleError(
                    f"{self._route.endpoint}: {shown}: not an answer of an S3 server", cause=str(problem)
                ) from None
            finally:
                if keep:
                    self._give_back(connection, signer)
                else:
                    connection.close()
            if 200 <= head.status < 300:
                return head, body
            raise self._refusal(head, body, shown, doing)

    def _body(self, connection: Connection, head: Head, shown: str) -> bytes:
        length = head.content_length
        if length is None or head.chunked:
            body = connection.read_small(head, _BODY_LIMIT)
            return body or b""
        data = bytearray(length)
        got = connection.read_body(head, memoryview(data))
        if got != length:
            raise TransientError(f"{self._url}: {shown}: the answer ended early", cause=f"{got} of {length} bytes")
        return bytes(data)

    def _refusal(self, head: Head, body: bytes, shown: str, doing: Doing) -> KvctlError:
        code, message, fields = parse_error_body(body)
        region = head.get("x-amz-bucket-region") or fields.get("Region")
        error = from_status(self._url, shown, head.status, code, message, doing=doing, region=region)
        error.details["date"] = head.get("date")
        return error

    def _take(self) -> tuple[Connection, Signer, bool]:
        while True:
            with self._lock:
                if not self._idle:
                    break
                connection, signer = self._idle.pop()
            if not connection.is_stale():
                return connection, signer, True
            connection.close()
        return self._route.connect(), self._route.signer(), False

    def _patient(self) -> tuple[Connection, Signer, bool]:
        """A connection for a request whose answer comes when gigabytes have been copied."""
        return self._route.connect(timeout=_COPY_SECONDS), self._route.signer(), False

    def _give_back(self, connection: Connection, signer: Signer) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append((connection, signer))
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._closed = True
        for connection, _ in idle:
            connection.close()


def _exchange(connection: Connection, request: bytes, data: bytes | None) -> Head:
    if data is None:
        connection.send(request)
        return connection.read_head()
    broken: OSError | None = None
    try:
        connection.send(request, memoryview(data))
    except OSError as problem:
        broken = problem  # a server that refuses answers before it has read all, and then closes
    try:
        return connection.read_head()
    except OSError as problem:
        raise broken or problem from None
