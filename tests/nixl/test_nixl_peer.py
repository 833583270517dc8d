"""nixl-ucx between processes: what happens to a reader when its source dies, stops, is started again, or changes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import (
    AuthError,
    ConfigError,
    IncompatibleError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    SizeMismatchError,
    UsageError,
    VersionChangedError,
)
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.seaweed import free_ports
from kvctl.testing.transport_contract import drive
from kvctl.transports.api import Completion, Op, Status
from kvctl_nixl import ucx
from kvctl_nixl.peer import frames
from kvctl_nixl.peer.source import Source
from kvctl_nixl.peer.store import PeerStore
from kvctl_nixl.quarantine import QUARANTINE
from kvctl_nixl.ucx import NixlUcx, open_transport
from tests.nixl.cases import read_one
from tests.nixl.source_child import SIZE, content

CHILD = Path(__file__).with_name("source_child.py")
_SECONDS = 60.0


class Child:
    """A source in a process of its own."""

    def __init__(self, port: int = 0, key: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), str(port), *([key] if key else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def publish_again(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.line() == "again"

    def stop(self) -> None:
        """And it has stopped when this returns: the signal alone is only a request."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Its exit status when it ends in order."""
        self.go_on()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        status = self.process.wait(timeout=_SECONDS)
        self.process.stdout.close()
        return status


@contextlib.contextmanager
def running(port: int = 0, key: str = "") -> Iterator[Child]:
    child = Child(port, key)
    try:
        yield child
    finally:
        if child.process.poll() is None:
            child.kill()
        for pipe in (child.process.stdin, child.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@contextlib.contextmanager
def reading(url: str, **options: str) -> Iterator[tuple[PeerStore, NixlUcx]]:
    config = StoreConfig(url, (), {name: options.pop(name) for name in ("key_file", "timeout") if name in options})
    store = PeerStore(config)
    with contextlib.closing(store), contextlib.closing(open_transport(config, store, None, options)) as transport:
        yield store, transport


def one(transport: NixlUcx, buffer: HostBuffer, key: str = "model/a", version: str | None = None) -> Completion:
    return drive(transport, [Op(1, "read", key, 0, SIZE, buffer, version=version)])[1]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def nothing_in_quarantine() -> bool:
    QUARANTINE.release_ended()
    return not len(QUARANTINE)


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
    with running() as child, reading(child.url, mode=mode, deadline="3", timeout="1") as (_, transport):
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
        (done,) = transport.poll(_SECONDS)
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


def test_a_withdrawn_name_is_gone_and_its_memory_free() -> None:
    buffer = HostBuffer(4096)
    with Source() as source, reading(source.url) as (store, transport):
        source.publish("x", buffer)
        source.publish("y", buffer, 0, 10)
        assert read_one(transport, "x", 0, 4096)[0] == bytes(4096)
        assert source.withdraw("x")
        assert len(source._registered) == 1
        assert source.withdraw("y")
        assert source.withdraw("never")
        assert source._registered == {}
        assert list(store.list()) == []
        with pytest.raises(NotFoundError):
            store.stat("x")
        buffer.close()


def test_the_store_reads_small_things_itself_and_writes_nothing() -> None:
    buffer = HostBuffer(100)
    buffer.view[:] = bytes(range(100))
    with Source() as source, reading(f"{source.url}/pre") as (store, _):
        for number in range(1203):
            source.publish(f"pre/k{number:04}", buffer, number % 50, 50)
        source.publish("other", buffer)
        assert [info.key for info in store.list()] == [f"k{number:04}" for number in range(1203)]
        assert store.get("k0003") == bytes(range(3, 53))
        assert store.get("k0003", 10, 5) == bytes(range(13, 18))
        assert store.get("k0003", 45, 50) == bytes(range(48, 53))
        assert store.get("k0003", 60, 5) == b""
        calls: list[Callable[[], object]] = [lambda: store.put("k", b""), lambda: store.delete(["k0001"])]
        for call in calls:
            with pytest.raises(IncompatibleError):
                call()
        with pytest.raises(UsageError):
            store.stat("../other")


def test_ranges_outside_a_buffer_are_refused() -> None:
    buffer = HostBuffer(100)
    with Source() as source, reading(source.url) as (_, transport):
        for offset, length in ((0, 101), (90, 11), (-1, 5)):
            with pytest.raises(UsageError):
                source.publish("x", buffer, offset, length)
        source.publish("x", buffer, 10, 20)
        done = drive(transport, [Op(1, "read", "x", 15, 6, HostBuffer(6))])[1]
        assert isinstance(done.error, SizeMismatchError)


def test_only_those_with_the_key_are_served(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("0123456789abcdef" * 4)
    wrong.write_text("fedcba9876543210" * 4)
    with running(key=right.read_text()) as child:
        with reading(child.url, key_file=str(right)) as (_, transport):
            assert read_one(transport, "model/b", 0, 5000)[0] == content()[1000:6000]
        for options in ({"key_file": str(wrong)}, {}):
            with reading(child.url, **options) as (store, transport):
                with pytest.raises(AuthError):
                    store.stat("model/a")
                done = drive(transport, [Op(1, "read", "model/a", 0, 10, HostBuffer(10))])[1]
                assert isinstance(done.error, AuthError)
    with running() as child, reading(child.url, key_file=str(right)) as (store, _), pytest.raises(AuthError):
        store.stat("model/a")  # a source without a key may be anybody's
    short = tmp_path / "short"
    short.write_text("123")
    with pytest.raises(ConfigError):
        PeerStore(StoreConfig("ucx://127.0.0.1:1", (), {"key_file": str(short)}))


def test_a_source_for_other_hosts_needs_a_key() -> None:
    with pytest.raises(UsageError) as found:
        Source("0.0.0.0")
    assert "key" in str(found.value)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        struct.pack("!II", 1 << 31, 0),
        struct.pack("!II", 10, 1 << 31) + b"{}",
        struct.pack("!II", 4, 0) + b"nope",
        struct.pack("!II", 2, 0) + b"[]",
        struct.pack("!II", 45, 0) + b'{"nonce":"a","agent":"b","proof":["a","b","c"]}'[:45],
    ],
)
def test_noise_on_the_channel_ends_that_connection_only(noise: bytes) -> None:
    buffer = HostBuffer(100)
    with Source() as source, reading(source.url) as (store, _):
        source.publish("x", buffer)
        with socket.create_connection((source.host, source.port), timeout=_SECONDS) as stranger:
            stranger.sendall(noise)
            stranger.settimeout(_SECONDS)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(65536):
                    pass
        assert store.stat("x").size == 100


