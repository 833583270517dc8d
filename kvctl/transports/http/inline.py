"""Small reads, done by the thread that polls: handing one to a worker thread and back costs more than the read.

A state machine per request over receives that do not wait. It does only what goes well; what does not is given to a
worker thread, with the connection where that is of use.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final

from kvctl.core.errors import IncompatibleError, KvctlError, TransientError
from kvctl.transports.api import Completion, Op, Status
from kvctl.transports.http.dialect import Dialect
from kvctl.transports.threaded import forget_frames
from kvctl.transports.wire import HEAD_LIMIT, Connection, Head, ProtocolError, advance, parse_head, too_large

_HEAD_PEEK: Final = 1024  # what it takes of the body has to be copied
_AT_ONCE: Final = 128 << 10  # up to here a body is waited for as a whole
_BATCH: Final = 8 << 20  # bytes to be woken for; the kernel takes less where its buffers end
_LOOK_AGAIN: Final = 0.5  # seconds after which all connections are looked at, whatever the kernel says


class Reading:
    """One read on its way. `data`: of the answer's head, until all of it came; then `left` is where the body goes, and
    `keep` whether the connection can be used again. `moved`: something came since it was looked at.
    """

    __slots__ = (
        "begun",
        "cancelled",
        "connection",
        "data",
        "deadline",
        "keep",
        "left",
        "missing",
        "moved",
        "number",
        "op",
        "started",
    )

    def __init__(self, op: Op, connection: Connection) -> None:
        self.op = op
        self.connection = connection
        self.number = connection.fileno()
        self.data = b""
        self.begun = False
        self.keep = False
        self.moved = False
        self.left: list[memoryview] = []
        self.missing = op.length
        self.cancelled = False
        self.started = self.deadline = time.monotonic()


# Takes over an operation: on its connection, whose head of an answer has been read, or from the start.
HandOver = Callable[[Op, Connection | None, Head | None], None]


class InlineReads:
    """`start` and `step` belong to the thread that polls; `wake`, `cancel` and `close` may be called by others."""

    def __init__(self, dialect: Dialect, *, give_back: Callable[[Connection], None], hand_over: HandOver) -> None:
        self._dialect = dialect
        self._give_back = give_back
        self._hand_over = hand_over
        self._readings: dict[int, Reading] = {}  # by descriptor
        self._lock = threading.Lock()
        self._poller = select.poll()
        self._wake = -1
        self._ended: list[Completion] = []
        self._looked = 0.0
        self._closed = False

    @property
    def busy(self) -> bool:
        with self._lock:  # another thread may be just moving one from here to there
            return bool(self._readings or self._ended)

    def start(self, op: Op, connection: Connection, head: bytes) -> bool:
        """Send the request of `op` on `connection`, which is ours from now on; False when it is a worker's to do."""
        reading = Reading(op, connection)
        reading.deadline += self._dialect.timeout
        with self._lock:  # first, so that a cancel that comes while it is sent finds it
            if self._closed:
                connection.close()
                self._ended.append(cancelled(op, reading.started))
                return True
            if self._wake < 0:
                self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._poller.register(self._wake, select.POLLIN)
            self._readings[reading.number] = reading
            self._poller.register(reading.number, select.POLLIN)
        try:
            connection.send(head)
        except OSError:
            with self._lock:
                if self._readings.get(reading.number) is not reading:  # closed meanwhile, and told
                    return True
                if reading.cancelled:
                    self._end(reading, Status.CANCELLED)
                    return True
                self._forget(reading)
            connection.close()
            return False
        return True

    def wake(self) -> None:
        """Make `step` return: another thread has something for the one that polls."""
        with self._lock:
            if self._readings and self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def step(self, timeout: float | None) -> list[Completion]:
        """Wait up to `timeout` seconds for something to come, take it; what has ended."""
        if self._ended:
            timeout = 0.0
        pause = _LOOK_AGAIN if timeout is None else min(timeout, _LOOK_AGAIN)
        ready = self._poller.poll(pause * 1000)
        with self._lock:
            for number, _ in ready:
                if number == self._wake:
                    os.eventfd_read(self._wake)
                elif (reading := self._readings.get(number)) is not None:
                    self._take(reading)
            now = time.monotonic()
            if now - self._looked > _LOOK_AGAIN and self._readings:
                self._looked = now
                for reading in list(self._readings.values()):
                    self._look(reading, now)
            ended, self._ended = self._ended, []
        return ended

    def _look(self, reading: Reading, now: float) -> None:
        """The kernel wakes for many bytes: what comes slowly, or does not fit into the window, is fetched as it comes,
        and given up in time.
        """
        silent = now - reading.deadline + self._dialect.timeout
        waited = reading.begun and not reading.moved and silent > _LOOK_AGAIN / 2
        missing = reading.missing
        self._take(reading)
        if waited and reading.missing < missing:
            reading.connection.batches = False
            if self._readings.get(reading.number) is reading:
                reading.connection.wake_at(1)
        if reading.moved:
            reading.moved = False
            reading.deadline = now + self._dialect.timeout
        elif now > reading.deadline and self._readings.get(reading.number) is reading:
            self._fail(reading, self._dialect.broken(reading.op, TimeoutError()))

    def _take(self, reading: Reading) -> None:
        """Under the lock. Ends the reading when all has come, or by any failure."""
        if reading.cancelled:
            self._end(reading, Status.CANCELLED)
            return
        try:
            if not reading.begun and not self._take_head(reading):
                return
            left, connection = reading.left, reading.connection
            while left:
                count = connection.take_into(left)
                if count == 0:
                    self._fail(reading, cut_off(self._dialect, reading.op, reading.op.length - reading.missing))
                    return
                advance(left, count)
                reading.missing -= count
                reading.moved = True
                if left:
                    _batch(reading, reading.missing)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as problem:
            if isinstance(problem, ConnectionError) and not reading.begun and not reading.data:
                self._pass_on(reading)
            else:
                self._fail(reading, as_error(self._dialect, reading.op, problem))
            return
        except KvctlError as problem:
            self._fail(reading, problem)
            return
        if reading.missing == 0:
            self._end(reading, Status.DONE)

    def _take_head(self, reading: Reading) -> bool:
        """Whether the head is there, and the body is to be taken."""
        while (end := reading.data.find(b"\r\n\r\n")) < 0:
            more = reading.connection.take(_HEAD_PEEK)
            if not more:
                raise ConnectionResetError("the server closed the connection")
            if len(reading.data) > HEAD_LIMIT:
                raise too_large()
            reading.data += more
            reading.moved = True
        op, data = reading.op, reading.data
        if len(data) - end - 4 <= op.length and self._dialect.fits(op, data[:end]):
            reading.keep = True
        else:
            head = parse_head(data[:end], data[end + 4 :])
            if 100 <= head.status < 200:
                reading.data = head.rest
                return self._take_head(reading)
            if not 200 <= head.status < 300:
                self._pass_on(reading, head)
                return False
            self._dialect.check(op, head)
            reading.keep = head.keep_alive
        reading.begun = True
        reading.left = left = [view for view in op.views if view]
        rest = memoryview(data)[end + 4 :]
        reading.missing = missing = op.length - len(rest)
        while rest:
            count = min(len(rest), len(left[0]))
            left[0][:count] = rest[:count]
            rest = rest[count:]
            advance(left, count)
        _batch(reading, missing // 2)  # half of it is copied while the other half comes
        return True

    def _pass_on(self, reading: Reading, head: Head | None = None) -> None:
        self._forget(reading)
        if head is None:
            reading.connection.close()
        self._hand_over(reading.op, None if head is None else reading.connection, head)

    def _fail(self, reading: Reading, error: KvctlError) -> None:
        forget_frames(error)
        self._end(reading, Status.CANCELLED if reading.cancelled else Status.FAILED, error)

    def _end(self, reading: Reading, status: Status, error: KvctlError | None = None) -> None:
        self._forget(reading)
        op, connection = reading.op, reading.connection
        if status is Status.DONE and reading.keep and not connection.interrupted:
            if op.length > _AT_ONCE:
                connection.wake_at(1)
            self._give_back(connection)
        else:
            connection.close()
        done = status is Status.DONE
        failed = status is Status.FAILED
        self._ended.append(
            Completion(
                op.id, status, op.length if done else 0, error if failed else None, reading.started, time.monotonic()
            )
        )

    def _forget(self, reading: Reading) -> None:
        self._poller.unregister(reading.number)
        del self._readings[reading.number]
        reading.left = []

    def cancel(self, ids: set[int]) -> None:
        with self._lock:
            for reading in self._readings.values():
                if reading.op.id in ids:
                    reading.cancelled = True
                    reading.connection.shutdown()  # which wakes `step`

    def close(self) -> None:
        """What is on its way ends as cancelled, and touches its memory no more."""
        with self._lock:
            self._closed = True
            for reading in list(self._readings.values()):
                self._end(reading, Status.CANCELLED)
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
                self._poller.unregister(self._wake)
                os.close(self._wake)
                self._wake = -1


def _batch(reading: Reading, nbytes: int) -> None:
    """Be woken for `nbytes` of a large body, where that does its connection good."""
    if reading.op.length > _AT_ONCE and reading.connection.batches:
        reading.connection.wake_at(min(nbytes, _BATCH))


def cancelled(op: Op, started: float) -> Completion:
    """Of one that was not begun, or is not any more."""
    return Completion(op.id, Status.CANCELLED, started=started, finished=time.monotonic())


def as_error(dialect: Dialect, op: Op, problem: OSError | ProtocolError) -> KvctlError:
    """The error for what went wrong on a connection."""
    if isinstance(problem, ProtocolError):
        return IncompatibleError(f"{dialect.endpoint}: {op.key}: not an answer of {dialect.server}", cause=str(problem))
    return dialect.broken(op, problem)


def cut_off(dialect: Dialect, op: Op, got: int) -> TransientError:
    return TransientError(
        f"{dialect.url}: {op.key}: the answer ended early", cause=f"{got} of {op.length} bytes at {op.offset}"
    )
