"""`nixl-gds`: files straight into GPU memory by NVIDIA GPUDirect Storage, through NIXL's GDS or GDS_MT back end.

cuFile can also bounce through host memory ("compatibility mode"); that would be a slow path under a fast one's name, so
it is off unless `compat=true` asks for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import tempfile
from collections.abc import Mapping
from typing import Final, Literal

from kvctl.core.errors import EnvError, UsageError
from kvctl.memory.buffers import Buffer
from kvctl.transports.api import Capabilities, Op, Store, StoreConfig
from kvctl.transports.options import check_names, choice, number
from kvctl_nixl.files import PIECE, NixlFiles
from kvctl_nixl.memory import Known
from kvctl_nixl.places import FilePlace, bare
from kvctl_nixl.probes import BUILDS, CUDA_DRIVER, CUFILE, has_library, installed, probe_gds, runtime_of, wheel_library

_REQUEST: Final = 4 << 20  # bytes of one cuFile request; a transfer has 16 of them in flight
_ORDINAL: Final = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
# File systems of GDS's support matrix, as /proc/mounts names them (docs.nvidia.com/gpudirect-storage).
_FILE_SYSTEMS: Final = frozenset(
    {"ext4", "xfs", "lustre", "nfs", "nfs4", "gpfs", "beegfs", "wekafs", "scatefs", "vastnfs"}
)


class NixlGds(NixlFiles):
    """See `kvctl.transports.api.Transport`. cuFile splits a transfer into requests of its own: after an error some may
    still be under way, so such an operation ends as UNKNOWN.
    """

    name = "nixl-gds"
    _direct_io = True

    def __init__(
        self, place: FilePlace, *, threads: int, request: int, multithreaded: bool = False, build: str = "auto"
    ) -> None:
        super().__init__(
            place,
            Capabilities(memory_kinds=frozenset({"cuda"}), max_in_flight=2 * threads, one_sided=True),
            Known(device_of),
            backend="GDS_MT" if multithreaded else "GDS",
            params={} if multithreaded else {"max_request_size": str(request)},
            build=build,
            threads=threads,
            chunk=0,
            certain=False,
        )

    def flags(self, op: Op) -> int:
        return os.O_DIRECT

    def move(
        self, op: Op, way: Literal["READ", "WRITE"], fd: int, at: int, buffer: Buffer, place: int, length: int
    ) -> None:
        if way == "WRITE":
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        super().move(op, way, fd, at, buffer, place, length)


def device_of(address: int) -> int:
    """The number of the GPU that `address` belongs to. Raises EnvError."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError as problem:
        raise EnvError("the NVIDIA driver cannot be loaded", cause=str(problem)) from None
    ordinal = ctypes.c_int(-1)
    code = driver.cuPointerGetAttribute(ctypes.byref(ordinal), _ORDINAL, ctypes.c_ulonglong(address))
    if code != 0 or ordinal.value < 0:
        raise EnvError(f"0x{address:x} is no GPU memory", cause=f"cuPointerGetAttribute: error {code}")
    return ordinal.value


def file_system_of(path: str) -> str:
    """The type of the file system that holds `path`; empty when it cannot be told."""
    path = os.path.realpath(path)
    best, found = "", ""
    with contextlib.suppress(OSError), open("/proc/mounts", encoding="utf-8", errors="replace") as file:
        for line in file:
            _, mount, kind, *_ = line.split(" ")
            mount = mount.replace("\\040", " ")
            inside = path == mount or path.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, found = mount, kind
    return found


def serves(config: StoreConfig, store: Store) -> str:
    """Why GDS does not work on this store's file system; empty when it may."""
    kind = file_system_of(bare(store, "path", "writing").root)
    if kind in _FILE_SYSTEMS or not kind:
        return ""
    return f"GPUDirect Storage is not enabled on {kind}"


def _set_up(options: Mapping[str, str]) -> None:
    """For cuFile, which reads its environment when its driver is opened; its log would go to the working directory."""
    compat = choice(options, "compat", ("false", "true"))
    os.environ.setdefault("CUFILE_LOGFILE_PATH", os.path.join(tempfile.gettempdir(), f"kvctl-cufile-{os.getuid()}.log"))
    if "compat" in options:
        os.environ["CUFILE_ALLOW_COMPAT_MODE"] = compat
    else:
        os.environ.setdefault("CUFILE_ALLOW_COMPAT_MODE", compat)


def _preload(*libraries: str) -> None:
    """Load what is in NVIDIA's wheels: NIXL's plug-in would not find it. Raises EnvError."""
    for name in libraries:
        path = wheel_library(name)
        if path is not None:
            try:
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            except OSError as problem:
                raise EnvError(f"{name} cannot be loaded", cause=str(problem), hint="reinstall its package") from None


def open_transport(config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]) -> NixlGds:
    """Options: backend=gds|gds_mt, threads, request (bytes), compat=false|true, build=auto|cu12|cu13."""
    if endpoint is not None:
        raise UsageError(f"{config.url}: a file store has no endpoints")
    check_names("nixl-gds", options, ("backend", "threads", "request", "compat", "build"))
    build = choice(options, "build", ("auto", "cu12", "cu13"))
    found = probe_gds()
    if not found.available:
        # without a driver the back end would never come back
        raise EnvError("transport nixl-gds is not available", cause=found.reason, hint=found.hint)
    if build == "auto":
        build = next(name for name in BUILDS if installed(name) and has_library(runtime_of(name)))
    _set_up(options)
    _preload(runtime_of(build), CUFILE)
    return NixlGds(
        bare(store, "path", "writing"),
        threads=number(options, "threads", 1, 1, 16),
        request=number(options, "request", _REQUEST, 64 << 10, PIECE),
        multithreaded=choice(options, "backend", ("gds", "gds_mt")) == "gds_mt",
        build=build,
    )
