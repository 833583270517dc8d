"""What the kernel says about RDMA devices, without opening one: reads a few small files, never hangs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

ROOT: Final = "/sys/class/infiniband"


@dataclass(frozen=True, slots=True)
class Port:
    """`state` as the kernel says it (ACTIVE, DOWN, ..), `gid` the first one that is set, of a wider scope than
    the link if it has any, empty where none is; `gid_index` its place. `link`: Ethernet or InfiniBand.
    """

    device: str
    number: int
    state: str
    link: str
    gid: str
    gid_index: int = 0

    @property
    def usable(self) -> bool:
        return self.state == "ACTIVE" and bool(self.gid)


def ports(root: str = ROOT) -> list[Port]:
    """Of all devices, in order of name. Empty where the kernel has no RDMA."""
    found = []
    for device in _names(root):
        for number in _names(f"{root}/{device}/ports"):
            place = f"{root}/{device}/ports/{number}"
            state = _read(f"{place}/state").rpartition(":")[2].strip()
            link = _read(f"{place}/link_layer")
            found.append(Port(device, _order(number), state, link, *_first_gid(place)))
    return found


def _first_gid(place: str) -> tuple[str, int]:
    # a table has up to a thousand entries, a file each
    local = ("", 0)
    for name in sorted(_names(f"{place}/gids"), key=_order):
        gid = _read(f"{place}/gids/{name}")
        if gid.strip("0:") and not gid.startswith("fe80:"):
            return gid, _order(name)
        if gid.strip("0:") and not local[0]:
            local = gid, _order(name)
    return local


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _order(name: str) -> int:
    return int(name) if name.isdigit() else 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
