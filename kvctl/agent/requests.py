"""What a connection may ask of the agent: one document in, one out. The documents of `ls` are the CLI's own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvctl.agent.generations import HOST, Generation, Holder, Reserve, SlotFile, State, devices_of
from kvctl.agent.kv_requests import KvRequests
from kvctl.agent.memory import dup_all, seal
from kvctl.core.errors import ConflictError, IncompatibleError, UsageError

if TYPE_CHECKING:
    from kvctl.agent.server import Agent

LIST_SCHEMA: Final = "kvctl.agent/1"

Document = dict[str, Any]  # Any: JSON
Answer = tuple[Document, Sequence[int]]


class Session:
    """One connection: what it holds ends with `close`."""

    def __init__(self, agent: Agent, holder: Holder) -> None:
        self._agent = agent
        self._holder = holder
        self._kv = KvRequests(agent.kv, holder.ident)
        self._made: dict[str, Generation] = {}
        self._leases: dict[str, Generation] = {}
        self._ops: dict[str, Callable[[Document], Answer]] = {
            "hello": self._hello,
            "ls": self._ls,
            "reserve": self._reserve,
            "stage": self._stage,
            "commit": self._commit,
            "abandon": self._abandon,
            "open": self._open,
            "release": self._release,
            "unload": self._unload,
            "rollback": self._rollback,
            **self._kv.ops,
        }

    def answer(self, document: Document) -> Answer:
        """The answer, and descriptors that the caller closes when they are sent. Raises KvctlError for what the
        client is told; KeyError, ValueError and TypeError for nonsense.
        """
        operation = self._ops.get(str(document.get("op")))
        if operation is None:
            raise UsageError(f"the agent knows no {document.get('op')!r}", hint="is it an older kvctl?")
        return operation(document)

    def close(self) -> None:
        self._agent.slots.release(self._holder)
        self._kv.close()

    def _hello(self, document: Document) -> Answer:
        self._holder = Holder(self._holder.ident, self._holder.pid, str(document.get("label", ""))[:64])
        return {"pid": os.getpid(), "peers": self._agent.peers_url, "ident": self._agent.ident}, ()

    def _ls(self, document: Document) -> Answer:
        slots = self._agent.slots
        name = document.get("slot")
        if name is not None:
            slots.check_known(str(name))
        with slots.lock:
            found = [self._describe(item) for item in slots.generations() if name is None or item.slot == name]
            used = slots.used()
        return {
            "schema": LIST_SCHEMA,
            "socket": self._agent.settings.socket,
            "pid": os.getpid(),
            "peers": self._agent.peers_url,
            "budget_bytes": slots.budget,
            "used_bytes": used[HOST],
            "devices": [
                {"device": budget.name, "ident": ident, "budget_bytes": budget.nbytes, "used_bytes": used[ident]}
                for ident, budget in slots.devices.items()
            ],
            "slots": found,
            "kv": None if self._agent.kv is None or name is not None else self._agent.kv.describe(),
        }, ()

    def _describe(self, item: Generation) -> Document:
        return describe(item, self._agent.slots.where(item.files))

    def _reserve(self, document: Document) -> Answer:
        ask = Reserve(
            slot=str(document["slot"]),
            fingerprint=str(document["fingerprint"]),
            source=str(document["source"]),
            files=tuple(SlotFile.from_json(item) for item in document["files"]),
            facts=dict(document["facts"]),
            swap=bool(document["swap"]),
            evict_first=bool(document["evict_first"]),
            evict=bool(document["evict"]),
        )
        made = self._agent.reserve(ask, self._holder, int(document["runs"]))
        if made is None:
            return {"state": "present"}, ()
        self._made[made.ident] = made
        return {"state": "reserved", "ident": made.ident, "number": made.number}, dup_all(made.handles)

    def _mine(self, document: Document) -> Generation:
        made = self._made.get(str(document["ident"]))
        if made is None:
            raise ConflictError(f"generation {document['ident']} is not being loaded by this client")
        return made

    def _stage(self, document: Document) -> Answer:
        made = self._mine(document)
        for file, fd in zip(made.files[:-1], made.handles, strict=False):
            seal(fd, f"{made.slot}/{file.name}")
        self._agent.slots.stage(made)
        return {"ident": made.ident}, ()

    def _commit(self, document: Document) -> Answer:
        made = self._mine(document)
        self._agent.slots.commit(made, keep_previous=bool(document["keep_previous"]))
        del self._made[made.ident]
        self._agent.changed()
        return self._describe(made), ()

    def _abandon(self, document: Document) -> Answer:
        made = self._mine(document)
        self._agent.slots.abandon(made)
        del self._made[made.ident]
        return {}, ()

    def _open(self, document: Document) -> Answer:
        ident = document.get("ident")
        asked = str(document["slot"])
        found, fds = self._agent.slots.acquire_fds(asked, self._holder, None if ident is None else str(ident))
        if devices_of(found.files) and not document.get("devices"):
            for fd in fds:
                os.close(fd)
            self._agent.slots.release(self._holder, found)
            where = self._agent.slots.where(found.files)
            raise IncompatibleError(
                f"slot {asked} is on {where}, which only kvctl.attach reads",
                hint=f"kvctl.attach({asked!r}, device=..), or load the weights into a slot in host memory too",
            )
        self._leases[found.ident] = found
        os.close(fds.pop(len(found.files) - 1))  # the last file says what has landed
        files = [file.to_json() for file in found.files[:-1]]
        return {**self._describe(found), "files": files}, fds

    def _release(self, document: Document) -> Answer:
        found = self._leases.get(str(document["ident"]))
        if found is not None:
            self._agent.slots.release(self._holder, found)
        return {}, ()

    def _unload(self, document: Document) -> Answer:
        freed = self._agent.slots.unload(
            str(document["slot"]), force=bool(document["force"]), previous_only=bool(document["previous_only"])
        )
        self._agent.changed()
        return {"slot": document["slot"], "freed_bytes": freed}, ()

    def _rollback(self, document: Document) -> Answer:
        found = self._agent.slots.rollback(str(document["slot"]))
        self._agent.changed()
        return self._describe(found), ()


def describe(item: Generation, device: str) -> Document:
    """A generation as `agent ls` shows it."""
    landed = None
    if item.state is State.LOADING and item.handles:
        last = len(item.files) - 1
        have = memoryview(os.pread(item.handles[last], item.files[last].size, 0)).cast("Q")
        landed = len(have) - have.tolist().count(0)
    return {
        "slot": item.slot,
        "generation": item.number,
        "ident": item.ident,
        "state": item.state.value,
        "device": device,
        "bytes": item.nbytes,
        "tensors": item.facts.get("tensors"),
        "format": item.facts.get("format", "checkpoint"),
        "source": item.source,
        "fingerprint": item.fingerprint,
        "loader": item.loader.pid if item.loader else None,
        "landed_runs": landed,
        "leases": item.lease_count,
        "holders": [
            {"pid": holder.pid, "label": holder.label, "leases": count} for holder, count in item.leases.values()
        ],
        "age_s": round(time.time() - item.created, 3),
    }
