"""Where a load lands: nowhere (measured only), host memory, or a folder (on disk, or in /dev/shm for `shm:`).

A folder is built beside its place, under a hidden name, with a journal of what has landed and was verified; it gets
its name by one rename when everything is there. A killed load leaves only the hidden folder, from which the same
command resumes. Other targets (slots, engines) implement `Target`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final, Protocol

import xxhash

from kvctl.core.addresses import expand_home
from kvctl.core.errors import AuthError, ConflictError, EnvError, KvctlError, UsageError
from kvctl.core.units import is_count
from kvctl.memory.buffers import PAGE, Buffer, HostBuffer
from kvctl.memory.files import FileBuffer, cannot_write
from kvctl.transports.registry import load_object
from kvctl.weights.runs import OutputFile

PARTIAL_SUFFIX: Final = ".kvctl-partial"
MARKER: Final = ".kvctl-load.json"
JOURNAL: Final = ".kvctl-journal"
SHM: Final = "/dev/shm"  # noqa: S108 - POSIX shared memory lives there


@dataclass(frozen=True, slots=True)
class Landing:
    """Where the data section of one output file goes: `buffer`, from `data_start` on."""

    buffer: Buffer
    data_start: int


class Target(Protocol):
    """Opened after every check, before the first byte. `landings` is None when nothing is kept. One with an attribute
    `address` can be read as a source once it is complete.
    """

    @property
    def name(self) -> str: ...
    def open(self, outputs: Sequence[OutputFile], side_files: Mapping[str, bytes], fingerprint: str) -> bool:
        """Prepare the memory. True when the result is there already, complete, from this very source."""
        ...

    @property
    def landings(self) -> Sequence[Landing] | None: ...
    def landed(self, run: int) -> str | None:
        """The checksum that the journal has for run number `run`; None when it has not landed."""
        ...

    def record(self, run: int, checksum: str) -> None: ...
    def publish(self) -> None:
        """Everything landed and was verified: make it visible, durably."""
        ...

    def close(self, error: BaseException | None) -> None: ...


class UnrecordedTarget:
    """Base of targets that outlive no run: each begins from nothing, and nothing is published."""

    landings: Sequence[Landing] | None = None

    def open(self, outputs: Sequence[OutputFile], side_files: Mapping[str, bytes], fingerprint: str) -> bool:
        return False

    def landed(self, run: int) -> str | None:
        return None

    def record(self, run: int, checksum: str) -> None:
        return

    def publish(self) -> None:
        return

    def close(self, error: BaseException | None) -> None:
        return


class NoneTarget(UnrecordedTarget):
    """Measured only, nothing kept."""

    name = "none"


class MemoryTarget(UnrecordedTarget):
    """Host memory of this process, one buffer per output file, congruent with the source modulo 4 KiB. Whoever gets
    the landings owns them; after an error they are freed.
    """

    name = "memory"

    def open(self, outputs: Sequence[OutputFile], side_files: Mapping[str, bytes], fingerprint: str) -> bool:
        landings: list[Landing] = []
        for output in outputs:
            start = output.congruent_to % PAGE
            landings.append(Landing(HostBuffer(start + output.data_size), start))
        self.landings = landings
        return False

    def close(self, error: BaseException | None) -> None:
        if error is not None and self.landings is not None:
            for landing in self.landings:
                landing.buffer.close()
            self.landings = None


class DirTarget:
    """A folder of safetensors files that any loader opens."""

    def __init__(self, path: str, *, label: str | None = None) -> None:
        # a link to a folder stays one: what it leads to is filled
        self.path = os.path.realpath(path) if os.path.islink(path.rstrip("/")) else os.path.abspath(path)
        self.name = label or f"dir:{path}"
        self.address = self.path
        parent, own = os.path.split(self.path)
        if not own:
            raise UsageError(f"{path!r} cannot be a target folder")
        self._partial = os.path.join(parent, f".{own}{PARTIAL_SUFFIX}")
        self.landings: Sequence[Landing] | None = None
        self._lock = -1
        self._journal = -1
        self._landed: dict[int, str] = {}
        self._landed_any = False
        self._buffers: list[FileBuffer] = []
        self._fingerprint = ""
        self._names: dict[str, int] = {}

    def open(self, outputs: Sequence[OutputFile], side_files: Mapping[str, bytes], fingerprint: str) -> bool:
        """Raises UsageError (the place is taken), ConflictError (another load fills it), CapacityError, AuthError."""
        for name in (*(output.name for output in outputs), *side_files):
            if "/" in name or name in {"", ".", "..", MARKER, JOURNAL}:
                raise UsageError(f"{name!r} cannot be a file of {self.name}")
        try:
            return self._open(outputs, side_files, fingerprint)
        except OSError as error:
            raise cannot_write(self._partial, error) from error

    def _open(self, outputs: Sequence[OutputFile], side_files: Mapping[str, bytes], fingerprint: str) -> bool:
        while True:
            if self._is_complete(fingerprint):
                return True
            if os.path.ismount(self.path):
                raise UsageError(
                    f"{self.path} is a mount point, and a load appears by renaming a folder",
                    hint=f"load into a folder in it: dir:{self.path.rstrip('/')}/NAME",
                )
            os.makedirs(self._partial, mode=0o755, exist_ok=True)
            if self._take_lock():
                break
        if self._is_complete(fingerprint):  # another load has just published it
            os.rmdir(self._partial)
            return True
        self._fingerprint = fingerprint
        self._open_journal(fingerprint)
        landings = []
        for output in outputs:
            buffer = FileBuffer(os.path.join(self._partial, output.name), len(output.header) + output.data_size)
            buffer.view[: len(output.header)] = output.header
            self._buffers.append(buffer)
            self._names[output.name] = buffer.nbytes
            landings.append(Landing(buffer, len(output.header)))
        for name, data in side_files.items():
            with open(os.path.join(self._partial, name), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._names[name] = len(data)
        self.landings = landings
        return False

    def landed(self, run: int) -> str | None:
        return self._landed.get(run)

    def record(self, run: int, checksum: str) -> None:
        """One line per run, one write each: a torn last line is ignored when it is read."""
        try:
            os.write(self._journal, f"{run} {checksum}\n".encode())
        except OSError as error:
            raise cannot_write(os.path.join(self._partial, JOURNAL), error) from error
        self._landed_any = True

    def publish(self) -> None:
        for buffer in self._buffers:
            buffer.sync()
        marker = {"schema": "kvctl.loaded/1", "fingerprint": self._fingerprint, "files": self._names}
        try:
            with open(os.path.join(self._partial, MARKER), "w", encoding="utf-8") as file:
                json.dump(marker, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._partial, JOURNAL))
            _sync_folder(self._partial)
        except OSError as error:
            raise cannot_write(self._partial, error) from error
        try:
            os.rename(self._partial, self.path)  # also over an empty folder
        except OSError as error:
            raise EnvError(
                f"{self._partial} cannot become {self.path}",
                cause=error.strerror,
                hint="the target must not exist, or be an empty folder on the same file system",
            ) from error
        _sync_folder(os.path.dirname(self.path))

    def close(self, error: BaseException | None) -> None:
        self.landings = None
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []
        if self._journal >= 0:
            os.close(self._journal)
        if self._lock >= 0:
            # while it is still ours; what reserved space and holds nothing is of no use to a later try
            if error is not None and not (self._landed_any and _resumable(error)):
                shutil.rmtree(self._partial, ignore_errors=True)
            os.close(self._lock)
        self._journal = self._lock = -1

    def _is_complete(self, fingerprint: str) -> bool:
        try:
            entries = os.listdir(self.path)
        except FileNotFoundError:
            return False
        except NotADirectoryError as error:
            raise UsageError(f"{self.path} is no folder, or lies in none", hint="choose another folder") from error
        if not entries:
            return False
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError):
            with open(os.path.join(self.path, MARKER), encoding="utf-8") as file:
                marker = json.load(file)
            sizes: dict[str, int] = marker["files"]
            if marker["fingerprint"] == fingerprint and all(
                os.path.getsize(os.path.join(self.path, name)) == size for name, size in sizes.items()
            ):
                return True
        raise UsageError(
            f"{self.path} is not empty",
            cause=f"it holds {min(entries)!r} and is not the result of this load",
            hint="choose another folder or remove it",
        )

    def _take_lock(self) -> bool:
        """Own the partial folder. False when the folder that was locked is not (any more) the one of that name:
        another load has just finished with it, or given it up. Raises ConflictError while another load owns it.
        """
        try:
            lock = os.open(self._partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise cannot_write(self._partial, error) from error
        # where anybody may write, like /dev/shm, it may be somebody's trap (elsewhere NFS may show strange owners)
        owner = os.fstat(lock).st_uid
        if owner != os.geteuid() and os.stat(os.path.dirname(self._partial)).st_mode & stat.S_IWOTH:
            os.close(lock)
            raise AuthError(
                f"{self._partial} is another user's", cause=f"its owner is {owner}", hint="choose another target"
            )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(lock), os.stat(self._partial))
        except FileNotFoundError:
            ours = False
        except OSError as error:
            os.close(lock)
            raise ConflictError(
                f"another load is filling {self.path}", hint="wait for it, or choose another folder"
            ) from error
        if not ours:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def _open_journal(self, fingerprint: str) -> None:
        path = os.path.join(self._partial, JOURNAL)
        lines: list[str] = []
        with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines(keepends=True)
        if lines and lines[0] == f"{fingerprint}\n":
            self._landed = dict(_journal_lines(lines[1:]))
            self._landed_any = bool(self._landed)
        else:
            # another source, or another plan for it: nothing of it can be used
            for entry in os.scandir(self._partial):
                os.unlink(entry.path)
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{fingerprint}\n")
        self._journal = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def _journal_lines(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    for line in lines:
        number, _, checksum = line.partition(" ")
        if line.endswith("\n") and is_count(number):
            yield int(number), checksum.rstrip("\n")


def _resumable(error: BaseException) -> bool:
    """Whether what landed so far is worth keeping: not when the source itself is wrong or has changed."""
    return not isinstance(error, KvctlError) or error.exit_code in {6, 9, 130}


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def checksum_of(view: memoryview) -> str:
    """What the journal notes for a run that landed."""
    return xxhash.xxh3_64_hexdigest(view)


@contextlib.contextmanager
def opened(target: Target) -> Iterator[Target]:
    """Closes the target, telling it the error if there was one."""
    error: BaseException | None = None
    try:
        yield target
    except BaseException as problem:
        error = problem
        raise
    finally:
        target.close(error)


def make_target(into: str) -> Target:
    """The target behind `none`, `dir:PATH` or `shm:NAME`, or of a kind that an entry point of the group
    `kvctl.targets` adds (its name is the kind, it is called with what follows the colon). Raises UsageError for what
    does not exist.
    """
    kind, _, rest = into.partition(":")
    if into == "none":
        return NoneTarget()
    if kind == "dir" and rest:
        return DirTarget(expand_home(rest), label=into)  # a shell leaves the '~' of dir:~/x as it is
    if kind == "shm" and rest:
        if "/" in rest or rest in {".", ".."}:
            raise UsageError(f"{rest!r} cannot name shared memory", hint="use a plain name without '/'")
        return DirTarget(os.path.join(SHM, rest), label=f"shm:{rest}")
    for point in entry_points(group="kvctl.targets", name=kind):
        if rest:
            factory = load_object(point.value)
            target: Target = factory(rest)
            return target
    raise UsageError(f"{into!r} is not a target of load-weights", hint="use none, dir:PATH, shm:NAME or slot:NAME")
