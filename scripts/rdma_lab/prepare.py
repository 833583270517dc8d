"""Makes the lab ready, or says what stands in the way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.rdma_lab import kernel, packages
from scripts.rdma_lab.guests import Guests
from scripts.rdma_lab.places import BROKEN, Lab, LabError, cache_folder


def prepare(say: Callable[[str], None]) -> Lab:
    """Installs, unpacks and builds what is missing; quick when all is there. Raises LabError."""
    _check_ptrace()
    packages.ensure(packages.RUN, say)
    return Lab(kernel.ensure(say), packages.pyverbs(say))


def _check_ptrace() -> None:
    """A User-Mode Linux kernel runs its processes by ptrace, which containers may forbid. Raises LabError."""
    traced = "import ctypes, os; os._exit(ctypes.CDLL(None).ptrace(0, 0, 0, 0) != 0)"  # PTRACE_TRACEME
    if subprocess.run([sys.executable, "-SEc", traced], check=False).returncode:
        raise LabError(
            "ptrace is not allowed here, and User-Mode Linux runs by it",
            hint="in a container: --cap-add SYS_PTRACE, and a seccomp profile that allows it",
        )


def boot(lab: Lab) -> str:
    """Boots one guest and names its RDMA device. Raises LabError when that does not work here."""
    with Guests(lab) as guests:
        seen = guests["a"].run("ibv_devinfo -d rxe0 | grep -E 'hca_id|transport|state|active_mtu'").check()
    if "PORT_ACTIVE" not in seen:
        raise LabError(f"a guest runs, but its RDMA device does not: {seen}", code=BROKEN)
    return " ".join(seen.split())


def status() -> list[tuple[str, bool, str]]:
    """(what, is it there, more). Changes nothing."""
    lines: list[tuple[str, bool, str]] = []
    try:
        _check_ptrace()
        lines.append(("ptrace", True, "allowed"))
    except LabError as problem:
        lines.append(("ptrace", False, str(problem)))
    lost = packages.missing(packages.RUN)
    lines.append(("packages", not lost, f"missing: {', '.join(lost)}" if lost else "all there"))
    found: Path | None = None
    try:
        found = kernel.find()
        lines.append(("kernel", found is not None, str(found or f"not built; will be {kernel.cached()}")))
    except LabError as problem:
        lines.append(("kernel", False, str(problem)))
    if found is None:
        lost = packages.missing(packages.BUILD)
        lines.append(("to build it", not lost, f"missing: {', '.join(lost)}" if lost else "all there"))
    inside = packages.have_pyverbs(cache_folder())
    lines.append(("pyverbs", inside is not None, str(inside or "not unpacked yet")))
    return lines