def test_a_reader_that_takes_no_answers_holds_up_nobody() -> None:
    buffer = HostBuffer(SIZE)
    with Source() as source, reading(source.url) as (_, transport):
        source.publish("x", buffer)
        with socket.create_connection((source.host, source.port), timeout=_SECONDS) as deaf:
            frames.greet_source(deaf, b"", lambda: ("", b""))
            for number in range(5):
                frames.send(deaf, {"id": number, "do": "get", "name": "x", "offset": 0, "length": SIZE})
            assert read_one(transport, "x", 0, SIZE)[0] == bytes(SIZE)
            assert read_one(transport, "x", 0, SIZE)[0] == bytes(SIZE)


def test_readers_that_come_and_go_leave_nothing_behind() -> None:
    buffer = HostBuffer(4096)

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with Source() as source:
        source.publish("x", buffer)
        for number in range(12):
            if number == 2:
                until(lambda: not source._sinks)
                first = held()
            with reading(source.url, mode="push") as (store, transport):
                assert store.stat("x").size == 4096
                assert read_one(transport, "x", 0, 4096)[0] == bytes(4096)
        until(lambda: not source._sinks and held() <= first)


def test_more_readers_than_allowed_are_turned_away() -> None:
    with Source(most_sinks=2) as source, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(reading(source.url))[0].link()
        with reading(source.url) as (store, _), pytest.raises(MemberDownError):
            store.link()
    with pytest.raises(KvctlError):
        PeerStore(StoreConfig(source.url)).link()


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
        timeout=_SECONDS,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith(("NIXL_", "UCX_"))},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
