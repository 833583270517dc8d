"""Making the copies of metadata agree with their homes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvctl.core.errors import ConflictError
from kvctl.repo import metadata
from kvctl.repo.layout import CONDEMNED, METADATA, TOMBSTONES, tombstone_key
from kvctl.repo.members import RepoMember, read_optional

if TYPE_CHECKING:
    from kvctl.repo.repo import Repo


@dataclass(slots=True)
class SyncResult:
    """Keys whose home had lost them and took them back from a copy, and copies written."""

    restored: list[str] = field(default_factory=list)
    copies: int = 0


def sync_metadata(repo: Repo, *, dry_run: bool = False) -> SyncResult:
    """Bring every member that answers to what the homes show. A home that lacks a key which copies have gets it
    back, unless a tombstone says that it was deleted. Keys whose home is down are left alone.
    """
    result = SyncResult()
    stones = set(metadata.copies(repo, [TOMBSTONES]))
    found = metadata.copies(repo, [*METADATA, CONDEMNED])
    keys = sorted(found)

    def one(key: str) -> tuple[bool, int]:
        repo.ctx.cancel.check("copying metadata")
        return _sync_key(repo, key, stones, dry_run=dry_run)

    for key, (restored, written) in zip(keys, repo.each(one, keys), strict=True):
        if restored:
            result.restored.append(key)
        result.copies += written
    if not dry_run:
        for stone in stones:
            _spread(repo, stone)
    return result


def _sync_key(repo: Repo, key: str, stones: set[str], *, dry_run: bool) -> tuple[bool, int]:
    home = metadata.home_of(repo, key)
    if home.down is not None:
        return False, 0
    data = read_optional(home.store, key)
    restored = False
    if data is None:
        if tombstone_key(key) in stones:
            return False, 0
        data = _best_copy(repo, key)
        if data is None:
            return False, 0  # deleted meanwhile
        restored = True
        if not dry_run:
            try:
                home.store.put(key, data, if_absent=True)
            except ConflictError:
                data = home.store.get(key)
    written = 0
    for member in repo.up:
        if member.id != home.id:
            written += _bring(member, key, data, dry_run=dry_run)
    return restored, written


def _bring(member: RepoMember, key: str, data: bytes, *, dry_run: bool) -> bool:
    return read_optional(member.store, key) != data if dry_run else metadata.put_newer(member, key, data)


def _best_copy(repo: Repo, key: str) -> bytes | None:
    copies = [data for member in repo.up if (data := read_optional(member.store, key)) is not None]
    return max(copies, key=metadata.sequence, default=None)


def _spread(repo: Repo, key: str) -> None:
    """One of the copies of a tombstone, on every member."""
    data = _best_copy(repo, key)
    for member in repo.up if data is not None else ():
        if read_optional(member.store, key) is None:
            member.store.put(key, data or b"")
