"""All sessions of a repo as they are now: manifests, what is attached, who shares what. Computed, never stored.

Bytes are those of chunks (packs and token ids) as stored. A chunk is unique to a generation when no other manifest
of the repo names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from kvctl.core.errors import IncompatibleError, KvctlError, UsageError
from kvctl.kv.access import read_descriptor
from kvctl.kv.identity import Descriptor
from kvctl.kv.index import read_once
from kvctl.kv.manifest import SessionManifest
from kvctl.kv.names import Pattern
from kvctl.kv.sessions import Attached, Generation, all_attached, list_generations, matching, now
from kvctl.repo.repo import Repo


@dataclass(frozen=True, slots=True)
class Entry:
    """One generation. `manifest` None: it cannot be read, because of `problem`. Bytes as in the module's text."""

    found: Generation
    manifest: SessionManifest | None
    descriptor: Descriptor | None
    attached: Attached
    problem: str = ""
    bytes: int = 0
    unique_bytes: int = 0
    latest: bool = False

    @property
    def used(self) -> datetime:
        """Last use: a pull (by the hour), else its push."""
        return max(self.found.modified, self.attached.used or self.found.modified)

    @property
    def labels(self) -> Mapping[str, str]:
        own = self.manifest.labels if self.manifest is not None else {}
        return {**own, **self.attached.labels}

    @property
    def pinned(self) -> bool:
        return self.attached.pinned(self.found.generation)

    @property
    def chunks(self) -> Mapping[str, int]:
        return dict(self.manifest.chunks) if self.manifest is not None else {}

    def to_json(self, at: datetime | None = None) -> dict[str, Any]:  # Any: JSON
        manifest, meaning = self.manifest, self.descriptor
        expires = self.attached.expiry(self.found.generation)
        return {
            "tenant": self.found.session.tenant,
            "session": self.found.session.name,
            "generation": self.found.generation,
            "latest": self.latest,
            "created": manifest.created if manifest else "",
            "age_s": None if at is None else round((at - self.found.modified).total_seconds()),
            "used": self.used.isoformat(),
            "tokens": manifest.tokens if manifest else None,
            "bytes": self.bytes,
            "unique_bytes": self.unique_bytes,
            "shared_bytes": self.bytes - self.unique_bytes,
            "packs": len(manifest.packs) if manifest else None,
            "ns": manifest.ns if manifest else None,
            "weights": meaning.weights if meaning else None,
            "dtype": meaning.dtype if meaning else None,
            "lossy": manifest.lossy if manifest else None,
            "producer": dict(manifest.producer) if manifest else {},
            "labels": dict(self.labels),
            "pinned": self.pinned,
            "expires": None if expires is None else expires.isoformat(),
            "problem": self.problem,
        }


@dataclass(frozen=True, slots=True)
class Stale:
    """Sessions that a model's weights made worthless: of the model called `name` (a producer's label; None: of any
    model), but not of the weights with this digest (hex).
    """

    weights: str | None
    name: str | None = None

    def check(self) -> None:
        """Raises IncompatibleError when the digest is not known: nothing can be told stale then."""
        if not self.weights:
            raise IncompatibleError(
                f"the weights digest of {self.name or 'the model'} is not known, so no session can be called stale",
                hint="push the model to a repo, or make its digests with `kvctl models digest`",
            )

    def hits(self, entry: Entry) -> bool:
        if entry.manifest is None or entry.descriptor is None or entry.descriptor.weights == self.weights:
            return False
        return self.name is None or entry.manifest.producer.get("model") == self.name


