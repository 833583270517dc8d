"""The executor: many tasks over many lanes, each lane pulling its next task when it has room.

Pulling shares the load by outstanding work: a slow endpoint pulls less and blocks nobody. Retries, hedges and
verification are per task. One driver thread per lane owns that lane's transport; one lock guards the run.

Hedging: a read that is much older than its peers' p95 is issued again over another lane, into scratch memory.
If the scratch copy wins, the original is cancelled, and only after the transport confirmed that it touches the
destination no more is the scratch copied there: two transfers never race for one destination.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvctl.core.context import Context
from kvctl.core.errors import (
    IntegrityError,
    InterruptedRunError,
    KvctlError,
    MemberDownError,
    StalledError,
    TransientError,
    VersionChangedError,
)
from kvctl.core.units import format_size
from kvctl.memory.arena import Arena
from kvctl.memory.buffers import Buffer
from kvctl.transfer.lanes import Lane, percentile
from kvctl.transfer.tasks import Place, RunStats, Spread, Task, as_parts, spread_out, staged_bytes
from kvctl.transports.api import Completion, Op, Status

TICK: Final = 0.05  # seconds between looks at deadlines, delayed retries and hedges
MEMORY: Final = 256  # completions that the p95 of peers is taken from
STEAL_SCAN: Final = 64  # tasks looked at when a lane helps another member
HEDGE_SLOTS: Final = 4
HEDGE_AT: Final = 2.0  # times the peers' p95, for an idle lane
HEDGE_FIRST: Final = 4.0  # times the peers' p95: before new work
HEDGE_FLOOR: Final = 0.05  # seconds; below it the scheduler alone makes stragglers
DOWN_AFTER: Final = 3  # refused in a row


@dataclass(slots=True, eq=False)
class _State:
    task: Task
    tries: int = 0
    first_failure: float = 0.0
    bad_places: set[int] = field(default_factory=set)  # members that cannot serve it
    rereads: int = 0
    attempts: list[_Attempt] = field(default_factory=list)
    slot: int | None = None
    winner: _Attempt | None = None  # a hedge that waits for the original's end
    finishing: bool = False
    last_error: KvctlError | None = None


@dataclass(slots=True, eq=False)
class _Attempt:
    op_id: int
    state: _State
    lane: Lane
    place: Place
    started: float
    scratch: int | None = None
    spread: Spread | None = None  # where the transport itself puts the bytes
    lost: bool = False  # another attempt has won; what this one brings is not used
    handed: bool | BaseException = False  # over, on the thread that moved the bytes; or what came of that


class Executor:
    """Runs tasks once. `arena` holds tasks that bring no buffer; `budget` bounds bytes in flight (None: the
    windows alone bound them). `max_rate`: bytes/s that the lanes are held to, so that waiting for a turn is not
    taken for a stall. Raises the first fatal error after everything in flight has ended."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        ctx: Context,
        *,
        arena: Arena | None = None,
        budget: int | None = None,
        hedge: bool = True,
        finishers: int | None = None,
        max_rate: int | None = None,
    ) -> None:
        self._lanes = list(lanes)
        self._ctx = ctx
        self._arena = arena
        self._budget = budget
        # a range that waits for its turn under a rate limit is not slow
        self._hedge = hedge and len(self._lanes) > 1 and max_rate is None
        self._max_rate = max_rate
        self._finishers = finishers or min(4, os.cpu_count() or 1)
        self._by_member: dict[int, list[Lane]] = {}
        for lane in self._lanes:
            self._by_member.setdefault(lane.member, []).append(lane)
        lock = threading.Lock()
        self._cv = threading.Condition(lock)  # idle drivers wait here for work
        self._ended = threading.Condition(lock)  # the caller waits here for the end: it is not woken for each range
        self._queues: dict[int, deque[_State]] = {member: deque() for member in self._by_member}
        self._delayed: list[tuple[float, _State]] = []
        self._attempts: dict[int, _Attempt] = {}
        self._inflight: dict[int, int] = {id(lane): 0 for lane in self._lanes}
        self._inflight_bytes = 0
        self._ids = itertools.count(1)
        self._unfinished: set[_State] = set()
        self._troubled: set[_State] = set()  # failed at least once, not finished
        self._hedge_arena: Arena | None = None
        self._recent: deque[float] = deque(maxlen=MEMORY)
        self._error: BaseException | None = None
        self._over = False
        self._handing = 0  # threads of transports that hand over just now
        self._last_progress = 0.0
        self._pool: ThreadPoolExecutor | None = None
        self.stats = RunStats()

    def run(self, tasks: Iterable[Task]) -> RunStats:
        """Move everything. Raises KvctlError; InterruptedRunError when asked to stop."""
        states = [_State(task) for task in tasks if task.length > 0]
        # stable: equal priorities keep the plan's order
        states.sort(key=lambda state: state.task.priority)
        for state in states:
            self._unfinished.add(state)
            self._enqueue(state)
        self.stats.tasks = len(states)
        if not states:
            return self.stats
        started = self._last_progress = time.monotonic()
        drivers = [
            threading.Thread(target=self._drive, args=(lane,), name=f"kvctl-lane-{number}", daemon=True)
            for number, lane in enumerate(self._lanes)
        ]
        with (
            ExitStack() as registered,
            ThreadPoolExecutor(self._finishers, thread_name_prefix="kvctl-finish") as self._pool,
        ):
            self._register(registered, states)
            for driver in drivers:
                driver.start()
            try:
                self._watch()
            finally:
                with self._cv:
                    self._over = True
                    self._cv.notify_all()
                for driver in drivers:
                    driver.join()
                with self._cv:
                    self._cv.wait_for(lambda: not self._handing)
        if self._hedge_arena is not None:
            self._hedge_arena.close()
        self.stats.seconds = time.monotonic() - started
        if self._error is not None:
            raise self._error
        return self.stats

    def _register(self, registered: ExitStack, states: Sequence[_State]) -> None:
        """The memory that several ranges land in or come from, once per lane and for this run; what a single range
        uses is the transport's own matter.
        """
        uses: dict[int, tuple[Buffer, int]] = {}
        for state in states:
            buffer = state.task.buffer or (self._arena.buffer if self._arena is not None else None)
            if buffer is not None:
                uses[id(buffer)] = (buffer, uses.get(id(buffer), (buffer, 0))[1] + 1)
        for buffer, count in uses.values():
            if count > 1:
                for lane in self._lanes:
                    registered.callback(lane.transport.register(buffer).close)

    # -- the caller's thread: deadlines, delayed retries, cancellation ------------------------------------

    def _watch(self) -> None:
        stop_deadline = 0.0
        with self._cv:
            while self._unfinished and self._error is None:
                self._ended.wait(TICK)
                now = time.monotonic()
                if self._ctx.cancel.stopping:
                    stop_deadline = stop_deadline or now + self._ctx.cancel.drain_seconds
                    if self._ctx.cancel.aborting or not self._attempts or now > stop_deadline:
                        self._error = InterruptedRunError(
                            f"stopped with {self._left()} of {self.stats.tasks} ranges to go",
                            signum=self._ctx.cancel.signum,
                        )
                    continue
                self._wake_delayed(now)
                self._check_deadlines(now)

    def _left(self) -> int:
        return len(self._unfinished)

    def _wake_delayed(self, now: float) -> None:
        due = [state for when, state in self._delayed if when <= now]
        if due:
            self._delayed = [item for item in self._delayed if item[0] > now]
            for state in due:
                self._enqueue(state, front=True)
            self._cv.notify_all()

    def _check_deadlines(self, now: float) -> None:
        limit = self._ctx.retry.stall_timeout
        for state in self._troubled:
            if now - state.first_failure > limit and not state.finishing:
                self._error = self._gave_up(state, limit)
                return
        waiting_turn = 2 * self._inflight_bytes / self._max_rate if self._max_rate else 0.0
        if now - self._last_progress > limit + waiting_turn:
            if self._troubled:  # what failed says more than that nothing moved
                self._error = self._gave_up(next(iter(self._troubled)), limit)
                return
            waiting = sorted({attempt.lane.member_name for attempt in self._attempts.values()})
            self._error = StalledError(
                f"no progress for {limit:g} s",
                cause=f"waiting for {', '.join(waiting)}" if waiting else "nothing could be issued",
                hint="check the network and the servers; --stall-timeout sets how long to wait",
            )

    def _gave_up(self, state: _State, limit: float) -> KvctlError:
        error = state.last_error
        place = state.task.places[0]
        only = {p.member for p in state.task.places}
        share = sum(s.task.length for s in self._unfinished if {p.member for p in s.task.places} <= only)
        names = ", ".join(sorted({lane.member_name for m in only for lane in self._by_member.get(m, [])}))
        kind = type(error) if isinstance(error, TransientError) else TransientError
        return kind(
            f"gave up on {place.key} after {limit:g} s and {state.tries} tries",
            cause=f"{error}; {format_size(share)} are still missing from {names}",
            hint=(error.hint if error is not None else None) or "run the same command again when the member answers",
            details={"key": place.key, "members": names, "missing_bytes": share},
        )

    # -- lane drivers --------------------------------------------------------------------------------------

    def _drive(self, lane: Lane) -> None:
        transport = lane.transport
        cancelled = False
        deadline = 0.0
        while True:
            with self._cv:
                ops = self._take(lane)
                busy = self._inflight[id(lane)]
                room = busy < lane.window
                if self._over and not busy:
                    return
                if not ops and not busy:
                    # an idle lane has to look again where it may soon retry, or hedge what others are slow with
                    soon = self._delayed or lane.not_before or (self._hedge and self._attempts)
                    self._cv.wait(TICK if soon else 1.0)
                    continue
                stale = [] if cancelled or not self._over else self._of(lane)
            if stale:
                transport.cancel(stale)
                cancelled, deadline = True, time.monotonic() + self._ctx.cancel.drain_seconds
            if ops:
                try:
                    transport.submit(ops)
                except KvctlError as error:
                    self._fatal(error)
            for completion in transport.poll(TICK if room or cancelled else 10 * TICK):
                self._completed(lane, completion)
            if cancelled and time.monotonic() > deadline:
                return  # the transport's close waits for, or quarantines, what is left

    def _of(self, lane: Lane) -> list[int]:
        return [op_id for op_id, attempt in self._attempts.items() if attempt.lane is lane]

    def _fatal(self, error: BaseException) -> None:
        with self._cv:
            self._error = self._error or error
            self._tell()

    def _tell(self) -> None:
        """Something changed (under the lock): idle drivers look for work, the caller only for the end."""
        self._cv.notify_all()
        if not self._unfinished or self._error is not None:
            self._ended.notify_all()

    # -- choosing work (under the lock) ------------------------------------------------------------------

    def _enqueue(self, state: _State, *, front: bool = False) -> None:
        member = self._preferred(state)
        queue = self._queues[member]
        if front:
            queue.appendleft(state)
        else:
            queue.append(state)

    def _preferred(self, state: _State) -> int:
        """The first place's member that is up; the least loaded of equals is found by stealing later."""
        usable = [p.member for p in state.task.places if p.member in self._queues and p.member not in state.bad_places]
        if not usable:
            usable = [p.member for p in state.task.places if p.member in self._queues]
        for member in usable:
            if any(not lane.down for lane in self._by_member[member]):
                return member
        return usable[state.tries % len(usable)]

    def _take(self, lane: Lane) -> list[Op]:
        ops: list[Op] = []
        now = time.monotonic()
        if self._over or self._error is not None or self._ctx.cancel.stopping or lane.not_before > now:
            return ops
        while self._inflight[id(lane)] < lane.window:
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
        queue = self._queues[lane.member]
        source, state = queue, (queue[0] if queue else None)
        if state is None or (lane.down and self._elsewhere(state, lane)):
            source, state = self._steal(lane)
        if state is None:
            return None
        task = state.task
        if self._budget is not None and self._inflight_bytes and self._inflight_bytes + task.length > self._budget:
            return None
        buffer, offset = task.buffer, task.buffer_offset
        spread: Spread | None = None
        if buffer is None:
            if self._arena is None:
                raise AssertionError("a task without a buffer needs an arena")
            # a slot even where all bytes land elsewhere: it bounds how far reads run ahead of verification
            slot = self._arena.take(task.offset)
            if slot is None:
                return None
            state.slot = offset = slot
            buffer = self._arena.buffer
            if task.spread is not None and lane.transport.capabilities.scatter:
                spread = task.spread()
        if source[-1] is state:
            source.pop()
        else:
            source.remove(state)
        place = next(p for p in task.places if p.member == lane.member)
        return self._issue(_Attempt(next(self._ids), state, lane, place, now, spread=spread), buffer, offset)

    def _elsewhere(self, state: _State, lane: Lane) -> bool:
        return any(
            p.member != lane.member
            and p.member not in state.bad_places
            and any(not other.down for other in self._by_member.get(p.member, []))
            for p in state.task.places
        )

    def _steal(self, lane: Lane) -> tuple[deque[_State], _State | None]:
        """The last task of the longest other queue that this lane's member can serve."""
        if not lane.down:
            others = [queue for member, queue in self._queues.items() if member != lane.member and queue]
            for queue in sorted(others, key=len, reverse=True):
                for state in itertools.islice(reversed(queue), STEAL_SCAN):
                    if lane.member not in state.bad_places and any(p.member == lane.member for p in state.task.places):
                        return queue, state
        return self._queues[lane.member], None

    def _hedge_op(self, lane: Lane, now: float, factor: float) -> Op | None:
        if not self._hedge or len(self._recent) < HEDGE_SLOTS or lane.down:
            return None
        threshold = max(HEDGE_FLOOR, factor * percentile(self._recent, 0.95))
        oldest: _Attempt | None = None
        for attempt in self._attempts.values():
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
        if self._hedge_arena is None:
            longest = max(state.task.length for state in self._unfinished)
            self._hedge_arena = Arena(HEDGE_SLOTS, longest)
        task = oldest.state.task
        if task.length > self._hedge_arena.slot_bytes:
            return None
        scratch = self._hedge_arena.take(task.offset)
        if scratch is None:
            return None
        self.stats.hedges += 1
        place = next(p for p in task.places if p.member == lane.member)
        attempt = _Attempt(next(self._ids), oldest.state, lane, place, now, scratch)
        return self._issue(attempt, self._hedge_arena.buffer, scratch)

    def _issue(self, attempt: _Attempt, buffer: Buffer, offset: int) -> Op:
        state, lane, place = attempt.state, attempt.lane, attempt.place
        task = state.task
        state.attempts.append(attempt)
        self._attempts[attempt.op_id] = attempt
        if not self._inflight[id(lane)]:
            lane.active_since = attempt.started
        self._inflight[id(lane)] += 1
        self._inflight_bytes += task.length
        parts = task.parts if attempt.spread is None else as_parts(attempt.spread, buffer.view, offset)
        return Op(
            attempt.op_id, task.kind, place.key, task.offset, task.length, buffer, offset, place.version,
            task.object_size, task.priority, parts, landed=self._early(attempt),
        )  # fmt: skip

    def _early(self, attempt: _Attempt) -> Callable[[], None] | None:
        """What hands over on the thread that moved the bytes, where they land where they belong."""
        task = attempt.state.task
        here = attempt.scratch is None and (task.spread is None or attempt.spread is not None)
        return partial(self._landed, attempt) if task.at_once and here and task.kind == "read" else None

    # -- completions -------------------------------------------------------------------------------------

    def _completed(self, lane: Lane, completion: Completion) -> None:
        cancel: list[_Attempt] = []
        with self._cv:
            attempt = self._attempts.pop(completion.id)
            state = attempt.state
            state.attempts.remove(attempt)
            self._inflight[id(lane)] -= 1
            if not self._inflight[id(lane)]:
                lane.active_s += time.monotonic() - lane.active_since
            self._inflight_bytes -= state.task.length
            lane.requests += completion.requests
            self.stats.requests += completion.requests
            if completion.status is Status.DONE:
                cancel = self._succeeded(attempt, completion)
            elif completion.status is Status.UNKNOWN:
                self._abandoned(attempt, completion)
            else:
                self._not_done(attempt, completion)
            self._tell()
        for other in cancel:
            other.lane.transport.cancel([other.op_id])

    def _succeeded(self, attempt: _Attempt, completion: Completion) -> list[_Attempt]:
        lane, state = attempt.lane, attempt.state
        seconds = completion.finished - completion.started
        lane.streak, lane.down, lane.not_before = 0, "", 0.0
        lane.widen()
        lane.durations.append(seconds)
        lane.bytes += completion.nbytes
        self._recent.append(seconds)
        self.stats.durations.append(seconds)
        self._last_progress = completion.finished
        if attempt.lost:
            self.stats.hedged_bytes += completion.nbytes
            self._free_scratch(attempt)
            return []
        if attempt.scratch is not None and state.attempts:
            # the original still owns the destination: end it first
            state.winner = attempt
            original = state.attempts[0].lane
            original.window = max(1, original.window // 2)
            return list(state.attempts)
        if state.winner is not None:  # the original made it after all
            self.stats.hedged_bytes += completion.nbytes
            self._free_scratch(state.winner)
            state.winner = None
        losers = list(state.attempts)
        for loser in losers:
            loser.lost = True
        self._finish(state, attempt)
        return losers

    def _not_done(self, attempt: _Attempt, completion: Completion) -> None:
        state, lane = attempt.state, attempt.lane
        if state.winner is not None and attempt.scratch is None:
            winner, state.winner = state.winner, None
            self.stats.hedge_wins += 1
            self._finish(state, winner)
            return
        self._free_scratch(attempt)
        if attempt.lost or completion.status is Status.CANCELLED:
            return
        self._give_slot(state, only_if=not state.attempts and state.winner is None)
        error = completion.error or TransientError(f"{attempt.place.key} failed")
        self._failed(state, lane, attempt.place, error)

    def _abandoned(self, attempt: _Attempt, completion: Completion) -> None:
        """The transport may still write there: the range is never used again in this run."""
        self.stats.notes.append(f"{attempt.place.key}: {attempt.lane.transport.name} left a transfer in flight")
        if attempt.scratch is None and self._error is None:
            self._error = completion.error or TransientError(
                f"{attempt.place.key}: a transfer was abandoned in flight", hint="run the same command again"
            )

    def _failed(self, state: _State, lane: Lane, place: Place, error: KvctlError) -> None:
        """Decide what follows a failure: another place, a later try, or the end of the run."""
        now = time.monotonic()
        lane.failures += 1
        lane.streak += 1
        lane.window = max(1, lane.window // 2)
        state.last_error = error
        if state.attempts or state.winner is not None:
            return  # a hedge of it is under way
        if isinstance(error, MemberDownError) and lane.streak >= DOWN_AFTER and not lane.down:
            lane.down = str(error)
            note = f"member {lane.member_name}{f' ({lane.endpoint})' if lane.endpoint else ''} is down: {error}"
            self.stats.notes.append(note)
            self._ctx.progress.note(note)
            self._move_from(lane.member)
        if not error.retryable:
            state.bad_places.add(place.member)
            left = [p for p in state.task.places if p.member in self._queues and p.member not in state.bad_places]
            if isinstance(error, VersionChangedError) or not left:
                self._error = self._error or error
                return
            self.stats.notes.append(f"{lane.member_name} cannot serve {place.key}: {error}")
            self.stats.retries += 1
            self._enqueue(state, front=True)
            return
        state.tries += 1
        state.first_failure = state.first_failure or now
        self._troubled.add(state)
        lane.retries += 1
        self.stats.retries += 1
        policy = self._ctx.retry
        pause = random.uniform(0, min(policy.cap, policy.base * 2**lane.streak))
        if lane.streak > 1:
            lane.not_before = now + pause
        if self._elsewhere(state, lane):
            self._steal_from(state, lane)
        else:
            self._delayed.append((now + pause, state))

    def _steal_from(self, state: _State, lane: Lane) -> None:
        for place in state.task.places:
            if place.member != lane.member and place.member not in state.bad_places and place.member in self._queues:
                self._queues[place.member].appendleft(state)
                return

    def _move_from(self, member: int) -> None:
        """A member went down: what others can serve moves to them."""
        if any(not lane.down for lane in self._by_member[member]):
            return
        queue = self._queues[member]
        stay: deque[_State] = deque()
        for state in queue:
            target = self._preferred(state)
            (stay if target == member else self._queues[target]).append(state)
        self._queues[member] = stay

    # -- verification and hand-over (finisher threads) -----------------------------------------------------

    def _finish(self, state: _State, attempt: _Attempt) -> None:
        state.finishing = True
        outcome, attempt.handed = attempt.handed, False  # an error's frames know the attempt
        if outcome:
            self._handed(state, attempt, outcome)
            return
        placed = state.task.spread is None or attempt.spread is not None
        if state.task.on_bytes is None and attempt.scratch is None and placed:
            self._done(state)
            return
        if self._pool is None:
            raise AssertionError("the run has no finishers")
        self._pool.submit(self._hand_over, state, attempt)

    def _hand_over(self, state: _State, attempt: _Attempt) -> None:
        outcome = self._outcome(state, attempt)
        with self._cv:
            self._free_scratch(attempt)
            self._handed(state, attempt, outcome)
            self._tell()

    def _landed(self, attempt: _Attempt) -> None:
        """Hand over before the transport says that it is done; not when nobody waits for that any more."""
        state = attempt.state
        with self._cv:
            if self._over:
                return
            self._handing += 1
            state.finishing = True  # a hedge would come too late
        attempt.handed = self._outcome(state, attempt)
        with self._cv:
            self._handing -= 1
            if self._over:
                self._cv.notify_all()

    def _outcome(self, state: _State, attempt: _Attempt) -> bool | BaseException:
        task = state.task
        try:
            view = self._destination(state)
            if attempt.scratch is not None and self._hedge_arena is not None:
                view[:] = self._hedge_arena.buffer.view[attempt.scratch : attempt.scratch + task.length]
            if attempt.spread is not None:
                view = view[: staged_bytes(attempt.spread)]
            elif task.spread is not None:
                view = spread_out(view, task.spread())
            if task.on_bytes is not None:
                task.on_bytes(task, view)
        except BaseException as error:
            return error
        return True

    def _handed(self, state: _State, attempt: _Attempt, outcome: bool | BaseException) -> None:
        if isinstance(outcome, IntegrityError):
            self._corrupt(state, attempt, outcome)
        elif isinstance(outcome, BaseException):
            self._error = self._error or outcome
        else:
            self._done(state)

    def _destination(self, state: _State) -> memoryview:
        task = state.task
        if task.buffer is not None:
            if task.buffer.kind == "cuda":
                return memoryview(b"")  # out of the CPU's reach: whoever wants to look reads it back
            return task.buffer.view[task.buffer_offset : task.buffer_offset + task.length]
        if self._arena is None or state.slot is None:
            raise AssertionError("no slot")
        return self._arena.buffer.view[state.slot : state.slot + task.length]

    def _corrupt(self, state: _State, attempt: _Attempt, error: IntegrityError) -> None:
        """Bytes arrived that are not the right ones: read once more there, then elsewhere, then give up."""
        state.finishing = False
        state.last_error = error
        attempt.lane.failures += 1
        self.stats.notes.append(f"{attempt.lane.member_name}: {error}")
        self.stats.hedged_bytes += state.task.length
        if state.rereads >= 1:
            state.bad_places.add(attempt.place.member)
            state.rereads = 0
        else:
            state.rereads += 1
        left = [p for p in state.task.places if p.member in self._queues and p.member not in state.bad_places]
        self._give_slot(state, only_if=not state.attempts)
        if not left:
            self._error = self._error or error
            return
        attempt.lane.retries += 1
        self.stats.retries += 1
        self._enqueue(state, front=True)

    def _done(self, state: _State) -> None:
        self.stats.bytes += state.task.length
        self._unfinished.discard(state)
        self._troubled.discard(state)
        self._last_progress = time.monotonic()
        self._give_slot(state)
        self._ctx.progress.advance(state.task.length)

    def _give_slot(self, state: _State, *, only_if: bool = True) -> None:
        if only_if and state.slot is not None and self._arena is not None:
            self._arena.give(state.slot)
            state.slot = None

    def _free_scratch(self, attempt: _Attempt) -> None:
        if attempt.scratch is not None and self._hedge_arena is not None:
            self._hedge_arena.give(attempt.scratch)
            attempt.scratch = None
