"""RDMA, GPU and NIXL findings, from machines of files."""

from __future__ import annotations

import itertools
import os
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import ClassVar, cast

import pytest

from kvctl.doctor import children, gpu, nixl, rdma
from kvctl.doctor.children import loads
from tests.doctor.conftest import Build

PORT = "/sys/class/infiniband/mlx5_0/ports/1"
ROCE = {
    f"{PORT}/state": "4: ACTIVE",
    f"{PORT}/link_layer": "Ethernet",
    f"{PORT}/rate": "100 Gb/sec (4X EDR)",
    f"{PORT}/gids/0": "fe80:0000:0000:0000:0202:c9ff:fe00:0001",
    f"{PORT}/gids/1": "0000:0000:0000:0000:0000:ffff:0a00:0001",
    f"{PORT}/gids/2": "0000:0000:0000:0000:0000:0000:0000:0000",
    f"{PORT}/gid_attrs/types/0": "IB/RoCE v1",
    f"{PORT}/gid_attrs/types/1": "RoCE v2",
    f"{PORT}/gid_attrs/ndevs/0": "eth0",
    f"{PORT}/gid_attrs/ndevs/1": "eth0",
    "/sys/class/net/eth0/mtu": "9000",
    "/dev/infiniband/uverbs0": "",
}


def test_a_machine_without_rdma_is_degraded_and_says_what_runs_instead(machine: Build) -> None:
    (found,) = rdma.devices(machine({}))
    assert (found.state, found.value) == ("degraded", "none")
    assert "native-tcp" in found.why


def test_a_healthy_port_tells_gids_types_and_mtu(machine: Build) -> None:
    port, nodes = rdma.devices(machine(ROCE))
    assert (port.state, port.name) == ("ok", "mlx5_0 port 1")
    assert port.value == "ACTIVE, Ethernet, 100 Gb/sec (4X EDR), 2 GIDs (IB/RoCE v1, RoCE v2), eth0 MTU 9000"
    assert (nodes.state, nodes.value) == ("ok", "uverbs0")


@pytest.mark.parametrize(
    ("change", "state", "word"),
    [
        ({f"{PORT}/state": "1: DOWN"}, "degraded", "the port is DOWN"),
        ({"/sys/class/net/eth0/mtu": "1500"}, "degraded", "1024 bytes instead of 4096"),
        ({f"{PORT}/gids/0": "0000:0000", f"{PORT}/gids/1": "0000:0000"}, "broken", "no GID"),
        ({f"{PORT}/gid_attrs/types/1": "IB/RoCE v1"}, "degraded", "no RoCE v2 GID"),
    ],
)
def test_what_is_wrong_with_a_port_has_a_fix(machine: Build, change: dict[str, str], state: str, word: str) -> None:
    port, _ = rdma.devices(machine({**ROCE, **change}))
    assert port.state == state
    assert word in port.why
    assert port.fix


def test_devices_that_nobody_can_open_are_broken(machine: Build) -> None:
    files = {name: text for name, text in ROCE.items() if not name.startswith("/dev/")}
    _, nodes = rdma.devices(machine(files))
    assert (nodes.state, nodes.value) == ("broken", "no /dev/infiniband/uverbs*")


@pytest.mark.parametrize(
    ("limit", "state"), [("unlimited", "ok"), ("65536", "degraded"), (str(64 << 30), "ok"), ("?", "degraded")]
)
def test_locked_memory(machine: Build, limit: str, state: str) -> None:
    text = f"Limit  Soft Limit  Hard Limit  Units\nMax locked memory         {limit}              unlimited     bytes"
    found = rdma.memlock(machine({"/proc/self/limits": text}))
    assert found.state == state
    assert bool(found.fix) is (state != "ok")


def test_without_a_gpu_nothing_of_it_is_touched(machine: Build) -> None:
    (found,) = gpu.gpu(machine({}))
    assert (found.name, found.state) == ("NVIDIA driver", "degraded")


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Release Build"


