"""NIXL: which of its plug-ins can be loaded here, and what each other one misses. Loaded in a child process only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Final

from kvctl.doctor.children import loads
from kvctl.doctor.findings import Finding, Probe

AREA: Final = "nixl"
_BUILDS: Final = ("nixl-cu12", "nixl-cu13")
_PLUGIN: Final = re.compile(r"(?:^|/)libplugin_(\w+)\.so$")
_CORE: Final = re.compile(r"(?:^|/)_bindings\.[\w.-]+\.so$|\.mesonpy\.libs/lib(?!telemetry)[\w.-]+\.so$")
_MISSING: Final = re.compile(r"^(?P<lib>[\w.+-]+\.so[\w.]*): cannot open shared object file")
_OLDEST: Final = (1, 5, 1)  # older ones ignore short reads
_FROM: Final = {
    "libcudart": "the CUDA runtime (nvidia-cuda-runtime, or the CUDA toolkit)",
    "libcuda": "the NVIDIA driver",
    "libcufile": "GPUDirect Storage (gds-tools of your CUDA version)",
    "libcuobjclient": "CUDA toolkit 13.1.1 or newer (cuObject)",
    "libfabric": "libfabric (libfabric1, or your NIC's own build)",
    "libdoca": "NVIDIA DOCA (doca-gpunetio)",
    "libred_client": "the client of DDN Infinia",
}


def probes() -> list[Probe]:
    return [Probe(AREA, "plug-ins", lambda: list(plugins(installed())), 120.0)]


def installed() -> list[Distribution]:
    found = []
    for name in _BUILDS:
        try:
            found.append(distribution(name))
        except PackageNotFoundError:
            continue
    return found


def plugins(builds: Sequence[Distribution]) -> Iterator[Finding]:
    """A finding per plug-in of each installed build."""
    if not builds:
        yield Finding(
            AREA, "package", "degraded", "not installed", "none of the nixl-* transports can run",
            "pip install 'kvctl[nixl]'",
        )  # fmt: skip
        return
    for build in builds:
        name = build.metadata["Name"]
        numbers = tuple(int(part) for part in re.findall(r"\d+", build.version)[:3])
        if numbers < _OLDEST:
            yield Finding(AREA, name, "broken", build.version, "it ignores short reads", f"pip install '{name}>=1.5.1'")
            continue
        yield Finding(AREA, name, "ok", build.version)
        yield from _loaded(name, plugin_files(build), core_files(build))


def plugin_files(build: Distribution) -> dict[str, str]:
    """Plug-in -> the path of its library."""
    found: dict[str, str] = {}
    for file in build.files or ():
        match = _PLUGIN.search(str(file))
        if match:
            path = os.path.realpath(str(build.locate_file(file)))
            # a wheel may carry them twice; those beside the package's own libraries are the ones it loads
            if match[1] not in found or ".libs/nixl/" in str(file):
                found[match[1]] = path
    return found


def core_files(build: Distribution) -> list[str]:
    """NIXL's own libraries, which its plug-ins expect to be loaded already; the Python binding brings them all."""
    return [os.path.realpath(str(build.locate_file(file))) for file in build.files or () if _CORE.search(str(file))]


def _loaded(build: str, files: dict[str, str], core: Sequence[str]) -> Iterator[Finding]:
    for path, said in loads(list(files.values()), core).items():
        plugin = next(name for name, own in files.items() if own == path)
        name = f"{build} {plugin}"
        if not said:
            yield Finding(AREA, name, "ok", "loads")
            continue
        match = _MISSING.match(said)
        if match is None:
            yield Finding(
                AREA, name, "degraded", "cannot be loaded", said.replace(path, os.path.basename(path)), "reinstall it"
            )
            continue
        source = next((text for start, text in _FROM.items() if match["lib"].startswith(start)), match["lib"])
        yield Finding(AREA, name, "degraded", "cannot be loaded", f"{match['lib']} is missing", f"install {source}")
