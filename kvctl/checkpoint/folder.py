"""The folder of a checkpoint that is being written: which files it has already, from an earlier run that ended in the
middle, or out of the last checkpoint by the store itself.

A run that dies leaves its folder with a list of what is there; the next run of the same source takes it over, compares
content, and writes what is missing or different.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace

import blake3

from kvctl.checkpoint import names
from kvctl.checkpoint.catalog import Catalog
from kvctl.checkpoint.names import Entry, Manifest
from kvctl.checkpoint.shards import Shard
from kvctl.core.errors import (
    AuthError,
    ConflictError,
    FormatError,
    IncompatibleError,
    IntegrityError,
    KvctlError,
    NotFoundError,
)
from kvctl.repo.locking import LockingStore
from kvctl.transports.api import Copied


class Folder:
    """Belongs to the holder of the name's lock; `written` may be called from several threads. `notes`: what the report
    tells people.
    """

    def __init__(
        self, store: LockingStore, catalog: Catalog, source: str, shards: Sequence[Shard], notes: list[str]
    ) -> None:
        self.ident = ""
        self.there: dict[str, Entry] = {}
        self._store = store
        self._catalog = catalog
        self._source = source
        # the names and sizes that it will have
        self._plan = blake3.blake3(json.dumps([[shard.name, shard.size] for shard in shards]).encode()).hexdigest()[:32]
        self._notes = notes
        self._previous: Manifest | None = None
        self._noting = threading.Lock()

    def key(self, name: str) -> str:
        return f"{self.ident}/{name}"

    def find(self) -> None:
        """Take over an unfinished one of the same source, else begin a new one; remove other unfinished ones (we hold
        the lock, so nobody writes them).
        """
        for ident in self._catalog.unfinished():
            try:
                found = names.parse_partial(self._store.get(f"{ident}/{names.PARTIAL}"))
            except (ValueError, NotFoundError):
                continue
            if not self.ident and found[:2] == (self._source, self._plan):
                self.ident, self.there = ident, found[2]
                self._notes.append(f"resumed {ident}: {len(self.there)} files were there")
            else:
                self._catalog.remove(ident)
        complete = self._catalog.complete()
        self._previous = self._last(complete)
        if not self.ident:
            self.ident = names.new_id(self._store.now(), complete[-1] if complete else None)
        self._note()

    def _last(self, complete: Sequence[str]) -> Manifest | None:
        """The last checkpoint, to share files with. A damaged one is no reason to write no other."""
        try:
            return self._catalog.manifest(complete[-1]) if complete else None
        except (FormatError, NotFoundError) as error:
            self._notes.append(f"nothing of {complete[-1]} is reused: {error}")
            return None

    def _note(self) -> None:
        data = names.partial_json(self._source, self._plan, self.there)
        self._store.put(self.key(names.PARTIAL), data)

    def has(self, name: str, entry: Entry) -> bool:
        """Whether an earlier run wrote just this, and it is still what it was; else the list forgets it: it is about to
        become another generation's.
        """
        noted = self.there.get(name)
        if noted is None:
            return False
        if entry.same(noted) and self._is_there(name, noted):
            return True
        with self._noting:
            del self.there[name]
            self._note()
        return False

    def _is_there(self, name: str, entry: Entry) -> bool:
        try:
            found = self._store.stat(self.key(name))
        except NotFoundError:
            return False
        return found.size == entry.size and entry.version in {"", found.version}

    def reuse(self, name: str, entry: Entry) -> Copied | None:
        """Let the store make the file of one of the last checkpoint that holds the same and was not touched since it
        was written; None where it is to be sent.
        """
        if self._previous is None or not self._store.capabilities.copy:
            return None
        same = next(((old, it) for old, it in self._previous.files.items() if entry.same(it) and it.version), None)
        if same is None:
            return None
        origin = f"{self._previous.ident}/{same[0]}"
        try:
            copied = self._store.copy(origin, self.key(name), if_version=same[1].version)
        except (NotFoundError, ConflictError, AuthError, IncompatibleError) as error:
            self._notes.append(f"{origin} could not be reused, it is sent again: {error}")
            return None
        self._has(name, replace(entry, version=copied.info.version))
        return copied

    def written(self, name: str, entry: Entry) -> None:
        """The file was sent. Raises IntegrityError when the store shows another size."""
        try:
            info = self._store.stat(self.key(name))
        except KvctlError:
            self._has(name, entry)  # without a version the next checkpoint sends it again, no worse
            return
        if info.size != entry.size:
            raise IntegrityError(f"{self._store.url}/{self.key(name)} has {info.size} bytes, {entry.size} were written")
        self._has(name, replace(entry, version=info.version))

    def _has(self, name: str, entry: Entry) -> None:
        with self._noting:
            self.there[name] = entry
            self._note()

    def clean(self, wanted: set[str]) -> None:
        """What an earlier try left here and this one has not is no part of the checkpoint."""
        keep = {*wanted, names.PARTIAL}
        start = self.key("")
        self._store.delete([info.key for info in self._store.list(start) if info.key.removeprefix(start) not in keep])
