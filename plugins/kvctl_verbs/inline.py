"""Reads by RDMA, asked for by the thread that polls: it sends a few hundred bytes and takes a few hundred, so handing
them to a worker thread and back is most of what they cost.

Only what goes well ends here. After any trouble the queue pairs are ended first, as ever; then a worker asks again, and
knows what to say.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Final, Protocol

from kvctl.core.errors import KvctlError, TransientError
from kvctl.transports.api import Completion, Op, Status
from kvctl.transports.threaded import forget_frames
from kvctl.transports.wire import Connection, Head, ProtocolError, parse_head
from kvctl_verbs.landing import Port
from kvctl_verbs.seats import Seat

_HEAD: Final = 4096
_HEAD_LIMIT: Final = 65536
_LOOK_AGAIN: Final = 0.5  # seconds between looks for what takes too long


class Asked:
    """One read on its way. `data`: what came of the answer."""

    __slots__ = ("cancelled", "connection", "data", "deadline", "number", "op", "port", "rail", "seat", "started")

    def __init__(self, op: Op, seat: Seat, connection: Connection, rail: int, port: Port, seconds: float) -> None:
        """`seconds`: how long the answer may take."""
        self.op: Final = op
        self.seat: Final = seat
        self.connection: Final = connection
        self.rail: Final = rail
        self.port: Final = port
        self.number = connection.fileno()
        self.data = b""
        self.cancelled = False
        self.started = time.monotonic()
        self.deadline = self.started + seconds


class Owner(Protocol):
    """The transport."""

    def judge(self, op: Op, head: Head) -> bool:
        """Whether the answer is one of success. Raises KvctlError or ProtocolError for one that does not say that all
        is placed that was asked for.
        """
        ...

    def broken(self, op: Op, problem: Exception) -> KvctlError: ...
    def release(self, asked: Asked, status: Status) -> None:
        """It has ended: its seat can be used again."""
        ...

    def again(self, op: Op) -> None:
        """A worker is to do it, from the start."""
        ...


class Inline:
    """`start` and `step` belong to the thread that polls; `wake`, `cancel` and `close` may be called by others."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._asked: dict[int, Asked] = {}  # by descriptor
        self._ended: list[Completion] = []
        self._poller = select.poll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, select.POLLIN)
        self._looked = 0.0
        self._closed = False

    @property
    def busy(self) -> bool:
        # without the lock: what leaves the one is in the other before
        return bool(self._asked or self._ended)

    def start(self, asked: Asked, head: bytes) -> bool:
        """Send the request; False when this is closed."""
        with self._lock:
            if self._closed:
                return False
            self._asked[asked.number] = asked
            self._poller.register(asked.number, select.POLLIN)
            try:
                asked.connection.send(head)
            except OSError as problem:
                self._fail(asked, problem)
        return True

    def wake(self) -> None:
        """Make `step` return."""
        with self._lock:
            if self._asked and not self._closed:
                os.eventfd_write(self._wake, 1)

    def step(self, timeout: float | None) -> list[Completion]:
        """Wait up to `timeout` seconds for an answer; what has ended."""
        if self._ended:
            timeout = 0.0
        pause = _LOOK_AGAIN if timeout is None else min(timeout, _LOOK_AGAIN)
        ready = self._poller.poll(pause * 1000)
        with self._lock:
            for number, _ in ready:
                asked = self._asked.get(number)
                if asked is not None:
                    self._take(asked)
                elif number == self._wake and not self._closed:
                    os.eventfd_read(self._wake)
            now = time.monotonic()
            if now - self._looked > _LOOK_AGAIN:
                self._looked = now
                for asked in [one for one in self._asked.values() if one.deadline < now]:
                    self._fail(asked, TimeoutError())
            ended, self._ended = self._ended, []
        return ended

    def _take(self, asked: Asked) -> None:
        """Under the lock. What came of an answer."""
        try:
            more = asked.connection.take(_HEAD)
            if not more:
                raise ConnectionResetError("the server closed the connection")
            asked.data += more
            end = asked.data.find(b"\r\n\r\n")
            if end < 0 and len(asked.data) > _HEAD_LIMIT:
                raise ProtocolError(f"an answer with more than {_HEAD_LIMIT} bytes of headers")
            if end < 0:
                return
            head = parse_head(asked.data[:end], asked.data[end + 4 :])
            placed = self._owner.judge(asked.op, head)
        except BlockingIOError:
            return
        except (KvctlError, OSError, ProtocolError) as problem:
            self._fail(asked, problem)
        else:
            if placed:
                if not head.keep_alive:
                    asked.seat.drop()
                self._end(asked, Status.DONE)
            else:
                self._fail(asked, None)

    def _fail(self, asked: Asked, problem: Exception | None) -> None:
        """Nothing is placed any more when this returns; the read ends, or a worker does it again."""
        asked.seat.drop()
        try:
            asked.port.sever()
        except Exception as stuck:
            about = TransientError(
                f"{asked.op.key}: a transfer could not be ended", cause=str(stuck), hint="run the same command again"
            )
            self._end(asked, Status.UNKNOWN, about)
            return
        if asked.cancelled:
            self._end(asked, Status.CANCELLED)
        elif problem is None or (isinstance(problem, ConnectionError) and not asked.data):
            self._forget(asked)
            self._owner.release(asked, Status.CANCELLED)
            self._owner.again(asked.op)
        else:
            error = problem if isinstance(problem, KvctlError) else self._owner.broken(asked.op, problem)
            self._end(asked, Status.FAILED, error)

    def _end(self, asked: Asked, status: Status, error: KvctlError | None = None) -> None:
        if error is not None:
            forget_frames(error)
        nbytes = asked.op.length if status is Status.DONE else 0
        self._ended.append(Completion(asked.op.id, status, nbytes, error, asked.started, time.monotonic()))
        self._forget(asked)
        self._owner.release(asked, status)

    def _forget(self, asked: Asked) -> None:
        self._poller.unregister(asked.number)
        del self._asked[asked.number]

    def cancel(self, ids: set[int]) -> None:
        with self._lock:
            for asked in self._asked.values():
                if asked.op.id in ids:
                    asked.cancelled = True
                    asked.connection.shutdown()  # which wakes `step`

    def close(self) -> None:
        """What is on its way ends as cancelled, and nothing is placed any more."""
        with self._lock:
            self._closed = True
            for asked in list(self._asked.values()):
                asked.cancelled = True
                self._fail(asked, None)
            os.eventfd_write(self._wake, 1)
            self._poller.unregister(self._wake)
            os.close(self._wake)
