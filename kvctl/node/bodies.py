"""Bytes between sockets and files, by system calls that move them in the kernel or through one buffer per thread. No
event loop.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

WINDOW: Final = 4 << 20  # the event loop looks this far ahead whether bytes are cached
_PROBE_EVERY: Final = 512 << 10
_PROBES: Final = (bytearray(1),)  # what is read into it means nothing
BUFFER: Final = 1 << 20
_PIECE: Final = 256 << 10  # a socket takes about this much at once
_TURN: Final = 64 << 20  # bytes that one turn of a thread moves at most
_PATIENCE_MS: Final = 5  # how long a thread waits for a peer before it goes back


class TruncatedError(Exception):
    """The file ended before the bytes that were promised: only closing the connection tells it."""


def is_warm(fd: int, offset: int, count: int, *, in_memory: bool) -> bool:
    """Whether the event loop may send this range itself, as no disk has to be waited for: bytes at some places of it
    can be read without waiting, and so very likely can the rest.
    """
    if in_memory or not count:
        return True
    try:
        for place in range(offset, offset + count, _PROBE_EVERY):
            if not os.preadv(fd, _PROBES, place, os.RWF_NOWAIT):
                return False
        return os.preadv(fd, _PROBES, offset + count - 1, os.RWF_NOWAIT) > 0
    except OSError:  # not cached, or a file system that cannot tell
        return False


def push(
    sock: socket.socket, fd: int, offset: int, count: int, patience: int = _PATIENCE_MS, *, in_memory: bool = False
) -> tuple[int, bool]:
    """Send up to a turn's bytes; (how many, whether the peer was slow)."""
    wanted, sent = min(count, _TURN), 0
    move = _send_copy if in_memory and _to_be_sealed(fd) else _send_file
    poll: select.poll | None = None
    while sent < wanted:
        try:
            moved = move(sock, fd, offset + sent, wanted - sent)
        except BlockingIOError:
            if not patience:
                return sent, True
            if poll is None:
                poll = select.poll()
                poll.register(sock, select.POLLOUT)
            if not poll.poll(patience):
                return sent, True
            continue
        if moved == 0:
            raise TruncatedError
        sent += moved
    return sent, False


def _send_file(sock: socket.socket, fd: int, offset: int, most: int) -> int:
    return os.sendfile(sock.fileno(), fd, offset, most)


def _send_copy(sock: socket.socket, fd: int, offset: int, most: int) -> int:
    view = _SCRATCH.view[: min(most, _PIECE)]
    return sock.send(view[: os.preadv(fd, (view,), offset)])


def _to_be_sealed(fd: int) -> bool:
    """Whether it is memory that may still be sealed. sendfile lends its pages to the socket, and while a peer that has
    stopped leaves them there the kernel seals nothing.
    """
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) == 0
    except OSError:  # not a file in memory
        return False


class _Scratch(threading.local):
    """A worker thread's buffer, made once."""

    buffer: memoryview | None = None

    @property
    def view(self) -> memoryview:
        if self.buffer is None:
            self.buffer = memoryview(bytearray(BUFFER))
        return self.buffer


_SCRATCH: Final = _Scratch()


def pull(sock: socket.socket, fd: int, offset: int, count: int) -> tuple[int, bool]:
    """Receive up to a turn's bytes into the file; (how many, whether the peer has ended)."""
    if count < BUFFER:
        return _pull(_copy, sock, fd, offset, count)
    pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        with contextlib.suppress(OSError):  # more than this user may have: the kernel's default will do
            fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, BUFFER)
        return _pull(partial(_splice, pipe), sock, fd, offset, count)
    finally:
        for end in pipe:
            os.close(end)


def _pull(
    move: Callable[[socket.socket, int, int, int], int], sock: socket.socket, fd: int, offset: int, count: int
) -> tuple[int, bool]:
    wanted, got = min(count, _TURN), 0
    poll: select.poll | None = None
    while got < wanted:
        try:
            moved = move(sock, fd, offset + got, min(BUFFER, wanted - got))
        except BlockingIOError:
            if poll is None:
                poll = select.poll()
                poll.register(sock, select.POLLIN)
            if not poll.poll(_PATIENCE_MS):
                return got, False
            continue
        if moved == 0:
            return got, True
        got += moved
    return got, False


def _splice(pipe: tuple[int, int], sock: socket.socket, fd: int, offset: int, most: int) -> int:
    """Through a pipe, in the kernel: an eighth less CPU per byte than a copy through memory, measured on loopback."""
    count = left = os.splice(sock.fileno(), pipe[1], most, flags=os.SPLICE_F_MOVE)
    while left:
        try:
            moved = os.splice(pipe[0], fd, left, offset_dst=offset, flags=os.SPLICE_F_MOVE)
        except OSError as problem:
            if problem.errno != errno.EINVAL:
                raise
            data = os.read(pipe[0], left)  # a file system that takes no splice
            write_all(fd, memoryview(data), offset)
            moved = len(data)
        offset += moved
        left -= moved
    return count


def _copy(sock: socket.socket, fd: int, offset: int, most: int) -> int:
    view = _SCRATCH.view[:most]
    count = sock.recv_into(view)
    write_all(fd, view[:count], offset)
    return count


def write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
