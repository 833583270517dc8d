"""The client's end of the agent's socket. A connection is what leases hang on: keep it open as long as they count."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from kvctl.agent import wire
from kvctl.agent.generations import SlotFile, Space
from kvctl.agent.settings import default_socket
from kvctl.core.errors import EnvError, MemberDownError, NotFoundError, StalledError

_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A file of a slot: descriptor, size, bytes of its safetensors header (0: a side file). `space`: where its data
    section is on a device; then `space_fd` is the descriptor of that memory, and `fd` has the header only.
    """

    name: str
    fd: int
    size: int
    header: int
    space: Space | None = None
    space_fd: int = -1

    def close(self) -> None:
        os.close(self.fd)
        if self.space is not None:
            os.close(self.space_fd)


@dataclass(frozen=True, slots=True)
class OpenedSlot:
    """A leased generation. The descriptors are the caller's to close."""

    slot: str
    ident: str
    number: int
    fingerprint: str
    source: str
    files: tuple[OpenedFile, ...]


class AgentClient:
    """Thread-safe; one request at a time. Raises what the agent raises; MemberDownError when it goes away."""

    def __init__(self, path: str | None = None, *, label: str = "", seconds: float = _SECONDS) -> None:
        """Raises EnvError when no agent runs there."""
        self.path = path or default_socket()
        self._lock = threading.Lock()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(seconds)
        try:
            self._sock.connect(self.path)
        except OSError as error:
            self._sock.close()
            raise EnvError(
                "no agent is running here",
                cause=f"{self.path}: {error.strerror or error}",
                hint="start one with `kvctl agent serve`, or name its socket with KVCTL_AGENT_SOCKET",
            ) from error
        said = self.call("hello", label=label or os.path.basename(sys.argv[0] or "python"))
        self.agent_pid = int(said["pid"])
        self.agent_ident = str(said["ident"])
        self.agent_peers = str(said["peers"])

    def call(self, operation: str, **fields: Any) -> dict[str, Any]:  # Any: JSON
        document, fds = self.call_fds(operation, **fields)
        for fd in fds:
            os.close(fd)
        return document

    def call_fds(self, operation: str, **fields: Any) -> tuple[dict[str, Any], list[int]]:  # Any: JSON
        with self._lock:
            try:
                wire.send(self._sock, {"op": operation, **fields})
                document, fds = wire.receive(self._sock)
            except TimeoutError as error:
                raise StalledError(f"the agent at {self.path} does not answer", hint="see its log") from error
            except (wire.ClosedError, OSError, ValueError) as error:
                raise MemberDownError(
                    f"the agent at {self.path} has gone away", cause=str(error) or None, hint="start it again"
                ) from error
        wire.raise_error(document)
        return document, fds

    def open(self, slot: str, ident: str | None = None, *, devices: bool = False) -> OpenedSlot:
        """A lease on a slot's generation (the current one), held until this connection closes or `release`.
        `devices`: it may be on one. Raises NotFoundError, IncompatibleError (it is, and may not).
        """
        document, fds = self.call_fds("open", slot=slot, ident=ident, devices=devices)
        known = [SlotFile.from_json(item) for item in document["files"]]
        spaces = iter(fds[len(known) :])
        files = tuple(
            OpenedFile(file.name, fd, file.size, file.header, file.space, -1 if file.space is None else next(spaces))
            for file, fd in zip(known, fds[: len(known)], strict=True)
        )
        return OpenedSlot(
            slot, document["ident"], document["generation"], document["fingerprint"], document["source"], files
        )

    def current(self, slot: str) -> Mapping[str, Any] | None:  # Any: JSON
        """The document of the generation that serves, or None."""
        try:
            found = self.call("ls", slot=slot)["slots"]
        except NotFoundError:
            return None
        return next((item for item in found if item["state"] == "ready"), None)

    def close(self) -> None:
        self._sock.close()

    def __del__(self) -> None:
        # a lease that hangs on a mapping ends with it, without anybody's call
        sock = getattr(self, "_sock", None)
        if sock is not None:
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
