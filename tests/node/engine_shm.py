"""An engine for the node's RDMA seam that moves bytes between files and shared memory of the same host. A token is
`NAME:SIZE`, a file in /dev/shm; `NAME` 'gone' is a peer that cannot be reached. Run by the node in its own process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvctl.core.errors import AuthError, EnvError, MemberDownError, UsageError
from kvctl.node.rdma_seam import Dialect, RdmaRequest, RdmaSettings


class ShmEngine:
    max_in_flight = 4

    def __init__(self, settings: RdmaSettings) -> None:
        self._moved = 0
        self._secret = settings.options.get("secret", "")

    def size(self, token: str, dialect: Dialect) -> int:
        name, colon, size = token.partition(":")
        if not colon or not size.isdigit() or "/" in name:
            raise UsageError("a malformed token")
        return int(size)

    def _memory(self, request: RdmaRequest) -> int:
        name = request.token.partition(":")[0]
        if name == "gone":
            raise MemberDownError("the peer does not answer")
        if name == self._secret:
            raise AuthError("an address that is neither the peer's nor allowed")
        if request.peer != "127.0.0.1":
            raise AuthError("another peer")
        return os.open(f"/dev/shm/{name}", os.O_RDWR)

    def send(self, request: RdmaRequest, fd: int) -> None:
        memory = self._memory(request)
        try:
            self._moved += os.pwrite(memory, os.pread(fd, request.length, request.offset), 0)
        finally:
            os.close(memory)

    def receive(self, request: RdmaRequest, fd: int) -> None:
        memory = self._memory(request)
        try:
            self._moved += os.pwrite(fd, os.pread(memory, request.length, 0), 0)
        finally:
            os.close(memory)

    def metrics(self) -> Mapping[str, float]:
        return {"shm_bytes": self._moved}

    def close(self) -> None:
        return


def make(settings: RdmaSettings) -> ShmEngine:
    if settings.options.get("absent"):
        raise EnvError("no shared memory here")
    return ShmEngine(settings)
