"""One persistent HTTP/1.1 connection whose bodies go straight between the socket and the caller's memory.

Plain sockets are blocking with kernel timeouts, so that one `recv` with MSG_WAITALL can take megabytes without
going back through the interpreter. TLS goes through `ssl`, record by record. Shared by plug-ins: it
knows nothing of S3 or of anything else above HTTP.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvctl.transports.views import MOST, first_of
from kvctl.transports.views import advance as advance  # noqa: PLC0414 - http.inline takes it from here

_HEAD_PEEK: Final = 4096
HEAD_LIMIT: Final = 65536
# bytes that make the kernel wake a reader; at 1 MiB a body of 2 MiB is not read while it comes
_BATCH: Final = 512 << 10
_BATCH_WAIT: Final = 0.1  # seconds that a batch may take
# as numbers: the flags of `socket` are enums, which take longer to combine than a system call
_NO_WAIT: Final = int(socket.MSG_DONTWAIT)
_TLS_WRITE: Final = 1 << 20  # a TLS write counts against the timeout as a whole: keep it short
# RFC 9112: a name has no space and a field no second line; what is lenient here can be smuggled past checks
_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\r\n\0]*)")
_STATUS: Final = re.compile(r"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?")


class ProtocolError(Exception):
    """The server's answer is not HTTP, or not in a form that can be checked."""


def too_large() -> ProtocolError:
    return ProtocolError(f"an answer with more than {HEAD_LIMIT} bytes of headers")


