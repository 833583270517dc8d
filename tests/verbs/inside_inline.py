"""Reads that the thread that polls asks for itself, in one guest of the lab, and what becomes of those that do not go
well. tests/verbs/test_verbs_in_guests.py runs this file there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.core.errors import MemberDownError, NotFoundError, VersionChangedError
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.api import Completion, Op, Status
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl_verbs.transport import RdmaTransport
from tests.verbs.inside_faults import drain

RDMA = ("--rdma", "require", "--rdma-allow", "10.9.0.0/16")
MIB = 1 << 20
DATA = random.Random(9).randbytes(MIB)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess.start(str(tmp_path), *RDMA) as running:
        (Path(running.data) / "k").write_bytes(DATA)
        yield running


class Reads:
    """A transport that has read once, so that all it needs is there. `by_workers`: reads that a worker did since."""

    def __init__(self, node: NodeProcess, monkeypatch: pytest.MonkeyPatch, timeout: str = "30") -> None:
        config = node.store(options={"timeout": timeout})
        self._store = open_store(config)
        [made] = open_transports(config, self._store, choose("node", "host", "native-rdma"), {"threads": "2"})
        assert isinstance(made, RdmaTransport)
        self.transport = made
        self.buffer = HostBuffer(MIB)
        self._registration = made.register(self.buffer)
        self.by_workers = 0
        perform = made.perform

        def counted(op: Op) -> int:
            self.by_workers += 1
            return perform(op)

        monkeypatch.setattr(made, "perform", counted)
        assert self().status is Status.DONE
        assert self.by_workers == 1
        self.by_workers = 0

    def submit(self, key: str = "k", start: int = 0, length: int = 4096, version: str | None = None) -> None:
        self.buffer.view[:] = bytes(MIB)
        self.transport.submit([Op(1, "read", key, start, length, self.buffer, 0, version)])

    def __call__(self, key: str = "k", start: int = 0, length: int = 4096, version: str | None = None) -> Completion:
        self.submit(key, start, length, version)
        return drain(self.transport, 1)[1]

    def is_right(self, start: int = 0, length: int = 4096) -> bool:
        return self.buffer.view[:length] == DATA[start : start + length]

    def close(self) -> None:
        self._registration.close()
        self.transport.close()
        self._store.close()
        self.buffer.close()


@pytest.fixture
def reads(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    made = Reads(node, monkeypatch)
    yield made
    made.close()


def test_no_worker_is_needed_for_what_goes_well(node: NodeProcess, reads: Reads) -> None:
    for start in range(0, MIB, 100_000):
        length = min(100_000, MIB - start)
        assert reads(start=start, length=length).status is Status.DONE
        assert reads.is_right(start, length)
    ops = [Op(at, "read", "k", at, 4096, reads.buffer, at) for at in range(0, MIB, 4096)]
    reads.transport.submit(ops)
    assert {item.status for item in drain(reads.transport, len(ops)).values()} == {Status.DONE}
    assert reads.buffer.view == DATA
    # the other seat's first read; there are two
    assert reads.by_workers <= 1
    assert node.metrics()["kvctl_node_rdma_connections"] <= 2


def test_what_the_node_refuses_is_told_by_a_worker(node: NodeProcess, reads: Reads) -> None:
    for turn, (key, version, kind) in enumerate((("none", None, NotFoundError), ("k", "other", VersionChangedError))):
        done = reads(key, version=version)
        assert (done.status, type(done.error)) == (Status.FAILED, kind)
        assert reads.by_workers == turn + 1
        assert reads.buffer.view == bytes(MIB)
    assert reads().status is Status.DONE
    assert reads.is_right()
    assert node.metrics()["kvctl_node_rdma_failures_total"] == 0


def test_a_cancelled_read_ends_and_nothing_comes_in_later(node: NodeProcess, reads: Reads) -> None:
    node.stop()
    reads.submit()
    reads.transport.cancel([1])
    done = drain(reads.transport, 1)[1]
    assert (done.status, done.error, reads.by_workers) == (Status.CANCELLED, None, 0)
    reads.buffer.view[:] = bytes(MIB)
    node.resume()
    while node.metrics()["kvctl_node_rdma_connections"]:
        time.sleep(0.01)
    assert reads.buffer.view == bytes(MIB)
    assert reads().status is Status.DONE
    assert reads.is_right()


def test_those_in_the_line_are_cancelled_too(node: NodeProcess, reads: Reads) -> None:
    node.stop()
    reads.transport.submit([Op(number, "read", "k", 0, 4096, reads.buffer) for number in range(6)])
    reads.transport.cancel(range(6))
    found = drain(reads.transport, 6)
    assert {item.status for item in found.values()} == {Status.CANCELLED}
    node.resume()
    assert reads().status is Status.DONE


def test_a_node_that_says_nothing_is_given_up(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(node, monkeypatch, "8")
    node.stop()
    done = reads()
    assert (done.status, type(done.error), reads.by_workers) == (Status.FAILED, MemberDownError, 0)
    node.resume()
    while reads().status is not Status.DONE:
        pass
    assert reads.is_right()
    reads.close()


def test_a_node_that_came_back_is_asked_again(node: NodeProcess, reads: Reads) -> None:
    node.kill()
    done = reads()
    assert (done.status, type(done.error)) == (Status.FAILED, MemberDownError)
    with NodeProcess.start(node.folder, *RDMA, port=node.port):
        assert reads().status is Status.DONE
        assert reads.is_right()
        before = reads.by_workers
        assert reads(start=4096).status is Status.DONE
        assert reads.by_workers == before
        assert reads.is_right(4096)


def test_reads_in_flight_end_when_the_transport_is_closed(node: NodeProcess, reads: Reads) -> None:
    node.stop()
    reads.submit()
    reads.transport.close()
    assert drain(reads.transport, 1)[1].status is Status.CANCELLED
    node.resume()
    while node.metrics()["kvctl_node_rdma_connections"]:
        time.sleep(0.01)
    assert reads.buffer.view == bytes(MIB)
