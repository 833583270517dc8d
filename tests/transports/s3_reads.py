"""One object on a faulty S3 server, and what became of reading it."""

from __future__ import annotations

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import KvctlError
from kvctl.testing.buffers import GuardedBuffer
from kvctl.testing.transport_contract import drive
from kvctl.transports.api import Completion, Op, Status
from kvctl.transports.registry import choose, open_store, open_transports

SIZE = 200_000
DATA = bytes(range(250)) * (SIZE // 250)
EVERY = ("GET", "PUT", "HEAD", "DELETE", "POST")


def read(
    config: StoreConfig,
    *,
    key: str = "dir/w.bin",
    offset: int = 1000,
    length: int = 50_000,
    version: str | None = None,
    size: int | None = None,
    count: int = 1,
) -> list[Completion]:
    """Read a range `count` times, one after the other, over one connection; check that no wrong byte landed."""
    store = open_store(config)
    (transport,) = open_transports(config, store, choose("s3", "host"), {"threads": "1"})
    results = []
    try:
        for number in range(count):
            buffer = GuardedBuffer(length)
            done = drive(transport, [Op(number, "read", key, offset, length, buffer, 0, version, size)])[number]
            if done.status is Status.DONE:
                assert buffer.view == DATA[offset : offset + length]
            buffer.close()
            results.append(done)
    finally:
        transport.close()
        store.close()
    return results


def read_error(config: StoreConfig, **options: object) -> KvctlError:
    (done,) = read(config, **options)  # type: ignore[arg-type] # passed through
    assert done.status is Status.FAILED
    assert done.error is not None
    return done.error


def stat_error(config: StoreConfig, key: str = "dir/w.bin") -> KvctlError:
    store = open_store(config)
    try:
        with pytest.raises(KvctlError) as caught:
            store.stat(key)
        return caught.value
    finally:
        store.close()


def get_error(config: StoreConfig) -> KvctlError:
    store = open_store(config)
    try:
        with pytest.raises(KvctlError) as caught:
            store.get("dir/w.bin", 0, 10)
        return caught.value
    finally:
        store.close()
