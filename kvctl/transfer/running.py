"""What the parts of a run share under its one lock: lanes, what is left to do, what is in flight, what was counted.

State alone, and what keeps it whole. What follows from it is decided elsewhere: what a lane does next in `choosing`,
where bytes go that have arrived in `handing`, what follows the end of an attempt in `ending`, when the run ends in
`execute`. Nothing here starts a thread, waits, or calls a transport.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvctl.core.context import Context
from kvctl.core.errors import KvctlError
from kvctl.memory.arena import Arena
from kvctl.transfer.lanes import Lane
from kvctl.transfer.tasks import Place, RunStats, Spread, Task

MEMORY: Final = 256  # completions that the p95 of peers is taken from


@dataclass(slots=True, eq=False)
class TaskState:
    """A task, and how far it got."""

    task: Task
    tries: int = 0
    first_failure: float = 0.0
    bad_places: set[int] = field(default_factory=set)  # members that cannot serve it
    rereads: int = 0
    attempts: list[Attempt] = field(default_factory=list)  # in flight
    slot: int | None = None
    winner: Attempt | None = None  # a hedge that waits for the original's end
    finishing: bool = False
    last_error: KvctlError | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """An operation of a lane's transport for a task: the first one, a later try, or a hedge (with `scratch`)."""

    op_id: int
    state: TaskState
    lane: Lane
    place: Place
    started: float
    scratch: int | None = None
    spread: Spread | None = None  # where the transport itself puts the bytes
    lost: bool = False  # another attempt has won; what this one brings is not used
    handed: bool | BaseException = False  # over, on the thread that moved the bytes; or what came of that


class Run:
    """`arena` holds tasks that bring no buffer. Everything is read and changed with `cv` held, where idle drivers wait
    for work; `ended` has the same lock, and the caller waits there: it is not woken for each range.
    """

    def __init__(self, lanes: Sequence[Lane], ctx: Context, arena: Arena | None) -> None:
        self.lanes = list(lanes)
        self.ctx = ctx
        self.arena = arena
        self.by_member: dict[int, list[Lane]] = {}
        for lane in self.lanes:
            self.by_member.setdefault(lane.member, []).append(lane)
        lock = threading.Lock()
        self.cv = threading.Condition(lock)
        self.ended = threading.Condition(lock)
        self.attempts: dict[int, Attempt] = {}
        self.inflight: dict[int, int] = {id(lane): 0 for lane in self.lanes}
        self.inflight_bytes = 0
        self.unfinished: set[TaskState] = set()
        self.troubled: set[TaskState] = set()  # failed at least once, not finished
        self.hedge_arena: Arena | None = None
        self.recent: deque[float] = deque(maxlen=MEMORY)  # seconds that reads and writes took
        self.error: BaseException | None = None
        self.over = False
        self.handing = 0  # threads of transports that hand over just now
        self.last_progress = 0.0
        self.stats = RunStats()

    def fail(self, error: BaseException) -> None:
        """The run ends with the first error."""
        self.error = self.error or error

    def tell(self) -> None:
        """Something changed: idle drivers look for work, the caller only for the end."""
        self.cv.notify_all()
        if not self.unfinished or self.error is not None:
            self.ended.notify_all()

    def left_places(self, state: TaskState) -> list[Place]:
        """Where a task may still be served."""
        return [p for p in state.task.places if p.member in self.by_member and p.member not in state.bad_places]

    def give_slot(self, state: TaskState) -> None:
        if state.slot is not None and self.arena is not None:
            self.arena.give(state.slot)
            state.slot = None

    def free_scratch(self, attempt: Attempt) -> None:
        if attempt.scratch is not None and self.hedge_arena is not None:
            self.hedge_arena.give(attempt.scratch)
            attempt.scratch = None
