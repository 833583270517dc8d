"""The token of the public protocol's RC variant: `IP:PORT:0x<address>:0x<size>:0x<rkey>`. Pure.

The header `x-scal-rdma` (`x-rdma-info` in the S3 variant) carries it: where the client listens for the server's
connection, and the memory that the server may write into or read from. Source: the vendors' public NIXL branches.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Final

from kvctl.core.errors import IncompatibleError, UsageError

MAX_SIZE: Final = (1 << 32) - 1  # the size has eight hex digits
_MEMORY: Final = re.compile(
    r"^(?P<place>.+):0x(?P<address>[0-9a-fA-F]{1,16}):0x(?P<size>[0-9a-fA-F]{1,8}):0x(?P<rkey>[0-9a-fA-F]{1,8})$"
)
_PORT: Final = re.compile(r"^[0-9]{1,5}$")
_LONGEST: Final = 128


@dataclass(frozen=True, slots=True)
class RcToken:
    """`ip` and `port` of the client's listener; `address`, `size` in bytes and `rkey` of its memory. The rkey is what
    gives access: it is in no message and no repr.
    """

    ip: str
    port: int
    address: int
    size: int
    rkey: int = field(repr=False)

    def text(self) -> str:
        """As the header carries it."""
        place = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"{place}:{self.port}:0x{self.address:016x}:0x{self.size:08x}:0x{self.rkey:08x}"


def parse_token(text: str) -> RcToken:
    """Raises IncompatibleError for a token of another kind (DC tokens have other fields), UsageError for one of this
    kind that makes no sense. No message shows the text.
    """
    match = _MEMORY.match(text) if len(text) <= _LONGEST else None
    if match is None:
        raise IncompatibleError("an RDMA token of a kind that this node does not know", hint="it knows RC tokens")
    place, _, port = match["place"].rpartition(":")
    try:
        ip = ipaddress.ip_address(place[1:-1] if place.startswith("[") and place.endswith("]") else place)
    except ValueError:
        raise UsageError("the RDMA token names no IP address") from None
    if not _PORT.match(port) or not 0 < int(port) < 65536:
        raise UsageError("the RDMA token names no port")
    address, size = int(match["address"], 16), int(match["size"], 16)
    if address + size > 1 << 64:
        raise UsageError("the RDMA token names memory past the end of the address space")
    return RcToken(str(ip), int(port), address, size, int(match["rkey"], 16))
