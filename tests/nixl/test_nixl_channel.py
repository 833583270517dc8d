"""What a source publishes, to whom, and what it does about strangers: the control channel of nixl-ucx."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
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
)
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.transport_contract import drive
from kvctl.transports.api import Op
from kvctl_nixl.peer import frames
from kvctl_nixl.peer.source import Source
from kvctl_nixl.peer.store import PeerStore
from tests.nixl.cases import read_one
from tests.nixl.peers import SECONDS, reading, running, until
from tests.nixl.source_child import SIZE, content


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
        with socket.create_connection((source.host, source.port), timeout=SECONDS) as stranger:
            stranger.sendall(noise)
            stranger.settimeout(SECONDS)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(65536):
                    pass
        assert store.stat("x").size == 100


def test_a_reader_that_takes_no_answers_holds_up_nobody() -> None:
    buffer = HostBuffer(SIZE)
    with Source() as source, reading(source.url) as (_, transport):
        source.publish("x", buffer)
        with socket.create_connection((source.host, source.port), timeout=SECONDS) as deaf:
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
