"""Slots for peers by one-sided transports: what serves is published under `SLOT/FILE`, registered once a file, and
withdrawn before it is freed. The publisher is a plug-in's, found by the entry-point group `kvctl.peer_sources`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Final, Protocol

from kvctl.agent.generations import HAVE, Holder, State, devices_of
from kvctl.agent.memory import SealedBuffer
from kvctl.agent.slots import Slots
from kvctl.core.errors import ConfigError, EnvError, KvctlError, NotFoundError
from kvctl.memory.buffers import Buffer
from kvctl.transports.registry import load_object, probe, transport_specs

GROUP: Final = "kvctl.peer_sources"
_SECONDS: Final = 30.0


class PeerSource(Protocol):
    """Buffers of this process, offered under names to readers elsewhere. A published buffer stays, unchanged, until
    `withdraw` says that nothing of it is on its way any more (False: it may be, the memory must be kept).
    """

    @property
    def url(self) -> str: ...
    def publish(self, name: str, buffer: Buffer) -> str: ...
    def withdraw(self, name: str, timeout: float = _SECONDS) -> bool: ...
    def close(self) -> None: ...


def open_source(kind: str, listen: tuple[str, int], key_file: str | None) -> PeerSource:
    """`kind`: the name of the transport that readers use. Raises EnvError where it cannot run here, and why."""
    spec = transport_specs().get(kind)
    found = next(iter(entry_points(group=GROUP, name=kind)), None)
    if spec is None or found is None:
        raise EnvError(f"no plug-in publishes slots for {kind}", hint="see `kvctl transports ls`")
    result = probe(spec)
    if not result.available:
        raise EnvError(f"{kind} is not available", cause=result.reason, hint=result.hint or spec.install_hint)
    factory: Callable[..., Any] = load_object(found.value)  # Any: the plug-in's own class
    source: PeerSource = factory(listen[0], listen[1], key=_key(key_file))
    return source


def _key(path: str | None) -> bytes:
    if path is None:
        return b""
    try:
        with open(path, "rb") as file:
            return file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read", cause=error.strerror) from error


class Publisher:
    """Keeps what is published equal to what serves, on a thread of its own: `changed` wakes it."""

    def __init__(self, source: PeerSource, slots: Slots, holder: Holder, note: Callable[[str], None]) -> None:
        self._source = source
        self._slots = slots
        self._holder = holder
        self._note = note
        self._work = threading.Event()
        self._over = False
        self._published: dict[str, tuple[str, dict[str, SealedBuffer]]] = {}
        self._thread = threading.Thread(target=self._follow, name="kvctl-publish", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return self._source.url

    def changed(self) -> None:
        self._work.set()

    def _follow(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            if self._over:
                return
            self._reconcile()

    def _reconcile(self) -> None:
        """Publish generations that have begun to serve, withdraw those that have ended. Not what is on a device."""
        found = [item for item in self._slots.generations() if item.state is State.READY and not devices_of(item.files)]
        serving = {item.slot: item.ident for item in found}
        for slot, (ident, _) in list(self._published.items()):
            if serving.get(slot) != ident:
                self._withdraw(slot)
        for slot, ident in serving.items():
            if slot not in self._published:
                self._publish(slot, ident)

    def _publish(self, slot: str, ident: str) -> None:
        try:
            generation, fds = self._slots.acquire_fds(slot, self._holder, ident)
        except NotFoundError:
            return  # it has gone meanwhile
        # readers elsewhere hold no lease, and ours would keep a slot from being unloaded: `withdraw` waits for them
        self._slots.release(self._holder, generation)
        buffers: dict[str, SealedBuffer] = {}
        try:
            for file, fd in zip(generation.files, fds, strict=False):
                if file.name != HAVE and file.size:
                    buffers[file.name] = SealedBuffer(fd, file.size)
                    self._source.publish(f"{slot}/{file.name}", buffers[file.name])
        except KvctlError as error:
            self._note(f"slot {slot} cannot be published: {error}")
        finally:
            for fd in fds:
                os.close(fd)
        self._published[slot] = (ident, buffers)

    def _withdraw(self, slot: str) -> None:
        _, buffers = self._published.pop(slot)
        for name, buffer in buffers.items():
            if self._source.withdraw(f"{slot}/{name}"):
                buffer.close()
            else:
                self._note(f"slot {slot}: a reader of {name} does not end: its memory is kept")

    def close(self) -> None:
        self._over = True
        self._work.set()
        self._thread.join()
        self._source.close()