@dataclass(frozen=True, slots=True)
class Filter:
    """Which generations are meant; every field that is set must fit. Ages in seconds, by the store's clock. `model` and
    `revision` are globs over the producer's labels; `weights` and `lora` digests, or beginnings of at least 8 digits.
    """

    tenant: str | None = None
    older_than: float | None = None
    idle: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    revision: str | None = None
    weights: str | None = None
    lora: str | None = None
    stale_for: Stale | None = None
    expired: bool = False
    not_latest: bool = False

    @property
    def empty(self) -> bool:
        return self == Filter()

    def check(self) -> None:
        """Raises UsageError for digests that are too short to mean one thing, IncompatibleError as `Stale.check`."""
        for name, text in (("weights", self.weights), ("lora", self.lora)):
            if text is not None and (len(text) < 8 or not set(text) <= set("0123456789abcdef")):
                raise UsageError(f"{text!r} is no digest for --{name}", hint="give at least 8 of its hex digits")
        if self.stale_for is not None:
            self.stale_for.check()

    def fits(self, entry: Entry, at: datetime) -> bool:
        found, manifest, meaning = entry.found, entry.manifest, entry.descriptor
        producer = manifest.producer if manifest is not None else {}
        expires = entry.attached.expiry(found.generation)
        labels = entry.labels
        return (
            (self.tenant is None or fnmatchcase(found.session.tenant, self.tenant))
            and (self.older_than is None or (at - found.modified).total_seconds() >= self.older_than)
            and (self.idle is None or (at - entry.used).total_seconds() >= self.idle)
            and all(name in labels and fnmatchcase(labels[name], text) for name, text in self.labels.items())
            and (self.model is None or fnmatchcase(producer.get("model", ""), self.model))
            and (self.revision is None or fnmatchcase(producer.get("revision", ""), self.revision))
            and (self.weights is None or (meaning is not None and meaning.weights.startswith(self.weights)))
            and (
                self.lora is None
                or (meaning is not None and any(item.digest.startswith(self.lora) for item in meaning.lora))
            )
            and (self.stale_for is None or self.stale_for.hits(entry))
            and (not self.expired or (expires is not None and expires <= at))
            and (not self.not_latest or not entry.latest)
        )


@dataclass(frozen=True, slots=True)
class Catalog:
    """`entries`: all generations of the repo. `owners`: chunk name -> how many name it. `at`: the store's time."""

    entries: tuple[Entry, ...]
    owners: Mapping[str, int]
    at: datetime

    @classmethod
    def load(cls, repo: Repo) -> Catalog:
        """Two listings, and one read of each manifest, namespace and state document."""
        generations = list_generations(repo)
        attached = all_attached(repo)
        read = repo.each(lambda item: _read(repo, item), generations)
        spaces = sorted({item.ns for item in read if isinstance(item, SessionManifest)})
        meanings = dict(zip(spaces, repo.each(lambda ns: _meaning(repo, ns), spaces), strict=True))
        owners: Counter[str] = Counter(
            name for item in read if isinstance(item, SessionManifest) for name, _ in item.chunks
        )
        newest = {item.session: item.generation for item in generations}
        entries: list[Entry] = []
        for item, manifest in zip(generations, read, strict=True):
            extra = attached.get(str(item.session), Attached())
            last = newest[item.session] == item.generation
            if isinstance(manifest, KvctlError):
                entries.append(Entry(item, None, None, extra, str(manifest), latest=last))
                continue
            meaning = meanings[manifest.ns]
            entries.append(
                Entry(
                    item,
                    manifest,
                    meaning if isinstance(meaning, Descriptor) else None,
                    extra,
                    "" if isinstance(meaning, Descriptor) else str(meaning),
                    sum(size for _, size in manifest.chunks),
                    sum(size for name, size in manifest.chunks if owners[name] == 1),
                    last,
                )
            )
        return cls(tuple(entries), owners, now(repo))

    def select(self, repo: Repo, patterns: Sequence[str], chosen: Filter, *, allow_empty: bool = False) -> list[Entry]:
        """Those that a pattern names (none: all) and the filter lets through. Raises NotFoundError for a pattern that
        names nothing, unless `allow_empty`; what `Filter.check` raises.
        """
        chosen.check()
        for text in patterns:
            pattern = Pattern.parse(text)
            if not any(pattern.matches(entry.found.session, entry.found.generation) for entry in self.entries):
                matching(repo, [text], allow_empty=allow_empty)  # raises, unless it came just now
        wanted = [Pattern.parse(text) for text in patterns]
        return [
            entry
            for entry in self.entries
            if (not wanted or any(item.matches(entry.found.session, entry.found.generation) for item in wanted))
            and chosen.fits(entry, self.at)
        ]


def _read(repo: Repo, item: Generation) -> SessionManifest | KvctlError:
    try:
        return SessionManifest.parse(read_once(repo, item.key), item.key)
    except KvctlError as error:
        return error


def _meaning(repo: Repo, ns: str) -> Descriptor | KvctlError:
    try:
        return read_descriptor(repo, ns)
    except KvctlError as error:
        return error
