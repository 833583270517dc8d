"""Opened RDMA devices and memory registered with them, shared by all that use them in this process.

Registering pins pages, so the same memory is registered once however many transports ask, and unpinned when the last
of them lets go.
"""

from __future__ import annotations

import ctypes
import errno
import resource
import threading
from typing import Any, Final

from kvctl.core.errors import CapacityError, EnvError, KvctlError
from kvctl_verbs.bindings import load

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_PAGE: Final = 4096


# Held while files of the kernel's RDMA events are opened or closed: see `queues.Completions`.
EVENT_FILES: Final = threading.Lock()


class Memory:
    """Registered memory [address, address + length). Closed as often as it was asked for. `windows`: the other end gets
    at it through windows only; its own rkey opens nothing.
    """

    def __init__(self, device: Device, address: int, length: int, *, writable: bool, windows: bool) -> None:
        verbs = load()
        self.address = address
        self.length = length
        self.writable = writable
        self.windows = windows
        self.users = 1
        self._device = device
        access = verbs["ACCESS_MW_BIND"] if windows else verbs["ACCESS_REMOTE_READ"]
        if writable:
            access |= verbs["ACCESS_LOCAL_WRITE"] | (0 if windows else verbs["ACCESS_REMOTE_WRITE"])
            _populate(address, length)
        try:
            self.mr: Any = verbs.mr.MR(device.pd, length, access, address=address)
        except Exception as problem:  # pyverbs' errors have no common base in both generations
            raise _refused(device.name, length, problem) from None
        self.lkey: int = self.mr.lkey
        self.rkey: int = self.mr.rkey

    def close(self) -> None:
        """When it returns for the last time, no device reaches the memory any more."""
        self._device.release(self)

    def deregister(self) -> None:
        self.mr.close()


class Device:
    """One opened device. Thread-safe."""

    def __init__(self, name: str) -> None:
        verbs = load()
        self.name = name
        self.users = 1
        self._lock = threading.Lock()
        self._memories: dict[tuple[int, int, bool, bool], Memory] = {}
        try:
            with EVENT_FILES:
                self.context: Any = verbs.device.Context(name=name)
            self.pd: Any = verbs.pd.PD(self.context)
        except Exception as problem:
            raise EnvError(f"the RDMA device {name} cannot be opened", cause=str(problem)) from None

    def memory(self, address: int, length: int, *, writable: bool = True, windows: bool = False) -> Memory:
        """Memory that the other end may read, and write to if `writable`; with `windows`, only where one is bound.
        Raises CapacityError or EnvError.
        """
        key = (address, length, writable, windows)
        with self._lock:
            found = self._memories.get(key)
            if found is not None:
                found.users += 1
                return found
        # outside the lock: pinning gigabytes takes seconds
        made = Memory(self, address, length, writable=writable, windows=windows)
        with self._lock:
            found = self._memories.setdefault(key, made)
            if found is not made:
                found.users += 1
        if found is not made:
            made.deregister()
        return found

    def release(self, memory: Memory) -> None:
        with self._lock:
            memory.users -= 1
            if memory.users:
                return
            del self._memories[memory.address, memory.length, memory.writable, memory.windows]
        memory.deregister()

    def close(self) -> None:
        """As often as `open_device` gave it."""
        with _LOCK:
            self.users -= 1
            if self.users:
                return
            del _OPEN[self.name]
        with EVENT_FILES:
            self.context.close()


_OPEN: Final[dict[str, Device]] = {}
_LOCK: Final = threading.Lock()


def open_device(name: str) -> Device:
    """Raises EnvError."""
    with _LOCK:
        found = _OPEN.get(name)
        if found is None:
            found = _OPEN[name] = Device(name)
        else:
            found.users += 1
        return found


def _populate(address: int, length: int) -> None:
    """Touch the pages first: pyverbs holds the interpreter's lock while it pins, and fresh pages take most of that
    time. Where the kernel cannot, pinning does it.
    """
    start = address // _PAGE * _PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + length - start), _MADV_POPULATE_WRITE)


def _refused(device: str, length: int, problem: Exception) -> KvctlError:
    what = f"{length} bytes of memory cannot be registered with {device}"
    code = getattr(problem, "error_code", None)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if code in {errno.ENOMEM, errno.EAGAIN} and limit != resource.RLIM_INFINITY:
        hint = "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity), or load with less in flight"
        return CapacityError(what, cause=f"memlock is limited to {limit} bytes", hint=hint)
    return EnvError(what, cause=str(problem), details={"errno": code})
