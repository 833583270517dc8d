"""The transport contract of native-rdma over a real node, in one guest of the lab: tests/lab runs this file there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvctl.core.errors import NotFoundError
from kvctl.testing.buffers import GuardedBuffer
from kvctl.testing.nodes import NodeProcess
from kvctl.testing.transport_contract import DATA, SIZE, TransportCase, TransportContract, drive
from kvctl.transports.api import Op, Status, Transport
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


def test_the_other_forms_of_the_protocol(node: NodeProcess) -> None:
    """`x-rdma-info`, and keys without /v1."""
    [case] = case_of(node, {"dialect": "s3", "path": "plain", "threads": "2", "memory": "op"})
    version = case.raw_put("k", DATA)
    transport = case.open()
    buffer = GuardedBuffer(SIZE)
    done = drive(
        transport,
        [
            Op(1, "read", "k", 100, 70_000, buffer, 100, version, SIZE),
            Op(2, "read", "k", 0, 10, buffer, 80_000, "other", SIZE),
        ],
    )
    assert (done[1].status, done[2].status) == (Status.DONE, Status.FAILED)
    assert buffer.view[100:70_100] == DATA[100:70_100]
    buffer.check((100, 70_100))
    assert drive(transport, [Op(3, "write", "w", 0, 5000, buffer, 100, object_size=5000)])[3].status is Status.DONE
    assert case.raw_get("w") == DATA[100:5100]
    transport.close()
    buffer.close()


def test_auto_takes_rdma_where_the_node_has_it(node: NodeProcess, tmp_path: Path) -> None:
    config = node.store()
    with closing(open_store(config)) as store:
        choice = choose("node", "host", stores=[(config, store)])
        assert (choice.spec.name, choice.passed_over) == ("native-rdma", ())
    with NodeProcess.start(str(tmp_path), "--rdma", "off") as other:
        config = other.store()
        with closing(open_store(config)) as store:
            choice = choose("node", "host", stores=[(config, store)])
            assert choice.spec.name == "native-tcp"
            assert choice.passed_over == (("native-rdma", f"the node at http://{other.address} has no RDMA"),)


def test_the_bytes_went_by_rdma(node: NodeProcess) -> None:
    found = node.metrics()
    assert found["kvctl_node_rdma_sent_bytes_total"] > 0
    assert found["kvctl_node_rdma_received_bytes_total"] > 0
    assert found["kvctl_node_sent_bytes_total"] == 0
    assert found["kvctl_node_received_bytes_total"] == 0
    print({name: value for name, value in found.items() if "rdma" in name})
