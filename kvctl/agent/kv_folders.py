"""Where the agent's own KV tiers lie: a folder in host memory, gone with the agent, and one on a local disk, kept. A
lock on a file, which ends however its owner does, tells an agent that lives from one that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from typing import Final

from kvctl.core.errors import AuthError, CapacityError, EnvError
from kvctl.core.units import format_size

SHM: Final = "/dev/shm"  # noqa: S108 - POSIX shared memory lives there
PAGE: Final = 4096
_REPO, _LOCK = "repo", "lock"


class Folder:
    """A repo's place that is ours while the lock is held. `path`: of the repo."""

    def __init__(self, path: str, lock: int, remove: str | None = None) -> None:
        self.path = path
        self._lock = lock
        self._remove = remove

    @property
    def url(self) -> str:
        return f"file://{self.path}"

    def used_bytes(self) -> int:
        """What its files take, temporary ones included, in whole pages."""
        return sum(-(-size // PAGE) * PAGE for size in _sizes(self.path))

    def close(self) -> None:
        """Give it up; what was in memory is gone."""
        if self._remove is not None:
            shutil.rmtree(self._remove, ignore_errors=True)
        os.close(self._lock)


def _sizes(path: str) -> Iterator[int]:
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(entry.path)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return


def memory_roots() -> list[str]:
    """Folders of file systems in memory, where there are any."""
    return [root for root in (SHM, os.environ.get("XDG_RUNTIME_DIR", "")) if root and _is_tmpfs(root)]


def _is_tmpfs(root: str) -> bool:
    try:
        device = os.stat(root).st_dev
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            for line in file:
                own, _, rest = line.partition(" - ")
                if own.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                    return rest.split()[0] == "tmpfs"
    except OSError:
        pass
    return False


def memory_folder(nbytes: int, roots: Sequence[str]) -> tuple[Folder, int]:
    """A folder in memory for us alone, and how many of agents that died were removed. Raises EnvError where there is no
    such file system, CapacityError when none has so much room.
    """
    if not roots:
        raise EnvError("no file system in memory for the KV cache", cause=f"{SHM} is none", hint="mount a tmpfs there")
    removed = sum(remove_dead(root) for root in roots)
    room = {root: _free(root) for root in roots}
    root = next((root for root in roots if room[root] >= nbytes), None)
    if root is None:
        best = max(roots, key=lambda item: room[item])
        raise CapacityError(
            f"{format_size(nbytes)} of KV cache do not fit into {best}",
            cause=f"it has {format_size(room[best])} left",
            hint="make it larger (`mount -o remount,size=..`, `docker run --shm-size`), or ask for less",
            details={"needed": nbytes, "available": room[best]},
        )
    ident = secrets.token_hex(6)
    making, path = os.path.join(root, f".{_prefix()}{ident}"), os.path.join(root, f"{_prefix()}{ident}")
    os.mkdir(making, 0o700)
    lock = _locked(os.path.join(making, _LOCK))
    os.rename(making, path)  # under its name it is locked from the first: nobody takes it for a dead one's
    return Folder(os.path.join(path, _REPO), lock, path), removed


def _prefix() -> str:
    return f"kvctl-{os.getuid()}-kv-"


def _free(root: str) -> int:
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def remove_dead(root: str) -> int:
    """Remove what this user's agents left in memory that live no more. Returns how many."""
    count = 0
    for name in os.listdir(root):
        path = os.path.join(root, name)
        if not name.startswith((_prefix(), f".{_prefix()}")):
            continue
        try:
            if os.lstat(path).st_uid != os.getuid() or not os.path.exists(os.path.join(path, _LOCK)):
                continue
            lock = _locked(os.path.join(path, _LOCK))
        except (EnvError, FileNotFoundError):
            continue  # it lives, or went just now
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
        count += 1
    return count


def local_folder(path: str) -> Folder:
    """The folder of the tier on disk, made when it is not there. Raises EnvError when another agent uses it, AuthError
    when others may write there.
    """
    path = os.path.abspath(os.path.expanduser(path))
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.stat(path)
    except OSError as error:
        raise EnvError(f"the folder {path} cannot be used for KV", cause=error.strerror) from error
    if status.st_uid not in {os.getuid(), 0} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise AuthError(
            f"the folder {path} is not safe for a KV cache",
            cause=f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}",
            hint="chmod 700 it, or choose another --kv-local",
        )
    return Folder(path, _locked(f"{path.rstrip('/')}.lock"))


def _locked(path: str) -> int:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise EnvError(f"{path} cannot be made", cause=error.strerror) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise EnvError(
            f"another agent uses {os.path.dirname(path)}", cause=f"{path} is locked", hint="end it, or choose another"
        ) from error
    return lock
