"""What is measured side by side: a transport, and the bare ways that are the ceiling of its medium.

A rival is opened once and read many times: `batch` keeps `concurrency` requests of `size` bytes in flight for a while
and says what they took. All rivals read the same object into memory of the same kind that was touched before.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final, Protocol

from kvctl.core.errors import EnvError, IntegrityError, StalledError, TransientError
from kvctl.memory.buffers import HostBuffer, round_up
from kvctl.transports.api import Completion, Op, Status, Store, Transport

_HEAD_PEEK: Final = 1024  # a small first receive: what it takes of the body has to be copied
_HEAD_LIMIT: Final = 65536
_ARENA: Final = 64 << 20
_WAKE: Final = 1 << 20  # bytes of a large body per wake-up of its reader
WAIT: Final = 60.0  # seconds without a byte

# (offset, bytes) of one request
Range = tuple[int, int]


@dataclass(slots=True)
class Batch:
    """Seconds of wall and CPU time, bytes, and the seconds of each request."""

    wall: float = 0.0
    cpu: float = 0.0
    bytes: int = 0
    requests: list[float] = field(default_factory=list)


class Memory:
    """A part for each request in flight, touched before anything is timed. Requests go through their part place by
    place: as in a load, what they write to is in no core's cache.
    """

    def __init__(self, slots: int, size: int) -> None:
        """`size`: of the largest request."""
        self._part = max(round_up(size), round_up(_ARENA // slots))
        self.buffer = HostBuffer(slots * self._part)
        self.buffer.prefault()

    def offset(self, slot: int, size: int, turn: int = 0) -> int:
        """Where the bytes of a request go: its `slot` among those in flight, its number."""
        places = self._part // round_up(size)
        places -= places % 2 == 0 and places > 1  # odd, so that numbers which grow by 2 or 4 get around
        return slot * self._part + turn % places * round_up(size)

    def view(self, slot: int, size: int, turn: int = 0) -> memoryview:
        offset = self.offset(slot, size, turn)
        return self.buffer.view[offset : offset + size]

    def close(self) -> None:
        self.buffer.close()


class Rival(Protocol):
    """`name` as the table shows it."""

    @property
    def name(self) -> str: ...
    def batch(self, memory: Memory, ranges: Sequence[Range], concurrency: int, seconds: float) -> Batch:
        """Read `ranges` in turn, again and again, until `seconds` have passed and each slot was filled twice.
        Raises KvctlError when a request fails.
        """
        ...

    def close(self) -> None: ...


class TransportRival:
    """A transport over one or more endpoints of a store, requests given to them in turn."""

    def __init__(
        self, name: str, store: Store, ways: Sequence[Transport], key: str, version: str, object_size: int
    ) -> None:
        """Owns `ways` and the `store` under them."""
        self.name = name
        self._store = store
        self._ways = ways
        self._key = key
        self._version = version
        self._size = object_size
        self._next_id = 0

    @property
    def room(self) -> int:
        """Requests it works on at once, over all endpoints."""
        return sum(way.capabilities.max_in_flight for way in self._ways)

    def batch(self, memory: Memory, ranges: Sequence[Range], concurrency: int, seconds: float) -> Batch:
        count = min(concurrency, len(self._ways))
        ways = self._ways[:count]
        registrations = [way.register(memory.buffer) for way in ways]
        try:
            return self._batch(ways, memory, ranges, concurrency, seconds)
        finally:
            for registration in registrations:
                registration.close()

    def _batch(
        self, ways: Sequence[Transport], memory: Memory, ranges: Sequence[Range], concurrency: int, seconds: float
    ) -> Batch:
        batch = Batch()
        running: dict[int, tuple[int, float]] = {}
        lanes: list[set[int]] = [set() for _ in ways]
        turn = 0
        started, cpu = time.monotonic(), time.process_time()

        def issue(lane: int, slot: int) -> None:
            nonlocal turn
            offset, length = ranges[turn % len(ranges)]
            place = memory.offset(slot, length, turn)
            turn += 1
            self._next_id += 1
            op = Op(
                self._next_id, "read", self._key, offset, length, memory.buffer, place, self._version, self._size
            )  # fmt: skip
            running[op.id] = (slot, time.monotonic())
            lanes[lane].add(op.id)
            ways[lane].submit([op])

        for slot in range(concurrency):
            issue(slot % len(ways), slot)
        least = 2 * concurrency
        while running:
            quiet = True
            for lane, way in enumerate(ways):
                if not lanes[lane]:
                    continue
                # with one endpoint the wait is for the answer; with several each gets its look
                for done in way.poll(WAIT if len(ways) == 1 else 0.001):
                    quiet = False
                    slot, asked = running.pop(done.id)
                    lanes[lane].discard(done.id)
                    self._count(done, asked, batch)
                    if time.monotonic() - started < seconds or len(batch.requests) + len(running) < least:
                        issue(lane, slot)
            if quiet and time.monotonic() - min(when for _, when in running.values()) > WAIT:
                raise StalledError(f"{self.name}: no answer for {WAIT:g} s")
        batch.wall, batch.cpu = time.monotonic() - started, time.process_time() - cpu
        return batch

    def _count(self, done: Completion, asked: float, batch: Batch) -> None:
        if done.status is not Status.DONE:
            raise done.error or TransientError(f"{self.name}: a request was {done.status.value}")
        batch.requests.append(done.finished - asked)
        batch.bytes += done.nbytes

    def close(self) -> None:
        for way in self._ways:
            way.close()
        self._store.close()


class ThreadedRival:
    """One thread per request in flight, each with a reader of its own: what the bare ways have in common."""

    def __init__(self, name: str, make: Callable[[], Reader]) -> None:
        self.name = name
        self._make = make
        self._readers: list[Reader] = []

    def batch(self, memory: Memory, ranges: Sequence[Range], concurrency: int, seconds: float) -> Batch:
        while len(self._readers) < concurrency:
            self._readers.append(self._make())
        batch = Batch()
        lock, problems = threading.Lock(), list[BaseException]()
        barrier = threading.Barrier(concurrency + 1)

        def work(slot: int) -> None:
            reader, took, moved, turn = self._readers[slot], list[float](), 0, slot
            barrier.wait()
            end = time.monotonic() + seconds
            try:
                while len(took) < 2 or time.monotonic() < end:
                    offset, length = ranges[turn % len(ranges)]
                    view = memory.view(slot, length, turn)
                    turn += concurrency
                    asked = time.monotonic()
                    reader.read(offset, view)
                    took.append(time.monotonic() - asked)
                    moved += length
            except Exception as problem:
                problems.append(problem)
            with lock:
                batch.requests += took
                batch.bytes += moved

        threads = [threading.Thread(target=work, args=(slot,), daemon=True) for slot in range(concurrency)]
        for thread in threads:
            thread.start()
        barrier.wait()
        started, cpu = time.monotonic(), time.process_time()
        for thread in threads:
            thread.join()
        batch.wall, batch.cpu = time.monotonic() - started, time.process_time() - cpu
        if problems:
            raise EnvError(f"{self.name} could not be measured", cause=str(problems[0]))
        return batch

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


class Reader(Protocol):
    def read(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset` of the object. Raises OSError."""
        ...

    def close(self) -> None: ...


