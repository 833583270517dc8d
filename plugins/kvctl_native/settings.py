"""What a user says about a storage node, checked: where it is, prefix, key, TLS. Pure but for the key file and the
environment.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from kvctl.core.addresses import StoreConfig, split_url
from kvctl.core.errors import ConfigError, EnvError, UsageError
from kvctl.transports.node_auth import DEFAULT_PORT, MasterKey, ScopedKey, read_key_file

_KNOWN: Final = ("ca_bundle", "connect_timeout", "key_file", "timeout", "tls")


@dataclass(frozen=True, slots=True)
class Place:
    """One way to the node."""

    host: str
    port: int
    tls: bool

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host_header}"

    @property
    def host_header(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class NodeAccess:
    """`prefix` is empty or ends with '/'. Timeouts in seconds: to connect, and without a byte moving."""

    url: str
    prefix: str
    places: tuple[Place, ...]
    key: ScopedKey | None = field(repr=False)
    ca_bundle: str | None
    connect_timeout: float
    timeout: float

    @cached_property
    def tls_context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.ca_bundle)
        except (ssl.SSLError, OSError) as problem:
            raise EnvError(f"the CA bundle {self.ca_bundle} cannot be used", cause=str(problem)) from problem


def parse_access(config: StoreConfig) -> NodeAccess:
    """Raises UsageError, ConfigError or AuthError for what cannot be meant."""
    options = {name.replace("-", "_"): value for name, value in config.options.items()}
    if unknown := sorted(set(options) - set(_KNOWN)):
        raise UsageError(f"{config.url}: a node store has no option {unknown[0]!r}", hint=f"it has {', '.join(_KNOWN)}")
    tls = options.get("tls", "false").lower()
    if tls not in {"true", "false"}:
        raise UsageError(f"{config.url}: tls={tls} means nothing", hint="use tls=true or tls=false")
    authority, _, path = config.url.removeprefix("node://").partition("/")
    own = parse_place(authority, tls=tls == "true")
    prefix = path.strip("/")
    ca_bundle = options.get("ca_bundle")
    if ca_bundle is not None and not os.path.isfile(ca_bundle):
        raise ConfigError(f"the CA bundle {ca_bundle} does not exist", hint="name a PEM file with ca_bundle=PATH")
    key_file = options.get("key_file") or os.environ.get("KVCTL_NODE_KEY_FILE")
    return NodeAccess(
        url=config.url,
        prefix=f"{prefix}/" if prefix else "",
        places=tuple(parse_place(way, tls=tls == "true") for way in config.endpoints) or (own,),
        key=None if key_file is None else load_key(key_file),
        ca_bundle=ca_bundle,
        connect_timeout=_seconds(config.url, options, "connect_timeout", 5.0),
        timeout=_seconds(config.url, options, "timeout", 30.0),
    )


def load_key(path: str) -> ScopedKey:
    """The client's key; from a node's own master key one for everything is derived."""
    keys = read_key_file(os.path.expanduser(path))
    if len(keys) > 1:
        raise ConfigError(f"{path} holds {len(keys)} keys", hint="a client's key file holds one")
    return keys[0].scoped("rw", "") if isinstance(keys[0], MasterKey) else keys[0]


def parse_place(text: str, *, tls: bool = False) -> Place:
    """HOST:PORT, or http(s)://HOST:PORT. Raises UsageError."""
    parts = split_url(text if "://" in text else f"{'https' if tls else 'http'}://{text}", port=True)
    shown = parts.netloc.rpartition("@")[2]
    if "@" in parts.netloc:
        raise UsageError(f"an endpoint with credentials in it is refused ({shown})", hint="use key_file=FILE")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/"):
        raise UsageError(f"{shown or text} is no node's address", hint="write node://HOST:PORT/PREFIX")
    return Place(parts.hostname, parts.port or DEFAULT_PORT, parts.scheme == "https")


def _seconds(url: str, options: dict[str, str], name: str, default: float) -> float:
    try:
        value = float(options.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise UsageError(f"{url}: {name}={options.get(name)} is not a number of seconds")
    return value
