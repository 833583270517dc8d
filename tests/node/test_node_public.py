"""Our client against a node that shares no code with ours: the contracts, over the protocol as it is written down. The
other way round, our node against such a client, is in test_node_attacks.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.core.errors import AuthError, IncompatibleError, NotFoundError
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.store_contract import StoreCase, StoreContract
from kvctl.testing.transport_contract import TransportCase, TransportContract, drive
from kvctl.transports.api import Op, Status, StoreConfig, Transport
from kvctl.transports.node_auth import parse_keys
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl_native.store import NodeStore
from tests.node.public_server import MASTER, PublicNode


@pytest.fixture
def server() -> Iterator[PublicNode]:
    node = PublicNode()
    yield node
    node.end()


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return write_key(tmp_path / "client.key", MASTER)


def write_key(path: Path, master: str) -> str:
    (key,) = parse_keys(master, "test")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(key.text())
    return str(path)


def config(server: PublicNode, key_file: str) -> StoreConfig:
    return StoreConfig(f"node://127.0.0.1:{server.port}/p", (), {"key_file": key_file})


class TestStore(StoreContract):
    @pytest.fixture
    def case(self, server: PublicNode, key_file: str) -> Iterator[StoreCase]:
        store = open_store(config(server, key_file))
        assert isinstance(store, NodeStore)
        store.page_size = 9
        objects = server.objects

        def raw_get(key: str) -> bytes:
            try:
                return objects.found[f"p/{key}"][0]
            except KeyError:
                raise NotFoundError(key) from None

        def start_upload(key: str) -> None:
            objects.uploads[f"p/{key}.1.tmp"] = (f"p/{key}", time.time())

        yield StoreCase(store, lambda key, data: void(objects.put(f"p/{key}", data)), raw_get, start_upload, page=9)
        store.close()

    def test_copy_inside_the_store(self, case: StoreCase) -> None:
        """COPY is younger than the protocol: a node without it is told from one that failed."""
        first = case.store.put("from", b"0123456789")
        assert isinstance(case.store, NodeStore)
        with pytest.raises(IncompatibleError, match="does not offer this"):
            case.store.copy("from", "to", if_version=first.version)


class TestNativeTcp(TransportContract):
    @pytest.fixture
    def case(self, server: PublicNode, key_file: str) -> Iterator[TransportCase]:
        where = config(server, key_file)
        store = open_store(where)
        objects = server.objects

        def open_one() -> Transport:
            (transport,) = open_transports(where, store, choose("node", "host", "native-tcp"))
            return transport

        def raw_get(key: str) -> bytes:
            try:
                return objects.found[f"p/{key}"][0]
            except KeyError:
                raise NotFoundError(key) from None

        yield TransportCase(open_one, lambda key, data: objects.put(f"p/{key}", data), raw_get)
        store.close()


def void(_: object) -> None:
    return


def test_each_operation_is_one_request(server: PublicNode, key_file: str) -> None:
    where = config(server, key_file)
    version = server.objects.put("p/k", bytes(range(256)) * 1000)
    store = open_store(where)
    (transport,) = open_transports(where, store, choose("node", "host", "native-tcp"))
    buffer = HostBuffer(256_000)
    # the first has a worker make a connection; later ones go over it in this thread, the missing one too
    for turn in range(3):
        ops = [Op(1, "read", "k", 1000, 2000, buffer, 0, version, 256_000), Op(2, "read", "none", 0, 10, buffer)]
        for op in ops:
            done = drive(transport, [op])[op.id]
            assert done.requests == 1
            assert done.status is (Status.DONE if op.key == "k" else Status.FAILED), turn
    assert server.objects.requests == [("GET", "p/k", "bytes=1000-2999"), ("GET", "p/none", "bytes=0-9")] * 3
    transport.close()
    store.close()
    buffer.close()


def test_a_foreign_key_is_refused(server: PublicNode, tmp_path: Path) -> None:
    foreign = write_key(tmp_path / "foreign.key", MASTER.replace("5a", "5b"))
    store = open_store(config(server, foreign))
    with pytest.raises(AuthError):
        store.get("k")
    store.close()
