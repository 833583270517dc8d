"""What a lane does next: its member's queue, what it takes from others when that is empty, tasks that wait for another
try, and hedges. Pulling shares the load by outstanding work: a slow endpoint pulls less and blocks nobody.

Hedging: a read that is much older than its peers' p95 is issued again over another lane, into scratch memory. How
that ends is decided in `ending`, as the end of every attempt is.

Chooses and makes the operation, no more: it moves no byte and calls no transport, and of what comes of an operation it
knows only what `ending` tells it.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from kvctl.memory.arena import Arena
from kvctl.memory.buffers import Buffer
from kvctl.transfer.lanes import Lane, percentile
from kvctl.transfer.running import Attempt, Run, TaskState
from kvctl.transfer.tasks import Spread, as_parts
from kvctl.transports.api import Op

STEAL_SCAN: Final = 64  # tasks looked at when a lane helps another member
HEDGE_SLOTS: Final = 4
HEDGE_AT: Final = 2.0  # times the peers' p95, for an idle lane
HEDGE_FIRST: Final = 4.0  # times the peers' p95: before new work
HEDGE_FLOOR: Final = 0.05  # seconds; below it the scheduler alone makes stragglers


class Choosing:
    """Everything with the run's lock held. `landed`: see `Op.landed`, for attempts whose bytes land where they belong.
    `budget` bounds bytes in flight (None: the windows alone bound them).
    """

    def __init__(self, run: Run, landed: Callable[[Attempt], None], *, budget: int | None, hedge: bool) -> None:
        self._run = run
        self._landed = landed
        self._budget = budget
        self._hedge = hedge
        self._queues: dict[int, deque[TaskState]] = {member: deque() for member in run.by_member}
        self._delayed: list[tuple[float, TaskState]] = []
        self._ids = itertools.count(1)

    # -- what waits ----------------------------------------------------------------------------------------

    def enqueue(self, state: TaskState, *, front: bool = False) -> None:
        queue = self._queues[self._preferred(state)]
        if front:
            queue.appendleft(state)
        else:
            queue.append(state)

    def delay(self, state: TaskState, until: float) -> None:
        """Nobody takes it before then (`time.monotonic`)."""
        self._delayed.append((until, state))

    def wake_delayed(self, now: float) -> None:
        due = [state for when, state in self._delayed if when <= now]
        if due:
            self._delayed = [item for item in self._delayed if item[0] > now]
            for state in due:
                self.enqueue(state, front=True)
            self._run.cv.notify_all()

    def soon(self, lane: Lane) -> bool:
        """Whether an idle lane has to look again soon: where it may retry, or hedge what others are slow with."""
        return bool(self._delayed or lane.not_before or (self._hedge and self._run.attempts))

    def elsewhere(self, state: TaskState, lane: Lane) -> bool:
        """Whether another member that is up can serve the task."""
        return any(
            p.member != lane.member and p.member not in state.bad_places and self._is_up(p.member)
            for p in state.task.places
        )

    def send_elsewhere(self, state: TaskState, lane: Lane) -> None:
        """To the head of another member's queue."""
        for place in state.task.places:
            if place.member != lane.member and place.member not in state.bad_places and place.member in self._queues:
                self._queues[place.member].appendleft(state)
                return

    def leave(self, member: int) -> None:
        """A member went down: what others can serve moves to them."""
        if self._is_up(member):
            return
        queue = self._queues[member]
        stay: deque[TaskState] = deque()
        for state in queue:
            target = self._preferred(state)
            (stay if target == member else self._queues[target]).append(state)
        self._queues[member] = stay

    def _preferred(self, state: TaskState) -> int:
        """The first place's member that is up; the least loaded of equals is found by stealing later."""
        for place in state.task.places:
            if place.member not in state.bad_places and self._is_up(place.member):
                return place.member
        usable = [p.member for p in self._run.left_places(state)]
        if not usable:
            usable = [p.member for p in state.task.places if p.member in self._queues]
        return next(filter(self._is_up, usable), usable[state.tries % len(usable)])

    def _is_up(self, member: int) -> bool:
        return any(not lane.down for lane in self._run.by_member.get(member, ()))

    # -- what a lane takes -----------------------------------------------------------------------------------

    def take(self, lane: Lane) -> list[Op]:
        """As many operations as the lane has room for."""
        ops: list[Op] = []
        run, now = self._run, time.monotonic()
        if run.over or run.error is not None or run.ctx.cancel.stopping or lane.not_before > now:
            return ops
        while run.inflight[id(lane)] < lane.window:
            op = (
                self._hedge_op(lane, now, HEDGE_FIRST)
                or self._next_op(lane, now)
                or self._hedge_op(lane, now, HEDGE_AT)
            )
            if op is None:
                break
            ops.append(op)
        return ops

    def _next_op(self, lane: Lane, now: float) -> Op | None:
        run = self._run
        queue = self._queues[lane.member]
        source, state = queue, (queue[0] if queue else None)
        if state is None or (lane.down and self.elsewhere(state, lane)):
            source, state = self._steal(lane)
        if state is None:
            return None
        task = state.task
        if self._budget is not None and run.inflight_bytes and run.inflight_bytes + task.length > self._budget:
            return None
        buffer, offset = task.buffer, task.buffer_offset
        spread: Spread | None = None
        if buffer is None:
            if run.arena is None:
                raise AssertionError("a task without a buffer needs an arena")
            # a slot even where all bytes land elsewhere: it bounds how far reads run ahead of verification
            slot = run.arena.take(task.offset)
            if slot is None:
                return None
            state.slot = offset = slot
            buffer = run.arena.buffer
            if task.spread is not None and lane.transport.capabilities.scatter:
                spread = task.spread()
        if source[-1] is state:
            source.pop()
        else:
            source.remove(state)
        place = next(p for p in task.places if p.member == lane.member)
        return self._issue(Attempt(next(self._ids), state, lane, place, now, spread=spread), buffer, offset)

    def _steal(self, lane: Lane) -> tuple[deque[TaskState], TaskState | None]:
        """The last task of the longest other queue that this lane's member can serve."""
        if not lane.down:
            others = [queue for member, queue in self._queues.items() if member != lane.member and queue]
            for queue in sorted(others, key=len, reverse=True):
                for state in itertools.islice(reversed(queue), STEAL_SCAN):
                    if lane.member not in state.bad_places and any(p.member == lane.member for p in state.task.places):
                        return queue, state
        return self._queues[lane.member], None

    def _hedge_op(self, lane: Lane, now: float, factor: float) -> Op | None:
        run = self._run
        if not self._hedge or len(run.recent) < HEDGE_SLOTS or lane.down:
            return None
        threshold = max(HEDGE_FLOOR, factor * percentile(run.recent, 0.95))
        oldest: Attempt | None = None
        for attempt in run.attempts.values():
            state = attempt.state
            if (
                attempt.lane is not lane
                and now - attempt.started > threshold
                and state.task.kind == "read"
                and len(state.attempts) == 1
                and state.winner is None
                and not state.finishing
                and any(p.member == lane.member and p.member not in state.bad_places for p in state.task.places)
                and (oldest is None or attempt.started < oldest.started)
            ):
                oldest = attempt
        if oldest is None:
            return None
        if run.hedge_arena is None:
            longest = max(state.task.length for state in run.unfinished)
            run.hedge_arena = Arena(HEDGE_SLOTS, longest)
        task = oldest.state.task
        if task.length > run.hedge_arena.slot_bytes:
            return None
        scratch = run.hedge_arena.take(task.offset)
        if scratch is None:
            return None
        run.stats.hedges += 1
        place = next(p for p in task.places if p.member == lane.member)
        attempt = Attempt(next(self._ids), oldest.state, lane, place, now, scratch)
        return self._issue(attempt, run.hedge_arena.buffer, scratch)

    def _issue(self, attempt: Attempt, buffer: Buffer, offset: int) -> Op:
        run, state, lane, place = self._run, attempt.state, attempt.lane, attempt.place
        task = state.task
        state.attempts.append(attempt)
        run.attempts[attempt.op_id] = attempt
        if not run.inflight[id(lane)]:
            lane.active_since = attempt.started
        run.inflight[id(lane)] += 1
        run.inflight_bytes += task.length
        parts = task.parts if attempt.spread is None else as_parts(attempt.spread, buffer.view, offset)
        return Op(
            attempt.op_id, task.kind, place.key, task.offset, task.length, buffer, offset, place.version,
            task.object_size, task.priority, parts, landed=self._early(attempt),
        )  # fmt: skip

    def _early(self, attempt: Attempt) -> Callable[[], None] | None:
        """What hands over on the thread that moved the bytes, where they land where they belong."""
        task = attempt.state.task
        here = attempt.scratch is None and (task.spread is None or attempt.spread is not None)
        return partial(self._landed, attempt) if task.at_once and here and task.kind == "read" else None
