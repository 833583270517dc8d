"""Base for transports whose operations are blocking calls: a few worker threads, one queue in, one out.

System calls on big ranges release the GIL, so threads are enough to keep a device or a NIC busy; a worker
costs one hand-over per operation (MiB), never per byte.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from kvctl.core.errors import CapacityError, EnvError, KvctlError, UsageError
from kvctl.memory.buffers import Buffer
from kvctl.transports.api import Capabilities, Completion, Op, Registration, Status

# A write with `Op.pace` moves at most this much between two calls of it: about a millisecond's work.
PACED_PIECE: Final = 1 << 20


class NoRegistration:
    """For transports that need none: the kernel takes any address."""

    def close(self) -> None:
        return


class OpCancelledError(Exception):
    """Raised by `perform` when it noticed a cancel and the buffer is no longer touched."""


class AbandonedError(Exception):
    """Raised by `perform` when it gave up on what is still in flight: `error` says why. The operation ends as UNKNOWN,
    since its range may still be written to; `perform` keeps the memory from being used again.
    """

    def __init__(self, error: KvctlError) -> None:
        super().__init__(str(error))
        self.error = error


class Inline(Protocol):
    """Operations that are done by the thread that polls."""

    @property
    def busy(self) -> bool:
        """Some are under way, or have ended and were not told of."""
        ...

    def step(self, timeout: float | None) -> list[Completion]:
        """Wait up to `timeout` seconds for something to come, take it; what has ended."""
        ...


class ThreadedTransport(ABC):
    """Subclasses give `perform` (blocking, called on worker threads) and may override
    `close_worker` (frees per-thread state such as a connection) and `interrupt` (wakes a running op).
    """

    name = "threaded"
    lands = False  # whether `Op.landed` is called

    def __init__(self, capabilities: Capabilities, *, threads: int | None = None) -> None:
        """`threads`: workers, where fewer than `max_in_flight` serve best (the others' operations wait in line)."""
        self._capabilities = capabilities
        self._workers = threads or capabilities.max_in_flight
        self._inbox: queue.SimpleQueue[Op | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        # what the driver need not be woken for: it is told with what comes next
        self._told_later: deque[Completion] = deque()
        self._cancelled: set[int] = set()
        self._queued: set[int] = set()
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._outstanding = 0
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @abstractmethod
    def perform(self, op: Op) -> int:
        """Do `op`; return how many requests it took. Raises KvctlError, OpCancelledError or AbandonedError."""

    def close_worker(self) -> None:
        return

    def waited(self) -> int:
        """A count of this thread that grows when a device was waited for. Then the thread asks for the next bytes, and
        others look at these; what came out of memory it looks at itself (`Op.landed`).
        """
        return 0

    def interrupt(self, op_id: int) -> None:
        """Make the running `op_id` end soon, if that can be done safely."""

    def drop(self, op_id: int) -> None:
        """`op_id` has ended, and `perform` will not be called for it."""

    def tell(self) -> None:
        """A worker has put a completion where `poll` finds it: for those that wait for more than that."""

    def is_cancelled(self, op_id: int) -> bool:
        return op_id in self._cancelled

    def register(self, buffer: Buffer) -> Registration:
        if buffer.kind not in self._capabilities.memory_kinds:
            raise EnvError(f"transport {self.name} cannot move bytes to {buffer.kind} memory")
        return NoRegistration()

    def submit(self, ops: Sequence[Op]) -> None:
        with self._lock:
            if self._closed:
                raise EnvError(f"transport {self.name} is closed")
            wanted = min(self._workers, self._outstanding + len(ops))
            while len(self._threads) < wanted and self._start():
                pass
            self._outstanding += len(ops)
            self._queued.update(op.id for op in ops)
        for op in ops:
            self._inbox.put(op)

    def _start(self) -> bool:
        """One more worker. False when the system gives no more: those that are there do. Raises CapacityError when none
        is.
        """
        thread = threading.Thread(target=self._work, name=f"kvctl-{self.name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if self._threads:
                return False
            raise CapacityError(
                f"transport {self.name} can start no thread",
                cause=str(error),
                hint="raise the limits of processes and memory (ulimit -u, ulimit -v, the cgroup's)",
            ) from error
        self._threads.append(thread)
        return True

    def poll(self, timeout: float | None) -> list[Completion]:
        done: list[Completion] = []
        try:
            done.append(self._outbox.get(timeout=timeout) if timeout != 0 else self._outbox.get_nowait())
            while True:
                done.append(self._outbox.get_nowait())
        except queue.Empty:
            pass
        while self._told_later:
            done.append(self._told_later.popleft())
        with self._lock:
            self._outstanding -= len(done)
        return done

    def poll_beside(self, inline: Inline, timeout: float | None) -> list[Completion]:
        """As `poll`, for a transport whose polling thread does operations of its own; its `tell` has to wake them."""
        until = None if timeout is None else time.monotonic() + timeout
        left = timeout
        while inline.busy:
            done = inline.step(left if self._outbox.empty() else 0.0)
            if not self._outbox.empty():
                done += ThreadedTransport.poll(self, 0)
            if done or left == 0:
                return done
            if until is not None:
                left = max(0.0, until - time.monotonic())
        return ThreadedTransport.poll(self, left)

    def cancel(self, ids: Sequence[int]) -> None:
        with self._lock:
            # one that has ended stays ended: its id may be submitted again
            self._cancelled.update(op_id for op_id in ids if op_id in self._queued or op_id in self._running)
            running = [op_id for op_id in ids if op_id in self._running]
        for op_id in running:
            self.interrupt(op_id)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = list(self._threads)
            running = list(self._running)
            self._cancelled.update(running)
        for op_id in running:
            self.interrupt(op_id)
        for _ in threads:
            self._inbox.put(None)
        for thread in threads:
            thread.join(timeout=10)

    def _work(self) -> None:
        try:
            op = self._inbox.get()
            while op is not None:
                ended, landed = self._run(op)
                del op  # and with it the views of its parts
                if landed:
                    # nobody waits for this one: with the next at hand, the driver may sleep until there is more to do
                    try:
                        op = self._inbox.get_nowait()
                    except queue.Empty:
                        pass
                    else:
                        self._told_later.append(ended)
                        continue
                self._outbox.put(ended)
                self.tell()
                op = self._inbox.get()
        finally:
            self.close_worker()

    def _run(self, op: Op) -> tuple[Completion, bool]:
        """How it ended, and whether that was told to `Op.landed`."""
        started = time.monotonic()
        with self._lock:
            self._queued.discard(op.id)
            ended = self._closed or op.id in self._cancelled
            if ended:
                self._cancelled.discard(op.id)
            else:
                self._running.add(op.id)
        if ended:
            self.drop(op.id)
            return Completion(op.id, Status.CANCELLED, started=started, finished=started, requests=0), False
        status, error, requests = Status.DONE, None, 1
        looks = op.landed is not None and self.lands
        waited = self.waited() if looks else 0
        try:
            able = self._capabilities
            if op.parts and not (able.scatter if op.kind == "read" else able.gather):
                raise UsageError(f"transport {self.name} takes one place, not the {len(op.parts)} parts of {op.key}")
            requests = self.perform(op)
        except OpCancelledError:
            status = Status.CANCELLED
        except AbandonedError as problem:
            status, error = Status.UNKNOWN, problem.error
        except KvctlError as problem:
            status, error = Status.FAILED, problem
        except Exception as problem:  # a bug in a plug-in must not hang the load
            status = Status.FAILED
            error = KvctlError(
                f"transport {self.name} failed on {op.key}", cause=f"{type(problem).__name__}: {problem}"
            )
        finally:
            with self._lock:
                self._running.discard(op.id)
                self._cancelled.discard(op.id)
        if error is not None:
            forget_frames(error)
        finished = time.monotonic()
        if status is not Status.DONE:
            return Completion(op.id, status, 0, error, started, finished, requests), False
        done = Completion(op.id, status, op.length, None, started, finished, requests)
        if not looks or op.landed is None or self.waited() != waited:
            return done, False
        op.landed()
        return done, True


def forget_frames(error: BaseException | None) -> None:
    """Tracebacks keep the frames' locals, and so views of the buffer, alive for as long as the error is."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
