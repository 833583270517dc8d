"""The cable between guests: frames over Unix sockets, none of the host's network."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

_BUFFER = 8 << 20


class Wire:
    """One link. `ends[n]` is guest n's. Two guests hold the ends of one socket pair; more are joined by a switch, a
    thread here that learns addresses as any switch does.

    This process keeps every end open: a guest that died leaves a silent wire, as a host that lost power does. Were the
    socket closed, its peer's kernel would spin on connection errors.
    """

    def __init__(self, guests: int) -> None:
        self._stop: socket.socket | None = None
        self._thread: threading.Thread | None = None
        if guests == 2:
            self.ends = list(_pair())
            self._ports: list[socket.socket] = []
            return
        pairs = [_pair() for _ in range(guests)]
        self.ends = [theirs for _, theirs in pairs]
        self._ports = [ours for ours, _ in pairs]
        self._stop, stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._switch, args=(stopped,), name="rdma-lab-switch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._stop is not None and self._thread is not None:
            self._stop.close()
            self._thread.join(10)
        for end in (*self.ends, *self._ports):
            end.close()

    def _switch(self, stopped: socket.socket) -> None:
        where: dict[bytes, socket.socket] = {}
        with selectors.DefaultSelector() as ready, stopped:
            ready.register(stopped, selectors.EVENT_READ)
            for port in self._ports:
                port.setblocking(False)
                ready.register(port, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is stopped:
                        return
                    assert isinstance(key.fileobj, socket.socket)
                    self._forward(key.fileobj, where)

    def _forward(self, port: socket.socket, where: dict[bytes, socket.socket]) -> None:
        """A bounded batch, so that one busy port does not starve the others."""
        for _ in range(64):
            try:
                frame = port.recv(65536)
            except (BlockingIOError, ConnectionError):
                return
            to, sender = frame[:6], frame[6:12]
            where[sender] = port
            known = where.get(to)
            for out in [known] if known is not None else [other for other in self._ports if other is not port]:
                # a full queue drops the frame: what a switch does, and Soft-RoCE sends again
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    out.send(frame)


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        for option, forced in ((socket.SO_SNDBUF, 32), (socket.SO_RCVBUF, 33)):  # SO_SNDBUFFORCE, SO_RCVBUFFORCE
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
            with contextlib.suppress(PermissionError):
                end.setsockopt(socket.SOL_SOCKET, forced, _BUFFER)
    return pair
