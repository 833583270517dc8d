"""Which devices a client uses, and which of them is next."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvctl.core.errors import EnvError, UsageError
from kvctl_verbs import cm, sysfs

_SIOCGIFCONF: Final = 0x8912
_IFREQ: Final = 40  # bytes of one entry on 64-bit Linux


@dataclass(frozen=True, slots=True)
class Rail:
    """A device of this host, and an address that leads to it."""

    device: str
    ip: str


def local_addresses() -> list[str]:
    """Of this host, IPv4 first; none that only this host or this link reaches."""
    found: list[str] = []
    size = 256 * _IFREQ
    buffer = bytearray(size)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        # struct ifconf: length, pointer; the kernel fills in what fits
        address = _address(buffer)
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iP", size, address))
    (used,) = struct.unpack_from("i", answer)
    found = [socket.inet_ntoa(buffer[at + 20 : at + 24]) for at in range(0, used, _IFREQ)]
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            found += [str(ipaddress.IPv6Address(int(line.split()[0], 16))) for line in file]
    except OSError:
        pass  # no IPv6
    return [ip for ip in dict.fromkeys(found) if not _useless(ip)]


def _useless(ip: str) -> bool:
    found = ipaddress.ip_address(ip)
    return found.is_loopback or found.is_link_local or found.is_unspecified


def _address(buffer: bytearray) -> int:
    from kvctl.memory.buffers import address_of

    return address_of(memoryview(buffer))


def find_rails(wanted: Sequence[str] = ()) -> list[Rail]:
    """The usable devices of this host, one address each; of those in `wanted` (names or addresses) only. Raises
    EnvError when there is none, UsageError for a name that is none.
    """
    names = {port.device for port in sysfs.ports() if port.usable}
    rails: dict[str, Rail] = {}
    named: set[str] = set()
    try:
        behind = cm.devices_of(local_addresses())
    except OSError as problem:
        raise EnvError("RDMA's connection manager does not work", cause=problem.strerror) from None
    for ip, device in behind.items():
        if device not in names:
            continue
        hits = {item for item in wanted if item in {device, ip}}
        named |= hits
        if hits or not wanted:
            rails.setdefault(ip if ip in hits else device, Rail(device, ip))
    if unknown := sorted(set(wanted) - named):
        raise UsageError(
            f"{unknown[0]} is no RDMA device or address of this host",
            hint=f"its devices: {', '.join(sorted(names)) or 'none'}",
        )
    if not rails:
        raise EnvError("no RDMA device of this host has an IP address", hint="give its NIC one (ip addr add)")
    return list(rails.values())


class Balance:
    """Hands out indexes of rails by outstanding bytes, those that failed lately last. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._bytes = [0] * count
        self._failures = [0] * count
        self._order = [0] * count
        self._refused: set[int] = set()
        self._turn = 0

    @contextmanager
    def take(self, nbytes: int) -> Iterator[int | None]:
        """None when every rail is refused. An exception inside counts as the rail's failure."""
        rail = self.choose(nbytes)
        try:
            yield rail
        finally:
            if rail is not None:
                self.over(rail, nbytes)

    def choose(self, nbytes: int) -> int | None:
        """As `take`; `over` ends it."""
        with self._lock:
            usable = [rail for rail in range(len(self._bytes)) if rail not in self._refused]
            rail = min(usable, key=lambda one: (self._failures[one], self._bytes[one], self._order[one]), default=None)
            if rail is not None:
                self._turn += 1
                self._order[rail] = self._turn
                self._bytes[rail] += nbytes
        return rail

    def over(self, rail: int, nbytes: int, *, worked: bool | None = None) -> None:
        """`worked`: how it went, where that says something of the rail."""
        with self._lock:
            self._bytes[rail] -= nbytes
            if worked is not None:
                self._failures[rail] = 0 if worked else self._failures[rail] + 1

    def failed(self, rail: int) -> None:
        with self._lock:
            self._failures[rail] += 1

    def worked(self, rail: int) -> None:
        with self._lock:
            self._failures[rail] = 0

    def refuse(self, rail: int) -> None:
        """Never again: the other end does not connect to it."""
        with self._lock:
            self._refused.add(rail)
