"""Two faces over any transport for code that is not the executor: blocking calls, and awaitable ones.

Both own the transport's driver side: nobody else may call `submit` or `poll` on it. No retry here either.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Self

from kvctl.core.errors import EnvError
from kvctl.transports.api import Completion, Op, Transport


class SyncTransport:
    """`move` submits and waits. One thread at a time. Close it to close the transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def move(self, ops: Sequence[Op]) -> list[Completion]:
        """The completion of each operation, in the order of `ops`. A failed one is not raised: look at its status."""
        self.transport.submit(ops)
        ended: dict[int, Completion] = {}
        while len(ended) < len(ops):
            for completion in self.transport.poll(None):
                ended[completion.id] = completion
        return [ended[op.id] for op in ops]

    def close(self) -> None:
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncTransport:
    """`await move(op)` from the event loop it was made in. A cancelled await cancels the operation and waits until the
    transport has confirmed that it touches the buffer no more.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._todo: list[Op] = []
        self._wake = threading.Condition()
        self._closed = False
        self._driver = threading.Thread(target=self._drive, name=f"kvctl-async-{transport.name}", daemon=True)
        self._driver.start()

    async def move(self, op: Op) -> Completion:
        """The operation's completion. Ids must be unique among those in flight."""
        if self._closed:
            raise EnvError(f"transport {self.transport.name} is closed")
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._waiting[op.id] = future
        with self._wake:
            self._todo.append(op)
            self._wake.notify()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.transport.cancel([op.id])
            await future
            raise

    async def close(self) -> None:
        """Ends what is in flight as cancelled, then the transport."""
        self._closed = True
        self.transport.cancel(list(self._waiting))
        if self._waiting:
            await asyncio.gather(*self._waiting.values())
        with self._wake:
            self._wake.notify()
        await asyncio.to_thread(self._driver.join)
        await asyncio.to_thread(self.transport.close)

    def _drive(self) -> None:
        in_flight = 0
        while True:
            with self._wake:
                while not self._todo and not in_flight and not self._closed:
                    self._wake.wait()
                ops, self._todo = self._todo, []
                if not ops and not in_flight:
                    return
            if ops:
                self.transport.submit(ops)
                in_flight += len(ops)
            for completion in self.transport.poll(0.01):
                in_flight -= 1
                self._loop.call_soon_threadsafe(self._settle, completion)

    def _settle(self, completion: Completion) -> None:
        future = self._waiting.pop(completion.id)
        if not future.done():
            future.set_result(completion)
