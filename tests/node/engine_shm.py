"""An engine for the node's RDMA seam that moves bytes between files and shared memory of the same host. A token is
`NAME:SIZE`, a file in /dev/shm; `NAME` 'gone' is a peer that cannot be reached. Run by the node in its own process.

With the option `loop` the node's event loop may carry out GETs itself, and it says what becomes of them: they are
placed at once (`now`), a moment later (`later`), only by a thread (`stuck`), they fail (`broken`), or are never told of
(`never`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from kvctl.core.errors import AuthError, EnvError, KvctlError, MemberDownError, UsageError
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


class ShmFlight:
    def __init__(self, engine: LoopShmEngine, request: RdmaRequest, fd: int) -> None:
        self.placed = False
        self.stuck = False
        self._engine = engine
        self._request = request
        self._fd = fd
        self._ended = False

    def go(self) -> None:
        self._engine.count("went")
        if self._engine.mode == "now":
            self.write()
        elif self._engine.mode == "later":
            self._engine.tell(self)
        self.stuck = self._engine.mode in {"stuck", "broken"}

    def write(self) -> None:
        self._engine.send(self._request, self._fd)
        self.placed = self._ended = True

    def leave(self) -> None:
        self._engine.count("left")

    def finish(self) -> None:
        self._engine.count("finished")
        self._ended = True
        if self._engine.mode == "broken":
            raise MemberDownError("the peer went away")
        self.write()

    def abandon(self) -> None:
        if not self._ended:
            self._ended = True
            self._engine.count("abandoned")


class LoopShmEngine(ShmEngine):
    def __init__(self, settings: RdmaSettings) -> None:
        super().__init__(settings)
        self.mode = settings.options["loop"]
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._told: list[ShmFlight] = []
        self._counts: dict[str, float] = {}

    def count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1

    def tell(self, flight: ShmFlight) -> None:
        self._told.append(flight)
        os.eventfd_write(self.fd, 1)

    def begin(self, request: RdmaRequest, fd: int, *, cached: bool) -> ShmFlight | None:
        try:
            if self.size(request.token, request.dialect) < request.length:
                return None
            os.close(self._memory(request))
        except (KvctlError, OSError):
            return None
        self.count("begun")
        return ShmFlight(self, request, fd)

    def ready(self) -> Sequence[ShmFlight]:
        os.eventfd_read(self.fd)
        told, self._told = self._told, []
        for flight in told:
            flight.write()
        return told

    def metrics(self) -> Mapping[str, float]:
        return {**super().metrics(), **self._counts}


def make(settings: RdmaSettings) -> ShmEngine:
    if settings.options.get("absent"):
        raise EnvError("no shared memory here")
    return LoopShmEngine(settings) if "loop" in settings.options else ShmEngine(settings)
