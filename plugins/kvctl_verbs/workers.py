"""One operation on a worker thread, from its memory to its checked answer, and what operations share.

An answer counts when it says that exactly the range, version and size asked for was placed. Where it does not come, or
tells of trouble, the queue pairs of that operation's seat are destroyed before it ends: from then on nothing reaches
the memory.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from kvctl.core.errors import (
    AuthError,
    EnvError,
    IncompatibleError,
    KvctlError,
    TransientError,
    UsageError,
)
from kvctl.memory.buffers import Buffer, HostBuffer
from kvctl.transports.api import HOST_KINDS, Capabilities, Op, Registration
from kvctl.transports.threaded import AbandonedError, NoRegistration, OpCancelledError, ThreadedTransport
from kvctl.transports.wire import ClosedError, Connection, ProtocolError, converse
from kvctl_verbs.answers import check_empty, check_placed
from kvctl_verbs.landing import Landing, Port
from kvctl_verbs.policy import Network
from kvctl_verbs.queues import Patience
from kvctl_verbs.rails import Balance, Rail
from kvctl_verbs.regions import Regions
from kvctl_verbs.seats import Seat
from kvctl_verbs.talk import Talk
from kvctl_verbs.token import MAX_SIZE, RcToken
from kvctl_verbs.windows import Windows

_NEVER_BEGUN: Final = frozenset({400, 401, 403, 404, 405, 411, 412, 413, 416, 431, 501})
_NOT_PINNED: Final = (errno.EFAULT, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Settings:
    """`rails`: devices to use; `peers`: addresses that may connect back, and `networks` of such; `arenas`: register
    what a load lands in as a whole; `windows`: and let each operation in by a memory window of its own; `most`: bytes
    that one token can name.
    """

    threads: int
    rails: tuple[Rail, ...]
    peers: tuple[str, ...]
    networks: tuple[Network, ...] = ()
    arenas: bool = True
    windows: bool = False
    most: int = MAX_SIZE
    patience: Patience = field(default_factory=Patience)


@dataclass(eq=False)
class _Running:
    """An operation under way on a worker thread. `connection`: for whoever cancels it."""

    seat: Seat
    connection: Connection | None = None


@dataclass(frozen=True, slots=True)
class _Range:
    """Registered memory of one operation. `copy`: where that is not the operation's own."""

    address: int
    rkey: int
    copy: memoryview | None = None


@dataclass(slots=True)
class _Over:
    """Whether an operation's answer means that nothing is in flight any more."""

    over: bool = False


class _StaleError(Exception):
    """The node had closed the idle HTTP connection: the same request again over a new one."""


def _part(op: Op, start: int, length: int) -> Op:
    """A part of a read: all of it, unless that is more than a token can name."""
    if length == op.length:
        return op
    return replace(op, offset=op.offset + start, buffer_offset=op.buffer_offset + start, length=length)


