"""Garbage collection: condemn what nothing names, and delete it after the grace period if still nothing does.

One pass:
    1. make sure every member has the condemned set of the last pass,
    2. list the chunks,
    3. mark from holds, then manifests (`kvctl.repo.marking`),
    4. delete names that were condemned at least `grace` ago and are not marked,
    5. publish the new set: less what is gone, plus what is garbage now.
A name that is condemned and marked all the same (it was declared before it was condemned) stays condemned, so
that nobody new relies on it; its grace begins when a later pass does not find it marked.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from kvctl.core.errors import NotFoundError, TransientError
from kvctl.repo import metadata
from kvctl.repo.chunks import chunk_key
from kvctl.repo.condemned import Condemned, publish, read_condemned
from kvctl.repo.layout import CONDEMNED, is_ours
from kvctl.repo.leases import TTL, HoldInfo, sweep_hold
from kvctl.repo.marking import Chunk, finish_deletions, list_chunks, mark
from kvctl.repo.members import RepoMember
from kvctl.repo.owner import Owner
from kvctl.repo.repack import LIVE_RATIO, Repacker

if TYPE_CHECKING:
    from kvctl.repo.repo import Repo

GRACE: Final = 24 * 3600.0
_BATCH: Final = 500


@dataclass(frozen=True, slots=True)
class GcOptions:
    """`grace` in seconds: how long a name stays condemned before it goes; longer than the longest unleased read.
    `max_seconds`, `max_deletes` (objects): stop in order when reached, the next run goes on. `repacker`: tends the
    packs of a format first (see `kvctl.repo.repack`), those of which less than `live_ratio` is used.
    """

    grace: float = GRACE
    max_seconds: float | None = None
    max_deletes: int | None = None
    dry_run: bool = False
    repacker: Repacker | None = None
    live_ratio: float = LIVE_RATIO


@dataclass(slots=True)
class GcResult:
    """Counts of one run. Objects are copies on members: a chunk with two replicas is two. `pending` names are
    condemned and wait for the end of their grace period, the first of them until `next_due` (RFC 3339, UTC). Not
    `complete`: a budget ended the run.
    """

    chunks: int = 0
    live: int = 0
    manifests: int = 0
    holds: int = 0
    condemned: int = 0
    pending: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0
    swept_holds: int = 0
    swept_uploads: int = 0
    swept_metadata: int = 0
    repacked_packs: int = 0
    repacked_bytes: int = 0
    next_due: str = ""
    complete: bool = True
    dry_run: bool = False

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {"schema": "kvctl.gc/1", **dataclasses.asdict(self)}


class _Budget:
    def __init__(self, repo: Repo, owner: Owner, options: GcOptions) -> None:
        self._cancel = repo.ctx.cancel
        self._owner = owner
        self._ends = None if options.max_seconds is None else time.monotonic() + options.max_seconds
        self._deletes = options.max_deletes

    def keep(self) -> None:
        """Raises when asked to stop or when the lock is lost."""
        self._cancel.check("collecting garbage")
        self._owner.keep()

    def take(self, objects: int) -> bool:
        """Whether so many more objects may be deleted now. Raises as `keep`."""
        self.keep()
        if self._ends is not None and time.monotonic() >= self._ends:
            return False
        if self._deletes is not None:
            if objects > self._deletes:
                return False
            self._deletes -= objects
        return True


def run_gc(repo: Repo, options: GcOptions | None = None) -> GcResult:
    """Collect garbage. With a grace of 0 garbage is condemned and deleted in one run.

    Raises MemberDownError unless all members answer, ConflictError while other maintenance runs, FormatError
    for a manifest it cannot read (nothing is deleted then), TransientError while a rebalance is unfinished.
    """
    options = options or GcOptions()
    repo.format.check_can("gc")
    repo.require_all("collect garbage")
    if not repo.format.settled:
        raise TransientError(
            "cannot collect garbage while the repo moves to other members",
            hint="finish it first: `kvctl repo rebalance`",
        )
    with Owner.take(repo, "gc") as owner:
        budget = _Budget(repo, owner, options)
        result = GcResult(dry_run=options.dry_run)
        if not options.dry_run:
            result.swept_metadata = finish_deletions(repo)
            _repack(repo, options, budget, result)
        condemned = _pass(repo, options, budget, result)
        waiting = any(since is not None for since in condemned.names.values())
        if options.grace <= 0 and waiting and result.complete and not options.dry_run:
            again = GcResult()
            condemned = _pass(repo, options, budget, again)
            result.deleted_objects += again.deleted_objects
            result.deleted_bytes += again.deleted_bytes
            result.complete = again.complete
        starts = [since for since in condemned.names.values() if since is not None]
        result.pending = len(starts)
        result.next_due = (min(starts) + timedelta(seconds=options.grace)).isoformat() if starts else ""
        if not options.dry_run:
            result.swept_uploads = _sweep_uploads(repo, options, budget, result)
        return result


def _repack(repo: Repo, options: GcOptions, budget: _Budget, result: GcResult) -> None:
    """Let the packs' owner work, as far as the budget goes."""
    if options.repacker is None or not budget.take(0):
        return
    done = options.repacker(repo, options.live_ratio, budget.keep)
    result.repacked_packs, result.repacked_bytes = done.packs, done.freed_bytes
    result.swept_metadata += done.swept


