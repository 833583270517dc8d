"""The two seams every plug-in implements, and the values that cross them.

`Store` is control: few, small, strongly consistent calls. `Transport` is bulk: many ranges in flight between
objects and memory. Both are checked by the public contracts in `kvctl.testing`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, Protocol, runtime_checkable

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import KvctlError
from kvctl.memory.buffers import Buffer

__all__ = [
    "HOST_KINDS",
    "Capabilities",
    "Completion",
    "Copied",
    "Copies",
    "ObjectInfo",
    "Op",
    "Registration",
    "Status",
    "Store",
    "StoreCapabilities",
    "StoreConfig",
    "Transport",
    "UploadInfo",
]

HOST_KINDS: Final = frozenset({"host", "pinned", "shared"})


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object: `key` relative to the store's prefix, `size` in bytes, `version` an opaque token that changes
    when the content is replaced (ETag; mtime and inode for files), `modified` in the store's own clock (UTC).
    """

    key: str
    size: int
    version: str
    modified: datetime


@dataclass(frozen=True, slots=True)
class UploadInfo:
    """An unfinished multipart upload (or temp file): `id` is what `abort` takes."""

    key: str
    id: str
    started: datetime


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """What a store can do. The store contract tests each flag both ways.

    conditional_put: `put(if_absent / if_version)` is atomic, one winner of any race.
    conditional_delete: `delete(if_version)` is atomic. strong_list: a put is in the next list.
    uploads: unfinished uploads can be listed and aborted. copy: it makes objects of others by itself, see `Copies`.
    """

    conditional_put: bool = True
    conditional_delete: bool = False
    strong_list: bool = True
    uploads: bool = False
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Copied:
    """An object that a store made of another one. `shared`: the two share their space, as two names of a file."""

    info: ObjectInfo
    shared: bool


@runtime_checkable
class Copies(Protocol):
    """What a store with the capability `copy` has besides. Wrappers have it whether or not what they wrap has."""

    def copy(self, source: str, key: str, *, if_version: str) -> Copied:
        """Make `key` hold what `source` holds at `if_version`: no byte passes through here. Atomic and durable when it
        returns; replaces what was there. Raises NotFoundError; ConflictError when the source is at another version;
        UsageError without the capability; IncompatibleError where the server refuses to, though others like it do.
        """
        ...


class Store(Protocol):
    """Control calls of one store. Thread-safe. Raises the errors of `kvctl.core.errors`:
    NotFoundError, AuthError, ConflictError (a condition did not hold), TransientError, EnvError, UsageError,
    CapacityError. Has no retry of its own.
    """

    @property
    def url(self) -> str: ...
    @property
    def capabilities(self) -> StoreCapabilities: ...
    def stat(self, key: str) -> ObjectInfo: ...
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in order of key (bytewise), paged inside."""
        ...

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """A small object or a range of it; shorter only where the object ends."""
        ...

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        """Atomic and durable when it returns. ConflictError when the condition does not hold."""
        ...

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        """Missing keys are no error. `if_version` only with one key."""
        ...

    def now(self) -> datetime:
        """The store's own clock, UTC."""
        ...

    def uploads(self) -> Iterator[UploadInfo]: ...
    def abort(self, upload: UploadInfo) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do. The transport contract tests each flag both ways.

    memory_kinds: buffer kinds it moves bytes to and from. alignment: bytes that offset, length and address
    must be multiples of (1: any). max_in_flight: operations it works on at once. ranged_write: a write may
    cover part of an object. one_sided: completions may be `unknown`. durable: a completed write survives
    power loss. zero_copy: bytes land in the buffer without an intermediate copy in user space.
    writes: it can write at all. scatter, gather: a read, a write takes `Op.parts`.
    """

    memory_kinds: frozenset[str] = HOST_KINDS
    alignment: int = 1
    max_in_flight: int = 8
    ranged_write: bool = False
    one_sided: bool = False
    durable: bool = True
    zero_copy: bool = True
    writes: bool = True
    scatter: bool = False
    gather: bool = False


class Status(enum.Enum):
    """How an operation ended. After DONE, FAILED or CANCELLED the transport touches the buffer no more; after
    UNKNOWN it may, so the range is quarantined until the transport is closed.
    """

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


@dataclass(slots=True, eq=False)
class Op:
    """Move `length` bytes between `key` at `offset` and `buffer` at `buffer_offset`.

    read: `version` (if given) must be the object's, else VersionChangedError; `object_size` (if given) is what
    the object must measure, else SizeMismatchError. write: makes the whole object of `object_size` bytes,
    atomically, unless the transport has `ranged_write`. Lower `priority` is wanted earlier. `parts`, only where the
    transport has `scatter` (reads) or `gather` (writes): these views in turn, together `length` bytes, are what is
    filled or written, and nothing of `buffer`.
    `pace`: called before each piece of a write moves, with its bytes; it may wait. What a transport does not ask for
    piece by piece it moves in one go.
    `landed`: a transport may call it, at most once, on the thread that moved the bytes of a read that will be DONE and
    before it tells so, but not before the read could be DONE. It raises nothing.
    """

    id: int
    kind: Literal["read", "write"]
    key: str
    offset: int
    length: int
    buffer: Buffer
    buffer_offset: int = 0
    version: str | None = None
    object_size: int | None = None
    priority: int = 0
    parts: tuple[memoryview, ...] = ()
    pace: Callable[[int], None] | None = None
    landed: Callable[[], None] | None = None

    @property
    def view(self) -> memoryview:
        """The place in `buffer`; of an operation without `parts`."""
        return self.buffer.view[self.buffer_offset : self.buffer_offset + self.length]

    @property
    def views(self) -> tuple[memoryview, ...]:
        """Where the bytes are, or go, in turn."""
        return self.parts or (self.view,)


@dataclass(slots=True, eq=False)
class Completion:
    """The end of one operation: `nbytes` moved, monotonic `started` and `finished` seconds, requests sent."""

    id: int
    status: Status
    nbytes: int = 0
    error: KvctlError | None = None
    started: float = 0.0
    finished: float = 0.0
    requests: int = 1


class Registration(Protocol):
    def close(self) -> None: ...


class Transport(Protocol):
    """Bulk moves over one endpoint of one store. No retry, no limit, no log: those are wrappers.

    `submit` and `poll` are called by one driver thread; `cancel` and `close` from any. Never reports bytes as
    DONE whose length, range and version it did not check.
    """

    @property
    def name(self) -> str: ...
    @property
    def capabilities(self) -> Capabilities: ...
    def register(self, buffer: Buffer) -> Registration: ...
    def submit(self, ops: Sequence[Op]) -> None: ...
    def poll(self, timeout: float | None) -> list[Completion]:
        """Completions so far; waits up to `timeout` seconds (None: for ever) for the first."""
        ...

    def cancel(self, ids: Sequence[int]) -> None: ...
    def close(self) -> None: ...
