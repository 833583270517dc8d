"""Reads that the polling thread does itself, compiled and in Python: what goes wrong on a connection, and what other
threads ask.
"""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import pytest

from kvctl.core.errors import IncompatibleError, KvctlError, MemberDownError, SizeMismatchError, TransientError
from kvctl.testing.buffers import GuardedBuffer
from kvctl.testing.transport_contract import collect, drive
from kvctl.transports.api import Completion, Op, Status
from kvctl.transports.http import bulk
from kvctl.transports.http.bulk import HttpTransport
from kvctl.transports.http.pump import why_not
from kvctl.transports.http.ranges import check_read, expected_read
from kvctl.transports.wire import Connection, Head

SIZE = 300_000
DATA = bytes(range(256)) * (SIZE // 256 + 1)
# What the peer does with the request of a range: the socket, first and last byte.
Script = Callable[[socket.socket, int, int], None]


@dataclass
class Dialect:
    """The least that a transport needs to know."""

    port: int
    timeout: float = 30.0
    endpoint: str = "http://peer"
    url: str = "test://peer"
    server: str = "a peer"
    refusals: list[int] = field(default_factory=list)
    made: list[Connection] = field(default_factory=list)

    def describe(self, op: Op) -> str:
        return op.key

    def refuse(self, op: Op) -> None:
        return

    def connect(self) -> Connection:
        self.made.append(Connection("127.0.0.1", self.port, tls=None, connect_timeout=10, timeout=self.timeout))
        return self.made[-1]

    def read_head(self, op: Op) -> bytes:
        return b"%08d %08d\n" % (op.offset, op.offset + op.length - 1)

    def write_head(self, op: Op) -> bytes:
        raise NotImplementedError

    def fits(self, op: Op, head: bytes) -> bool:
        return op.key == "quick" and head.startswith(b"HTTP/1.1 206 ") and b"close" not in head

    def expected(self, op: Op) -> tuple[bytes, bytes]:
        return expected_read(op) if op.key == "exact" else (b"", b"")

    def check(self, op: Op, head: Head) -> None:
        check_read(op, head, op.key, whole=False, versions=False, hint="")

    def check_written(self, op: Op, body: bytes) -> None:
        return

    def refusal(self, op: Op, head: Head, body: bytes) -> KvctlError:
        self.refusals.append(head.status)
        return KvctlError(f"{head.status} {body.decode()}")

    def broken(self, op: Op, problem: Exception) -> KvctlError:
        return MemberDownError(f"{op.key}: {type(problem).__name__}")

    def try_differently(self, op: Op, problem: KvctlError) -> bool:
        return False


class Peer:
    """Answers the n-th request with the n-th script, later ones as it should; `connections` it had."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.connections = 0
        self.release = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with closing(peer):
            request = _request(peer)
            if not request[:8].isdigit():  # some other program's, which had this port before
                return
            self.connections += 1
            while len(request) == 18:
                script = self.scripts.pop(0) if self.scripts else good
                try:
                    script(peer, int(request[:8]), int(request[9:17]))
                except OSError:
                    return
                request = _request(peer)

    def close(self) -> None:
        self.release.set()
        self._listener.close()


def _request(peer: socket.socket) -> bytes:
    try:
        return peer.recv(18, socket.MSG_WAITALL)
    except OSError:
        return b""


def head(first: int, last: int, extra: bytes = b"") -> bytes:
    span = b"content-range: bytes %d-%d/%d\r\ncontent-length: %d\r\n" % (first, last, SIZE, last + 1 - first)
    return b"HTTP/1.1 206 Partial Content\r\n" + span + extra + b"\r\n"


def good(peer: socket.socket, first: int, last: int) -> None:
    peer.sendall(head(first, last) + DATA[first : last + 1])


def closes(peer: socket.socket, first: int, last: int) -> None:
    peer.shutdown(socket.SHUT_RDWR)


only_compiled = pytest.mark.parametrize("peers", ["compiled"], indirect=True)


@pytest.fixture(params=["compiled", "python"])
def peers(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Peer, HttpTransport]]]:
    """Starts a peer and a transport to it whose first read has made a connection."""
    opened: list[Peer | HttpTransport] = []
    if request.param == "compiled" and why_not():
        pytest.skip(f"no compiled reader: {why_not()}")

    def start(*scripts: Script, timeout: float = 30.0, threads: int = 4) -> tuple[Peer, HttpTransport]:
        peer = Peer(good, *scripts)
        transport = HttpTransport(
            Dialect(peer.port, timeout), name="test", threads=threads, plain=True, compiled=request.param == "compiled"
        )
        opened.extend((transport, peer))
        buffer = GuardedBuffer(10)
        assert drive(transport, [Op(0, "read", "first", 0, 10, buffer)])[0].status is Status.DONE
        buffer.close()
        return peer, transport

    yield start
    for item in opened:
        item.close()


@pytest.fixture
def workers_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of more than 1,000 bytes, unless they are alone, are workers'."""
    monkeypatch.setattr(bulk, "INLINE", 1000)
    monkeypatch.setattr(bulk, "COMPILED", 1000)


def dialect_of(transport: HttpTransport) -> Dialect:
    assert isinstance(transport._dialect, Dialect)
    return transport._dialect


def one(
    transport: HttpTransport, *, key: str = "k", offset: int = 7, length: int = 1000, whole: bool = True
) -> Completion:
    """A read, its bytes checked where it is done."""
    buffer = GuardedBuffer(length + 20)
    done = drive(transport, [Op(1, "read", key, offset, length, buffer, 10, None, SIZE)])[1]
    if done.status is Status.DONE:
        assert buffer.view[10 : 10 + length] == DATA[offset : offset + length]
        buffer.check((10, 10 + length))
    elif whole:
        buffer.check()
    buffer.close()  # BufferError when a view is still held
    return done


@pytest.mark.parametrize("key", ["k", "quick", "exact"])
@pytest.mark.parametrize("length", [1, 1000, 100_000, 200_000, SIZE - 7])
def test_reads_of_any_size_use_one_connection_and_no_worker(
    peers: Callable[..., tuple[Peer, HttpTransport]], key: str, length: int
) -> None:
    peer, transport = peers()
    for _ in range(3):
        done = one(transport, key=key, length=length)
        assert (done.status, done.requests) == (Status.DONE, 1)
    assert peer.connections == 1


def test_parts_are_filled_in_turn(peers: Callable[..., tuple[Peer, HttpTransport]]) -> None:
    _, transport = peers()
    for lengths in ((1, 2, 3), (0, 500, 0, 70_000, 1), (200_000, 50_000), (1,) * 2000):
        total = sum(lengths)
        buffers = [bytearray(length) for length in lengths]
        place = GuardedBuffer(1)
        parts = tuple(memoryview(item) for item in buffers)
        done = drive(transport, [Op(1, "read", "k", 5, total, place, parts=parts)])[1]
        assert done.status is Status.DONE
        assert b"".join(buffers) == DATA[5 : 5 + total]
        del parts, done
        place.close()


def test_a_connection_that_ends_before_an_answer_is_replaced_once(
    peers: Callable[..., tuple[Peer, HttpTransport]],
) -> None:
    peer, transport = peers(closes, good)
    done = one(transport)
    assert (done.status, done.requests, peer.connections) == (Status.DONE, 2, 2)
    peer, transport = peers(closes, closes)
    done = one(transport)
    assert (done.status, type(done.error), peer.connections) == (Status.FAILED, MemberDownError, 2)


def _half_head(peer: socket.socket, first: int, last: int) -> None:
    peer.sendall(head(first, last)[:30])
    peer.shutdown(socket.SHUT_RDWR)


def _short(peer: socket.socket, first: int, last: int) -> None:
    peer.sendall(head(first, last) + DATA[first : last - 99])
    peer.shutdown(socket.SHUT_RDWR)


def _other_range(peer: socket.socket, first: int, last: int) -> None:
    good(peer, first + 1, last + 1)


def _longer(peer: socket.socket, first: int, last: int) -> None:
    peer.sendall(head(first, last) + DATA[first : last + 5])


def _junk(peer: socket.socket, first: int, last: int) -> None:
    peer.sendall(b"junk\r\n\r\n")


def _endless(peer: socket.socket, first: int, last: int) -> None:
    peer.sendall(b"HTTP/1.1 206 Partial Content\r\n" + b"x: y\r\n" * 20_000)


@pytest.mark.parametrize(
    ("script", "kind", "key", "touched"),
    [
        (_half_head, MemberDownError, "k", False), (_short, TransientError, "k", True),
        (_short, TransientError, "quick", True), (_other_range, SizeMismatchError, "k", False),
        (_longer, SizeMismatchError, "k", False), (_longer, SizeMismatchError, "quick", False),
        (_junk, IncompatibleError, "k", False), (_endless, IncompatibleError, "k", False),
        (_short, TransientError, "exact", True), (_other_range, SizeMismatchError, "exact", False),
        (_longer, SizeMismatchError, "exact", False),
    ],
    ids=range(11),
)  # fmt: skip
def test_a_bad_answer_fails_its_read_and_spoils_no_other(
    peers: Callable[..., tuple[Peer, HttpTransport]], script: Script, kind: type[KvctlError], key: str, touched: bool
) -> None:
    peer, transport = peers(script)
    done = one(transport, key=key, length=100, whole=not touched)
    assert (done.status, type(done.error), done.requests) == (Status.FAILED, kind, 1)
    assert one(transport, key=key).status is Status.DONE
    assert peer.connections == 2


def test_bytes_behind_an_answer_are_no_answer(peers: Callable[..., tuple[Peer, HttpTransport]]) -> None:
    def more(peer: socket.socket, first: int, last: int) -> None:
        good(peer, first, last)
        peer.sendall(b"HTTP/1.1 206 Partial Content\r\n\r\n")

    peer, transport = peers(more)
    # of a body that does not fit into the first receive: what follows it is not noticed then
    assert one(transport, length=100_000).status is Status.DONE
    (connection,) = dialect_of(transport).made
    assert select.select([connection], [], [], 30)[0]
    assert one(transport).status is Status.DONE
    assert peer.connections == 2


def test_refusals_and_interim_answers_take_one_request(peers: Callable[..., tuple[Peer, HttpTransport]]) -> None:
    def refuses(peer: socket.socket, first: int, last: int) -> None:
        peer.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnone")

    def hints(peer: socket.socket, first: int, last: int) -> None:
        peer.sendall(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        good(peer, first, last)

    def last_one(peer: socket.socket, first: int, last: int) -> None:
        peer.sendall(head(first, last, b"connection: close\r\n") + DATA[first : last + 1])
        peer.shutdown(socket.SHUT_RDWR)

    peer, transport = peers(refuses, hints, last_one)
    done = one(transport)
    assert (done.status, str(done.error), done.requests) == (Status.FAILED, "404 none", 1)
    assert [(done.status, done.requests) for done in (one(transport), one(transport))] == [(Status.DONE, 1)] * 2
    assert one(transport).requests == 1
    assert peer.connections <= 4


def test_silence_ends_a_read_and_a_slow_body_does_not(peers: Callable[..., tuple[Peer, HttpTransport]]) -> None:
    def silent(peer: socket.socket, first: int, last: int) -> None:
        peer.recv(1)

    _, transport = peers(silent, timeout=0.3)
    done = one(transport)
    assert (done.status, type(done.error)) == (Status.FAILED, MemberDownError)

    def slow(peer: socket.socket, first: int, last: int) -> None:
        data = head(first, last) + DATA[first : last + 1]
        for start in range(0, len(data), len(data) // 4):
            peer.sendall(data[start : start + len(data) // 4])
            time.sleep(1.3)

    _, transport = peers(good, slow, timeout=5.0)
    assert one(transport, length=250_000).status is Status.DONE
    (connection,) = dialect_of(transport).made
    connection.batches = True  # on a busy machine even that one may have been slow
    assert one(transport, length=250_000).status is Status.DONE
    assert not connection.batches  # it was not woken for what had come: from here on it is, for any byte
    assert one(transport, length=250_000).status is Status.DONE


def test_other_threads_cancel_and_close_while_it_waits(peers: Callable[..., tuple[Peer, HttpTransport]]) -> None:
    for act in ("cancel", "close"):
        asked = threading.Event()

        def silent(peer: socket.socket, first: int, last: int, asked: threading.Event = asked) -> None:
            asked.set()
            peer.recv(1)

        _, transport = peers(silent)
        buffer = GuardedBuffer(1000)
        transport.submit([Op(1, "read", "k", 0, 1000, buffer)])

        def other(transport: HttpTransport = transport, asked: threading.Event = asked, act: str = act) -> None:
            assert asked.wait(30)
            if act == "cancel":
                transport.cancel([1])
            else:
                transport.close()

        thread = threading.Thread(target=other)
        thread.start()
        (done,) = transport.poll(None)
        thread.join()
        assert done.status is Status.CANCELLED
        buffer.check()
        buffer.close()


class Gate:
    """Counts what workers do, each once the gate is open."""

    def __init__(self, transport: HttpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.asked: list[int] = []
        perform = transport.perform

        def waits(op: Op) -> int:
            self.asked.append(op.id)
            assert self.open.wait(30)
            return perform(op)

        monkeypatch.setattr(transport, "perform", waits)


@pytest.mark.usefixtures("workers_for_more")
def test_a_large_read_that_is_alone_takes_no_worker(
    peers: Callable[..., tuple[Peer, HttpTransport]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, transport = peers()
    gate = Gate(transport, monkeypatch)
    for length in (1001, 250_000):
        assert one(transport, length=length).status is Status.DONE
    assert gate.asked == []


@pytest.mark.usefixtures("workers_for_more")
def test_a_request_is_on_its_way_before_its_worker_is(
    peers: Callable[..., tuple[Peer, HttpTransport]], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, transport = peers()
    buffer = GuardedBuffer(150_000)

    def two(first: int) -> list[Op]:
        return [Op(first + i, "read", "k", i * 50_000, 50_000 + i, buffer, i * 50_000) for i in range(2)]

    together = threading.Barrier(2)  # so that there are two connections

    def meets(peer: socket.socket, first: int, last: int) -> None:
        together.wait(30)
        good(peer, first, last)

    peer.scripts += [meets, meets]
    assert {done.status for done in drive(transport, two(1)).values()} == {Status.DONE}
    asked = [threading.Event(), threading.Event()]

    def answer(peer: socket.socket, first: int, last: int) -> None:
        asked[first // 50_000].set()
        good(peer, first, last)

    peer.scripts += [answer, answer]
    gate = Gate(transport, monkeypatch)
    transport.submit(two(3))
    assert all(event.wait(30) for event in asked)
    gate.open.set()
    found = collect(transport, 2)
    assert {(done.status, done.requests) for done in found.values()} == {(Status.DONE, 1)}
    assert gate.asked == [4]
    assert buffer.view[:100_001] == DATA[:100_001]
    assert peer.connections == 2
    buffer.close()


@pytest.mark.usefixtures("workers_for_more")
def test_a_read_that_is_cancelled_in_line_leaves_no_answer_behind(
    peers: Callable[..., tuple[Peer, HttpTransport]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, transport = peers(threads=1)
    gate = Gate(transport, monkeypatch)
    buffer = GuardedBuffer(4000)
    transport.submit([Op(1, "read", "k", 0, 2000, buffer)])  # takes the connection
    transport.submit([Op(2, "read", "k", 0, 2000, buffer)])  # the worker's, on one of its own
    assert [done.id for done in transport.poll(None)] == [1]
    transport.submit([Op(3, "read", "k", 0, 2000, buffer, 2000)])  # sent ahead, in line behind it
    transport.cancel([3])
    gate.open.set()
    found = collect(transport, 2)
    assert (found[2].status, found[3].status) == (Status.DONE, Status.CANCELLED)
    assert gate.asked == [2]
    buffer.check((0, 2000))
    buffer.close()
    first, _ = dialect_of(transport).made
    assert first.fileno() < 0  # closed: what comes on it belongs to nobody
    assert one(transport).status is Status.DONE


@pytest.mark.usefixtures("workers_for_more")
def test_what_a_worker_ends_wakes_who_waits_for_a_small_read(
    peers: Callable[..., tuple[Peer, HttpTransport]],
) -> None:
    holding = threading.Event()

    def answer(peer: socket.socket, first: int, last: int) -> None:
        if last > 1000:
            peer.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        elif holding.wait(30):
            good(peer, first, last)

    _, transport = peers(answer, answer)
    buffer = GuardedBuffer(2000)
    transport.submit([Op(1, "read", "k", 0, 1000, buffer)])
    transport.submit([Op(2, "read", "k", 0, 2000, buffer)])
    (done,) = transport.poll(None)
    assert (done.id, done.status) == (2, Status.FAILED)
    assert transport.poll(0) == []
    assert transport.poll(0.01) == []
    holding.set()
    assert collect(transport, 1)[1].status is Status.DONE
    buffer.close()


def _in_pieces(sizes: random.Random) -> Script:
    """Sends an answer in pieces of any size, with pauses."""

    def answer(peer: socket.socket, first: int, last: int) -> None:
        data = memoryview(head(first, last) + DATA[first : last + 1])
        while data:
            size = int(2 ** sizes.uniform(0, 18))
            peer.sendall(data[:size])
            data = data[size:]
            if sizes.random() < 0.2:
                time.sleep(0.001)

    return answer


@only_compiled
def test_many_reads_at_once_bring_the_right_bytes(
    peers: Callable[..., tuple[Peer, HttpTransport]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))  # three helpers
    peer, transport = peers(threads=8)
    sizes = random.Random(7)
    for turn in range(12):
        buffer = GuardedBuffer(8 * SIZE)
        ops, places = [], []
        for i in range(8):
            offset = sizes.randrange(SIZE - 1)
            length = min(SIZE - offset, int(2 ** sizes.uniform(0, 19)))
            key = sizes.choice(["k", "quick", "exact"])
            ops.append(Op(8 * turn + i + 1, "read", key, offset, length, buffer, i * SIZE, None, SIZE))
            places.append((i * SIZE, i * SIZE + length))
        peer.scripts += [_in_pieces(random.Random(sizes.random())) for _ in ops]
        found = drive(transport, ops)
        assert {done.status for done in found.values()} == {Status.DONE}
        for op, (start, end) in zip(ops, places, strict=True):
            assert buffer.view[start:end] == DATA[op.offset : op.offset + op.length]
        del ops, op
        buffer.check(*places)
        buffer.close()


@only_compiled
@pytest.mark.parametrize("act", ["cancel", "close"])
def test_memory_of_a_read_that_was_ended_is_let_alone(
    peers: Callable[..., tuple[Peer, HttpTransport]], act: str
) -> None:
    sizes = random.Random(11)
    for _ in range(25):
        peer, transport = peers(threads=4)
        peer.scripts += [_in_pieces(random.Random(sizes.random())) for _ in range(4)]
        buffer = GuardedBuffer(4 * SIZE)
        transport.submit([Op(i, "read", "exact", 0, SIZE, buffer, i * SIZE, None, SIZE) for i in range(4)])
        pause = sizes.uniform(0, 0.004)

        def other(transport: HttpTransport = transport, pause: float = pause) -> None:
            time.sleep(pause)
            if act == "cancel":
                transport.cancel(range(4))
            else:
                transport.close()

        thread = threading.Thread(target=other)
        thread.start()
        for i, done in collect(transport, 4).items():
            assert done.status in {Status.DONE, Status.CANCELLED}
            buffer.view[i * SIZE : (i + 1) * SIZE] = bytes(SIZE)
        thread.join()
        peer.release.set()
        time.sleep(0.002)
        assert bytes(buffer.view) == bytes(4 * SIZE)
        buffer.close()


@only_compiled
def test_a_body_larger_than_its_window_comes_whole(peers: Callable[..., tuple[Peer, HttpTransport]]) -> None:
    _, transport = peers(good, good)
    (connection,) = dialect_of(transport).made
    connection._raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    assert one(transport, length=SIZE - 7).status is Status.DONE
