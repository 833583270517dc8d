"""The agent's slots as the objects of a storage node, so that other hosts read them with the node's own client, tokens
and limits. Read only.

    SLOT/.agent.json         which agent this is; under any slot's name, where a key may be good for one only
    SLOT/.slot.json          the generation that serves, and its files
    SLOT/IDENT/FILE          a file of a generation; also while it is loaded, when IDENT is its fingerprint
    SLOT/FINGERPRINT/.have   8 bytes for each run of the load: the XXH3 of its bytes when they are there, else 0
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Final, Self

from kvctl.agent.generations import HAVE, State, devices_of
from kvctl.agent.slots import Slots
from kvctl.core.errors import AuthError, KvctlError, NotFoundError
from kvctl.memory.shareable import make_memfd
from kvctl.node.tree import Draft, Stat, Tree, check_name

AGENT_DOCUMENT: Final = ".agent.json"
SLOT_DOCUMENT: Final = ".slot.json"
DOCUMENT_SCHEMA: Final = "kvctl.peer-slot/1"


class SlotTree(Tree):
    """See `kvctl.node.tree.Tree`. Its folder is empty: lists show nothing, `.slot.json` names what there is."""

    def __init__(self, root: str, slots: Slots, ident: str) -> None:
        super().__init__(root)
        self._ident = ident
        self.in_memory = True
        self._slots = slots

    @classmethod
    def make(cls, slots: Slots, ident: str) -> Self:
        folder = tempfile.mkdtemp(prefix="kvctl-agent-")
        try:
            return cls(folder, slots, ident)
        finally:
            os.rmdir(folder)  # its descriptor is enough, and an agent that is killed leaves nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_identified(self, key: str) -> tuple[int, Stat, tuple[int, ...]]:
        parts = check_name(key)
        if parts[-1] in {SLOT_DOCUMENT, AGENT_DOCUMENT}:
            data = self._document(parts)
            fd = make_memfd(key, len(data))
            os.pwrite(fd, data, 0)
            return fd, Stat(len(data), "document", 0), ()
        if len(parts) != 3:
            raise NotFoundError(f"{key}: no such object")
        generation, fd, file = self._slots.lend(parts[0], parts[1], parts[2])
        moment = int(generation.created * 1e9)
        return fd, Stat(file.size, generation.ident, moment), (moment, generation.number, file.size)

    def identity(self, key: str) -> tuple[int, ...] | None:
        parts = key.split("/")
        if len(parts) != 3:
            return None  # the document is made anew each time
        try:
            generation, fd, file = self._slots.lend(parts[0], parts[1], parts[2])
        except KvctlError:
            return None
        os.close(fd)
        return int(generation.created * 1e9), generation.number, file.size

    def create(self, key: str, size: int) -> Draft:
        raise _read_only(key)

    def delete(self, key: str, if_version: str | None = None) -> None:
        raise _read_only(key)

    def abort(self, ident: str) -> None:
        raise _read_only(ident)

    def free_bytes(self) -> int:
        return max(0, self._slots.budget - self._slots.used_bytes)

    def _document(self, parts: list[str]) -> bytes:
        if len(parts) == 2 and parts[1] == AGENT_DOCUMENT:
            return json.dumps({"schema": DOCUMENT_SCHEMA, "agent": self._ident}).encode()
        if len(parts) != 2:
            raise NotFoundError(f"{'/'.join(parts)}: no such object")
        slot = parts[0]
        found = [item for item in self._slots.generations() if item.slot == slot and item.state is State.READY]
        if not found:
            raise NotFoundError(f"{slot}: no such slot, or nothing serves in it")
        serving = found[-1]
        if devices_of(serving.files):
            raise NotFoundError(f"{slot} is on {self._slots.where(serving.files)}: peers read host memory only")
        return json.dumps(
            {
                "schema": DOCUMENT_SCHEMA,
                "slot": slot,
                "ident": serving.ident,
                "fingerprint": serving.fingerprint,
                "source": serving.source,
                "files": [[file.name, file.size, file.header] for file in serving.files if file.name != HAVE],
            }
        ).encode()


def _read_only(key: str) -> AuthError:
    return AuthError(f"{key}: an agent's slots are read only for peers")
