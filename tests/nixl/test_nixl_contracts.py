"""The transport contract on the NIXL transports that run without special hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import NotFoundError
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.seaweed import SeaweedFS
from kvctl.testing.transport_contract import TransportCase, TransportContract
from kvctl.transports.api import Transport
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl_nixl.peer.source import Source
from tests.nixl.cases import transport_case
from tests.transports.contract_cases import faulty_case, file_case, seaweed_case


class TestNixlPosix(TransportContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> TransportCase:
        return transport_case(file_case(tmp_path / "store"), "nixl-posix")


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


def peer_case(source: Source, mode: str) -> TransportCase:
    store = open_store(StoreConfig(source.url))
    kept: dict[str, HostBuffer] = {}

    def raw_put(key: str, data: bytes) -> str:
        buffer = HostBuffer(len(data))
        buffer.view[:] = data
        kept[key] = buffer
        return source.publish(key, buffer)

    def raw_get(key: str) -> bytes:
        if key not in kept:
            raise NotFoundError(key)
        return bytes(kept[key].view)

    def opened() -> Transport:
        config = StoreConfig(source.url)
        (transport,) = open_transports(config, store, choose("ucx", "host", "nixl-ucx"), {"mode": mode})
        return transport

    return TransportCase(opened, raw_put, raw_get)


@pytest.fixture
def source() -> Iterator[Source]:
    with Source() as source:
        yield source


class TestNixlUcxPush(TransportContract):
    @pytest.fixture
    def case(self, source: Source) -> TransportCase:
        return peer_case(source, "push")


class TestNixlUcxPull(TransportContract):
    @pytest.fixture
    def case(self, source: Source) -> TransportCase:
        return peer_case(source, "pull")