class FileReader:
    """preadv, nothing else."""

    def __init__(self, path: str, *, direct: bool = False) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))

    def read(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise OSError("the file ended early")
            done += count

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a bare socket goes; `tls` None: in the clear."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class SocketReader:
    """One connection: a request in one send, the body received straight into its place."""

    def __init__(self, address: Address, head: Callable[[int, int], bytes]) -> None:
        """`head`: the whole request for (first byte, last byte)."""
        plain = socket.create_connection((address.host, address.port), timeout=WAIT)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = address.tls
        self._socket = plain if tls is None else tls.wrap_socket(plain, server_hostname=address.host)
        self._flags = socket.MSG_WAITALL if tls is None else 0
        self._head = head
        self._low = 1

    def read(self, offset: int, view: memoryview) -> None:
        self._socket.sendall(self._head(offset, offset + len(view) - 1))
        head = b""
        while (end := head.find(b"\r\n\r\n")) < 0:
            block = self._socket.recv(_HEAD_PEEK)
            if not block or len(head) > _HEAD_LIMIT:
                raise OSError("the server closed the connection")
            head += block
        if not head.startswith((b"HTTP/1.1 206", b"HTTP/1.1 200")):
            raise OSError(head.partition(b"\r\n")[0].decode("latin-1"))
        body = head[end + 4 :]
        view[: len(body)] = body
        done = len(body)
        while done < len(view):
            self._wake_at(min(_WAKE, len(view) - done) if len(view) >= _WAKE and self._flags else 1)
            piece = min(_WAKE, len(view) - done) if self._low > 1 else len(view) - done
            count = self._socket.recv_into(view[done:], piece, self._flags)
            if count == 0:
                raise OSError("the body ended early")
            done += count
        self._wake_at(1)

    def _wake_at(self, nbytes: int) -> None:
        """Be woken when so many bytes are there, not for each segment."""
        if nbytes != self._low:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low = nbytes

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


class LibraryReader:
    """What Python's own library makes of it: http.client, and `readinto` straight into the place."""

    def __init__(self, address: Address, head: Callable[[int, int], bytes]) -> None:
        """`head`: the whole request for (first byte, last byte)."""
        made = HTTPConnection if address.tls is None else partial(HTTPSConnection, context=address.tls)
        self._connection = made(address.host, address.port, timeout=WAIT)
        self._connection.connect()
        self._head = head

    def read(self, offset: int, view: memoryview) -> None:
        try:
            self._read(offset, view)
        except HTTPException as problem:
            raise OSError(str(problem)) from problem

    def _read(self, offset: int, view: memoryview) -> None:
        request, *lines = self._head(offset, offset + len(view) - 1).decode("latin-1").rstrip().split("\r\n")
        method, target, _ = request.split(" ")
        self._connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for line in lines:
            self._connection.putheader(*line.split(": ", 1))
        self._connection.endheaders()
        answer, done = self._connection.getresponse(), 0
        if answer.status not in {200, 206}:
            raise OSError(f"{answer.status} {answer.reason}")
        while done < len(view):
            count = answer.readinto(view[done:])
            if count == 0:
                raise OSError("the body ended early")
            done += count
        answer.read()  # nothing, which tells it that the connection is free

    def close(self) -> None:
        self._connection.close()


def check_content(rival: Rival, memory: Memory, ranges: Sequence[Range], data: memoryview) -> None:
    """One request, compared with what was stored. Raises IntegrityError."""
    offset, length = ranges[0]
    memory.view(0, length)[:] = bytes(length)
    memory.view(1, length)[:] = bytes(length)
    rival.batch(memory, [ranges[0]], 1, 0.0)
    if memory.view(0, length) != data[offset : offset + length]:
        raise IntegrityError(f"{rival.name} brought other bytes than were stored")
