"""Metadata of a repo: one home member decides each key, copies on the others follow.

The home of a key is the best member by rendezvous over the epoch that has authority. A conditional put there is
the commit. Copies go to every other member: reads use them while the home is down, and never otherwise, so that
a deletion or a newer value at the home always wins.

A client whose view of the members is out of date could commit at a member that decides no more. So after its
puts it reads `repo.json` from another member: a change of members is written to all others first, hence a commit
that does not see it came before it, and the change copies that commit along.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvctl.core.errors import (
    ConflictError,
    EnvError,
    FormatError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    TransientError,
)
from kvctl.repo import placement
from kvctl.repo.chunks import digest_of
from kvctl.repo.format import parse_repo
from kvctl.repo.layout import REPO, tombstone_key
from kvctl.repo.members import RepoMember, read_optional
from kvctl.transports.api import ObjectInfo

if TYPE_CHECKING:
    from kvctl.repo.repo import Repo


def home_of(repo: Repo, key: str) -> RepoMember:
    return repo.member(placement.home(repo.format.authority, key))


def require_home(repo: Repo, key: str, doing: str) -> RepoMember:
    """The key's home. Raises MemberDownError when it is down: nobody else may decide."""
    home = home_of(repo, key)
    if home.down is not None:
        raise MemberDownError(
            f"cannot {doing} {key}: member {home.name}, which decides on it, is down",
            cause=str(home.down),
            hint="bring it back, or replace it with `kvctl repo repair --replace`; reads go on meanwhile",
        )
    return home


def read(repo: Repo, key: str) -> bytes:
    """The key's content: from its home, from a copy while the home is down. Raises NotFoundError,
    MemberDownError when no member answers.
    """
    return _read(repo, key, lambda home: (home.store.get(key), ""))[0]


def read_versioned(repo: Repo, key: str) -> tuple[bytes, str]:
    """Content and version. The version is good for `commit` only when it came from the home ('' otherwise)."""
    return _read(repo, key, lambda home: _stable(home, key))


def _read(repo: Repo, key: str, from_home: Callable[[RepoMember], tuple[bytes, str]]) -> tuple[bytes, str]:
    home = home_of(repo, key)
    problem: KvctlError = home.down or MemberDownError(f"member {home.name} is down")
    if home.down is None:
        try:
            return from_home(home)
        except (TransientError, EnvError) as error:
            repo.ctx.progress.note(f"member {home.name} failed to give {key}, trying copies: {error}")
            problem = error
    missing = False
    for member in repo.up:
        if member.id == home.id:
            continue
        try:
            return member.store.get(key), ""
        except NotFoundError:
            missing = True
        except (TransientError, EnvError) as error:
            problem = error
    if missing:
        raise NotFoundError(
            f"repo {repo.id[:8]} shows no {key}",
            cause=f"member {home.name}, which decides on it, is down, and no other member has a copy",
        )
    raise MemberDownError(f"no member that has {key} answers", cause=str(problem), hint="see `kvctl repo status`")


def _stable(member: RepoMember, key: str) -> tuple[bytes, str]:
    """Content and its version, read so that they belong together."""
    while True:
        before = member.store.stat(key)
        data = member.store.get(key)
        if len(data) == before.size and member.store.stat(key).version == before.version:
            return data, before.version


def commit(
    repo: Repo,
    key: str,
    data: bytes,
    *,
    if_absent: bool = False,
    if_version: str | None = None,
    all_copies: bool = False,
) -> ObjectInfo:
    """Put `key` at its home under the condition, then its copies. Returns the home's info.

    A copy that fails is noted, unless `all_copies`: then it is an error (and the commit stands). The same commit
    made twice succeeds twice. Raises ConflictError when the condition does not hold, MemberDownError when the
    home is down, TransientError when the repo's members changed meanwhile: run it again.
    """
    repo.format.check_can("write")
    check_writable(repo, f"write {key}")
    home = require_home(repo, key, "write")
    try:
        info = home.store.put(key, data, if_absent=if_absent, if_version=if_version)
    except ConflictError as problem:
        info = _same(home, key, data, problem)
    except TransientError as problem:
        raise MemberDownError(
            f"cannot write {key}: member {home.name}, which decides on it, does not answer", cause=str(problem)
        ) from problem
    check_view(repo, home)
    copy_out(repo, home, key, data, must=all_copies or repo.format.phase == "moving")
    check_view(repo, home)
    return info


def check_writable(repo: Repo, doing: str) -> None:
    """Raises TransientError while a change of members is at a point where two members could decide on one key:
    it is not on all members yet, or authority is about to move.
    """

    def unsure() -> bool:
        fmt = repo.format
        return repo.uneven or fmt.phase == "switching" or (not fmt.settled and bool(repo.down))

    if unsure():
        repo.refresh()
        if unsure():
            raise TransientError(
                f"cannot {doing}: the repo is changing its members just now",
                hint="run it again in a moment; if that change was interrupted, run `kvctl repo rebalance`",
            )


