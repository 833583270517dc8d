"""The device seam: order, rows, errors and room, on the stand-in of host memory; and the CUDA code's own steps, on the
CPU's torch with streams that do nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self

import pytest

from kvctl.core.errors import CapacityError, EnvError, UsageError
from kvctl.memory import cuda
from kvctl.memory.buffers import Buffer, HostBuffer
from kvctl.memory.devices import HostDevice, Span, device_names, open_device, open_shareable, wait_all


@pytest.fixture
def device() -> Iterator[HostDevice]:
    made = HostDevice()
    yield made
    made.close()


def filled(data: bytes) -> HostBuffer:
    buffer = HostBuffer(len(data))
    buffer.view[:] = data
    return buffer


def test_copies_happen_in_order_and_the_last_event_means_all(device: HostDevice) -> None:
    source, target = filled(bytes(range(100))), device.allocate(4)
    events = [device.copy_async(source, target, Span(start, 0, 4)) for start in range(97)]
    events[-1].wait()
    assert bytes(target.view) == bytes(range(96, 100))


def test_rows_go_to_their_places(device: HostDevice) -> None:
    source, target = filled(bytes(range(30))), device.allocate(64)
    target.view[:] = b"." * 64
    device.copy_async(source, target, Span(3, 5, 2, rows=3, source_stride=10, target_stride=20)).wait()
    expected = bytearray(b"." * 64)
    for row in range(3):
        expected[5 + row * 20 : 7 + row * 20] = bytes(range(3 + row * 10, 5 + row * 10))
    assert bytes(target.view) == bytes(expected)


def test_what_is_read_back_is_what_was_copied_before(device: HostDevice) -> None:
    source, target = filled(b"0123456789"), device.allocate(10)
    for start in range(10):
        device.copy_async(source, target, Span(start, start, 1))
    view = memoryview(bytearray(4))
    device.read_back(target, 3, view)
    assert bytes(view) == b"3456"


class Failing(HostDevice):
    def copy(self, source: Buffer, target: Buffer, span: Span) -> None:
        if span.target == 1:
            raise OSError("the bus is on fire")
        super().copy(source, target, span)


def test_a_failed_copy_is_told_by_its_event_after_all_others_are_done() -> None:
    device = Failing()
    source, target = filled(b"abc"), device.allocate(3)
    events = [device.copy_async(source, target, Span(place, place, 1)) for place in range(3)]
    with pytest.raises(EnvError, match="on fire"):
        wait_all(events)
    assert bytes(target.view) == b"a\0c"
    device.close()


def test_room_that_is_not_there_is_told_with_numbers() -> None:
    device = HostDevice(capacity=1000)
    device.allocate(600)
    with pytest.raises(CapacityError) as caught:
        device.allocate(600)
    assert caught.value.cause == "400 of 1000 bytes are free"
    device.allocate(400)
    device.close()


def test_names_of_devices() -> None:
    assert device_names("cuda") == ("cuda",)
    assert device_names("cuda:03") == ("cuda:3",)
    assert device_names("cuda:0-3") == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    open_device("hostdev:1").close()
    for name in ("gpu", "cuda:", "cuda:x", "cuda:0:1", "cpu", "cuda:3-1", "cuda:-1", "cuda:0-", "cuda:0,1"):
        with pytest.raises(UsageError):
            device_names(name)
    with pytest.raises(UsageError, match="more than one"):
        open_device("hostdev:0-1")


def test_a_gpu_that_is_not_there_says_why() -> None:
    torch = pytest.importorskip("torch", reason="the reason comes from torch: pip install 'kvctl[torch]'")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: `scripts/gpu-check` tests it")
    with pytest.raises(EnvError, match="not available"):
        open_device("cuda:0")


class NothingStream:
    """A stream, an event and a context manager in one, on a device where everything is done at once."""

    def __init__(self, **_: object) -> None:
        self.recorded = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def record(self, stream: object) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        return

    def wait_stream(self, other: object) -> None:
        return


class OutOfMemory(RuntimeError):
    pass


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> cuda.CudaDevice:
    """The CUDA device with the CPU in the GPU's place: what torch does there it does for real."""
    torch = pytest.importorskip("torch", reason="the CUDA code is torch's: pip install 'kvctl[torch]'")

    def empty(size: int, *, dtype: object, device: str = "cpu", pin_memory: bool = False) -> object:
        if size > 1 << 40:
            raise OutOfMemory("CUDA out of memory. Tried to allocate\nmore words")
        return torch.empty(size, dtype=dtype)

    def as_tensor(owner: Any, *, device: str) -> object:
        """As torch does it for a GPU: over the address, and the owner lives as long."""
        told = owner.__cuda_array_interface__
        assert (told["typestr"], told["version"], told["data"][1]) == ("|u1", 3, False)
        memory = (ctypes.c_ubyte * told["shape"][0]).from_address(told["data"][0])
        memory.owner = owner
        return torch.frombuffer(memory, dtype=torch.uint8)

    fake: Any = SimpleNamespace(
        empty=empty,
        uint8=torch.uint8,
        frombuffer=torch.frombuffer,
        as_tensor=as_tensor,
        cuda=SimpleNamespace(
            Stream=NothingStream,
            Event=NothingStream,
            OutOfMemoryError=OutOfMemory,
            stream=lambda stream: stream,
            current_stream=lambda device: NothingStream(),
            current_device=lambda: 3,
            mem_get_info=lambda device: (1 << 30, 80 << 30),
            synchronize=lambda device: None,
        ),
    )
    monkeypatch.setattr(cuda, "require", lambda device: fake)
    made = cuda.CudaDevice("cuda")
    assert made.name == "cuda:3"
    made.name = "cpu"  # where `to` goes
    return made


