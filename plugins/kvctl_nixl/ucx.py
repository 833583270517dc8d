"""`nixl-ucx`: the memory of a peer process (a `kvctl_nixl.peer.Source`) by NIXL's UCX back end.

Two ways. push: the source writes into this process's memory, told where over the control channel. pull: this process
reads. Without InfiniBand, push: over TCP it is faster, and with pull UCX ends the source's process when a reader goes
away while the source is stopped. With InfiniBand, pull: the source's CPU has nothing to do.

What was given up may still be written, also after this process's agent is gone (on one host the kernel copies on the
source's behalf), so its memory stays in quarantine until the source has said that it ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Literal, NoReturn

from kvctl.core.errors import KvctlError, MemberDownError, StalledError, TransientError, UsageError
from kvctl.memory.buffers import Buffer
from kvctl.transports.api import HOST_KINDS, Capabilities, Op, Registration, Store, StoreConfig
from kvctl.transports.options import check_names, choice, number
from kvctl.transports.threaded import AbandonedError, OpCancelledError, ThreadedTransport
from kvctl.transports.wrapper import innermost
from kvctl_nixl.agent import Agent, NixlError, Transfer
from kvctl_nixl.library import has_infiniband
from kvctl_nixl.memory import Desk, Known
from kvctl_nixl.peer.link import Call, Link
from kvctl_nixl.peer.store import PeerStore
from kvctl_nixl.quarantine import QUARANTINE

Mode = Literal["push", "pull"]
PIECE: Final = 64 << 20
_PAUSE: Final = (0.00005, 0.001)
_CLOSE_SECONDS: Final = 5.0


class _Session:
    """A connection to one run of a source: the control channel, and the agent that its bytes come through. When the one
    ends, so does the other: what lay in the network then reaches no memory any more.
    """

    def __init__(self, place: PeerStore, known: Known, params: Mapping[str, str]) -> None:
        self.desk: Desk
        self.sent = 0  # generation of our metadata that the source has

        def introduce() -> tuple[str, bytes]:
            # only now: an agent costs some milliseconds, and a source that is down is asked often
            self.desk = Desk(Agent("UCX", params), known)
            return self.desk.agent.name, self.desk.agent.metadata()

        try:
            self.link = Link(place.root, place.key, introduce=introduce, timeout=place.timeout)
            self.desk.agent.add_peer(self.link.greeting.metadata)
        except (NixlError, KvctlError) as problem:
            if hasattr(self, "desk"):
                self.desk.close()
            if isinstance(problem, NixlError):
                raise MemberDownError(f"{place.root}: NIXL cannot reach it", cause=str(problem)) from None
            raise

    @property
    def over(self) -> bool:
        return self.desk.agent.api is None

    def progress(self) -> None:
        with self.desk.lock, contextlib.suppress(NixlError):
            if not self.over:
                self.desk.agent.progress()

    def poll(self, transfer: Transfer) -> bool:
        with self.desk.lock:
            return transfer.poll()

    def end(self) -> None:
        """Forget the agent, unless a read of ours is in flight: then it stays, since its end would take the source with
        it (see above).
        """
        with self.desk.lock:
            if self.over:
                return
            if self.desk.agent.running:
                self.desk.agent.abandon()
            else:
                self.desk.close()


class NixlUcx(ThreadedTransport):
    """See `kvctl.transports.api.Transport`. Reads only. One agent, one control channel, several operations at once."""

    name = "nixl-ucx"

    def __init__(
        self, place: PeerStore, *, mode: Mode, threads: int, deadline: float, params: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            Capabilities(memory_kinds=HOST_KINDS, max_in_flight=threads, one_sided=True, durable=False, writes=False)
        )
        self.mode = mode
        self._place = place
        self._deadline = deadline
        self._params = dict(params or {})
        self._known = Known()
        self._session: _Session | None = None
        self._session_lock = threading.Lock()
        self._closing = threading.Event()

    def register(self, buffer: Buffer) -> Registration:
        super().register(buffer)
        return self._known.add(buffer)

    def describe(self, op: Op) -> str:
        """What an operation asks for, for -v."""
        return f"nixl-ucx: {self.mode} {self._place.root} {op.key} [{op.offset}, {op.offset + op.length})"

    def perform(self, op: Op) -> int:
        if op.kind == "write":
            raise UsageError(f"{op.key}: the memory of a peer can only be read")
        QUARANTINE.release_ended()
        name = self._place.full_name(op.key)
        requests = 0
        view = op.view  # while it is out, the memory stays mapped
        try:
            for done in range(0, op.length, PIECE) if op.length else (0,):
                if self.is_cancelled(op.id):
                    raise OpCancelledError
                requests += self._piece(op, name, done, min(PIECE, op.length - done))
        finally:
            view.release()
        if self.is_cancelled(op.id):
            raise OpCancelledError
        return requests

    def _given_up(self) -> str:
        return "at the end of the run" if self._closing.is_set() else f"after {self._deadline:g} s"

    def close(self) -> None:
        self._closing.set()
        super().close()
        with self._session_lock:
            session, self._session = self._session, None
        if session is not None:
            session.end()
            if not len(QUARANTINE):
                session.link.close()
            # else the channel stays: over it comes the end of what was given up

    # -- one piece -------------------------------------------------------------------------------------------------

    def _piece(self, op: Op, name: str, done: int, length: int) -> int:
        session = self._connected()
        question: dict[str, str | int | None] = {
            "name": name,
            "version": op.version,
            "size": op.object_size,
            "offset": op.offset + done,
            "length": length,
        }
        if not length:
            session.link.question({"do": "check", **question})
            return 1
        move = self._push if self.mode == "push" else self._pull
        try:
            with session.desk.memory(op.buffer, op.buffer_offset + done, length) as (kind, address, _):
                return move(op, session, question, (kind, address, length))
        except NixlError as problem:
            if "DISCONNECT" in str(problem) or session.link.dead:
                raise MemberDownError(
                    f"{self._place.root}: the source went away ({op.key})",
                    cause=str(problem),
                    hint="is it still running?",
                ) from None
            raise TransientError(f"{self._place.root}: NIXL could not read {op.key}", cause=str(problem)) from None

    def _push(self, op: Op, session: _Session, question: Mapping[str, object], place: tuple[str, int, int]) -> int:
        desk = session.desk
        with desk.lock:
            metadata = desk.agent.metadata() if session.sent < desk.generation else b""
            # asked under the lock: the source must know this memory before a later question that counts on it
            call = session.link.ask({"do": "push", **question, "address": place[1]}, metadata)
            session.sent = desk.generation
        # this side has to turn the crank too: over TCP, the target of a write puts the bytes where they belong
        if not self._wait(call.wait, session.progress):
            self._abandon(op, session, lambda: _was_left_alone(session, call))
        if not call.answered:
            session.end()  # it died while writing: what is still on the way must find no agent
        call.result()
        return 1

    def _pull(self, op: Op, session: _Session, question: Mapping[str, object], place: tuple[str, int, int]) -> int:
        kind, address, length = place
        header, metadata = session.link.question({"do": "where", **question})
        agent = session.desk.agent
        with session.desk.lock:
            if metadata:
                agent.add_peer(metadata)
            remote = [(int(header["address"]), length, 0)]
            transfer = agent.start(
                "READ", (kind, [(address, length, 0)]), ("DRAM", remote), session.link.greeting.agent
            )

        def ended(pause: float = 0.0) -> bool:
            if session.poll(transfer):
                return True
            time.sleep(pause)
            return False

        if not self._wait(ended, lambda: None):
            self._abandon(op, session, lambda: _has_ended(session, transfer))
        session.link.question({"do": "check", **question})
        return 2

    def _wait(self, ended: Callable[[float], bool], meanwhile: Callable[[], None]) -> bool:
        """Whether it ended before the deadline. `ended` waits a little by itself."""
        deadline = time.monotonic() + self._deadline
        pause = _PAUSE[0]
        while not ended(pause):
            meanwhile()
            now = time.monotonic()
            if self._closing.is_set():
                deadline = min(deadline, now + _CLOSE_SECONDS)
            if now > deadline:
                return False
            pause = min(pause * 2, _PAUSE[1])
        return True

    def _abandon(self, op: Op, session: _Session, ended: Callable[[], bool]) -> NoReturn:
        QUARANTINE.keep(op.buffer, session, ended)
        raise AbandonedError(
            StalledError(
                f"{self._place.root}: {op.key}: given up in flight {self._given_up()}",
                cause="the source does not move, and what it may still write cannot be called off",
                hint="is the source stopped? --transport-opt deadline=SECONDS allows more",
            )
        )

    def _connected(self) -> _Session:
        """To whoever answers there now: where the channel broke, a new one. Raises KvctlError."""
        with self._session_lock:
            session = self._session
            if session is None or session.link.dead or session.over:
                if session is not None:
                    session.end()
                session = self._session = _Session(self._place, self._known, self._params)
            return session


def _was_left_alone(session: _Session, call: Call) -> bool:
    """The source has said that it ended, or can write no more."""
    session.progress()  # nobody else may be turning the crank
    return call.answered or (session.link.dead and session.over)


def _has_ended(session: _Session, transfer: Transfer) -> bool:
    try:
        return session.poll(transfer)
    except NixlError:
        return True


def open_transport(config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]) -> NixlUcx:
    """Options: mode=auto|push|pull, threads, deadline (seconds)."""
    if endpoint is not None:
        raise UsageError(f"{config.url}: a peer has no endpoints")
    check_names("nixl-ucx", options, ("mode", "threads", "deadline"))
    mode = choice(options, "mode", ("auto", "push", "pull"))
    inner = innermost(store)
    chosen: Mode = "pull" if mode == "pull" or (mode == "auto" and has_infiniband()) else "push"
    return NixlUcx(
        inner if isinstance(inner, PeerStore) else PeerStore(config),
        mode=chosen,
        threads=number(options, "threads", 4, 1, 64),
        deadline=number(options, "deadline", 60, 1, 86400),
    )
