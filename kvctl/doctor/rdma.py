"""RDMA: devices and their ports, GIDs and MTU from /sys, the device nodes, locked memory, and pyverbs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from kvctl.core.units import GIB, format_size
from kvctl.doctor import children
from kvctl.doctor.children import loads
from kvctl.doctor.findings import Finding, Machine, Probe, State

AREA: Final = "rdma"
_DEVICES: Final = "/sys/class/infiniband"
_IB_MTUS: Final = (4096, 2048, 1024, 512, 256)
_ROCE_HEADERS: Final = 64  # bytes of an Ethernet frame's payload that RoCE v2 needs beside the data
_LOCKED_WANTED: Final = GIB


def probes(machine: Machine) -> list[Probe]:
    return [
        Probe(AREA, "devices", lambda: list(devices(machine))),
        Probe(AREA, "memlock", lambda: [memlock(machine)]),
        Probe(AREA, "libraries", lambda: list(libraries()), 60.0),
        Probe(AREA, "pyverbs", lambda: [pyverbs()]),
        Probe(AREA, "memory windows", lambda: list(windows(machine.list(_DEVICES))), 60.0),
    ]


def devices(machine: Machine) -> Iterator[Finding]:
    """A finding per port, and one for the device nodes."""
    names = machine.list(_DEVICES)
    if not names:
        yield Finding(
            AREA, "devices", "degraded", "none", "no RDMA device: native-tcp and s3 move the bytes",
            "an InfiniBand or RoCE NIC with its driver; for tests `rdma link add rxe0 type rxe netdev eth0`",
        )  # fmt: skip
        return
    for name in names:
        for port in machine.list(f"{_DEVICES}/{name}/ports"):
            yield _port(machine, name, port)
    nodes = [node for node in machine.list("/dev/infiniband") if node.startswith("uverbs")]
    closed = [node for node in nodes if not os.access(machine.path(f"/dev/infiniband/{node}"), os.R_OK | os.W_OK)]
    if not nodes:
        yield Finding(
            AREA, "device nodes", "broken", "no /dev/infiniband/uverbs*", "there are devices, but none can be opened",
            "modprobe ib_uverbs; in a container pass --device /dev/infiniband",
        )  # fmt: skip
    elif closed:
        yield Finding(
            AREA, "device nodes", "broken", f"{', '.join(closed)} cannot be opened", "permission denied",
            "add the user to the group of /dev/infiniband/uverbs* (rdma), or change its udev rule",
        )  # fmt: skip
    else:
        yield Finding(AREA, "device nodes", "ok", ", ".join(nodes))


def _port(machine: Machine, device: str, port: str) -> Finding:
    place = f"{_DEVICES}/{device}/ports/{port}"
    state = (machine.read(f"{place}/state") or "unknown").rpartition(": ")[2]
    layer = machine.read(f"{place}/link_layer") or "unknown"
    rate = machine.read(f"{place}/rate") or "unknown rate"
    gids = [index for index in machine.list(f"{place}/gids") if _is_gid(machine.read(f"{place}/gids/{index}"))]
    types = sorted({kind for index in gids if (kind := machine.read(f"{place}/gid_attrs/types/{index}"))})
    nets = sorted({net for index in gids if (net := machine.read(f"{place}/gid_attrs/ndevs/{index}"))})
    mtus = [int(text) for net in nets if (text := machine.read(f"/sys/class/net/{net}/mtu") or "").isdigit()]
    parts = [state, layer, rate, f"{len(gids)} GIDs" + (f" ({', '.join(types)})" if types else "")]
    if nets:
        parts.append(f"{', '.join(nets)} MTU {', '.join(map(str, mtus)) or 'unknown'}")
    value = ", ".join(parts)
    name = f"{device} port {port}"
    if state != "ACTIVE":
        return Finding(
            AREA, name, "degraded", value, f"the port is {state}", "check the cable, the switch, `ip link` and opensm"
        )
    if not gids:
        return Finding(
            AREA, name, "broken", value, "the port has no GID: nobody can address it",
            "give the network device an address (RoCE), or start a subnet manager (InfiniBand)",
        )  # fmt: skip
    if layer == "Ethernet" and mtus and min(mtus) < _IB_MTUS[0] + _ROCE_HEADERS:
        return Finding(
            AREA, name, "degraded", value, f"packets carry {_path_mtu(min(mtus))} bytes instead of {_IB_MTUS[0]}",
            f"ip link set {nets[0]} mtu 9000, on the switch and the peers too",
        )  # fmt: skip
    if types and "RoCE v2" not in types and layer == "Ethernet":
        return Finding(
            AREA, name, "degraded", value, "no RoCE v2 GID: it cannot be routed", "give the device an IP address"
        )
    return Finding(AREA, name, "ok", value)


def _is_gid(text: str | None) -> bool:
    return bool(text) and bool(set(text or "") - set("0:"))


def _path_mtu(mtu: int) -> int:
    return next((size for size in _IB_MTUS if size + _ROCE_HEADERS <= mtu), _IB_MTUS[-1])


def memlock(machine: Machine) -> Finding:
    """Registered memory is locked memory."""
    text = machine.read("/proc/self/limits") or ""
    line = next((line for line in text.splitlines() if line.startswith("Max locked memory")), "")
    soft = line.split()[3] if len(line.split()) > 3 else ""
    fix = (
        "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 in a container, `* - memlock unlimited` in limits.conf"
    )
    if soft == "unlimited":
        return Finding(AREA, "memlock", "ok", "unlimited")
    if not soft.isdigit():
        return Finding(AREA, "memlock", "degraded", "unknown", "/proc/self/limits does not tell", fix)
    limit = int(soft)
    privileged = os.geteuid() == 0 and machine.root == "/"
    state: State = "ok" if limit >= _LOCKED_WANTED else "degraded"
    why = "" if state == "ok" else "RDMA and pinned memory beyond it cannot be registered"
    if why and privileged:
        why += "; root with CAP_IPC_LOCK is not bound by it"
    return Finding(AREA, "memlock", state, format_size(limit), why, "" if state == "ok" else fix)


def libraries() -> Iterator[Finding]:
    """The C libraries of verbs and RDMA CM, loaded in a child."""
    hint = "apt install ibverbs-providers ibverbs-utils librdmacm1 (or rdma-core of your distribution)"
    for name, said in loads(("libibverbs.so.1", "librdmacm.so.1")).items():
        if said:
            yield Finding(AREA, name, "degraded", "not installed", said, hint)
        else:
            yield Finding(AREA, name, "ok", "loads")


def pyverbs() -> Finding:
    """The Python binding that native-rdma needs. Found by its metadata, not imported."""
    hint = "pip install 'kvctl[verbs]', or your distribution's python3-pyverbs for its own Python"
    if find_spec("pyverbs") is None:
        return Finding(AREA, "pyverbs", "degraded", "not installed", "native-rdma cannot run", hint)
    try:
        return Finding(AREA, "pyverbs", "ok", version("pyverbs"))
    except PackageNotFoundError:
        return Finding(AREA, "pyverbs", "ok", "installed")


def windows(devices: Sequence[str]) -> Iterator[Finding]:
    """What each device has of memory windows, for `memory=window` of native-rdma. None is no fault. Nothing where
    pyverbs is missing, which has a line of its own.
    """
    if not devices or find_spec("pyverbs") is None:
        return
    found, broke = children.windows(devices)
    problems = {str(item["name"]): str(item["said"]) for item in found if item["said"]} | dict(broke)
    kinds = {str(item["name"]): item["kinds"] for item in found}
    for device in devices:
        name, there = f"{device} memory windows", kinds.get(device)
        if device in problems or not isinstance(there, list):
            why = problems.get(device, "no child process runs here")
            fix = "`ibv_devinfo -v` says more; the kernel's log too"
            yield Finding(AREA, name, "degraded", "unknown: the device does not open", why, fix)
        else:
            words = ", ".join(there) or "none"
            yield Finding(AREA, name, "ok", words if "type 1" in there else f"{words}: no memory=window, but memory=op")
