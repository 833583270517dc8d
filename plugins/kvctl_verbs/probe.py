"""Whether RDMA can run here, and what is missing otherwise. Cheap: reads sysfs, loads libraries, opens no device."""

from __future__ import annotations

import os
import resource
from typing import Final

from kvctl.core.errors import EnvError
from kvctl.transports.registry import Probe
from kvctl_verbs import bindings, cm, sysfs

_NODES: Final = "/dev/infiniband"
_LEAST_LOCKED: Final = 64 << 20  # bytes: with less no load's arena can be registered, whatever its size
_CAP_IPC_LOCK: Final = 14


def probe(root: str = sysfs.ROOT, nodes: str = _NODES) -> Probe:
    """Hardware first: where there is none, nothing needs to be installed."""
    found = sysfs.ports(root)
    if not found:
        return Probe(
            available=False,
            reason="no RDMA device",
            hint="a RoCE or InfiniBand NIC with its kernel driver; to try without one, a Soft-RoCE device: modprobe "
            "rdma_rxe; rdma link add rxe0 type rxe netdev NIC (see `kvctl help rdma`)",
        )
    if not any(port.usable for port in found):
        said = ", ".join(f"{port.device}/{port.number} is {port.state or 'unknown'}" for port in found)
        hint = "bring its network device up and give it an address (ip link, ip addr); `rdma link` shows the state"
        return Probe(available=False, reason=f"no active RDMA port with a GID: {said}", hint=hint)
    there = _device_nodes(nodes)
    if "rdma_cm" not in there or len(there) < 2:
        missing = "rdma_cm" if "rdma_cm" not in there else "uverbs0"
        hint = "modprobe rdma_ucm ib_uverbs; in a container, pass /dev/infiniband through (--device /dev/infiniband)"
        return Probe(available=False, reason=f"{nodes}/{missing} is missing", hint=hint)
    if closed := [name for name in there if not os.access(f"{nodes}/{name}", os.R_OK | os.W_OK)]:
        hint = "add the user to the group of /dev/infiniband/* (often rdma), or change its udev rule"
        return Probe(available=False, reason=f"{nodes}/{closed[0]} cannot be opened: permission denied", hint=hint)
    if (limit := locked_limit()) is not None and limit < _LEAST_LOCKED:
        hint = "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 in a container"
        return Probe(available=False, reason=f"locked memory is limited to {limit} bytes", hint=hint)
    try:
        cm.load()
        bindings.load()
    except EnvError as problem:
        return Probe(available=False, reason=str(problem), hint=problem.hint or "")
    return Probe(available=True)


def _device_nodes(nodes: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(nodes) if name == "rdma_cm" or name.startswith("uverbs"))
    except OSError:
        return []


def locked_limit(status: str = "/proc/self/status") -> int | None:
    """Bytes that may be pinned; None where nothing limits it, as for who has CAP_IPC_LOCK."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        with open(status, encoding="ascii", errors="replace") as file:
            held = next((line.split()[1] for line in file if line.startswith("CapEff:")), "0")
    except OSError:
        held = "0"
    return None if int(held, 16) >> _CAP_IPC_LOCK & 1 else limit
