"""The compiled reader (pump.c) as Python sees it: whether it is here, and its functions.

It is built when kvctl is installed, where there is a C compiler (`hatch_build.py`); without it the same is done by
Python, at more CPU per request. A plain shared object, used by ctypes: it fits every version of Python.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from functools import cache
from math import ceil
from typing import Final

from kvctl.core.errors import CapacityError, EnvError
from kvctl.memory.buffers import address_of
from kvctl.transports.api import Op
from kvctl.transports.options import choice
from kvctl.transports.wire import Connection

# how a reading ended, as in pump.c, which explains them
DONE: Final = 0
CLOSED: Final = 1
CUT_OFF: Final = 2
HEAD_CAME: Final = 3
HEAD_TOO_LARGE: Final = 4
FAILED: Final = 5

HINT: Final = "a C compiler (apt install gcc libc6-dev), then install kvctl again"
_FILE: Final = os.path.join(os.path.dirname(__file__), "_pump.so")
_FORM: Final = 3  # of the functions and structures, as in pump.c: a build of another one is not used
_AT_ONCE: Final = 32  # readings that one poll tells of
_ENDED: Final = struct.Struct("@PqQd")


class _View(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    try:
        library = ctypes.CDLL(_FILE, use_errno=True)
        form = library.pump_form()
    except (OSError, AttributeError):
        built = os.path.exists(_FILE)
        return None, "it does not load" if built else "it was not built when kvctl was installed"
    if form != _FORM:
        return None, "it was built from another version of kvctl"
    pump, reading, size, text = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    number, views = ctypes.c_int, ctypes.POINTER(_View)
    for name, result, arguments in (
        ("new", pump, (number,)),
        ("free", None, (pump,)),
        ("reading", reading, (pump,)),
        (
            "start",
            number,
            (pump, reading, number, text, size, text, size, text, size, views, number, pump, size, number),
        ),
        ("head", ctypes.c_void_p, (reading, ctypes.POINTER(size))),
        ("go_on", number, (pump, reading, size, number)),
        ("moved", ctypes.c_uint64, (reading,)),
        ("look", number, (reading,)),
        ("wake", None, (pump,)),
        ("poll", number, (pump, number, ctypes.c_char_p, number)),
        ("stop", None, (pump,)),
        ("fits", number, (text, size, text, size, size, size)),
    ):
        function = getattr(library, f"pump_{name}")
        function.restype, function.argtypes = result, arguments
    return library, ""


def why_not() -> str:
    """Why there is no compiled reader here; empty when there is."""
    return _loaded()[1]


def lacking() -> tuple[str, str] | None:
    """See `TransportSpec.lacks`."""
    reason = why_not()
    return ("the compiled reader", reason) if reason else None


def wanted(options: Mapping[str, str]) -> bool:
    """Whether to read with it, by a transport's option `compiled` (auto, true, false). Raises UsageError, or EnvError
    when it has to be and is not here.
    """
    value = choice(options, "compiled", ("auto", "true", "false"))
    if value == "true" and why_not():
        raise EnvError("there is no compiled reader", cause=why_not(), hint=HINT)
    return value != "false" and not why_not()


def fits(head: bytes, expected: tuple[bytes, bytes], length: int) -> bool:
    """Whether a head, with its empty line, is plainly in order for a body of `length` bytes; by the compiled reader, of
    which this is the part that knows HTTP.
    """
    library = _loaded()[0]
    assert library is not None
    span, etag = expected
    return bool(library.pump_fits(head, len(head), span + etag, len(span), len(etag), length))


# what `Pump.start` makes of `places`: a list of views and their number, or one address; bytes
Places = tuple[ctypes.Array[_View] | None, int, int, int]


def places(op: Op) -> Places:
    """Where the bytes of a read go. They are touched only while `op.views` are held."""
    if not op.parts:
        return None, 0, op.buffer.address + op.buffer_offset, op.length
    parts = [part for part in op.parts if part]
    views = (_View * len(parts))()
    for view, part in zip(views, parts, strict=True):
        view.base, view.length = address_of(part), len(part)
    return views, len(parts), 0, op.length


class Pump:
    """One set of readings. `start`, `go_on`, `head` and `poll` belong to one thread at a time; `wake` and `stop` may be
    called by others. A reading is a number from `reading`, for one request at a time. Its memory has to stay until
    `poll` has told of it, or `stop` has returned.
    """

    def __init__(self, helpers: int) -> None:
        """`helpers`: threads that read beside the one that polls. Raises CapacityError."""
        library = _loaded()[0]
        assert library is not None
        self._library = library
        self._pump = library.pump_new(helpers)
        if not self._pump:
            raise CapacityError("no epoll instance could be made", cause=os.strerror(ctypes.get_errno()))
        weakref.finalize(self, library.pump_free, self._pump).atexit = False
        self._ended = ctypes.create_string_buffer(_AT_ONCE * _ENDED.size)
        self._told = memoryview(self._ended)
        self._start, self._poll = library.pump_start, library.pump_poll  # looked up once

    def reading(self) -> int:
        """Room for a request at a time; it lives as long as this pump."""
        made: int | None = self._library.pump_reading(self._pump)
        if made is None:
            raise MemoryError
        return made

    def start(
        self,
        reading: int,
        connection: Connection,
        head: bytes,
        expected: tuple[bytes, bytes],
        places: Places,
    ) -> int:
        """Send the request `head`, and read the answer's body into `places`. 0, or the errno when it was not begun;
        ESTALE: the connection was closed, or holds bytes that belong to no answer. `expected`: see `Dialect.expected`.
        """
        span, etag = expected
        code: int = self._start(
            self._pump, reading, connection.number, head, len(head), span, len(span), etag, len(etag),
            *places, not connection.batches,
        )  # fmt: skip
        return code

    def head(self, reading: int) -> bytes:
        """After HEAD_CAME: what came, the body's first bytes included."""
        size = ctypes.c_size_t()
        return ctypes.string_at(self._library.pump_head(reading, ctypes.byref(size)), size.value)

    def go_on(self, reading: int, size: int, *, body: bool) -> int:
        """After HEAD_CAME: `size` bytes are dealt with, what follows is the body, or another head. As `start`."""
        code: int = self._library.pump_go_on(self._pump, reading, size, body)
        return code

    def moved(self, reading: int) -> int:
        """Bytes of the answer that came so far."""
        count: int = self._library.pump_moved(reading)
        return count

    def look(self, reading: int) -> bool:
        """Whether bytes wait that are too few to wake anybody; they do from now on."""
        return bool(self._library.pump_look(reading))

    def wake(self) -> None:
        """Make `poll` return."""
        self._library.pump_wake(self._pump)

    def poll(self, timeout: float) -> Iterator[tuple[int, int, int, float]]:
        """Wait up to `timeout` seconds for something to come, take it. What has ended: (reading, how, bytes of the body
        or errno, when).
        """
        # rounded up: a wait that is over too early would be repeated, again and again
        count = self._poll(self._pump, ceil(timeout * 1000), self._ended, _AT_ONCE)
        return _ENDED.iter_unpack(self._told[: count * _ENDED.size])

    def stop(self) -> None:
        """Returns when no memory is touched any more. Once; readings may then be neither begun nor told of."""
        self._library.pump_stop(self._pump)


def as_oserror(number: int) -> OSError:
    """BlockingIOError and the like by its number."""
    return OSError(number or errno.EIO, os.strerror(number or errno.EIO))
