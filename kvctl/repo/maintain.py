"""Operators' changes of a repo: repair, replace, rebalance (and add), drain. Each can be run again at any time."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import (
    ConfigError,
    ConflictError,
    MemberDownError,
    NotFoundError,
    UsageError,
)
from kvctl.repo import metadata
from kvctl.repo.check import Share, find_corrupt
from kvctl.repo.copying import CopyResult, fill_places
from kvctl.repo.epochs import MoveResult, advance, write_format
from kvctl.repo.format import Epoch, MemberFile
from kvctl.repo.layout import INTENTS, LEASES, MEMBER, METADATA, OURS, OWNER, REPO
from kvctl.repo.leases import read_holds
from kvctl.repo.marking import finish_deletions
from kvctl.repo.members import Found, RepoMember, check_endpoints, check_vacant, look, read_optional
from kvctl.repo.owner import Owner
from kvctl.repo.sync import SyncResult, sync_metadata

if TYPE_CHECKING:
    from kvctl.repo.repo import Repo


@dataclass(slots=True)
class RepairResult:
    """`corrupt`: copies whose bytes were wrong. `copied.lost`: chunks without any good copy."""

    copied: CopyResult
    metadata: SyncResult
    corrupt: list[tuple[str, str]] = field(default_factory=list)
    deletions_finished: int = 0


def repair(repo: Repo, *, read_data: Share | None = None, dry_run: bool = False) -> RepairResult:
    """Replace missing and short copies from good ones, on the members that answer; with `read_data` also copies
    whose bytes are wrong. Metadata that its home lost comes back from copies.
    """
    if dry_run:
        return _repair(repo, read_data, None, dry_run=True)
    if metadata.home_of(repo, OWNER).down is not None:
        # the lock saves work only; gc and changes of members, which it keeps apart, need all members
        repo.ctx.progress.note("repairing without the maintenance lock: the member that keeps it is down")
        return _repair(repo, read_data, None, dry_run=False)
    with Owner.take(repo, "repair") as owner:
        return _repair(repo, read_data, owner, dry_run=False)


def _repair(repo: Repo, read_data: Share | None, owner: Owner | None, *, dry_run: bool) -> RepairResult:
    def keep() -> None:
        if owner is not None:
            owner.keep()

    finished = 0
    if not dry_run and not repo.down:
        write_format(repo, repo.format)
        finished = finish_deletions(repo)
    synced = sync_metadata(repo, dry_run=dry_run)
    keep()
    corrupt = find_corrupt(repo, read_data, keep=keep) if read_data else []
    bad: dict[str, set[str]] = {}
    for name, member, _ in corrupt:
        bad.setdefault(name, set()).add(member)
    copied = fill_places(repo, bad=bad, dry_run=dry_run)
    return RepairResult(copied, synced, [(name, repo.format.name(m)) for name, m, _ in corrupt], finished)


def rebalance(repo: Repo) -> MoveResult:
    """Add the stores among `repo.extras` as members, move what belongs there, and finish any change that was
    interrupted. Without extras: bring every chunk to its places and only there.
    """
    repo.require_all("rebalance")
    with Owner.take(repo, "rebalance") as owner:
        new = [adopt(repo, item) for item in repo.extras]
        if new:
            if not repo.format.settled:
                advance(repo, owner)
            _change(repo, add=new, remove=(), dead=())
        return advance(repo, owner)


def drain(repo: Repo, which: str) -> MoveResult:
    """Move everything off a member, then drop it from the repo and empty its store.

    Raises NotFoundError for an unknown member, ConfigError when too few would be left for the replicas,
    ConflictError while readers or writers hold leases on it.
    """
    repo.require_all("drain a member")
    leaving = [item for item in repo.extras if which in {item.config.url, item.member.member if item.member else ""}]
    if leaving:  # a drain that was interrupted after the member had left
        with Owner.take(repo, "drain") as owner:
            result = advance(repo, owner)
            _erase_found(leaving)
            return result
    member = find_member(repo, which)
    with Owner.take(repo, "drain") as owner:
        if not repo.format.settled and member.id in repo.format.epoch.members:
            advance(repo, owner)
        if member.id in repo.format.epoch.members:
            left = len(repo.format.epoch.members) - 1
            if left < repo.format.replicas:
                raise ConfigError(
                    f"{member.name} cannot leave: {left} members are too few for {repo.format.replicas} replicas",
                    hint="add a store first: `kvctl repo rebalance`",
                )
            _check_unused(repo, member)
            _change(repo, add=(), remove=(member.id,), dead=())
        result = advance(repo, owner)
    repo.members = _reindexed(repo)
    if not result.waiting:
        erase(member)
    member.store.close()
    return result


def _erase_found(leaving: Sequence[Found]) -> None:
    for item in leaving:
        if item.member is not None:
            erase(RepoMember(item.config.url, 0, item.config, item.store, item.member.member))


def replace_member(repo: Repo, old: str, new: StoreConfig) -> MoveResult:
    """Put the store `new` in the place of member `old`, which is dead (or, when it answers, is drained on the way).

    Whoever runs this declares a member that does not answer dead: what only it had is lost. All other members
    must answer.
    """
    found = look(new, repo.ctx, repo.opener)
    if found.error is not None:
        raise found.error
    if found.damaged is not None:
        raise found.damaged
    if found.member is not None and found.member.repo == repo.id and found.member.member in repo.format.live:
        # a replacement that was interrupted after it had begun the new epoch
        left = [item for item in repo.extras if old in {item.config.url, item.member.member if item.member else ""}]
        repo.members = [_answering(item, found) for item in repo.members]
        repo.refresh()  # the new member may know more than those that were asked
        with Owner.take(repo, "replace") as owner:
            result = _finish_replace(repo, owner)
            _erase_found(left)
            return result
    gone = find_member(repo, old)
    others = [member for member in repo.down if member.id != gone.id]
    if others:
        raise MemberDownError(
            f"cannot replace {gone.name}: member {others[0].name} is down as well",
            cause=str(others[0].down),
            hint="all other members must know of the replacement: bring it back first",
        )
    with _without(repo, gone), Owner.take(repo, "replace") as owner:
        member = adopt(repo, found)
        if gone.down is None:
            _check_unused(repo, gone)
        _change(repo, add=[member], remove=(gone.id,), dead=(gone.id,) if gone.down is not None else ())
        result = _finish_replace(repo, owner)
    if gone.down is None and not result.waiting:
        erase(gone)
    gone.store.close()
    return result


def _answering(member: RepoMember, found: Found) -> RepoMember:
    if found.member is None or found.member.member != member.id or member.down is None:
        return member
    return dataclasses.replace(member, config=found.config, store=found.store, down=None)


def _finish_replace(repo: Repo, owner: Owner) -> MoveResult:
    result = advance(repo, owner)
    repo.members = _reindexed(repo)
    return result


class _without:  # noqa: N801 - reads as a statement
    """While the lock is taken, its home must not be the dead member: it is declared dead in our view first."""

    def __init__(self, repo: Repo, gone: RepoMember) -> None:
        self._repo = repo
        self._gone = gone
        self._before = repo.format

    def __enter__(self) -> None:
        if self._gone.down is not None:
            dead = (*self._before.dead, self._gone.id)
            self._repo.format = dataclasses.replace(self._before, dead=dead)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._repo.format.generation == self._before.generation:
            self._repo.format = self._before


def find_member(repo: Repo, which: str) -> RepoMember:
    """The member of that name, URL, path or (beginning of an) id. Raises NotFoundError, UsageError when several fit."""
    named = {which, f"file://{os.path.abspath(which)}"}  # a path is a store's address everywhere else
    exact = [member for member in repo.members if not named.isdisjoint({member.name, member.config.url, member.id})]
    fits = exact or [member for member in repo.members if len(which) >= 4 and member.id.startswith(which)]
    if not fits:
        raise NotFoundError(
            f"repo {repo.id[:8]} has no member {which!r}",
            hint=f"its members: {', '.join(member.name for member in repo.members)}",
        )
    if len(fits) > 1:
        raise UsageError(f"{which!r} fits several members", hint="use the id that `kvctl repo status` shows")
    return fits[0]


def adopt(repo: Repo, found: Found) -> RepoMember:
    """Make an empty store, or one that was a member once, ready to be a member. Raises ConfigError for a store
    of another repo, UsageError for one that holds what is nobody's.
    """
    mine = found.member
    if mine is None:
        if found.format is None or found.format.id != repo.id:  # else only its member.json is lost
            check_vacant(found)
        mine = MemberFile(repo.id, secrets.token_hex(16))
        try:
            found.store.put(MEMBER, mine.to_bytes(), if_absent=True)
        except ConflictError as problem:
            raise ConflictError(f"{found.config.url} is being added by somebody else", cause=str(problem)) from problem
    if mine.repo != repo.id:
        raise ConfigError(
            f"{found.config.url} is a member of another repo",
            cause=f"it shows repo {mine.repo}",
            hint="choose another place, or empty it if that repo is gone",
        )
    if any(member.id == mine.member for member in repo.members):
        raise ConfigError(
            f"{found.config.url} is a member already",
            cause=f"it shows the id {mine.member}",
            hint="choose another place",
        )
    check_endpoints(found.config, mine, repo.ctx, repo.opener)
    member = RepoMember(found.config.url, len(repo.members), found.config, found.store, mine.member)
    # what it remembers of the time when it was a member must not come back to life
    _erase_keys(member, (*METADATA, "gc/", LEASES))
    return member


def _change(repo: Repo, *, add: Sequence[RepoMember], remove: Sequence[str], dead: Sequence[str]) -> None:
    """Begin a new epoch with these members more and less."""
    fmt = repo.format
    ids = tuple(member for member in fmt.epoch.members if member not in remove) + tuple(m.id for m in add)
    repo.members = [*repo.members, *add]
    names = {member: fmt.name(member) for member in fmt.members} | {member.id: member.name for member in add}
    changed = fmt.next(
        members=fmt.members + tuple(member.id for member in add),
        names=names,
        epoch=Epoch(fmt.epoch.number + 1, ids),
        earlier=(*fmt.earlier, fmt.epoch),
        dead=tuple(dict.fromkeys((*fmt.dead, *dead))),
        phase="moving",
    )
    repo.members = [member for member in repo.members if member.id in changed.live]
    write_format(repo, changed)
    repo.extras = []


def _check_unused(repo: Repo, member: RepoMember) -> None:
    holds = [
        hold
        for prefix in (LEASES, INTENTS)
        for hold in read_holds(repo, prefix)
        if hold.member.id == member.id and hold.open and not hold.over()
    ]
    if holds:
        raise ConflictError(
            f"{member.name} cannot leave now: {len(holds)} readers or writers have their leases on it",
            cause=", ".join(sorted({hold.label for hold in holds})),
            hint="wait for them to end, then run it again",
        )


def _reindexed(repo: Repo) -> list[RepoMember]:
    members = [member for member in repo.members if member.id in repo.format.members]
    return [dataclasses.replace(member, index=index) for index, member in enumerate(members)]


def erase(member: RepoMember) -> None:
    """Remove everything of the repo from a store that left it; its member.json goes last."""
    _erase_keys(member, OURS)
    member.store.delete([REPO])
    if read_optional(member.store, MEMBER) is not None:
        member.store.delete([MEMBER])


def _erase_keys(member: RepoMember, prefixes: Sequence[str]) -> None:
    for prefix in prefixes:
        keys = [item.key for item in member.store.list(prefix)]
        for start in range(0, len(keys), 500):
            member.store.delete(keys[start : start + 500])
