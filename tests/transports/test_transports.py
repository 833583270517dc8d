"""The transport contract on every transport, bare and wrapped."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import UsageError
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.seaweed import SeaweedFS
from kvctl.testing.store_contract import StoreCase
from kvctl.testing.transport_contract import TransportCase, TransportContract
from kvctl.transports.api import Capabilities, Op, Store, Transport
from kvctl.transports.faces import SyncTransport
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


def test_direct_writes_leave_nothing_in_the_page_cache(tmp_path: Path) -> None:
    """But the last part of a page, which goes through it."""
    case = file_case(tmp_path / "store")
    config = StoreConfig(f"file://{tmp_path / 'store'}")
    buffer = HostBuffer((3 << 20) + 5)
    buffer.view[:] = bytes(range(256)) * (3 << 12) + b"tail!"
    (transport,) = open_transports(config, case.store, choose("file", "host", "file"), {"direct": "true"})
    with SyncTransport(transport) as direct:
        whole = Op(1, "write", "whole", 0, 3 << 20, buffer, object_size=3 << 20)
        ragged = Op(2, "write", "ragged", 0, buffer.nbytes, buffer, object_size=buffer.nbytes)
        askew = Op(3, "write", "askew", 0, 3 << 20, buffer, buffer_offset=5, object_size=3 << 20)
        ended = direct.move([whole, ragged, askew])
    if ended[0].error is not None and "Invalid argument" in str(ended[0].error.cause):
        pytest.skip("the file system of the tests takes no O_DIRECT: set TMPDIR to one that does")
    assert [item.error for item in ended] == [None, None, None]
    assert [cached_pages(tmp_path / "store" / op.key) for op in (whole, ragged)] == [0, 1]
    assert case.raw_get("whole") == buffer.view[: 3 << 20]
    assert case.raw_get("ragged") == buffer.view
    assert case.raw_get("askew") == buffer.view[5:]


def cached_pages(path: Path) -> int:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    place = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    assert libc.mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), pages) == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages)
