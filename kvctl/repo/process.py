"""Who holds something: an identity of a process, and whether that process is known to be gone."""

from __future__ import annotations

import os

_BOOT = "/proc/sys/kernel/random/boot_id"


def identity() -> str:
    """Our process as `boot id:pid namespace:pid:start time`; '' where the system does not tell."""
    try:
        return f"{_place()}:{os.getpid()}:{_started(os.getpid())}"
    except OSError:
        return ""


def is_gone(who: str) -> bool:
    """True only when `who` was a process of this boot and pid namespace, and no longer runs."""
    place, _, rest = who.partition(":")
    namespace, _, process = rest.partition(":")
    pid, _, started = process.partition(":")
    try:
        if not pid.isdigit() or f"{place}:{namespace}" != _place():
            return False
    except OSError:
        return False
    try:
        return _started(int(pid)) != started
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _place() -> str:
    with open(_BOOT, encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # the name in parentheses may hold anything; the start time is the 22nd field
        fields = file.read().rpartition(")")[2].split()
    if fields[0] in {"Z", "X"}:  # a zombie holds nothing
        raise FileNotFoundError(pid)
    return fields[19]
