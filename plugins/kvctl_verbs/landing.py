"""The client's side of RDMA connections: listeners on a device that nodes connect back to.

Each seat listens at a place of its own and has one operation at a time, so that the queue pairs of an operation that is
given up are known, and ended, without hurting others. The connections' handles belong to the landing's thread;
queue pairs may be ended from any.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvctl.core.errors import EnvError
from kvctl_verbs.cm import Channel, Event, Ident, Kind
from kvctl_verbs.device import Device, open_device
from kvctl_verbs.policy import Network, allowed
from kvctl_verbs.queues import Completions, Patience, QueuePair

_PER_PORT: Final = 8  # connections that one listener takes
_JOIN_SECONDS: Final = 10.0


@dataclass(eq=False)
class _Peer:
    """An accepted connection."""

    ident: Ident
    pair: QueuePair


@dataclass(eq=False)
class Port:
    """A listener. `number` is its port. After `sever` nobody connects to it, and nothing comes in over it."""

    landing: Landing
    ident: Ident
    number: int
    peers: list[_Peer] = field(default_factory=list)
    severed: bool = False

    def sever(self) -> None:
        """End its connections: when this returns, the other ends reach no memory any more. Raises what pyverbs does
        when a queue pair cannot be ended: then memory has to be taken for in use.
        """
        self.landing.sever(self)


class Landing:
    """All listeners of one transport on one device."""

    def __init__(
        self, name: str, ip: str, peers: Sequence[str], networks: Sequence[Network], patience: Patience
    ) -> None:
        """`peers` and `networks`: who may connect. Raises EnvError."""
        self.ip = ip
        self.refused = ""  # the last address that was turned away
        self._peers = tuple(peers)
        self._networks = tuple(networks)
        self._patience = patience
        self._lock = threading.Lock()
        self._ports: dict[int, Port] = {}  # by the listener's handle
        self._by_ident: dict[int, tuple[Port, _Peer]] = {}
        self._ended: list[Ident] = []
        self._closed = False
        self.device: Device = open_device(name)
        with contextlib.ExitStack() as made:
            made.callback(self.device.close)
            try:
                self._channel = Channel()
            except OSError as problem:
                raise EnvError("RDMA's connection manager does not work", cause=problem.strerror) from None
            made.callback(self._channel.close)
            # nothing is ever posted here: one queue serves every pair
            self._completions = Completions(self.device, 16)
            made.callback(self._completions.close)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            made.callback(os.close, self._wake)
            self._made = made.pop_all()
        self._thread = threading.Thread(target=self._serve, name=f"kvctl-rdma-{name}", daemon=True)
        self._thread.start()

    def listen(self) -> Port:
        """A new listener. Raises EnvError."""
        with self._lock:
            if self._closed:
                raise EnvError("the transport is closed")
            try:
                ident = Ident(self._channel)
                try:
                    ident.bind(self.ip)
                    ident.listen()
                except OSError:
                    ident.close()
                    raise
            except OSError as problem:
                raise EnvError(f"cannot listen for RDMA on {self.ip}", cause=problem.strerror) from None
            port = Port(self, ident, ident.port)
            self._ports[ident.handle] = port
            return port

    def sever(self, port: Port) -> None:
        """See Port.sever."""
        with self._lock:
            if not port.severed:
                port.severed = True
                self._ports.pop(port.ident.handle, None)
                self._ended.append(port.ident)
            problems = self._end_all(port)
            if not self._closed:
                os.eventfd_write(self._wake, 1)
        if problems:
            raise problems[0]

    def _end_all(self, port: Port) -> list[Exception]:
        """All connections of a listener (under the lock); what went wrong with them."""
        problems: list[Exception] = []
        for peer in list(port.peers):
            try:
                self._end(port, peer)
            except Exception as problem:
                problems.append(problem)
        return problems

    def _end(self, port: Port, peer: _Peer) -> None:
        """The queue pair goes now, the handle when the thread gets to it (under the lock). A pair that does not go
        stays in the port's list, so that whoever severs it next tries again, and knows.
        """
        peer.pair.close()
        port.peers.remove(peer)
        self._by_ident.pop(peer.ident.handle, None)
        self._ended.append(peer.ident)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            with self._lock:
                closed, ended, self._ended = self._closed, self._ended, []
            for ident in ended:
                ident.disconnect()
                ident.close()
            if closed:
                return
            try:
                while (event := self._channel.next()) is not None:
                    self._handle(event)
            except OSError:
                return  # the device is gone; what is under way runs into its deadline

    def _handle(self, event: Event) -> None:
        if event.kind is Kind.CONNECT_REQUEST:
            ident = Ident(self._channel, event.ident)
            with self._lock:
                accepted = self._accept(event.listener, ident)
            if not accepted:
                ident.reject()
                ident.close()
        elif event.kind not in {Kind.ESTABLISHED, Kind.TIMEWAIT_EXIT, Kind.ADDR_CHANGE}:
            with self._lock:
                found = self._by_ident.get(event.ident)
                if found is not None:
                    with contextlib.suppress(Exception):
                        self._end(*found)
                    os.eventfd_write(self._wake, 1)

    def _accept(self, listener: int, ident: Ident) -> bool:
        port = self._ports.get(listener)
        if port is None or self._closed or len(port.peers) >= _PER_PORT:
            return False
        if not allowed(ident.peer, self._peers, self._networks):
            self.refused = ident.peer
            return False
        pair: QueuePair | None = None
        try:
            pair = QueuePair(self.device, self._completions.queue, 1)
            pair.prepare(ident)
            pair.start(ident, self._patience)
            ident.accept(pair.number, self._patience.retries)
        except Exception:  # pyverbs' own, or the other end went away: it will see that it was not accepted
            if pair is not None:
                pair.close()
            return False
        peer = _Peer(ident, pair)
        port.peers.append(peer)
        self._by_ident[ident.handle] = (port, peer)
        return True

    def close(self) -> None:
        """Ends all connections and listeners."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for port in list(self._ports.values()):
                port.severed = True
                self._ended.append(port.ident)
                self._end_all(port)
            self._ports.clear()
            os.eventfd_write(self._wake, 1)
        self._thread.join(_JOIN_SECONDS)
        self._made.close()