def bytes_of(buffer: cuda.CudaBuffer) -> bytes:
    return bytes(buffer.tensor.numpy())


def test_the_cuda_steps_copy_rows_as_the_stand_in_does(on_cpu: cuda.CudaDevice, device: HostDevice) -> None:
    spans = [
        Span(0, 8, 100),
        Span(7, 200, 5, rows=4, source_stride=11, target_stride=17),
        Span(3, 0, 1, rows=2, source_stride=2, target_stride=4),
    ]
    staging, target = on_cpu.staging(256), on_cpu.allocate(300)
    stand_in, other = device.staging(256), device.allocate(300)
    staging.view[:] = stand_in.view[:] = bytes(range(256))
    target.tensor.zero_()
    for span in spans:
        wait_all([on_cpu.copy_async(staging, target, span), device.copy_async(stand_in, other, span)])
    assert bytes_of(target) == bytes(other.view)
    view = memoryview(bytearray(20))
    on_cpu.read_back(target, 200, view)
    assert bytes(view) == bytes(other.view[200:220])
    on_cpu.read_back(target, 0, memoryview(bytearray()))
    on_cpu.finish()
    on_cpu.close()
    staging.close()
    assert (target.kind, staging.kind) == ("cuda", "pinned")
    with pytest.raises(TypeError, match="no view"):
        _ = target.view
    with pytest.raises(TypeError, match="pinned"):
        on_cpu.copy_async(stand_in, target, spans[0])


def test_a_gpu_without_room_tells_what_is_free(on_cpu: cuda.CudaDevice) -> None:
    with pytest.raises(CapacityError) as caught:
        on_cpu.allocate(1 << 41)
    assert caught.value.cause == "1 GiB of 80 GiB are free"


def test_pinned_memory_that_is_looked_at_lives_on(on_cpu: cuda.CudaDevice) -> None:
    buffer = on_cpu.staging(16)
    held = buffer.view[4:8]
    buffer.close()
    held[:] = b"abcd"
    held.release()
    buffer.close()
    assert buffer.tensor.numel() == 0


def test_memory_of_another_process_is_mapped_as_long_as_a_tensor_over_it_lives(on_cpu: cuda.CudaDevice) -> None:
    shareable = open_shareable("hostdev")
    size = shareable.size_of(5000)
    assert size == 8192
    fd = shareable.allocate(size)
    loader = on_cpu.over(shareable.map(fd, size, writable=True))
    assert (loader.kind, loader.nbytes) == ("cuda", size)
    staging = on_cpu.staging(16)
    staging.view[:] = bytes(range(16))
    on_cpu.copy_async(staging, loader, Span(0, 4000, 16)).wait()
    assert mapped(fd) == ["rw-s"]
    loader.close()
    loader.close()
    assert mapped(fd) == []
    flat = cuda.tensor_over(shareable.map(fd, size, writable=False), "cuda:3")
    os.close(fd)
    kept = flat[4000:4016]
    del flat
    assert bytes(kept.numpy()) == bytes(range(16))
    assert mapped() == ["r--s"]
    del kept
    assert mapped() == []


def mapped(fd: int | None = None) -> list[str]:
    """How this process has memory of the device mapped: of one descriptor, or all."""
    inode = None if fd is None else str(os.fstat(fd).st_ino)
    with open("/proc/self/maps", encoding="utf-8") as file:
        fields = [line.split() for line in file if "/memfd:kvctl:hostdev" in line]
    return [found[1] for found in fields if inode in {None, found[4]}]
