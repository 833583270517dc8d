"""The blocking and the awaitable face over a real transport."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvctl.core.addresses import parse_store
from kvctl.memory.buffers import HostBuffer
from kvctl.transports.api import Op, Status, Transport
from kvctl.transports.faces import AsyncTransport, SyncTransport
from kvctl.transports.registry import choose, open_store, open_transports

DATA = bytes(range(256)) * 64


def transport_over(folder: Path) -> Transport:
    config = parse_store(str(folder))
    store = open_store(config)
    store.put("k", DATA)
    return open_transports(config, store, choose("file", "host"))[0]


def ops(buffer: HostBuffer) -> list[Op]:
    return [Op(n, "read", "k", n * 1024, 1024, buffer, n * 1024) for n in range(len(DATA) // 1024)]


def test_blocking_moves_come_back_in_order(tmp_path: Path) -> None:
    buffer = HostBuffer(len(DATA))
    with SyncTransport(transport_over(tmp_path)) as face:
        done = face.move(ops(buffer))
    assert [item.id for item in done] == list(range(16))
    assert bytes(buffer.view) == DATA
    buffer.close()


def test_awaited_moves_run_together(tmp_path: Path) -> None:
    buffer = HostBuffer(len(DATA))

    async def run() -> list[Status]:
        face = AsyncTransport(transport_over(tmp_path))
        done = await asyncio.gather(*(face.move(op) for op in ops(buffer)))
        missing = await face.move(Op(99, "read", "none", 0, 8, buffer))
        await face.close()
        return [*(item.status for item in done), missing.status]

    statuses = asyncio.run(run())
    assert statuses == [Status.DONE] * 16 + [Status.FAILED]
    assert bytes(buffer.view) == DATA
    buffer.close()


def test_a_cancelled_await_leaves_nothing_in_flight(tmp_path: Path) -> None:
    buffer = HostBuffer(len(DATA))

    async def run() -> None:
        face = AsyncTransport(transport_over(tmp_path))
        task = asyncio.create_task(face.move(ops(buffer)[0]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not face._waiting
        await face.close()

    asyncio.run(run())
    buffer.close()
