"""Memory that the CPU does not land in directly: what a load needs of a GPU, and a stand-in made of host memory.

Bytes reach a device through staging slots: they are read into a slot, verified there, copied on asynchronously, and the
slot is used again only after the copy's event. `kvctl.memory.cuda` has the real device; `HostDevice` runs the very same
steps on a thread of its own, so that order, reuse and errors can be tested where no GPU is.
"""

from __future__ import annotations

import ctypes
import queue
import re
import threading
from dataclasses import dataclass
from typing import Final, Protocol

from kvctl.core.errors import CapacityError, EnvError, KvctlError, UsageError
from kvctl.memory.buffers import Buffer, HostBuffer
from kvctl.memory.shareable import HostMapped, HostShareable, Mapped, MappedHostBuffer, Shareable

HOST_DEVICE: Final = "hostdev"
_NAME: Final = re.compile(r"(cuda|hostdev)(?::(\d{1,4})(?:-(\d{1,4}))?)?")


@dataclass(frozen=True, slots=True)
class Span:
    """`rows` rows of `row_bytes`: from `source` in the staging buffer, `source_stride` apart, to `target` in the
    device's, `target_stride` apart. Bytes. One row: a plain copy.
    """

    source: int
    target: int
    row_bytes: int
    rows: int = 1
    source_stride: int = 0
    target_stride: int = 0

    @property
    def source_bytes(self) -> int:
        """From the first byte of the first row to the last of the last."""
        return (self.rows - 1) * self.source_stride + self.row_bytes


class Event(Protocol):
    """The end of one copy and, as copies of a device are in order, of all before it."""

    def wait(self) -> None:
        """Blocks without burning a CPU. Raises EnvError when a copy failed."""
        ...


class Device(Protocol):
    """`memory_kind` is the kind of what `allocate` gives, `staging_kind` of what `staging` gives. Thread-safe."""

    @property
    def name(self) -> str: ...
    @property
    def memory_kind(self) -> str: ...
    @property
    def staging_kind(self) -> str: ...
    def allocate(self, nbytes: int) -> Buffer:
        """Memory of the device. Raises CapacityError, which says how much was free."""
        ...

    def over(self, mapped: Mapped) -> Buffer:
        """A buffer over memory of the device that was mapped for writing (`kvctl.memory.shareable`), taken over: its
        `close` ends the mapping, whoever still knows the buffer.
        """
        ...

    def staging(self, nbytes: int) -> Buffer:
        """Host memory that the device copies from asynchronously. Raises CapacityError."""
        ...

    def copy_async(self, source: Buffer, target: Buffer, span: Span) -> Event:
        """Begin a copy; the source may change only after the event. Copies happen in the order they were begun."""
        ...

    def read_back(self, source: Buffer, offset: int, view: memoryview) -> None:
        """Fill `view` from the device's memory, after all copies begun so far."""
        ...

    def finish(self) -> None:
        """Every copy so far is done, and visible to whoever uses the device next. Raises EnvError."""
        ...

    def close(self) -> None:
        """Ends its streams; memory that was handed out stays."""
        ...


class _HostEvent:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def set(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise EnvError(f"a copy to {HOST_DEVICE} failed", cause=str(self._error)) from self._error


class HostDevice:
    """A device whose memory is the host's: one thread is its stream. `capacity` bounds what it allocates (bytes);
    `direct`: transports may write into its memory, as some do into a GPU's.
    """

    staging_kind = "host"

    def __init__(self, capacity: int | None = None, *, direct: bool = False, name: str = HOST_DEVICE) -> None:
        self.name = name
        self.memory_kind = "host" if direct else HOST_DEVICE
        self._capacity = capacity
        self._taken = 0
        self._jobs: queue.SimpleQueue[tuple[Buffer, Buffer, Span, _HostEvent] | None] = queue.SimpleQueue()
        self._stream = threading.Thread(target=self._run, name="kvctl-hostdev", daemon=True)
        self._stream.start()

    def allocate(self, nbytes: int) -> HostBuffer:
        free = None if self._capacity is None else self._capacity - self._taken
        if free is not None and nbytes > free:
            raise CapacityError(
                f"{self.name} has no room for {nbytes} bytes",
                cause=f"{free} of {self._capacity} bytes are free",
                hint="load less, or on more devices (--tp-size)",
            )
        self._taken += nbytes
        return HostBuffer(nbytes)

    def over(self, mapped: Mapped) -> Buffer:
        if not isinstance(mapped, HostMapped):
            raise TypeError(f"only memory of {HOST_DEVICE} is mapped for it")
        return MappedHostBuffer(mapped)

    def staging(self, nbytes: int) -> Buffer:
        return HostBuffer(nbytes)

    def copy_async(self, source: Buffer, target: Buffer, span: Span) -> Event:
        event = _HostEvent()
        self._jobs.put((source, target, span, event))
        return event

    def copy(self, source: Buffer, target: Buffer, span: Span) -> None:
        """One copy, on the stream's thread; tests override it."""
        start, end = source.address + span.source, target.address + span.target
        for row in range(span.rows):
            # a foreign call: the interpreter lock is free meanwhile
            ctypes.memmove(end + row * span.target_stride, start + row * span.source_stride, span.row_bytes)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            source, target, span, event = job
            error: BaseException | None = None
            try:
                self.copy(source, target, span)
            except BaseException as problem:
                error = problem
            event.set(error)

    def read_back(self, source: Buffer, offset: int, view: memoryview) -> None:
        self.finish()
        view[:] = source.view[offset : offset + len(view)]

    def finish(self) -> None:
        event = _HostEvent()
        nothing = HostBuffer(0)
        self._jobs.put((nothing, nothing, Span(0, 0, 0), event))
        event.wait()

    def close(self) -> None:
        self._jobs.put(None)
        self._stream.join()


def device_names(text: str) -> tuple[str, ...]:
    """The devices of 'cuda', 'cuda:N', 'cuda:A-B' (both included), and the same with 'hostdev'. Raises UsageError."""
    match = _NAME.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a device", hint="use cpu, cuda, cuda:N or cuda:A-B")
    kind, first, last = match.groups()
    if first is None:
        return (kind,)
    if last is None:
        return (f"{kind}:{int(first)}",)
    if int(last) < int(first):
        raise UsageError(f"{text!r} counts backwards", hint=f"write {kind}:{last}-{first}")
    return tuple(f"{kind}:{number}" for number in range(int(first), int(last) + 1))


def open_device(name: str) -> Device:
    """One device: 'cuda', 'cuda:N', 'hostdev' or 'hostdev:N'. Raises UsageError, or EnvError when it is not there."""
    one = _one(name)
    if one.partition(":")[0] == HOST_DEVICE:
        return HostDevice(name=one)
    from kvctl.memory.cuda import CudaDevice

    return CudaDevice(one)


def open_shareable(name: str) -> Shareable:
    """The memory of one device, to share with other processes; 'cuda' is 'cuda:0'. Raises UsageError, or EnvError that
    says why it cannot, and what to install.
    """
    kind, _, number = _one(name).partition(":")
    if kind == HOST_DEVICE:
        return HostShareable(name)
    from kvctl.memory.libcuda import CudaShareable

    return CudaShareable(int(number or 0))


def _one(name: str) -> str:
    names = device_names(name)
    if len(names) > 1:
        raise UsageError(f"{name!r} is more than one device")
    return names[0]


def wait_all(events: list[Event]) -> None:
    """Every event has come. Raises the first error, after all of them."""
    first: KvctlError | None = None
    for event in events:
        try:
            event.wait()
        except KvctlError as error:
            first = first or error
    if first is not None:
        raise first
