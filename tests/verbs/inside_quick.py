"""GETs that the node's event loop carries out itself, in one guest of the lab, and what becomes of those that fail on
their way. tests/verbs/test_verbs_in_guests.py runs this file there.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.memory.buffers import HostBuffer
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.api import Op, Status
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl_verbs.landing import Landing, Port
from kvctl_verbs.token import RcToken
from kvctl_verbs.transport import RdmaTransport
from tests.verbs.inside_faults import drain, resources, until

IP = os.environ["LAB_ADDRESS"]
MIB = 1 << 20
SIZE = 5 * MIB + 777
DATA = random.Random(7).randbytes(SIZE)
PLACE = Path("/dev/shm/kvctl-quick")  # of file systems that never wait the node knows that they do not


@pytest.fixture(params=["true", "false"], ids=["looked at", "not looked at"])
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[NodeProcess]:
    options = ("--rdma", "require", "--rdma-allow", "10.9.0.0/16", "--rdma-opt", f"flush={request.param}")
    with NodeProcess.start(str(tmp_path), *options, data=str(PLACE)) as running:
        (PLACE / "k").write_bytes(DATA)
        yield running
    shutil.rmtree(PLACE)


@pytest.fixture
def transport(node: NodeProcess) -> Iterator[RdmaTransport]:
    config = node.store()
    store = open_store(config)
    [made] = open_transports(config, store, choose("node", "host", "native-rdma"), {"threads": "1"})
    assert isinstance(made, RdmaTransport)
    yield made
    made.close()
    store.close()


def quick(node: NodeProcess) -> float:
    return node.metrics()["kvctl_node_rdma_quick_total"]


class Asking:
    """Requests of our client's form with tokens of our own making, to one listener, so over one connection."""

    def __init__(self, transport: RdmaTransport) -> None:
        self._talk = transport._talk
        self.landing: Landing = transport._landings[0]
        self.port: Port = self.landing.listen()

    def __call__(self, address: int, length: int, rkey: int, start: int = 0) -> int:
        """The answer's status."""
        token = RcToken(IP, self.port.number, address, length, rkey).text()
        op = Op(1, "read", "k", start, length, HostBuffer(length))
        connection = self._talk.connect()
        connection.send(self._talk.head(op, token))
        status: int = connection.read_head().status
        connection.close()
        return status


def test_the_loop_carries_out_small_reads(node: NodeProcess, transport: RdmaTransport) -> None:
    buffer = HostBuffer(SIZE)
    registration = transport.register(buffer)
    sizes = [1, 4096, 65536, 65537, 300_000, MIB - 1, MIB]
    moved = turn = 0
    while quick(node) < 3 * len(sizes):
        size = sizes[turn % len(sizes)]
        start = random.Random(turn).randrange(SIZE - size)
        buffer.view[:size] = bytes(size)
        transport.submit([Op(1, "read", "k", start, size, buffer, 0, None, SIZE)])
        assert drain(transport, 1)[1].status is Status.DONE
        assert buffer.view[:size] == DATA[start : start + size]
        moved += size
        turn += 1
    found = node.metrics()
    assert found["kvctl_node_rdma_sent_bytes_total"] == found["kvctl_node_rdma_written_bytes_total"] == moved
    assert found['kvctl_node_requests_total{method="GET",status="206"}'] == turn
    assert found["kvctl_node_rdma_connections"] == found["kvctl_node_rdma_connections_made_total"] == 1
    assert found["kvctl_node_rdma_pool_free_pieces"] == 64
    assert found["kvctl_node_rdma_failures_total"] == 0
    # a larger one is a thread's, over the same connection; then it is the loop's again
    before = quick(node)
    transport.submit([Op(1, "read", "k", 0, SIZE, buffer, 0, None, SIZE)])
    assert drain(transport, 1)[1].status is Status.DONE
    assert buffer.view == DATA
    assert quick(node) == before
    while quick(node) == before:
        transport.submit([Op(1, "read", "k", 5, 100, buffer, 0, None, SIZE)])
        assert drain(transport, 1)[1].status is Status.DONE
    assert buffer.view[:100] == DATA[5:105]
    assert node.metrics()["kvctl_node_rdma_connections_made_total"] == 1
    registration.close()
    buffer.close()


def test_many_at_once_share_the_loop_and_the_threads(node: NodeProcess, transport: RdmaTransport) -> None:
    config = node.store()
    store = open_store(config)
    [wide] = open_transports(config, store, choose("node", "host", "native-rdma"), {"threads": "8"})
    buffer = HostBuffer(SIZE)
    registration = wide.register(buffer)
    step = 50_001
    for _ in range(4):
        buffer.view[:] = bytes(SIZE)
        ops = [Op(at, "read", "k", at, min(step, SIZE - at), buffer, at, None, SIZE) for at in range(0, SIZE, step)]
        wide.submit(ops)
        assert {item.status for item in drain(wide, len(ops)).values()} == {Status.DONE}
        assert buffer.view == DATA
    found = node.metrics()
    assert found["kvctl_node_rdma_written_bytes_total"] == 4 * SIZE
    assert found["kvctl_node_rdma_quick_total"] > 0
    assert found["kvctl_node_rdma_pool_free_pieces"] == 64
    registration.close()
    wide.close()
    store.close()
    buffer.close()


def test_a_key_that_opens_nothing_ends_its_connection_and_no_more(node: NodeProcess, transport: RdmaTransport) -> None:
    ask = Asking(transport)
    buffer = HostBuffer(MIB)
    memory = ask.landing.device.memory(buffer.address, MIB)
    while quick(node) < 2:
        assert ask(buffer.address, 4096, memory.rkey) == 206
    made = node.metrics()["kvctl_node_rdma_connections_made_total"]
    assert ask(buffer.address, 4096, memory.rkey ^ 0xFF00) == 400
    assert ask(buffer.address, 4096, memory.rkey, 4096) == 206
    assert buffer.view[:4096] == DATA[4096:8192]
    found = node.metrics()
    assert found["kvctl_node_rdma_failures_total"] == 1
    assert found["kvctl_node_rdma_connections_made_total"] == made + 1
    assert found["kvctl_node_rdma_pool_free_pieces"] == 64
    ask.port.sever()
    memory.close()


def test_a_connection_that_died_unnoticed_is_made_anew(node: NodeProcess, transport: RdmaTransport) -> None:
    ask = Asking(transport)
    buffer = HostBuffer(MIB)
    memory = ask.landing.device.memory(buffer.address, MIB)
    while quick(node) < 2:
        assert ask(buffer.address, 4096, memory.rkey) == 206
    made = node.metrics()["kvctl_node_rdma_connections_made_total"]
    ask.port.peers[0].pair.close()  # nobody tells the node
    assert ask(buffer.address, 4096, memory.rkey, 4096) == 206
    assert buffer.view[:4096] == DATA[4096:8192]
    assert node.metrics()["kvctl_node_rdma_connections_made_total"] == made + 1
    assert node.metrics()["kvctl_node_rdma_failures_total"] == 0
    until(lambda: node.metrics()["kvctl_node_rdma_connections"] == 1, "the dead one is kept")
    ask.port.sever()
    memory.close()


def test_a_node_that_has_carried_out_some_ends_in_order(node: NodeProcess, transport: RdmaTransport) -> None:
    buffer = HostBuffer(MIB)
    while quick(node) < 3:
        transport.submit([Op(1, "read", "k", 0, 100, buffer, 0, None, SIZE)])
        assert drain(transport, 1)[1].status is Status.DONE
    assert resources()["qp"] > 0
    assert node.terminate() == 0
    assert "Traceback" not in node.log()
