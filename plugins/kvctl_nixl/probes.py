"""Whether NIXL and what its back ends need are here, without importing any of it and without touching a device."""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from kvctl.transports.registry import Probe

BUILDS: Final = ("cu12", "cu13")
# 1.4 reports a read that came up short as done
OLDEST: Final = (1, 5, 1)
INSTALL: Final = "pip install 'kvctl[nixl]'"
_IO_URING_SETUP: Final = 425  # the same number on every architecture
CUDA_DRIVER: Final = "libcuda.so.1"
CUFILE: Final = "libcufile.so.0"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


@cache
def installed(build: str) -> bool:
    """Whether this build of NIXL is here, new enough, with numpy beside it."""
    return not _lack(build)


def _lack(build: str) -> str:
    try:
        found = version(f"nixl-{build}")
    except PackageNotFoundError:
        return "not installed"
    if _numbers(found) < OLDEST:
        return f"version {found} is too old: before {'.'.join(map(str, OLDEST))} it reports short reads as done"
    if find_spec(f"nixl_{build}") is None:
        return "its package is listed but not there"
    if find_spec("numpy") is None:
        return "it needs numpy"
    return ""


def missing(builds: Sequence[str] = BUILDS) -> Probe:
    """The answer of a probe when none of `builds` can be used."""
    reasons = {build: _lack(build) for build in builds}
    said = "; ".join(f"nixl-{build}: {reason}" for build, reason in reasons.items())
    return Probe(available=False, reason=said, hint=INSTALL)


def probe_nixl() -> Probe:
    return Probe(available=True) if any(installed(build) for build in BUILDS) else missing()


def io_uring_refusal() -> str:
    """Why the kernel does not let this process use io_uring; empty when it does."""
    libc = ctypes.CDLL(None, use_errno=True)
    # no entries and no parameters: the call cannot succeed, but says whether it is allowed
    libc.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(0), ctypes.c_void_p(None))
    code = ctypes.get_errno()
    if code in {errno.EINVAL, errno.EFAULT}:
        return ""
    return f"io_uring: {os.strerror(code)}"


def has_library(name: str) -> bool:
    """Whether a shared library is where the linker looks, or in one of NVIDIA's wheels, without loading it."""
    folders = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    if any(os.path.exists(os.path.join(folder, name)) for folder in folders):
        return True
    try:
        with open("/etc/ld.so.cache", "rb") as file:
            if name.encode() + b"\0" in file.read():
                return True
    except OSError:
        pass
    return wheel_library(name) is not None


def wheel_library(name: str) -> str | None:
    """The path of a library of NVIDIA's wheels (nvidia-cufile-cu12, nvidia-cuda-runtime-cu12, ..): the linker does not
    look there, so it has to be loaded by its path before what needs it.
    """
    spec = find_spec("nvidia")
    for base in (spec.submodule_search_locations if spec is not None else None) or ():
        for found in sorted(glob.glob(os.path.join(glob.escape(base), "*", "lib", name))):
            return found
    return None


def runtime_of(build: str) -> str:
    """The CUDA runtime that the plug-ins of a build are linked to."""
    return f"libcudart.so.{build.removeprefix('cu')}"


def probe_gds() -> Probe:
    """GPUDirect Storage: driver first, since NIXL's back end without one never comes back."""
    if not any(installed(build) for build in BUILDS):
        return missing()
    if not os.path.exists("/dev/nvidiactl") or not has_library(CUDA_DRIVER):
        return Probe(
            available=False,
            reason="no NVIDIA driver (libcuda.so.1, /dev/nvidiactl)",
            hint="it runs on hosts with an NVIDIA GPU",
        )
    here = [build for build in BUILDS if installed(build)]
    if not any(has_library(runtime_of(build)) for build in here):
        return Probe(
            available=False,
            reason=f"{' or '.join(map(runtime_of, here))} is not installed",
            hint=f"install the CUDA runtime that nixl-{here[0]} is built for, or the other build of NIXL",
        )
    if not has_library(CUFILE):
        return Probe(
            available=False,
            reason="libcufile.so.0 is not installed",
            hint="install NVIDIA GPUDirect Storage (libcufile, nvidia-fs) of your CUDA version",
        )
    ways = ("CUFILE_ALLOW_COMPAT_MODE", "CUFILE_USE_PCIP2PDMA")
    if not os.path.exists("/proc/driver/nvidia-fs") and not any(
        os.environ.get(name, "").lower() == "true" for name in ways
    ):
        return Probe(
            available=False,
            reason="the kernel module nvidia-fs is not loaded",
            hint=f"modprobe nvidia-fs; or, where cuFile does without it, set {ways[1]}=true ({ways[0]}=true: no GDS)",
        )
    return Probe(available=True)