def _same(home: RepoMember, key: str, data: bytes, problem: ConflictError) -> ObjectInfo:
    """The info of `key` when it holds exactly `data`; raises the conflict otherwise."""
    try:
        found, _ = _stable(home, key)
    except NotFoundError:
        found = b""
    if found != data:
        raise problem
    return home.store.stat(key)


def check_view(repo: Repo, home: RepoMember) -> None:
    """Raises TransientError when another member shows a newer `repo.json` than the one we work by."""
    for member in sorted(repo.up, key=lambda item: item.id == home.id):
        try:
            seen = parse_repo(member.store.get(REPO), f"{member.name}/{REPO}")
        except (TransientError, EnvError):
            continue
        except (NotFoundError, FormatError):
            continue
        if seen.id != repo.id or seen.generation > repo.format.generation:
            repo.refresh()
            raise TransientError(
                "the members of the repo changed meanwhile",
                cause=f"repo.json of {member.name} is of generation {seen.generation}",
                hint="run it again",
            )
        return


def sequence(data: bytes) -> int:
    """The `seq` of a mutable document: it grows with every write. -1 where there is none."""
    try:
        value = json.loads(data).get("seq", -1)
    except (ValueError, AttributeError, RecursionError):
        return -1
    return value if isinstance(value, int) else -1


def copy_out(repo: Repo, home: RepoMember, key: str, data: bytes, *, must: bool = False) -> None:
    """Bring `key` to every other member that answers; a copy of a higher `seq` is left alone."""
    others = [member for member in repo.members if member.id != home.id]

    def copy(member: RepoMember) -> KvctlError | None:
        try:
            if member.down is not None:
                raise member.down
            put_newer(member, key, data)
        except KvctlError as problem:
            return problem
        return None

    for member, problem in zip(others, repo.each(copy, others), strict=True):
        if problem is None:
            continue
        if must:
            raise MemberDownError(
                f"{key} could not be copied to member {member.name}", cause=str(problem), hint="run it again"
            )
        repo.ctx.progress.note(f"no copy of {key} on member {member.name}: {problem}")


def put_newer(member: RepoMember, key: str, data: bytes) -> bool:
    """Make `key` on one member `data`, unless what is there has a higher `seq`. True when it wrote."""
    while True:
        try:
            found, version = _stable(member, key)
        except NotFoundError:
            try:
                member.store.put(key, data, if_absent=True)
            except ConflictError:
                continue
            return True
        if found == data or sequence(found) > sequence(data):
            return False
        try:
            member.store.put(key, data, if_version=version)
        except ConflictError:
            continue
        return True


def delete(repo: Repo, key: str) -> None:
    """Delete a key at its home, then its copies. A member that is down keeps its copy, so a tombstone tells
    what was deleted. Raises MemberDownError when the home is down.
    """
    repo.format.check_can("write")
    check_writable(repo, f"delete {key}")
    home = require_home(repo, key, "delete")
    if len(repo.up) < len(repo.members):
        data = read_optional(home.store, key)
        if data is not None:
            stone = json.dumps({"key": key, "digest": digest_of(data)}).encode()
            repo.each(lambda member: member.store.put(tombstone_key(key), stone), repo.up)
    home.store.delete([key])
    check_view(repo, home)
    others = [member for member in repo.up if member.id != home.id]
    repo.each(lambda member: member.store.delete([key]), others)
    check_view(repo, home)


def listing(repo: Repo, prefix: str) -> list[ObjectInfo]:
    """Keys under `prefix`, in order, once each. A key counts when its home has it; copies count while its home
    is down. Raises MemberDownError when no member answers.
    """
    if not repo.up:
        raise MemberDownError(
            "no member of the repo answers",
            cause=str(repo.members[0].down),
            hint="see `kvctl repo status`",
        )
    found: dict[str, ObjectInfo] = {}
    lists = repo.each(lambda member: list(member.store.list(prefix)), repo.up)
    for member, items in zip(repo.up, lists, strict=True):
        for item in items:
            home = home_of(repo, item.key)
            if home.id == member.id or (home.down is not None and item.key not in found):
                found[item.key] = item
    return [found[key] for key in sorted(found, key=str.encode)]


def copies(repo: Repo, prefixes: Iterable[str]) -> dict[str, dict[str, ObjectInfo]]:
    """Key -> member id -> info, for every copy on the members that answer."""
    wanted = tuple(prefixes)
    found: dict[str, dict[str, ObjectInfo]] = {}

    def read_member(member: RepoMember) -> list[ObjectInfo]:
        return [item for prefix in wanted for item in member.store.list(prefix)]

    for member, items in zip(repo.up, repo.each(read_member, repo.up), strict=True):
        for item in items:
            found.setdefault(item.key, {})[member.id] = item
    return found


__all__ = [
    "check_view",
    "commit",
    "copies",
    "copy_out",
    "delete",
    "home_of",
    "listing",
    "put_newer",
    "read",
    "read_versioned",
    "require_home",
    "sequence",
]
