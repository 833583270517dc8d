"""`Pace`: what holds a long transfer back for those who share the machine; `NoPace`: nothing does. Who keeps it decides
how: see `kvctl.checkpoint.pacing`.
"""

from __future__ import annotations

from typing import Protocol

from kvctl.transports.api import Transport


class Pace(Protocol):
    """Thread-safe, but for `begin` and `close`."""

    @property
    def least(self) -> int | None:
        """Bytes per second that it never goes below: what is slower has stalled. None: it holds nothing back."""
        ...

    def begin(self, total: int) -> None:
        """Before the first byte: so many are written, or found to be there. May take seconds, to measure."""
        ...

    def close(self) -> None: ...

    def paced(self, transport: Transport) -> Transport:
        """The transport, with its writes held back. Owns it."""
        ...

    def hold(self, nbytes: int) -> None:
        """The turn of bytes that are read or hashed, which cost less than to write. Raises InterruptedRunError when the
        run is stopping.
        """
        ...

    def skip(self, nbytes: int) -> None:
        """These are there already."""
        ...


class NoPace:
    """See `Pace`. As fast as it goes."""

    least: int | None = None

    def begin(self, total: int) -> None:
        return

    def close(self) -> None:
        return

    def paced(self, transport: Transport) -> Transport:
        return transport

    def hold(self, nbytes: int) -> None:
        return

    def skip(self, nbytes: int) -> None:
        return
