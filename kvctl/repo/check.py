"""Checking a repo: structure always, the bytes of all chunks or of a share on request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvctl.core.errors import FormatError, KvctlError, NotFoundError, UsageError
from kvctl.core.units import is_count
from kvctl.repo import manifests, metadata
from kvctl.repo.chunks import name_of_key
from kvctl.repo.condemned import read_condemned
from kvctl.repo.copying import verify_copy
from kvctl.repo.layout import CHUNKS, INTENTS, LEASES, REPO, is_ours
from kvctl.repo.leases import read_holds
from kvctl.repo.marking import Chunk, list_chunks
from kvctl.repo.members import RepoMember, read_optional

if TYPE_CHECKING:
    from kvctl.repo.repo import Repo

_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class Share:
    """Part `part` of `of` equal parts of all chunks, by digest: n/t. 1/1 is all."""

    part: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Share:
        """'all' or 'n/t'. Raises UsageError."""
        if text == "all":
            return cls()
        part, _, of = text.partition("/")
        if not (is_count(part) and is_count(of) and 1 <= int(part) <= int(of)):
            raise UsageError(f"{text!r} is not a share of the data", hint="write 'all' or n/t, such as 1/7")
        return cls(int(part), int(of))

    def has(self, name: str) -> bool:
        return int(name[:8], 16) % self.of == self.part - 1


@dataclass(frozen=True, slots=True)
class Problem:
    """`kind`: manifest (unreadable), metadata (copies disagree), missing (no good copy at all), replicas (fewer
    than asked for), size, corrupt, members (a change that is not finished). `keys` of what it hurts.
    """

    kind: str
    key: str
    member: str
    detail: str
    hurts: tuple[str, ...] = ()


@dataclass(slots=True)
class CheckResult:
    """`problems` want a repair; `garbage` is harmless and goes with gc: orphans, ended holds, unfinished uploads."""

    manifests: int = 0
    chunks: int = 0
    bytes: int = 0
    read_objects: int = 0
    read_bytes: int = 0
    members_down: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    garbage: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def damaged(self) -> bool:
        """Something is lost or wrong, not only short of replicas."""
        return any(problem.kind in {"manifest", "missing", "corrupt", "size"} for problem in self.problems)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {"schema": "kvctl.check/1", "ok": self.ok, "damaged": self.damaged, **dataclasses.asdict(self)}


def check(repo: Repo, *, read_data: Share | None = None) -> CheckResult:
    """Look at everything, change nothing. Members that are down are left out and named."""
    result = CheckResult(members_down=[member.name for member in repo.down])
    _check_members(repo, result)
    users = _check_manifests(repo, result)
    chunks = list_chunks(repo)
    result.chunks = len(chunks)
    result.bytes = sum(sum(chunk.sizes.values()) for chunk in chunks.values())
    _check_chunks(repo, chunks, users, result)
    _count_garbage(repo, chunks, users, result)
    if read_data:
        for name, member_id, why in find_corrupt(repo, read_data, result=result):
            hurts = tuple(sorted(users.get(name, (0, ()))[1]))
            result.problems.append(Problem("corrupt", name, repo.member(member_id).name, why, hurts))
    return result


def _check_members(repo: Repo, result: CheckResult) -> None:
    if not repo.format.settled:
        detail = f"epoch {repo.format.epoch.number} is {repo.format.phase}"
        result.problems.append(Problem("members", REPO, "", detail))
    for member in repo.up:
        if read_optional(member.store, REPO) != repo.format.to_bytes():
            result.problems.append(Problem("members", REPO, member.name, "it lacks the newest repo.json"))


Users = dict[str, tuple[int, list[str]]]  # chunk name -> size, manifests that need it


def _check_manifests(repo: Repo, result: CheckResult) -> Users:
    users: Users = {}
    for key, copies in sorted(metadata.copies(repo, manifests.PREFIXES).items()):
        home = metadata.home_of(repo, key)
        if home.down is None and home.id not in copies:
            result.problems.append(Problem("metadata", key, home.name, "its home lost it, or it was deleted in part"))
        try:
            data = repo.read_meta(key)
        except NotFoundError:
            kept = [read_optional(repo.member(item).store, key) for item in sorted(copies)]
            found = [item for item in kept if item is not None]
            if not found:
                continue  # deleted meanwhile
            data = found[0]
        result.manifests += 1
        try:
            refs = manifests.chunk_refs(manifests.parse(data, key), key)
        except FormatError as problem:
            result.problems.append(Problem("manifest", key, home.name, str(problem), (key,)))
            continue
        for member in repo.up:
            if member.id == home.id:
                continue
            if member.id not in copies:
                result.problems.append(Problem("metadata", key, member.name, "no copy"))
            elif read_optional(member.store, key) != data:
                result.problems.append(Problem("metadata", key, member.name, "its copy differs from the home's"))
        for ref in refs:
            users.setdefault(ref.name, (ref.size, []))[1].append(key)
    return users


def _check_chunks(repo: Repo, chunks: dict[str, Chunk], users: Users, result: CheckResult) -> None:
    for name, (size, keys) in sorted(users.items()):
        sizes = chunks[name].sizes if name in chunks else {}
        hurts = tuple(keys)
        for member_id, found in sizes.items():
            if found != size:
                detail = f"{found} bytes, expected {size}"
                result.problems.append(Problem("size", name, repo.member(member_id).name, detail, hurts))
        have = {member_id for member_id, found in sizes.items() if found == size}
        if not have:
            detail = "no good copy" + (" on the members that answer" if repo.down else "")
            result.problems.append(Problem("missing", name, "", detail, hurts))
            continue
        lacking = [m for m in repo.places(name[:64]) if m.down is None and m.id not in have and m.id not in sizes]
        result.problems.extend(Problem("replicas", name, member.name, "no copy", hurts) for member in lacking)


def _count_garbage(repo: Repo, chunks: dict[str, Chunk], users: Users, result: CheckResult) -> None:
    holds = [hold for prefix in (LEASES, INTENTS) for hold in read_holds(repo, prefix)]
    held = {name for hold in holds if hold.open for name in hold.names}
    condemned = read_condemned(repo).names
    orphans = [chunk for name, chunk in chunks.items() if name not in users and name not in held]
    misplaced = 0
    for name in users:
        places = {member.id for member in repo.places(name[:64])}
        misplaced += len(chunks[name].sizes.keys() - places) if name in chunks else 0
    unknown = sum(name_of_key(item.key) is None for member in repo.up for item in member.store.list(CHUNKS))
    uploads = sum(is_ours(upload.key) for member in repo.up for upload in member.store.uploads())
    result.garbage = {
        "orphans": len(orphans),
        "orphan_bytes": sum(sum(chunk.sizes.values()) for chunk in orphans),
        "condemned": len(condemned),
        "held": len(held - users.keys()),
        "misplaced": misplaced if repo.format.settled else 0,
        "ended_holds": sum(not hold.open or hold.over() for hold in holds),
        "uploads": uploads,
        "unknown_objects": unknown,
    }


def find_corrupt(
    repo: Repo, share: Share, *, result: CheckResult | None = None, keep: Callable[[], None] | None = None
) -> list[tuple[str, str, str]]:
    """(chunk name, member id, what is wrong) of every copy in the share whose digest is not its name's."""
    asks = [
        (repo.member(member_id), name, size)
        for name, chunk in sorted(list_chunks(repo).items())
        if share.has(name)
        for member_id, size in sorted(chunk.sizes.items())
    ]
    found: list[tuple[str, str, str]] = []
    progress = repo.ctx.progress
    progress.begin("reading chunks", sum(size for _, _, size in asks))
    try:
        for start in range(0, len(asks), _AT_ONCE):
            repo.ctx.cancel.check("reading chunks")
            if keep is not None:
                keep()
            batch = asks[start : start + _AT_ONCE]
            for (member, name, size), why in zip(batch, repo.each(_verify, batch), strict=True):
                progress.advance(size)
                if why:
                    found.append((name, member.id, why))
                if result is not None:
                    result.read_objects += 1
                    result.read_bytes += size
    finally:
        progress.end()
    return found


def _verify(ask: tuple[RepoMember, str, int]) -> str:
    try:
        return verify_copy(*ask)
    except NotFoundError:
        return ""  # collected meanwhile
    except KvctlError as problem:
        return f"it cannot be read: {problem}"
