"""The node's connections back to its clients: made on demand, kept, used by one request at a time.

One request has a queue pair for itself, so that an error or a deadline ends that request and no other. A client that
listens in one place and asks for several things at once gets several connections, or its requests take turns.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from dataclasses import dataclass, field
from typing import Final

from kvctl.core.errors import EnvError, KvctlError, MemberDownError, ThrottledError
from kvctl_verbs.cm import Channel, Ident, Kind
from kvctl_verbs.device import Device, open_device
from kvctl_verbs.queues import Completions, Patience, QueuePair, left

_SWEEP: Final = 2.0  # seconds between looks at idle connections

Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Settings:
    """`source`: local address to connect from (None: as routed). `per_client` and `most`: connections to one listener
    and in all. `depth`: operations of one request in flight. Times in seconds.
    """

    source: str | None = None
    connect_seconds: float = 5.0
    idle_seconds: float = 120.0
    turn_seconds: float = 30.0
    per_client: int = 8
    most: int = 1024
    depth: int = 8
    patience: Patience = field(default_factory=Patience)


class Connection:
    """One queue pair to a client. Belongs to whoever took it; `broken` ones are not kept."""

    def __init__(self, place: Place, settings: Settings, devices: Devices) -> None:
        """Connects. Raises MemberDownError, or EnvError for this host's own trouble."""
        self.place = place
        self.broken = False
        self.used = 0  # requests before this one
        self.watch: Watch | None = None
        self.since = time.monotonic()
        deadline = self.since + settings.connect_seconds
        with contextlib.ExitStack() as made:
            try:
                channel = Channel()
                made.callback(channel.close)
                ident = Ident(channel)
                made.callback(ident.close)
                wait = round(settings.connect_seconds * 1000)
                ident.resolve(settings.source, place[0], place[1], wait)
                _expect(channel, Kind.ADDR_RESOLVED, deadline)
                ident.route(wait)
                _expect(channel, Kind.ROUTE_RESOLVED, deadline)
                self.device = devices.open(ident.device or "")
                self.completions = Completions(self.device, settings.depth + 2)
                made.callback(self.completions.close)
                self.pair = QueuePair(self.device, self.completions.queue, settings.depth + 2)
                made.callback(self.pair.close)
                self.pair.prepare(ident)
                ident.connect(self.pair.number, settings.patience.retries)
                _expect(channel, Kind.CONNECT_RESPONSE, deadline)
                self.pair.start(ident, settings.patience)
                ident.establish()
            except (OSError, TimeoutError) as problem:
                raise _unreachable(place, str(problem)) from None
            except _RefusedError as problem:
                raise _unreachable(place, str(problem)) from None
            self._channel = channel
            self._ident = ident
            self.completions.watch(channel.fd)
            self._made = made.pop_all()

    def alive(self) -> bool:
        """Whether the client has not gone away meanwhile. Takes the event that says so."""
        try:
            while (event := self._channel.next()) is not None:
                if event.kind not in {Kind.ESTABLISHED, Kind.TIMEWAIT_EXIT}:
                    self.broken = True
        except OSError:
            self.broken = True
        return not self.broken

    def close(self) -> None:
        """When it returns, nothing moves over it any more."""
        self.broken = True
        watch = self.watch
        if watch is not None:
            watch.drop(self.completions.fd)
        with contextlib.suppress(Exception):  # the pair goes next, whatever the other end makes of this
            self._ident.disconnect()
        self._made.close()


