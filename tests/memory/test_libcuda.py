"""CUDA's virtual memory calls as `kvctl.memory.libcuda` makes them, against a stand-in of the library whose memory is
the host's. What only a GPU can show is in `scripts/gpu-check`.
"""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path

import pytest

from kvctl.core.errors import EnvError
from kvctl.memory.devices import open_shareable
from tests.memory.libcuda import build, run

HEAD = """
import ctypes, os
from kvctl.memory.devices import open_shareable
MIB = 1 << 20
gpu = open_shareable("cuda:0")
def view(mapped):
    return memoryview((ctypes.c_char * mapped.nbytes).from_address(mapped.address)).cast("B")
def mappings():
    with open("/proc/self/maps") as file:
        return [line.split()[1] for line in file if "/memfd:gpu" in line]
"""

SHARE = """
assert (gpu.name, gpu.ident) == ("cuda:0", "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f")
assert [gpu.size_of(n) for n in (0, 1, 2 * MIB, 2 * MIB + 1)] == [2 * MIB, 2 * MIB, 2 * MIB, 4 * MIB]
fd = gpu.allocate(4 * MIB)
assert not os.get_inheritable(fd)
assert mappings() == []
writer = gpu.map(fd, 4 * MIB, writable=True)
view(writer)[3 * MIB : 3 * MIB + 5] = b"hello"
writer.unmap()
writer.unmap()
assert mappings() == []
other = os.dup(fd)
os.close(fd)
reader = gpu.map(other, 4 * MIB, writable=False)
os.close(other)
assert mappings() == ["r--s"]
assert bytes(view(reader)[3 * MIB : 3 * MIB + 6]) == b"hello\\0"
del reader
assert mappings() == []
assert not [name for name in os.listdir("/proc/self/fd") if "memfd" in os.path.realpath(f"/proc/self/fd/{name}")]
print("ok")
"""

FAULT = """
fd = gpu.allocate(2 * MIB)
mapped = gpu.map(fd, 2 * MIB, writable=False)
print("mapped", flush=True)
view(mapped)[0] = 1
"""

REFUSED = """
from kvctl.core.errors import KvctlError
def told(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except KvctlError as error:
        print(type(error).__name__, error)
    else:
        print("nothing was told")
    assert mappings() == []
fd = gpu.allocate(2 * MIB)
told(open_shareable, "cuda:1")
told(gpu.allocate, 8 * MIB)
told(gpu.allocate, 12345)
told(gpu.map, fd, 4 * MIB, writable=True)
told(gpu.map, 12345, 2 * MIB, writable=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("libcuda"))


def test_memory_goes_from_one_mapping_to_another_by_its_descriptor_and_leaves_nothing(library: Path) -> None:
    done = run(HEAD + SHARE, library)
    assert (done.stdout, done.stderr) == ("ok\n", "")


def test_what_is_mapped_for_reading_cannot_be_written(library: Path) -> None:
    done = run(HEAD + FAULT, library)
    assert (done.stdout, done.returncode) == ("mapped\n", -signal.SIGSEGV)


def test_every_refusal_names_the_call_and_cudas_error_and_leaves_no_mapping(library: Path) -> None:
    done = run(HEAD + REFUSED, library, STAND_IN_BYTES=str(4 << 20))
    refused = "EnvError the CUDA driver refused a call: "
    assert done.stdout.splitlines() == [
        f"{refused}cuDeviceGet: CUDA_ERROR_INVALID_DEVICE",
        "CapacityError cuda:0 has no room for 8 MiB: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY",
        "EnvError cuda:0 gives no memory: cuMemCreate: CUDA_ERROR_INVALID_VALUE",
        f"{refused}cuMemMap: CUDA_ERROR_INVALID_VALUE",
        f"{refused}cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE",
    ], done.stderr


@pytest.mark.parametrize("attribute", [102, 103])
def test_a_device_that_cannot_share_says_so(library: Path, attribute: int) -> None:
    done = run(HEAD, library, STAND_IN_WITHOUT=str(attribute))
    assert "EnvError: cuda:0 cannot share its memory" in done.stderr


def test_a_driver_that_lacks_a_call_is_too_old(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text("int cuInit(unsigned flags) { return (int)flags; }")
    done = run(HEAD, build(tmp_path, source))
    assert "EnvError: the CUDA driver is too old: it has no cuGetErrorName" in done.stderr


def test_without_a_driver_it_says_why_and_what_to_install() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(EnvError, match=r"no CUDA driver is here: libcuda\.so\.1") as caught:
            open_shareable("cuda:0")
        assert caught.value.hint is not None
        assert "install" in caught.value.hint
    else:
        pytest.skip("there is a driver here: `scripts/gpu-check` tests it")
