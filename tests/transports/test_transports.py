"""The transport contract on every transport, bare and wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import UsageError
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.seaweed import SeaweedFS
from kvctl.testing.store_contract import StoreCase
from kvctl.testing.transport_contract import TransportCase, TransportContract
from kvctl.transports.api import Capabilities, Op, Store, Transport
from kvctl.transports.faults import FaultyTransport
from kvctl.transports.limit import LimitedTransport, TokenBucket
from kvctl.transports.mem import MemStore, MemTransport
from kvctl.transports.registry import choose, open_transports
from kvctl.transports.retry import RetryStore
from tests.transports.contract_cases import faulty_case, file_case, mem_case, seaweed_case


class ReadOnlyMem(MemTransport):
    """The flag `writes`, the other way."""

    def __init__(self, store: MemStore) -> None:
        super().__init__(store)
        self._capabilities = Capabilities(writes=False, durable=False)

    def perform(self, op: Op) -> int:
        if op.kind == "write":
            raise UsageError(f"{op.key}: this transport only reads")
        return super().perform(op)


class RangedMem(MemTransport):
    """The flag `ranged_write`, the other way."""

    def __init__(self, store: MemStore) -> None:
        super().__init__(store)
        self._capabilities = Capabilities(ranged_write=True, durable=False)

    def perform(self, op: Op) -> int:
        if op.kind == "read" or op.length == op.object_size:
            return super().perform(op)
        data = bytearray(self._store.get(op.key))
        data[op.offset : op.offset + op.length] = op.view
        self._store.put(op.key, bytes(data))
        return 1


class AlignedMem(MemTransport):
    """`alignment`, the other way."""

    def __init__(self, store: MemStore) -> None:
        super().__init__(store)
        self._capabilities = Capabilities(alignment=512, durable=False)

    def perform(self, op: Op) -> int:
        if any(value % 512 for value in (op.offset, op.length, op.buffer_offset)):
            raise UsageError(f"{op.key}: offset, length and address must be multiples of 512")
        return super().perform(op)


def mem_transport_case(kind: Callable[[MemStore], Transport]) -> TransportCase:
    case = mem_case()
    store = case.store
    assert isinstance(store, MemStore)

    def raw_put(key: str, data: bytes) -> str:
        case.raw_put(key, data)
        return store.stat(key).version

    return TransportCase(lambda: kind(store), raw_put, case.raw_get)


def transport_case(
    case: StoreCase, name: str, *, slow: Callable[[], None] | None = None, **options: str
) -> TransportCase:
    store: Store = case.store

    def raw_put(key: str, data: bytes) -> str:
        case.raw_put(key, data)
        return store.stat(key).version

    def opened() -> Transport:
        config = StoreConfig(store.url)
        (transport,) = open_transports(config, RetryStore(store), choose(config.scheme, "host", name), options)
        return transport

    return TransportCase(opened, raw_put, case.raw_get, slow)


def wrapped(case: TransportCase, wrap: Callable[[Transport], Transport]) -> TransportCase:
    return TransportCase(lambda: wrap(case.open()), case.raw_put, case.raw_get, case.slow)


@pytest.fixture
def faulty() -> Iterator[FaultyS3]:
    with FaultyS3() as server:
        yield server


def slow_down(server: FaultyS3) -> Callable[[], None]:
    def slow() -> None:
        server.add(Fault("slow", rate=50_000))

    return slow


class TestMem(TransportContract):
    @pytest.fixture
    def case(self) -> TransportCase:
        return transport_case(mem_case(), "mem")


class TestFile(TransportContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> TransportCase:
        return transport_case(file_case(tmp_path / "store"), "file")


class TestFileDirect(TransportContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> TransportCase:
        return transport_case(file_case(tmp_path / "store"), "file", direct="true")


class TestS3OnFaultyServer(TransportContract):
    @pytest.fixture
    def case(self, faulty: FaultyS3) -> Iterator[TransportCase]:
        store = faulty_case(faulty)
        yield transport_case(store, "s3", slow=slow_down(faulty))
        store.store.close()


@pytest.mark.s3
class TestS3OnSeaweedFS(TransportContract):
    @pytest.fixture
    def case(self, seaweed: SeaweedFS, seaweed_store: Callable[[], StoreConfig]) -> Iterator[TransportCase]:
        store = seaweed_case(seaweed, seaweed_store())
        yield transport_case(store, "s3")
        store.store.close()


class TestStoreGetOnMem(TransportContract):
    @pytest.fixture
    def case(self) -> TransportCase:
        return transport_case(mem_case(), "store-get")


class TestStoreGetOnFile(TransportContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> TransportCase:
        return transport_case(file_case(tmp_path / "store"), "store-get")


class TestStoreGetOnS3(TransportContract):
    @pytest.fixture
    def case(self, faulty: FaultyS3) -> Iterator[TransportCase]:
        store = faulty_case(faulty)
        yield transport_case(store, "store-get")
        store.store.close()


class TestLimitedMem(TransportContract):
    @pytest.fixture
    def case(self) -> TransportCase:
        bucket = TokenBucket(1e9)
        return wrapped(
            transport_case(mem_case(), "mem"),
            lambda inner: LimitedTransport(inner, bucket=bucket, max_bytes_in_flight=10_000),
        )


class TestLimitedS3(TransportContract):
    @pytest.fixture
    def case(self, faulty: FaultyS3) -> Iterator[TransportCase]:
        store = faulty_case(faulty)
        yield wrapped(
            transport_case(store, "s3", slow=slow_down(faulty)),
            lambda inner: LimitedTransport(inner, max_bytes_in_flight=100_000),
        )
        store.store.close()


class TestFaultyWithoutFaults(TransportContract):
    @pytest.fixture
    def case(self) -> TransportCase:
        return wrapped(transport_case(mem_case(), "mem"), FaultyTransport)


class TestReadOnly(TransportContract):
    @pytest.fixture
    def case(self) -> TransportCase:
        return mem_transport_case(ReadOnlyMem)


class TestRangedWrites(TransportContract):
    @pytest.fixture
    def case(self) -> TransportCase:
        return mem_transport_case(RangedMem)


class TestAligned(TransportContract):
    @pytest.fixture
    def case(self) -> TransportCase:
        return mem_transport_case(AlignedMem)