class RdmaWorkers(ThreadedTransport):
    """See `kvctl.transports.api.Transport`; `RdmaTransport` is all of it."""

    def __init__(self, name: str, talk: Talk, settings: Settings) -> None:
        """Raises EnvError when a device cannot be used."""
        super().__init__(Capabilities(memory_kinds=HOST_KINDS, max_in_flight=settings.threads, one_sided=True))
        self.name = name
        self.endpoint = talk.endpoint
        self._talk = talk
        self._settings = settings
        self._seats: list[Seat] = []  # that nobody sits on
        self._running_now: dict[int, _Running] = {}
        self._guard = threading.Lock()
        self._ended = False
        self._regions = Regions()
        self._bounces = False
        self._balance = Balance(len(settings.rails))
        self._landings: list[Landing] = []
        try:
            for rail in settings.rails:
                landing = Landing(rail.device, rail.ip, settings.peers, settings.networks, settings.patience)
                self._landings.append(landing)
                if settings.windows:
                    self._regions.windows[rail.device] = Windows(landing.device)
        except BaseException:
            self._regions.end_windows()
            self._end_landings()
            raise

    def describe(self, op: Op) -> str:
        """The request an operation becomes, for -v; its token is shown nowhere."""
        return self._talk.describe(op)

    def register(self, buffer: Buffer) -> Registration:
        """One registration per device. Memory of files is left to the single operations: pinning all of a file that
        may be larger than memory is not for us. So is everything with `memory=op`, where a node that writes past its
        range is stopped by the device.
        """
        super().register(buffer)
        if not self._settings.arenas or buffer.kind == "shared" or buffer.nbytes == 0:
            return NoRegistration()
        return self._regions.add(buffer.address, buffer.nbytes, [landing.device for landing in self._landings])

    def perform(self, op: Op) -> int:
        if op.kind == "write" and (op.offset != 0 or (op.object_size is not None and op.object_size != op.length)):
            raise UsageError(f"{self._talk.url}: {op.key}: {self.name} writes whole objects only")
        if op.kind == "read" and op.length <= 0:
            raise UsageError(f"{self._talk.url}: {op.key}: a read of {op.length} bytes makes no sense")
        running = _Running(self._take_seat())
        with self._guard:
            self._running_now[op.id] = running
        try:
            if op.kind == "write":
                return self._perform(op, running)
            most = self._settings.most
            starts = range(0, op.length, most)
            return sum(self._perform(_part(op, start, min(most, op.length - start)), running) for start in starts)
        finally:
            with self._guard:
                self._running_now.pop(op.id, None)
            self._give_back(running.seat)

    def _perform(self, op: Op, running: _Running) -> int:
        requests = 0
        refusal_seen: KvctlError | None = None
        while True:
            with self._balance.take(op.length) as rail:
                if rail is None:
                    raise AuthError(
                        f"{self.endpoint}: {self._talk.server} connects to none of this host's RDMA addresses",
                        cause=f"{', '.join(item.ip for item in self._settings.rails)}; {refusal_seen or 'as before'}",
                        hint="start the node with --rdma-allow CIDR, or name the right devices with devices=NAME,..",
                    )
                requests += 1
                try:
                    self._over(op, rail, running)
                except _StaleError:
                    continue
                except AuthError as problem:
                    if not self._talk.refuses_address(problem):
                        raise  # a matter of keys: the same on every device
                    refusal_seen = problem
                    self._balance.refuse(rail)
                    continue
                except TransientError:
                    self._balance.failed(rail)
                    raise
                self._balance.worked(rail)
                return requests

    def _over(self, op: Op, rail: int, running: _Running) -> None:
        landing, seat = self._landings[rail], running.seat
        connection, reused = self._connect(op, seat)
        port = self._port(seat, rail)
        with self._guard:
            running.connection = connection
        if self.is_cancelled(op.id):
            raise OpCancelledError
        try:
            with self._memory(op, landing, seat) as memory:
                with self._severed_unless_over(op, port) as over:
                    token = RcToken(landing.ip, port.number, memory.address, op.length, memory.rkey)
                    error = self._exchange(op, seat, connection, token, over)
                if error is None and memory.copy is not None and op.kind == "read":
                    op.view[:] = memory.copy
        except (OSError, ProtocolError) as problem:
            seat.drop()
            if self.is_cancelled(op.id):
                raise OpCancelledError from None
            if isinstance(problem, ClosedError) and problem.before_answer and reused:
                raise _StaleError from None  # an idle connection, closed by the node at the same moment
            raise self.broken(op, problem) from problem
        except BaseException:
            seat.drop()
            raise
        if error is not None:
            raise self._explained(error, landing)

    def _exchange(self, op: Op, seat: Seat, connection: Connection, token: RcToken, over: _Over) -> KvctlError | None:
        """One request and its answer; the error that the node answers with. Sets `over` when the answer means that
        nothing is in flight any more.
        """
        if self._has_body(op):
            head = converse(connection, self._talk.head(op, None), op.view)
        else:
            connection.send(self._talk.head(op, token.text() if op.length else ""))
            head = connection.read_head()
        if not 200 <= head.status < 300:
            body = connection.read_small(head)
            if body is None or not head.keep_alive:
                seat.drop()
            # what makes no sense was never begun; after other failures a server may still be at it
            over.over = head.status in _NEVER_BEGUN
            return self._talk.refusal(op, head, body or b"")
        name = f"{self._talk.url}: {op.key}"
        if op.kind == "read":
            check_placed(name, op, head)
        elif head.status != 204:
            check_empty(name, head)
        over.over = True
        if not head.keep_alive or connection.interrupted:
            seat.drop()
        return None

    def _has_body(self, op: Op) -> bool:
        """Objects that no token can name go up in a request's body: a PUT takes the whole object at once."""
        return op.kind == "write" and op.length > self._settings.most

    @contextlib.contextmanager
    def _severed_unless_over(self, op: Op, port: Port) -> Iterator[_Over]:
        """However it ends: unless the answer said so, nothing reaches the memory any more because the queue pairs are
        gone.
        """
        over = _Over()
        try:
            yield over
        finally:
            if not over.over:
                try:
                    port.sever()
                except Exception as problem:
                    raise AbandonedError(
                        TransientError(
                            f"{self.endpoint}: {op.key}: a transfer could not be ended", cause=str(problem),
                            hint="run the same command again",
                        )
                    ) from problem  # fmt: skip

    def _explained(self, error: KvctlError, landing: Landing) -> KvctlError:
        """A node that could not connect because we turned it away is told from one that cannot reach us."""
        if isinstance(error, TransientError) and landing.refused:
            error.hint = f"{landing.refused} tried to connect: allow it with --transport-opt peers={landing.refused}"
        return error

    @contextlib.contextmanager
    def _memory(self, op: Op, landing: Landing, seat: Seat) -> Iterator[_Range]:
        """The registered memory of an operation."""
        if op.length == 0 or self._has_body(op):
            yield _Range(0, 0)
            return
        address = op.buffer.address + op.buffer_offset
        with contextlib.ExitStack() as held:
            rkey = self._pinned(held, op, landing, address)
            if rkey is not None:
                yield _Range(address, rkey)
                return
            bounce = self._bounce(seat, op.length)
            if op.kind == "write":
                bounce.view[: op.length] = op.view
            rkey = held.enter_context(
                self._regions.covering(landing.device, bounce.address, op.length, writable=op.kind == "read")
            )
            yield _Range(bounce.address, rkey, bounce.view[: op.length])

    def _pinned(self, held: contextlib.ExitStack, op: Op, landing: Landing, address: int) -> int | None:
        """The rkey of the range itself; None for memory that the kernel lets no device write to: pages of files, since
        Linux 6.5, are gone through with memory of this seat's own, at the cost of a copy.
        """
        if self._bounces and op.buffer.kind == "shared":
            return None
        covering = self._regions.covering(landing.device, address, op.length, writable=op.kind == "read")
        try:
            return held.enter_context(covering)
        except EnvError as problem:
            if op.buffer.kind != "shared" or problem.details.get("errno") not in _NOT_PINNED:
                raise
            self._bounces = True
            return None

    def _bounce(self, seat: Seat, length: int) -> HostBuffer:
        """Memory for `length` bytes, the seat's own, registered once."""
        if seat.bounce is None or seat.bounce.nbytes < length:
            seat.free_bounce()
            seat.bounce = HostBuffer(length)
            devices = [landing.device for landing in self._landings]
            seat.bounce_region = self._regions.add(seat.bounce.address, length, devices)
        return seat.bounce

    def _connect(self, op: Op, seat: Seat) -> tuple[Connection, bool]:
        """The HTTP connection of a seat, and whether it served before."""
        if seat.connection is not None:
            if not seat.connection.is_stale():
                return seat.connection, True
            seat.drop()
        try:
            seat.connection = self._talk.connect()
        except OSError as problem:
            raise self._talk.broken(op, problem) from problem
        return seat.connection, False

    def _port(self, seat: Seat, rail: int) -> Port:
        port = seat.ports.get(rail)
        if port is None or port.severed:
            port = seat.ports[rail] = self._landings[rail].listen()
        return port

    def _take_seat(self) -> Seat:
        with self._guard:
            return self._seats.pop() if self._seats else Seat()

    def _give_back(self, seat: Seat) -> None:
        with self._guard:
            if not self._ended:
                # those that can be used at once are taken first
                self._seats.insert(len(self._seats) if seat.connection is not None else 0, seat)
                return
        seat.close()

    def broken(self, op: Op, problem: Exception) -> KvctlError:
        if isinstance(problem, ProtocolError):
            return IncompatibleError(
                f"{self.endpoint}: {op.key}: not an answer of {self._talk.server}", cause=str(problem)
            )
        return self._talk.broken(op, problem)

    def interrupt(self, op_id: int) -> None:
        with self._guard:
            running = self._running_now.get(op_id)
            if running is not None and running.connection is not None:
                running.connection.shutdown()

    def close(self) -> None:
        with self._guard:
            self._ended = True
        super().close()
        with self._guard:
            idle, self._seats = self._seats, []
        for seat in idle:
            seat.close()
        self._regions.end_windows()
        self._end_landings()
        self._regions.close()

    def _end_landings(self) -> None:
        landings, self._landings = self._landings, []
        for landing in landings:
            landing.close()
