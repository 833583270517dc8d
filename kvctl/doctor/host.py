"""The host: memory and CPU limits of the cgroup, huge pages, /dev/shm, open files, and whether the clock is right."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Final

from kvctl.core.units import GIB, MIB, format_seconds, format_size
from kvctl.doctor.findings import Finding, Machine, Probe
from kvctl.memory.budget import memory_available

AREA: Final = "host"
SHM: Final = "/dev/shm"  # noqa: S108 - POSIX shared memory lives there
_STA_UNSYNC: Final = 0x0040  # linux/timex.h
_FILES_WANTED: Final = 4096


def probes(machine: Machine) -> list[Probe]:
    return [
        Probe(AREA, "memory", lambda: [memory(machine)]),
        Probe(AREA, "CPUs", lambda: [cpus(machine)]),
        Probe(AREA, "huge pages", lambda: [huge_pages(machine)]),
        Probe(AREA, SHM, lambda: [shared_memory(machine)]),
        Probe(AREA, "open files", lambda: [open_files(machine)]),
        Probe(AREA, "clock", lambda: [clock(machine)]),
    ]


def memory(machine: Machine) -> Finding:
    """What this process may still take: the host's free memory or the cgroup's limit."""
    free = memory_available(machine.root)
    text = machine.read("/proc/meminfo") or ""
    total = next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemTotal:")), 0)
    value = f"{format_size(free)} available of {format_size(total)}" if total else format_size(free)
    if free < 256 * MIB:
        return Finding(
            AREA, "memory", "broken", value, "not enough for a staging arena", "free memory or raise the limit"
        )
    if free < GIB:
        return Finding(AREA, "memory", "degraded", value, "staging arenas get small", "free memory or raise the limit")
    return Finding(AREA, "memory", "ok", value)


def cpus(machine: Machine) -> Finding:
    """CPUs by affinity, and the share of them that the cgroups give."""
    usable = len(os.sched_getaffinity(0))
    quota = min(_quotas(machine), default=float("inf"))
    if quota >= usable:
        return Finding(AREA, "CPUs", "ok", f"{usable}")
    value = f"{quota:g} of {usable} by the cgroup's quota"
    if quota < 1:
        return Finding(
            AREA, "CPUs", "degraded", value, "a loader needs a core of its own per 2 to 4 GB/s", "raise the CPU limit"
        )
    return Finding(AREA, "CPUs", "ok", value)


def _quotas(machine: Machine) -> Iterator[float]:
    """CPUs' worth of time per cgroup above us: cpu.max (v2), cfs_quota (v1)."""
    for line in (machine.read("/proc/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        parts = [part for part in fields[2].split("/") if part]
        for depth in range(len(parts), -1, -1):
            path = "/".join(parts[:depth])
            if fields[1] == "":
                pair = (machine.read(f"/sys/fs/cgroup/{path}/cpu.max") or "").split()
            elif "cpu" in fields[1].split(","):
                base = f"/sys/fs/cgroup/cpu/{path}"
                pair = [machine.read(f"{base}/cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
            else:
                continue
            if len(pair) == 2 and all(text.isdigit() for text in pair) and int(pair[1]):
                yield int(pair[0]) / int(pair[1])


def huge_pages(machine: Machine) -> Finding:
    """Reserved ones are of use to RDMA and GPUs; transparent ones are what an arena gets without asking."""
    text = machine.read("/proc/meminfo") or ""
    pages = {line.split(":")[0]: line.split()[1] for line in text.splitlines() if line.startswith("Huge")}
    reserved = int(pages.get("HugePages_Total", "0"))
    mode = machine.read("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = mode.partition("[")[2].partition("]")[0] or "unknown"
    value = f"{reserved} reserved ({pages.get('HugePages_Free', '0')} free), transparent: {chosen}"
    if chosen == "never" and not reserved:
        return Finding(
            AREA, "huge pages", "degraded", value, "big arenas cost more page table entries and TLB misses",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )  # fmt: skip
    return Finding(AREA, "huge pages", "ok", value)


def shared_memory(machine: Machine) -> Finding:
    """Where shm: targets land."""
    path = machine.path(SHM)
    try:
        status = os.statvfs(path)
    except OSError as problem:
        return Finding(
            AREA,
            SHM,
            "degraded",
            "none",
            f"{problem.strerror}: shm: targets cannot be used",
            "mount tmpfs there",
        )
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    value = f"{format_size(free)} free of {format_size(size)}"
    if not os.access(path, os.W_OK):
        return Finding(AREA, SHM, "degraded", value, "it cannot be written", "check its mode (1777)")
    if free < GIB:
        return Finding(
            AREA, SHM, "degraded", value, "no model of a usual size fits", "start the container with --shm-size"
        )
    return Finding(AREA, SHM, "ok", value)


def open_files(machine: Machine) -> Finding:
    text = machine.read("/proc/self/limits") or ""
    line = next((line for line in text.splitlines() if line.startswith("Max open files")), "")
    soft = line.split()[3] if len(line.split()) > 3 else ""
    if soft.isdigit() and int(soft) < _FILES_WANTED:
        return Finding(
            AREA, "open files", "degraded", soft, "a storage node with many readers needs more", "ulimit -n 65536"
        )
    return Finding(AREA, "open files", "ok", soft or "unknown")


def _kernel_clock() -> tuple[int, int]:
    """(status bits, maximum error in microseconds) of the kernel's clock, by adjtimex(2) without changing it."""

    class Timex(ctypes.Structure):
        _fields_ = (
            ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
            ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_char * 256),
        )  # fmt: skip

    state = Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return state.status, state.maxerror


def clock(machine: Machine, ask: Callable[[], tuple[int, int]] = _kernel_clock) -> Finding:
    """Leases, grace periods and signatures compare clocks: is somebody keeping this one right?"""
    fix = "run chrony or systemd-timesyncd; `kvctl doctor` compares with the stores' clocks too"
    try:
        status, error = ask()
    except OSError as problem:
        return Finding(AREA, "clock", "degraded", "unknown", f"adjtimex: {problem.strerror}", fix)
    seconds = error / 1e6
    if not status & _STA_UNSYNC:
        return Finding(AREA, "clock", "ok", f"synchronised, at most {format_seconds(seconds)} off")
    if machine.exists("/run/systemd/timesync/synchronized") or machine.exists("/run/chrony/chronyd.pid"):
        return Finding(AREA, "clock", "ok", "kept by a time service that does not tell the kernel")
    return Finding(AREA, "clock", "degraded", "not synchronised", "nobody keeps this clock right", fix)
