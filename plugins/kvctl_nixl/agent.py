"""`Agent`: one NIXL agent with one back end, and its transfers. Owned by one thread at a time.

The libraries under NIXL end with the process, in an order of their own: an agent that is still there then, or a
transfer that still runs, makes them crash or wait for ever. So what is left is closed while Python still runs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import secrets
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from kvctl.core.errors import EnvError
from kvctl_nixl.library import load

_NAMES: Final = itertools.count()
_RUN: Final = secrets.token_hex(4)

_EXIT_SECONDS: Final = 5.0  # what transfers in flight get at the end of the process

Region = tuple[int, int, int]  # address or offset, length, device (file descriptor, key number, GPU)


class NixlError(Exception):
    """NIXL's word for what went wrong, such as NIXL_ERR_BACKEND. It names no cause: whoever catches it finds one."""


class Transfer:
    """A posted transfer. `poll` until it says True; only then may its memory be used or its agent closed."""

    def __init__(self, agent: Agent, handle: Any) -> None:  # Any: NIXL's handle
        self._agent = agent
        self._handle = handle
        self.ended = False
        agent.transfers.add(self)

    def poll(self) -> bool:
        """Whether it ended, well. Raises NixlError when it ended otherwise."""
        if self.ended:
            return True
        if self._agent.api is None:
            raise NixlError("its agent is closed")
        try:
            state = self._agent.api.check_xfer_state(self._handle)
        except Exception as error:  # NIXL raises its own classes, which share no base
            self._end()
            raise NixlError(str(error)) from None
        if state == "PROC":
            return False
        self._end()
        if state != "DONE":
            raise NixlError(state)
        return True

    def _end(self) -> None:
        self.ended = True
        self._agent.transfers.discard(self)
        handle, self._handle = self._handle, None
        try:
            handle.release()
        except Exception:  # nothing depends on it: it ended
            return


class Agent:
    """`params` go to the back end as they are. `port` is where its connections go, if they are TCP: cutting them is the
    one way to end a transfer. Raises EnvError when it cannot be made.
    """

    def __init__(
        self, backend: str, params: Mapping[str, str], *, build: str = "auto", port: int | None = None
    ) -> None:
        nixl = load(build)
        self.name = f"kvctl-{os.getpid()}-{_RUN}-{next(_NAMES)}"
        self.backend = backend
        self.port = port
        self.transfers: set[Transfer] = set()
        try:
            # the progress thread burns half a core; whoever waits for a transfer drives it
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
            self.api: Any = nixl.nixl_agent(self.name, config)
            plugins = self.api.get_plugin_list()
            if backend not in plugins:
                raise EnvError(f"this NIXL has no plug-in {backend}", cause=f"it has {', '.join(sorted(plugins))}")
            self.api.create_backend(backend, dict(params))
            _LIVE.add(self)
        except EnvError:
            raise
        except Exception as error:
            raise EnvError(
                f"NIXL's back end {backend} cannot be made",
                cause=f"{error}",
                hint="NIXL_LOG_LEVEL=INFO shows what NIXL says about it",
            ) from None

    def register(self, kind: str, regions: Sequence[tuple[int, int, int, str]]) -> Any:  # Any: NIXL's list
        """Register (address, length, device, meta) regions of memory `kind`. Raises NixlError."""
        try:
            return self.api.register_memory(list(regions), kind, [self.backend])
        except Exception as error:
            raise NixlError(str(error)) from None

    def deregister(self, registered: Any) -> None:
        """Raises NixlError."""
        try:
            self.api.deregister_memory(registered, [self.backend])
        except Exception as error:
            raise NixlError(str(error)) from None

    def start(
        self,
        operation: Literal["READ", "WRITE"],
        local: tuple[str, Any],
        remote: tuple[str, Any],
        peer: str | None = None,
    ) -> Transfer:
        """Post a transfer between `local` and `remote`: (kind, N x 3 array or list of `Region`). May do all of the work
        before it returns. Raises NixlError.
        """
        try:
            handle = self.api.initialize_xfer(
                operation,
                self.api.get_xfer_descs(local[1], local[0]),
                self.api.get_xfer_descs(remote[1], remote[0]),
                peer or self.name,
                backends=[self.backend],
            )
        except Exception as error:
            raise NixlError(str(error)) from None
        transfer = Transfer(self, handle)
        try:
            state = self.api.transfer(handle)
        except Exception as error:
            transfer._end()
            raise NixlError(str(error)) from None
        if state not in {"DONE", "PROC"}:
            transfer._end()
            raise NixlError(state)
        if state == "DONE":
            transfer._end()
        return transfer

    def metadata(self) -> bytes:
        """What another agent must know to reach this one and its registered memory. Raises NixlError."""
        try:
            return bytes(self.api.get_agent_metadata())
        except Exception as error:
            raise NixlError(str(error)) from None

    def add_peer(self, metadata: bytes) -> str:
        """Know another agent, or more of its memory; its name. Raises NixlError."""
        try:
            name = self.api.add_remote_agent(metadata)
        except Exception as error:
            raise NixlError(str(error)) from None
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Nothing may be in flight with it. Raises NixlError."""
        try:
            self.api.remove_remote_agent(name)
        except Exception as error:
            raise NixlError(str(error)) from None

    def progress(self) -> None:
        """Let others read and write this agent's memory: without a progress thread, nothing moves by itself."""
        try:
            self.api.get_new_notifs([self.backend])
        except Exception as error:
            raise NixlError(str(error)) from None

    @property
    def running(self) -> int:
        """Transfers that were not seen to end."""
        return len(self.transfers)

    def close(self) -> None:
        """Give back what it holds. Waits for what is in flight: `abandon` an agent with transfers instead."""
        _LIVE.discard(self)
        self.api = None

    def abandon(self) -> None:
        """Nobody closes it any more: it has transfers that may never end. What can be done at the end of the process is
        done then.
        """
        _ABANDONED.append(self)

    def end_transfers(self, seconds: float) -> bool:
        """Wait for what is in flight. Whether all of it ended."""
        deadline = time.monotonic() + seconds
        while True:
            for transfer in list(self.transfers):
                with contextlib.suppress(NixlError):
                    transfer.poll()
            if not self.transfers:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)


_LIVE: Final[weakref.WeakSet[Agent]] = weakref.WeakSet()
_ABANDONED: Final[list[Agent]] = []


@atexit.register
def _end() -> None:
    """At the end of the process: no agent of a back end is left, if that can be had."""
    agents = [agent for agent in _LIVE if agent.api is not None]
    ports = {agent.port for agent in agents if agent.transfers and agent.port is not None}
    if ports:
        _cut(ports)
    for agent in agents:
        if agent.end_transfers(_EXIT_SECONDS):
            agent.close()
        else:
            # its destructor would wait for ever
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent.api))


def _cut(ports: set[int]) -> None:
    """Shut down this process's TCP connections to `ports`."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in {socket.AF_INET, socket.AF_INET6} and connection.getpeername()[1] in ports:
                connection.shutdown(socket.SHUT_RDWR)


def rows(start: int, length: int, device: int, piece: int) -> Any:  # Any: an N x 3 array of NIXL's
    """Descriptors of at most `piece` bytes that cover [start, start + length)."""
    import numpy as np

    count = (length + piece - 1) // piece
    table = np.empty((count, 3), dtype=np.uint64)
    table[:, 0] = start + np.arange(count, dtype=np.uint64) * np.uint64(piece)
    table[:, 1] = piece
    table[-1, 1] = length - (count - 1) * piece
    table[:, 2] = device
    return table
