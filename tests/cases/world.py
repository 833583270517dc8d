"""How the cases run the program and look at how it ended: in this process where only the code and the words matter,
in a process of its own where the process itself is the point."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvctl.cli.main import run
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context, RetryPolicy
from kvctl.repo.repo import Repo
from kvctl.weights.push import PushRequest, push_weights
from tests.cli.program import PROGRAM, Done

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def kvctl(*args: object) -> Done:
    """`kvctl ARGS` in this process: what `main` gives to `sys.exit`, and what was printed."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run([str(item) for item in args])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return Done(code, out.getvalue(), err.getvalue())


def kvctl_process(*args: object, env: Mapping[str, str] | None = None, seconds: float = 120) -> Done:
    """`kvctl ARGS` in a process of its own."""
    done = subprocess.run(
        [PROGRAM, *map(str, args)], env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=seconds,
        check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def refused(done: Done, code: int, *words: str, hint: bool = True) -> dict[str, Any]:  # Any: JSON
    """The one error of a run with -o json that ended with `code`: it says all of `words`, and what to do."""
    assert done.code == code, (done.code, done.err)
    assert done.out == "", done.out
    errors = [line for line in done.err.splitlines() if '"kvctl.error/1"' in line]
    assert len(errors) == 1, done.err
    assert done.err.splitlines()[-1] == errors[0]
    error = done.error
    assert error["exit_code"] == code
    said = f"{error['what']} {error['cause'] or ''}"
    for word in words:
        assert word in said, (word, said)
    assert error["hint"] or not hint, error
    return error


def nothing_left(folder: Path, name: str = "out") -> None:
    """Neither the target nor a half-made one is there, in the folder or in shared memory."""
    for place in (folder, Path("/dev/shm")):
        assert [item.name for item in place.iterdir() if name in item.name] == []


def quick(**changes: Any) -> Context:  # Any: fields of RetryPolicy
    """A context that pauses for milliseconds."""
    return Context(retry=RetryPolicy(**{"base": 0.001, "cap": 0.01, "stall_timeout": 20.0, **changes}))


def make_repo(
    stores: Sequence[StoreConfig], *, replicas: int = 1, stripe: int = 1 << 20, ctx: Context | None = None
) -> None:
    Repo.init(stores, ctx=ctx or quick(), stripe_size=stripe, replicas=replicas).close()


def folders(root: Path, *names: str) -> list[StoreConfig]:
    return [StoreConfig(f"file://{root}/{name}") for name in names]


def as_option(stores: Sequence[StoreConfig]) -> str:
    """The stores as -r takes them."""
    return ",".join(
        store.url + "".join(f"{'&' if n else '?'}endpoint={way}" for n, way in enumerate(store.endpoints))
        for store in stores
    )


def push(source: object, stores: Sequence[StoreConfig], name: str = "m") -> dict[str, Any]:  # Any: JSON
    return push_weights(PushRequest(str(source), name, tuple(stores)), quick()).to_json()


def files_of(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of the files that people see there."""
    return {item.name: item.read_bytes() for item in folder.iterdir() if not item.name.startswith(".")}
