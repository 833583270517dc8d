"""Bodies read off one connection: batches of wake-ups, and the peers for which they do not fit."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from kvctl.transports.wire import Connection

MIB = 1 << 20
Serve = Callable[[socket.socket, bytes], None]


@pytest.fixture
def answering() -> Iterator[Callable[[bytes, Serve], Connection]]:
    """Starts a peer that answers each request with a head and then hands the body to `serve`."""
    listeners: list[socket.socket] = []

    def start(body: bytes, serve: Serve) -> Connection:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run() -> None:
            peer, _ = listener.accept()
            with closing(peer):
                while peer.recv(16):
                    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
                    serve(peer, body)

        threading.Thread(target=run, daemon=True).start()
        return Connection("127.0.0.1", listener.getsockname()[1], tls=None, connect_timeout=10, timeout=30)

    yield start
    for listener in listeners:
        listener.close()


def fetch(connection: Connection, body: bytes) -> bytes:
    connection.send(b"GET")
    head = connection.read_head()
    landed = bytearray(len(body))
    assert connection.read_body(head, memoryview(landed)) == len(body)
    return bytes(landed)


@pytest.mark.parametrize("size", [0, 1, 2 * MIB, 2 * MIB + 1, 3 * MIB - 1, 16 * MIB])
def test_bodies_of_any_size_arrive_whole_on_one_connection(
    answering: Callable[[bytes, Serve], Connection], size: int
) -> None:
    body = os.urandom(size)
    with closing(answering(body, lambda peer, data: peer.sendall(data))) as connection:
        assert [fetch(connection, body) == body for _ in range(4)] == [True] * 4


def test_a_peer_slower_than_a_batch_is_read_the_plain_way_from_then_on(
    answering: Callable[[bytes, Serve], Connection],
) -> None:
    body = os.urandom(3 * MIB)
    connections: list[Connection] = []

    def trickle(peer: socket.socket, data: bytes) -> None:
        peer.sendall(data[: MIB // 2])
        while connections[0].batches:  # longer than a batch may take, whatever the machine
            time.sleep(0.01)
        peer.sendall(data[MIB // 2 :])

    with closing(answering(body, trickle)) as connection:
        connections.append(connection)
        assert fetch(connection, body) == body
        assert not connection.batches
        assert fetch(connection, body) == body


def test_a_body_that_ends_early_is_short_not_a_hang(answering: Callable[[bytes, Serve], Connection]) -> None:
    def cut(peer: socket.socket, data: bytes) -> None:
        peer.sendall(data[: 5 * MIB + 17])
        peer.shutdown(socket.SHUT_WR)

    body = os.urandom(8 * MIB)
    with closing(answering(body, cut)) as connection:
        connection.send(b"GET")
        head = connection.read_head()
        landed = bytearray(len(body))
        assert connection.read_body(head, memoryview(landed)) == 5 * MIB + 17
        assert landed[: 5 * MIB + 17] == body[: 5 * MIB + 17]


def test_a_shutdown_from_another_thread_ends_a_batch(answering: Callable[[bytes, Serve], Connection]) -> None:
    started = threading.Event()

    def stall(peer: socket.socket, data: bytes) -> None:
        peer.sendall(data[:MIB])
        started.set()
        peer.recv(1)

    body = bytes(8 * MIB)
    with closing(answering(body, stall)) as connection:
        connection.send(b"GET")
        head = connection.read_head()

        def cancel() -> None:
            started.wait(30)
            connection.shutdown()

        threading.Thread(target=cancel, daemon=True).start()
        with contextlib.suppress(ConnectionResetError):  # what the peer does about it may be faster
            assert connection.read_body(head, memoryview(bytearray(len(body)))) < len(body)
        assert connection.interrupted
