"""Where an agent is found and what it may take. Pure but for the environment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import UsageError
from kvctl.core.units import parse_size
from kvctl.memory.devices import device_names
from kvctl.node.settings import NodeSettings

SOCKET_VARIABLE: Final = "KVCTL_AGENT_SOCKET"


@dataclass(frozen=True, slots=True)
class OneSided:
    """A transport by which peers read the slots' memory itself (nixl-ucx), and where its control channel listens.
    `key_file`: holds a key shared with the readers; without it only loopback is served.
    """

    transport: str
    listen: tuple[str, int]
    key_file: str | None = None


@dataclass(frozen=True, slots=True)
class KvSettings:
    """The agent's KV cache ahead of the repo `shared`. `memory`: bytes of it in host memory (0: none), out of the
    agent's own. `local`: a folder for the tier behind that, of `local_bytes` at most. `key`: master secret of the
    repo's KV.
    """

    shared: tuple[StoreConfig, ...]
    memory: int = 0
    local: str | None = None
    local_bytes: int = 0
    key: bytes | None = None


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """`memory`: bytes of host memory that all slots, and KV in memory, may take together. `devices`: names of devices,
    and the bytes of each that slots may take. `peers`: how other hosts read the slots over the storage node's protocol,
    `one_sided`: how they do by RDMA or the like; None: not at all.
    """

    socket: str
    memory: int
    peers: NodeSettings | None = None
    one_sided: OneSided | None = None
    linger: float = field(default=5.0)
    kv: KvSettings | None = None
    devices: tuple[tuple[str, int], ...] = ()


def default_socket(environ: Mapping[str, str] | None = None) -> str:
    """KVCTL_AGENT_SOCKET, else a file in the user's runtime directory, else in a directory of ours under /tmp."""
    found = os.environ if environ is None else environ
    named = found.get(SOCKET_VARIABLE)
    if named:
        return os.path.abspath(os.path.expanduser(named))
    runtime = found.get("XDG_RUNTIME_DIR")
    if runtime:
        return os.path.join(runtime, "kvctl", "agent.sock")
    return os.path.join(tempfile.gettempdir(), f"kvctl-{os.getuid()}", "agent.sock")


def parse_device_memory(texts: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Devices and bytes of each, of 'cuda:0=60GiB', 'cuda:0-7=60GiB' (60 GiB of each). Raises UsageError."""
    found: dict[str, int] = {}
    for text in texts:
        devices, equals, size = text.partition("=")
        if not equals:
            raise UsageError(
                f"{text!r} is not DEVICE=SIZE", hint="write it like cuda:0=60GiB, or cuda:0-7=60GiB for each"
            )
        for name in device_names(devices):
            one = "cuda:0" if name == "cuda" else name
            if one in found:
                raise UsageError(f"{one} is given twice", hint="one --device-memory for a device")
            found[one] = parse_size(size)
    return tuple(found.items())
