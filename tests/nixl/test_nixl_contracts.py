"""The transport contract on the NIXL transports that run without special hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.seaweed import SeaweedFS
from kvctl.testing.transport_contract import TransportCase, TransportContract
from tests.nixl.cases import transport_case
from tests.transports.contract_cases import faulty_case, file_case, seaweed_case


class TestNixlPosix(TransportContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> TransportCase:
        return transport_case(file_case(tmp_path / "store"), "nixl-posix")


class TestNixlPosixAio(TransportContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> TransportCase:
        return transport_case(file_case(tmp_path / "store"), "nixl-posix", api="aio")


class TestNixlPosixDirect(TransportContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> TransportCase:
        return transport_case(file_case(tmp_path / "store"), "nixl-posix", direct="true", chunk="4096")


class TestNixlObjOnFaultyServer(TransportContract):
    @pytest.fixture
    def case(self) -> Iterator[TransportCase]:
        with FaultyS3() as server:
            store = faulty_case(server)

            def slow() -> None:
                server.add(Fault("slow", rate=200_000))

            yield transport_case(store, "nixl-obj", slow=slow)
            store.store.close()


@pytest.mark.s3
class TestNixlObjOnSeaweedFS(TransportContract):
    @pytest.fixture
    def case(self, seaweed: SeaweedFS, seaweed_store: Callable[[], StoreConfig]) -> Iterator[TransportCase]:
        store = seaweed_case(seaweed, seaweed_store())
        yield transport_case(store, "nixl-obj")
        store.store.close()
