"""The node's RDMA engine: entry point `verbs` of `kvctl.node_rdma`. See `kvctl.node.rdma_seam`.

A GET is written into the client's memory in pieces: read from the file into a registered piece, posted, the next one
read meanwhile. A PUT is read out of it the same way. One request uses one connection, and ends with it when anything
goes wrong: then the queue pair is destroyed before the request is answered.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from kvctl.core.errors import (
    AuthError,
    EnvError,
    KvctlError,
    MemberDownError,
    SizeMismatchError,
    TransientError,
    UsageError,
)
from kvctl.memory.buffers import round_up
from kvctl.transports.options import check_names, number
from kvctl_verbs import probe
from kvctl_verbs.bindings import load
from kvctl_verbs.connections import Connection, Connections, Devices, Settings
from kvctl_verbs.policy import Network, allowed
from kvctl_verbs.pool import Pool
from kvctl_verbs.queues import Patience
from kvctl_verbs.token import RcToken, parse_token

_OPTIONS: Final = (
    "connections", "depth", "flush", "idle", "in_flight", "per_client", "piece", "pool", "retries", "source", "stall",
    "timeout",
)  # fmt: skip
_FLUSH: Final = 1 << 32  # the number of the read that follows the last write
_SMALL: Final = 64 << 10  # bytes that are not worth cutting
_CLIENT_FAULTS: Final = ("WC_REM_ACCESS_ERR", "WC_REM_INV_REQ_ERR", "WC_REM_OP_ERR")


class NodeSettings(Protocol):
    """What the node says (`kvctl.node.rdma_seam.RdmaSettings`)."""

    @property
    def allow(self) -> tuple[str, ...]: ...
    @property
    def options(self) -> Mapping[str, str]: ...
    @property
    def drain(self) -> float: ...


class NodeRequest(Protocol):
    """One range of one request (`kvctl.node.rdma_seam.RdmaRequest`)."""

    @property
    def token(self) -> str: ...
    @property
    def peer(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Options:
    """`in_flight`: requests at once; `pool` and `piece`: bytes of transfer memory and of one piece; `depth` (in
    `connections`): pieces of a request in flight; `stall`: seconds without a piece arriving; `flush`: read one byte
    back before a GET is answered, which proves that all bytes before it are placed.
    """

    in_flight: int
    pool: int
    piece: int
    stall: float
    flush: bool
    connections: Settings


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
        self._lock = threading.Lock()
        self._written = self._read = self._failures = self._refused = self._running = 0

    @property
    def max_in_flight(self) -> int:
        return self._options.in_flight

    def size(self, token: str, dialect: Literal["scal", "s3"]) -> int:
        return parse_token(token).size

    def send(self, request: NodeRequest, fd: int) -> None:
        self._run(request, lambda work: work.write_out(fd, request.offset))
        with self._lock:
            self._written += request.length

    def receive(self, request: NodeRequest, fd: int) -> None:
        self._run(request, lambda work: work.read_in(fd))
        with self._lock:
            self._read += request.length

    def _run(self, request: NodeRequest, move: Callable[[_Work], None]) -> None:
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
        with self._lock:
            self._running += 1
            alone = self._running == 1
        try:
            self._move(token, request, move, alone=alone)
        finally:
            with self._lock:
                self._running -= 1

    def _move(self, token: RcToken, request: NodeRequest, move: Callable[[_Work], None], *, alone: bool) -> None:
        step = step_of(request.length, self._pool.piece, alone=alone)
        fresh = False
        while True:
            with self._connection(token, fresh=fresh) as connection:
                try:
                    move(_Work(connection, self._pool, self._options, token, request, step))
                    return
                except _StaleError as problem:
                    # an idle connection whose other end died unnoticed says nothing about the client: once more, anew
                    if fresh or connection.used == 0:
                        raise problem.error from None
                    fresh = True

    @contextlib.contextmanager
    def _connection(self, token: RcToken, *, fresh: bool) -> Iterator[Connection]:
        connection = self._connections.take((token.ip, token.port), fresh=fresh)
        try:
            yield connection
        except BaseException as problem:
            connection.broken = True
            if not isinstance(problem, _StaleError):
                with self._lock:
                    self._failures += 1
            raise
        finally:
            self._connections.give(connection)

    def metrics(self) -> Mapping[str, float]:
        return {
            "written_bytes_total": self._written,
            "read_bytes_total": self._read,
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
        self._pool.close()
        self._devices.close()


class _StaleError(Exception):
    """The connection was dead before it moved anything."""

    def __init__(self, error: KvctlError) -> None:
        super().__init__(str(error))
        self.error = error


class _Work:
    """One request on its connection. Pieces go back to the pool when no device uses them: at the end of a request
    that failed, after the queue pair is gone.
    """

    def __init__(
        self, connection: Connection, pool: Pool, options: Options, token: RcToken, request: NodeRequest, step: int
    ) -> None:
        """`step`: bytes that move at a time."""
        self._connection = connection
        self._pool = pool
        self._options = options
        self._token = token
        self._request = request
        self._memory = pool.memory(connection.device)
        self._flying: deque[tuple[int, int, int]] = deque()  # piece, offset in the range, length; in order
        self._held: set[int] = set()
        self._moved = 0
        self._step = step

    def write_out(self, fd: int, start: int) -> None:
        length, depth = self._request.length, self._options.connections.depth
        posted = 0
        flushing = False
        with self._pieces():
            while self._flying or posted < length or flushing:
                while posted < length and len(self._flying) < depth:
                    piece = self._take()
                    if piece is None:
                        break
                    count = min(self._step, length - posted)
                    self._fill(fd, start + posted, piece, count)
                    address = self._pool.address(piece)
                    self._connection.pair.write(
                        piece, address, self._memory, count, self._token.address + posted, self._token.rkey
                    )
                    self._flying.append((piece, posted, count))
                    posted += count
                if posted == length and self._options.flush and not flushing and self._moved < length:
                    # a byte read back after the writes, in the same order: the writes are in memory by then
                    last = self._token.address + length - 1
                    self._connection.pair.read(_FLUSH, self._pool.scratch, self._memory, 1, last, self._token.rkey)
                    flushing = True
                for number in self._finished():
                    if number == _FLUSH:
                        flushing = False
                    else:
                        piece, _, count = self._flying.popleft()
                        self._give(piece)
                        self._moved += count

    def read_in(self, fd: int) -> None:
        length, depth = self._request.length, self._options.connections.depth
        posted = 0
        with self._pieces():
            while self._moved < length:
                while posted < length and len(self._flying) < depth:
                    piece = self._take()
                    if piece is None:
                        break
                    count = min(self._step, length - posted)
                    address = self._pool.address(piece)
                    self._connection.pair.read(
                        piece, address, self._memory, count, self._token.address + posted, self._token.rkey
                    )
                    self._flying.append((piece, posted, count))
                    posted += count
                for _ in self._finished():
                    piece, offset, count = self._flying.popleft()
                    self._drain(fd, offset, piece, count)
                    self._give(piece)
                    self._moved += count

    @contextlib.contextmanager
    def _pieces(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # a device may still read from or write to the pieces until the queue pair is gone
            self._connection.close()
            raise
        finally:
            for piece in list(self._held):
                self._give(piece)

    def _take(self) -> int | None:
        """A piece; waits for one only while none of this request's own is in flight."""
        piece = self._pool.take(0.0 if self._flying else self._options.stall)
        if piece is None:
            if not self._flying:
                raise TransientError("the node's transfer memory is in use", cause=f"{self._options.pool} bytes")
            return None
        self._held.add(piece)
        return piece

    def _give(self, piece: int) -> None:
        self._held.discard(piece)
        self._pool.give(piece)

    def _fill(self, fd: int, offset: int, piece: int, count: int) -> None:
        view = self._pool.view(piece, count)
        got = 0
        while got < count:
            more = os.preadv(fd, [view[got:]], offset + got)
            if more == 0:
                raise SizeMismatchError(f"{self._request.key} ends at {offset + got}", cause="it was cut off meanwhile")
            got += more

    def _drain(self, fd: int, offset: int, piece: int, count: int) -> None:
        view = self._pool.view(piece, count)
        done = 0
        while done < count:
            done += os.pwrite(fd, view[done:], offset + done)

    def _finished(self) -> list[int]:
        """Numbers of what has ended well, at least one. Raises for what has not, and when nothing ends in time."""
        deadline = time.monotonic() + self._options.stall
        while True:
            found, others = self._connection.completions.wait(deadline - time.monotonic())
            for item in found:
                if item.status != load()["WC_SUCCESS"]:
                    raise self._error(item)
            if found:
                return [item.wr_id for item in found]
            if others and not self._connection.alive():
                raise self._lost("the client closed the connection")
            if time.monotonic() > deadline:
                raise self._lost(f"nothing moved for {self._options.stall:g} s")

    def _error(self, item: Any) -> Exception:
        verbs = load()
        faults = {verbs[name]: name for name in _CLIENT_FAULTS}
        if item.status in faults:
            name = faults[item.status].removeprefix("WC_").lower()
            return UsageError("the client's memory is not registered as its RDMA token says", cause=name)
        if item.status in {verbs["WC_RETRY_EXC_ERR"], verbs["WC_RNR_RETRY_EXC_ERR"], verbs["WC_WR_FLUSH_ERR"]}:
            return self._lost(f"the client does not answer (completion status {item.status})")
        return KvctlError(f"an RDMA transfer of {self._request.key} failed", cause=f"completion status {item.status}")

    def _lost(self, why: str) -> Exception:
        place = self._connection.place
        error = MemberDownError(f"RDMA to the client at {place[0]}:{place[1]} broke", cause=why)
        return error if self._moved else _StaleError(error)


def make(settings: NodeSettings) -> VerbsEngine:
    """The entry point. Raises EnvError where it cannot run."""
    return VerbsEngine(settings)
