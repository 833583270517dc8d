"""How much memory this process may use: the cgroup's limit, not the host's RAM. Linux; reads /proc and /sys."""

from __future__ import annotations

import os
from typing import Final

_UNLIMITED: Final = 1 << 60


def memory_available(root: str = "/") -> int:
    """Bytes this process may still take: the smallest of the host's MemAvailable and, for each cgroup above us
    (v2 and v1), limit minus use, where pages of files that the kernel can drop are no use. `root` lets tests bring
    their own /proc and /sys."""
    return min(_host_available(root), _cgroup_available(root))


def staging_budget(wanted: int, root: str = "/") -> int:
    """Bytes for staging: `wanted`, but at most a quarter of what is available."""
    return max(1 << 20, min(wanted, memory_available(root) // 4))


def _host_available(root: str) -> int:
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _UNLIMITED


def _cgroup_available(root: str) -> int:
    smallest = _UNLIMITED
    try:
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return smallest
    for fields in lines:
        if len(fields) != 3:
            continue
        _, controllers, path = fields
        if controllers == "":
            base, limit, use = "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, use = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        # in a container the path may be the host's: the namespace's own root is looked at as well
        for depth in range(len(parts), -1, -1):
            folder = os.path.join(root, base, *parts[:depth])
            top, used = _number(os.path.join(folder, limit)), _number(os.path.join(folder, use))
            if top is not None and top < _UNLIMITED:
                held = max(0, (used or 0) - _droppable(os.path.join(folder, "memory.stat")))
                smallest = min(smallest, max(0, top - held))
    return smallest


def _droppable(path: str) -> int:
    """Page cache on the reclaim lists. It counts as use, and fills every cgroup that reads files up to its limit."""
    found: dict[str, int] = {}
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                name, _, value = line.partition(" ")
                found[name] = int(value)
    except (OSError, ValueError):
        return 0
    # v1 counts the cgroups below only under total_; the plain names are v2's
    names = ("total_inactive_file", "total_active_file") if "total_cache" in found else ("inactive_file", "active_file")
    return sum(found.get(name, 0) for name in names)


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
