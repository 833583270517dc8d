"""The quick way to answer what clients ask most: a GET of cached bytes, with a body or by RDMA, written as our own
client writes it.

A strict pattern takes the head apart and everything is decided in one go, without a task, a thread or httptools. It
only ever succeeds: whatever does not fit, in any way, is left to `Service.answer`, which does it all again and knows
what to say. But an RDMA write that has begun, and whose token is thereby used, is finished there, not begun again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

from kvctl.core.errors import KvctlError
from kvctl.node.bodies import WINDOW, is_warm
from kvctl.node.guard import Guard
from kvctl.node.messages import HttpError, http_date
from kvctl.node.metrics import Metrics
from kvctl.node.openfiles import OpenFile, OpenFiles
from kvctl.node.rdma_seam import Dialect, Flight, LoopEngine, RdmaEngine, RdmaRequest
from kvctl.transports.node_auth import RDMA_HEADERS, TOKEN_HEADER, Asked, Token

# A subset of what `messages.parse_request` understands, with the same meaning (tests compare them): so nothing can be
# smuggled past checks by being read twice.
_HEAD: Final = re.compile(
    r"GET (/v1/([A-Za-z0-9._~/-]+)) HTTP/1\.1\r\n"
    r"host: [!-~]+\r\n"
    r"user-agent: [!-~]+\r\n"
    rf"(?:{TOKEN_HEADER}: ([!-~]+)\r\n)?"
    r"(?:range: (bytes=([0-9]{1,19})-([0-9]{1,19}))\r\n)?"
    r'(?:if-match: ("([!#-~]+)")\r\n)?'
    rf"(?:({'|'.join(RDMA_HEADERS)}): ([!-~]+)\r\n)?"
    r"\r\n"
)


class Ask:
    """A head taken apart. `first` and `last` are None without a range, `rdma` is empty without such a token."""

    __slots__ = ("asked", "dialect", "first", "key", "last", "rdma", "token", "version")

    def __init__(self, head: bytes) -> None:
        """Raises ValueError for a head of any other form."""
        match = _HEAD.fullmatch(head.decode("ascii"))
        if match is None:
            raise ValueError("another form")
        target, self.key, token, span, first, last, if_match, self.version, header, rdma = match.groups()
        self.rdma = rdma or ""
        self.dialect: Dialect = "scal" if header == RDMA_HEADERS[0] else "s3"
        self.asked = Asked("GET", target, span or "", if_match or "", "", self.rdma)
        self.token = token or ""
        self.first = None if first is None else int(first)
        self.last = None if last is None else int(last)


class Sending:
    """An answer on its way: `head` as far as it was not sent, then `left` bytes of the file at `offset`. `warm_until`:
    up to this offset the bytes were cached. With a `flight`, `length` bytes go by that, before the head is sent, and
    `request` is the head that asked for them.
    """

    __slots__ = (
        "file", "flight", "head", "left", "length", "offset", "request", "started", "status", "target", "warm_until",
    )  # fmt: skip

    def __init__(self, file: OpenFile, status: int, head: bytes, offset: int, length: int, target: str) -> None:
        self.file = file
        self.status = status
        self.head = head
        self.offset = self.warm_until = offset
        self.left = self.length = length
        self.target = target
        self.flight: Flight | None = None
        self.request = b""
        self.started = time.perf_counter()


class QuickReads:
    """Belongs to the event loop's thread. Each `Sending` that `begin` gave is ended once by `end`."""

    def __init__(
        self,
        files: OpenFiles,
        guard: Guard,
        metrics: Metrics,
        tell: Callable[[str], None] | None,
        *,
        in_memory: bool,
        engine: RdmaEngine | None = None,
    ) -> None:
        self.off = False
        self.in_memory = in_memory
        self._files = files
        self._guard = guard
        self._metrics = metrics
        self._tell = tell
        self._engine = engine if isinstance(engine, LoopEngine) else None
        self._waiting: dict[Flight, Callable[[], None]] = {}

    def begin(self, head: bytes, peer: str) -> Sending | None:
        """The answer to the one request whose head `head` is; None when it is not for here."""
        if self.off or not head.endswith(b"\r\n\r\n"):
            return None
        try:
            ask = Ask(head)
            token = self._guard.allow(ask.asked, peer, ask.token, need="ro", key=ask.key, folder=False)
            file = self._files.take(ask.key)
        except (ValueError, HttpError, KvctlError):
            return None
        begun: Sending | None = None
        try:
            sending = self._answer(ask, file)
            if sending is not None and ask.rdma:
                sending.request = head
                begun = self._place(sending, ask, token, peer)
            elif sending is not None and self.look_ahead(sending):
                begun = sending
        finally:
            if begun is None:
                file.release()
        if begun is not None:
            self._metrics.in_flight += 1
        return begun

    def _place(self, sending: Sending, ask: Ask, token: Token | None, peer: str) -> Sending | None:
        """Begin to write the bytes by RDMA, with which the token is used."""
        if self._engine is None:
            return None
        asked = RdmaRequest(ask.rdma, ask.dialect, peer, ask.key, sending.offset, sending.length)
        flight = self._engine.begin(asked, sending.file.fd, cached=self.in_memory)
        if flight is None:
            return None
        try:
            self._guard.use(token)
        except HttpError:
            flight.abandon()
            return None
        sending.flight, sending.left = flight, 0
        flight.go()
        return sending

    def watch(self, sending: Sending, then: Callable[[], None]) -> None:
        """Call `then` when its flight is placed, or stuck."""
        assert sending.flight is not None
        self._waiting[sending.flight] = then

    def on_flights(self) -> None:
        """The engine's descriptor is readable."""
        if self._engine is None:
            return
        for flight in self._engine.ready():
            then = self._waiting.pop(flight, None)
            if then is not None:
                then()

    @property
    def engine_fd(self) -> int | None:
        return None if self._engine is None else self._engine.fd

    def leave(self, sending: Sending) -> None:
        """The rest of it is for a task."""
        if sending.flight is not None:
            self._waiting.pop(sending.flight, None)
            sending.flight.leave()

    def _answer(self, ask: Ask, file: OpenFile) -> Sending | None:
        stat = file.stat
        if ask.version is not None and ask.version != stat.version:
            return None
        if ask.first is None or ask.last is None:
            offset, length, status = 0, stat.size, 200
            line, about = "200 OK", file.lines
        else:
            last = min(ask.last, stat.size - 1)
            offset, length, status = ask.first, last - ask.first + 1, 206
            if length <= 0:
                return None
            # our client knows this form (`kvctl_native.transport`)
            line, about = "206 Partial Content", f"{file.etag}content-range: bytes {offset}-{last}/{stat.size}\r\n"
        body = 0 if ask.rdma else length
        head = f"HTTP/1.1 {line}\r\ndate: {http_date()}\r\n{about}content-length: {body}\r\n\r\n"
        return Sending(file, status, head.encode("latin-1"), offset, length, ask.asked.target)

    def look_ahead(self, sending: Sending) -> bool:
        """Whether the next bytes can be sent without waiting for a disk; `warm_until` says how many."""
        file, offset = sending.file, sending.offset
        window = offset // WINDOW * WINDOW
        end = min(offset + sending.left, window + WINDOW)
        if window not in file.warm:
            if is_warm(file.fd, window, min(WINDOW, file.stat.size - window), in_memory=self.in_memory):
                file.warm.add(window)
            elif not is_warm(file.fd, offset, end - offset, in_memory=self.in_memory):
                return False
        sending.warm_until = end
        return True

    def end(self, sending: Sending, peer: str) -> None:
        """It was sent, or will not be."""
        metrics = self._metrics
        flight = sending.flight
        if flight is not None:
            self._waiting.pop(flight, None)
            flight.abandon()
        sending.file.release()
        metrics.in_flight -= 1
        if flight is not None:
            metrics.rdma_sent += sending.length if flight.placed else 0
        elif not sending.left:
            metrics.sent += sending.length
        metrics.finished("GET", sending.status, time.perf_counter() - sending.started)
        if self._tell is not None:
            self._tell(f"{peer} GET {sending.target} {sending.status}")
