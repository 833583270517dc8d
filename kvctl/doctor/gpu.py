"""GPUs: the driver, GPUDirect RDMA (nvidia-peermem or dmabuf), GPUDirect Storage, and torch's CUDA."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

from kvctl.doctor.children import loads
from kvctl.doctor.findings import Finding, Machine, Probe

AREA: Final = "gpu"
_DMABUF_KERNEL: Final = (5, 12)  # the first Linux whose RDMA core takes dma-buf (ibv_reg_dmabuf_mr)


def probes(machine: Machine) -> list[Probe]:
    return [Probe(AREA, "GPU", lambda: list(gpu(machine)), 90.0)]


def gpu(machine: Machine) -> Iterator[Finding]:
    """Without a driver one line says so, and nothing that needs it is touched."""
    version = machine.read("/proc/driver/nvidia/version")
    if version is None:
        yield Finding(
            AREA, "NVIDIA driver", "degraded", "none", "no GPU: weights land in host memory (--device cpu)",
            "on a host with a GPU install its driver; in a container use the NVIDIA container toolkit",
        )  # fmt: skip
        return
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)", version)
    number = found[1] if found else "unknown version"
    is_open = "Open Kernel Module" in version
    cards = len(machine.list("/proc/driver/nvidia/gpus"))
    if not machine.exists("/dev/nvidiactl"):
        yield Finding(
            AREA, "NVIDIA driver", "broken", f"{number}, no /dev/nvidiactl",
            "the driver is there, its devices are not",
            "run nvidia-smi once as root, or start the container with --gpus all",
        )  # fmt: skip
        return
    yield Finding(AREA, "NVIDIA driver", "ok", f"{number}{', open kernel modules' if is_open else ''}, {cards} GPUs")
    yield _peer_memory(machine, is_open=is_open)
    yield from _storage(machine)
    yield _torch()


def _peer_memory(machine: Machine, *, is_open: bool) -> Finding:
    """GPUDirect RDMA: by the module nvidia-peermem, or by dma-buf with the open kernel modules."""
    ways = []
    if machine.exists("/sys/module/nvidia_peermem") or machine.exists("/sys/module/nv_peer_mem"):
        ways.append("nvidia-peermem")
    release = machine.read("/proc/sys/kernel/osrelease") or ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if is_open and numbers >= _DMABUF_KERNEL:
        ways.append("dmabuf")
    if ways:
        return Finding(AREA, "GPUDirect RDMA", "ok", ", ".join(ways))
    lacking = [] if is_open else ["the driver's kernel modules are the closed ones"]
    if numbers < _DMABUF_KERNEL:
        lacking.append(f"Linux {release} is older than {'.'.join(map(str, _DMABUF_KERNEL))}")
    return Finding(
        AREA, "GPUDirect RDMA", "degraded", "neither nvidia-peermem nor dmabuf",
        f"RDMA lands in host memory and is copied on; no dmabuf because {' and '.join(lacking)}",
        "modprobe nvidia-peermem, or install the driver's open kernel modules",
    )  # fmt: skip


def _storage(machine: Machine) -> Iterator[Finding]:
    """GPUDirect Storage: libcufile, and the module nvidia-fs for its direct mode."""
    said = loads(("libcufile.so.0",))["libcufile.so.0"]
    if said:
        yield Finding(
            AREA, "GPUDirect Storage", "degraded", "no libcufile", said, "install gds-tools of your CUDA version"
        )
        return
    if machine.exists("/sys/module/nvidia_fs") or machine.exists("/proc/driver/nvidia-fs"):
        yield Finding(AREA, "GPUDirect Storage", "ok", "libcufile, nvidia-fs")
        return
    yield Finding(
        AREA, "GPUDirect Storage", "degraded", "libcufile without nvidia-fs",
        "it runs in compatibility mode, through host memory", "modprobe nvidia-fs (package nvidia-fs or nvidia-gds)",
    )  # fmt: skip


def _torch() -> Finding:
    """Whether torch sees the GPUs: asked in a child, which takes seconds."""
    import subprocess
    import sys

    if find_spec("torch") is None:
        return Finding(
            AREA, "torch", "degraded", "not installed", "tensors on a GPU need it", "pip install 'kvctl[torch]'"
        )
    code = (
        "import json, torch\n"
        "cuda = torch.cuda\n"
        "print(json.dumps([torch.__version__, torch.version.cuda, cuda.is_available(), cuda.device_count()]))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=25,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        version, cuda, available, count = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as problem:
        return Finding(
            AREA,
            "torch",
            "broken",
            "cannot be asked",
            f"{type(problem).__name__}",
            "python -c 'import torch' shows why",
        )
    if available:
        return Finding(AREA, "torch", "ok", f"{version}, CUDA {cuda}, {count} GPUs")
    why = "this torch was built without CUDA" if cuda is None else "torch finds no usable GPU"
    return Finding(AREA, "torch", "degraded", str(version), why, "install the CUDA build of torch that fits the driver")
