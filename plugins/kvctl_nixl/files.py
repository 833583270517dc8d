"""Files by NIXL: the common part of `nixl-posix` and `nixl-gds`.

Each worker thread has an agent of its own, made when it is first needed. NIXL knows a file by its descriptor and
checks no version: a file is opened for each operation, registered with its true size, and looked at before and after.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from kvctl.core.errors import (
    AuthError,
    EnvError,
    KvctlError,
    NotFoundError,
    SizeMismatchError,
    TransientError,
    UsageError,
    VersionChangedError,
)
from kvctl.memory.buffers import Buffer
from kvctl.transports.api import Capabilities, Op, Registration
from kvctl.transports.threaded import PACED_PIECE, AbandonedError, OpCancelledError, ThreadedTransport
from kvctl_nixl.agent import Agent, NixlError, Transfer, rows
from kvctl_nixl.memory import Desk, Known
from kvctl_nixl.places import FilePlace
from kvctl_nixl.quarantine import QUARANTINE

# One transfer moves at most this much: a buffered one does all of its work in one call, and a cancel is noticed
# between two of them. It also keeps a transfer under the 65,536 descriptors that a back end takes.
PIECE: Final = 64 << 20
SMALLEST: Final = 4096
_PAUSE: Final = (0.00005, 0.002)  # seconds between two looks at a transfer: from, to

_Identity = tuple[int, int, int, int]


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class NixlFiles(ThreadedTransport):
    """`backend` and `params` make the agents; `chunk` is the size of a descriptor, 0: a transfer is one. `certain`:
    after an error nothing of the transfer is under way any more.
    """

    name = "nixl-files"
    _direct_io = False
    _without_direct = "use --transport file"

    def __init__(
        self,
        place: FilePlace,
        capabilities: Capabilities,
        known: Known,
        *,
        backend: str,
        params: Mapping[str, str],
        build: str = "auto",
        threads: int,
        chunk: int,
        certain: bool,
    ) -> None:
        super().__init__(capabilities, threads=threads)
        self.place = place
        self.chunk = chunk
        self._certain = certain
        self._known = known
        self._backend = backend
        self._params = dict(params)
        self._build = build
        self._local = threading.local()
        # what cannot be made is told when the transport is opened, not in the middle of a load
        self._spare: list[Desk] = [self._make_desk()]
        self._spare_lock = threading.Lock()

    def register(self, buffer: Buffer) -> Registration:
        super().register(buffer)
        return self._known.add(buffer)

    def perform(self, op: Op) -> int:
        if op.kind == "write":
            self._write(op)
        else:
            self._read(op)
        return 1

    def close_worker(self) -> None:
        desk: Desk | None = getattr(self._local, "desk", None)
        if desk is not None:
            desk.close()

    def close(self) -> None:
        super().close()
        with self._spare_lock:
            spare, self._spare = self._spare, []
        for desk in spare:
            desk.close()

    def flags(self, op: Op) -> int:
        """Flags of `os.open` beside those for reading."""
        return 0

    def fill(self, op: Op, fd: int, path: str) -> None:
        """Move the range of `op` from the open file into memory."""
        self.move(op, "READ", fd, op.offset, op.buffer, op.buffer_offset, op.length)

    # -- one operation ---------------------------------------------------------------------------------------------

    def _read(self, op: Op) -> None:
        path = self.place.path(op.key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | self.flags(op))
        except OSError as problem:
            raise self._system_error(op, problem, path) from None
        try:
            before = self._check(op, fd, path)
            if op.length:
                self.fill(op, fd, path)
            if op.version is not None and _identity(os.fstat(fd)) != before:
                raise _changed(path)
        except OSError as problem:
            raise self._system_error(op, problem, path) from None
        finally:
            os.close(fd)

    def _check(self, op: Op, fd: int, path: str) -> _Identity:
        """That the open file is the version and size that is wanted. Raises KvctlError."""
        status = os.fstat(fd)
        if op.version is not None:
            # the store knows what a version is, by name; that the name and the descriptor mean one file is seen here
            info = self.place.stat(op.key)
            if info.version != op.version or _identity(os.stat(path)) != _identity(status):
                raise _changed(path, f"version {op.version} became {info.version}")
        if op.object_size is not None and status.st_size != op.object_size:
            raise SizeMismatchError(f"{path} has {status.st_size} bytes, expected {op.object_size}")
        if op.offset + op.length > status.st_size:
            raise _short(path, status.st_size, op)
        return _identity(status)

    def check_same(self, fd: int, other: int, path: str) -> None:
        """That both descriptors are of one file. Raises VersionChangedError."""
        if _identity(os.fstat(fd)) != _identity(os.fstat(other)):
            raise _changed(path)

    def _write(self, op: Op) -> None:
        if op.offset != 0 or (op.object_size is not None and op.object_size != op.length):
            raise UsageError(f"{self.name} writes whole objects ({op.key})")
        path = self.place.path(op.key)
        try:
            with self.place.writing(op.key) as fd:
                if op.length:
                    os.ftruncate(fd, op.length)
                    self.move(op, "WRITE", fd, 0, op.buffer, op.buffer_offset, op.length)
        except OSError as problem:
            raise self._system_error(op, problem, path) from None

    # -- moving bytes ----------------------------------------------------------------------------------------------

    def move(
        self, op: Op, way: Literal["READ", "WRITE"], fd: int, at: int, buffer: Buffer, place: int, length: int
    ) -> None:
        """Between [at, at + length) of the file and `buffer` at `place`, in transfers of PIECE. Raises KvctlError,
        OpCancelledError or AbandonedError.
        """
        desk = self._desk()
        try:
            with desk.memory(buffer, place, length) as (kind, address, device), _file(desk, fd, at + length):
                piece = PIECE if op.pace is None or way == "READ" else PACED_PIECE
                for done in range(0, length, piece):
                    size = min(piece, length - done)
                    if op.pace is not None and way == "WRITE":
                        op.pace(size)
                    if self.is_cancelled(op.id):
                        raise OpCancelledError
                    chunk = self.chunk or size
                    local = rows(address + done, size, device, chunk)
                    remote = rows(at + done, size, fd, chunk)
                    with desk.lock:  # held while a buffered transfer does its work: a buffer that is dropped waits
                        transfer = desk.agent.start(way, (kind, local), ("FILE", remote))
                    self._wait(desk, transfer)
        except NixlError as problem:
            error = self._explain(op, fd, problem)
            # after an error the back end's queue is not to be trusted: the next operation gets a new agent
            self._retire(desk)
            if not self._certain:
                # the requests behind the failed one may still be under way, and nothing can tell when they end
                QUARANTINE.keep(buffer, desk, lambda: False)
                raise AbandonedError(error) from None
            raise error from None

    def _wait(self, desk: Desk, transfer: Transfer) -> None:
        """A started read or write of a local file ends; there is no way to call it off."""
        pause = _PAUSE[0]
        while True:
            with desk.lock:
                if transfer.poll():
                    return
            time.sleep(pause)
            pause = min(pause * 2, _PAUSE[1])

    def _desk(self) -> Desk:
        desk: Desk | None = getattr(self._local, "desk", None)
        if desk is None:
            with self._spare_lock:
                desk = self._spare.pop() if self._spare else None
            desk = self._local.desk = desk or self._make_desk()
        return desk

    def _make_desk(self) -> Desk:
        return Desk(Agent(self._backend, self._params, build=self._build), self._known)

    def _retire(self, desk: Desk) -> None:
        self._local.desk = None
        if self._certain:
            desk.close()

    # -- errors ----------------------------------------------------------------------------------------------------

    def _explain(self, op: Op, fd: int, problem: NixlError) -> KvctlError:
        """NIXL has one word for nearly all that can go wrong: the file says what it was."""
        path = self.place.path(op.key)
        try:
            size = os.fstat(fd).st_size
            if op.kind == "read":
                if size < op.offset + op.length:
                    return _short(path, size, op)
                with _buffered(path) as plain:
                    os.pread(plain, SMALLEST, op.offset)
                    os.pread(plain, SMALLEST, max(op.offset, op.offset + op.length - SMALLEST))
        except OSError as error:
            return self._system_error(op, error, path)
        if "NOT_FOUND" in str(problem) or "INVALID" in str(problem):
            return EnvError(f"{self.name} does not take this transfer ({path})", cause=str(problem))
        return TransientError(f"{self.name} failed on {path}", cause=str(problem), hint="--transport file reads it too")

    def _system_error(self, op: Op, problem: OSError, path: str) -> KvctlError:
        reason = problem.strerror or str(problem)
        if problem.errno in {errno.ENOENT, errno.ENOTDIR}:
            return NotFoundError(f"{path} does not exist")
        if problem.errno in {errno.EACCES, errno.EPERM}:
            return AuthError(f"{path} is not accessible", cause=reason, hint="check its owner and mode")
        if problem.errno in {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN}:
            return TransientError(f"{path} cannot be read or written now", cause=reason)
        if problem.errno == errno.EINVAL and self._direct_io:
            return EnvError(f"{path}: this file system has no O_DIRECT", cause=reason, hint=self._without_direct)
        return EnvError(f"{path}: {reason}")


@contextlib.contextmanager
def _file(desk: Desk, fd: int, size: int) -> Iterator[Any]:
    """The file, known to the agent while the block runs: descriptor numbers are used again."""
    with desk.lock:
        registered = desk.agent.register("FILE", [(0, size, fd, "")])
    try:
        yield registered
    finally:
        with desk.lock, contextlib.suppress(NixlError):
            desk.agent.deregister(registered)


@contextlib.contextmanager
def _buffered(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _short(path: str, size: int, op: Op) -> SizeMismatchError:
    return SizeMismatchError(
        f"{path} ends at byte {size}, wanted up to {op.offset + op.length}",
        hint="the file is shorter than its header says: copy it again",
    )


def _changed(path: str, cause: str | None = None) -> VersionChangedError:
    return VersionChangedError(f"{path} changed while loading", cause=cause, hint="load again when nobody writes it")
