"""What an operator decides about a node. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvctl.core.errors import UsageError
from kvctl.core.units import is_count
from kvctl.transports.node_auth import DEFAULT_PORT, MasterKey

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what clients can take. Times in seconds.

    head: bytes of request line and headers; head_seconds: for all of them, from the first byte. idle_seconds:
    between requests. stall_seconds: a body without any progress. grace_seconds and min_rate (bytes/s): after the
    grace a body must have moved at least min_rate on average, so that a trickle cannot hold a connection.
    max_object: bytes of one upload. linger_seconds: reading away what a refused client still sends.
    """

    connections: int = 1024
    head: int = 16384
    headers: int = 64
    head_seconds: float = 10.0
    idle_seconds: float = 120.0
    stall_seconds: float = 30.0
    grace_seconds: float = 60.0
    min_rate: int = 4096
    max_object: int = 5 << 40
    linger_seconds: float = 2.0
    drain_seconds: float = 30.0
    nonces: int = 1 << 20


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """`listen` is (host, port), port 0 for any free one. Without `keys` only peers in `open_to` are served."""

    root: str
    listen: tuple[str, int]
    keys: tuple[MasterKey, ...] = ()
    open_to: tuple[Network, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    threads: int = 16
    limits: Limits = field(default_factory=Limits)
    rdma: str = "auto"
    rdma_allow: tuple[str, ...] = ()
    rdma_options: dict[str, str] = field(default_factory=dict)


def parse_listen(text: str) -> tuple[str, int]:
    """HOST:PORT, [IPv6]:PORT, HOST or :PORT. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or (host.count(":") and not host.endswith("]")):
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    # a lone number would be a host for the resolver: 0 is every address there
    wrong = not text or set(host) & set("[]/ ") or (host.isdigit() and not colon) or (not host and text != f":{port}")
    if wrong or not is_count(port) or int(port) > 65535:
        raise UsageError(
            f"{text!r} is not HOST:PORT", hint=f"127.0.0.1:{DEFAULT_PORT} for this host only, :{DEFAULT_PORT} for all"
        )
    return host or "0.0.0.0", int(port)  # noqa: S104 - only when the operator writes ':PORT'


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """CIDRs or single addresses. Raises UsageError."""
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as problem:
        raise UsageError(f"not a network: {problem}", hint="write for example 10.0.0.0/8 or 127.0.0.1") from None


def contains(networks: Sequence[Network], address: str) -> bool:
    """Whether an address is in one of the networks; IPv4 in its IPv6 form counts as IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found.version == network.version and found in network for network in networks)
