"""A slot in an engine's own format, from the engine's end: the first engine fills it, the next ones map it. No torch:
memory is bytes here, `kvctl.weights.engine_layout` says what they are.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Final

from kvctl.agent.client import AgentClient
from kvctl.agent.generations import SlotFile, check_name
from kvctl.agent.memory import LeasedMap, MemfdBuffer, map_shared
from kvctl.agent.target import close_files
from kvctl.core.addresses import parse_store
from kvctl.core.errors import ConflictError, NotFoundError, UsageError
from kvctl.transports.options import check_names
from kvctl.weights.engine_layout import FILE, EngineLayout
from kvctl.weights.safetensors import parse_header

PATIENCE: Final = 120.0  # seconds that another engine may take to fill the slot
_NAP: Final = 0.2


@dataclass(frozen=True, slots=True)
class Mapped:
    """A generation of the slot in this process: copy-on-write, and leased for as long as `memory` lives."""

    layout: EngineLayout
    start: int  # where the data section begins
    memory: LeasedMap
    ident: str


class EngineSlot:
    """`text`: NAME, slot:NAME or slot://NAME?socket=PATH. Raises UsageError."""

    def __init__(self, text: str, rank: int = 0, ranks: int = 1) -> None:
        """Each rank of an engine has a slot of its own."""
        store = parse_store(text if "://" in text else f"slot://{text.removeprefix('slot:')}")
        check_names("slot", store.options, ("socket",))
        if store.scheme != "slot":
            raise UsageError(f"{text!r} is no slot", hint="NAME, or slot://NAME?socket=PATH")
        self.name = store.url.removeprefix("slot://") + (f".rank{rank}of{ranks}" if ranks > 1 else "")
        self.socket = store.options.get("socket")
        check_name(self.name)

    def open(self) -> Mapped | None:
        """What it serves, None when it holds nothing. Raises EnvError (no agent), FormatError; UsageError when a
        checkpoint is in it.
        """
        client = AgentClient(self.socket, label="engine")
        try:
            opened = client.open(self.name)
        except NotFoundError:
            client.close()
            return None
        except BaseException:
            client.close()
            raise
        try:
            file = next((file for file in opened.files if file.name == FILE and file.header), None)
            if file is None:
                raise UsageError(
                    f"slot {self.name} holds a checkpoint, not what an engine laid out",
                    hint="give engine_slot a name of its own; a checkpoint's slot is a source: slot:NAME",
                )
            where = f"slot {self.name}"
            header = parse_header(os.pread(file.fd, file.header, 0), file.size, where)
            tensors = [(item.name, item.dtype, item.shape) for item in header.tensors]
            layout = EngineLayout.parse(header.metadata, tensors, where)
            # the lease is the mapping's: this client lives as long as it
            memory = map_shared(os.dup(file.fd), file.size, client, private=True)
            return Mapped(layout, file.header, memory, opened.ident)
        except BaseException:
            client.close()
            raise
        finally:
            close_files(opened)

    def fill(self, layout: EngineLayout) -> Filling | None:
        """Memory for a new generation, beside one that serves another layout; None when the slot has exactly this
        already. Raises EnvError, CapacityError; ConflictError when another engine fills it and takes too long.
        """
        client = AgentClient(self.socket, label="engine")
        deadline = time.monotonic() + PATIENCE
        try:
            while True:
                try:
                    return self._reserve(client, layout)
                except ConflictError:
                    if time.monotonic() > deadline:
                        raise
                time.sleep(_NAP)
        except BaseException:
            client.close()
            raise

    def _reserve(self, client: AgentClient, layout: EngineLayout) -> Filling | None:
        header = layout.header()
        size = len(header) + layout.nbytes
        other = client.current(self.name) is not None
        answer, fds = client.call_fds(
            "reserve",
            slot=self.name,
            fingerprint=layout.fingerprint,
            source=layout.source,
            files=[SlotFile(FILE, size, len(header)).to_json()],
            facts={"tensors": len(layout.tensors), "format": layout.engine},
            runs=0,
            swap=other,
            evict_first=other,  # where both do not fit, and nobody uses it
            evict=False,
        )
        if answer["state"] == "present":
            client.close()
            return None
        os.close(fds[1])  # which runs have landed: there are none
        return Filling(self, client, str(answer["ident"]), layout, MemfdBuffer(fds[0], size), header)


class Filling:
    """`data`: the data section, to be written. Then `map` it, let go of every view of `data`, and `commit`."""

    def __init__(
        self,
        slot: EngineSlot,
        client: AgentClient,
        ident: str,
        layout: EngineLayout,
        buffer: MemfdBuffer,
        header: bytes,
    ) -> None:
        self._slot = slot
        self._client = client
        self._ident = ident
        self._layout = layout
        self._buffer = buffer
        self._start = len(header)
        buffer.view[: self._start] = header
        self.data = buffer.view[self._start :]

    def map(self) -> Mapped:
        """The same memory copy-on-write, for good; without a lease before `commit`."""
        memory = map_shared(os.dup(self._buffer.fd), self._buffer.nbytes, None, private=True)
        return Mapped(self._layout, self._start, memory, self._ident)

    def commit(self, mapped: Mapped) -> None:
        """Seal it and let it serve; `mapped` gets its lease. Raises KvctlError: then nobody else has it, and what is
        mapped stays with who mapped it.
        """
        with contextlib.suppress(BufferError):
            self.data.release()  # else unmapping says so
        self._buffer.unmap()
        self._client.call("stage", ident=self._ident)
        lease = AgentClient(self._slot.socket, label="engine")
        try:
            close_files(lease.open(self._slot.name, self._ident))
            self._client.call("commit", ident=self._ident, keep_previous=False)
        except BaseException:
            lease.close()
            raise
        mapped.memory.lease = lease
        self.close()

    def close(self) -> None:
        """What was not committed is the agent's to free."""
        self._buffer.close()
        self._client.close()
