"""The seam between the storage node and whatever moves bytes by RDMA for it; found by entry point `kvctl.node_rdma`.

The node parses HTTP, authenticates, opens files and answers; an engine only moves one range between an open file
and the memory that a token names. Nothing here knows verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final, Literal, Protocol, runtime_checkable

from kvctl.core.errors import EnvError

GROUP: Final = "kvctl.node_rdma"

# Which header carried the token: Scality's `x-scal-rdma`, or `x-rdma-info` of the S3 variant.
Dialect = Literal["scal", "s3"]


@dataclass(frozen=True, slots=True)
class RdmaSettings:
    """`allow`: CIDRs that the node may connect back to besides the HTTP peer's own address. `options`: the engine's
    own, by name. `drain`: seconds that `close` may wait for transfers in flight.
    """

    allow: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    drain: float = 10.0


@dataclass(frozen=True, slots=True)
class RdmaRequest:
    """`token` as the header carried it (never to be logged), `peer` the IP address of the HTTP client, `key` for
    messages. `length` bytes move between the file at `offset` and the start of the memory that the token names.
    """

    token: str
    dialect: Dialect
    peer: str
    key: str
    offset: int
    length: int


class RdmaEngine(Protocol):
    """Made once per node. `size`, `send` and `receive` are blocking calls on worker threads of the node, up to
    `max_in_flight` at once. They raise the errors of `kvctl.core.errors`, which become the answer: UsageError 400
    (malformed token, memory too small), AuthError 403 (an address that is neither the peer's nor allowed),
    IncompatibleError 501 (a kind of token it does not know), TransientError 503, anything else 500.
    """

    @property
    def max_in_flight(self) -> int: ...
    def size(self, token: str, dialect: Dialect) -> int:
        """Bytes of memory that the token names: what a PUT without a body stores."""
        ...

    def send(self, request: RdmaRequest, fd: int) -> None:
        """GET: write the range of the file into the client's memory. Returns when the last byte is placed there,
        and after an error touches that memory no more. A file shorter than the range is a SizeMismatchError.
        """
        ...

    def receive(self, request: RdmaRequest, fd: int) -> None:
        """PUT: read the client's memory into the file (preallocated, `offset` is 0). Returns when all of it is
        written to the descriptor; the node syncs and names the file.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Counters and gauges by name; the node shows them as `kvctl_node_rdma_<name>`."""
        ...

    def close(self) -> None: ...


class Flight(Protocol):
    """A GET that a LoopEngine has begun. All calls but `finish` come from the loop's thread, and never wait. Each is
    ended once: it is placed, by `finish`, or by `abandon`.
    """

    @property
    def placed(self) -> bool:
        """The last byte is in the client's memory."""
        ...

    @property
    def stuck(self) -> bool:
        """It goes no further without waiting, or failed: `finish` is to be called."""
        ...

    def go(self) -> None:
        """Write. Nothing was written before. It raises nothing: what fails is stuck."""
        ...

    def leave(self) -> None:
        """`ready` will not tell of it: `finish` follows."""
        ...

    def finish(self) -> None:
        """The rest, on a worker thread, as `RdmaEngine.send` does it, with its errors."""
        ...

    def abandon(self) -> None:
        """Give it up: when this returns, the client's memory is touched no more. No harm after its end."""
        ...


@runtime_checkable
class LoopEngine(Protocol):
    """What an RdmaEngine may have besides: GETs that the node's event loop carries out itself."""

    @property
    def fd(self) -> int:
        """Readable when `ready` has something to tell."""
        ...

    def begin(self, request: RdmaRequest, fd: int, *, cached: bool) -> Flight | None:
        """None where it would have to wait, or for what `send` has an error for; then nothing happened. `cached`: the
        file's system never waits. The descriptor stays open until the flight's end.
        """
        ...

    def ready(self) -> Sequence[Flight]:
        """Flights that went, and are placed or stuck since the last call."""
        ...


def load_engines(settings: RdmaSettings) -> tuple[RdmaEngine | None, Sequence[str]]:
    """The first engine that can run here, and why the others cannot. An entry point names a function
    (RdmaSettings) -> RdmaEngine that raises EnvError where it cannot run.
    """
    reasons: list[str] = []
    for point in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            make: Callable[[RdmaSettings], Any] = point.load()  # Any: a plug-in's, held to the Protocol by its tests
            engine: RdmaEngine = make(settings)
        except EnvError as problem:
            reasons.append(f"{point.name}: {problem}")
        except Exception as problem:  # a plug-in's import runs foreign code: it may fail in any way
            reasons.append(f"{point.name}: {type(problem).__name__}: {problem}")
        else:
            return engine, reasons
    return None, reasons or ["no plug-in for RDMA is installed"]
