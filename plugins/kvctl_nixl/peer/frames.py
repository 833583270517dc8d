"""The control channel: frames of a JSON header and a blob, and the greeting that proves a shared key.

    frame     u32 length of the header, u32 length of the blob (big endian), header, blob
    greeting  source: version, nonce, agent; sink: nonce, agent, proof + its metadata; source: proof + its metadata

A proof is an HMAC-SHA256 under the key over who proves and both nonces. It keeps strangers out; the frames after it are
neither signed nor secret, as little as the bytes that UCX moves: the network is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvctl.core.errors import AuthError

VERSION: Final = 1
HEADER_LIMIT: Final = 64 << 10
BLOB_LIMIT: Final = 16 << 20
GET_LIMIT: Final = 8 << 20  # bytes of an object in one answer
GREETING_LIMIT: Final = 4 << 10
METADATA_LIMIT: Final = 1 << 20
_LENGTHS: Final = struct.Struct("!II")

Header = Mapping[str, Any]  # Any: JSON
T = TypeVar("T")


class ClosedError(OSError):
    """The other side has closed the connection, or has gone."""


class ProtocolError(Exception):
    """What came is not what this protocol allows."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the greeting told about the other side: its agent's name and metadata."""

    agent: str
    metadata: bytes


def pack(header: Header, blob: bytes = b"") -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), len(blob)) + text + blob


def send(connection: socket.socket, header: Header, blob: bytes = b"") -> None:
    """Raises OSError."""
    connection.sendall(pack(header, blob))


def receive(
    connection: socket.socket, header_limit: int = HEADER_LIMIT, blob_limit: int = BLOB_LIMIT
) -> tuple[Header, bytes]:
    """Raises ClosedError, OSError or ProtocolError."""
    header_length, blob_length = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    if header_length > header_limit or blob_length > blob_limit:
        raise ProtocolError(f"a frame of {header_length} and {blob_length} bytes")
    try:
        header = json.loads(_exactly(connection, header_length))
    except ValueError as problem:
        raise ProtocolError(f"a header that is not JSON: {problem}") from None
    if not isinstance(header, dict):
        raise ProtocolError("a header that is no object")
    return header, _exactly(connection, blob_length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        got = connection.recv_into(view[done:])
        if got == 0:
            raise ClosedError("the connection was closed")
        done += got
    return bytes(data)


def field(header: Header, name: str, kind: type[T]) -> T:
    """A field that must be there, of that type; numbers are not negative. Raises ProtocolError."""
    value = header.get(name)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise ProtocolError(f"{name} is missing or no {kind.__name__}")
    if isinstance(value, int) and value < 0:
        raise ProtocolError(f"{name} is negative")
    return value


def _proof(key: bytes, who: str, nonces: str) -> str:
    return hmac.new(key, f"kvctl-peer-{VERSION}:{who}:{nonces}".encode(), hashlib.sha256).hexdigest() if key else ""


def greet_sink(connection: socket.socket, key: bytes, agent: str, metadata: bytes) -> Greeting:
    """The source's side. Raises AuthError, OSError or ProtocolError."""
    nonce = secrets.token_hex(16)
    send(connection, {"kvctl-peer": VERSION, "nonce": nonce, "agent": agent})
    header, blob = receive(connection, GREETING_LIMIT, METADATA_LIMIT)
    nonces = f"{nonce}:{field(header, 'nonce', str)}"
    if not hmac.compare_digest(field(header, "proof", str), _proof(key, "sink", nonces)):
        send(connection, {"refused": "wrong key"})
        raise AuthError("a peer with another key")
    send(connection, {"proof": _proof(key, "source", nonces)}, metadata)
    return Greeting(field(header, "agent", str), blob)


def greet_source(connection: socket.socket, key: bytes, introduce: Callable[[], tuple[str, bytes]]) -> Greeting:
    """The sink's side; `introduce` gives its agent's name and metadata. Raises AuthError, OSError or ProtocolError."""
    header, _ = receive(connection, GREETING_LIMIT, 0)
    if header.get("kvctl-peer") != VERSION:
        raise ProtocolError(f"it speaks version {header.get('kvctl-peer')}, this kvctl {VERSION}")
    nonce = secrets.token_hex(16)
    nonces = f"{field(header, 'nonce', str)}:{nonce}"
    agent, metadata = introduce()
    send(connection, {"nonce": nonce, "agent": agent, "proof": _proof(key, "sink", nonces)}, metadata)
    answer, blob = receive(connection, GREETING_LIMIT, METADATA_LIMIT)
    if "refused" in answer or not hmac.compare_digest(field(answer, "proof", str), _proof(key, "source", nonces)):
        raise AuthError("the peer has another key, or none", hint="both sides need the same key_file")
    return Greeting(field(header, "agent", str), blob)
