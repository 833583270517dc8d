"""Changing a repo's members: a new epoch, everything copied to its places, authority moved, old places emptied.

    moving      written to all members. New chunks go to the new places; reads try both; homes of metadata are
                still those of the oldest epoch (less members declared dead)
    switching   once metadata and chunks are at their new places: no commits, one last look at the metadata
    settled     homes are the new epoch's

Every step is written to all members before the next begins, and each can be done again: a change that was
interrupted is finished by `advance`, from whatever it left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvctl.core.errors import ConflictError, FormatError, IntegrityError, TransientError
from kvctl.repo.copying import CopyResult, drop_misplaced, fill_places
from kvctl.repo.format import RepoFormat, parse_repo
from kvctl.repo.layout import LEASES, REPO
from kvctl.repo.leases import read_holds
from kvctl.repo.marking import finish_deletions
from kvctl.repo.members import RepoMember, read_optional
from kvctl.repo.sync import SyncResult, sync_metadata

if TYPE_CHECKING:
    from kvctl.repo.owner import Owner
    from kvctl.repo.repo import Repo


@dataclass(slots=True)
class MoveResult:
    """What a change of members copied and what it removed from old places. `waiting`: old copies that stay until
    the readers that hold leases are done; run a rebalance later."""

    epoch: int
    copied: CopyResult
    metadata: SyncResult
    removed: CopyResult
    waiting: bool = False


def write_format(repo: Repo, fmt: RepoFormat) -> None:
    """Put `fmt` on every live member, in order of id, and work by it from now on. Members that have it already
    are left alone. Raises ConflictError when another change was faster.
    """
    data = fmt.to_bytes()
    for member in sorted((repo.member(item) for item in fmt.live), key=lambda item: item.id):
        _write_one(member, fmt, data)
    repo.format = fmt


def _write_one(member: RepoMember, fmt: RepoFormat, data: bytes) -> None:
    where = f"{member.name}/{REPO}"
    old = read_optional(member.store, REPO)
    if old == data:
        return
    if old is None:
        member.store.put(REPO, data, if_absent=True)
        return
    version = member.store.stat(REPO).version
    try:
        seen = parse_repo(member.store.get(REPO), where)
    except FormatError:  # damaged: what the others agree on takes its place
        member.store.put(REPO, data, if_version=version)
        return
    if seen.id == fmt.id and seen.generation >= fmt.generation:
        raise ConflictError(
            f"another change of the repo's members is under way: {where} is of generation {seen.generation}",
            cause=f"this one would be {fmt.generation}",
            hint="wait for it to end, then run it again",
        )
    member.store.put(REPO, data, if_version=version)


def advance(repo: Repo, owner: Owner) -> MoveResult:
    """Finish the change of members that `repo.format` describes, or nothing if there is none; in both cases
    fill places that lack chunks and empty places that should not have them. Needs all live members.

    Raises IntegrityError when a chunk has no good copy: authority stays where it is until a repair or a removal
    of what names it.
    """
    repo.require_all("move data between members")
    write_format(repo, repo.format)
    finish_deletions(repo)
    result = MoveResult(repo.format.epoch.number, CopyResult(), SyncResult(), CopyResult())
    result.metadata = sync_metadata(repo)
    owner.keep()
    result.copied = fill_places(repo)
    owner.keep()
    if result.copied.failed:
        name, member, why = result.copied.failed[0]
        raise TransientError(f"chunk {name} could not be copied to {member}", cause=why, hint="run it again")
    if not repo.format.settled:
        _settle(repo, result)
    if any(hold.open and not hold.over() for hold in read_holds(repo, LEASES)):
        result.waiting = True
    elif not result.copied.lost:
        result.removed = drop_misplaced(repo)
    return result


def _settle(repo: Repo, result: MoveResult) -> None:
    fmt = repo.format
    leaving = {member for epoch in fmt.earlier for member in epoch.members} - {*fmt.epoch.members, *fmt.dead}
    if result.copied.lost and leaving:
        raise IntegrityError(
            f"{len(result.copied.lost)} chunks have no good copy",
            cause=result.copied.lost[0],
            hint="`kvctl repo check` names the models that need them; remove those or push them again",
        )
    if fmt.phase == "moving":
        write_format(repo, fmt.next(phase="switching"))
    sync_metadata(repo)
    # what was committed between the first look and the switch may have brought chunks to old places only
    late = fill_places(repo)
    result.copied.objects += late.objects
    result.copied.bytes += late.bytes
    fmt = repo.format
    settled = fmt.next(
        phase="settled",
        earlier=(),
        dead=(),
        members=fmt.epoch.members,
        names={member: fmt.name(member) for member in fmt.epoch.members},
    )
    write_format(repo, settled)
    # those that leave come last: until then they show that something is not finished
    for member in leaving:
        _write_one(repo.member(member), settled, settled.to_bytes())
