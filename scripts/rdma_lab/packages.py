"""Debian packages that the lab stands on. What is missing is installed when this is root, else named."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.rdma_lab.places import LabError, locked


def _program(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def _library(pattern: str) -> Callable[[], bool]:
    return lambda: any(glob.glob(f"{folder}/{pattern}") for folder in ("/usr/lib/*", "/usr/lib64", "/lib/*"))


# package -> is what we want of it here? By what is there rather than by dpkg, so that other distributions can do too.
RUN: Mapping[str, Callable[[], bool]] = {
    "ibverbs-providers": _library("libibverbs/librxe-rdmav*.so"),
    "ibverbs-utils": _program("ibv_devinfo"),
    "librdmacm1": _library("librdmacm.so.1"),
    "iproute2": _program("rdma"),
}
BUILD: Mapping[str, Callable[[], bool]] = {
    "bc": _program("bc"),
    "binutils": _program("strip"),
    "bison": _program("bison"),
    "flex": _program("flex"),
    "gcc": _program("gcc"),
    "libc6-dev": lambda: os.path.exists("/usr/include/stdio.h"),
    "make": _program("make"),
    "xz-utils": _program("xz"),
}


def missing(packages: Mapping[str, Callable[[], bool]]) -> list[str]:
    return [name for name, there in packages.items() if not there()]


def ensure(packages: Mapping[str, Callable[[], bool]], say: Callable[[str], None]) -> None:
    """Installs what is missing. Raises LabError with the command to type where it cannot."""
    wanted = missing(packages)
    if not wanted:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *wanted]
    by_hand = f"install them: sudo {' '.join(command)}"
    if not shutil.which("apt-get"):
        raise LabError(f"missing, as Debian calls them: {', '.join(wanted)}", hint="there is no apt-get here")
    if os.geteuid() != 0:
        raise LabError(f"missing packages: {', '.join(wanted)}", hint=by_hand)
    say(f"installing {', '.join(wanted)}")
    with locked("apt"):
        _apt(command, by_hand)
    still = missing(packages)
    if still:
        raise LabError(f"installed, and yet not there: {', '.join(still)}", hint=by_hand)


def download(package: str, folder: Path) -> Path:
    """The .deb of `package` (the newest that apt knows), in `folder`. Raises LabError."""
    hint = f"{package} is in Debian 12; elsewhere see `kvctl help rdma`"
    if not shutil.which("apt-get"):
        raise LabError(f"{package} cannot be fetched: there is no apt-get here", hint=hint)
    _apt(["apt-get", "download", package], hint, folder)
    found = sorted(folder.glob(f"{package}_*.deb"))
    if not found:
        raise LabError(f"apt-get download {package} left no file", hint=hint)
    return found[-1]


def unpack(deb: Path, folder: Path) -> None:
    subprocess.run(["dpkg-deb", "-x", str(deb), str(folder)], check=True)


def pyverbs(say: Callable[[str], None]) -> Path:
    """A folder for PYTHONPATH that holds Debian's pyverbs and nothing else. Unpacked beside, never installed: the
    package depends on rdma-core, which brings udev. Raises LabError.
    """
    with locked("pyverbs") as cache:
        place = cache / "pyverbs"
        inside = place / "usr/lib/python3/dist-packages"
        if not (inside / "pyverbs").is_dir():
            say("unpacking python3-pyverbs")
            with TemporaryDirectory(dir=cache, prefix="pyverbs.") as temporary:
                folder = Path(temporary)
                unpack(download("python3-pyverbs", folder), folder / "root")
                shutil.rmtree(place, ignore_errors=True)
                os.rename(folder / "root", place)
    return inside


def have_pyverbs(cache: Path) -> Path | None:
    inside = cache / "pyverbs/usr/lib/python3/dist-packages"
    return inside if (inside / "pyverbs").is_dir() else None


def _apt(command: Iterable[str], hint: str, folder: Path | None = None) -> None:
    """One try, then another after `apt-get update`: lists may be old or absent."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for attempt in (0, 1):
        if attempt:
            subprocess.run(["apt-get", "update"], env=environment, capture_output=True, check=False)
        done = subprocess.run(
            list(command), cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode == 0:
            return
    raise LabError(f"{' '.join(command)} failed: {done.stderr.strip()[-600:]}", hint=hint)
