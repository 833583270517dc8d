"""Signals of a running command: the first SIGINT or SIGTERM asks it to stop in order, the second ends it; SIGUSR1
prints where it is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Final

from kvctl.cli.output import Output
from kvctl.cli.progress import Quiet
from kvctl.core.cancel import CancelToken
from kvctl.core.errors import InterruptedRunError

# After the second signal: time for buffers and threads to notice before the process is ended for them.
ABORT_SECONDS: Final = 1.0
# After the first: what the drain may take on top of its own limit before it counts as hanging.
GRACE_SECONDS: Final = 5.0
TELL_SECONDS: Final = 0.5


def install(cancel: CancelToken, output: Output, progress: Quiet, argv: Sequence[str] = ()) -> None:
    """Take over the signals for the rest of the process. Call from the main thread."""

    def stop(signum: int, frame: FrameType | None) -> None:
        first = not cancel.stopping
        cancel.request(signum)
        code = 128 + signum
        if first:
            _end_after(
                cancel.drain_seconds + GRACE_SECONDS, lambda: end("what was in flight did not drain in time", code)
            )
            say(
                f"stopping: in-flight work drains (up to {cancel.drain_seconds:.0f} s), what is done stays; "
                "the same signal again aborts at once"
            )
        else:
            _end_after(ABORT_SECONDS, lambda: end("aborted", code))
            say("aborting")

    def end(what: str, code: int) -> None:
        error = InterruptedRunError(what, signum=code - 128, hint=f"to go on: {resume_command(argv)}")
        if not output.told:
            telling = threading.Thread(target=output.error, args=(error, code), daemon=True)
            telling.start()
            telling.join(TELL_SECONDS)  # whoever does not read must not keep the process
        os._exit(code)

    def show(signum: int, frame: FrameType | None) -> None:
        say(progress.status())

    def say(message: str) -> None:
        # on a thread of its own: a handler may have interrupted a write to this very stream
        threading.Thread(target=output.status, args=(message,), daemon=True).start()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, show)


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """While a person is asked, nothing drains: a signal ends the run with InterruptedRunError."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        raise InterruptedRunError("nothing was done", signum=signum)

    before = {signum: signal.signal(signum, leave) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _end_after(seconds: float, end: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def resume_command(argv: Sequence[str]) -> str:
    """The command to type to go on; running it again resumes."""
    import shlex

    return shlex.join(["kvctl", *argv])
