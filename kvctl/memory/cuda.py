"""CUDA and pinned memory through torch: the only module of the core that imports torch, and only when called.

Without a GPU, or without torch, everything here raises one EnvError that says which is missing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from kvctl.core.errors import CapacityError, EnvError, UsageError
from kvctl.core.units import format_size
from kvctl.memory.buffers import Buffer
from kvctl.memory.shareable import Mapped

if TYPE_CHECKING:
    import torch

    from kvctl.memory.devices import Event, Span


def require(device: str) -> Any:  # Any: the torch module
    """torch, when `device` ('cuda' or 'cuda:N') can be used here. Raises EnvError or UsageError."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise UsageError(f"{device!r} is not a GPU", hint="use cuda or cuda:N")
    try:
        import torch
    except ImportError as error:
        raise EnvError(f"device {device} needs torch", cause=str(error), hint="pip install 'kvctl[torch]'") from error
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "no GPU or no driver was found"
        raise EnvError(
            f"device {device} is not available", cause=why, hint="use --device cpu, or run on a host with a GPU"
        )
    if number and int(number) >= torch.cuda.device_count():
        raise EnvError(f"device {device} does not exist", cause=f"{torch.cuda.device_count()} GPUs are here")
    return torch


class PinnedBuffer:
    """Page-locked host memory: the GPU copies from it asynchronously. Costly to allocate, so allocate it once."""

    kind = "pinned"

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        lib = require(device)
        self.nbytes = nbytes
        try:
            self.tensor: torch.Tensor = lib.empty(nbytes, dtype=lib.uint8, pin_memory=True)
        except RuntimeError as error:
            raise CapacityError(
                f"cannot pin {nbytes} bytes of host memory",
                cause=str(error).splitlines()[0],
                hint="raise the limit of locked memory (ulimit -l), or lower --max-in-flight",
            ) from error
        self.view = memoryview(self.tensor.numpy())

    @property
    def address(self) -> int:
        return int(self.tensor.data_ptr())

    def close(self) -> None:
        try:
            self.view.release()
        except BufferError:
            return  # a view of it is still out: it lives as long as that
        self.tensor = self.tensor[:0].clone()


class CudaBuffer:
    """Memory of a GPU, as one uint8 tensor. The CPU cannot look at it: paths that write to it use `address`."""

    kind = "cuda"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes = int(tensor.numel())

    @property
    def view(self) -> memoryview:
        raise TypeError("memory of a GPU has no view")

    @property
    def address(self) -> int:
        return int(self.tensor.data_ptr())

    def close(self) -> None:
        # whoever holds a tensor over it keeps it
        self.tensor = self.tensor[:0].clone()


class _OnGpu:
    """What torch makes a tensor of, and keeps as long as one over it lives: then the mapping ends."""

    def __init__(self, lib: Any, mapped: Mapped, device: str) -> None:  # Any: the torch module
        self._lib, self._mapped, self._device = lib, mapped, device
        # torch takes no memory that says of itself that it is read-only; the mapping is, where it is to be
        self.__cuda_array_interface__ = {
            "shape": (mapped.nbytes,), "typestr": "|u1", "data": (mapped.address, False), "version": 3
        }  # fmt: skip

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a broken GPU was told where it broke
            self._lib.cuda.synchronize(self._device)  # what was begun may still read
        with contextlib.suppress(EnvError):
            self._mapped.unmap()


def tensor_over(mapped: Mapped, device: str) -> torch.Tensor:
    """The bytes of a GPU's mapped memory, which stays mapped while a tensor over it lives. Raises EnvError."""
    lib = require(device)
    lib.cuda.synchronize(device)  # torch's context is there from now on
    found: torch.Tensor = lib.as_tensor(_OnGpu(lib, mapped, device), device=device)
    return found


class _MappedCudaBuffer(CudaBuffer):
    def __init__(self, mapped: Mapped, device: str) -> None:
        super().__init__(tensor_over(mapped, device))
        self._mapped = mapped

    def close(self) -> None:
        super().close()
        self._mapped.unmap()


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:  # an error of CUDA is told by whoever asks next
            raise EnvError("a copy to the GPU failed", cause=str(error).splitlines()[0]) from error


class CudaDevice:
    """See `kvctl.memory.devices.Device`: one side stream, in whose order all copies happen."""

    memory_kind = "cuda"
    staging_kind = "pinned"

    def __init__(self, name: str) -> None:
        self._lib = require(name)
        index = int(name.partition(":")[2] or self._lib.cuda.current_device())
        self.name = f"cuda:{index}"
        self._stream: torch.cuda.Stream = self._lib.cuda.Stream(device=index)

    def allocate(self, nbytes: int) -> CudaBuffer:
        lib = self._lib
        try:
            tensor = lib.empty(nbytes, dtype=lib.uint8, device=self.name)
        except lib.cuda.OutOfMemoryError as error:
            free, total = lib.cuda.mem_get_info(self.name)
            raise CapacityError(
                f"{self.name} has no room for {format_size(nbytes)}",
                cause=f"{format_size(free)} of {format_size(total)} are free",
                hint="free memory on the GPU, or load on more devices (--tp-size)",
            ) from error
        # the allocator may give memory that work queued before still uses
        self._stream.wait_stream(lib.cuda.current_stream(self.name))
        return CudaBuffer(tensor)

    def over(self, mapped: Mapped) -> CudaBuffer:
        return _MappedCudaBuffer(mapped, self.name)

    def staging(self, nbytes: int) -> PinnedBuffer:
        return PinnedBuffer(nbytes, self.name)

    def copy_async(self, source: Buffer, target: Buffer, span: Span) -> Event:
        if not isinstance(source, PinnedBuffer) or not isinstance(target, CudaBuffer):
            raise TypeError("copies go from pinned memory to the GPU's")
        lib = self._lib
        flat = source.tensor[span.source : span.source + span.source_bytes]
        with lib.cuda.stream(self._stream):
            if span.rows == 1:
                target.tensor[span.target : span.target + span.row_bytes].copy_(flat, non_blocking=True)
            else:
                # in one piece over the bus, and apart on the GPU: a copy per row would cost a launch each
                landed = flat.to(self.name, non_blocking=True)
                shape = (span.rows, span.row_bytes)
                rows = landed.as_strided(shape, (span.source_stride, 1))
                place = target.tensor.as_strided(shape, (span.target_stride, 1), span.target)
                place.copy_(rows, non_blocking=True)
            # blocking: whoever waits sleeps, and the CPU reads and verifies meanwhile
            event = lib.cuda.Event(blocking=True)
            event.record(self._stream)
        return _CudaEvent(event)

    def read_back(self, source: Buffer, offset: int, view: memoryview) -> None:
        if not isinstance(source, CudaBuffer):
            raise TypeError("only the GPU's memory is read back")
        lib = self._lib
        self._stream.synchronize()
        if not len(view):
            return
        lib.frombuffer(view, dtype=lib.uint8).copy_(source.tensor[offset : offset + len(view)])

    def finish(self) -> None:
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            raise EnvError(f"copies to {self.name} failed", cause=str(error).splitlines()[0]) from error

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a broken GPU was told where it broke
            self._stream.synchronize()
