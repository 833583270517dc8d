"""The store contract on every store, bare and wrapped."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import RetryPolicy
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.seaweed import SeaweedFS
from kvctl.testing.store_contract import StoreCase, StoreContract
from kvctl.transports.api import Store
from kvctl.transports.faults import FaultyStore
from kvctl.transports.mem import MemStore, space
from kvctl.transports.registry import open_store
from kvctl.transports.retry import RetryStore
from kvctl_s3 import store as s3_store
from tests.transports.contract_cases import faulty_case, file_case, mem_case, seaweed_case

QUICK = RetryPolicy(base=0.0001, cap=0.001, attempts=20)


class TestMem(StoreContract):
    @pytest.fixture
    def case(self) -> StoreCase:
        return mem_case()


class TestMemWithoutConditionalPut(StoreContract):
    @pytest.fixture
    def case(self) -> StoreCase:
        return mem_case(conditional_put="false")


class TestFile(StoreContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> StoreCase:
        return file_case(tmp_path / "store")


class _NoUploads(StoreContract):
    """The faulty server has no multipart uploads; those are tested on SeaweedFS."""

    def test_unfinished_uploads(self, case: StoreCase) -> None:
        return


class TestS3OnFaultyServer(_NoUploads):
    @pytest.fixture
    def case(self) -> Iterator[StoreCase]:
        with FaultyS3(page_size=7) as server:
            case = faulty_case(server)
            yield case
            case.store.close()


class TestS3WithoutConditionalPut(_NoUploads):
    """The server ignores conditions, which the store finds out by itself."""

    @pytest.fixture
    def case(self) -> Iterator[StoreCase]:
        with FaultyS3(page_size=7, conditional_put=False) as server:
            s3_store._SEEN.clear()  # an earlier server of these tests, which could, may have had this port
            case = faulty_case(server)
            assert not case.store.capabilities.conditional_put
            yield case
            case.store.close()


@pytest.mark.s3
class TestS3OnSeaweedFS(StoreContract):
    @pytest.fixture
    def case(self, seaweed: SeaweedFS, seaweed_store: Callable[[], StoreConfig]) -> Iterator[StoreCase]:
        case = seaweed_case(seaweed, seaweed_store())
        yield case
        case.store.close()


class TestRetryAroundMem(StoreContract):
    @pytest.fixture
    def case(self) -> StoreCase:
        case = mem_case()
        return StoreCase(RetryStore(case.store, QUICK), case.raw_put, case.raw_get)


class TestRetryAroundFaultsAroundMem(StoreContract):
    """Every call fails now and then, before or after it took effect; nobody above notices."""

    @pytest.fixture
    def case(self) -> StoreCase:
        case = mem_case()
        return StoreCase(RetryStore(FaultyStore(case.store, seed=3, rate=0.3), QUICK), case.raw_put, case.raw_get)


class TestRetryAroundS3OnFaultyServer(_NoUploads):
    """One answer in three is 503 SlowDown, one in five connections breaks before the answer."""

    @pytest.fixture
    def case(self) -> Iterator[StoreCase]:
        every = ("GET", "PUT", "HEAD", "DELETE", "POST")
        with FaultyS3(page_size=7) as server:
            server.add(Fault("status", methods=every, every=3))
            server.add(Fault("drop", methods=every, every=5))
            case = faulty_case(server)
            yield StoreCase(RetryStore(case.store, QUICK), case.raw_put, case.raw_get, page=7)
            case.store.close()


def test_two_names_of_mem_are_two_places() -> None:
    one, two = MemStore(f"one-{os.getpid()}"), MemStore(f"two-{os.getpid()}")
    one.put("k", b"1")
    assert list(two.list()) == []
    assert space(f"one-{os.getpid()}").objects.keys() == {"k"}


def test_wrappers_keep_the_address(tmp_path: Path) -> None:
    inner: Store = open_store(StoreConfig(f"file://{tmp_path}"))
    assert RetryStore(FaultyStore(inner, seed=1)).url == inner.url


def test_a_put_into_a_folder_does_not_wait_for_another_to_be_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(StoreConfig(f"file://{tmp_path}"))
    sync = os.fsync
    syncing, go_on = threading.Event(), threading.Event()

    def slow_for_one(fd: int) -> None:
        if threading.current_thread() is first and stat.S_ISDIR(os.fstat(fd).st_mode):
            syncing.set()
            go_on.wait()
        sync(fd)

    monkeypatch.setattr(os, "fsync", slow_for_one)
    first = threading.Thread(target=store.put, args=("d/one", b"1"), kwargs={"if_absent": True})
    first.start()
    syncing.wait()
    store.put("d/two", b"2", if_absent=True)
    assert first.is_alive()
    go_on.set()
    first.join()
    assert {item.key for item in store.list()} == {"d/one", "d/two"}
    store.close()
