"""A GPU's memory by CUDA's virtual memory calls, which give it descriptors: libcuda alone, by ctypes, no torch.

Allocating needs no context, so the agent takes no memory of a GPU but that of its slots. The structures and numbers are
those of `cuda.h` (CUDA 11.4 and later).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import uuid
from collections.abc import Callable
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from functools import cache
from typing import Any, Final

from kvctl.core.errors import CapacityError, EnvError
from kvctl.core.units import format_size
from kvctl.memory.buffers import round_up

_OUT_OF_MEMORY: Final = 2
_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: the one that there is
_FILE_DESCRIPTOR: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ: Final = 1
_READ_WRITE: Final = 3
# attributes of a device
_HAS_VMM: Final = 102
_HAS_DESCRIPTORS: Final = 103
_HAS_RDMA: Final = 110


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


_SIGNATURES: Final = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(c_char * 16), c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
}


class _Driver:
    """The calls by name. Raises EnvError, here and from every call, with the call and CUDA's name for the error."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise EnvError(
                "no CUDA driver is here",
                cause=str(error),
                hint="install the GPU's driver; in a container use the NVIDIA container toolkit",
            ) from error
        self._calls: dict[str, Callable[..., int]] = {}  # ...: as the table says
        for name, arguments in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise EnvError(
                    "the CUDA driver is too old", cause=f"it has no {name}", hint="install that of CUDA 11.4 or later"
                ) from error
            function.argtypes, function.restype = arguments, c_int
            self._calls[name] = function
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:  # Any: as the table says
        status = self.status(name, *arguments)
        if status:
            raise EnvError(
                "the CUDA driver refused a call",
                cause=f"{name}: {self.name_of(status)}",
                hint="`nvidia-smi` and `kvctl doctor` say what is there",
            )

    def status(self, name: str, *arguments: Any) -> int:  # Any: as the table says
        return self._calls[name](*arguments)

    def name_of(self, status: int) -> str:
        text = c_char_p()
        self._calls["cuGetErrorName"](status, byref(text))
        return text.value.decode() if text.value else f"error {status}"


@cache
def _driver() -> _Driver:
    return _Driver()


class CudaMapped:
    """See `kvctl.memory.shareable.Mapped`. Ends with the object at the latest."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.lease: object = None
        self._lock = threading.Lock()
        self._mapped = True

    def unmap(self) -> None:
        with self._lock:
            mapped, self._mapped = self._mapped, False
        if mapped:
            driver = _driver()
            driver.call("cuMemUnmap", self.address, self.nbytes)
            driver.call("cuMemAddressFree", self.address, self.nbytes)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # when the process ends the driver may have gone before us
            self.unmap()


class CudaShareable:
    """See `kvctl.memory.shareable.Shareable`."""

    def __init__(self, number: int) -> None:
        self.name = f"cuda:{number}"
        self._cuda = _driver()
        device = c_int()
        self._cuda.call("cuDeviceGet", byref(device), number)
        self._device = device.value
        if not self._has(_HAS_VMM) or not self._has(_HAS_DESCRIPTORS):
            raise EnvError(
                f"{self.name} cannot share its memory",
                cause="the driver has no virtual memory management with descriptors for it",
                hint="use a newer driver; vGPU and WSL may lack it",
            )
        found = (c_char * 16)()
        self._cuda.call("cuDeviceGetUuid_v2", byref(found), self._device)
        self.ident = f"GPU-{uuid.UUID(bytes=found.raw)}"  # as nvidia-smi writes it
        self._place = _Location(_ON_DEVICE, self._device)
        # without the flag no NIC could be given the memory (GPUDirect RDMA)
        flags = _Flags(rdma=int(self._has(_HAS_RDMA)))
        self._properties = _Properties(_PINNED, _FILE_DESCRIPTOR, self._place, None, flags)
        page = c_size_t()
        self._cuda.call("cuMemGetAllocationGranularity", byref(page), byref(self._properties), 0)
        self._page = page.value

    def _has(self, attribute: int) -> bool:
        value = c_int()
        self._cuda.call("cuDeviceGetAttribute", byref(value), attribute, self._device)
        return bool(value.value)

    def size_of(self, nbytes: int) -> int:
        return round_up(max(nbytes, 1), self._page)

    def allocate(self, nbytes: int) -> int:
        handle, fd = c_uint64(), c_int()
        status = self._cuda.status("cuMemCreate", byref(handle), nbytes, byref(self._properties), 0)
        if status == _OUT_OF_MEMORY:
            raise CapacityError(
                f"{self.name} has no room for {format_size(nbytes)}",
                cause=f"cuMemCreate: {self._cuda.name_of(status)}",
                hint="free memory on the GPU: others use it too, or --device-memory is more than it has",
            )
        if status:
            raise EnvError(f"{self.name} gives no memory", cause=f"cuMemCreate: {self._cuda.name_of(status)}")
        try:
            self._cuda.call("cuMemExportToShareableHandle", byref(fd), handle.value, _FILE_DESCRIPTOR, 0)
        finally:
            self._cuda.call("cuMemRelease", handle.value)  # the descriptor keeps the memory
        os.set_inheritable(fd.value, False)
        return fd.value

    def map(self, fd: int, nbytes: int, *, writable: bool) -> CudaMapped:
        handle, address = c_uint64(), c_uint64()
        self._cuda.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), _FILE_DESCRIPTOR)
        with contextlib.ExitStack() as undo:
            try:
                self._cuda.call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
                undo.callback(self._cuda.status, "cuMemAddressFree", address.value, nbytes)
                self._cuda.call("cuMemMap", address.value, nbytes, 0, handle.value, 0)
            finally:
                self._cuda.call("cuMemRelease", handle.value)  # the mapping keeps the memory
            undo.callback(self._cuda.status, "cuMemUnmap", address.value, nbytes)
            access = _Access(self._place, _READ_WRITE if writable else _READ)
            self._cuda.call("cuMemSetAccess", address.value, nbytes, byref(access), 1)
            undo.pop_all()
        return CudaMapped(address.value, nbytes)
