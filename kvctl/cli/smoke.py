"""The smoke test of a swap: a command of the user's, under a time limit. It ends with all that it started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvctl.core.errors import InterruptedRunError, UsageError

if TYPE_CHECKING:
    from kvctl.core.cancel import CancelToken

LOOK: Final = 0.05  # seconds between looks at it


def smoke_words(command: str) -> list[str]:
    """The command as a shell would divide it. Raises UsageError for what is none."""
    import shlex

    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--smoke {command!r} is no command", cause=str(error)) from None
    if not words:
        raise UsageError("--smoke names no command")
    return words


def run_smoke(command: str, seconds: float, environ: dict[str, str], cancel: CancelToken) -> str:
    """Why it failed, or took longer than `seconds`; '' when it passed. What it prints goes to stderr. Raises
    InterruptedRunError when kvctl is asked to stop meanwhile.
    """
    import os
    import signal
    import subprocess
    import sys
    import time

    try:
        process = subprocess.Popen(
            smoke_words(command),
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            process_group=0,  # what it starts can be ended with it
        )
    except OSError as error:
        return f"{command}: {error.strerror}"
    end = time.monotonic() + seconds
    try:
        while process.poll() is None:
            if time.monotonic() > end:
                return f"{command} took longer than {seconds:g} s"
            if cancel.wait(LOOK):
                raise InterruptedRunError("stopped in the smoke test: the old weights serve", signum=cancel.signum)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"{command} ended with {process.returncode}" if process.returncode else ""
