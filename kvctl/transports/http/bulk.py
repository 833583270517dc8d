"""The transport: one lean request per range over persistent connections, bodies straight into memory.

One transport per endpoint. Small reads are done by the thread that polls, with the compiled reader (`CompiledReads`)
or without (`InlineReads`); all else, and anything under TLS, by worker threads that block, and a read's request is sent
before its worker wakes up. All take idle connections from one pool, and only a worker makes new ones. Every answer is
checked before its bytes count: status, length, `Content-Range` against the size that the object must have, ETag against
the version.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvctl.core.errors import KvctlError, UsageError
from kvctl.transports.api import Capabilities, Completion, Op
from kvctl.transports.http.compiled import CompiledReads
from kvctl.transports.http.dialect import Dialect
from kvctl.transports.http.inline import InlineReads, as_error, cut_off
from kvctl.transports.threaded import PACED_PIECE, OpCancelledError, ThreadedTransport
from kvctl.transports.views import advance, first_of
from kvctl.transports.wire import ClosedError, Connection, Head, ProtocolError, converse

# Reads up to here are done by the thread that polls, and any that is alone on its way: more of them at a time than it
# can copy is no gain.
INLINE: Final = 1 << 20
# The same for the compiled reader and its helpers. Longer ones it would do as fast as workers, which block in the
# kernel for all of a body: that takes a fifth less of this process's CPU.
COMPILED: Final = 4 << 20


@dataclass(slots=True)
class _Begun:
    """What is left to a worker of a read whose request was sent: the connection, unless that is lost, and the answer's
    head, if that has been read.
    """

    connection: Connection | None
    head: Head | None


class HttpTransport(ThreadedTransport):
    """See `kvctl.transports.api.Transport`."""

    def __init__(self, dialect: Dialect, *, name: str, threads: int, plain: bool, compiled: bool) -> None:
        """`plain`: connections have no TLS. `compiled`: reads are the compiled reader's (`pump.wanted`)."""
        super().__init__(Capabilities(max_in_flight=threads, zero_copy=plain, scatter=True, gather=True))
        self.name = name
        self.endpoint = dialect.endpoint
        self._dialect = dialect
        self._plain = plain
        self._idle: list[Connection] = []
        self._active: dict[int, Connection] = {}
        self._begun: dict[int, _Begun] = {}
        self._pool_lock = threading.Lock()
        self._ended = False
        self._compiled = compiled and plain
        self._most = COMPILED if self._compiled else INLINE
        self._inline: InlineReads | CompiledReads = (
            CompiledReads(dialect, threads, give_back=self._give_back, hand_over=self._hand_over)
            if self._compiled
            else InlineReads(dialect, give_back=self._give_back, hand_over=self._hand_over)
        )

    def describe(self, op: Op) -> str:
        """The request an operation becomes, for -v."""
        return self._dialect.describe(op)

    # -- the thread that polls -------------------------------------------------------------------------------------

    def submit(self, ops: Sequence[Op]) -> None:
        rest = [op for op in ops if not self._begin(op)] if self._plain else ops
        if rest:
            super().submit(rest)

    def _begin(self, op: Op) -> bool:
        """Send a read's request at once, where there is a connection for it."""
        if op.kind != "read" or op.length <= 0:
            return False
        ours = op.length <= self._most or self._is_idle
        with self._pool_lock:
            if not self._idle:
                return False
            connection = self._idle.pop()
        head = b""
        try:
            if (ours and self._compiled) or not connection.is_stale():  # the compiled reader looks itself
                head = self._dialect.read_head(op)
        except KvctlError:
            pass  # a worker meets it again, and tells
        finally:
            if not head:
                connection.close()
        if head and ours:
            return self._inline.start(op, connection, head)
        return bool(head) and self._send_ahead(op, connection, head)

    def _send_ahead(self, op: Op, connection: Connection, head: bytes) -> bool:
        """For a worker, which wakes up while the server is at it."""
        try:
            connection.send(head)
        except OSError:
            connection.close()
            return False
        self._hand_over(op, connection, None)
        return True

    @property
    def _is_idle(self) -> bool:
        """Nothing is on its way."""
        return not self._outstanding and not self._inline.busy

    def poll(self, timeout: float | None) -> list[Completion]:
        return self.poll_beside(self._inline, timeout)

    def tell(self) -> None:
        self._inline.wake()

    def cancel(self, ids: Sequence[int]) -> None:
        self._inline.cancel(set(ids))
        super().cancel(ids)

    def close(self) -> None:
        self._inline.close()
        super().close()
        with self._pool_lock:
            self._ended = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _hand_over(self, op: Op, connection: Connection | None, head: Head | None) -> None:
        self._begun[op.id] = _Begun(connection, head)
        try:
            super().submit([op])
        except KvctlError:
            self.drop(op.id)
            raise

    def drop(self, op_id: int) -> None:
        begun = self._begun.pop(op_id, None)
        if begun is not None and begun.connection is not None:
            begun.connection.close()

    # -- workers ---------------------------------------------------------------------------------------------------

    def perform(self, op: Op) -> int:
        if op.kind == "write" and (op.offset != 0 or (op.object_size is not None and op.object_size != op.length)):
            raise UsageError(f"{self._dialect.url}: {op.key}: {self.name} writes whole objects only")
        if op.kind == "read" and op.length <= 0:
            raise UsageError(f"{self._dialect.url}: {op.key}: a read of {op.length} bytes makes no sense")
        if op.kind == "write":
            self._dialect.refuse(op)
        begun = self._begun.pop(op.id, None)
        requests = 0 if begun is None else 1
        while True:
            head, sent = None, False
            if begun is not None and begun.connection is not None:
                connection, reused, head, sent = begun.connection, True, begun.head, True
                begun = None
            else:
                connection, reused = self._connect(op)
                requests += 1
            keep = False
            try:
                with _Interruptible(self, op, connection):
                    if op.kind == "write":
                        keep = self._write(op, connection)
                    else:
                        if not sent:
                            connection.send(self._dialect.read_head(op))
                        keep = self._read(op, connection, head or connection.read_head())
            except (OSError, ProtocolError) as problem:
                if self.is_cancelled(op.id):
                    raise OpCancelledError from None
                # an idle connection that the server closes at the same moment says nothing about the request
                if isinstance(problem, ClosedError) and problem.before_answer and reused and requests == 1:
                    continue
                raise as_error(self._dialect, op, problem) from problem
            except KvctlError as problem:
                if self._dialect.try_differently(op, problem):
                    continue
                raise
            finally:
                if keep and not connection.interrupted:
                    self._give_back(connection)
                else:
                    connection.close()
            return requests

    def interrupt(self, op_id: int) -> None:
        with self._pool_lock:
            connection = self._active.get(op_id)
            if connection is not None:
                connection.shutdown()

    def _connect(self, op: Op) -> tuple[Connection, bool]:
        """A connection, and whether it served before."""
        while True:
            with self._pool_lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                break
            if not connection.is_stale():
                return connection, True
            connection.close()
        try:
            return self._dialect.connect(), False
        except OSError as problem:
            raise self._dialect.broken(op, problem) from problem

    def _give_back(self, connection: Connection) -> None:
        with self._pool_lock:
            if not self._ended:
                self._idle.append(connection)
                return
        connection.close()

    def _read(self, op: Op, connection: Connection, head: Head) -> bool:
        if head.status not in {200, 206}:
            raise self._refusal(op, head, connection)
        self._dialect.check(op, head)
        got = connection.read_parts(head, op.parts) if op.parts else connection.read_body(head, op.view)
        if got != op.length:
            if connection.interrupted:
                raise OpCancelledError
            raise cut_off(self._dialect, op, got)
        return head.keep_alive

    def _write(self, op: Op, connection: Connection) -> bool:
        head = self._send_body(op, connection)
        if not 200 <= head.status < 300:
            raise self._refusal(op, head, connection)
        body = connection.read_small(head) if head.status != 204 else b""
        self._dialect.check_written(op, body or b"")
        return head.keep_alive and body is not None

    def _send_body(self, op: Op, connection: Connection) -> Head:
        if op.pace is None or not op.length:
            return converse(connection, self._dialect.write_head(op), *op.views)
        connection.send(self._dialect.write_head(op))
        left, to_come = [view for view in op.views if len(view)], op.length
        while to_come > PACED_PIECE:
            piece, asked = first_of(left, PACED_PIECE)
            op.pace(asked)
            if self.is_cancelled(op.id):
                raise OpCancelledError
            try:
                connection.send(b"", *piece)
            except OSError:  # a server that refuses: `converse` below reads what it says
                break
            advance(left, asked)
            to_come -= asked
        op.pace(min(to_come, PACED_PIECE))
        return converse(connection, b"", *left)

    def _refusal(self, op: Op, head: Head, connection: Connection) -> KvctlError:
        try:
            body = connection.read_small(head) or b""
        except (OSError, ProtocolError):
            body = b""
        return self._dialect.refusal(op, head, body)


class _Interruptible:
    """While an operation is on a connection, `interrupt` can find it."""

    def __init__(self, transport: HttpTransport, op: Op, connection: Connection) -> None:
        self._transport = transport
        self._id = op.id
        self._connection = connection

    def __enter__(self) -> None:
        with self._transport._pool_lock:
            self._transport._active[self._id] = self._connection
        if self._transport.is_cancelled(self._id):
            self._connection.shutdown()
            raise OpCancelledError

    def __exit__(self, *_: object) -> None:
        with self._transport._pool_lock:
            self._transport._active.pop(self._id, None)
