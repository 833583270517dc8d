"""The ceiling of each medium, and in words how it was measured.

Files: preadv into touched memory. A server on this host: a bare sendfile server on the loopback, and one send and one
receive per request. A server elsewhere: the same bare client against that very server, with requests that were signed
before; its own work is in it, as nothing of ours runs there. Beside either, what Python's library does there
(`READINTO`): no ceiling, but what a program of a few lines gets.
"""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import quote, urlsplit

from kvctl.bench.rivals import Address, FileReader, LibraryReader, Reader, SocketReader, ThreadedRival
from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import EnvError
from kvctl.transports.boto import bucket_and_prefix, plain_client
from kvctl.transports.node_auth import DEFAULT_PORT, TOKEN_HEADER, Asked, MasterKey, ScopedKey, read_key_file

CEILING: Final = "ceiling"
READINTO: Final = "readinto"
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PRESIGNED_SECONDS: Final = 6 * 3600


class Ceiling(Protocol):
    """`rivals` read: the ceiling itself, then READINTO where it makes sense; `how` says what the first is; `server_cpu`
    the CPU seconds of a rival's server so far, None if unknown.
    """

    @property
    def rivals(self) -> Sequence[ThreadedRival]: ...
    @property
    def how(self) -> str: ...
    def server_cpu(self, name: str) -> float | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Plain:
    rivals: Sequence[ThreadedRival]
    how: str

    def server_cpu(self, name: str) -> float | None:
        return None

    def close(self) -> None:
        for rival in self.rivals:
            rival.close()


def make_ceiling(
    config: StoreConfig, endpoint: str, key: str, data: memoryview, options: Mapping[str, str]
) -> Ceiling | None:
    """The ceiling for object `key` of `config`; None for a medium that nobody has described. Raises EnvError."""
    if config.scheme == "file":
        direct = options.get("direct") == "true"
        path = os.path.join(config.url.removeprefix("file://"), key)
        how = f"preadv{' with O_DIRECT' if direct else ''} of the same file into touched memory, a thread per request"
        return _Plain((ThreadedRival(CEILING, lambda: FileReader(path, direct=direct)),), how)
    if config.scheme not in {"s3", "node"}:
        return None
    address, head = _s3(config, endpoint, key) if config.scheme == "s3" else _node(config, endpoint, key)
    if is_here(address.host) and address.tls is None:
        return BareServer(data)
    where = f"{address.host}:{address.port}"
    how = (
        f"a bare socket to {where} itself: requests signed before, one send and one receive each, a thread per request"
    )
    return _Plain(
        (
            ThreadedRival(CEILING, lambda: SocketReader(address, head)),
            ThreadedRival(READINTO, lambda: LibraryReader(address, head)),
        ),
        how,
    )


class BareServer:
    """The sendfile server, as a child, over a cached file with the same bytes."""

    how = (
        "a bare sendfile server on the loopback and a raw socket client (one send per request, received straight into "
        "touched memory), a connection and a thread per request"
    )

    def __init__(self, data: memoryview) -> None:
        # a file as the endpoint's are, in the page cache: from tmpfs, whose pages are small, it sends half as fast
        handle, self._path = tempfile.mkstemp(prefix="kvctl-ceiling-")
        with open(handle, "wb") as file:
            file.write(data)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "kvctl.testing.bare_server", self._path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(part) for part in sys.path if part)},
        )
        assert self._child.stdout is not None
        self._out = self._child.stdout
        line = self._out.readline()
        if not line:
            self.close()
            raise EnvError("the bare server of the ceiling did not start")
        self._address = Address("127.0.0.1", int(line))
        self._pids: dict[str, list[int]] = {CEILING: [], READINTO: []}
        self.rivals = (
            ThreadedRival(CEILING, lambda: self._connect(CEILING, SocketReader)),
            ThreadedRival(READINTO, lambda: self._connect(READINTO, LibraryReader)),
        )

    def _connect(self, name: str, kind: Callable[[Address, Callable[[int, int], bytes]], Reader]) -> Reader:
        reader = kind(self._address, _bare_head)
        self._pids[name].append(int(self._out.readline()))
        return reader

    def server_cpu(self, name: str) -> float | None:
        return sum(_cpu_of(pid) for pid in self._pids[name])

    def close(self) -> None:
        for rival in getattr(self, "rivals", ()):
            rival.close()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(10)
        self._out.close()
        os.unlink(self._path)


def _bare_head(first: int, last: int) -> bytes:
    return f"GET / HTTP/1.1\r\nhost: bare\r\nrange: bytes={first}-{last}\r\n\r\n".encode()


def _cpu_of(pid: int) -> float:
    """User and system seconds of a process, in ticks of 10 ms."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def is_here(host: str) -> bool:
    """Whether `host` is an address of this machine."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, place in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((place[0], 0))
            except OSError:
                continue
            return True
    return False


def _s3(config: StoreConfig, endpoint: str, key: str) -> tuple[Address, Callable[[int, int], bytes]]:
    client = plain_client(config, endpoint or None)
    bucket, prefix = bucket_and_prefix(config)
    url = client.generate_presigned_url(
        "get_object", Params={"Bucket": bucket, "Key": prefix + key}, ExpiresIn=_PRESIGNED_SECONDS
    )
    client.close()
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    tls = ssl.create_default_context(cafile=config.options.get("ca_bundle")) if secure else None
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path

    def head(first: int, last: int) -> bytes:
        return f"GET {target} HTTP/1.1\r\nhost: {parts.netloc}\r\nrange: bytes={first}-{last}\r\n\r\n".encode()

    return Address(parts.hostname or "", parts.port or (443 if secure else 80), tls), head


def _node(config: StoreConfig, endpoint: str, key: str) -> tuple[Address, Callable[[int, int], bytes]]:
    authority, _, path = config.url.removeprefix("node://").partition("/")
    secure = config.options.get("tls") == "true"
    way = endpoint or authority
    parts = urlsplit(way if "://" in way else f"{'https' if secure else 'http'}://{way}")
    secure = parts.scheme == "https"
    tls = ssl.create_default_context(cafile=config.options.get("ca_bundle")) if secure else None
    prefix = path.strip("/")
    target = f"/v1/{quote(f'{prefix}/{key}' if prefix else key, safe='/-._~')}"
    scoped = _node_key(config)

    def head(first: int, last: int) -> bytes:
        lines = [f"GET {target} HTTP/1.1", f"host: {parts.netloc}", f"range: bytes={first}-{last}"]
        if scoped is not None:
            lines.append(f"{TOKEN_HEADER}: {scoped.token(Asked('GET', target, f'bytes={first}-{last}'))}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    return Address(parts.hostname or "", parts.port or DEFAULT_PORT, tls), head


def _node_key(config: StoreConfig) -> ScopedKey | None:
    path = config.options.get("key_file") or os.environ.get("KVCTL_NODE_KEY_FILE")
    if path is None:
        return None
    key = read_key_file(os.path.expanduser(path))[0]
    return key.scoped("rw", "") if isinstance(key, MasterKey) else key
