"""What a user may set, and the two transports that come of it: `native-rdma` (storage nodes) and `s3-rdma`."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import Final

from kvctl.core.errors import UsageError
from kvctl.transports.api import Store, StoreConfig
from kvctl.transports.options import check_names, choice, number
from kvctl_verbs.rails import find_rails, local_addresses
from kvctl_verbs.talk import Talk, node_talk
from kvctl_verbs.transport import RdmaTransport
from kvctl_verbs.workers import Settings

_COMMON: Final = ("devices", "memory", "peers", "threads")
_NODE: Final = (*_COMMON, "dialect", "path")


def open_native(config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]) -> RdmaTransport:
    """Options: see spec.py. Raises UsageError, EnvError."""
    check_names("native-rdma", options, _NODE)
    talk = node_talk(config, store, endpoint, options)
    return RdmaTransport("native-rdma", talk, parse_settings(talk, options))


def open_s3(config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]) -> RdmaTransport:
    """Options: see spec.py. Raises UsageError, EnvError."""
    from kvctl_verbs.talk_s3 import s3_talk  # with it come S3's own modules

    check_names("s3-rdma", options, _COMMON)
    talk = s3_talk(config, store, endpoint)
    return RdmaTransport("s3-rdma", talk, parse_settings(talk, options))


def parse_settings(talk: Talk, options: Mapping[str, str]) -> Settings:
    """Raises UsageError, and EnvError where no device is usable."""
    threads = number(options, "threads", 8, 1, 256)
    memory = choice(options, "memory", ("arena", "window", "op"))
    try:
        networks = tuple(ipaddress.ip_network(text) for text in _split(options.get("peers", "")))
    except ValueError as problem:
        raise UsageError(f"peers: {problem}", hint="write networks such as 10.0.0.0/8, comma-separated") from None
    rails = tuple(find_rails(_split(options.get("devices", ""))))
    return Settings(threads, rails, addresses_of(talk.host), networks, memory != "op", memory == "window")


def addresses_of(host: str) -> tuple[str, ...]:
    """The IP addresses of an endpoint, this host's own too when it is a loopback one. Empty when its name is not known:
    then no request gets through either.
    """
    try:
        found = {str(item[4][0]) for item in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return ()
    if any(ipaddress.ip_address(ip.partition("%")[0]).is_loopback for ip in found):
        found |= set(local_addresses())
    return tuple(sorted(found))


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
