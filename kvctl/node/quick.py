"""The quick way to answer what clients ask most: a GET of cached bytes, written as our own client writes it.

A strict pattern takes the head apart and everything is decided in one go, without a task, a thread or httptools. It
only ever succeeds: whatever does not fit, in any way, is left to `Service.answer`, which does it all again and knows
what to say.
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
from kvctl.transports.node_auth import TOKEN_HEADER, Asked

# A subset of what `messages.parse_request` understands, with the same meaning (tests compare them): so nothing can be
# smuggled past checks by being read twice.
_HEAD: Final = re.compile(
    r"GET (/v1/([A-Za-z0-9._~/-]+)) HTTP/1\.1\r\n"
    r"host: [!-~]+\r\n"
    r"user-agent: [!-~]+\r\n"
    rf"(?:{TOKEN_HEADER}: ([!-~]+)\r\n)?"
    r"(?:range: (bytes=([0-9]{1,19})-([0-9]{1,19}))\r\n)?"
    r'(?:if-match: ("([!#-~]+)")\r\n)?'
    r"\r\n"
)


class Ask:
    """A head taken apart. `first` and `last` are None without a range."""

    __slots__ = ("asked", "first", "key", "last", "token", "version")

    def __init__(self, head: bytes) -> None:
        """Raises ValueError for a head of any other form."""
        match = _HEAD.fullmatch(head.decode("ascii"))
        if match is None:
            raise ValueError("another form")
        target, self.key, token, span, first, last, if_match, self.version = match.groups()
        self.asked = Asked("GET", target, span or "", if_match or "")
        self.token = token or ""
        self.first = None if first is None else int(first)
        self.last = None if last is None else int(last)


class Sending:
    """An answer on its way: `head` as far as it was not sent, then `left` bytes of the file at `offset`. `warm_until`:
    up to this offset the bytes were cached.
    """

    __slots__ = ("file", "head", "left", "length", "offset", "started", "status", "target", "warm_until")

    def __init__(self, file: OpenFile, status: int, head: bytes, offset: int, length: int, target: str) -> None:
        self.file = file
        self.status = status
        self.head = head
        self.offset = self.warm_until = offset
        self.left = self.length = length
        self.target = target
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
    ) -> None:
        self.off = False
        self.in_memory = in_memory
        self._files = files
        self._guard = guard
        self._metrics = metrics
        self._tell = tell

    def begin(self, head: bytes, peer: str) -> Sending | None:
        """The answer to the one request whose head `head` is; None when it is not for here."""
        if self.off or not head.endswith(b"\r\n\r\n"):
            return None
        try:
            ask = Ask(head)
            self._guard.check(ask.asked, peer, ask.token, need="ro", key=ask.key, folder=False, once=False)
            file = self._files.take(ask.key)
        except (ValueError, HttpError, KvctlError):
            return None
        sending = self._answer(ask, file)
        if sending is None:
            file.release()
            return None
        self._metrics.in_flight += 1
        return sending

    def _answer(self, ask: Ask, file: OpenFile) -> Sending | None:
        stat = file.stat
        if ask.version is not None and ask.version != stat.version:
            return None
        if ask.first is None or ask.last is None:
            offset, length, status = 0, stat.size, 200
            head = f"HTTP/1.1 200 OK\r\ndate: {http_date()}\r\n{file.lines}content-length: {length}\r\n\r\n"
        else:
            last = min(ask.last, stat.size - 1)
            offset, length, status = ask.first, last - ask.first + 1, 206
            if length <= 0:
                return None
            head = (  # our client knows this form (`kvctl_native.transport`)
                f"HTTP/1.1 206 Partial Content\r\ndate: {http_date()}\r\n{file.etag}"
                f"content-range: bytes {offset}-{last}/{stat.size}\r\ncontent-length: {length}\r\n\r\n"
            )
        sending = Sending(file, status, head.encode("latin-1"), offset, length, ask.asked.target)
        return sending if self.look_ahead(sending) else None

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
        sending.file.release()
        metrics = self._metrics
        metrics.in_flight -= 1
        if not sending.left:
            metrics.sent += sending.length
        metrics.finished("GET", sending.status, time.perf_counter() - sending.started)
        if self._tell is not None:
            self._tell(f"{peer} GET {sending.target} {sending.status}")
