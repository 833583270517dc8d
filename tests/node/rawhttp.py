"""A client of the node that shares no code with ours: sockets, and tokens built from the specification alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Self


def frame(*parts: str) -> bytes:
    return b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in parts)


@dataclass
class Key:
    """A scoped key out of its file's line."""

    key_id: str
    rights: str
    prefix: str
    secret: bytes

    @classmethod
    def derived(cls, master_line: str, rights: str = "rw", prefix: str = "") -> Key:
        master = bytes.fromhex(master_line.strip().rpartition(".")[2])
        key_id = hashlib.sha256(b"kvctl-node key id\0" + master).hexdigest()[:8]
        secret = hmac.new(master, frame("kvctl-node scope v1", rights, prefix), "sha256").digest()
        return cls(key_id, rights, prefix, secret)

    def token(
        self, method: str, target: str, *, span: str = "", if_match: str = "", if_none_match: str = "",
        rdma: str = "", expiry: int | None = None, nonce: str | None = None,
    ) -> str:  # fmt: skip
        until = int(time.time()) + 60 if expiry is None else expiry
        once = nonce or f"{int(time.time() * 1000):x}-{os.urandom(12).hex()}"
        parts = (method, target, span, if_match, if_none_match, rdma, str(until), once)
        mac = hmac.new(self.secret, frame("kvctl-node token v1", *parts), "sha256").hexdigest()
        prefix = base64.urlsafe_b64encode(self.prefix.encode()).decode().rstrip("=")
        return f"v1.{self.key_id}.{until}.{once}.{self.rights}:{prefix}.{mac}"


@dataclass
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def code(self) -> str:
        found: Any = json.loads(self.body)  # Any: JSON
        return str(found["code"])


class Raw:
    """One connection."""

    def __init__(self, address: tuple[str, int], key: Key | None = None, timeout: float = 30) -> None:
        self.sock = socket.create_connection(address, timeout)
        self.file = self.sock.makefile("rb")
        self.key = key

    def send(
        self, method: str, target: str, body: bytes | None = None, *, token: str | None = None, **headers: str
    ) -> None:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is None and self.key is not None:
            token = self.key.token(
                method, target, span=names.get("range", ""), if_match=names.get("if-match", ""),
                if_none_match=names.get("if-none-match", ""), rdma=names.get("x-scal-rdma", ""),
            )  # fmt: skip
        if token:
            names["x-kvctl-token"] = token
        if body is not None:
            names.setdefault("content-length", str(len(body)))
        lines = [f"{method} {target} HTTP/1.1", "host: test", *(f"{name}: {value}" for name, value in names.items())]
        self.sock.sendall("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b""))

    def answer(self, method: str = "GET") -> Answer:
        line = self.file.readline()
        if not line:
            raise ConnectionResetError("no answer")
        found = Answer(int(line.split()[1]))
        while (field_line := self.file.readline().strip()) != b"":
            name, _, value = field_line.decode().partition(":")
            found.headers[name.lower()] = value.strip()
        if method != "HEAD":
            found.body = self.file.read(int(found.headers.get("content-length", "0")))
        return found

    def ask(
        self, method: str, target: str, body: bytes | None = None, *, token: str | None = None, **headers: str
    ) -> Answer:
        self.send(method, target, body, token=token, **headers)
        return self.answer(method)

    def ended(self) -> bool:
        """Whether the node has closed the connection, with nothing more said."""
        try:
            return self.file.read(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.file.close()
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
