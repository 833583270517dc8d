"""The executor: many tasks over many lanes, each lane pulling its next task when it has room.

Here are the run's threads and its end: one driver thread per lane, which owns that lane's transport, and the caller's,
which watches deadlines and whether it is to stop. Which task a lane takes next is chosen in `choosing`, what follows
the end of an operation is decided in `ending`; one lock guards what they share (`running`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

from kvctl.core.context import Context
from kvctl.core.errors import InterruptedRunError, KvctlError, StalledError, TransientError
from kvctl.core.units import format_size
from kvctl.memory.arena import Arena
from kvctl.memory.buffers import Buffer
from kvctl.transfer.choosing import Choosing
from kvctl.transfer.ending import Ending
from kvctl.transfer.handing import Handing
from kvctl.transfer.lanes import Lane
from kvctl.transfer.running import Run, TaskState
from kvctl.transfer.tasks import RunStats, Task

TICK: Final = 0.05  # seconds between looks at deadlines, delayed retries and hedges


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
        self._run = Run(lanes, ctx, arena)
        self._ctx = ctx
        self._max_rate = max_rate
        self._finishers = finishers or min(4, os.cpu_count() or 1)
        self._handing = Handing(self._run)
        # a range that waits for its turn under a rate limit is not slow
        hedge = hedge and len(self._run.lanes) > 1 and max_rate is None
        self._choosing = Choosing(self._run, self._handing.landed, budget=budget, hedge=hedge)

    @property
    def stats(self) -> RunStats:
        return self._run.stats

    def run(self, tasks: Iterable[Task]) -> RunStats:
        """Move everything. Raises KvctlError; InterruptedRunError when asked to stop."""
        run = self._run
        states = [TaskState(task) for task in tasks if task.length > 0]
        # stable: equal priorities keep the plan's order
        states.sort(key=lambda state: state.task.priority)
        for state in states:
            run.unfinished.add(state)
            self._choosing.enqueue(state)
        run.stats.tasks = len(states)
        if not states:
            return run.stats
        started = run.last_progress = time.monotonic()
        with ExitStack() as registered, ThreadPoolExecutor(self._finishers, thread_name_prefix="kvctl-finish") as pool:
            ending = Ending(run, self._choosing, self._handing, pool)
            drivers = [
                threading.Thread(target=self._drive, args=(lane, ending), name=f"kvctl-lane-{number}", daemon=True)
                for number, lane in enumerate(run.lanes)
            ]
            self._register(registered, states)
            try:
                for driver in drivers:
                    driver.start()
                self._watch()
            finally:
                with run.cv:
                    run.over = True
                    run.cv.notify_all()
                for driver in drivers:
                    if driver.ident is not None:
                        driver.join()
                with run.cv:
                    run.cv.wait_for(lambda: not run.handing)
        if run.hedge_arena is not None:
            run.hedge_arena.close()
        run.stats.seconds = time.monotonic() - started
        if run.error is not None:
            raise run.error
        return run.stats

    def _register(self, registered: ExitStack, states: Sequence[TaskState]) -> None:
        """The memory that several ranges land in or come from, once per lane and for this run; what a single range
        uses is the transport's own matter.
        """
        arena = self._run.arena
        uses: dict[int, tuple[Buffer, int]] = {}
        for state in states:
            buffer = state.task.buffer or (arena.buffer if arena is not None else None)
            if buffer is not None:
                uses[id(buffer)] = (buffer, uses.get(id(buffer), (buffer, 0))[1] + 1)
        for buffer, count in uses.values():
            if count > 1:
                for lane in self._run.lanes:
                    registered.callback(lane.transport.register(buffer).close)

    # -- the caller's thread: deadlines, delayed retries, cancellation ------------------------------------

    def _watch(self) -> None:
        run = self._run
        stop_deadline = 0.0
        with run.cv:
            while run.unfinished and run.error is None:
                run.ended.wait(TICK)
                now = time.monotonic()
                if self._ctx.cancel.stopping:
                    stop_deadline = stop_deadline or now + self._ctx.cancel.drain_seconds
                    if self._ctx.cancel.aborting or not run.attempts or now > stop_deadline:
                        run.error = InterruptedRunError(
                            f"stopped with {len(run.unfinished)} of {run.stats.tasks} ranges to go",
                            signum=self._ctx.cancel.signum,
                        )
                    continue
                self._choosing.wake_delayed(now)
                self._check_deadlines(now)

    def _check_deadlines(self, now: float) -> None:
        run = self._run
        limit = self._ctx.retry.stall_timeout
        for state in run.troubled:
            if now - state.first_failure > limit and not state.finishing:
                run.error = self._gave_up(state, limit)
                return
        waiting_turn = 2 * run.inflight_bytes / self._max_rate if self._max_rate else 0.0
        if now - run.last_progress > limit + waiting_turn:
            if run.troubled:  # what failed says more than that nothing moved
                run.error = self._gave_up(next(iter(run.troubled)), limit)
                return
            waiting = sorted({attempt.lane.member_name for attempt in run.attempts.values()})
            run.error = StalledError(
                f"no progress for {limit:g} s",
                cause=f"waiting for {', '.join(waiting)}" if waiting else "nothing could be issued",
                hint="check the network and the servers; --stall-timeout sets how long to wait",
            )

    def _gave_up(self, state: TaskState, limit: float) -> KvctlError:
        run, error = self._run, state.last_error
        place = state.task.places[0]
        only = {p.member for p in state.task.places}
        share = sum(s.task.length for s in run.unfinished if {p.member for p in s.task.places} <= only)
        names = ", ".join(sorted({lane.member_name for m in only for lane in run.by_member.get(m, [])}))
        kind = type(error) if isinstance(error, TransientError) else TransientError
        return kind(
            f"gave up on {place.key} after {limit:g} s and {state.tries} tries",
            cause=f"{error}; {format_size(share)} are still missing from {names}",
            hint=(error.hint if error is not None else None) or "run the same command again when the member answers",
            details={"key": place.key, "members": names, "missing_bytes": share},
        )

    # -- lane drivers --------------------------------------------------------------------------------------

    def _drive(self, lane: Lane, ending: Ending) -> None:
        try:
            self._drive_lane(lane, ending)
        except BaseException as error:  # nobody else hears of it, and the caller would wait
            self._fatal(error)

    def _drive_lane(self, lane: Lane, ending: Ending) -> None:
        run, transport = self._run, lane.transport
        cancelled = False
        deadline = 0.0
        while True:
            with run.cv:
                ops = self._choosing.take(lane)
                busy = run.inflight[id(lane)]
                room = busy < lane.window
                if run.over and not busy:
                    return
                if not ops and not busy:
                    run.cv.wait(TICK if self._choosing.soon(lane) else 1.0)
                    continue
                stale = [] if cancelled or not run.over else self._of(lane)
            if stale:
                transport.cancel(stale)
                cancelled, deadline = True, time.monotonic() + self._ctx.cancel.drain_seconds
            if ops:
                try:
                    transport.submit(ops)
                except KvctlError as error:
                    self._fatal(error)
            for completion in transport.poll(TICK if room or cancelled else 10 * TICK):
                ending.completed(lane, completion)
            if cancelled and time.monotonic() > deadline:
                return  # the transport's close waits for, or quarantines, what is left

    def _of(self, lane: Lane) -> list[int]:
        return [op_id for op_id, attempt in self._run.attempts.items() if attempt.lane is lane]

    def _fatal(self, error: BaseException) -> None:
        with self._run.cv:
            self._run.fail(error)
            self._run.tell()
