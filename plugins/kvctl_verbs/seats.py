"""What one operation at a time has for itself: an HTTP connection, and a listener on each device that it used."""

from __future__ import annotations

import contextlib

from kvctl.memory.buffers import HostBuffer
from kvctl.transports.wire import Connection
from kvctl_verbs.landing import Port
from kvctl_verbs.regions import Region


class Seat:
    """Belongs to whoever took it."""

    __slots__ = ("bounce", "bounce_region", "connection", "ports")

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.ports: dict[int, Port] = {}  # by rail
        # memory for what no device can write to
        self.bounce: HostBuffer | None = None
        self.bounce_region: Region | None = None

    def drop(self) -> None:
        """End the HTTP connection."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def free_bounce(self) -> None:
        if self.bounce_region is not None:
            self.bounce_region.close()
        if self.bounce is not None:
            self.bounce.close()
        self.bounce = self.bounce_region = None

    def close(self) -> None:
        self.drop()
        for port in self.ports.values():
            with contextlib.suppress(Exception):  # the landing's close ends what is left, and says so
                port.sever()
        self.ports.clear()
        self.free_bounce()
