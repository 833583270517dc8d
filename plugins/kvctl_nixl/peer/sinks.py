"""Readers that are connected to a source, and what they asked to be written into their memory."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field

from kvctl_nixl.agent import Transfer
from kvctl_nixl.peer import frames
from kvctl_nixl.peer.frames import Header
from kvctl_nixl.peer.table import Entry


@dataclass(slots=True, eq=False)
class Push:
    """A write into a sink's memory that it asked for; `transfer` when it was posted."""

    sink: Sink
    id: int
    header: Header
    entry: Entry
    transfer: Transfer | None = None


@dataclass(slots=True, eq=False)
class Sink:
    """A connected reader. `agent` is the name that its metadata gave it here."""

    connection: socket.socket
    agent: str = ""
    sending: threading.Lock = field(default_factory=threading.Lock)
    gone: bool = False
    known: int = -1  # generation of our metadata that it has

    def answer(self, header: Header, blob: bytes = b"") -> None:
        """From its own thread, which may wait for it. A sink that takes no answer is gone."""
        with self.sending:
            try:
                if not self.gone:
                    frames.send(self.connection, header, blob)
            except OSError:
                self.drop()

    def try_answer(self, header: Header) -> bool:
        """From the mover, which waits for nobody: False when its own thread is sending, and to be tried again."""
        if not self.sending.acquire(blocking=False):
            return self.gone
        try:
            data = frames.pack(header)
            if not self.gone and self.connection.send(data, socket.MSG_DONTWAIT) != len(data):
                self.drop()  # it has let hundreds of answers lie
        except OSError:
            self.drop()
        finally:
            self.sending.release()
        return True

    def drop(self) -> None:
        self.gone = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
