"""The node's RDMA engine: entry point `verbs` of `kvctl.node_rdma`. See `kvctl.node.rdma_seam`.

A GET is written into the client's memory in pieces: read from the file into a registered piece, posted, the next one
read meanwhile. A PUT is read out of it the same way. One request uses one connection, and ends with it when anything
goes wrong: then the queue pair is destroyed before the request is answered.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, Protocol

from kvctl.core.errors import AuthError, EnvError, KvctlError, UsageError
from kvctl.memory.buffers import round_up
from kvctl.transports.options import check_names, number
from kvctl_verbs import probe
from kvctl_verbs.connections import Connection, Connections, Devices, Settings
from kvctl_verbs.flights import Ends, Flight, Flights
from kvctl_verbs.policy import Network, allowed
from kvctl_verbs.pool import Pool
from kvctl_verbs.queues import Patience
from kvctl_verbs.token import RcToken, parse_token
from kvctl_verbs.work import NodeRequest, Options, StaleError, Work

_OPTIONS: Final = (
    "connections", "depth", "flush", "idle", "in_flight", "per_client", "piece", "pool", "retries", "source", "stall",
    "timeout",
)  # fmt: skip
_SMALL: Final = 64 << 10  # bytes that are not worth cutting
_ALONE: Final = 4 << 20  # bytes of a request that the loop carries out when it has nothing else to do


class NodeSettings(Protocol):
    """What the node says (`kvctl.node.rdma_seam.RdmaSettings`)."""

    @property
    def allow(self) -> tuple[str, ...]: ...
    @property
    def options(self) -> Mapping[str, str]: ...
    @property
    def drain(self) -> float: ...


def parse_options(options: Mapping[str, str]) -> Options:
    """Raises UsageError."""
    check_names("verbs engine", options, _OPTIONS)
    piece = number(options, "piece", 1 << 20, 4096, 64 << 20)
    pool = number(options, "pool", 64 << 20, 1 << 16, 1 << 36)
    if pool < 2 * piece:
        raise UsageError(f"pool={pool} holds no two pieces of {piece} bytes")
    flush = options.get("flush", "true")
    if flush not in {"true", "false"}:
        raise UsageError(f"flush={flush} means nothing", hint="use true or false")
    settings = Settings(
        source=options.get("source"),
        idle_seconds=number(options, "idle", 120, 1, 86400),
        per_client=number(options, "per_client", 8, 1, 1024),
        most=number(options, "connections", 1024, 1, 1 << 20),
        depth=number(options, "depth", 8, 1, 256),
        patience=Patience(number(options, "timeout", 16, 8, 31), number(options, "retries", 3, 0, 7)),
    )
    return Options(
        number(options, "in_flight", 16, 1, 1024), pool, piece, number(options, "stall", 10, 1, 3600), flush == "true",
        settings,
    )  # fmt: skip


def parse_allow(texts: tuple[str, ...]) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


def step_of(length: int, piece: int, *, alone: bool) -> int:
    """Bytes that move at a time: a request of few pieces is cut into quarters when no other runs, so that the file is
    read while the device writes; what others do overlaps with it by itself, and each cut costs system calls. Pure.
    """
    return min(piece, max(_SMALL, round_up(-(-length // 4)))) if alone else piece


class VerbsEngine:
    """See `kvctl.node.rdma_seam.RdmaEngine`."""

    def __init__(self, settings: NodeSettings) -> None:
        """Raises EnvError where there is no RDMA, UsageError for an option that means nothing."""
        self._options = parse_options(settings.options)
        self._allow = parse_allow(settings.allow)
        found = probe.probe()
        if not found.available:
            raise EnvError(found.reason, hint=found.hint)
        self._devices = Devices()
        self._pool = Pool(self._options.pool // self._options.piece, self._options.piece)
        self._connections = Connections(self._options.connections, self._devices)
        self._flights = Flights()
        self._ends = Ends(self._landed, self._finish, self._dropped)
        self._lock = threading.Lock()
        self._written = self._read = self._failures = self._refused = self._running = self._quick = 0

    @property
    def max_in_flight(self) -> int:
        return self._options.in_flight

    def size(self, token: str, dialect: Literal["scal", "s3"]) -> int:
        return parse_token(token).size

    def send(self, request: NodeRequest, fd: int) -> None:
        self._run(request, lambda work: work.write_out(fd))
        with self._lock:
            self._written += request.length

    def receive(self, request: NodeRequest, fd: int) -> None:
        self._run(request, lambda work: work.read_in(fd))
        with self._lock:
            self._read += request.length

    # -- for the node's loop ----------------------------------------------------------------------------------------

    @property
    def fd(self) -> int:
        return self._flights.fd

    def begin(self, request: NodeRequest, fd: int, *, cached: bool) -> Flight | None:
        """See `kvctl.node.rdma_seam.LoopEngine`: for as much as one piece, or some where no other request runs, if a
        connection is idle and a piece free. Several large ones are copied faster by several threads. What is refused is
        left to `send`, which knows what to say.
        """
        running = self._running
        most = self._pool.piece if running else max(self._pool.piece, _ALONE)
        if not 0 < request.length <= most or running >= self._options.in_flight:
            return None
        try:
            token = parse_token(request.token)
        except KvctlError:
            return None
        if token.size < request.length or not allowed(token.ip, (request.peer,), self._allow):
            return None
        connection = self._connections.take_idle((token.ip, token.port))
        if connection is None:
            return None
        step = step_of(request.length, self._pool.piece, alone=self._enter())
        try:
            work = Work(connection, self._pool, self._options, token, request, step)
        except KvctlError:  # the transfer memory cannot be registered with its device
            self._connections.give(connection)
            self._leave()
            return None
        flight = Flight(self._flights, self._ends, connection, work, token, request, fd, cached=cached)
        with contextlib.suppress(KvctlError, OSError):
            if work.fill_next(fd, wait=False, cached=cached):
                return flight
        flight.abandon()
        return None

    def ready(self) -> Sequence[Flight]:
        return self._flights.ready()

    def _landed(self, flight: Flight) -> None:
        self._connections.give(flight.connection)
        self._leave(written=flight.request.length, quick=1)

    def _finish(self, flight: Flight) -> None:
        request, token = flight.request, flight.token
        try:
            if not self._attempt(flight.connection, lambda: flight.work.write_out(flight.fd, flight.problem)):
                connection = self._connections.take((token.ip, token.port), fresh=True)
                work = Work(connection, self._pool, self._options, token, request, self._pool.piece)
                self._attempt(connection, lambda: work.write_out(flight.fd), last=True)
        finally:
            self._leave()
        with self._lock:
            self._written += request.length

    def _dropped(self, flight: Flight) -> None:
        flight.work.give_up()
        self._connections.give(flight.connection)
        self._leave()

    # -- for its threads --------------------------------------------------------------------------------------------

    def _run(self, request: NodeRequest, move: Callable[[Work], None]) -> None:
        token = parse_token(request.token)
        if token.size < request.length:
            raise UsageError(f"the token names {token.size} bytes of memory for {request.length}")
        if not allowed(token.ip, (request.peer,), self._allow):
            with self._lock:
                self._refused += 1
            raise AuthError(
                f"the node does not connect to {token.ip}: the request came from {request.peer}",
                hint="start the node with --rdma-allow CIDR, or let the client use the device on that address",
            )
        if request.length == 0:
            return
        alone = self._enter()
        try:
            self._move(token, request, move, step_of(request.length, self._pool.piece, alone=alone))
        finally:
            self._leave()

    def _enter(self) -> bool:
        """One more request runs; whether it is the only one."""
        with self._lock:
            self._running += 1
            return self._running == 1

    def _leave(self, *, written: int = 0, quick: int = 0) -> None:
        with self._lock:
            self._running -= 1
            self._written += written
            self._quick += quick

    def _move(self, token: RcToken, request: NodeRequest, move: Callable[[Work], None], step: int) -> None:
        place = (token.ip, token.port)

        def over(connection: Connection) -> Callable[[], None]:
            return lambda: move(Work(connection, self._pool, self._options, token, request, step))

        connection = self._connections.take(place)
        if not self._attempt(connection, over(connection)):
            connection = self._connections.take(place, fresh=True)
            self._attempt(connection, over(connection), last=True)

    def _attempt(self, connection: Connection, move: Callable[[], None], *, last: bool = False) -> bool:
        """Whether it was moved. An idle connection whose other end died unnoticed says nothing about the client: once
        more, anew.
        """
        with self._using(connection):
            try:
                move()
            except StaleError as problem:
                if last or connection.used == 0:
                    raise problem.error from None
                return False
        return True

    @contextlib.contextmanager
    def _using(self, connection: Connection) -> Iterator[None]:
        try:
            yield
        except BaseException as problem:
            connection.broken = True
            if not isinstance(problem, StaleError):
                with self._lock:
                    self._failures += 1
            raise
        finally:
            self._connections.give(connection)

    def metrics(self) -> Mapping[str, float]:
        return {
            "written_bytes_total": self._written,
            "read_bytes_total": self._read,
            "quick_total": self._quick,
            "failures_total": self._failures,
            "addresses_refused_total": self._refused,
            "connections": self._connections.count,
            "connections_made_total": self._connections.made,
            "connections_failed_total": self._connections.failed,
            "connections_dropped_total": self._connections.dropped,
            "pool_bytes": self._options.pool,
            "pool_free_pieces": self._pool.free,
        }

    def close(self) -> None:
        self._connections.close()
        self._flights.close()
        self._pool.close()
        self._devices.close()


def make(settings: NodeSettings) -> VerbsEngine:
    """The entry point. Raises EnvError where it cannot run."""
    return VerbsEngine(settings)