@pytest.mark.parametrize(
    ("files", "state", "value"),
    [
        ({"/proc/driver/nvidia/version": OPEN, "/proc/sys/kernel/osrelease": "6.8.0-60"}, "ok", "dmabuf"),
        ({"/proc/driver/nvidia/version": OPEN, "/proc/sys/kernel/osrelease": "5.4.0-9"}, "degraded", "neither"),
        ({"/proc/driver/nvidia/version": CLOSED, "/proc/sys/kernel/osrelease": "6.8.0"}, "degraded", "neither"),
        (
            {
                "/proc/driver/nvidia/version": CLOSED,
                "/proc/sys/kernel/osrelease": "6.8.0",
                "/sys/module/nvidia_peermem/": "",
            },
            "ok",
            "nvidia-peermem",
        ),
    ],
)
def test_gpudirect_rdma_needs_peermem_or_dmabuf(machine: Build, files: dict[str, str], state: str, value: str) -> None:
    made = machine({**files, "/dev/nvidiactl": "", "/proc/driver/nvidia/gpus/0000:01:00.0/": ""})
    # the first two lines: those after them load libraries and ask torch
    found = {item.name: item for item in itertools.islice(gpu.gpu(made), 2)}
    assert found["NVIDIA driver"].state == "ok"
    assert "1 GPUs" in found["NVIDIA driver"].value
    assert found["GPUDirect RDMA"].state == state
    assert value in found["GPUDirect RDMA"].value


def test_a_driver_without_its_devices_is_broken(machine: Build) -> None:
    (found,) = gpu.gpu(machine({"/proc/driver/nvidia/version": OPEN}))
    assert found.state == "broken"


def test_nixl_that_is_not_installed_says_how_to_get_it() -> None:
    (found,) = nixl.plugins([])
    assert (found.state, found.fix) == ("degraded", "pip install 'kvctl[nixl]'")


class OldNixl:
    """A distribution that ignores short reads."""

    version = "1.4.0"
    metadata: ClassVar = {"Name": "nixl-cu12"}
    files: tuple[str, ...] = ()


def test_nixl_that_is_too_old_is_broken() -> None:
    (found,) = nixl.plugins([cast("Distribution", OldNixl())])
    assert (found.state, found.value) == ("broken", "1.4.0")


def test_nixl_plugins_are_loaded_and_what_is_missing_is_named() -> None:
    builds = nixl.installed()
    if not builds:
        pytest.skip("NIXL is not installed: pip install 'kvctl[nixl]'")
    found = {item.name: item for item in nixl.plugins(builds)}
    name = builds[0].metadata["Name"]
    assert found[f"{name} POSIX"].state == "ok"
    for item in found.values():
        assert item.state == "ok" or (item.why and item.fix)


def test_a_library_that_is_missing_crashes_or_hangs_is_named(tmp_path: Path) -> None:
    stuck = tmp_path / "stuck.so"
    os.mkfifo(stuck)  # the linker waits for a writer, for ever
    found = loads(("libc.so.6", "libno-such.so.9", str(stuck), "libm.so.6"), seconds=4.0)
    assert found["libc.so.6"] == found["libm.so.6"] == ""
    assert "cannot open shared object" in found["libno-such.so.9"]
    assert found[str(stuck)] == "no answer within 4 s"


def test_no_child_at_all_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = loads(("libc.so.6",))
    assert "could not be tried" in found["libc.so.6"]


def test_a_library_that_kills_its_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvctl.doctor import children

    deadly = children._LOAD.replace("ctypes.CDLL(name)", "os.abort() if name == 'bad' else ctypes.CDLL(name)")
    monkeypatch.setattr(children, "_LOAD", deadly)
    found = loads(("libc.so.6", "bad", "libm.so.6"))
    assert (found["libc.so.6"], found["bad"], found["libm.so.6"]) == ("", "its process ended with -6", "")


@pytest.mark.parametrize(
    ("said", "state", "value"),
    [
        ({"kinds": ["type 1", "type 2B"], "said": ""}, "ok", "type 1, type 2B"),
        ({"kinds": ["type 2B"], "said": ""}, "ok", "type 2B: no memory=window, but memory=op"),
        ({"kinds": [], "said": ""}, "ok", "none: no memory=window, but memory=op"),
        ({"kinds": [], "said": "permission denied"}, "degraded", "unknown: the device does not open"),
    ],
)
def test_memory_windows_have_a_line_and_their_lack_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, object], state: str, value: str
) -> None:
    monkeypatch.setattr(rdma, "find_spec", lambda name: name)
    monkeypatch.setattr(children, "windows", lambda devices: ([{"name": devices[0], **said}], {}))
    [found] = rdma.windows(["mlx5_0"])
    assert (found.name, found.state, found.value) == ("mlx5_0 memory windows", state, value)
    assert bool(found.fix) is (state != "ok")


def test_without_pyverbs_nobody_asks_for_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "find_spec", lambda name: None)
    assert list(rdma.windows(["mlx5_0"])) == []
