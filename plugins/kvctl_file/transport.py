"""The `file` transport: preadv and pwritev straight between files and memory, O_DIRECT by option.

A file is opened for each operation (microseconds against MiB): its version is compared before and after the
read, so that a file rewritten in place is noticed, and no descriptor outlives its use. Space is reserved before the
first byte of a large file: a full disk is told at once, and the blocks are found in one go.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Mapping
from typing import Final

from kvctl.core.errors import SizeMismatchError, UsageError, VersionChangedError
from kvctl.memory.buffers import PAGE, HostBuffer, address_of
from kvctl.transports.api import HOST_KINDS, Capabilities, Op, Store, StoreConfig
from kvctl.transports.options import check_names, choice, number
from kvctl.transports.threaded import PACED_PIECE, OpCancelledError, ThreadedTransport
from kvctl.transports.views import MOST, advance, first_of
from kvctl_file.direct import Direct
from kvctl_file.pages import copied, in_place
from kvctl_file.store import READ, FileStore, raise_from, version_of

# One system call moves at most this much: a running operation notices a cancel between two of them.
PIECE: Final = 64 << 20
BOUNCE: Final = 4 << 20
# Files below it are not worth two more system calls.
RESERVED: Final = 1 << 20


class FileTransport(ThreadedTransport):
    name = "file"
    lands = True

    def __init__(self, store: FileStore, *, direct: bool, threads: int) -> None:
        # one more in line for each thread: it goes on without waiting for the driver
        capabilities = Capabilities(memory_kinds=HOST_KINDS, max_in_flight=2 * threads, scatter=not direct, gather=True)
        super().__init__(capabilities, threads=threads)
        self._store = store
        self._direct = direct
        self._local = threading.local()

    def perform(self, op: Op) -> int:
        if op.kind == "write":
            self._write(op)
        else:
            self._read(op)
        return 1

    def waited(self) -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock

    def close_worker(self) -> None:
        bounce: HostBuffer | None = getattr(self._local, "bounce", None)
        if bounce is not None:
            bounce.close()

    def _read(self, op: Op) -> None:
        path = self._store.path(op.key)
        try:
            fd = os.open(path, READ)
        except OSError as problem:
            raise_from(problem, path)
        try:
            self._check(fd, op, path)
            if self._direct:
                self._read_direct(op, path, fd, op.view)
            elif op.parts:
                self._read_parts(op, path, fd)
            else:
                self._read_range(op, path, fd, op.offset, op.view)
            if op.version is not None:
                self._check(fd, op, path)
        except OSError as problem:
            raise_from(problem, path)
        finally:
            os.close(fd)

    def _check(self, fd: int, op: Op, path: str) -> None:
        status = os.fstat(fd)
        if op.object_size is not None and status.st_size != op.object_size:
            if op.version is not None and version_of(status) != op.version:
                raise _changed(path, op.version, version_of(status))
            raise SizeMismatchError(f"{path} has {status.st_size} bytes, expected {op.object_size}")
        if op.version is not None and version_of(status) != op.version:
            raise _changed(path, op.version, version_of(status))
        if op.offset + op.length > status.st_size:
            raise SizeMismatchError(
                f"{path} ends at byte {status.st_size}, wanted up to {op.offset + op.length}",
                hint="the file is shorter than its header says: copy it again",
            )

    def _read_range(self, op: Op, path: str, fd: int, offset: int, view: memoryview) -> None:
        done, total = 0, len(view)
        while done < total:
            if self.is_cancelled(op.id):
                raise OpCancelledError
            moved = os.preadv(fd, [view[done : done + PIECE]], offset + done)
            if moved == 0:
                raise SizeMismatchError(f"{path} ended at byte {offset + done}, wanted up to {offset + total}")
            done += moved

    def _read_parts(self, op: Op, path: str, fd: int) -> None:
        offset, end, left = op.offset, op.offset + op.length, [*filter(len, op.parts)]
        while offset < end:
            if self.is_cancelled(op.id):
                raise OpCancelledError
            moved = os.preadv(fd, left[:MOST], offset)
            if moved == 0:
                raise SizeMismatchError(f"{path} ended at byte {offset}, wanted up to {end}")
            offset += moved
            if offset < end:
                advance(left, moved)

    def _read_direct(self, op: Op, path: str, buffered: int, view: memoryview) -> None:
        """The aligned middle by O_DIRECT, the ragged ends through the page cache. Memory that is not congruent
        with the file modulo 4 KiB takes a bounce buffer: one copy."""
        first = -op.offset % PAGE
        last = (op.offset + op.length) // PAGE * PAGE - op.offset
        if last <= first:
            self._read_range(op, path, buffered, op.offset, view)
            return
        if first:
            self._read_range(op, path, buffered, op.offset, view[:first])
        if last < op.length:
            self._read_range(op, path, buffered, op.offset + last, view[last:])
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            self._check(direct, op, path)
            middle = view[first:last]
            if address_of(middle) % PAGE == 0:
                self._read_range(op, path, direct, op.offset + first, middle)
                return
            bounce = self._bounce()
            for start in range(0, len(middle), BOUNCE):
                size = min(BOUNCE, len(middle) - start)
                self._read_range(op, path, direct, op.offset + first + start, bounce.view[:size])
                middle[start : start + size] = bounce.view[:size]
        finally:
            os.close(direct)

    def _bounce(self) -> HostBuffer:
        bounce: HostBuffer | None = getattr(self._local, "bounce", None)
        if bounce is None:
            bounce = self._local.bounce = HostBuffer(BOUNCE)
        return bounce

    def _write(self, op: Op) -> None:
        if op.offset != 0 or (op.object_size is not None and op.object_size != op.length):
            raise UsageError(f"the file transport writes whole objects ({op.key})")
        path = self._store.path(op.key)
        left = [view for view in op.views if len(view)]
        whole = op.length // PAGE * PAGE if self._direct else 0
        try:
            with self._store.writing(op.key) as fd:
                if op.length >= RESERVED:
                    _reserve(fd, op.length)
                done = 0
                if whole:
                    with Direct(fd):
                        done = self._write_direct(op, fd, left, whole)
                self._write_until(op, fd, left, done, op.length)
        except OSError as problem:
            raise_from(problem, path)

    def _write_direct(self, op: Op, fd: int, left: list[memoryview], end: int) -> int:
        """Write what is `left` to the beginning of the file, up to `end`, past the page cache; memory that does not lie
        as O_DIRECT wants it is copied first. Returns how far it came: less once the kernel took no whole pages.
        """
        done = 0
        while done < end and done % PAGE == 0:
            most = min(end - done, PIECE if op.pace is None else PACED_PIECE)
            piece = in_place(left, most)
            if not piece:
                room = self._bounce().view[: min(most, BOUNCE)]
                piece = [room[: copied(left, room)]]
            done += self._write_piece(op, fd, left, piece, done)
        return done

    def _write_until(self, op: Op, fd: int, left: list[memoryview], done: int, end: int) -> None:
        """Write what is `left`, from `done` to `end` of the file."""
        while done < end:
            piece, _ = first_of(left, min(end - done, PIECE if op.pace is None else PACED_PIECE))
            done += self._write_piece(op, fd, left, piece, done)

    def _write_piece(self, op: Op, fd: int, left: list[memoryview], piece: list[memoryview], offset: int) -> int:
        """Write the piece, which is what `left` begins with. Returns how many bytes the kernel took."""
        if self.is_cancelled(op.id):
            raise OpCancelledError
        if op.pace is not None:
            op.pace(sum(map(len, piece)))
        moved = os.pwritev(fd, piece, offset)
        advance(left, moved)
        return moved


def _reserve(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as problem:
        if problem.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
            raise


def _changed(path: str, old: str, new: str) -> VersionChangedError:
    return VersionChangedError(
        f"{path} changed while loading",
        cause=f"version {old} became {new}",
        hint="load again when nobody writes it",
    )


def open_transport(
    config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]
) -> FileTransport:
    if endpoint is not None:
        raise UsageError(f"{config.url}: a file store has no endpoints")
    check_names("file", options, ("direct", "threads"))
    direct = choice(options, "direct", ("false", "true")) == "true"
    # from the page cache a thread per core is fastest; a device wants more in flight
    cores = max(2, min(8, os.cpu_count() or 2))
    threads = number(options, "threads", max(4, cores) if direct else cores, 1, 256)
    return FileTransport(FileStore(config.url), direct=direct, threads=threads)
