"""A stranger's client against our node, ours against a stranger's server, and attackers on both sides. In one guest of
the lab: tests/verbs/test_verbs_in_guests.py runs this file there.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import (
    AuthError,
    IncompatibleError,
    IntegrityError,
    KvctlError,
    MemberDownError,
    SizeMismatchError,
    TransientError,
    VersionChangedError,
)
from kvctl.memory.arena import Arena
from kvctl.repo.chunks import leaf_table, verify_leaves
from kvctl.testing.buffers import GUARD, GuardedBuffer
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.api import Op, Status, Transport
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl_verbs.landing import Port
from tests.verbs.stranger_client import Stranger

IP = os.environ["LAB_ADDRESS"]
MIB = 1 << 20
DATA = random.Random(3).randbytes(3 * MIB + 12_345)
SERVER = Path(__file__).with_name("stranger_server.py")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder = tmp_path_factory.mktemp("node")
    options = ("--rdma-opt", "stall=5", "--rdma-opt", "connections=4")
    arguments = ("--rdma", "require", "--rdma-allow", f"{IP}/32", *options)
    with NodeProcess.start(str(folder), *arguments, keys=False, verbose=True) as running:
        (Path(running.data) / "k").write_bytes(DATA)
        yield running


@pytest.fixture(scope="module")
def stranger(node: NodeProcess) -> Stranger:
    return Stranger(IP, (node.host, node.port), 8 * MIB)


# -- their client, our node --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/k", "/k"])
def test_get_put_head_and_ranges_by_the_public_protocol(node: NodeProcess, stranger: Stranger, path: str) -> None:
    found = stranger.ask("HEAD", path)
    assert (found.status, found.headers["content-length"]) == (200, str(len(DATA)))
    assert stranger.ask("HEAD", f"{path}-none").status == 404

    stranger.memory[:] = bytes([GUARD]) * len(stranger.memory)
    found = stranger.ask("GET", path, stranger.token(4096, len(DATA)))
    assert (found.status, found.body) == (200, b"")
    assert stranger.memory[4096 : 4096 + len(DATA)] == DATA
    assert stranger.memory[:4096] == bytes([GUARD]) * 4096
    assert set(stranger.memory[4096 + len(DATA) :]) == {GUARD}

    found = stranger.ask("GET", path, stranger.token(100, 70_000), span=(5000, 74_999))
    assert (found.status, found.headers["content-range"]) == (206, f"bytes 5000-74999/{len(DATA)}")
    assert stranger.memory[100:70_100] == DATA[5000:75_000]

    stranger.memory[: 5 * MIB] = fresh = random.Random(path).randbytes(5 * MIB)
    assert stranger.ask("PUT", f"{path}-put", stranger.token(0, 5 * MIB)).status == 200
    assert (Path(node.data) / "k-put").read_bytes() == fresh
    assert stranger.ask("GET", "/v1/k").body == DATA, "without a token the body carries the bytes"
    assert stranger.ask("GET", path, stranger.token(0, 10)).status == 400


def test_a_client_that_takes_one_connection_only_is_served(node: NodeProcess) -> None:
    stranger = Stranger(IP, (node.host, node.port), MIB, accepts=1)
    for _ in range(3):
        assert stranger.ask("GET", "/v1/k", stranger.token(0, 1000), span=(0, 999)).status == 206
    assert stranger.connections == 1


def test_connections_are_bounded_and_the_longest_idle_one_makes_room(node: NodeProcess) -> None:
    many = [Stranger(IP, (node.host, node.port), 4096) for _ in range(7)]
    for _ in range(2):
        for one in many:
            assert one.ask("GET", "/v1/k", one.token(0, 1000), span=(0, 999)).status == 206
            assert one.memory[:1000] == DATA[:1000]
            assert node.metrics()["kvctl_node_rdma_connections"] <= 4
    assert sum(one.connections for one in many) == 14


def test_memory_that_is_not_registered_is_out_of_reach(node: NodeProcess, stranger: Stranger) -> None:
    secret = mmap.mmap(-1, MIB)
    secret[:] = b"s" * MIB
    other = Stranger(IP, (node.host, node.port), MIB)
    part = other.register(other.address, 4096)
    before = node.metrics()
    for token, size in (
        (stranger.token(0, 4096, rkey=stranger.rkey ^ 0x5A5A00), 4096),
        (stranger.token(8 * MIB - 2048, 4096), 4096),
        (other.token(0, 8192, rkey=part), 8192),
        (stranger.token(0, 4096, address=0), 4096),
    ):
        found = stranger.ask("GET", "/v1/k", token, span=(0, size - 1))
        assert (found.status, b"not registered" in found.body) == (400, True), found
        assert stranger.ask("PUT", "/v1/stolen", token).status == 400
    assert stranger.ask("HEAD", "/v1/stolen").status == 404
    assert stranger.ask("GET", "/v1/k", stranger.token(0, 4096), span=(0, 4095)).status == 206, "the node lives on"
    after = node.metrics()
    assert after["kvctl_node_rdma_failures_total"] - before["kvctl_node_rdma_failures_total"] == 8
    assert after["kvctl_node_rdma_pool_free_pieces"] == 64
    assert f"{stranger.rkey:08x}" not in node.log()


def test_the_node_connects_to_nobody_else(node: NodeProcess, stranger: Stranger) -> None:
    for ip in ("10.9.77.1", "192.168.1.1", "127.0.0.2"):
        found = stranger.ask("GET", "/v1/k", stranger.token(0, 100, ip=ip), span=(0, 99))
        assert (found.status, b"does not connect" in found.body) == (403, True), found
    assert stranger.ask("GET", "/v1/k", stranger.token(0, 100, port=9), span=(0, 99)).status == 503
    for junk in ("", "x" * 100, "10.0.0.1:1:0x0:0x1", f"{IP}:1:0xffffffffffffffff:0xffffffff:0x0"):
        assert stranger.ask("GET", "/v1/k", junk or " ", span=(0, 99)).status in {206, 400, 501}


# -- our client, their server ------------------------------------------------------------------------------


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., StoreConfig]]:
    running: list[subprocess.Popen[str]] = []
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "k").write_bytes(DATA)

    def start(mode: str = "honest", **options: str) -> StoreConfig:
        command = [sys.executable, str(SERVER), str(tmp_path / "objects"), IP, "0", mode]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert running[-1].stdout is not None
        return StoreConfig(f"node://{IP}:{int(running[-1].stdout.readline())}", (), options)

    yield start
    for process in running:
        process.kill()
        process.communicate()


def connect(config: StoreConfig, **options: str) -> Transport:
    store = open_store(config)  # holds no connection before it is asked something
    return open_transports(config, store, choose("node", "host", "native-rdma"), options)[0]


def one(transport: Transport, op: Op) -> tuple[Status, KvctlError | None]:
    transport.submit([op])
    found = transport.poll(60)
    assert [item.id for item in found] == [op.id]
    return found[0].status, found[0].error


@pytest.mark.parametrize("path", ["v1", "plain"])
def test_our_client_at_a_server_of_the_public_protocol(serve: Callable[..., StoreConfig], path: str) -> None:
    config = serve()
    store = open_store(config)
    version = store.stat("k").version
    transport = connect(config, path=path)
    buffer = GuardedBuffer(4 * MIB)
    ops = [
        Op(at, "read", "k", at, min(MIB, len(DATA) - at), buffer, at, version, len(DATA))
        for at in range(0, len(DATA), MIB)
    ]
    registration = transport.register(buffer)
    transport.submit(ops)
    left = len(ops)
    while left:
        for item in transport.poll(60):
            assert (item.status, item.error) == (Status.DONE, None)
            left -= 1
    assert buffer.view[: len(DATA)] == DATA
    buffer.check((0, len(DATA)))
    write = Op(1, "write", "dir/new", 0, len(DATA), buffer, 0, object_size=len(DATA))
    assert one(transport, write) == (Status.DONE, None)
    assert store.get("dir/new") == DATA
    store.close()
    registration.close()
    transport.close()
    buffer.close()


def test_signed_requests_with_x_rdma_info(serve: Callable[..., StoreConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against an S3 server of a stranger's, which checks signatures by botocore."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "K")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "S")
    endpoint = serve("s3").url.replace("node://", "http://")
    config = StoreConfig("s3://bucket", (endpoint,), {"region": "us-east-1"})
    store = open_store(config)
    assert choose("s3", "host").spec.name == "s3", "never without being asked for"
    transport = open_transports(config, store, choose("s3", "host", "s3-rdma"), {})[0]
    buffer = GuardedBuffer(2 * MIB)
    version = hashlib.sha256(DATA).hexdigest()[:16]
    read = Op(1, "read", "k", 4096, MIB, buffer, 100, version, len(DATA))
    assert one(transport, read) == (Status.DONE, None)
    assert buffer.view[100 : 100 + MIB] == DATA[4096 : 4096 + MIB]
    assert one(transport, Op(2, "write", "new", 0, MIB, buffer, 100, object_size=MIB)) == (Status.DONE, None)
    again = Op(3, "read", "new", 0, MIB, buffer, MIB - 100, None, MIB)
    assert one(transport, again) == (Status.DONE, None)
    assert buffer.view[MIB - 100 : 2 * MIB - 100] == DATA[4096 : 4096 + MIB]
    status, error = one(transport, replace(read, id=4, version="other"))
    assert (status, type(error)) == (Status.FAILED, VersionChangedError)
    transport.close()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    unknown = open_transports(config, open_store(config), choose("s3", "host", "s3-rdma"), {})[0]
    status, error = one(unknown, read)
    assert (status, type(error)) == (Status.FAILED, AuthError)
    unknown.close()
    store.close()
    buffer.close()


@pytest.mark.parametrize(("mode", "kind"), [("body", IncompatibleError), ("short", SizeMismatchError)])
def test_answers_that_do_not_hold_are_refused(
    serve: Callable[..., StoreConfig], mode: str, kind: type[KvctlError]
) -> None:
    transport = connect(serve(mode))
    buffer = GuardedBuffer(MIB)
    status, error = one(transport, Op(1, "read", "k", 0, 4096, buffer, 0, None, len(DATA)))
    assert status is Status.FAILED
    assert isinstance(error, kind)
    transport.close()
    buffer.close()


def test_a_server_that_writes_more_than_asked_does_not_get_past_the_registration(
    serve: Callable[..., StoreConfig],
) -> None:
    config = serve("overrun")
    buffer = GuardedBuffer(4 * MIB)
    transport = connect(config)
    status, error = one(transport, Op(1, "read", "k", 0, MIB, buffer, MIB, None, len(DATA)))
    assert status is Status.FAILED, "the range alone was registered: the device stopped the write"
    assert isinstance(error, TransientError)
    buffer.check((MIB, 2 * MIB))

    # in an arena the neighbour is in reach, and its leaf checks find that; the arena's end is not
    arena = Arena(3, MIB)
    registration = transport.register(arena.buffer)
    third, second, first = arena.take(), arena.take(), arena.take()
    assert (first, second, third) == (0, MIB + 4096, 2 * MIB + 8192)
    assert second is not None
    for slot in (second, 0):
        status, _ = one(transport, Op(1, "read", "k", 0, MIB, arena.buffer, slot, None, len(DATA)))
        assert status is Status.DONE
    table = leaf_table(DATA)[: 4 * 8]
    verify_leaves(arena.buffer.view[:MIB], 0, table)
    with pytest.raises(IntegrityError):
        verify_leaves(arena.buffer.view[second : second + MIB], 0, table)
    end = arena.buffer.nbytes
    status, error = one(transport, Op(1, "read", "k", 0, MIB, arena.buffer, end - MIB, None, len(DATA)))
    assert status is Status.FAILED
    registration.close()

    strict = connect(config, memory="op")
    kept = strict.register(arena.buffer)
    status, error = one(strict, Op(1, "read", "k", 0, MIB, arena.buffer, 0, None, len(DATA)))
    assert status is Status.FAILED, "memory=op: every operation's range is registered alone"
    kept.close()
    for item in (transport, strict):
        item.close()
    arena.close()


def test_after_the_deadline_a_late_server_finds_no_way_in(serve: Callable[..., StoreConfig], tmp_path: Path) -> None:
    transport = connect(serve("late", timeout="1"))
    buffer = GuardedBuffer(MIB)
    registration = transport.register(buffer)
    status, error = one(transport, Op(1, "read", "k", 0, MIB, buffer, 0, None, len(DATA)))
    assert status is Status.FAILED
    assert isinstance(error, MemberDownError)
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 60
    while not (tmp_path / "late").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (tmp_path / "late").read_text().startswith("refused")
    buffer.check()
    registration.close()
    transport.close()
    buffer.close()


def test_a_queue_pair_that_cannot_be_ended_leaves_the_outcome_unknown(
    serve: Callable[..., StoreConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = connect(serve("late", timeout="1"))
    assert transport.capabilities.one_sided
    buffer = GuardedBuffer(MIB)

    def fail(_: Port) -> None:
        raise OSError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(Port, "sever", fail)
        status, error = one(transport, Op(1, "read", "k", 0, MIB, buffer, 0, None, len(DATA)))
    assert status is Status.UNKNOWN
    assert isinstance(error, TransientError)
    assert error.cause == "no such luck"
    transport.close()  # ends them all, and with them the doubt
    buffer.check()
    buffer.close()


def test_a_cancelled_read_is_over_when_it_says_so(serve: Callable[..., StoreConfig], tmp_path: Path) -> None:
    transport = connect(serve("late"))
    buffer = GuardedBuffer(MIB)
    op = Op(1, "read", "k", 0, MIB, buffer, 0, None, len(DATA))
    transport.submit([op, replace(op, id=2)])
    assert transport.poll(0.5) == []
    transport.cancel([1])
    found = transport.poll(60)
    assert [(item.id, item.status) for item in found] == [(1, Status.CANCELLED)]
    (tmp_path / "go").touch()
    found = transport.poll(60)  # the other one: the server closes its connection without an answer
    assert [(item.id, item.status) for item in found] == [(2, Status.FAILED)]
    transport.close()
    buffer.close()
