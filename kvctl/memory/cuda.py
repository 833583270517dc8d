"""CUDA and pinned memory through torch: the only module of the core that imports torch, and only when called.

Without a GPU, or without torch, everything here raises one EnvError that says which is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvctl.core.errors import CapacityError, EnvError, UsageError

if TYPE_CHECKING:
    import torch

SLOT: Final = 32 << 20  # bytes of one pinned staging slot


def require(device: str) -> Any:  # Any: the torch module
    """torch, when `device` ('cuda' or 'cuda:N') can be used here. Raises EnvError or UsageError."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise UsageError(f"{device!r} is not a device", hint="use cpu, cuda or cuda:N")
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
            raise CapacityError(f"cannot pin {nbytes} bytes of host memory", cause=str(error)) from error
        self.view = memoryview(self.tensor.numpy())

    @property
    def address(self) -> int:
        return int(self.tensor.data_ptr())

    def close(self) -> None:
        self.view.release()


def copy_to_device(source: memoryview, device: str) -> torch.Tensor:
    """A uint8 tensor on `device` with the bytes of `source`, copied through two pinned slots so that filling one
    overlaps the transfer of the other. A slot is reused only after its event.
    """
    lib = require(device)
    total = len(source)
    try:
        target = lib.empty(total, dtype=lib.uint8, device=device)
    except lib.cuda.OutOfMemoryError as error:
        raise CapacityError(
            f"{device} has no room for {total} bytes", cause=str(error).splitlines()[0], hint="free memory on the GPU"
        ) from error
    slots = [PinnedBuffer(min(SLOT, max(1, total)), device) for _ in range(2)]
    stream = lib.cuda.Stream(device=device)
    events: list[torch.cuda.Event | None] = [None, None]
    try:
        for number, start in enumerate(range(0, total, SLOT)):
            slot = number % 2
            waiting = events[slot]
            if waiting is not None:
                waiting.synchronize()
            size = min(SLOT, total - start)
            slots[slot].view[:size] = source[start : start + size]
            with lib.cuda.stream(stream):
                target[start : start + size].copy_(slots[slot].tensor[:size], non_blocking=True)
                done = lib.cuda.Event()
                done.record(stream)
            events[slot] = done
        stream.synchronize()
    finally:
        for buffer in slots:
            buffer.close()
    result: torch.Tensor = target
    return result
