"""The guest's kernel: one that the user names, the one in the cache, or one built from Debian's source package."""

from __future__ import annotations

import hashlib
import lzma
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.rdma_lab import packages
from scripts.rdma_lab.places import BROKEN, HERE, KERNEL_VARIABLE, LabError, cache_folder, locked

SOURCE = "linux-source-6.1"
CONFIG = HERE / "kernel.config"

# (file, what it says, what it shall say).
EDITS = (
    # A process' extended state is read and set as a whole; the source leaves 2,696 bytes for it, and processors with
    # AMX have 11 KiB: there the first process of a guest cannot be resumed (EFAULT).
    ("arch/x86/um/user-offsets.c", "DEFINE_LONGS(HOST_FP_SIZE, 2696);", "DEFINE_LONGS(HOST_FP_SIZE, 16384);"),
    # A peer that takes nothing for half a second, as on a busy host, makes the driver forget what it has queued; when
    # that is sent after all the count falls below zero, and the kernel panics (BUG_ON in dql_completed).
    ("arch/um/drivers/vector_kern.c", "\tnetdev_reset_queue(vp->dev);\n", ""),
)

# Kconfig reads every Kconfig file, so those of unused trees must be there; their code, most of the archive, need not.
_UNUSED = (
    "drivers/gpu/*.[chS]",
    "drivers/media/*.[ch]",
    "drivers/net/ethernet/*.[ch]",
    "drivers/net/wireless/*.[ch]",
    "drivers/scsi/*.[ch]",
    "drivers/staging/*.[ch]",
    "sound/*.[ch]",
    "tools/testing/*",
    "Documentation/*.rst",
    "arch/*.dts",
    "arch/*.dtsi",
)


def cached() -> Path:
    """Where the kernel of this configuration is, once built."""
    name = hashlib.sha256(SOURCE.encode() + CONFIG.read_bytes() + repr(EDITS).encode()).hexdigest()[:12]
    return cache_folder() / f"linux-{name}"


def find() -> Path | None:
    """A kernel that is ready, without making one. Raises LabError when the one that the user names is none."""
    named = os.environ.get(KERNEL_VARIABLE)
    if named:
        return _named(Path(named).absolute())
    return cached() if os.access(cached(), os.X_OK) else None


def ensure(say: Callable[[str], None]) -> Path:
    """The kernel; built when there is none, which takes minutes. Raises LabError."""
    if platform.machine() != "x86_64":
        raise LabError(f"User-Mode Linux runs on x86_64 only, this is {platform.machine()}")
    found = find()
    if found:
        return found
    packages.ensure(packages.BUILD, say)
    with locked("kernel") as cache:
        if not os.access(cached(), os.X_OK):
            with TemporaryDirectory(dir=cache, prefix="build.") as temporary:
                began = time.monotonic()
                built = _build(Path(temporary), say)
                os.rename(built, cached())
                say(f"kernel built in {time.monotonic() - began:.0f} s: {cached()}")
    return cached()


def _named(path: Path) -> Path:
    """The file itself, or what an .xz unpacks to (kept in the cache under its content's name)."""
    if not path.is_file():
        raise LabError(f"{KERNEL_VARIABLE} names {path}, which is no file")
    if path.suffix != ".xz":
        if not os.access(path, os.X_OK):
            raise LabError(f"{KERNEL_VARIABLE} names {path}, which is not executable", hint=f"chmod +x {path}")
        return path
    packed = path.read_bytes()
    name = f"linux-xz-{hashlib.sha256(packed).hexdigest()[:12]}"
    with locked("kernel") as cache:
        unpacked = cache / name
        if not os.access(unpacked, os.X_OK):
            new = cache / f"{name}.new"
            new.write_bytes(lzma.decompress(packed))
            new.chmod(0o755)
            new.replace(unpacked)
    return unpacked


def _build(folder: Path, say: Callable[[str], None]) -> Path:
    """An executable in `folder`."""
    say(f"fetching {SOURCE} (140 MB)")
    packages.unpack(packages.download(SOURCE, folder), folder)
    archive = next(iter(folder.glob("usr/src/linux-source-*.tar.xz")), None)
    if archive is None:
        raise LabError(f"{SOURCE} holds no source archive", code=BROKEN)
    top = archive.name.removesuffix(".tar.xz")
    say("unpacking it")
    leave_out = [f"--exclude={top}/{pattern}" for pattern in _UNUSED]
    _run(folder, "tar", "xf", str(archive), "--wildcards", "--wildcards-match-slash", *leave_out)
    tree = folder / top
    for file, old, new in EDITS:
        _edit(tree / file, old, new)
    make = ("make", "-s", "ARCH=um")
    _run(tree, *make, f"KCONFIG_ALLCONFIG={CONFIG}", "allnoconfig")
    _check_config(tree / ".config")
    jobs = len(os.sched_getaffinity(0))
    say(f"building it, {jobs} at a time (minutes, once)")
    _run(tree, *make, f"-j{jobs}", "linux")
    _run(tree, "strip", "-o", str(folder / "linux"), "linux")
    return folder / "linux"


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if old not in text:
        raise LabError(f"{SOURCE}: {path.name} no longer says {old!r}", code=BROKEN)
    path.write_text(text.replace(old, new))


def _check_config(path: Path) -> None:
    """allnoconfig drops an option whose dependencies are missing without a word."""
    have = set(path.read_text().splitlines())
    lost = [line for line in CONFIG.read_text().splitlines() if line.startswith("CONFIG_") and line not in have]
    if lost:
        raise LabError(f"the kernel's configuration lost {', '.join(lost)}", code=BROKEN)


def _run(folder: Path, *command: str) -> None:
    # the lowest priority: whoever waits for this kernel has other work going on
    lowered = [*(["nice"] if shutil.which("nice") else []), *command]
    done = subprocess.run(lowered, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise LabError(f"{command[0]} {command[1]} .. failed: {done.stderr.strip()[-1500:]}", code=BROKEN)
