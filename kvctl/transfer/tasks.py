"""What the executor moves: tasks, the places they can be read from, and what was counted. Values only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from kvctl.memory.buffers import Buffer


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes are: member index, key there, and the version they must have (None: any)."""

    member: int
    key: str
    version: str | None = None


Spread = Sequence[memoryview | int]
"""Where the bytes of a range go, in turn: into a view, or, for so many of them, through the arena."""


def as_parts(spread: Spread, arena: memoryview, at: int) -> tuple[memoryview, ...]:
    """The spread as views: what goes through the arena, from `at` on in one piece."""
    if not staged_bytes(spread):
        return tuple(spread)  # type: ignore[arg-type]  # as the line above says
    parts: list[memoryview] = []
    for item in spread:
        if isinstance(item, memoryview):
            parts.append(item)
        else:
            parts.append(arena[at : at + item])
            at += item
    return tuple(parts)


def staged_bytes(spread: Spread) -> int:
    """How many bytes go through the arena."""
    if int not in set(map(type, spread)):  # thousands of views a second: no step of Python for each
        return 0
    return sum(item for item in spread if isinstance(item, int))


def spread_out(view: memoryview, spread: Spread) -> memoryview:
    """Copy a range in one piece to where its bytes belong; what is left to the arena moves to the view's start."""
    at = kept = 0
    for item in spread:
        if isinstance(item, memoryview):
            item[:] = view[at : at + len(item)]
            at += len(item)
        else:
            view[kept : kept + item] = view[at : at + item]
            kept += item
            at += item
    return view[:kept]


@dataclass(frozen=True, slots=True)
class Task:
    """Move `length` bytes at `offset` of an object. Any of `places` serves a read, best first; a write has one.

    `buffer` None: the bytes land in a slot of the executor's arena, which is free again when `on_bytes`
    returns. `on_bytes(task, view)` verifies and hands over, on a worker thread; an IntegrityError from it makes
    the executor try another place. `at_once`: it waits for nothing, so that a thread that moves bytes may call it.
    Lower `priority` first.

    `spread`, without a buffer: a read whose bytes go to several places. It is called for each attempt, under the
    executor's lock. Transports with `scatter` move the bytes there themselves; else they go through the arena. The
    view that `on_bytes` gets is then what the spread leaves to the arena, in one piece.

    `parts`: a write whose bytes lie in several places; only for lanes whose transports have `gather`, and nothing of
    the buffer is written then.
    """

    places: tuple[Place, ...]
    offset: int
    length: int
    kind: Literal["read", "write"] = "read"
    object_size: int | None = None
    buffer: Buffer | None = None
    buffer_offset: int = 0
    on_bytes: Callable[[Task, memoryview], None] | None = None
    priority: int = 0
    spread: Callable[[], Spread] | None = None
    parts: tuple[memoryview, ...] = ()
    at_once: bool = False


@dataclass(slots=True)
class RunStats:
    """Exact counts of a run. `fetched` counts bytes of successful reads that were used; `hedged_bytes` those of
    reads that were not. Seconds of wall time."""

    tasks: int = 0
    bytes: int = 0
    requests: int = 0
    retries: int = 0
    hedges: int = 0
    hedge_wins: int = 0
    hedged_bytes: int = 0
    seconds: float = 0.0
    durations: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: RunStats) -> None:
        """Count a further run."""
        self.tasks += other.tasks
        self.bytes += other.bytes
        self.requests += other.requests
        self.retries += other.retries
        self.hedges += other.hedges
        self.hedge_wins += other.hedge_wins
        self.hedged_bytes += other.hedged_bytes
        self.seconds += other.seconds
        self.durations += other.durations
        self.notes += other.notes


class StageClock:
    """Busy seconds per stage (verify, copy, write, ..), added up over threads. Thread-safe."""

    def __init__(self) -> None:
        self._busy: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            with self._lock:
                self._busy[stage] = self._busy.get(stage, 0.0) + spent

    def busy(self) -> Mapping[str, float]:
        with self._lock:
            return dict(self._busy)
