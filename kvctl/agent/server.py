"""The agent's life: the unix socket, who may use it, one thread for each connection, and the peers' port.

A connection is a holder: its leases, and what it was loading, end with it. The kernel closes it however its process
dies, so nothing has to be renewed and nothing can be forgotten.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import secrets
import signal
import socket
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Final

from kvctl.agent import wire
from kvctl.agent.generations import HAVE, HAVE_ENTRY, Generation, Holder, Reserve, SlotFile, Space
from kvctl.agent.kv_cache import KvCache
from kvctl.agent.publishing import Publisher, open_source
from kvctl.agent.requests import Session
from kvctl.agent.settings import AgentSettings
from kvctl.agent.slots import DeviceBudget, Slots
from kvctl.core.errors import AuthError, EnvError, KvctlError, UsageError
from kvctl.core.units import format_size
from kvctl.memory.budget import memory_available
from kvctl.memory.devices import open_shareable
from kvctl.memory.shareable import Shareable, make_memfd

_CREDENTIALS: Final = struct.Struct("3i")
_SEND_SECONDS: Final = 30.0  # a client that takes no answer for so long is dropped
_TICK: Final = 0.5


@dataclass(frozen=True, slots=True)
class Ready:
    """What an agent says once it accepts. `peers`: the URL under which other hosts read its slots, or empty;
    `one_sided`: that for one-sided reads. `devices`: bytes of each that slots may take.
    """

    socket: str
    memory: int
    peers: str
    one_sided: str
    pid: int
    devices: dict[str, int]


@dataclass(frozen=True, slots=True)
class Ended:
    """Slots that were still there, and the clients that had them mapped: those keep their memory."""

    slots: int
    holders: int


class Agent:
    """The state behind the socket. Thread-safe. KV in memory is taken out of what slots may take.
    Raises EnvError where a device cannot share its memory.
    """

    def __init__(self, settings: AgentSettings, kv: KvCache | None = None) -> None:
        self.settings = settings
        self.kv = kv
        memory = settings.memory - (settings.kv.memory if settings.kv is not None else 0)
        opened = [(open_shareable(name), nbytes) for name, nbytes in settings.devices]
        self._shareables: dict[str, Shareable] = {device.ident: device for device, _ in opened}
        devices = {device.ident: DeviceBudget(device.name, nbytes) for device, nbytes in opened}
        self.slots = Slots(memory, _free, devices=devices, available=memory_available, linger=settings.linger)
        self.peers_url = ""
        self.ident = secrets.token_hex(8)
        self.publisher: Publisher | None = None
        self._holders = itertools.count(1)

    def reserve(self, ask: Reserve, holder: Holder, runs: int) -> Generation | None:
        """Memory for a load: a memfd for each file, one for what has landed, and what is on devices.
        Raises what `Slots.reserve` does, and CapacityError where a device has less than its budget.
        """
        files = (*ask.files, SlotFile(HAVE, max(1, runs) * HAVE_ENTRY))
        made = self.slots.reserve(
            Reserve(ask.slot, ask.fingerprint, ask.source, files, ask.facts, ask.swap, ask.evict_first, ask.evict),
            holder,
        )
        if made is None:
            return None
        fds: list[int] = []
        try:
            for file in files:
                fds.append(make_memfd(f"{ask.slot}/{file.name}", file.host_bytes))  # noqa: PERF401 - it may fail half way
            for space in (file.space for file in files if file.space is not None):
                fds.append(self._allocate(space, ask.slot))  # noqa: PERF401 - likewise
        except KvctlError:
            for fd in fds:
                os.close(fd)
            self.slots.abandon(made)
            raise
        made.handles = tuple(fds)
        return made

    def _allocate(self, space: Space, slot: str) -> int:
        device = self._shareables[space.ident]
        if space.nbytes != device.size_of(space.nbytes):
            raise UsageError(f"slot {slot}: {space.nbytes} bytes are no memory of {device.name}")
        return device.allocate(space.nbytes)

    def ready(self) -> Ready:
        settings = self.settings
        url = self.publisher.url if self.publisher is not None else ""
        return Ready(settings.socket, self.slots.budget, self.peers_url, url, os.getpid(), dict(settings.devices))

    def changed(self) -> None:
        """Another generation may serve now."""
        if self.publisher is not None:
            self.publisher.changed()

    def holder(self, pid: int, label: str) -> Holder:
        return Holder(next(self._holders), pid, label)


def _free(generation: Generation) -> None:
    for fd in generation.handles:
        os.close(fd)
    generation.handles = ()


class ControlServer:
    """Accepts on the unix socket. `start` binds, `close` ends everything."""

    def __init__(self, agent: Agent, note: Callable[[str], None], trace: Callable[[str], None] | None = None) -> None:
        self._agent = agent
        self._note = note
        self._trace = trace
        self._path = agent.settings.socket
        self._stop = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._own: os.stat_result | None = None  # the socket that we made

    def start(self) -> None:
        """Raises EnvError when another agent runs there, AuthError when the place is not ours alone."""
        folder = os.path.dirname(self._path)
        _own_folder(folder)
        if _is_alive(self._path):
            raise EnvError(
                f"an agent is running at {self._path} already", hint="use it, end it, or choose another --socket"
            )
        _clear(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(self._path)
        except OSError as error:
            listener.close()
            raise EnvError(
                f"the socket {self._path} cannot be made",
                cause=error.strerror or str(error),
                hint="a path of at most 107 bytes in a folder of yours: --socket",
            ) from error
        finally:
            os.umask(before)
        self._own = os.lstat(self._path)
        listener.listen(128)
        listener.settimeout(_TICK)
        self._listener = listener
        self._thread = threading.Thread(target=self._accept, args=(listener,), name="kvctl-agent", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):
                if self._own is not None and os.path.samestat(self._own, os.lstat(self._path)):
                    os.unlink(self._path)
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while not self._stop.is_set():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                self._agent.slots.sweep()
                continue
            except OSError as error:
                self._note(f"accept: {error.strerror}")
                self._stop.wait(_TICK)
                continue
            pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if uid not in {os.getuid(), 0}:
                self._note(f"process {pid} of user {uid} was refused")
                sock.close()
                continue
            with self._lock:
                self._open.add(sock)
            threading.Thread(target=self._serve, args=(sock, pid), name=f"kvctl-agent-{pid}", daemon=True).start()

    def _serve(self, sock: socket.socket, pid: int) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_SEND_SECONDS), 0))
        session = Session(self._agent, self._agent.holder(pid, ""))
        try:
            while True:
                document, fds = wire.receive(sock)
                for fd in fds:
                    os.close(fd)  # clients have no descriptors to give
                try:
                    answer, given = session.answer(document)
                except KvctlError as error:
                    answer, given = wire.error_document(error), ()
                if self._trace is not None:
                    self._trace(f"process {pid}: {document.get('op')} {document.get('slot', '')}".rstrip())
                try:
                    wire.send(sock, answer, given)
                finally:
                    for fd in given:
                        os.close(fd)
        except (wire.ClosedError, OSError):
            pass
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            self._note(f"process {pid} sent nonsense and was cut off: {type(error).__name__}: {error}")
        finally:
            session.close()
            with self._lock:
                self._open.discard(sock)
            sock.close()


def run_agent(
    settings: AgentSettings,
    *,
    ready: Callable[[Ready], None],
    note: Callable[[str], None],
    trace: Callable[[str], None] | None = None,
) -> Ended:
    """Serve until SIGTERM or SIGINT. Call from the main thread. Raises EnvError, UsageError or ConfigError when it
    cannot start.
    """
    _raise_descriptors()
    if settings.kv is None:
        return _serve(Agent(settings), ready, note, trace)
    if settings.kv.memory > settings.memory:
        raise UsageError(
            f"{format_size(settings.kv.memory)} of KV are more than the agent's memory",
            cause=f"it has {format_size(settings.memory)}, for slots and KV together",
            hint="raise --memory, or ask for less --kv-memory",
        )
    kv = KvCache(settings.kv, note)
    kv.start()
    try:
        return _serve(Agent(settings, kv), ready, note, trace)
    finally:
        kv.close()


def _serve(
    agent: Agent,
    ready: Callable[[Ready], None],
    note: Callable[[str], None],
    trace: Callable[[str], None] | None,
) -> Ended:
    settings = agent.settings
    if settings.one_sided is not None:
        asked = settings.one_sided
        source = open_source(asked.transport, asked.listen, asked.key_file)
        agent.publisher = Publisher(source, agent.slots, agent.holder(os.getpid(), "publisher"), note)
    control = ControlServer(agent, note, trace)
    try:
        if settings.peers is None:
            stop = _Signals()
            control.start()
            ready(agent.ready())
            stop.wait()
        else:
            _with_peers(agent, control, ready, note, trace)
        left = agent.slots.generations()
        holders = {holder.pid for item in left for holder, _ in item.leases.values()}
        return Ended(len({item.slot for item in left}), len(holders))
    finally:
        control.close()
        if agent.publisher is not None:
            agent.publisher.close()


def _with_peers(
    agent: Agent,
    control: ControlServer,
    ready: Callable[[Ready], None],
    note: Callable[[str], None],
    trace: Callable[[str], None] | None,
) -> None:
    """The slots are read by peers as a storage node's objects are: the same server, over another tree."""
    from kvctl.agent.peer_tree import SlotTree
    from kvctl.node.server import Ready as NodeReady
    from kvctl.node.server import run_node

    settings = agent.settings
    assert settings.peers is not None

    def listening(found: NodeReady) -> None:
        agent.peers_url = found.url.replace("node://", "peer://", 1)
        control.start()
        ready(agent.ready())

    with SlotTree.make(agent.slots, agent.ident) as tree:
        run_node(settings.peers, ready=listening, note=note, trace=trace, tree=tree)


