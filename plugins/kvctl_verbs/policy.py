"""Which address may be on the other end. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def normal(text: str) -> Address:
    """An address without zone; IPv4 in its IPv6 form counts as IPv4. Raises ValueError."""
    found = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found


def allowed(address: str, peers: Sequence[str], networks: Sequence[Network]) -> bool:
    """Whether `address` is one of the peers', or in one of the networks. What is no address is nobody's."""
    try:
        found = normal(address)
        known = {normal(peer) for peer in peers if peer}
    except ValueError:
        return False
    return found in known or any(found.version == network.version and found in network for network in networks)
