"""Messages on the agent's socket: a length (4 bytes, big endian) and a JSON document; descriptors follow a document
that announces them (`"fds": n`), as ancillary data of single bytes, a few hundred at a time.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvctl.core import errors
from kvctl.core.errors import EnvError, KvctlError, TransientError

MAX_MESSAGE: Final = 64 << 20  # side files do not travel in messages; names and sizes of many shards do
_BATCH: Final = 200  # SCM_RIGHTS takes 253


class ClosedError(Exception):
    """The other side has gone."""


def send(sock: socket.socket, document: Mapping[str, Any], fds: Sequence[int] = ()) -> None:  # Any: JSON
    """Raises OSError when the other side is gone or too slow."""
    data = json.dumps({**document, "fds": len(fds)} if fds else document).encode()
    sock.sendall(len(data).to_bytes(4, "big") + data)
    for start in range(0, len(fds), _BATCH):
        socket.send_fds(sock, [b"f"], list(fds[start : start + _BATCH]))


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:  # Any: JSON
    """A document and its descriptors, now the caller's. Raises ClosedError, OSError, ValueError for nonsense."""
    length = int.from_bytes(_exactly(sock, 4), "big")
    if length > MAX_MESSAGE:
        raise ValueError(f"a message of {length} bytes")
    document = json.loads(_exactly(sock, length))
    if not isinstance(document, dict):
        raise ValueError("not an object")  # noqa: TRY004 - one kind of error for all nonsense
    fds: list[int] = []
    wanted = document.pop("fds", 0)
    try:
        while len(fds) < wanted:
            # a lone byte carries them: asking for more would swallow the next message
            data, ancillary, flags, _ = sock.recvmsg(
                1, socket.CMSG_SPACE(_BATCH * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    found = array.array("i")
                    found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
                    fds.extend(found)
            if not data:
                raise ClosedError
            if flags & socket.MSG_CTRUNC:
                raise EnvError("too few file descriptors are left", hint="raise `ulimit -n`")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return document, fds


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise ClosedError
        data += piece
    return bytes(data)


def error_document(error: KvctlError) -> dict[str, Any]:  # Any: JSON
    return {
        "error": {
            "code": error.code,
            "what": error.what,
            "cause": error.cause,
            "hint": error.hint,
            "details": error.details,
        }
    }


def raise_error(document: Mapping[str, Any]) -> None:  # Any: JSON
    """Raise the error that an answer carries, if it carries one."""
    said = document.get("error")
    if said is None:
        return
    kinds: dict[str, type[KvctlError]] = {
        kind.code: kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, KvctlError) and kind is not errors.InterruptedRunError
    }
    kind = kinds.get(said["code"], TransientError)
    raise kind(said["what"], cause=said["cause"], hint=said["hint"], details=said["details"])
