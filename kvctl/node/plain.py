"""A plain TCP connection: bodies between socket and file by system calls, without passing through Python.

What is in the page cache is sent by the event loop itself; requests that `QuickReads` knows are answered by its
callbacks alone, however many follow each other. What may block on the disk runs on a worker thread with the socket
non-blocking: a thread goes back as soon as its peer has been slow for a moment, so slow peers hold none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from kvctl.node.bodies import WINDOW, is_warm, pull, push
from kvctl.node.channel import FIRST, Channel
from kvctl.node.quick import QuickReads, Sending
from kvctl.node.settings import Limits

_FLIGHT_SECONDS: Final = 1.0  # how long the loop waits for an RDMA write before a thread does


class PlainChannel(Channel):
    """See `Channel`. When `read_head` returns None, `begun` may hold an answer of `quick` that has to be waited for."""

    def __init__(
        self, sock: socket.socket, peer: str, limits: Limits, pool: Executor, quick: QuickReads | None = None
    ) -> None:
        super().__init__(peer, limits, pool)
        sock.setblocking(False)
        self.begun: Sending | None = None
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._quick = quick
        # the state of quick answers: the future that `_wait` waits for, the answer on its way, what the loop watches
        self._waiter: asyncio.Future[bytes] | None = None
        self._sending: Sending | None = None
        self._moved_since = 0.0
        self._reading = False
        self._writing = False

    async def _receive(self, limit: int) -> bytes:
        return await self._loop.sock_recv(self._sock, limit)

    # -- quick answers: callbacks of the loop, from `_wait` until something has to be waited for ---------------------

    async def _wait(self) -> bytes:
        if self._quick is None:
            return await self._receive(FIRST)
        self._waiter = self._loop.create_future()
        self._watch_reads()
        try:
            return await self._waiter
        finally:
            self._waiter = None
            self._watch_reads(on=False)
            self._watch_writes(on=False)
            if self._sending is not None:
                self._quick.end(self._sending, self.peer)
                self._sending = None

    def _watch_reads(self, *, on: bool = True) -> None:
        if on != self._reading:
            self._reading = on
            if on:
                self._loop.add_reader(self._sock.fileno(), self._on_readable)
            else:
                self._loop.remove_reader(self._sock.fileno())

    def _watch_writes(self, *, on: bool = True) -> None:
        if on != self._writing:
            self._writing = on
            if on:
                self._loop.add_writer(self._sock.fileno(), self._advance)
            else:
                self._loop.remove_writer(self._sock.fileno())

    def _on_readable(self) -> None:
        waiter, quick = self._waiter, self._quick
        if waiter is None or quick is None or waiter.done():
            return
        if self._sending is not None:  # the next request: it is looked at when this answer is out
            self._watch_reads(on=False)
            return
        try:
            data = self._sock.recv(FIRST)
            sending = quick.begin(data, self.peer)
        except BlockingIOError:
            return
        except Exception as problem:  # belongs to the task that waits
            waiter.set_exception(problem)
            return
        self.idle_since = self.deadline = None  # before the task gets its turn: an idle one may be ended until then
        if sending is None:
            waiter.set_result(data)
            return
        self._sending = sending
        if sending.flight is None or sending.flight.placed:
            self._begin()
        elif sending.flight.stuck:
            self._hand_over()
        else:
            self.deadline = time.monotonic() + _FLIGHT_SECONDS
            quick.watch(sending, self._on_flight)

    def _on_flight(self) -> None:
        """Its bytes are placed by RDMA, or will not be without waiting."""
        sending = self._sending
        if sending is None or self._waiter is None or self._waiter.done():
            return
        self.deadline = None
        if sending.flight is not None and sending.flight.placed:
            self._begin()
        else:
            self._hand_over()

    def _begin(self) -> None:
        """The answer begins."""
        sending, waiter = self._sending, self._waiter
        if sending is None or waiter is None:
            return
        try:
            sent = self._sock.send(sending.head, socket.MSG_MORE if sending.left else 0)
        except BlockingIOError:
            sent = 0
        except OSError as problem:
            waiter.set_exception(problem)
            return
        if sent == len(sending.head):
            self._advance()
        else:
            sending.head = sending.head[sent:]
            self._hand_over()

    def _hand_over(self) -> None:
        """The rest of the answer is for the task that waits."""
        if self._waiter is not None and not self._waiter.done():
            if self._sending is not None and self._quick is not None:
                self._quick.leave(self._sending)
            self.begun, self._sending = self._sending, None
            self._waiter.set_result(b"")

    def _advance(self) -> None:
        """Send what the peer takes, at most a window, and watch for when it takes more."""
        sending, waiter, quick = self._sending, self._waiter, self._quick
        if sending is None or waiter is None or quick is None or waiter.done():
            return
        try:
            if sending.left:
                if sending.offset >= sending.warm_until and not quick.look_ahead(sending):
                    self._hand_over()
                    return
                moved, _ = push(
                    self._sock, sending.file.fd, sending.offset, sending.warm_until - sending.offset, 0,
                    in_memory=quick.in_memory,
                )  # fmt: skip
                sending.offset += moved
                sending.left -= moved
        except Exception as problem:  # belongs to the task that waits
            waiter.set_exception(problem)
            return
        now = time.monotonic()
        if sending.left:
            if not self._writing:
                self._moved_since = now
                self._watch_writes()
            self.deadline = now + self._patience(self._moved_since, sending.length - sending.left, now)
            return
        self._sending = None
        quick.end(sending, self.peer)
        self._watch_writes(on=False)
        self._watch_reads()
        self.idle_since = now
        self.deadline = now + self._limits.idle_seconds

    def expire(self) -> None:
        if self._sending is None or self._sending.flight is None or self._sending.flight.placed:
            super().expire()
        else:
            self.deadline = None
            self._hand_over()

    # -- answers of a task -----------------------------------------------------------------------------------------

    async def send_begun(self, sending: Sending, *, in_memory: bool) -> None:
        """The rest of an answer that `quick` began. Raises as `send_file`."""
        if sending.head:
            await (self._send_more if sending.left else self.send)(sending.head)
        await self._send_body(sending.file.fd, sending.offset, sending.left, in_memory=in_memory)
        sending.left = 0

    async def send_file(self, head: bytes, fd: int, offset: int, count: int, *, in_memory: bool = False) -> None:
        if not count:
            await self.send(head)
            return
        await self._send_more(head)
        await self._send_body(fd, offset, count, in_memory=in_memory)

    async def _send_body(self, fd: int, offset: int, count: int, *, in_memory: bool) -> None:
        started, sent, seen, warm = time.monotonic(), 0, 0, True
        while sent < count:
            if sent >= seen:
                window = min(WINDOW, count - sent)
                warm = is_warm(fd, offset + sent, window, in_memory=in_memory)
                seen = sent + window
            place, wanted = offset + sent, seen - sent
            if warm:
                moved, slow = push(self._sock, fd, place, wanted, 0, in_memory=in_memory)
            else:
                moved, slow = await self.in_thread(lambda: _push_cold(self._sock, fd, place, wanted))  # noqa: B023
            sent += moved
            if slow:
                await self._ready(self._loop.add_writer, self._loop.remove_writer, self._allowed(started, sent))
            elif warm and sent < count:
                await asyncio.sleep(0)  # others are served between two windows

    async def send(self, data: bytes | bytearray) -> None:
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            async with asyncio.timeout(self._limits.stall_seconds):
                await self._loop.sock_sendall(self._sock, memoryview(data)[sent:])

    async def _send_more(self, head: bytes) -> None:
        """The head, held back so that it leaves in one segment with the first bytes of the body."""
        try:
            sent = self._sock.send(head, socket.MSG_MORE)
        except BlockingIOError:
            sent = 0
        if sent < len(head):
            await self.send(head[sent:])

    async def _receive_file(self, fd: int, offset: int, count: int) -> int:
        started, got, ended = time.monotonic(), 0, False
        while got < count and not ended:
            moved, ended = await self.in_thread(lambda: pull(self._sock, fd, offset + got, count - got))  # noqa: B023
            got += moved
            if got < count and not ended:
                await self._ready(self._loop.add_reader, self._loop.remove_reader, self._allowed(started, got))
        return got

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], bool], seconds: float) -> None:
        future = self._loop.create_future()
        number = self._sock.fileno()
        add(number, _wake, future)
        try:
            async with asyncio.timeout(seconds):
                await future
        finally:
            remove(number)

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        if self.begun is not None and self._quick is not None:
            self._quick.end(self.begun, self.peer)
        self._sock.close()


def _push_cold(sock: socket.socket, fd: int, offset: int, count: int) -> tuple[int, bool]:
    with contextlib.suppress(OSError):  # the disk works ahead while the peer takes what there is
        os.posix_fadvise(fd, offset, 2 * count, os.POSIX_FADV_WILLNEED)
    return push(sock, fd, offset, count)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
