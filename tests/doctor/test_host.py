"""Findings about the host, from machines of files."""

from __future__ import annotations

import os

import pytest

from kvctl.core.units import GIB, MIB
from kvctl.doctor import host
from tests.doctor.conftest import Build


def meminfo(available: int, *more: str) -> str:
    return "\n".join((f"MemTotal: {64 * GIB // 1024} kB", f"MemAvailable: {available // 1024} kB", *more))


@pytest.mark.parametrize(("available", "state"), [(8 * GIB, "ok"), (512 * MIB, "degraded"), (100 * MIB, "broken")])
def test_memory(machine: Build, available: int, state: str) -> None:
    assert host.memory(machine({"/proc/meminfo": meminfo(available)})).state == state


def test_memory_is_the_cgroups(machine: Build) -> None:
    made = machine(
        {
            "/proc/meminfo": meminfo(32 * GIB),
            "/proc/self/cgroup": "0::/pod/box",
            "/sys/fs/cgroup/pod/memory.max": str(600 * MIB),
            "/sys/fs/cgroup/pod/memory.current": str(100 * MIB),
        }
    )
    found = host.memory(made)
    assert found.state == "degraded"
    assert found.value.startswith("500 MiB available")


def test_a_cgroup_that_gives_less_than_a_cpu(machine: Build) -> None:
    two = machine({"/proc/self/cgroup": "0::/pod", "/sys/fs/cgroup/pod/cpu.max": "50000 100000"})
    found = host.cpus(two)
    assert found.state == "degraded"
    assert found.value == f"0.5 of {len(os.sched_getaffinity(0))} by the cgroup's quota"


def test_the_first_cgroup_version_counts_too(machine: Build) -> None:
    made = machine(
        {
            "/proc/self/cgroup": "3:cpu,cpuacct:/box",
            "/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "20000",
            "/sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
        }
    )
    assert host.cpus(made).value.startswith("0.2 of")


def test_no_quota_is_all_cpus(machine: Build) -> None:
    found = host.cpus(machine({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "max 100000"}))
    assert (found.state, found.value) == ("ok", str(len(os.sched_getaffinity(0))))


def test_huge_pages(machine: Build) -> None:
    files = {
        "/proc/meminfo": meminfo(GIB, "HugePages_Total:       0", "HugePages_Free:        0"),
        "/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
    }
    assert host.huge_pages(machine(files)).state == "degraded"
    found = host.huge_pages(machine({**files, "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never"}))
    assert (found.state, found.value) == ("ok", "0 reserved (0 free), transparent: madvise")


def test_shared_memory_that_is_missing(machine: Build) -> None:
    assert host.shared_memory(machine({})).state == "degraded"
    assert host.shared_memory(machine({"/dev/shm/": ""})).value.endswith("iB")


@pytest.mark.parametrize(("limit", "state"), [("1024", "degraded"), ("65536", "ok")])
def test_open_files(machine: Build, limit: str, state: str) -> None:
    found = host.open_files(machine({"/proc/self/limits": f"Max open files            {limit}   {limit}   files"}))
    assert (found.state, found.value) == (state, limit)


def test_the_clock(machine: Build) -> None:
    bare = machine({})
    assert host.clock(bare, lambda: (0x2001, 1500)).value == "synchronised, at most 1.5 ms off"
    assert host.clock(bare, lambda: (0x0040, 16_000_000)).state == "degraded"
    kept = machine({"/run/systemd/timesync/synchronized": ""})
    assert host.clock(kept, lambda: (0x0040, 16_000_000)).state == "ok"

    def refused() -> tuple[int, int]:
        raise PermissionError(1, "Operation not permitted")

    assert host.clock(bare, refused).state == "degraded"


def test_the_kernels_own_clock_can_be_asked(machine: Build) -> None:
    assert host.clock(machine({})).state in {"ok", "degraded"}
