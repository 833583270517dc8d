"""nixl-ucx between processes: what happens to a reader when its source dies, stops, is started again, or changes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.core.errors import (
    MemberDownError,
    NotFoundError,
    VersionChangedError,
)
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.seaweed import free_ports
from kvctl.testing.transport_contract import drive
from kvctl.transports.api import Op, Status
from kvctl_nixl import ucx
from kvctl_nixl.quarantine import QUARANTINE
from tests.nixl.cases import read_one
from tests.nixl.peers import SECONDS, Child, nothing_in_quarantine, one, reading, running, until
from tests.nixl.source_child import SIZE, content


@pytest.fixture(scope="module")
def shared() -> Iterator[Child]:
    """For tests that do a source no harm."""
    with running() as child:
        yield child
        assert child.end() == 0


modes = pytest.mark.parametrize("mode", ["push", "pull"])


@modes
def test_ranges_of_another_process(mode: str, shared: Child) -> None:
    with reading(shared.url, mode=mode) as (store, transport):
        infos = {info.key: info.size for info in store.list("model/")}
        assert infos == {"model/a": SIZE, "model/b": 5000}
        version = store.stat("model/a").version
        requests = 1 if mode == "push" else 2
        assert read_one(transport, "model/a", 0, SIZE, version=version, size=SIZE) == (content(), requests)
        assert read_one(transport, "model/a", 12_345, 70_001)[0] == content()[12_345:][:70_001]
        assert read_one(transport, "model/b", 10, 4990)[0] == content()[1010:6000]


@modes
def test_registered_memory_is_registered_once(mode: str, shared: Child) -> None:
    with reading(shared.url, mode=mode) as (_, transport):
        buffer = HostBuffer(SIZE)
        registration = transport.register(buffer)
        ops = [Op(n, "read", "model/a", n * 65536, 65536, buffer, n * 65536) for n in range(SIZE // 65536)]
        assert {item.status for item in drive(transport, ops).values()} == {Status.DONE}
        assert bytes(buffer.view) == content()
        assert transport._session is not None
        assert transport._session.desk.generation == 1
        registration.close()


def test_memory_told_of_with_a_question_that_fails_is_known_all_the_same(shared: Child) -> None:
    with reading(shared.url, mode="push", threads="1") as (_, transport):
        buffer = HostBuffer(SIZE)
        transport.register(buffer)
        done = drive(transport, [Op(1, "read", "no/such", 0, SIZE, buffer)])[1]
        assert isinstance(done.error, NotFoundError)
        assert one(transport, buffer).status is Status.DONE


def test_long_ranges_move_in_pieces(monkeypatch: pytest.MonkeyPatch, shared: Child) -> None:
    monkeypatch.setattr(ucx, "PIECE", 1 << 20)
    with reading(shared.url) as (_, transport):
        assert read_one(transport, "model/a", 5, SIZE - 5) == (content()[5:], 8)


@modes
def test_a_killed_source_fails_the_read_and_a_restarted_one_is_found_again(mode: str) -> None:
    (port,) = free_ports(1)
    with running(port) as child, reading(child.url, mode=mode) as (store, transport):
        buffer = HostBuffer(SIZE)
        version = store.stat("model/a").version
        assert one(transport, buffer, version=version).status is Status.DONE
        child.kill()
        done = one(transport, buffer, version=version)
        assert done.status is Status.FAILED
        assert isinstance(done.error, MemberDownError)
        with running(port):
            done = one(transport, buffer, version=version)
            assert isinstance(done.error, VersionChangedError), "another run of the source: never taken for the same"
            assert read_one(transport, "model/a", 0, SIZE)[0] == content()
            assert store.stat("model/a").version != version


@modes
def test_a_source_killed_in_the_middle_never_leaves_a_read_hanging(mode: str) -> None:
    with running() as child, reading(child.url, mode=mode, threads="8") as (_, transport):
        buffer = HostBuffer(SIZE)
        transport.register(buffer)
        ops = [Op(n, "read", "model/a", 0, SIZE, buffer) for n in range(60)]
        killer = threading.Timer(0.05, child.kill)
        killer.start()
        done = drive(transport, ops)
        killer.join()
        assert {item.status for item in done.values()} <= {Status.DONE, Status.FAILED}
        assert all(isinstance(item.error, MemberDownError) for item in done.values() if item.status is Status.FAILED)


@modes
def test_memory_given_up_to_a_stopped_source_stays_until_it_is_known_to_be_left_alone(mode: str) -> None:
    """A stopped process keeps its connections and does nothing. When it goes on, what it was asked for lands."""
    with running() as child, reading(child.url, mode=mode, deadline="3", timeout="5") as (_, transport):
        buffer = HostBuffer(SIZE)
        address = buffer.address
        transport.register(buffer)
        assert one(transport, buffer).status is Status.DONE
        buffer.view[:] = bytes(SIZE)
        child.stop()
        done = one(transport, buffer)
        if mode == "pull":
            # where the bytes are is a question, too: nothing is in flight yet
            assert isinstance(done.error, MemberDownError)
            assert done.status is Status.FAILED
        else:
            assert done.status is Status.UNKNOWN
            assert "given up in flight after 3 s" in str(done.error)
            assert len(QUARANTINE) == 1
            buffer.close()  # as a load does at its end
        child.go_on()
        if mode == "push":
            until(lambda: ctypes.string_at(address, SIZE) == content())
            until(nothing_in_quarantine)
        assert read_one(transport, "model/a", 0, SIZE)[0] == content()
        assert child.end() == 0


def test_a_reader_that_leaves_while_the_source_is_stopped_does_no_harm_to_it() -> None:
    """With mode=pull over TCP, UCX would end the source: why push is what auto takes without InfiniBand."""
    with running() as child:
        with reading(child.url, deadline="3") as (_, transport):
            assert transport.mode == "push" or Path("/sys/class/infiniband").exists()
            buffer = HostBuffer(SIZE)
            assert one(transport, buffer).status is Status.DONE
            child.stop()
            assert one(transport, buffer).status is Status.UNKNOWN
        child.go_on()
        with reading(child.url) as (_, transport):
            assert read_one(transport, "model/a", 0, SIZE)[0] == content()
        assert child.end() == 0
    until(nothing_in_quarantine)


def test_closing_ends_what_a_stopped_source_holds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "_CLOSE_SECONDS", 0.2)
    with running() as child, reading(child.url) as (_, transport):
        buffer = HostBuffer(SIZE)
        assert one(transport, buffer).status is Status.DONE
        child.stop()
        transport.submit([Op(1, "read", "model/a", 0, SIZE, buffer)])
        until(lambda: 1 in transport._running)
        transport.close()
        (done,) = transport.poll(SECONDS)
        assert done.status in {Status.UNKNOWN, Status.CANCELLED}
        child.go_on()
        assert child.end() == 0
    until(nothing_in_quarantine)


@modes
def test_what_is_published_again_is_another_version(mode: str) -> None:
    with running() as child, reading(child.url, mode=mode) as (store, transport):
        version = store.stat("model/a").version
        child.publish_again()
        buffer = HostBuffer(SIZE)
        assert isinstance(one(transport, buffer, version=version).error, VersionChangedError)
        assert bytes(buffer.view) == bytes(SIZE)


def test_a_reader_process_ends_in_order_and_says_nothing(shared: Child) -> None:
    program = (
        "import sys\nfrom kvctl.core.addresses import StoreConfig\nfrom kvctl.memory.buffers import HostBuffer\n"
        "from kvctl.transports.api import Op\nfrom kvctl.transports.faces import SyncTransport\n"
        "from kvctl.transports.registry import *\nconfig = StoreConfig(sys.argv[1])\nbuffer = HostBuffer(5000)\n"
        "(transport,) = open_transports(config, open_store(config), choose('ucx', 'host', 'nixl-ucx'))\n"
        "(done,) = SyncTransport(transport).move([Op(1, 'read', 'model/b', 0, 5000, buffer)])\n"
        "assert done.nbytes == 5000, done\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, shared.url],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith(("NIXL_", "UCX_"))},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
