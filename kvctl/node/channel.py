"""One connection of a client: heads into memory, bodies between socket and file. What plain and TLS ones share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, TypeVar

from kvctl.node.bodies import BUFFER, write_all
from kvctl.node.messages import HttpError
from kvctl.node.settings import Limits

T = TypeVar("T")
FIRST: Final = 8192  # bytes that a receive takes of a head


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

    async def read_head(self) -> bytes | None:
        """The next request's head with its empty line; None when the peer has gone or was too slow (`deadline`).
        Raises OSError or HttpError (431).
        """
        data = self._rest.lstrip(b"\r\n")  # RFC 9112: empty lines before a request are skipped, here and below
        if not data:
            self.idle_since = time.monotonic()
            self.deadline = self.idle_since + self._limits.idle_seconds
            data = await self._wait()
            self.idle_since = self.deadline = None
            if not data:
                return None
            data = data.lstrip(b"\r\n")
        if (end := data.find(b"\r\n\r\n")) < 0:
            self.deadline = time.monotonic() + self._limits.head_seconds
            while (end := data.find(b"\r\n\r\n")) < 0:
                if len(data) > self._limits.head:
                    break
                more = await self._receive(FIRST)
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
        left = self._patience(started, moved, time.monotonic())
        if left <= 0:
            raise TimeoutError(f"{moved} bytes are fewer than {self._limits.min_rate} a second")
        return left

    def _patience(self, started: float, moved: int, now: float) -> float:
        """As `_allowed`; 0 or less when it has waited too long."""
        limits = self._limits
        return min(limits.stall_seconds, started + limits.grace_seconds + moved / limits.min_rate - now)

    async def receive_file(self, fd: int, count: int) -> int:
        """The body into the file from its start; the bytes that came, fewer when the peer went away."""
        data, self._rest = self._rest[:count], self._rest[count:]
        if data:
            await self.in_thread(lambda: write_all(fd, memoryview(data), 0))
        return len(data) + await self._receive_file(fd, len(data), count - len(data)) if count > len(data) else count

    async def _wait(self) -> bytes:
        """The first bytes of a request."""
        return await self._receive(FIRST)

    @abstractmethod
    async def send_file(self, head: bytes, fd: int, offset: int, count: int, *, in_memory: bool = False) -> None:
        """`head`, then `count` bytes of the file. `in_memory`: its file system never waits for a disk. Raises OSError,
        TimeoutError or TruncatedError.
        """

    @abstractmethod
    async def _receive(self, limit: int) -> bytes: ...
    @abstractmethod
    async def _receive_file(self, fd: int, offset: int, count: int) -> int: ...
    @abstractmethod
    async def send(self, data: bytes | bytearray) -> None:
        """All of it. Raises OSError or TimeoutError."""

    def expire(self) -> None:
        """Its deadline has passed."""
        self.deadline = self.idle_since = None
        self.abort()

    @abstractmethod
    def finish(self) -> None:
        """No more will be sent; the peer may still send."""

    @abstractmethod
    def abort(self) -> None:
        """End the connection now."""

    @abstractmethod
    async def close(self) -> None: ...
