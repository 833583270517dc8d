"""A connection under TLS, through asyncio's streams: each byte passes through memory here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from concurrent.futures import Executor

from kvctl.node.bodies import BUFFER, TruncatedError, write_all
from kvctl.node.channel import Channel
from kvctl.node.settings import Limits


class TlsChannel(Channel):
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

    async def send_file(self, head: bytes, fd: int, offset: int, count: int, *, in_memory: bool = False) -> None:
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
