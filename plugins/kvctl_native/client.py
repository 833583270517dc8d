"""Control requests to a node: a pool of persistent connections, one request each at a time, whole answers in memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvctl.core.errors import IncompatibleError, KvctlError, MemberDownError, TransientError
from kvctl.transports.wire import ClosedError, Connection, Head, ProtocolError, converse
from kvctl_native.errors import Doing, from_connection, from_status, parse_error_body
from kvctl_native.route import Route

__all__ = ["Call", "Client", "converse"]

_BODY_LIMIT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `key` is full, `shown` what messages call it."""

    method: str
    key: str
    shown: str
    doing: Doing
    query: str = ""
    span: tuple[int, int] | None = None
    if_match: str | None = None
    if_absent: bool = False
    body: memoryview | None = None


class Client:
    """Thread-safe. Goes to the next endpoint when one does not connect."""

    def __init__(self, routes: Sequence[Route], url: str) -> None:
        self._routes = tuple(routes)
        self._url = url
        self._idle: list[tuple[Route, Connection]] = []
        self._lock = threading.Lock()
        self._closed = False

    def request(self, call: Call) -> tuple[Head, bytes]:
        """A 2xx answer and its body. Raises KvctlError for any other."""
        problems: list[KvctlError] = []
        for route in self._routes:
            try:
                head, body = self._over(route, call)
            except MemberDownError as problem:
                if problem.details.get("sent"):
                    raise
                problems.append(problem)
                continue
            if 200 <= head.status < 300:
                return head, body
            raise self._refusal(call, head, body)
        raise problems[-1]

    def _over(self, route: Route, call: Call) -> tuple[Head, bytes]:
        what = f"{call.doing} {call.shown}".strip()
        connection = self._take(route)
        reused = connection is not None
        while True:
            try:
                connection = connection or route.connect()
            except OSError as problem:
                raise from_connection(route.endpoint, problem, doing=what) from None
            keep = False
            try:
                head, body, keep = self._exchange(route, connection, call)
                return head, body
            except ClosedError as problem:
                # an idle connection that the node closes at the same moment says nothing about the request; but a
                # conditional put that was carried out would fail its own condition
                if problem.before_answer and reused and not (call.if_absent or call.if_match):
                    reused = False
                    connection.close()
                    connection = None
                    continue
                raise _sent(from_connection(route.endpoint, problem, doing=what)) from None
            except OSError as problem:
                raise _sent(from_connection(route.endpoint, problem, doing=what)) from None
            except ProtocolError as problem:
                raise IncompatibleError(
                    f"{route.endpoint}: {call.shown}: not an answer of a storage node", cause=str(problem)
                ) from None
            finally:
                if connection is not None:
                    self._give_back(route, connection, keep=keep)

    def _exchange(self, route: Route, connection: Connection, call: Call) -> tuple[Head, bytes, bool]:
        length = len(call.body) if call.body is not None else None
        head = route.head(
            call.method, call.key, query=call.query, span=call.span,
            if_match=call.if_match, if_absent=call.if_absent, length=length,
        )  # fmt: skip
        answer = converse(connection, head, call.body)
        if call.method == "HEAD" or answer.status == 204:
            return answer, b"", answer.keep_alive and not answer.rest
        size = answer.content_length
        if size is None or answer.chunked or size > _BODY_LIMIT:
            return answer, connection.read_small(answer) or b"", False
        data = bytearray(size)
        got = connection.read_body(answer, memoryview(data))
        if got != size:
            raise TransientError(f"{self._url}: {call.shown}: the answer ended early", cause=f"{got} of {size} bytes")
        return answer, bytes(data), answer.keep_alive

    def _refusal(self, call: Call, head: Head, body: bytes) -> KvctlError:
        code, message = parse_error_body(body)
        error = from_status(self._url, call.shown, head.status, code, message, doing=call.doing)
        error.details["date"] = head.get("date")
        return error

    def _take(self, route: Route) -> Connection | None:
        while True:
            with self._lock:
                mine = next((item for item in reversed(self._idle) if item[0] is route), None)
                if mine is None:
                    return None
                self._idle.remove(mine)
            if not mine[1].is_stale():
                return mine[1]
            mine[1].close()

    def _give_back(self, route: Route, connection: Connection, *, keep: bool) -> None:
        with self._lock:
            if keep and not self._closed:
                self._idle.append((route, connection))
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._closed = True
        for _, connection in idle:
            connection.close()


def _sent(error: KvctlError) -> KvctlError:
    """Marks that the node may have seen the request: another endpoint must not be asked the same at once."""
    error.details["sent"] = True
    return error