def _raise_descriptors() -> None:
    """Every file of every generation is one, and every reader of a slot takes one of each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Signals:
    """The first SIGTERM or SIGINT ends the wait."""

    def __init__(self) -> None:
        self._event = threading.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._seen)

    def _seen(self, signum: int, frame: FrameType | None) -> None:
        self._event.set()

    def wait(self) -> None:
        while not self._event.wait(3600.0):
            pass


def _own_folder(folder: str) -> None:
    """Make the socket's folder, for us alone when it is made. Raises AuthError when others may put files there."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.stat(folder)
    except OSError as error:
        raise EnvError(
            f"the folder {folder} cannot be used", cause=error.strerror, hint="choose another place with --socket"
        ) from error
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in {os.getuid(), 0} or writable:
        raise AuthError(
            f"the folder {folder} is not safe for the agent's socket",
            cause=f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}",
            hint="chmod 700 it, or choose another --socket",
        )


def _clear(path: str) -> None:
    """Remove the socket of an agent that died. Raises EnvError for anything else that is there: it is not ours."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise EnvError(f"{path} is there and is no socket", hint="choose another --socket")
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise EnvError(
            f"the socket {path} cannot be made", cause=error.strerror, hint="choose another --socket"
        ) from error


def _is_alive(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(2.0)
        try:
            sock.connect(path)
        except TimeoutError:
            return True
        except OSError:
            return False
        return True
