"""Bytes that have arrived: from scratch or the arena to where they belong, and to whoever wants to look at them.

On which thread that happens is asked elsewhere: `ending` takes a finisher's, or finds that the thread that moved the
bytes was here already (`landed`). What a failure here means for the task is decided in `ending` too.
"""

from __future__ import annotations

from kvctl.transfer.running import Attempt, Run, TaskState
from kvctl.transfer.tasks import spread_out, staged_bytes


class Handing:
    """Called without the run's lock, which it takes where it has to."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def landed(self, attempt: Attempt) -> None:
        """Hand over before the transport says that it is done; not when nobody waits for that any more."""
        run, state = self._run, attempt.state
        with run.cv:
            if run.over:
                return
            run.handing += 1
            state.finishing = True  # a hedge would come too late
        attempt.handed = self.hand_over(attempt)
        with run.cv:
            run.handing -= 1
            if run.over:
                run.cv.notify_all()

    def hand_over(self, attempt: Attempt) -> bool | BaseException:
        """True, or what went wrong."""
        state, task = attempt.state, attempt.state.task
        try:
            view = self._destination(state)
            if attempt.scratch is not None and self._run.hedge_arena is not None:
                view[:] = self._run.hedge_arena.buffer.view[attempt.scratch : attempt.scratch + task.length]
            if attempt.spread is not None:
                view = view[: staged_bytes(attempt.spread)]
            elif task.spread is not None:
                view = spread_out(view, task.spread())
            if task.on_bytes is not None:
                task.on_bytes(task, view)
        except BaseException as error:
            return error
        return True

    def _destination(self, state: TaskState) -> memoryview:
        task = state.task
        if task.buffer is not None:
            if task.buffer.kind == "cuda":
                return memoryview(b"")  # out of the CPU's reach: whoever wants to look reads it back
            return task.buffer.view[task.buffer_offset : task.buffer_offset + task.length]
        if self._run.arena is None or state.slot is None:
            raise AssertionError("no slot")
        return self._run.arena.buffer.view[state.slot : state.slot + task.length]
