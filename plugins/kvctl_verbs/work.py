"""One request of the node's engine: a range of a file, in pieces, into a client's memory or out of it.

A GET's writes are told of in groups only: a completion costs system calls, and one stands for all that was posted
before it. Nothing here takes a connection, or gives one back.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvctl.core.errors import KvctlError, MemberDownError, SizeMismatchError, TransientError, UsageError
from kvctl_verbs.bindings import load
from kvctl_verbs.connections import Connection, Settings
from kvctl_verbs.pool import Pool
from kvctl_verbs.token import RcToken

_LOOK: Final = 1 << 32  # the number of the read that follows the last write
_CLIENT_FAULTS: Final = ("WC_REM_ACCESS_ERR", "WC_REM_INV_REQ_ERR", "WC_REM_OP_ERR")


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


class StaleError(Exception):
    """The connection was dead before it moved anything."""

    def __init__(self, error: KvctlError) -> None:
        super().__init__(str(error))
        self.error = error


class Work:
    """One request on its connection. Pieces go back to the pool when no device uses them: at the end of a request
    that failed, after the queue pair is gone.
    """

    def __init__(
        self, connection: Connection, pool: Pool, options: Options, token: RcToken, request: NodeRequest, step: int
    ) -> None:
        """`step`: bytes that move at a time."""
        self.over = False
        self._connection = connection
        self._pool = pool
        self._options = options
        self._token = token
        self._request = request
        self._memory = pool.memory(connection.device)
        self._flying: deque[tuple[int, int, int]] = deque()  # piece, offset in the range, length; in order
        self._held: set[int] = set()
        self._next: int | None = None  # a piece, and how much of it is filled
        self._filled = 0
        self._posted = 0
        self._moved = 0
        self._step = step

    # -- a GET -----------------------------------------------------------------------------------------------------

    def write_out(self, fd: int, problem: Exception | None = None) -> None:
        """What is left of it. Raises `problem`, StaleError, or the errors of `RdmaEngine.send`."""
        with self._pieces():
            if problem is not None:
                raise problem
            while not self.over:
                self.write_more(fd)
                self.take_in(self._finished())

    def write_more(self, fd: int, *, wait: bool = True, cached: bool = False) -> bool:
        """Post what can be in flight. False: without waiting for memory or for a disk it goes no further, and what is
        in flight may be told of by none. `cached`: the file's system never waits.
        """
        while self._posted < self._request.length and len(self._flying) < self._options.connections.depth:
            if not self.fill_next(fd, wait=wait, cached=cached):
                return self._next is None and bool(self._flying)
            self._post()
        return True

    def fill_next(self, fd: int, *, wait: bool = True, cached: bool = False) -> bool:
        """Have the next piece full; False where that takes waiting. Arguments as for `write_more`."""
        if self._next is None:
            self._next = self._take(wait=wait)
        if self._next is None:
            return False
        if not self._filled:
            count = min(self._step, self._request.length - self._posted)
            if not self._fill(fd, self._next, count, wait=wait or cached):
                return False
            self._filled = count
        return True

    def _post(self) -> None:
        pair, pool, flying = self._connection.pair, self._pool, self._flying
        depth = self._options.connections.depth
        piece, count = self._next, self._filled
        assert piece is not None
        self._next, self._filled = None, 0
        address, remote, rkey = pool.address(piece), self._token.address + self._posted, self._token.rkey
        flying.append((piece, self._posted, count))
        self._posted += count
        if self._posted == self._request.length:
            if self._options.flush:
                # in the same order as the writes: they are in memory by then
                pair.write_and_look(piece, address, self._memory, count, remote, rkey, _LOOK, pool.scratch)
            else:
                pair.write(piece, address, self._memory, count, remote, rkey)
            return
        if len(flying) < depth:
            self._next = self._take(wait=False)
        # the one after which nothing more can be posted, and one on the way to it, so that the line does not run empty
        told = self._next is None or (len(flying) * 2) % depth == 0
        pair.write(piece, address, self._memory, count, remote, rkey, told=told)

    def take_in(self, ended: Sequence[int]) -> None:
        """What completions said of a GET."""
        for number in ended:
            while self._flying:
                piece, _, count = self._flying.popleft()
                self._give(piece)
                self._moved += count
                if piece == number:  # the look back stands for all
                    break
        self.over = self._moved == self._request.length

    # -- a PUT -----------------------------------------------------------------------------------------------------

    def read_in(self, fd: int) -> None:
        length, depth = self._request.length, self._options.connections.depth
        with self._pieces():
            while self._moved < length:
                while self._posted < length and len(self._flying) < depth:
                    piece = self._take()
                    if piece is None:
                        break
                    count = min(self._step, length - self._posted)
                    address = self._pool.address(piece)
                    self._connection.pair.read(
                        piece, address, self._memory, count, self._token.address + self._posted, self._token.rkey
                    )
                    self._flying.append((piece, self._posted, count))
                    self._posted += count
                for _ in self._finished():
                    piece, offset, count = self._flying.popleft()
                    self._drain(fd, offset, piece, count)
                    self._give(piece)
                    self._moved += count

    # -- both ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _pieces(self) -> Iterator[None]:
        """However the block ends, all pieces go back; after an error, with the connection's end before that."""
        try:
            yield
        except BaseException:
            # a device may still read from or write to the pieces until the queue pair is gone
            self._connection.close()
            raise
        finally:
            for piece in list(self._held):
                self._give(piece)

    def give_up(self) -> None:
        """When it returns, nothing moves any more, and no piece is held."""
        if self._flying:
            self._connection.close()
        for piece in list(self._held):
            self._give(piece)

    def _take(self, *, wait: bool = True) -> int | None:
        """A piece; waits for one only while none of this request's own is in flight."""
        wait = wait and not self._flying
        piece = self._pool.take(self._options.stall if wait else 0.0)
        if piece is None:
            if wait:
                raise TransientError("the node's transfer memory is in use", cause=f"{self._options.pool} bytes")
            return None
        self._held.add(piece)
        return piece

    def _give(self, piece: int) -> None:
        self._held.discard(piece)
        self._pool.give(piece)

    def _fill(self, fd: int, piece: int, count: int, *, wait: bool) -> bool:
        """The next bytes of the file; False where a disk has to be waited for."""
        view = self._pool.view(piece, count)
        offset = self._request.offset + self._posted
        got = 0
        while got < count:
            try:
                more = os.preadv(fd, [view[got:]], offset + got, 0 if wait else os.RWF_NOWAIT)
            except OSError:  # not cached, or a file system that cannot tell
                if wait:
                    raise
                return False
            if more == 0:
                raise SizeMismatchError(f"{self._request.key} ends at {offset + got}", cause="it was cut off meanwhile")
            got += more
        return True

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
            if found:
                return self.numbers(found)
            if others and not self._connection.alive():
                raise self._lost("the client closed the connection")
            if time.monotonic() > deadline:
                raise self._lost(f"nothing moved for {self._options.stall:g} s")

    def numbers(self, completions: Sequence[Any]) -> list[int]:
        """Of completions that are all good. Raises for one that is not."""
        for item in completions:
            if item.status != load()["WC_SUCCESS"]:
                raise self._error(item)
        return [item.wr_id for item in completions]

    def _error(self, item: Any) -> Exception:
        verbs = load()
        faults = {verbs[name]: name for name in _CLIENT_FAULTS}
        if item.status in faults:
            name = faults[item.status].removeprefix("WC_").lower()
            return UsageError("the client's memory is not registered as its RDMA token says", cause=name)
        if item.status in {verbs["WC_RETRY_EXC_ERR"], verbs["WC_RNR_RETRY_EXC_ERR"], verbs["WC_WR_FLUSH_ERR"]}:
            # of what was posted, the first that did not get there is the one that is told of
            moved = not self._flying or item.wr_id != self._flying[0][0]
            return self._lost(f"the client does not answer (completion status {item.status})", moved=moved)
        return KvctlError(f"an RDMA transfer of {self._request.key} failed", cause=f"completion status {item.status}")

    def _lost(self, why: str, *, moved: bool = False) -> Exception:
        place = self._connection.place
        error = MemberDownError(f"RDMA to the client at {place[0]}:{place[1]} broke", cause=why)
        return error if self._moved or moved else StaleError(error)
