"""Reads by the compiled reader: requests and answers of any size, by the thread that polls and by helpers beside it
that need no interpreter. In place of `inline` and of most workers where it was built (`pump`).

It does only what goes well; what does not is given to a worker thread, with the connection where that is of use.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

from kvctl.core.errors import CapacityError, KvctlError
from kvctl.transports.api import Completion, Op, Status
from kvctl.transports.http.dialect import Dialect
from kvctl.transports.http.inline import HandOver, as_error, cancelled, cut_off
from kvctl.transports.http.pump import CLOSED, CUT_OFF, DONE, HEAD_CAME, HEAD_TOO_LARGE, Pump, as_oserror, places
from kvctl.transports.threaded import forget_frames
from kvctl.transports.wire import Connection, Head, ProtocolError, parse_head, too_large

_LOOK_AGAIN: Final = 0.5  # seconds after which all connections are looked at, whatever the kernel says


class _Reading:
    """One read on its way. `views` keep its memory. `moved`: bytes that had come when it was last looked at."""

    __slots__ = ("cancelled", "connection", "deadline", "error", "keep", "moved", "op", "started", "views")

    def __init__(self, op: Op, connection: Connection, timeout: float) -> None:
        self.op = op
        self.connection = connection
        self.views = op.views
        self.keep = True
        self.cancelled = False
        self.error: KvctlError | None = None
        self.moved = 0
        self.started = time.monotonic()
        self.deadline = self.started + timeout


class CompiledReads:
    """`start` and `step` belong to the thread that polls; `wake`, `cancel` and `close` may be called by others."""

    def __init__(
        self, dialect: Dialect, threads: int, *, give_back: Callable[[Connection], None], hand_over: HandOver
    ) -> None:
        """`threads` read at once, at most as many as there are processors."""
        self._dialect = dialect
        self._give_back = give_back
        self._hand_over = hand_over
        self._helpers = min(threads, len(os.sched_getaffinity(0))) - 1
        self._pump: Pump | None = None
        self._free: list[int] = []
        self._readings: dict[int, _Reading] = {}
        self._ended: list[Completion] = []
        self._lock = threading.Lock()
        self._looked = 0.0
        self._closed = False

    @property
    def busy(self) -> bool:
        return bool(self._readings or self._ended)  # one is in both for a moment, never in neither

    def start(self, op: Op, connection: Connection, head: bytes) -> bool:
        """Send the request of `op` on `connection`, which is ours from now on; False when it is a worker's to do."""
        reading = _Reading(op, connection, self._dialect.timeout)
        expected, place = self._dialect.expected(op), places(op)
        with self._lock:  # first, so that a cancel that comes while it is sent finds it
            if self._closed:
                connection.close()
                self._ended.append(cancelled(op, reading.started))
                return True
            pump = self._pump
            if pump is None:
                try:
                    self._pump = pump = Pump(self._helpers)
                except CapacityError:
                    connection.close()
                    raise
            number = self._free.pop() if self._free else pump.reading()
            self._readings[number] = reading
        if not pump.start(number, connection, head, expected, place):
            return True
        with self._lock:
            if self._readings.get(number) is not reading:  # closed meanwhile, and told
                return True
            if reading.cancelled:
                self._end(number, reading, Status.CANCELLED)
                return True
            self._forget(number)
        connection.close()
        return False

    def wake(self) -> None:
        """Make `step` return: another thread has something for the one that polls."""
        with self._lock:
            if self._readings and self._pump is not None and not self._closed:
                self._pump.wake()

    def step(self, timeout: float | None) -> list[Completion]:
        """Wait up to `timeout` seconds for something to come, take it; what has ended."""
        pause = _LOOK_AGAIN if timeout is None else min(timeout, _LOOK_AGAIN)
        pump = self._pump
        while pump is not None and not self._closed:
            told = False
            ended = pump.poll(0.0 if self._ended else pause)
            with self._lock:
                for number, code, value, finished in ended:
                    told = True
                    reading = self._readings.get(number)
                    if reading is not None:
                        self._tell(pump, number, reading, code, value, finished)
                now = time.monotonic()
                if now - self._looked > _LOOK_AGAIN and self._readings and not self._closed:
                    self._looked = now
                    for number, reading in list(self._readings.items()):
                        self._look(pump, number, reading, now)
            if not told or self._ended:
                break
            pause = 0.0  # heads were judged: their bodies may be there
        with self._lock:
            found, self._ended = self._ended, []
        return found

    def _look(self, pump: Pump, number: int, reading: _Reading, now: float) -> None:
        """The kernel wakes for many bytes: what does not fit into the window is fetched as it comes; what is silent is
        given up in time.
        """
        moved = pump.moved(number)
        if moved != reading.moved:
            reading.moved = moved
            reading.deadline = now + self._dialect.timeout
        elif pump.look(number):
            reading.connection.batches = False
        elif now > reading.deadline and reading.error is None:
            reading.error = self._dialect.broken(reading.op, TimeoutError())
            reading.connection.shutdown()  # which ends it

    def _tell(self, pump: Pump, number: int, reading: _Reading, code: int, value: int, finished: float) -> None:
        """Under the lock."""
        op = reading.op
        if code == DONE:
            self._end(number, reading, Status.DONE, finished=finished)
        elif reading.cancelled or self._closed:
            self._end(number, reading, Status.CANCELLED)
        elif reading.error is not None:
            self._fail(number, reading, reading.error)
        elif code == HEAD_CAME:
            self._judge(pump, number, reading)
        elif code == CUT_OFF:
            self._fail(number, reading, cut_off(self._dialect, op, value))
        elif code == HEAD_TOO_LARGE:
            self._fail(number, reading, as_error(self._dialect, op, too_large()))
        else:
            problem = ConnectionResetError("the server closed the connection") if code == CLOSED else as_oserror(value)
            if isinstance(problem, ConnectionError) and not pump.moved(number):
                self._pass_on(number, reading)
            else:
                self._fail(number, reading, as_error(self._dialect, op, problem))

    def _judge(self, pump: Pump, number: int, reading: _Reading) -> None:
        """A head that is not plainly in order."""
        op, data = reading.op, pump.head(number)
        size = data.find(b"\r\n\r\n") + 4
        try:
            head = parse_head(data[: size - 4], data[size:])
            body = head.status >= 200
            if body and not head.status < 300:
                self._pass_on(number, reading, head)
                return
            if body:
                self._dialect.check(op, head)
                reading.keep = head.keep_alive
        except ProtocolError as problem:
            self._fail(number, reading, as_error(self._dialect, op, problem))
        except KvctlError as problem:
            self._fail(number, reading, problem)
        else:
            pump.go_on(number, size, body=body)

    def _pass_on(self, number: int, reading: _Reading, head: Head | None = None) -> None:
        if head is None:
            reading.connection.close()
        self._hand_over(reading.op, None if head is None else reading.connection, head)
        self._forget(number)

    def _fail(self, number: int, reading: _Reading, error: KvctlError) -> None:
        forget_frames(error)
        self._end(number, reading, Status.FAILED, error)

    def _end(
        self, number: int, reading: _Reading, status: Status, error: KvctlError | None = None, finished: float = 0.0
    ) -> None:
        op, connection = reading.op, reading.connection
        done = status is Status.DONE
        if done and reading.keep and not connection.interrupted:
            self._give_back(connection)
        else:
            connection.close()
        self._ended.append(
            Completion(op.id, status, op.length if done else 0, error, reading.started, finished or time.monotonic())
        )
        self._forget(number)

    def _forget(self, number: int) -> None:
        self._readings.pop(number).views = ()
        self._free.append(number)

    def cancel(self, ids: set[int]) -> None:
        with self._lock:
            for reading in self._readings.values():
                if reading.op.id in ids:
                    reading.cancelled = True
                    reading.connection.shutdown()  # which ends it

    def close(self) -> None:
        """What is on its way ends as cancelled, and touches its memory no more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for reading in self._readings.values():
                reading.connection.shutdown()
        if self._pump is not None:
            self._pump.stop()
        with self._lock:
            for number, reading in list(self._readings.items()):
                self._end(number, reading, Status.CANCELLED)
