"""Answers requests: which action a method and a target mean, what it needs, and what goes back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from kvctl.core.errors import KvctlError
from kvctl.node import listing
from kvctl.node.answers import PAGE, check_version, headers_of, iso_time, parse_limit, part, rdma_token
from kvctl.node.bodies import TruncatedError
from kvctl.node.channel import Channel
from kvctl.node.guard import Guard
from kvctl.node.messages import (
    HttpError,
    Request,
    answer_head,
    as_http,
    error_body,
    parse_request,
    parse_version,
)
from kvctl.node.metrics import CONTENT_TYPE, Metrics
from kvctl.node.openfiles import OpenFiles
from kvctl.node.plain import PlainChannel
from kvctl.node.quick import QuickReads, Sending
from kvctl.node.rdma_seam import Dialect, Flight, RdmaEngine, RdmaRequest
from kvctl.node.settings import Limits
from kvctl.node.tree import Draft, Tree, check_name
from kvctl.transports.node_auth import TOKEN_HEADER, Asked, Rights

_ROOT: Final = "/v1/"
_SMALL_BODY: Final = 1 << 16
_JSON: Final = {"content-type": "application/json"}
_METHODS: Final = "GET, HEAD, PUT, DELETE, COPY"


@dataclass(slots=True)
class _Exchange:
    """One request and how far its answer is. `status` 0: nothing was sent yet."""

    request: Request
    channel: Channel
    close: bool
    status: int = 0
    body_left: int = 0
    refusal: str = ""


class Service:
    """Belongs to the event loop's thread; blocking work goes to `pool`, RDMA to `rdma_pool`."""

    def __init__(
        self,
        tree: Tree,
        guard: Guard,
        metrics: Metrics,
        limits: Limits,
        pool: Executor,
        *,
        rdma: RdmaEngine | None = None,
        rdma_pool: Executor | None = None,
        rdma_missing: Sequence[str] = (),
        tell: Callable[[str], None] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.draining = False
        self.files = OpenFiles(tree)
        self.quick = QuickReads(self.files, guard, metrics, tell, in_memory=tree.in_memory, engine=rdma)
        self._tree = tree
        self._guard = guard
        self._metrics = metrics
        self._limits = limits
        self._pool = pool
        self._rdma = rdma
        self._rdma_pool = rdma_pool or pool
        self._rdma_missing = "; ".join(rdma_missing)
        self._tell = tell
        self._warn = warn

    async def answer(self, request: Request, channel: Channel) -> bool:
        """Whether the connection can take another request. Raises OSError or TimeoutError when the peer is lost."""
        exchange = _Exchange(request, channel, self.draining or not request.keep_alive, body_left=request.length)
        started = time.perf_counter()
        self._metrics.in_flight += 1
        try:
            await self._answer(exchange, self._dispatch(exchange))
        finally:
            self._metrics.in_flight -= 1
            status = exchange.status or 499  # the peer went away before an answer, as nginx has it
            self._metrics.finished(request.method, status, time.perf_counter() - started)
            if exchange.refusal:
                self._metrics.refusals[exchange.refusal] += 1
            if self._tell is not None:
                self._tell(f"{channel.peer} {request.method} {request.target.partition('?')[0]} {status}")
        return not exchange.close

    async def _answer(self, exchange: _Exchange, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except (TimeoutError, ConnectionError, TruncatedError):
            exchange.close = True
            raise
        except HttpError as problem:
            await self.refuse(exchange, problem)
        except KvctlError as problem:
            answer = as_http(problem)
            if answer.status == 500 and self._warn is not None:
                self._warn(f"{exchange.request.method} {exchange.request.path}: {problem}")
            await self.refuse(exchange, answer)
        except Exception as problem:
            # a bug: the client learns no more than that, the log keeps the kind
            if self._warn is not None:
                self._warn(f"{exchange.request.method} {exchange.request.path}: {type(problem).__name__}: {problem}")
            await self.refuse(exchange, HttpError(500, "internal", "the node failed; its log says more", close=True))

    async def refuse(self, exchange: _Exchange, problem: HttpError) -> None:
        """An error answer; what the client still sends of a body is read away within limits."""
        exchange.refusal = problem.code
        if exchange.status:  # an answer has begun: only the end of the connection can say it
            exchange.close = True
            exchange.channel.abort()
            return
        left, channel = exchange.body_left, exchange.channel
        waits = exchange.request.get("expect").lower() == "100-continue" and left == exchange.request.length
        if 0 < left <= _SMALL_BODY and not waits and not problem.close:
            left = await channel.discard(left)  # cheaper than another connection
        exchange.close = exchange.close or problem.close or left > 0
        await self._send(exchange, problem.status, error_body(problem), {**_JSON, **problem.headers})
        if left and not waits:
            channel.finish()
            await channel.discard(left)

    def _head(self, exchange: _Exchange, status: int, length: int, headers: dict[str, str] | None) -> bytes:
        """The answer begins with this: from here on it cannot become another one."""
        exchange.status = status
        exchange.close = exchange.close or self.draining
        return answer_head(status, length, headers, close=exchange.close)

    async def _send(self, exchange: _Exchange, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        head = self._head(exchange, status, len(body), headers)
        await exchange.channel.send(head if exchange.request.method == "HEAD" else head + body)

    async def _dispatch(self, exchange: _Exchange) -> None:
        request = exchange.request
        if request.method not in {"GET", "HEAD", "PUT", "DELETE", "COPY"}:
            raise HttpError(405, "method", f"{request.method} is not offered", headers={"allow": _METHODS})
        if request.length and request.method != "PUT":
            raise HttpError(400, "body", f"a {request.method} has no body")
        if request.path == "/healthz" and request.method in {"GET", "HEAD"}:
            await self._health(exchange)
        elif request.path == "/metrics" and request.method in {"GET", "HEAD"}:
            rdma = self._rdma.metrics() if self._rdma is not None else None
            page = self._metrics.text(free_bytes=self._tree.free_bytes(), rdma=rdma)
            await self._send(exchange, 200, page, {"content-type": CONTENT_TYPE})
        elif request.path == _ROOT:
            await self._folder(exchange)
        else:
            # Scality's clients leave `/v1` out
            key = request.path.removeprefix(_ROOT) if request.path.startswith(_ROOT) else request.path[1:]
            await self._object(exchange, key)

    async def _health(self, exchange: _Exchange) -> None:
        if self.draining:
            raise HttpError(503, "draining", "the node is shutting down", close=True)
        page = {"status": "ok", "rdma": self._rdma is not None}
        await self._send(exchange, 200, json.dumps(page).encode(), _JSON)

    def _check(self, exchange: _Exchange, need: Rights, key: str, *, folder: bool = False, once: bool = False) -> None:
        request = exchange.request
        asked = Asked(
            request.method,
            request.target,
            request.get("range"),
            request.get("if-match"),
            request.get("if-none-match"),
            rdma_token(request)[0],
        )
        token = request.get(TOKEN_HEADER)
        self._guard.check(asked, exchange.channel.peer, token, need=need, key=key, folder=folder, once=once)

    async def _object(self, exchange: _Exchange, key: str) -> None:
        check_name(key)
        method = exchange.request.method
        if method == "HEAD":
            self._check(exchange, "ro", key)
            await self._send_stat(exchange, key)
        elif method == "GET":
            token, _ = rdma_token(exchange.request)
            self._check(exchange, "ro", key, once=bool(token))
            await self._get(exchange, key)
        elif method == "PUT":
            self._check(exchange, "rw", key, once=True)
            await self._put(exchange, key)
        elif method == "COPY":
            await self._copy(exchange, key)
        else:
            self._check(exchange, "rw", key, once=True)
            version = parse_version(exchange.request.get("if-match"), "If-Match")
            await exchange.channel.in_thread(lambda: self._tree.delete(key, version))
            await self._send(exchange, 204, b"")

    async def _send_stat(self, exchange: _Exchange, key: str) -> None:
        found = self._tree.stat(key)
        check_version(exchange.request, key, found)
        await exchange.channel.send(self._head(exchange, 200, found.size, headers_of(found)))

    async def _get(self, exchange: _Exchange, key: str) -> None:
        fd, found = self._tree.open(key)
        try:
            status, offset, length, headers = part(exchange.request, key, found)
            token, dialect = rdma_token(exchange.request)
            if token:
                await self._send_rdma(exchange, key, fd, offset, length, token, dialect)
                await self._send(exchange, status, b"", headers)
                return
            head = self._head(exchange, status, length, headers)
            await exchange.channel.send_file(head, fd, offset, length, in_memory=self._tree.in_memory)
            self._metrics.sent += length
        finally:
            os.close(fd)

    async def finish(self, channel: PlainChannel, sending: Sending) -> bool:
        """The rest of an answer that `quick` began; whether the connection can take another request."""
        if sending.flight is not None and not sending.flight.placed:
            return await self._finish_flight(channel, sending, sending.flight)
        try:
            await channel.send_begun(sending, in_memory=self._tree.in_memory)
        finally:
            self.quick.end(sending, channel.peer)
        return not self.draining

    async def _finish_flight(self, channel: PlainChannel, sending: Sending, flight: Flight) -> bool:
        """As `finish`, while bytes still go by RDMA. When that fails the answer becomes another one."""
        exchange = _Exchange(parse_request(sending.request, self._limits.headers), channel, self.draining)

        async def rest() -> None:
            await self._in_rdma(exchange, flight.finish)
            exchange.status = sending.status
            await channel.send(sending.head)

        try:
            await self._answer(exchange, rest())
        finally:
            sending.status = exchange.status or 499
            if exchange.refusal:
                self._metrics.refusals[exchange.refusal] += 1
            self.quick.end(sending, channel.peer)
        return not exchange.close

    async def _send_rdma(
        self, exchange: _Exchange, key: str, fd: int, offset: int, length: int, token: str, dialect: Dialect
    ) -> None:
        engine = self._engine()
        if (size := engine.size(token, dialect)) < length:
            raise HttpError(400, "memory", f"the token names {size} bytes of memory for {length} of the object")
        asked = RdmaRequest(token, dialect, exchange.channel.peer, key, offset, length)
        await self._in_rdma(exchange, lambda: engine.send(asked, fd))
        self._metrics.rdma_sent += length

    async def _put(self, exchange: _Exchange, key: str) -> None:
        request = exchange.request
        if_absent = request.get("if-none-match")
        if if_absent not in {"", "*"}:
            raise HttpError(400, "condition", "If-None-Match: only * is understood with PUT")
        version = parse_version(request.get("if-match"), "If-Match")
        if if_absent and version is not None:
            raise HttpError(400, "condition", "If-Match and If-None-Match together make no sense")
        token, dialect = rdma_token(request)
        if token and request.length:
            raise HttpError(400, "body", "a PUT by RDMA has no body")
        if not token and "content-length" not in request.headers:
            raise HttpError(411, "length_required", "a PUT says its length", close=True)
        size = self._engine().size(token, dialect) if token else request.length
        if size > self._limits.max_object:
            raise HttpError(413, "too_large", f"{size} bytes, at most {self._limits.max_object}")
        channel = exchange.channel
        draft = await channel.in_thread(lambda: self._tree.create(key, size))
        try:
            if token:
                engine = self._engine()
                asked = RdmaRequest(token, dialect, channel.peer, key, 0, size)
                await self._in_rdma(exchange, lambda: engine.receive(asked, draft.fd))
                self._metrics.rdma_received += size
            else:
                await self._receive(exchange, draft, size)
            found = await channel.in_thread(lambda: draft.commit(if_absent=bool(if_absent), if_version=version))
        finally:
            draft.close()
        await self._send(exchange, 200, b"", headers_of(found, ranges=False))

    async def _copy(self, exchange: _Exchange, key: str) -> None:
        """What another object of this node holds, under this key too. The token is for both."""
        query = dict(exchange.request.query)
        source = query.pop("from", "")
        version = parse_version(exchange.request.get("if-match"), "If-Match")
        if not source or query or version is None:
            raise HttpError(400, "copy", "COPY says ?from=KEY and, in If-Match, that object's version")
        check_name(source)
        self._check(exchange, "rw", key, once=True)
        self._check(exchange, "ro", source)
        found, shared = await exchange.channel.in_thread(lambda: self._tree.copy(source, key, version))
        page = json.dumps({"size": found.size, "shared": shared}).encode()
        await self._send(exchange, 200, page, {**headers_of(found, ranges=False), **_JSON})

    async def _receive(self, exchange: _Exchange, draft: Draft, size: int) -> None:
        if exchange.request.get("expect").lower() == "100-continue":
            await exchange.channel.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            got = await exchange.channel.receive_file(draft.fd, size)
        except TimeoutError:
            raise HttpError(408, "slow", "the body came too slowly", close=True) from None
        self._metrics.received += got
        exchange.body_left -= got
        if got < size:
            raise ConnectionResetError(f"{got} of {size} bytes came")

    def _engine(self) -> RdmaEngine:
        if self._rdma is None:
            raise HttpError(501, "no_rdma", f"this node has no RDMA: {self._rdma_missing}")
        return self._rdma

    async def _in_rdma(self, exchange: _Exchange, work: Callable[[], None]) -> None:
        await exchange.channel.in_thread(work, self._rdma_pool)

    async def _folder(self, exchange: _Exchange) -> None:
        """What `/v1/` itself offers: lists, and removing temp files."""
        request = exchange.request
        channel = exchange.channel
        query = dict(request.query)
        if request.method == "DELETE" and set(query) == {"upload"}:
            ident = query["upload"]
            self._check(exchange, "rw", ident, once=True)
            await channel.in_thread(lambda: self._tree.abort(ident))
            await self._send(exchange, 204, b"")
            return
        if request.method not in {"GET", "HEAD"}:
            raise HttpError(405, "method", f"{request.method} needs a key", headers={"allow": "GET, HEAD"})
        prefix = query.pop("prefix", "")
        self._check(exchange, "ro", prefix, folder=True)
        if "uploads" in query:
            query.pop("uploads")
            found = await channel.in_thread(lambda: listing.uploads(self._tree, prefix))
            document: dict[str, object] = {
                "uploads": [{"id": item.ident, "key": item.key, "started": iso_time(item.started_ns)} for item in found]
            }
        else:
            after = query.pop("after", "")
            limit = parse_limit(query.pop("limit", str(PAGE)))
            objects, more = await channel.in_thread(lambda: listing.page(self._tree, prefix, after, limit))
            document = {
                "objects": [
                    {"key": key, "size": item.size, "version": item.version, "modified": iso_time(item.modified_ns)}
                    for key, item in objects
                ],
                "more": more,
            }
        if query:
            raise HttpError(400, "query", f"{min(query)[:40]!r} means nothing here")
        await self._send(exchange, 200, json.dumps(document).encode(), _JSON)
