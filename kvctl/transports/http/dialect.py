"""What a plug-in tells `HttpTransport` of its servers."""

from __future__ import annotations

from typing import Protocol

from kvctl.core.errors import KvctlError
from kvctl.transports.api import Op
from kvctl.transports.wire import Connection, Head


class Dialect(Protocol):
    """Thread-safe. `endpoint` and `url` (of the store) are for messages; `timeout`: seconds without a byte moving."""

    @property
    def endpoint(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def server(self) -> str:
        """What messages call it, such as 'a storage node'."""
        ...

    @property
    def timeout(self) -> float: ...
    def describe(self, op: Op) -> str:
        """The request an operation becomes, for -v: method, URL and range. Shows no credentials."""
        ...

    def refuse(self, op: Op) -> None:
        """Raises UsageError for a write that these servers cannot do."""
        ...

    def connect(self) -> Connection:
        """Raises OSError."""
        ...

    def read_head(self, op: Op) -> bytes:
        """The head of the ranged GET, its credentials included. Raises KvctlError."""
        ...

    def write_head(self, op: Op) -> bytes:
        """The head of the PUT. Raises KvctlError."""
        ...

    def fits(self, op: Op, head: bytes) -> bool:
        """Whether `head` (without its empty line) is, in the one form that most answers have, what `check` would find
        in order, and the connection can be used again: that saves parsing it. False where it may be anything else.
        """
        ...

    def expected(self, op: Op) -> tuple[bytes, bytes]:
        """The values of Content-Range and ETag with which a plain 206 of the right length is what `check` would find in
        order. An empty ETag: any will do; an empty range: it cannot be told.
        """
        ...

    def check(self, op: Op, head: Head) -> None:
        """That the body to come is what `op` asked for. Raises KvctlError or ProtocolError."""
        ...

    def check_written(self, op: Op, body: bytes) -> None:
        """That the body of a 2xx answer to a PUT tells of no trouble. Raises KvctlError."""
        ...

    def refusal(self, op: Op, head: Head, body: bytes) -> KvctlError:
        """The error for an answer that is no success."""
        ...

    def broken(self, op: Op, problem: Exception) -> KvctlError:
        """The error for a connection that cannot be made, broke, or went silent."""
        ...

    def try_differently(self, op: Op, problem: KvctlError) -> bool:
        """Whether this refusal asks for the request in another form, which heads have from now on."""
        ...