class Watch:
    """One descriptor that is readable when completions came on any of the connections in it."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}

    @property
    def fd(self) -> int:
        return self._epoll.fileno()

    def add(self, connection: Connection) -> None:
        if connection.watch is None:
            self._epoll.register(connection.completions.fd, select.EPOLLIN)
            self._connections[connection.completions.fd] = connection
            connection.watch = self

    def readable(self) -> list[int]:
        """Descriptors of completions that may be there."""
        return [fd for fd, _ in self._epoll.poll(0)]

    def drop(self, fd: int) -> None:
        """The connection with this descriptor is in it no more. Any thread may, whose connection it is."""
        connection = self._connections.pop(fd, None)
        if connection is not None:
            connection.watch = None
            with contextlib.suppress(OSError, ValueError):  # either was closed meanwhile
                self._epoll.unregister(fd)

    def close(self) -> None:
        self._epoll.close()


class _RefusedError(Exception):
    """The connection manager said another thing than was wanted."""


def _expect(channel: Channel, kind: Kind, deadline: float) -> None:
    event = channel.wait(deadline)
    if event.kind is not kind:
        raise _RefusedError(f"{event.kind.name.lower().replace('_', ' ')} (status {event.status})")


def _unreachable(place: Place, why: str) -> KvctlError:
    return MemberDownError(f"no RDMA connection to the client at {place[0]}:{place[1]}", cause=why)


class Devices:
    """The devices of this host that connections use, opened once."""

    def __init__(self) -> None:
        self._open: dict[str, Device] = {}
        self._lock = threading.Lock()

    def open(self, name: str) -> Device:
        if not name:
            raise EnvError("the route to the client leads over no RDMA device")
        with self._lock:
            found = self._open.get(name)
            if found is None:
                found = self._open[name] = open_device(name)
            return found

    def close(self) -> None:
        for device in self._open.values():
            device.close()
        self._open.clear()


class Connections:
    """Connections by client, idle and busy. Thread-safe."""

    def __init__(self, settings: Settings, devices: Devices) -> None:
        self._settings = settings
        self._devices = devices
        self._changed = threading.Condition()
        self._idle: dict[Place, list[Connection]] = {}
        self._busy: dict[Place, int] = {}
        self._closed = threading.Event()
        self.made = 0
        self.failed = 0
        self.dropped = 0
        self._sweeper = threading.Thread(target=self._sweep, name="kvctl-rdma-sweep", daemon=True)
        self._sweeper.start()

    @property
    def count(self) -> int:
        with self._changed:
            return sum(self._busy.values()) + sum(len(found) for found in self._idle.values())

    def take(self, place: Place, *, fresh: bool = False) -> Connection:
        """A connection of one's own, a new one if `fresh`. Raises MemberDownError, ThrottledError or EnvError."""
        deadline = time.monotonic() + self._settings.turn_seconds
        failure: KvctlError | None = None
        while True:
            kept = self._reserve(place, deadline, fresh=fresh, failure=failure)
            if kept is not None:
                watch = kept.watch
                if watch is not None:
                    watch.drop(kept.completions.fd)
                if kept.alive():
                    return kept
                self._lose(kept)
                continue
            try:
                made = Connection(place, self._settings, self._devices)
            except MemberDownError as problem:
                failure = problem  # a client may take one connection only: then requests take turns on it
                with self._changed:
                    self.failed += 1
                    alone = self._leave(place) == 0 and not self._idle.get(place)
                if alone or fresh:
                    raise
            except BaseException:
                with self._changed:
                    self._leave(place)
                raise
            else:
                with self._changed:
                    self.made += 1
                return made

    def take_idle(self, place: Place) -> Connection | None:
        """One that is there and idle, without waiting for anything."""
        if not self._changed.acquire(blocking=False):
            return None
        try:
            idle = self._idle.get(place)
            # to lose a dead one takes time: whoever may wait does it
            if not idle or self._closed.is_set() or not idle[-1].alive():
                return None
            self._busy[place] = self._busy.get(place, 0) + 1
            return idle.pop()
        finally:
            self._changed.release()

    def _reserve(self, place: Place, deadline: float, *, fresh: bool, failure: KvctlError | None) -> Connection | None:
        """An idle connection, now counted as busy; None: the right to make one."""
        with self._changed:
            while True:
                if self._closed.is_set():
                    raise ThrottledError("the node is shutting down")
                idle = self._idle.get(place, [])
                if idle and not fresh:
                    self._busy[place] = self._busy.get(place, 0) + 1
                    return idle.pop()
                if idle:  # what sat beside a dead one is as dead
                    self._drop(idle.pop(), idle)
                    continue
                if failure is None and self._busy.get(place, 0) < self._settings.per_client and self._has_room():
                    self._busy[place] = self._busy.get(place, 0) + 1
                    return None
                if not self._busy.get(place) and failure is not None:
                    raise failure
                if not self._changed.wait(left(deadline)):
                    raise failure or ThrottledError(
                        f"no RDMA connection to the client at {place[0]}:{place[1]} is free",
                        cause=f"at most {self._settings.per_client} to one listener, {self._settings.most} in all",
                    )

    def _has_room(self) -> bool:
        """Whether one more may be made; the one that has been idle longest makes room (under the lock)."""
        idle = [one for kept in self._idle.values() for one in kept]
        if sum(self._busy.values()) + len(idle) < self._settings.most:
            return True
        if not idle:
            return False
        oldest = min(idle, key=lambda one: one.since)
        self._drop(oldest, self._idle[oldest.place])
        return True

    def _drop(self, connection: Connection, kept: list[Connection]) -> None:
        """End an idle one (under the lock: it takes as long as destroying a queue pair)."""
        if connection in kept:
            kept.remove(connection)
        if not kept:
            self._idle.pop(connection.place, None)
        self.dropped += 1
        connection.close()

    def give(self, connection: Connection) -> None:
        """Back; a broken one is closed: when this returns, nothing moves over it any more. Whether the client has gone
        away meanwhile is for who takes it next, and for the sweeper, to find: it is a system call.
        """
        connection.used += 1
        connection.since = time.monotonic()
        if connection.broken:
            self._lose(connection)
            return
        with self._changed:
            keep = not self._closed.is_set()
            if keep:
                self._idle.setdefault(connection.place, []).append(connection)
            self._leave(connection.place)
        if not keep:
            connection.close()

    def _lose(self, connection: Connection) -> None:
        connection.close()
        with self._changed:
            self.dropped += 1
            self._leave(connection.place)

    def _leave(self, place: Place) -> int:
        """One is busy no more (under the lock); how many still are."""
        rest = self._busy[place] - 1
        if rest:
            self._busy[place] = rest
        else:
            del self._busy[place]
        self._changed.notify_all()
        return rest

    def _sweep(self) -> None:
        """Ends connections whose client went away, or that have been idle for long. It waits for no condition that each
        request notifies: waking it takes as long as a small request.
        """
        while not self._closed.wait(_SWEEP):
            with self._changed:
                before = time.monotonic() - self._settings.idle_seconds
                ended: list[Connection] = []
                for place, idle in list(self._idle.items()):
                    gone = [one for one in idle if one.since < before or not one.alive()]
                    ended += gone
                    rest = [one for one in idle if one not in gone]
                    if rest:
                        self._idle[place] = rest
                    else:
                        del self._idle[place]
                self.dropped += len(ended)
            for connection in ended:
                connection.close()

    def close(self) -> None:
        """After all requests have ended."""
        with self._changed:
            self._closed.set()
            ended = [one for idle in self._idle.values() for one in idle]
            self._idle.clear()
            self._changed.notify_all()
        self._sweeper.join(timeout=2 * _SWEEP)
        for connection in ended:
            connection.close()
