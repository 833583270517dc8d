"""GETs that the node's event loop carries out itself, where nothing has to be waited for but the device: handing one to
a thread and back costs more than a small one takes. See `kvctl.node.rdma_seam.LoopEngine`.

Connections are watched by one descriptor for all. A thread that takes such a connection ends that first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvctl_verbs.connections import Connection, Watch
from kvctl_verbs.token import RcToken
from kvctl_verbs.work import NodeRequest, Work


@dataclass(frozen=True, slots=True)
class Ends:
    """What the engine does with a flight: `landed` (all is placed), `finish` (wait for the rest; blocking), `dropped`
    (it is given up, its work released).
    """

    landed: Callable[[Flight], None]
    finish: Callable[[Flight], None]
    dropped: Callable[[Flight], None]


class Flight:
    """One GET. It belongs to the loop's thread; from `finish` on to the thread that called it."""

    __slots__ = (
        "_ends", "_flights", "cached", "connection", "fd", "over", "placed", "problem", "request", "stuck", "token",
        "work",
    )  # fmt: skip

    def __init__(
        self, flights: Flights, ends: Ends, connection: Connection, work: Work, token: RcToken, request: NodeRequest,
        fd: int, *, cached: bool,
    ) -> None:  # fmt: skip
        self.connection: Final = connection
        self.work: Final = work
        self.token: Final = token
        self.request: Final = request
        self.fd: Final = fd
        self.cached: Final = cached
        self.placed = False
        self.stuck = False
        self.over = False  # the connection and the pieces are given back
        self.problem: Exception | None = None
        self._flights = flights
        self._ends = ends

    def go(self) -> None:
        self._step()
        if not self.placed and not self.stuck:
            self._flights.watch(self)

    def wake(self) -> None:
        """The connection's descriptor is readable."""
        self.connection.completions.take_event()
        self._step()

    def _step(self) -> None:
        completions = self.connection.completions
        try:
            while not self.work.over:
                if not self.work.write_more(self.fd, wait=False, cached=self.cached):
                    self.stuck = True
                    return
                ended = completions.poll() or completions.arm()
                if not ended:
                    return
                self.work.take_in(self.work.numbers(ended))
        except Exception as problem:  # pyverbs' own among them; `finish` raises it where it can be told
            self.problem, self.stuck = problem, True
            return
        self.placed = self.over = True
        self._ends.landed(self)

    def leave(self) -> None:
        self.stuck = True
        self._flights.forget(self)
        self._flights.drop(self.connection)

    def finish(self) -> None:
        self.over = True
        self._ends.finish(self)
        self.placed = True

    def abandon(self) -> None:
        if not self.over:
            self.over = True
            self._flights.forget(self)
            self._ends.dropped(self)


class Flights:
    """Those that are in the air. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._watch = Watch()
        self._by_fd: dict[int, Flight] = {}

    @property
    def fd(self) -> int:
        return self._watch.fd

    def watch(self, flight: Flight) -> None:
        self._watch.add(flight.connection)
        self._by_fd[flight.connection.completions.fd] = flight

    def forget(self, flight: Flight) -> None:
        if self._by_fd.get(flight.connection.completions.fd) is flight:
            del self._by_fd[flight.connection.completions.fd]

    def drop(self, connection: Connection) -> None:
        self._watch.drop(connection.completions.fd)

    def ready(self) -> list[Flight]:
        """Those that are placed, or stuck, since it was asked before. Never waits."""
        found = []
        for fd in self._watch.readable():
            flight = self._by_fd.get(fd)
            if flight is None:
                self._watch.drop(fd)  # an event that nobody waits for
                continue
            flight.wake()
            if flight.placed or flight.stuck:
                self.forget(flight)
                found.append(flight)
        return found

    def close(self) -> None:
        self._watch.close()
