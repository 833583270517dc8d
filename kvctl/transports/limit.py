"""`LimitedTransport`: any transport, held to a rate in bytes per second and to a number of bytes in flight."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvctl.core.errors import EnvError, UsageError
from kvctl.transports.api import Completion, Op, Status, Transport
from kvctl.transports.wrapper import TransportWrapper


class TokenBucket:
    """Bytes that may start now: `rate` more each second, at most `burst` saved up. Thread-safe, so that several
    transports can share one limit. An operation bigger than the burst starts when the bucket is full and leaves
    a debt that later ones wait for: the mean rate holds for any size.
    """

    def __init__(self, rate: float, burst: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0:
            raise UsageError(f"a rate of {rate} bytes/s moves nothing")
        self.rate = rate
        self.burst = rate / 10 if burst is None else burst
        self._clock = clock
        self._level = self.burst
        self._last = clock()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> float:
        """0.0: taken. Else nothing was taken, and this many seconds must pass first."""
        with self._lock:
            now = self._clock()
            self._level = min(self.burst, self._level + (now - self._last) * self.rate)
            self._last = now
            needed = min(float(nbytes), self.burst)
            # the clock's resolution must not make a caller that waited long enough wait again
            if self._level + 1e-6 * self.rate >= needed:
                self._level -= nbytes
                return 0.0
            return (needed - self._level) / self.rate


class LimitedTransport(TransportWrapper):
    """See `kvctl.transports.api.Transport`. Operations start in order of submission; what waits here has sent no
    request. One that is bigger than `max_bytes_in_flight` runs alone.
    """

    def __init__(
        self, inner: Transport, *, bucket: TokenBucket | None = None, max_bytes_in_flight: int | None = None
    ) -> None:
        if max_bytes_in_flight is not None and max_bytes_in_flight <= 0:
            raise UsageError(f"{max_bytes_in_flight} bytes in flight move nothing")
        super().__init__(inner)
        self._bucket = bucket
        self._most = max_bytes_in_flight
        self._waiting: deque[Op] = deque()
        self._running: dict[int, int] = {}
        self._ended: list[Completion] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def bytes_in_flight(self) -> int:
        return sum(self._running.values())

    def submit(self, ops: Sequence[Op]) -> None:
        with self._lock:
            if self._closed:
                raise EnvError(f"transport {self.name} is closed")
            self._waiting.extend(ops)
        self._start()

    def poll(self, timeout: float | None) -> list[Completion]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            pause = self._start()
            with self._lock:
                done, self._ended = self._ended, []
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            limits = [value for value in (pause, left) if value is not None]
            more = self.inner.poll(0.0 if done else min(limits) if limits else None)
            with self._lock:
                for item in more:
                    self._running.pop(item.id, None)
            done += more
            if done or (left is not None and left <= 0):
                if more:
                    self._start()
                return done

    def _start(self) -> float | None:
        """Hand over what may start; seconds until the rate allows the next, None when it waits for nothing or
        for an operation to end.
        """
        while True:
            with self._lock:
                if not self._waiting:
                    return None
                op = self._waiting[0]
                in_flight = sum(self._running.values())
                if self._most is not None and in_flight and in_flight + op.length > self._most:
                    return None
                pause = self._bucket.take(op.length) if self._bucket is not None else 0.0
                if pause > 0:
                    return pause
                self._waiting.popleft()
                self._running[op.id] = op.length
                self.inner.submit([op])

    def cancel(self, ids: Sequence[int]) -> None:
        wanted = set(ids)
        with self._lock:
            kept: deque[Op] = deque()
            for op in self._waiting:
                if op.id in wanted:
                    self._ended.append(_cancelled(op))
                else:
                    kept.append(op)
            self._waiting = kept
        self.inner.cancel(ids)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._ended.extend(_cancelled(op) for op in self._waiting)
            self._waiting.clear()
        self.inner.close()


def _cancelled(op: Op) -> Completion:
    now = time.monotonic()
    return Completion(op.id, Status.CANCELLED, started=now, finished=now, requests=0)