class ClosedError(ConnectionError):
    """The server ended the connection. `before_answer`: no byte of an answer had come."""

    def __init__(self, message: str, *, before_answer: bool) -> None:
        super().__init__(message)
        self.before_answer = before_answer


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an answer, and the first bytes of the body that came with it."""

    status: int
    headers: dict[str, list[str]]  # by name in lower case
    rest: bytes

    def get(self, name: str) -> str | None:
        """The first value of a header; `name` in lower case."""
        values = self.headers.get(name)
        return values[0] if values else None

    @property
    def content_length(self) -> int | None:
        """None where the length is not said. Raises ProtocolError for two lengths or a malformed one."""
        found = set(self.headers.get("content-length", ()))
        if not found:
            return None
        if len(found) > 1:
            raise ProtocolError(f"two lengths: {', '.join(sorted(found))}")
        value = found.pop()
        if not value.isascii() or not value.isdigit():
            raise ProtocolError(f"Content-Length: {value[:40]!r}")
        return int(value)

    @property
    def chunked(self) -> bool:
        return "transfer-encoding" in self.headers

    @property
    def keep_alive(self) -> bool:
        return (self.get("connection") or "").lower() != "close"


class Connection:
    """Not thread-safe, but for `shutdown`, which another thread may call to end a blocked call."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None,
        connect_timeout: float,
        timeout: float,
        receive_buffer: int = 0,
    ) -> None:
        """Connects. Raises OSError (refused, unreachable, timed out, name unknown) or ssl.SSLError."""
        # RFC 6761: names under .localhost are this host, which resolvers do not always know
        raw = socket.create_connection(("localhost" if host.endswith(".localhost") else host, port), connect_timeout)
        self.number = raw.fileno()  # of a plain one, while it is open
        self.interrupted = False
        self._timeout = timeout
        self.batches = True  # whether waking its reader for many bytes at once does it good
        self._raw = raw
        self._idle = select.poll()
        self._tls: ssl.SSLSocket | None = None
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if receive_buffer:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            if tls is not None:
                self._tls = tls.wrap_socket(raw, server_hostname=host)
                self._tls.settimeout(timeout)
                self._raw = self._tls
            else:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout))
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))
                raw.settimeout(None)
                self._idle.register(raw, select.POLLIN)
        except BaseException:
            raw.close()
            raise

    @property
    def is_plain(self) -> bool:
        """Whether bytes need no TLS: only then `fileno` may be waited for, and `take` used."""
        return self._tls is None

    def fileno(self) -> int:
        return self._raw.fileno()

    def is_stale(self) -> bool:
        """Whether the idle connection was closed, or holds bytes that belong to no answer."""
        if self._tls is not None:
            return self._tls.pending() > 0  # session tickets sit in the socket and are no staleness
        return bool(self._idle.poll(0))  # a receive that finds nothing raises, which costs more than the call

    def send(self, head: bytes, *body: memoryview) -> None:
        """The request: `head` as it is, then `body`, all of it out of its own memory. Raises OSError."""
        try:
            self._send(head, body)
        except ConnectionError as problem:
            raise ClosedError(str(problem), before_answer=True) from problem

    def _send(self, head: bytes, body: Sequence[memoryview]) -> None:
        self._raw.sendall(head)
        if self._tls is None:
            left = [view for view in body if len(view)]
            while left:
                advance(left, self._raw.sendmsg(left[:MOST]))
            return
        for view in body:
            for start in range(0, len(view), _TLS_WRITE):
                self._raw.sendall(view[start : start + _TLS_WRITE])

    def read_head(self) -> Head:
        """The head of the answer; interim answers (1xx) are skipped. Raises OSError or ProtocolError."""
        data = b""
        while True:
            # a small first receive: what it takes of the body has to be copied
            while (end := data.find(b"\r\n\r\n")) < 0:
                if len(data) > HEAD_LIMIT:
                    raise too_large()
                try:
                    more = self._raw.recv(_HEAD_PEEK)
                except ConnectionError as problem:
                    raise ClosedError(str(problem), before_answer=not data) from problem
                if not more:
                    raise ClosedError("the server closed the connection", before_answer=not data)
                data += more
            head = parse_head(data[:end], data[end + 4 :])
            if not 100 <= head.status < 200:
                return head
            data = head.rest

    def take(self, limit: int) -> bytes:
        """What came so far; empty when the server ended it. Raises BlockingIOError where nothing came, or OSError."""
        return self._raw.recv(limit, _NO_WAIT)

    def take_into(self, views: Sequence[memoryview]) -> int:
        """As `take`, into memory."""
        if len(views) == 1:
            return self._raw.recv_into(views[0], 0, _NO_WAIT)
        return self._raw.recvmsg_into(views[:MOST], 0, _NO_WAIT)[0]

    def wake_at(self, nbytes: int) -> None:
        """Whoever waits for `fileno` is woken when this much came (or all that the kernel takes)."""
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def read_body(self, head: Head, view: memoryview) -> int:
        """Fill `view` with the body; the number of bytes that came, fewer only when the server ended it."""
        return self.read_parts(head, (view,))

    def read_parts(self, head: Head, views: Sequence[memoryview]) -> int:
        """As `read_body`, into several views in turn."""
        left = [view for view in views if len(view)]
        wanted = sum(len(view) for view in left)
        rest, to_come = memoryview(head.rest), wanted
        while rest and left:
            count = min(len(rest), len(left[0]))
            left[0][:count] = rest[:count]
            rest = rest[count:]
            to_come -= count
            advance(left, count)
        return wanted - (self._fill(left, to_come) if self._tls is None else self._fill_by_records(left, to_come))

    def _fill_by_records(self, left: list[memoryview], to_come: int) -> int:
        """Fill `left`, which measures `to_come` bytes; how many of them did not come."""
        while left:
            count = self._raw.recv_into(left[0])
            if count == 0:
                break
            to_come -= count
            advance(left, count)
        return to_come

    def _fill(self, left: list[memoryview], to_come: int) -> int:
        """As `_fill_by_records`. Raises OSError (BlockingIOError: nothing came for the timeout)."""
        if self.batches and to_come > 2 * _BATCH:
            to_come = self._fill_by_batches(left, to_come)
        while left:
            count = self._receive(left[:MOST])
            if count == 0:
                break
            to_come -= count
            advance(left, count)
        return to_come

    def _fill_by_batches(self, left: list[memoryview], to_come: int) -> int:
        """Fill all but the last `_BATCH` bytes, woken once per `_BATCH` bytes rather than for every segment: half the
        CPU per byte, measured on loopback. At least `_BATCH` bytes of the body come after these, so no wait is for
        more than what is still to come. A window smaller than a batch would be a deadlock, and a slow peer gains
        nothing: when a batch takes longer than `_BATCH_WAIT`, this connection is read the plain way from there on.
        """
        self._receive_when(2 * _BATCH, _BATCH_WAIT)  # the kernel sizes the window for this ..
        self._receive_when(_BATCH, _BATCH_WAIT)  # .. so that half of it always fits
        try:
            while to_come > _BATCH:
                asked = to_come - _BATCH
                parts, asked = first_of(left, asked)
                count = self._receive(parts)
                self.batches = count >= min(_BATCH, asked)
                to_come -= count
                advance(left, count)
                if not self.batches:
                    break
        except BlockingIOError:
            self.batches = False
        finally:
            with contextlib.suppress(OSError):  # shut down meanwhile
                self._receive_when(1, self._timeout)
        return to_come

    def _receive(self, views: Sequence[memoryview]) -> int:
        """Wait until all of the views are full, or the server ended it."""
        if len(views) == 1:
            return self._raw.recv_into(views[0], 0, socket.MSG_WAITALL)
        return self._raw.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]

    def _receive_when(self, nbytes: int, seconds: float) -> None:
        """Wake a receive for `nbytes`, or after `seconds` with what is there."""
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def read_small(self, head: Head, limit: int = 65536) -> bytes | None:
        """The whole body of an error answer, of any framing; None when it is longer than `limit`."""
        if head.chunked:
            return self._read_chunked(head.rest, limit)
        length = head.content_length
        if length is None:
            return self._read_until_closed(head.rest, limit)
        if length > limit:
            return None
        body = bytearray(length)
        return bytes(body[: self.read_body(head, memoryview(body))])

    def _read_until_closed(self, data: bytes, limit: int) -> bytes | None:
        while len(data) <= limit:
            more = self._raw.recv(_HEAD_PEEK)
            if not more:
                return data
            data += more
        return None

    def _read_chunked(self, data: bytes, limit: int) -> bytes | None:
        body = b""
        while True:
            while b"\r\n" not in data:
                data = self._more(data)
            line, _, data = data.partition(b"\r\n")
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                raise ProtocolError("a malformed chunked answer") from None
            if len(body) + size > limit:
                return None
            while len(data) < size + 2:
                data = self._more(data)
            if size == 0:
                return body
            body += data[:size]
            data = data[size + 2 :]

    def _more(self, data: bytes) -> bytes:
        more = self._raw.recv(_HEAD_PEEK)
        if not more:
            raise ClosedError("the server closed the connection", before_answer=False)
        return data + more

    def shutdown(self) -> None:
        """End whatever call is blocked on this connection; it is of no use afterwards."""
        self.interrupted = True
        with contextlib.suppress(OSError):
            # the raw socket's own method: SSLSocket.shutdown would pull the TLS state from under the other thread
            socket.socket.shutdown(self._raw, socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._raw.close()


def converse(connection: Connection, head: bytes, *body: memoryview | None) -> Head:
    """Send a request and read the head of its answer. A server that refuses answers before it has read all, and then
    closes: its answer counts more than the broken pipe; but it cannot be a success. Raises OSError or ProtocolError.
    """
    views = [view for view in body if view is not None]
    broken: OSError | None = None
    try:
        connection.send(head, *views)
    except OSError as problem:
        if not views:
            raise
        broken = problem
    try:
        answer = connection.read_head()
    except OSError as problem:
        raise broken or problem from None
    if broken is not None and 200 <= answer.status < 300:
        raise broken
    return answer


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def parse_head(head: bytes, rest: bytes) -> Head:
    """`head` without its empty line, `rest` what came behind. Raises ProtocolError."""
    line, *fields = head.decode("latin-1").split("\r\n")
    match = _STATUS.fullmatch(line)
    if match is None:
        raise ProtocolError(f"an answer that begins with {line[:40].encode('latin-1')!r}")
    headers: dict[str, list[str]] = {}
    for field in fields:
        found = _FIELD.fullmatch(field)
        if found is None:
            raise ProtocolError(f"a malformed header {field[:40].encode('latin-1')!r}")
        name = found[1].lower()
        if name in headers:
            headers[name].append(found[2].strip(" \t"))
        else:
            headers[name] = [found[2].strip(" \t")]
    return Head(int(match[1]), headers, rest)
