"""The contracts of stores and transports, over a real node process; raw access goes to the node's directory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.core.errors import NotFoundError
from kvctl.testing.nodes import NodeProcess
from kvctl.testing.store_contract import StoreCase, StoreContract
from kvctl.testing.transport_contract import TransportCase, TransportContract
from kvctl.transports.api import Transport
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl_native.store import NodeStore


@pytest.fixture(scope="module")
def tls_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder = tmp_path_factory.mktemp("tls-node")
    certificate(folder)
    with NodeProcess.start(
        str(folder), "--tls-cert", str(folder / "node.pem"), "--tls-key", str(folder / "node.key")
    ) as running:
        yield running


def certificate(folder: Path) -> None:
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "2", "-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", str(folder / "node.key"), "-out", str(folder / "node.pem"),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip


def tls_options(node: NodeProcess) -> dict[str, str]:
    return {"ca_bundle": os.path.join(node.folder, "node.pem")} if node.tls else {}


class Raw:
    """The objects of a prefix, past the node."""

    def __init__(self, node: NodeProcess, prefix: str) -> None:
        self.folder = Path(node.data) / prefix

    def put(self, key: str, data: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = path.with_name("raw.kvctl-tmp")
        temp.write_bytes(data)
        temp.rename(path)

    def get(self, key: str) -> bytes:
        try:
            return (self.folder / key).read_bytes()
        except FileNotFoundError:
            raise NotFoundError(key) from None

    def start_upload(self, key: str) -> None:
        path = self.folder / f"{key}.123.kvctl-tmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")


def store_case(node: NodeProcess, prefix: str) -> Iterator[StoreCase]:
    raw = Raw(node, prefix)
    store = open_store(node.store(prefix, scope=prefix, options=tls_options(node)))
    assert isinstance(store, NodeStore)
    store.page_size = 9
    yield StoreCase(store, raw.put, raw.get, raw.start_upload, page=9)
    store.close()


class TestNodeStore(StoreContract):
    @pytest.fixture
    def case(self, node: NodeProcess, fresh: str) -> Iterator[StoreCase]:
        yield from store_case(node, fresh)


class TestNodeStoreTls(StoreContract):
    @pytest.fixture
    def case(self, tls_node: NodeProcess, fresh: str) -> Iterator[StoreCase]:
        yield from store_case(tls_node, fresh)


def transport_case(node: NodeProcess, prefix: str, stop: Callable[[], None] | None) -> Iterator[TransportCase]:
    raw = Raw(node, prefix)
    config = node.store(prefix, options=tls_options(node))
    store = open_store(config)

    def put(key: str, data: bytes) -> str:
        raw.put(key, data)
        return store.stat(key).version

    def open_one() -> Transport:
        (transport,) = open_transports(config, store, choose("node", "host"))
        assert transport.name == "native-tcp"
        return transport

    yield TransportCase(open_one, put, raw.get, stop)
    node.resume()
    store.close()


class TestNativeTcp(TransportContract):
    @pytest.fixture
    def case(self, node: NodeProcess, fresh: str) -> Iterator[TransportCase]:
        yield from transport_case(node, fresh, node.stop)


class TestNativeTcpTls(TransportContract):
    @pytest.fixture
    def case(self, tls_node: NodeProcess, fresh: str) -> Iterator[TransportCase]:
        yield from transport_case(tls_node, fresh, None)
