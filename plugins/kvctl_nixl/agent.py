"""`Agent`: one NIXL agent with one back end, and its transfers. Owned by one thread at a time."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from kvctl.core.errors import EnvError
from kvctl_nixl.library import load

_NAMES: Final = itertools.count()
_RUN: Final = secrets.token_hex(4)

Region = tuple[int, int, int]  # address or offset, length, device (file descriptor, key number, GPU)


class NixlError(Exception):
    """NIXL's word for what went wrong, such as NIXL_ERR_BACKEND. It names no cause: whoever catches it finds one."""


class Transfer:
    """A posted transfer. `poll` until it says True; only then may its memory be used or its agent closed."""

    def __init__(self, agent: Agent, handle: Any) -> None:  # Any: NIXL's handle
        self._agent = agent
        self._handle = handle
        self.ended = False

    def poll(self) -> bool:
        """Whether it ended, well. Raises NixlError when it ended otherwise."""
        if self.ended:
            return True
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
        self._agent.running -= 1
        handle, self._handle = self._handle, None
        try:
            handle.release()
        except Exception:  # nothing depends on it: it ended
            return


class Agent:
    """`params` go to the back end as they are. Raises EnvError when it cannot be made."""

    def __init__(self, backend: str, params: Mapping[str, str], *, build: str = "auto") -> None:
        nixl = load(build)
        self.name = f"kvctl-{os.getpid()}-{_RUN}-{next(_NAMES)}"
        self.backend = backend
        self.running = 0
        try:
            # the progress thread burns half a core; whoever waits for a transfer drives it
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
            self.api: Any = nixl.nixl_agent(self.name, config)
            plugins = self.api.get_plugin_list()
            if backend not in plugins:
                raise EnvError(f"this NIXL has no plug-in {backend}", cause=f"it has {', '.join(sorted(plugins))}")
            self.api.create_backend(backend, dict(params))
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
        self.running += 1
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

    def close(self) -> None:
        """Give back what it holds. Waits for what is in flight: keep an agent with abandoned transfers instead."""
        self.api = None


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
