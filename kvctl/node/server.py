"""The node's life: listen, accept within limits, serve each connection, drain at a signal, close."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import uvloop

from kvctl.core.errors import ConfigError, EnvError, InterruptedRunError, UsageError
from kvctl.node.bodies import TruncatedError
from kvctl.node.channel import Channel
from kvctl.node.guard import Guard
from kvctl.node.messages import HttpError, answer_head, error_body, parse_request
from kvctl.node.metrics import Metrics
from kvctl.node.plain import PlainChannel
from kvctl.node.rdma_seam import RdmaEngine, RdmaSettings, load_engines
from kvctl.node.service import Service
from kvctl.node.settings import NodeSettings
from kvctl.node.tls import TlsChannel
from kvctl.node.tree import Tree

_BACKLOG: Final = 1024
_SPARE_FDS: Final = 512  # half of them for objects that are kept open
_REFUSALS: Final = 32  # answered at once beyond the limit; more are closed without a word
_TLS_SECONDS: Final = 10.0
_WATCH_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Ready:
    """What a node says once it accepts: its URL, whether clients need a token, the RDMA engine or why there is none."""

    url: str
    root: str
    host: str
    port: int
    tls: bool
    tokens: bool
    rdma: bool
    rdma_reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """After a graceful end: requests answered, and connections that had to be cut."""

    requests: int
    cut: int


def run_node(
    settings: NodeSettings,
    *,
    ready: Callable[[Ready], None],
    note: Callable[[str], None],
    trace: Callable[[str], None] | None = None,
    tree: Tree | None = None,
) -> Ended:
    """Serve until SIGTERM or SIGINT; then drain. `note` is told what an operator must know, `trace` each request.
    `tree`: other objects than the files of the settings' folder; it stays the caller's.
    Raises UsageError, ConfigError or EnvError when it cannot start, InterruptedRunError at a second signal.
    """
    if not settings.keys and not settings.open_to:
        raise UsageError(
            "a node that anybody may use is not started",
            cause="no key file, and no network that is served without tokens",
            hint="give --key-file FILE (made by `kvctl node key`), or --allow-unauthenticated 127.0.0.0/8 for a trial",
        )
    tls = _tls_context(settings)
    _raise_fd_limit(settings.limits.connections)
    served = tree or Tree(settings.root)
    try:
        engine, reasons = _rdma(settings)
        try:
            node = _Node(settings, served, engine, reasons, tls, note, trace)
            return uvloop.run(node.run(ready))
        finally:
            if engine is not None:
                engine.close()
    finally:
        if tree is None:
            served.close()


def _rdma(settings: NodeSettings) -> tuple[RdmaEngine | None, tuple[str, ...]]:
    if settings.rdma == "off":
        return None, ("it was started with --rdma off",)
    drain = settings.limits.drain_seconds
    engine, reasons = load_engines(RdmaSettings(settings.rdma_allow, settings.rdma_options, drain))
    if engine is None and settings.rdma == "require":
        raise EnvError("the node cannot use RDMA", cause="; ".join(reasons), hint="see `kvctl help nodes`")
    return engine, tuple(reasons)


class _Node:
    def __init__(
        self,
        settings: NodeSettings,
        tree: Tree,
        engine: RdmaEngine | None,
        reasons: tuple[str, ...],
        tls: ssl.SSLContext | None,
        note: Callable[[str], None],
        trace: Callable[[str], None] | None,
    ) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._reasons = reasons
        self._rdma = engine
        self._tls = tls
        self._note = note
        self._metrics = Metrics()
        self._pool = ThreadPoolExecutor(settings.threads, "kvctl-node")
        self._rdma_pool = ThreadPoolExecutor(engine.max_in_flight, "kvctl-node-rdma") if engine is not None else None
        guard = Guard(settings.keys, settings.open_to, nonces=settings.limits.nonces)
        self._service = Service(
            tree, guard, self._metrics, settings.limits, self._pool,
            rdma=engine, rdma_pool=self._rdma_pool, rdma_missing=reasons, tell=trace, warn=note,
        )  # fmt: skip
        self._channels: dict[Channel, asyncio.Task[None]] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._refusing: set[asyncio.Task[None]] = set()
        self._signals: list[int] = []

    async def run(self, ready: Callable[[Ready], None]) -> Ended:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        again = asyncio.Event()

        def on_signal(signum: int) -> None:
            (again if stop.is_set() else stop).set()
            self._signals.append(signum)

        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, on_signal, signum)
        listener = _listen(self._settings.listen)
        quick = self._service.quick
        if quick.engine_fd is not None:
            loop.add_reader(quick.engine_fd, quick.on_flights)
        try:
            host, port = listener.getsockname()[:2]
            ready(self._describe(host, port))
            accepting = asyncio.create_task(self._accept(listener))
            watching = asyncio.create_task(self._watch())
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait([accepting, stopping], return_when=asyncio.FIRST_COMPLETED)
            accepting.cancel()
            stopping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await accepting
        finally:
            listener.close()
        try:
            return await self._drain(again)
        finally:
            watching.cancel()
            self._service.files.close()
            self._pool.shutdown(wait=True)
            if self._rdma_pool is not None:
                self._rdma_pool.shutdown(wait=True)

    def _describe(self, host: str, port: int) -> Ready:
        settings = self._settings
        shown = f"[{host}]" if ":" in host else host
        secure = self._tls is not None
        return Ready(
            f"node://{shown}:{port}" + ("?tls=true" if secure else ""), settings.root, host, port, secure,
            bool(settings.keys), self._rdma is not None, self._reasons,
        )  # fmt: skip

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as problem:  # out of descriptors, or the peer was gone already
                self._note(f"accept: {problem.strerror or problem}")
                self._evict()
                await asyncio.sleep(0.05)
                continue
            self._metrics.connections_total += 1
            open_now = len(self._channels) + len(self._opening)
            if open_now >= self._limits.connections and not self._evict():
                self._refuse(sock)
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            _keep(self._opening, asyncio.create_task(self._open(sock, str(address[0]))))

    async def _watch(self) -> None:
        """End connections whose deadline has passed."""
        limits = self._limits
        pause = min(_WATCH_SECONDS, limits.head_seconds / 2, limits.idle_seconds / 2, limits.stall_seconds / 2)
        while True:
            await asyncio.sleep(pause)
            self._service.files.sweep()
            now = time.monotonic()
            for channel in list(self._channels):
                if channel.deadline is not None and channel.deadline < now:
                    channel.expire()

    async def _open(self, sock: socket.socket, peer: str) -> None:
        try:
            channel = await self._channel(sock, peer)
        except (OSError, TimeoutError):
            sock.close()
            return
        except asyncio.CancelledError:
            sock.close()
            raise
        opened = asyncio.current_task()
        assert opened is not None
        self._opening.discard(opened)  # at once, or the connection counts twice for a moment
        task = asyncio.create_task(self._serve(channel))
        self._channels[channel] = task
        self._metrics.connections = len(self._channels)

    async def _channel(self, sock: socket.socket, peer: str) -> Channel:
        if self._tls is None:
            return PlainChannel(sock, peer, self._limits, self._pool, self._service.quick)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 18, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=self._tls, ssl_handshake_timeout=_TLS_SECONDS
        )
        return TlsChannel(
            reader, asyncio.StreamWriter(transport, protocol, reader, loop), peer, self._limits, self._pool
        )

    async def _serve(self, channel: Channel) -> None:
        try:
            while not self._service.draining and await self._one(channel):
                pass
        except (OSError, TimeoutError, TruncatedError):
            pass  # the peer is gone, too slow, or was promised what a file no longer has
        finally:
            await channel.close()
            del self._channels[channel]
            self._metrics.connections = len(self._channels)

    async def _one(self, channel: Channel) -> bool:
        """Serve one request (and the quick ones before it); whether another may follow."""
        try:
            head = await channel.read_head()
            if head is None:
                return isinstance(channel, PlainChannel) and await self._finish(channel)
            request = parse_request(head, self._limits.headers)
        except HttpError as problem:
            self._metrics.refusals[problem.code] += 1
            body = error_body(problem)
            head = answer_head(problem.status, len(body), {"content-type": "application/json"}, close=True)
            await channel.send(head + body)
            channel.finish()
            await channel.discard(1 << 20)
            return False
        return await self._service.answer(request, channel)

    async def _finish(self, channel: PlainChannel) -> bool:
        begun, channel.begun = channel.begun, None
        return begun is not None and await self._service.finish(channel, begun)

    def _evict(self) -> bool:
        """End the connection that has been idle longest, if one is."""
        idle = [channel for channel in self._channels if channel.idle_since is not None]
        if not idle:
            return False
        oldest = min(idle, key=lambda channel: channel.idle_since or 0.0)
        oldest.idle_since = None
        oldest.abort()
        self._metrics.connections_evicted += 1
        return True

    def _refuse(self, sock: socket.socket) -> None:
        self._metrics.connections_refused += 1
        if self._tls is not None or len(self._refusing) >= _REFUSALS:
            sock.close()
            return
        _keep(self._refusing, asyncio.create_task(self._say_busy(sock)))

    async def _say_busy(self, sock: socket.socket) -> None:
        problem = HttpError(503, "busy", f"the node serves its {self._limits.connections} connections already")
        body = error_body(problem)
        channel = PlainChannel(sock, "", self._limits, self._pool)
        try:
            headers = {"content-type": "application/json", "retry-after": "1"}
            await channel.send(answer_head(503, len(body), headers, close=True) + body)
            channel.finish()
            await channel.discard(1 << 16)
        except (OSError, TimeoutError):
            pass
        finally:
            await channel.close()

    async def _drain(self, again: asyncio.Event) -> Ended:
        """Requests being answered are finished, idle connections end now; what is left at the limit is cut."""
        self._service.draining = self._service.quick.off = True
        deadline = time.monotonic() + self._limits.drain_seconds
        for task in (*self._opening, *self._refusing):
            task.cancel()
        aborted = asyncio.create_task(again.wait())
        try:
            while self._channels and not again.is_set() and (left := deadline - time.monotonic()) > 0:
                for channel in [one for one in self._channels if one.idle_since is not None]:
                    channel.abort()
                tasks = list(self._channels.values())
                await asyncio.wait([*tasks, aborted], timeout=min(left, 0.2), return_when=asyncio.FIRST_COMPLETED)
        finally:
            aborted.cancel()
        cut = len(self._channels)
        tasks = list(self._channels.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._opening, *self._refusing, return_exceptions=True)
        if again.is_set():
            raise InterruptedRunError(f"ended at once; {cut} connections were cut", signum=self._signals[-1])
        return Ended(sum(self._metrics.requests.values()), cut)


def _keep(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    """The loop holds tasks weakly: somebody must hold them until they are done."""
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _listen(where: tuple[str, int]) -> socket.socket:
    """Raises EnvError."""
    host, port = where
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server(where, family=family, backlog=_BACKLOG)
    except UnicodeError as problem:  # what no name of a host can be
        raise UsageError(f"cannot listen on {host!r}", cause=str(problem), hint="write HOST:PORT") from None
    except OSError as problem:
        raise EnvError(f"cannot listen on {host}:{port}", cause=problem.strerror or str(problem)) from None
    listener.setblocking(False)
    return listener


def _tls_context(settings: NodeSettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        if settings.tls_key is not None:
            raise UsageError("--tls-key without --tls-cert means nothing")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (ssl.SSLError, OSError) as problem:
        raise ConfigError(
            f"the certificate {settings.tls_cert} cannot be used",
            cause=str(problem),
            hint="PEM files: the certificate with its chain, and its key without a passphrase",
        ) from None
    return context


def _raise_fd_limit(connections: int) -> None:
    """Each connection may need its socket, a file and a folder. Raises EnvError."""
    wanted = connections * 3 + _SPARE_FDS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise EnvError(
                f"{connections} connections need {wanted} descriptors",
                cause=f"the limit is {hard}",
                hint="raise it (ulimit -n, LimitNOFILE=), or lower --max-connections",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
