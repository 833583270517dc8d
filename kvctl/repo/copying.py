"""Moving chunks between members, one whole chunk at a time, verified by digest on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import blake3

from kvctl.core.errors import IntegrityError, KvctlError, NotFoundError
from kvctl.repo.chunks import chunk_key, digest_of
from kvctl.repo.layout import INTENTS, LEASES
from kvctl.repo.leases import read_holds
from kvctl.repo.marking import Chunk, list_chunks, manifest_refs
from kvctl.repo.members import RepoMember

if TYPE_CHECKING:
    from kvctl.repo.repo import Repo

# Whole chunks are in memory on their way: so many at once, as long as they fit the budget (bytes).
_AT_ONCE: Final = 4
_BUDGET: Final = 256 << 20
_PIECE: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Needed:
    """A chunk that must be on all its places. `size` in bytes; None when only a hold names it."""

    name: str
    size: int | None


@dataclass(slots=True)
class CopyResult:
    """Counts of objects written; `lost` are chunk names without a good copy, `failed` (name, member, why)."""

    objects: int = 0
    bytes: int = 0
    lost: list[str] = field(default_factory=list)
    failed: list[tuple[str, str, str]] = field(default_factory=list)


def needed_chunks(repo: Repo) -> dict[str, Needed]:
    """Every chunk that a hold or a manifest names; holds are read first, as a mark does."""
    names: dict[str, Needed] = {}
    for prefix in (LEASES, INTENTS):
        for hold in read_holds(repo, prefix):
            names.update((name, Needed(name, None)) for name in hold.names)
    for refs in manifest_refs(repo).values():
        names.update((ref.name, Needed(ref.name, ref.size)) for ref in refs)
    return names


def good(chunk: Chunk | None, need: Needed) -> set[str]:
    """Ids of the members that show the chunk in the right size."""
    if chunk is None:
        return set()
    size = need.size if need.size is not None else max(chunk.sizes.values())
    return {member for member, found in chunk.sizes.items() if found == size}


def fill_places(repo: Repo, *, bad: Mapping[str, set[str]] | None = None, dry_run: bool = False) -> CopyResult:
    """Write every needed chunk to those of its places that answer and lack it, from any member that has it.

    `bad`: chunk name -> members whose copy is known to be damaged; it is replaced. Chunks that only a hold names
    and that are nowhere yet are left to their writer.
    """
    result = CopyResult()
    tasks = list(_tasks(repo, bad or {}, result))
    if dry_run:
        result.objects = sum(len(task.targets) for task in tasks)
        result.bytes = sum(task.size * len(task.targets) for task in tasks)
        return result
    at_once = max(1, min(_AT_ONCE, _BUDGET // max([task.size for task in tasks] + [1])))
    progress = repo.ctx.progress
    progress.begin("copying chunks", sum(task.size * len(task.targets) for task in tasks))
    try:
        for start in range(0, len(tasks), at_once):
            repo.ctx.cancel.check("copying chunks")
            batch = tasks[start : start + at_once]
            for task, problem in zip(batch, repo.each(_copy, batch), strict=True):
                _count(task, problem, result)
                progress.advance(task.size * len(task.targets))
    finally:
        progress.end()
    return result


def _count(task: _Task, problem: KvctlError | None, result: CopyResult) -> None:
    if isinstance(problem, IntegrityError):
        result.lost.append(task.name)
    elif problem is not None:
        result.failed.append((task.name, ", ".join(m.name for m in task.targets), str(problem)))
    else:
        result.objects += len(task.targets)
        result.bytes += task.size * len(task.targets)


@dataclass(frozen=True, slots=True)
class _Task:
    name: str
    size: int
    sources: Sequence[RepoMember]
    targets: Sequence[RepoMember]


def _tasks(repo: Repo, bad: Mapping[str, set[str]], result: CopyResult) -> Iterator[_Task]:
    needed = needed_chunks(repo)
    chunks = list_chunks(repo)  # after: what a manifest names was written before it
    for need in sorted(needed.values(), key=lambda item: item.name):
        chunk = chunks.get(need.name)
        have = good(chunk, need) - bad.get(need.name, set())
        targets = [member for member in repo.places(need.name[:64]) if member.id not in have and member.down is None]
        if not targets:
            continue
        sources = [member for member in repo.up if member.id in have]
        if sources:
            size = need.size if need.size is not None else max(chunk.sizes.values()) if chunk else 0
            yield _Task(need.name, size, sources, targets)
        elif need.size is not None and not repo.down:
            result.lost.append(need.name)


def _copy(task: _Task) -> KvctlError | None:
    """None when the chunk is on all targets; IntegrityError when no source has it whole."""
    problem: KvctlError = IntegrityError(f"no good copy of chunk {task.name}")
    key = chunk_key(task.name)
    for source in task.sources:
        try:
            data = source.store.get(key)
        except NotFoundError:
            continue
        except KvctlError as error:
            problem = error
            continue
        if len(data) != task.size or digest_of(data) != task.name[:64]:
            continue
        try:
            for target in task.targets:
                target.store.put(key, data)
        except KvctlError as error:
            return error
        return None
    return problem


def plan_replacement(repo: Repo, gone: RepoMember) -> CopyResult:
    """About what replacing `gone` will copy: the chunks that have a place on it; `lost` are those that no other
    member has. Counts can differ by a few, as the new member's id decides.
    """
    needed = needed_chunks(repo)
    chunks = list_chunks(repo)
    result = CopyResult()
    for need in needed.values():
        have = good(chunks.get(need.name), need)
        if need.size is not None and not have - ({gone.id} if gone.down is not None else set()):
            result.lost.append(need.name)
        elif any(member.id == gone.id for member in repo.places(need.name[:64])):
            result.objects += 1
            result.bytes += need.size or 0
    return result


def verify_copy(member: RepoMember, name: str, size: int) -> str:
    """What is wrong with one copy of a chunk, '' when its digest is right. Reads it in pieces of 8 MiB."""
    hasher = blake3.blake3()
    at = 0
    while at < size:
        piece = member.store.get(chunk_key(name), at, min(_PIECE, size - at))
        if not piece:
            return f"it ends at {at}, expected {size} bytes"
        hasher.update(piece)
        at += len(piece)
    found = hasher.hexdigest()
    return "" if found == name[:64] else f"BLAKE3 {found[:16]}.., expected {name[:16]}.."


def drop_misplaced(repo: Repo, keep: Iterable[str] = ()) -> CopyResult:
    """Delete copies of needed chunks from members that are not among their places, where all places have them."""
    result = CopyResult()
    kept = set(keep)
    needed = needed_chunks(repo)
    chunks = list_chunks(repo)
    doomed: dict[str, list[str]] = {}
    for need in needed.values():
        chunk = chunks.get(need.name)
        places = {member.id for member in repo.places(need.name[:64])}
        if chunk is None or need.name in kept or not places <= good(chunk, need):
            continue
        for member in chunk.sizes.keys() - places:
            doomed.setdefault(member, []).append(chunk_key(need.name))
            result.objects += 1
            result.bytes += chunk.sizes[member]
    for member_id, keys in doomed.items():
        for start in range(0, len(keys), 500):
            repo.member(member_id).store.delete(sorted(keys)[start : start + 500])
    return result
