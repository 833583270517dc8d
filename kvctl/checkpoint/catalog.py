"""Checkpoints that are there: list, check, remove, and read back."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import blake3

from kvctl.checkpoint import names
from kvctl.checkpoint.lock import Lock
from kvctl.checkpoint.names import DIGESTS, Manifest
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import FormatError, IntegrityError, NotFoundError, UsageError
from kvctl.repo.locking import LockingStore
from kvctl.transfer.lanes import open_member
from kvctl.transfer.report import Report
from kvctl.transports.api import Store
from kvctl.weights.load import run_load
from kvctl.weights.request import LoadRequest

LIST_SCHEMA: Final = "kvctl.checkpoints/1"


class Catalog:
    """The checkpoints under one name. `store` is of that folder."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[str, set[str]] = {}

    def _folders(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for info in self._store.list(""):
            ident, slash, name = info.key.partition("/")
            if slash and names.is_id(ident):
                found.setdefault(ident, set()).add(name)
        return found

    def complete(self) -> list[str]:
        """Ids, oldest first."""
        return sorted(ident for ident, files in self._folders().items() if names.MANIFEST in files)

    def unfinished(self) -> list[str]:
        """Ids of those that are being written, or were when their writer died; newest first."""
        folders = self._folders().items()
        return sorted(
            (i for i, files in folders if names.MANIFEST not in files and names.PARTIAL in files), reverse=True
        )

    def latest(self) -> str | None:
        """What LATEST names."""
        try:
            text = self._store.get(names.LATEST).decode("ascii", "replace").strip()
        except NotFoundError:
            return None
        if not names.is_id(text):
            raise FormatError(f"{self._store.url}/{names.LATEST} names no checkpoint", cause=text[:60])
        return text

    def check_ours(self) -> None:
        """Before anything is written: somebody else's LATEST is not ours to replace. Raises UsageError."""
        with contextlib.suppress(NotFoundError):
            text = self._store.get(names.LATEST).decode("utf-8", "replace").strip()
            if text and not names.is_id(text):
                raise UsageError(
                    f"{self._store.url}/{names.LATEST} is there, and names no checkpoint",
                    cause=text[:60],
                    hint="choose another URL/NAME, or remove it",
                )

    def manifest(self, ident: str) -> Manifest:
        """Raises NotFoundError, FormatError."""
        key = f"{ident}/{names.MANIFEST}"
        try:
            return names.parse_manifest(self._store.get(key), f"{self._store.url}/{key}")
        except NotFoundError as error:
            known = ", ".join(self.complete()[-3:]) or "none"
            raise NotFoundError(f"{self._store.url} has no checkpoint {ident}", cause=f"latest: {known}") from error

    def resolve(self, ident: str | None) -> str:
        """The id, or the one that LATEST names. Raises NotFoundError."""
        found = ident or self.latest()
        if found is None:
            raise NotFoundError(f"{self._store.url} has no checkpoint", hint="make one with `kvctl checkpoint create`")
        self.manifest(found)
        return found

    def remove(self, ident: str) -> int:
        """Remove a folder of ours, its manifest first, so that what is left is never taken for whole. Bytes."""
        infos = list(self._store.list(f"{ident}/"))
        first = [info.key for info in infos if info.key == f"{ident}/{names.MANIFEST}"]
        last = [info.key for info in infos if info.key == f"{ident}/{names.PARTIAL}"]
        rest = [info.key for info in infos if info.key not in {*first, *last}]
        for keys in (first, rest, last):
            if keys:
                self._store.delete(keys)
        return sum(info.size for info in infos)


def split(text: str) -> tuple[str, str | None]:
    """URL/NAME[@ID]; an '@' anywhere else is part of the address."""
    head, at, ident = text.rpartition("@")
    return (head, ident) if at and names.is_id(ident) else (text, None)


@contextmanager
def opened(config: StoreConfig, ctx: Context) -> Iterator[LockingStore]:
    member = open_member(config.url, 0, config, ctx)
    try:
        yield LockingStore(member.store)
    finally:
        member.store.close()


def ls(config: StoreConfig, ctx: Context) -> dict[str, Any]:  # Any: JSON
    """All checkpoints of a name, oldest first, and unfinished ones."""
    with opened(config, ctx) as store:
        catalog = Catalog(store)
        latest = catalog.latest()
        return {
            "schema": LIST_SCHEMA,
            "place": config.url,
            "latest": latest,
            "checkpoints": [_row(catalog, ident, latest=ident == latest) for ident in catalog.complete()],
            "unfinished": catalog.unfinished(),
        }


def _row(catalog: Catalog, ident: str, *, latest: bool) -> dict[str, Any]:  # Any: JSON
    """A line of the list; one that is damaged does not hide the others."""
    try:
        item, problem = catalog.manifest(ident), ""
    except (FormatError, NotFoundError) as error:
        item, problem = Manifest(ident, "", "", "", "", {}), str(error)
    return {
        "id": ident,
        "latest": latest,
        "created": item.created,
        "bytes": item.nbytes,
        "files": len(item.files),
        "source": item.source,
        "generation": item.generation,
        "digest": item.digest[:16],
        "problem": problem,
    }


def restore(request: LoadRequest, config: StoreConfig, ident: str | None, ctx: Context) -> Report:
    """Load a checkpoint into `request.into`, every tensor compared with its digest. `request.address` is set here.
    Raises NotFoundError, IntegrityError.
    """
    with opened(config, ctx) as store:
        chosen = Catalog(store).resolve(ident)
        digests = store.get(f"{chosen}/{DIGESTS}")
        _check_small(store, Catalog(store).manifest(chosen))
    with tempfile.TemporaryDirectory(prefix="kvctl-checkpoint-") as folder:
        path = os.path.join(folder, DIGESTS)
        with open(path, "wb") as file:
            file.write(digests)
        loading = replace(request, address=_address(config, chosen), digests=path)
        if loading.into.startswith("slot:"):
            from kvctl.agent.load import load_slot

            report = load_slot(loading, ctx)
        else:
            report = run_load(loading, ctx)
    report.extra["checkpoint"] = chosen
    return report


def verify(config: StoreConfig, ident: str | None, ctx: Context) -> Report:
    """Read all of it and compare every tensor and every small file. Raises IntegrityError."""
    report = restore(LoadRequest("", into="none"), config, ident, ctx)
    report.command = "checkpoint verify"
    return report


def _check_small(store: Store, manifest: Manifest) -> None:
    """Sizes of all files, and the content of the small ones."""
    listed = {info.key: info.size for info in store.list(f"{manifest.ident}/")}
    for name, entry in manifest.files.items():
        key = f"{manifest.ident}/{name}"
        if key not in listed:
            raise IntegrityError(f"{store.url}/{key} is missing", hint="the checkpoint is damaged; use another one")
        if listed[key] != entry.size:
            raise IntegrityError(f"{store.url}/{key} has {listed[key]} bytes, the manifest says {entry.size}")
        if not name.endswith(".safetensors") and blake3.blake3(store.get(key)).hexdigest() != entry.content:
            raise IntegrityError(f"{store.url}/{key} is not what was written", hint="use another checkpoint")


def remove(config: StoreConfig, ident: str, ctx: Context, *, force: bool = False) -> dict[str, Any]:  # Any: JSON
    """Remove one checkpoint. The one that LATEST names goes only by `force`: LATEST then names the newest that is left.
    Raises NotFoundError, UsageError, ConflictError while one is written.
    """
    with opened(config, ctx) as store, Lock.take(store):
        catalog = Catalog(store)
        if ident not in catalog.complete():
            catalog.manifest(ident)  # raises; a damaged one can be removed
        latest = catalog.latest()
        if ident == latest:
            if not force:
                raise UsageError(f"{ident} is the latest checkpoint", hint="--force removes it all the same")
            left = [other for other in catalog.complete() if other != ident]
            if left:
                latest = left[-1]
                store.put(names.LATEST, f"{latest}\n".encode())
            else:
                latest = None
                store.delete([names.LATEST])
        return {"schema": "kvctl.checkpoint-rm/1", "id": ident, "freed_bytes": catalog.remove(ident), "latest": latest}


def _address(config: StoreConfig, ident: str) -> str:
    from urllib.parse import urlencode

    if config.scheme == "file" and not config.endpoints and not config.options:
        return f"{config.url.removeprefix('file://')}/{ident}"  # a path, since one with '?' makes no URL
    query = urlencode([*(("endpoint", way) for way in config.endpoints), *config.options.items()])
    return f"{config.url}/{ident}" + (f"?{query}" if query else "")
