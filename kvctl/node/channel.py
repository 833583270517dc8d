"""One connection of a client: heads into memory, bodies between socket and file without passing through Python.

What is in the page cache and not large is sent by the event loop itself. What may block on the disk, or moves
much, runs on a worker thread with the socket non-blocking: a thread goes back as soon as its peer has been slow for a
moment, so slow peers hold none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, Literal, TypeVar

from kvctl.node.bodies import BUFFER, SMALL, TruncatedError, is_warm, pull, push, with_body, write_all
from kvctl.node.messages import HttpError
from kvctl.node.settings import Limits

T = TypeVar("T")
# Given bytes that are one whole head, answers them without waiting for anything. later: nothing was sent; begun: the
# rest of the answer has to be waited for.
Outcome = Literal["later", "done", "begun"]
Quick = Callable[[bytes], Outcome]

_FIRST: Final = 8192


class Channel(ABC):
    """Used by one task; `abort` may be called by others."""

    def __init__(self, peer: str, limits: Limits, pool: Executor) -> None:
        self.peer = peer
        self.idle_since: float | None = None  # monotonic; while no request is being answered
        # monotonic; when it passes the server's watch aborts the channel: a timer per request would cost more
        self.deadline: float | None = None
        self._limits = limits
        self._pool = pool
        self._rest = b""

    async def read_head(self, quick: Quick | None = None) -> bytes | None:
        """The next request's head with its empty line; None when the peer has gone, was too slow (`deadline`), or
        `quick`, which may answer requests at once while this waits, has begun an answer. Raises OSError or HttpError
        (431).
        """
        data = self._rest.lstrip(b"\r\n")  # RFC 9112: empty lines before a request are skipped, here and below
        if not data:
            self.idle_since = time.monotonic()
            self.deadline = self.idle_since + self._limits.idle_seconds
            data = await self._wait(quick)
            self.idle_since = self.deadline = None
            if not data:
                return None
            data = data.lstrip(b"\r\n")
        if (end := data.find(b"\r\n\r\n")) < 0:
            self.deadline = time.monotonic() + self._limits.head_seconds
            while (end := data.find(b"\r\n\r\n")) < 0:
                if len(data) > self._limits.head:
                    break
                more = await self._receive(_FIRST)
                if not more:
                    return None
                data = (data + more).lstrip(b"\r\n")
        self.deadline = None
        if end < 0 or end + 4 > self._limits.head:
            self._rest = b""
            raise HttpError(431, "head_too_large", f"more than {self._limits.head} bytes of head", close=True)
        self._rest = data[end + 4 :]
        return data[: end + 4]

    async def in_thread(self, work: Callable[[], T], pool: Executor | None = None) -> T:
        """`work` on a worker thread. A cancelled wait ends the connection and still waits for the thread, which
        holds descriptors of it.
        """
        future = asyncio.get_running_loop().run_in_executor(pool or self._pool, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.abort()
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            with contextlib.suppress(Exception):
                future.result()
            raise

    async def discard(self, count: int) -> int:
        """Read away what the peer still sends, up to `count` bytes, to its end, or for the linger time; returns how
        many of them did not come.
        """
        data, self._rest = self._rest[:count], self._rest[count:]
        count -= len(data)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._limits.linger_seconds):
                while count > 0 and (data := await self._receive(min(count, BUFFER))):
                    count -= len(data)
        return count

    def _allowed(self, started: float, moved: int) -> float:
        """Seconds that a body which has moved `moved` bytes since `started` may wait now. Raises TimeoutError."""
        limits = self._limits
        left = started + limits.grace_seconds + moved / limits.min_rate - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{moved} bytes are fewer than {limits.min_rate} a second")
        return min(limits.stall_seconds, left)

    async def send_file(self, head: bytes, fd: int, offset: int, count: int, *, in_memory: bool = False) -> None:
        """`head`, then `count` bytes of the file. `in_memory`: its file system never waits for a disk. Raises OSError,
        TimeoutError or TruncatedError.
        """
        warm = is_warm(fd, offset, count, in_memory=in_memory)
        if warm and count <= SMALL:
            await self.send(with_body(head, fd, offset, count))
            return
        await self._send_file(head, fd, offset, count, inline=warm)

    async def receive_file(self, fd: int, count: int) -> int:
        """The body into the file from its start; the bytes that came, fewer when the peer went away."""
        data, self._rest = self._rest[:count], self._rest[count:]
        if data:
            await self.in_thread(lambda: write_all(fd, memoryview(data), 0))
        return len(data) + await self._receive_file(fd, len(data), count - len(data)) if count > len(data) else count

    async def _wait(self, quick: Quick | None) -> bytes:
        """The first bytes of a request that `quick` did not answer."""
        return await self._receive(_FIRST)

    @abstractmethod
    async def _receive(self, limit: int) -> bytes: ...
    @abstractmethod
    async def _send_file(self, head: bytes, fd: int, offset: int, count: int, *, inline: bool) -> None: ...
    @abstractmethod
    async def _receive_file(self, fd: int, offset: int, count: int) -> int: ...
    @abstractmethod
    async def send(self, data: bytes | bytearray) -> None:
        """All of it. Raises OSError or TimeoutError."""

    @abstractmethod
    def finish(self) -> None:
        """No more will be sent; the peer may still send."""

    @abstractmethod
    def abort(self) -> None:
        """End the connection now."""

    @abstractmethod
    async def close(self) -> None: ...


class PlainChannel(Channel):
    """TCP: sendfile, and large receives."""

    def __init__(self, sock: socket.socket, peer: str, limits: Limits, pool: Executor) -> None:
        super().__init__(peer, limits, pool)
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def _receive(self, limit: int) -> bytes:
        return await self._loop.sock_recv(self._sock, limit)

    async def _wait(self, quick: Quick | None) -> bytes:
        """One registration with the selector for a run of quick requests: switching tasks costs more than the work."""
        if quick is None:
            return await self._receive(_FIRST)
        future: asyncio.Future[bytes] = self._loop.create_future()
        number = self._sock.fileno()
        self._loop.add_reader(number, self._on_readable, quick, future)
        try:
            return await future
        finally:
            self._loop.remove_reader(number)

    def _on_readable(self, quick: Quick, future: asyncio.Future[bytes]) -> None:
        if future.done():
            return
        try:
            data = self._sock.recv(_FIRST)
            if data and data.find(b"\r\n\r\n") == len(data) - 4:
                outcome = quick(data)
                if outcome == "done":
                    self.idle_since = time.monotonic()
                    self.deadline = self.idle_since + self._limits.idle_seconds
                    return
                if outcome == "begun":
                    data = b""
        except BlockingIOError:
            return
        except Exception as problem:  # belongs to the task that waits
            future.set_exception(problem)
            return
        future.set_result(data)

    def try_send(self, data: bytearray, fd: int, offset: int, count: int) -> int:
        """Send `data`, then `count` bytes of the file, as far as they go without waiting; returns the bytes sent,
        0 when the peer takes none now. Raises OSError or TruncatedError.
        """
        try:
            sent = self._sock.send(data, socket.MSG_MORE if count else 0)
        except BlockingIOError:
            return 0
        if sent == len(data) and count:
            sent += push(self._sock, fd, offset, count, patience=0)[0]
        return sent

    async def send_rest(self, data: bytearray, fd: int, offset: int, count: int, sent: int) -> None:
        """What `try_send` left, the same arguments and what it returned. Raises as `send_file`."""
        if sent < len(data):
            await self.send(data[sent:])
            sent = len(data)
        await self._send_body(fd, offset, count, sent - len(data), inline=True)

    async def send(self, data: bytes | bytearray) -> None:
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            async with asyncio.timeout(self._limits.stall_seconds):
                await self._loop.sock_sendall(self._sock, memoryview(data)[sent:])

    async def _send_file(self, head: bytes, fd: int, offset: int, count: int, *, inline: bool) -> None:
        await self._send_more(head)
        await self._send_body(fd, offset, count, 0, inline=inline)

    async def _send_body(self, fd: int, offset: int, count: int, sent: int, *, inline: bool) -> None:
        started = time.monotonic()
        while sent < count:
            if inline:
                moved, slow = push(self._sock, fd, offset + sent, count - sent, patience=0)
            else:
                moved, slow = await self.in_thread(lambda: push(self._sock, fd, offset + sent, count - sent))  # noqa: B023
            sent += moved
            if slow:
                await self._ready(self._loop.add_writer, self._loop.remove_writer, self._allowed(started, sent))

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
        self._sock.close()


class TlsChannel(Channel):
    """TLS through asyncio's streams: each byte passes through memory here."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, limits: Limits, pool: Executor
    ) -> None:
        super().__init__(peer, limits, pool)
        self._reader = reader
        self._writer = writer

    async def _receive(self, limit: int) -> bytes:
        return await self._reader.read(limit)

    async def send(self, data: bytes | bytearray) -> None:
        self._writer.write(data)
        async with asyncio.timeout(self._limits.stall_seconds):
            await self._writer.drain()

    async def _send_file(self, head: bytes, fd: int, offset: int, count: int, *, inline: bool) -> None:
        started, sent = time.monotonic(), 0
        await self.send(head)
        while sent < count:
            wanted = min(BUFFER, count - sent)
            data = await self.in_thread(lambda: os.pread(fd, wanted, offset + sent))  # noqa: B023
            if not data:
                raise TruncatedError
            self._writer.write(data)
            sent += len(data)
            async with asyncio.timeout(self._allowed(started, sent)):
                await self._writer.drain()

    async def _receive_file(self, fd: int, offset: int, count: int) -> int:
        started, got = time.monotonic(), 0
        while got < count:
            async with asyncio.timeout(self._allowed(started, got)):
                data = await self._reader.read(min(BUFFER, count - got))
            if not data:
                break
            await self.in_thread(lambda: write_all(fd, memoryview(data), offset + got))  # noqa: B023
            got += len(data)
        return got

    def finish(self) -> None:
        """TLS has no half-closed state in asyncio: the peer learns it from `connection: close`."""

    def abort(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._limits.linger_seconds):
                await self._writer.wait_closed()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
