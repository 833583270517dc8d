"""`Source`: buffers of this process, published under names for other processes to read.

    with Source() as source:
        source.publish("model/layer0", buffer)
        print(source.url)                          # ucx://127.0.0.1:PORT

One thread per connected sink answers questions; one mover thread owns the agent: it writes into sinks' memory (push),
and drives UCX for sinks that read (pull), since without that a read over TCP never ends.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import queue
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Self

from kvctl.core.errors import AuthError, EnvError, KvctlError, UsageError
from kvctl.memory.buffers import Buffer
from kvctl_nixl.agent import Agent, NixlError
from kvctl_nixl.memory import KINDS
from kvctl_nixl.peer import frames
from kvctl_nixl.peer.frames import ClosedError, Header, ProtocolError
from kvctl_nixl.peer.sinks import Push, Sink
from kvctl_nixl.peer.table import Entry, Table
from kvctl_nixl.quarantine import QUARANTINE

_GREETING_SECONDS: Final = 10.0
_SEND_SECONDS: Final = 30.0
_PAGE: Final = 1000
_MOST_PUSHES: Final = 256  # of one sink
_BUSY: Final = (0.00005, 0.001)  # seconds between two looks at transfers in flight: from, to
_IDLE: Final = 0.001  # with sinks connected, which may read
_READING: Final = 1.0  # seconds after a question of a sink that reads in which it is driven without pause


class Source:
    """`key` is shared with the readers; without one only loopback addresses are served. `params` go to NIXL's UCX back
    end. Raises UsageError, EnvError or CapacityError.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        key: bytes = b"",
        params: Mapping[str, str] | None = None,
        most_sinks: int = 64,
    ) -> None:
        if not key and not _is_loopback(host):
            raise UsageError(f"a source on {host} needs a key", hint="without one, only 127.0.0.1 and ::1 are served")
        self._key = key
        self._most = most_sinks
        self._table = Table()
        self._agent = Agent("UCX", dict(params or {}))
        self._agent_lock = threading.RLock()
        self._registered: dict[int, Any] = {}  # Any: NIXL's lists, by id of their buffer
        self._generation = 0
        self._sinks: set[Sink] = set()
        self._sinks_lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Push] = queue.SimpleQueue()
        self._active: list[Push] = []
        self._active_lock = threading.Condition()
        self._unsent: list[tuple[Sink, Header]] = []  # the mover's
        self._reading = 0.0
        self._closing = threading.Event()
        self._work = threading.Event()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._server = socket.create_server((host, port), family=family)
        except OSError as problem:
            self._agent.close()
            raise EnvError(f"a source cannot listen on {host}:{port}", cause=problem.strerror or str(problem)) from None
        self.host, self.port = self._server.getsockname()[:2]
        self._threads = [
            threading.Thread(target=self._accept, name="kvctl-peer-accept", daemon=True),
            threading.Thread(target=self._move, name="kvctl-peer-move", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def url(self) -> str:
        return f"ucx://[{self.host}]:{self.port}" if ":" in self.host else f"ucx://{self.host}:{self.port}"

    def publish(self, name: str, buffer: Buffer, offset: int = 0, length: int | None = None) -> str:
        """Offer a range of `buffer` as `name`, replacing what had the name; returns its version. The buffer must stay,
        unchanged, until `withdraw`. Raises UsageError or EnvError.
        """
        if buffer.kind not in KINDS or buffer.kind == "cuda":
            raise EnvError(f"a source cannot publish {buffer.kind} memory")
        with self._agent_lock:
            if id(buffer) not in self._registered and buffer.nbytes:
                try:
                    region = (buffer.address, buffer.nbytes, 0, "")
                    self._registered[id(buffer)] = self._agent.register(KINDS[buffer.kind], [region])
                except NixlError as problem:
                    raise EnvError(f"NIXL cannot register the memory of {name}", cause=str(problem)) from None
                self._generation += 1
        old = self._table.remove(name)
        entry = self._table.put(name, buffer, offset, buffer.nbytes - offset if length is None else length)
        if old is not None and old.buffer is not buffer:
            self._drop(old, 0.0)
        return entry.info.version

    def withdraw(self, name: str, timeout: float = 30.0) -> bool:
        """Offer `name` no more. Waits up to `timeout` seconds for what is being written out of it; whether all of that
        ended. If not, the buffer's memory is kept until it has.
        """
        entry = self._table.remove(name)
        return entry is None or self._drop(entry, timeout)

    def _drop(self, entry: Entry, timeout: float) -> bool:
        """Its buffer's registration goes with the last name in it."""
        if self._table.uses(entry.buffer):
            return True
        with self._active_lock:
            ended = self._active_lock.wait_for(lambda: not self._uses(entry.buffer), timeout)
        if not ended:
            QUARANTINE.keep(entry.buffer, self, lambda: not self._uses(entry.buffer))
            return False
        with self._agent_lock:
            registered = self._registered.pop(id(entry.buffer), None)
            if registered is not None:
                with contextlib.suppress(NixlError):
                    self._agent.deregister(registered)
        return True

    def _uses(self, buffer: Buffer) -> bool:
        return any(push.entry.buffer is buffer for push in list(self._active))

    def _serves(self, sink: Sink) -> bool:
        return any(push.sink is sink for push in list(self._active))

    def close(self) -> None:
        """Stop serving. What is being written ends first, or is given up after some seconds."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._work.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(timeout=15)
        with self._sinks_lock:
            sinks = list(self._sinks)
        for sink in sinks:
            if not self._serves(sink):  # as long as its memory may be written to, the channel must not look closed
                sink.drop()
        with self._agent_lock:
            if self._agent.running:
                self._agent.abandon()
            else:
                self._agent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- sinks -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with self._sinks_lock:
                full = len(self._sinks) >= self._most
                if not full:
                    sink = Sink(connection)
                    self._sinks.add(sink)
            if full:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(sink,), name="kvctl-peer-sink", daemon=True).start()

    def _serve(self, sink: Sink) -> None:
        try:
            sink.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sink.connection.settimeout(_GREETING_SECONDS)
            with self._agent_lock:
                metadata, generation = self._agent.metadata(), self._generation
            greeting = frames.greet_sink(sink.connection, self._key, self._agent.name, metadata)
            if greeting.metadata:
                self._admit(sink, greeting.agent, greeting.metadata)
            sink.known = generation
            self._work.set()
            # idle sinks may stay; a slow answer is given up by the sink's own side of `sending`
            sink.connection.settimeout(None)
            _send_timeout(sink.connection, _SEND_SECONDS)
            while True:
                header, blob = frames.receive(sink.connection, blob_limit=frames.METADATA_LIMIT)
                self._answer(sink, header, blob)
        except (ClosedError, ProtocolError, OSError, AuthError, NixlError):
            pass  # it is gone, or what it says makes no sense: in both cases this is the end of it
        finally:
            self._forget(sink)

    def _admit(self, sink: Sink, name: str, metadata: bytes) -> None:
        """Know the agent of a sink. Raises ProtocolError for a name that is another's."""
        with self._sinks_lock:
            if any(other.agent == name for other in self._sinks):
                raise ProtocolError(f"the agent {name} is connected already")
            sink.agent = name
        with self._agent_lock:
            if self._agent.add_peer(metadata) != name:
                raise ProtocolError("metadata of another agent")

    def _forget(self, sink: Sink) -> None:
        sink.gone = True
        # a transfer into its memory must be seen to end before the agent forgets it
        with self._active_lock:
            ended = self._active_lock.wait_for(lambda: not self._serves(sink), _SEND_SECONDS)
        with self._agent_lock, contextlib.suppress(NixlError):
            if sink.agent and ended and not self._closing.is_set():
                self._agent.remove_peer(sink.agent)
        sink.connection.close()
        with self._sinks_lock:
            self._sinks.discard(sink)

    def _answer(self, sink: Sink, header: Header, blob: bytes) -> None:
        number = frames.field(header, "id", int)
        if blob:
            # whatever comes of the question: later ones count on it
            with self._agent_lock:
                if not sink.agent or self._agent.add_peer(blob) != sink.agent:
                    raise ProtocolError("metadata of another agent")
        try:
            answer, body = self._do(sink, number, header)
        except KvctlError as error:
            sink.answer({"id": number, **_told(error)})
        else:
            if answer is not None:
                sink.answer({"id": number, **answer}, body)

    def _do(self, sink: Sink, number: int, header: Header) -> tuple[Header | None, bytes]:
        what = frames.field(header, "do", str)
        if what == "list":
            page = self._table.page(frames.field(header, "prefix", str), frames.field(header, "after", str), _PAGE)
            rows = [[info.key, info.size, info.version, info.modified.timestamp()] for info in page]
            return {"more": len(page) == _PAGE}, json.dumps(rows).encode()
        name = frames.field(header, "name", str)
        if what == "stat":
            info = self._table.get(name).info
            return {"size": info.size, "version": info.version, "modified": info.modified.timestamp()}, b""
        offset, length = frames.field(header, "offset", int), frames.field(header, "length", int)
        if what == "get":
            entry = self._table.get(name)
            end = min(offset + length, entry.info.size)
            if end - offset > frames.GET_LIMIT:
                raise UsageError(f"{name}: {end - offset} bytes at once are for a transport, not for a question")
            return {}, bytes(entry.buffer.view[entry.offset + offset : entry.offset + end]) if offset < end else b""
        version, size = header.get("version"), header.get("size")
        if not isinstance(version, str | None) or not isinstance(size, int | None):
            raise ProtocolError("version or size of another type")
        entry = self._table.wanted(name, version, size, offset, length)
        if what == "check":
            return {}, b""
        if what == "where":
            self._reading = time.monotonic()
            self._work.set()
            with self._agent_lock:
                fresh = sink.known < self._generation
                sink.known = self._generation
                return {"address": entry.address + offset}, self._agent.metadata() if fresh else b""
        if what == "push":
            frames.field(header, "address", int)
            if not sink.agent or not length:
                raise UsageError(f"{name}: nothing to write, or no agent to write to")
            push = Push(sink, number, header, entry)
            with self._active_lock:
                if sum(other.sink is sink for other in self._active) >= _MOST_PUSHES:
                    raise UsageError(f"more than {_MOST_PUSHES} writes at once")
                self._active.append(push)
            self._inbox.put(push)
            self._work.set()
            return None, b""
        raise ProtocolError(f"no such question: {what!r}")

    # -- the mover thread ------------------------------------------------------------------------------------------

    def _move(self) -> None:
        pause = _BUSY[0]
        give_up = 0.0
        while True:
            if self._closing.is_set():
                give_up = give_up or time.monotonic() + 5
                if not (self._active or self._unsent) or time.monotonic() > give_up:
                    return
            started = self._start_pushes()
            ended = self._look()
            self._unsent = [(sink, answer) for sink, answer in self._unsent if not sink.try_answer(answer)]
            now = time.monotonic()
            if started or ended:
                pause = _BUSY[0]
            if self._active or self._unsent or now - self._reading < _READING:
                time.sleep(pause)
                pause = min(pause * 2, _BUSY[1])
            elif self._sinks:
                time.sleep(_IDLE)
            else:
                self._work.wait(1.0)
                self._work.clear()

    def _start_pushes(self) -> bool:
        started = False
        while True:
            try:
                push = self._inbox.get_nowait()
            except queue.Empty:
                return started
            started = True
            header = push.header
            length = frames.field(header, "length", int)
            local = [(push.entry.address + frames.field(header, "offset", int), length, 0)]
            remote = [(frames.field(header, "address", int), length, 0)]
            try:
                with self._agent_lock:
                    if push.sink.gone:
                        raise NixlError("its reader has gone")
                    push.transfer = self._agent.start(
                        "WRITE", (KINDS[push.entry.buffer.kind], local), ("DRAM", remote), push.sink.agent
                    )
            except NixlError as problem:
                self._finish(push, {"error": "transient", "what": f"the source cannot write: {problem}"})

    def _look(self) -> bool:
        """Drive UCX, and see what ended."""
        with self._agent_lock:
            with contextlib.suppress(NixlError):
                self._agent.progress()
            answers: list[tuple[Push, Header]] = []
            for push in list(self._active):
                if push.transfer is None:
                    continue
                try:
                    if push.transfer.poll():
                        answers.append((push, self._verdict(push)))
                except NixlError as problem:
                    answers.append((push, {"error": "transient", "what": f"the write failed: {problem}"}))
        for push, answer in answers:
            self._finish(push, answer)
        return bool(answers)

    def _verdict(self, push: Push) -> Header:
        """Whether what was written is still what was asked for."""
        try:
            entry = self._table.get(push.entry.info.key)
            if entry is not push.entry:
                self._table.wanted(push.entry.info.key, push.entry.info.version, None, 0, 0)
        except KvctlError as error:
            return _told(error)
        return {}

    def _finish(self, push: Push, answer: Header) -> None:
        with self._active_lock:
            self._active.remove(push)
            self._active_lock.notify_all()
        self._unsent.append((push.sink, {"id": push.id, **answer}))


def _told(error: KvctlError) -> Header:
    return {"error": error.code, "what": error.what, "cause": error.cause, "hint": error.hint}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _send_timeout(connection: socket.socket, seconds: float) -> None:
    """Only for sending: a reader that does not read must not hold the mover."""
    whole = int(seconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, whole.to_bytes(8, "little") + bytes(8))
