"""What a repo needs: the chunks that manifests name, and those that readers and writers hold."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvctl.core.errors import FormatError, NotFoundError
from kvctl.repo import manifests, metadata
from kvctl.repo.chunks import ChunkRef, digest_of, name_of_key
from kvctl.repo.layout import CHUNKS, INTENTS, LEASES, TOMBSTONES
from kvctl.repo.leases import HoldInfo, close_hold, read_holds
from kvctl.repo.members import RepoMember, read_optional

if TYPE_CHECKING:
    from kvctl.repo.repo import Repo


@dataclass(slots=True)
class Chunk:
    """A chunk name as the members show it: member id -> size in bytes."""

    name: str
    sizes: dict[str, int] = field(default_factory=dict)


def list_chunks(repo: Repo) -> dict[str, Chunk]:
    """Every chunk on the members that answer, by name. Objects under chunks/ with other names are left out."""
    found: dict[str, Chunk] = {}
    lists = repo.each(lambda member: [(item.key, item.size) for item in member.store.list(CHUNKS)], repo.up)
    for member, items in zip(repo.up, lists, strict=True):
        for key, size in items:
            name = name_of_key(key)
            if name is not None:
                found.setdefault(name, Chunk(name)).sizes[member.id] = size
    return found


def manifest_refs(repo: Repo) -> dict[str, list[ChunkRef]]:
    """Manifest key -> its chunks, from every manifest that any member shows. One that only a copy shows counts:
    its home may have lost it. Raises FormatError for one that cannot be parsed.
    """

    def read(key: str) -> list[ChunkRef]:
        try:
            data = [repo.read_meta(key)]
        except NotFoundError:
            data = []
            for member in repo.up:
                try:
                    data.append(member.store.get(key))
                except NotFoundError:
                    continue
        return [ref for item in data for ref in manifests.chunk_refs(manifests.parse(item, key), key)]

    keys = sorted(metadata.copies(repo, manifests.PREFIXES))
    # a key without chunks was deleted between the list and the read
    return {key: refs for key, refs in zip(keys, repo.each(read, keys), strict=True) if refs}


@dataclass(slots=True)
class Marks:
    """`live`: names that must stay. `open`: holds that count. `stale`: holds that ended."""

    live: set[str] = field(default_factory=set)
    manifests: int = 0
    open: list[HoldInfo] = field(default_factory=list)
    stale: list[HoldInfo] = field(default_factory=list)


def mark(repo: Repo) -> Marks:
    """Mark from holds first, then manifests: a push commits before it gives up its hold, so it is seen in one of
    them. Holds that expired, or whose process is gone, are closed
    on the way; one whose owner renews it just then counts.
    """
    marks = Marks()
    for prefix in (LEASES, INTENTS):
        for hold in read_holds(repo, prefix):
            if not hold.open or (hold.over() and close_hold(hold)):
                marks.stale.append(hold)
            else:
                marks.open.append(hold)
                marks.live |= hold.names
    for refs in manifest_refs(repo).values():
        marks.manifests += 1
        marks.live.update(ref.name for ref in refs)
    return marks


def finish_deletions(repo: Repo) -> int:
    """Delete copies of metadata that a member kept because it was down when the key was deleted. Needs all
    members. Returns how many went. A key that was written again since is left alone.
    """
    count = 0
    stones = sorted({item.key for member in repo.up for item in member.store.list(TOMBSTONES)})
    for stone in stones:
        told = {_tombstone(data, stone) for m in repo.up if (data := read_optional(m.store, stone)) is not None}
        for key, digest in sorted(told):
            if read_optional(metadata.home_of(repo, key).store, key) is None:
                count += sum(_drop_copy(member, key, digest) for member in repo.up)
        for member in repo.up:
            member.store.delete([stone])
    return count


def _tombstone(data: bytes, where: str) -> tuple[str, str]:
    try:
        document = json.loads(data)
        return str(document["key"]), str(document["digest"])
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise FormatError(f"{where} is malformed", cause=str(problem)) from problem


def _drop_copy(member: RepoMember, key: str, digest: str) -> bool:
    data = read_optional(member.store, key)
    if data is None or digest_of(data) != digest:
        return False
    member.store.delete([key])
    return True
