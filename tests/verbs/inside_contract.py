"""The transport contract of native-rdma over a real node, in one guest of the lab: tests/lab runs this file there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.core.errors import NotFoundError
from kvctl.testing.nodes import NodeProcess
from kvctl.testing.transport_contract import TransportCase, TransportContract
from kvctl.transports.api import Transport
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl_native.store import NodeStore

PREFIXES = itertools.count()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    # client and node share the guest: they talk HTTP over loopback, where no RDMA device is
    folder = tmp_path_factory.mktemp("node")
    with NodeProcess.start(str(folder), "--rdma", "require", "--rdma-allow", "10.9.0.0/16") as running:
        yield running


class Raw:
    """The objects of a prefix, past the node."""

    def __init__(self, node: NodeProcess, prefix: str, store: NodeStore) -> None:
        self.folder = Path(node.data) / prefix
        self.store = store

    def put(self, key: str, data: bytes) -> str:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = path.with_name("raw.kvctl-tmp")
        temp.write_bytes(data)
        temp.rename(path)
        return self.store.stat(key).version

    def get(self, key: str) -> bytes:
        try:
            return (self.folder / key).read_bytes()
        except FileNotFoundError:
            raise NotFoundError(key) from None


def case_of(node: NodeProcess, options: dict[str, str]) -> Iterator[TransportCase]:
    prefix = f"p{next(PREFIXES)}"
    config = node.store(prefix)
    store = open_store(config)
    assert isinstance(store, NodeStore)
    raw = Raw(node, prefix, store)

    def open_one() -> Transport:
        choice = choose("node", "host", "native-rdma")
        return open_transports(config, store, choice, options)[0]

    yield TransportCase(open_one, raw.put, raw.get)
    store.close()


class TestNativeRdma(TransportContract):
    @pytest.fixture
    def case(self, node: NodeProcess) -> Iterator[TransportCase]:
        yield from case_of(node, {})


class TestOtherForms(TransportContract):
    """`x-rdma-info`, and keys without /v1."""

    @pytest.fixture
    def case(self, node: NodeProcess) -> Iterator[TransportCase]:
        yield from case_of(node, {"dialect": "s3", "path": "plain", "threads": "2"})


def test_auto_takes_rdma(node: NodeProcess) -> None:
    choice = choose("node", "host")
    assert (choice.spec.name, choice.passed_over) == ("native-rdma", ())


def test_the_bytes_went_by_rdma(node: NodeProcess, pytestconfig: pytest.Config) -> None:
    found = node.metrics()
    assert found["kvctl_node_rdma_sent_bytes_total"] > 0
    assert found["kvctl_node_rdma_received_bytes_total"] > 0
    assert found["kvctl_node_sent_bytes_total"] == 0
    assert found["kvctl_node_received_bytes_total"] == 0
    print({name: value for name, value in found.items() if "rdma" in name})
