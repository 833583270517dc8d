"""Bytes between sockets and files, by system calls that move them in the kernel or through one buffer per thread. No
event loop.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from typing import Final

SMALL: Final = 128 << 10  # up to here a copy with the head is cheaper than another system call
_INLINE: Final = 8 << 20  # up to here the event loop sends what is cached: a thread costs two hand-overs
_PROBES: Final = 8
BUFFER: Final = 1 << 20
_TURN: Final = 64 << 20  # bytes that one turn of a thread moves at most
_PATIENCE_MS: Final = 5  # how long a thread waits for a peer before it goes back


class TruncatedError(Exception):
    """The file ended before the bytes that were promised: only closing the connection tells it."""


def is_warm(fd: int, offset: int, count: int, *, in_memory: bool) -> bool:
    """Whether the event loop may send this range itself: it is not large, and no disk has to be waited for."""
    return count <= _INLINE and (in_memory or count == 0 or _is_cached(fd, offset, count))


def with_body(head: bytes, fd: int, offset: int, count: int) -> bytearray:
    """The head and the range behind it. Raises TruncatedError."""
    data = bytearray(len(head) + count)
    data[: len(head)] = head
    if count and os.preadv(fd, [memoryview(data)[len(head) :]], offset) != count:
        raise TruncatedError
    return data


def _is_cached(fd: int, offset: int, count: int) -> bool:
    """Whether bytes at some places of the range can be read without waiting: then the rest very likely can, too."""
    probe = bytearray(1)
    step = max(1, count // _PROBES)
    try:
        return all(
            os.preadv(fd, [probe], place, os.RWF_NOWAIT)
            for place in (*range(offset, offset + count, step), offset + count - 1)
        )
    except OSError:  # not cached, or a file system that cannot tell
        return False


def push(sock: socket.socket, fd: int, offset: int, count: int, patience: int = _PATIENCE_MS) -> tuple[int, bool]:
    """Send up to a turn's bytes; (how many, whether the peer was slow)."""
    wanted, sent = min(count, _TURN), 0
    poll: select.poll | None = None
    while sent < wanted:
        try:
            moved = os.sendfile(sock.fileno(), fd, offset + sent, wanted - sent)
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


class _Scratch(threading.local):
    """A worker thread's buffer, made once."""

    buffer: bytearray | None = None


_SCRATCH: Final = _Scratch()


def pull(sock: socket.socket, fd: int, offset: int, count: int) -> tuple[int, bool]:
    """Receive up to a turn's bytes into the file; (how many, whether the peer has ended)."""
    if _SCRATCH.buffer is None:
        _SCRATCH.buffer = bytearray(BUFFER)
    view = memoryview(_SCRATCH.buffer)
    wanted, got = min(count, _TURN), 0
    poll: select.poll | None = None
    while got < wanted:
        try:
            moved = sock.recv_into(view[: min(BUFFER, wanted - got)])
        except BlockingIOError:
            if poll is None:
                poll = select.poll()
                poll.register(sock, select.POLLIN)
            if not poll.poll(_PATIENCE_MS):
                return got, False
            continue
        if moved == 0:
            return got, True
        write_all(fd, view[:moved], offset + got)
        got += moved
    return got, False


def write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