def _pass(repo: Repo, options: GcOptions, budget: _Budget, result: GcResult) -> Condemned:
    home = metadata.require_home(repo, CONDEMNED, "collect garbage: cannot write")
    old = read_condemned(repo, versioned=True)
    if old.version is not None and not options.dry_run:
        metadata.copy_out(repo, home, CONDEMNED, home.store.get(CONDEMNED), must=True)
    chunks = list_chunks(repo)
    marks = mark(repo)
    now = home.store.now()
    due = now - timedelta(seconds=options.grace)
    doomed = [
        chunks[name] for name, since in sorted(old.names.items())
        if name in chunks and name not in marks.live and since is not None and since <= due
    ]  # fmt: skip
    gone = _delete(repo, doomed, budget, result, options)
    garbage = {name for name in chunks if name not in marks.live and name not in old.names}
    names = _next_names(old, chunks, gone, marks.live, now) | dict.fromkeys(garbage, now)
    result.chunks, result.live = len(chunks), len(chunks.keys() & marks.live)
    result.manifests, result.holds = marks.manifests, len(marks.open)
    result.condemned = len(garbage)
    if options.dry_run:
        return Condemned(old.seq, names)
    result.swept_holds += _sweep_holds(marks.stale)
    if names == dict(old.names):
        return old
    return publish(repo, old, names)


def _next_names(
    old: Condemned, chunks: Mapping[str, Chunk], gone: set[str], live: set[str], now: datetime
) -> dict[str, datetime | None]:
    stay = {name: since for name, since in old.names.items() if name in chunks and name not in gone}
    return {name: None if name in live else since or now for name, since in stay.items()}


def _delete(repo: Repo, doomed: Sequence[Chunk], budget: _Budget, result: GcResult, options: GcOptions) -> set[str]:
    """Delete the chunks everywhere, in batches, as far as the budget goes; the names that are gone."""
    gone: set[str] = set()
    for start in range(0, len(doomed), _BATCH):
        batch = list(doomed[start : start + _BATCH])
        while batch and not budget.take(sum(len(chunk.sizes) for chunk in batch)):
            result.complete = False
            batch = batch[: len(batch) // 2]
        if not batch:
            break
        if not options.dry_run:
            repo.each(functools.partial(_delete_on, batch), repo.members)
        gone.update(chunk.name for chunk in batch)
        result.deleted_objects += sum(len(chunk.sizes) for chunk in batch)
        result.deleted_bytes += sum(sum(chunk.sizes.values()) for chunk in batch)
    return gone


def _delete_on(batch: Iterable[Chunk], member: RepoMember) -> None:
    keys = [chunk_key(chunk.name) for chunk in batch if member.id in chunk.sizes]
    if keys:
        member.store.delete(keys)


def _sweep_holds(stale: Sequence[HoldInfo]) -> int:
    """Remove holds that ended or were closed; an owner that comes back finds out either way."""
    for hold in stale:
        sweep_hold(hold)
    return len(stale)


def _sweep_uploads(repo: Repo, options: GcOptions, budget: _Budget, result: GcResult) -> int:
    """Abort uploads and temp files that were begun longer than the grace period ago; while a push is under way,
    only those older than any push gets without a sign of life. Others may keep their own beside the repo.
    """
    count = 0
    age = max(options.grace, TTL) if result.holds else options.grace
    for member in repo.members:
        due = member.store.now() - timedelta(seconds=age)
        for upload in list(member.store.uploads()):
            if upload.started > due or not is_ours(upload.key):
                continue
            if not budget.take(1):
                result.complete = False
                return count
            try:
                member.store.abort(upload)
            except NotFoundError:
                continue  # it ended meanwhile
            count += 1
    return count
