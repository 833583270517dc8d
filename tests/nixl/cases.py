"""Places that the transports under test work on, with raw access past them."""

from __future__ import annotations

from collections.abc import Callable

from kvctl.core.addresses import StoreConfig
from kvctl.testing.buffers import GuardedBuffer
from kvctl.testing.store_contract import StoreCase
from kvctl.testing.transport_contract import TransportCase, drive
from kvctl.transports.api import Op, Status, Transport
from kvctl.transports.registry import choose, open_transports
from kvctl.transports.retry import RetryStore


def transport_case(
    case: StoreCase, name: str, *, slow: Callable[[], None] | None = None, **options: str
) -> TransportCase:
    store = case.store

    def raw_put(key: str, data: bytes) -> str:
        case.raw_put(key, data)
        return store.stat(key).version

    def opened() -> Transport:
        config = StoreConfig(store.url)
        (transport,) = open_transports(config, RetryStore(store), choose(config.scheme, "host", name), options)
        return transport

    return TransportCase(opened, raw_put, case.raw_get, slow)


def read_one(
    transport: Transport, key: str, offset: int, length: int, *, version: str | None = None, size: int | None = None
) -> tuple[bytes, int]:
    """The bytes of a range, and how many requests they took."""
    buffer = GuardedBuffer(length)
    done = drive(transport, [Op(1, "read", key, offset, length, buffer, 0, version, size)])[1]
    assert (done.status, done.error) == (Status.DONE, None)
    data = bytes(buffer.view)
    buffer.check((0, length))
    buffer.close()
    return data, done.requests
