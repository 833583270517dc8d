"""The program inside the tests' own process: the same as the real one from its arguments on, without the start."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvctl.cli.main import run
from tests.cli.program import Done, Kvctl

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def _as_in(folder: Path, env: Mapping[str, str]) -> Iterator[None]:
    stdin = sys.stdin
    before, handlers, environ = os.getcwd(), {one: signal.getsignal(one) for one in _SIGNALS}, dict(os.environ)
    os.chdir(folder)
    sys.stdin = io.StringIO()
    os.environ.update(env)
    try:
        yield
    finally:
        sys.stdin = stdin
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environ)
        for one, handler in handlers.items():
            signal.signal(one, handler)


def program_inside(folder: Path) -> Kvctl:
    """Runs the program in `folder`, with its home and state there; nobody sits at its terminal."""

    def kvctl(*args: object) -> Done:
        out, err = io.StringIO(), io.StringIO()
        env = {"HOME": str(folder / "home"), "KVCTL_STATE_DIR": str(folder / "state"), "KVCTL_PROGRESS": "none"}
        with _as_in(folder, env), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run([str(arg) for arg in args])
        return Done(code, out.getvalue(), err.getvalue())

    return kvctl
