"""Whether RDMA can run here, and what is missing otherwise. Cheap: reads sysfs, loads libraries, opens no device."""

from __future__ import annotations

import os
from typing import Final

from kvctl.core.errors import EnvError
from kvctl.transports.registry import Probe
from kvctl_verbs import bindings, cm, sysfs

_CM_DEVICE: Final = "/dev/infiniband/rdma_cm"


def probe(root: str = sysfs.ROOT, cm_device: str = _CM_DEVICE) -> Probe:
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
    if not os.path.exists(cm_device):
        hint = "modprobe rdma_ucm; in a container, pass /dev/infiniband through"
        return Probe(available=False, reason=f"{cm_device} is missing", hint=hint)
    try:
        cm.load()
        bindings.load()
    except EnvError as problem:
        return Probe(available=False, reason=str(problem), hint=problem.hint or "")
    return Probe(available=True)
