"""`python -m tests.cases.killed POINT COUNTFILE ARGS..`: `kvctl ARGS..` that dies by kill -9 at its POINT-th change of
the file system (0: never), half way through it where it is a write. Writes how many there were to COUNTFILE.

The changes are those that the program makes through `os`: opens that create, writes, syncs, renames, unlinks,
reservations. A point is counted before the change is made, so that every state between two changes is met.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

CHANGES = ("write", "pwritev", "pwrite", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "ftruncate",
           "posix_fallocate", "preadv")  # fmt: skip


class Reaper:
    """Counts changes on all threads and ends the process at one of them."""

    def __init__(self, point: int) -> None:
        self.point = point
        self.seen = 0
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def wrap(self, name: str) -> Callable[..., Any]:  # Any: stands in for functions of many shapes
        real = getattr(os, name)

        def function(*args: Any, **kwargs: Any) -> Any:  # Any: see above
            with self._lock:
                self.seen = next(self._numbers)
                if self.seen == self.point:
                    self._die(name, real, args)
            return real(*args, **kwargs)

        return function

    @staticmethod
    def _die(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:  # Any: see above
        if name == "write":
            real(args[0], bytes(args[1])[: len(args[1]) // 2])
        elif name in {"pwritev", "preadv"}:
            half = memoryview(args[1][0]).cast("B")
            real(args[0], [half[: len(half) // 2]], *args[2:])
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    from kvctl.cli.main import run

    reaper = Reaper(int(sys.argv[1]))
    for name in CHANGES:
        setattr(os, name, reaper.wrap(name))
    code = run(sys.argv[3:])
    with open(sys.argv[2], "w", encoding="ascii") as file:
        file.write(str(reaper.seen))
    return code


if __name__ == "__main__":
    sys.exit(main())
