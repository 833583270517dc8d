"""Bulk by RDMA: small HTTP requests with a token that names memory instead of a body; the server moves the bytes.

One transport per endpoint. Each operation has a seat for itself: an HTTP connection and, per device, a listener that
the server connects back to. Reads are asked for by the thread that polls, where a seat is ready (`inline.py`), all else
is done by worker threads that block (`workers.py`). No more are under way than there may be threads; the others wait in
a line, and are begun when `poll` has told of an end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvctl.core.errors import EnvError, KvctlError
from kvctl.transports.api import Completion, Op, Status
from kvctl.transports.wire import Head
from kvctl_verbs.answers import check_placed
from kvctl_verbs.inline import Asked, Inline
from kvctl_verbs.seats import Seat
from kvctl_verbs.talk import Talk
from kvctl_verbs.token import RcToken
from kvctl_verbs.workers import RdmaWorkers, Settings


class RdmaTransport(RdmaWorkers):
    """See `kvctl.transports.api.Transport`."""

    def __init__(self, name: str, talk: Talk, settings: Settings) -> None:
        """Raises EnvError when a device cannot be used."""
        super().__init__(name, talk, settings)
        self._inline = Inline(self)
        self._line: deque[Op] = deque()  # waits for others to end
        self._under_way = 0
        self._starting: set[int] = set()  # out of the line, and not yet where `cancel` finds it
        self._late: set[int] = set()  # cancelled meanwhile

    def submit(self, ops: Sequence[Op]) -> None:
        with self._guard:
            if self._ended:
                raise EnvError(f"transport {self.name} is closed")
            self._line.extend(ops)
            found = self._next()
        self._go_on(found)

    def poll(self, timeout: float | None) -> list[Completion]:
        done = self.poll_beside(self._inline, timeout)
        with self._guard:
            self._under_way -= len(done)
            found = self._next()
        self._go_on(found)
        return done

    def _next(self) -> list[tuple[Op, Seat | None]]:
        """What there is room for, with a seat that is ready (under the guard)."""
        found: list[tuple[Op, Seat | None]] = []
        while self._line and self._under_way < self._settings.threads and not self._ended:
            self._under_way += 1
            self._starting.add(self._line[0].id)
            ready = bool(self._seats) and self._seats[-1].connection is not None
            found.append((self._line.popleft(), self._seats.pop() if ready else None))
        return found

    def _go_on(self, found: Sequence[tuple[Op, Seat | None]]) -> None:
        if not found:
            return
        for op, seat in found:
            try:
                if seat is None or not self._begin(op, seat):
                    super().submit([op])
            except EnvError:  # closed meanwhile
                self._tell_cancelled([op])
        with self._guard:
            late, self._late = self._late, set()
            self._starting.clear()
        if late:
            self.cancel(list(late))

    def _begin(self, op: Op, seat: Seat) -> bool:
        """Ask for a read at once, where what takes time is there: registered memory, and a connection."""
        settings, connection = self._settings, seat.connection
        address = op.buffer.address + op.buffer_offset
        if (
            op.kind != "read"
            or not 0 < op.length <= settings.most
            or settings.windows
            or connection is None
            or self._regions.find(settings.rails[0].device, address, op.length) is None
            or connection.is_stale()
            or (rail := self._balance.choose(op.length)) is None
        ):
            self._give_back(seat)
            return False
        try:
            port = self._port(seat, rail)
            memory = self._regions.find(settings.rails[rail].device, address, op.length)
            if memory is not None:
                token = RcToken(port.landing.ip, port.number, address, op.length, memory.rkey)
                asked = Asked(op, seat, connection, rail, port, self._talk.timeout)
                if self._inline.start(asked, self._talk.head(op, token.text())):
                    return True
        except KvctlError:
            pass  # a worker meets it again, and tells
        self._balance.over(rail, op.length)
        self._give_back(seat)
        return False

    def tell(self) -> None:
        self._inline.wake()

    def judge(self, op: Op, head: Head) -> bool:
        if not 200 <= head.status < 300:
            return False
        check_placed(f"{self._talk.url}: {op.key}", op, head)
        return True

    def release(self, asked: Asked, status: Status) -> None:
        worked = {Status.DONE: True, Status.FAILED: False}.get(status)
        self._balance.over(asked.rail, asked.op.length, worked=worked)
        self._give_back(asked.seat)

    def again(self, op: Op) -> None:
        super().submit([op])

    def cancel(self, ids: Sequence[int]) -> None:
        wanted = set(ids)
        with self._guard:
            waiting = [op for op in self._line if op.id in wanted]
            self._line = deque(op for op in self._line if op.id not in wanted)
            self._late |= wanted & self._starting
            self._under_way += len(waiting)  # until they are told
        self._tell_cancelled(waiting)
        self._inline.cancel(wanted)
        super().cancel(ids)

    def _tell_cancelled(self, ops: Sequence[Op]) -> None:
        """Those that were never begun."""
        with self._lock:
            self._outstanding += len(ops)
        for op in ops:
            self._outbox.put(Completion(op.id, Status.CANCELLED, requests=0))
        if ops:
            self.tell()

    def close(self) -> None:
        with self._guard:
            if self._ended:
                return
            self._ended = True
            waiting, self._line = list(self._line), deque()
            self._under_way += len(waiting)
        self._inline.close()
        self._tell_cancelled(waiting)
        super().close()
