"""Where the lab keeps what it makes once, and the one error it raises."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "KVCTL_RDMA_LAB_CACHE"
KERNEL_VARIABLE = "KVCTL_RDMA_LAB_KERNEL"

HERE = Path(__file__).resolve().parent

# The exit codes of kvctl: what is missing here, and what broke although it should not have.
MISSING = 10
BROKEN = 1


class LabError(Exception):
    """`code` is MISSING when this machine lacks something (`hint` says how to get it), else BROKEN."""

    def __init__(self, message: str, *, hint: str = "", code: int = MISSING) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code

    def __str__(self) -> str:
        return f"{self.args[0]} ({self.hint})" if self.hint else str(self.args[0])


@dataclass(frozen=True, slots=True)
class Lab:
    """Everything a guest starts from. `kernel`: the executable; `python_path`: a folder that holds pyverbs."""

    kernel: Path
    python_path: Path


def cache_folder() -> Path:
    """The lab's cache; not made yet."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).absolute()
    if os.geteuid() == 0:
        return Path("/var/cache/kvctl/rdma-lab")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "kvctl" / "rdma-lab"


@contextlib.contextmanager
def locked(name: str) -> Iterator[Path]:
    """The cache folder, made, with its lock `name` held: whoever comes second waits, then finds what the first made."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{name}.lock").open("w")
    except OSError as error:
        raise LabError(f"the lab's cache cannot be written: {error}", hint=f"set {CACHE_VARIABLE}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
