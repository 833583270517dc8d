"""What follows the end of an attempt: the task is done, is tried again there, later or elsewhere, or the run fails.
Retries, lost hedges and verification are per task.

A hedge that wins cancels the original, and only after the transport confirmed that it touches the destination no more
is the scratch copied there: two transfers never race for one destination.

Decides, and counts; when a task is issued again and by whom is `choosing`'s, the bytes are `handing`'s.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvctl.core.errors import IntegrityError, KvctlError, MemberDownError, TransientError, VersionChangedError
from kvctl.transfer.choosing import Choosing
from kvctl.transfer.handing import Handing
from kvctl.transfer.lanes import Lane
from kvctl.transfer.running import Attempt, Run, TaskState
from kvctl.transfer.tasks import Place
from kvctl.transports.api import Completion, Status

DOWN_AFTER: Final = 3  # refused in a row


class Ending:
    """`pool`: threads on which bytes are handed over. Private methods are called with the run's lock held."""

    def __init__(self, run: Run, choosing: Choosing, handing: Handing, pool: ThreadPoolExecutor) -> None:
        self._run = run
        self._choosing = choosing
        self._handing = handing
        self._pool = pool

    def completed(self, lane: Lane, completion: Completion) -> None:
        """An operation of the lane has ended, in any way. Called by the lane's driver, without the lock."""
        run = self._run
        cancel: list[Attempt] = []
        with run.cv:
            attempt = run.attempts.pop(completion.id)
            state = attempt.state
            state.attempts.remove(attempt)
            run.inflight[id(lane)] -= 1
            if not run.inflight[id(lane)]:
                lane.active_s += time.monotonic() - lane.active_since
            run.inflight_bytes -= state.task.length
            lane.requests += completion.requests
            run.stats.requests += completion.requests
            if completion.status is Status.DONE:
                cancel = self._succeeded(attempt, completion)
            elif completion.status is Status.UNKNOWN:
                self._abandoned(attempt, completion)
            else:
                self._not_done(attempt, completion)
            run.tell()
        for other in cancel:
            other.lane.transport.cancel([other.op_id])

    # -- what the transport said -----------------------------------------------------------------------------

    def _succeeded(self, attempt: Attempt, completion: Completion) -> list[Attempt]:
        """Those in flight that are not wanted any more."""
        run, lane, state = self._run, attempt.lane, attempt.state
        seconds = completion.finished - completion.started
        lane.streak, lane.down, lane.not_before = 0, "", 0.0
        lane.widen()
        lane.durations.append(seconds)
        lane.bytes += completion.nbytes
        run.recent.append(seconds)
        run.stats.durations.append(seconds)
        run.last_progress = completion.finished
        if attempt.lost:
            run.stats.hedged_bytes += completion.nbytes
            run.free_scratch(attempt)
            return []
        if attempt.scratch is not None and state.attempts:
            # the original still owns the destination: end it first
            state.winner = attempt
            original = state.attempts[0].lane
            original.window = max(1, original.window // 2)
            return list(state.attempts)
        if state.winner is not None:  # the original made it after all
            run.stats.hedged_bytes += completion.nbytes
            run.free_scratch(state.winner)
            state.winner = None
        losers = list(state.attempts)
        for loser in losers:
            loser.lost = True
        self._finish(attempt)
        return losers

    def _not_done(self, attempt: Attempt, completion: Completion) -> None:
        run, state = self._run, attempt.state
        if state.winner is not None and attempt.scratch is None:
            winner, state.winner = state.winner, None
            run.stats.hedge_wins += 1
            self._finish(winner)
            return
        run.free_scratch(attempt)
        if attempt.lost or completion.status is Status.CANCELLED:
            return
        if not state.attempts and state.winner is None:
            run.give_slot(state)
        error = completion.error or TransientError(f"{attempt.place.key} failed")
        self._failed(state, attempt.lane, attempt.place, error)

    def _abandoned(self, attempt: Attempt, completion: Completion) -> None:
        """The transport may still write there: the range is never used again in this run."""
        run = self._run
        run.stats.notes.append(f"{attempt.place.key}: {attempt.lane.transport.name} left a transfer in flight")
        if attempt.scratch is None:
            run.fail(
                completion.error
                or TransientError(
                    f"{attempt.place.key}: a transfer was abandoned in flight", hint="run the same command again"
                )
            )

    def _failed(self, state: TaskState, lane: Lane, place: Place, error: KvctlError) -> None:
        """Decide what follows a failure: another place, a later try, or the end of the run."""
        run, now = self._run, time.monotonic()
        lane.failures += 1
        lane.streak += 1
        lane.window = max(1, lane.window // 2)
        state.last_error = error
        if state.attempts or state.winner is not None:
            return  # a hedge of it is under way
        if isinstance(error, MemberDownError) and lane.streak >= DOWN_AFTER and not lane.down:
            lane.down = str(error)
            note = f"member {lane.member_name}{f' ({lane.endpoint})' if lane.endpoint else ''} is down: {error}"
            run.stats.notes.append(note)
            run.ctx.progress.note(note)
            self._choosing.leave(lane.member)
        if not error.retryable:
            state.bad_places.add(place.member)
            if isinstance(error, VersionChangedError) or not run.left_places(state):
                run.fail(error)
                return
            run.stats.notes.append(f"{lane.member_name} cannot serve {place.key}: {error}")
            run.stats.retries += 1
            self._choosing.enqueue(state, front=True)
            return
        state.tries += 1
        state.first_failure = state.first_failure or now
        run.troubled.add(state)
        lane.retries += 1
        run.stats.retries += 1
        policy = run.ctx.retry
        pause = random.uniform(0, min(policy.cap, policy.base * 2**lane.streak))
        if lane.streak > 1:
            lane.not_before = now + pause
        if self._choosing.elsewhere(state, lane):
            self._choosing.send_elsewhere(state, lane)
        else:
            self._choosing.delay(state, now + pause)

    # -- what the bytes said -----------------------------------------------------------------------------------

    def _finish(self, attempt: Attempt) -> None:
        """The bytes are there: hand them over, or see what came of that."""
        state = attempt.state
        state.finishing = True
        outcome, attempt.handed = attempt.handed, False  # an error's frames know the attempt
        if outcome:
            self._handed(attempt, outcome)
            return
        placed = state.task.spread is None or attempt.spread is not None
        if state.task.on_bytes is None and attempt.scratch is None and placed:
            self._done(state)
            return
        self._pool.submit(self._hand_over, attempt)

    def _hand_over(self, attempt: Attempt) -> None:
        """On a thread of the pool, without the lock."""
        outcome = self._handing.hand_over(attempt)
        with self._run.cv:
            self._run.free_scratch(attempt)
            self._handed(attempt, outcome)
            self._run.tell()

    def _handed(self, attempt: Attempt, outcome: bool | BaseException) -> None:
        if isinstance(outcome, IntegrityError):
            self._corrupt(attempt, outcome)
        elif isinstance(outcome, BaseException):
            self._run.fail(outcome)
        else:
            self._done(attempt.state)

    def _corrupt(self, attempt: Attempt, error: IntegrityError) -> None:
        """Bytes arrived that are not the right ones: read once more there, then elsewhere, then give up."""
        run, state = self._run, attempt.state
        state.finishing = False
        state.last_error = error
        attempt.lane.failures += 1
        run.stats.notes.append(f"{attempt.lane.member_name}: {error}")
        run.stats.hedged_bytes += state.task.length
        if state.rereads >= 1:
            state.bad_places.add(attempt.place.member)
            state.rereads = 0
        else:
            state.rereads += 1
        if not state.attempts:
            run.give_slot(state)
        if not run.left_places(state):
            run.fail(error)
            return
        attempt.lane.retries += 1
        run.stats.retries += 1
        self._choosing.enqueue(state, front=True)

    def _done(self, state: TaskState) -> None:
        run = self._run
        run.stats.bytes += state.task.length
        run.unfinished.discard(state)
        run.troubled.discard(state)
        run.last_progress = time.monotonic()
        run.give_slot(state)
        run.ctx.progress.advance(state.task.length)
