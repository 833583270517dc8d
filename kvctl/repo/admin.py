"""Use cases of `kvctl repo ..`: each takes the configured stores, a context and options, and returns a result
with `to_json`. Opens and closes the repo itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import IntegrityError, PartialError
from kvctl.repo import maintain
from kvctl.repo.check import CheckResult, Share, check
from kvctl.repo.copying import CopyResult, plan_replacement
from kvctl.repo.epochs import MoveResult
from kvctl.repo.format import STRIPE
from kvctl.repo.gc import GcOptions, GcResult, run_gc
from kvctl.repo.maintain import RepairResult
from kvctl.repo.repo import Repo
from kvctl.repo.status import StatsResult, StatusResult, stats, status
from kvctl.repo.sync import SyncResult

Configs = Sequence[StoreConfig]


@dataclass(frozen=True, slots=True)
class InitOptions:
    """Sizes in bytes."""

    stripe_size: int = STRIPE
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class InitResult:
    id: str
    stripe_size: int
    replicas: int
    members: Mapping[str, str]  # id -> name

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {"schema": "kvctl.repo-init/1", **dataclasses.asdict(self)}


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """`read_data`: which chunks are read and their digests verified; None: none."""

    read_data: Share | None = None


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """`replace`: (member's name, URL or id; the store that takes its place)."""

    replace: tuple[tuple[str, StoreConfig], ...] = ()
    read_data: Share | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What `repair` did: a move for each replaced member, then the repair itself."""

    moves: tuple[MoveResult, ...]
    repaired: RepairResult

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {"schema": "kvctl.repo-repair/1", **dataclasses.asdict(self)}


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What `rebalance` or `drain` moved."""

    command: str
    move: MoveResult

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {"schema": f"kvctl.repo-{self.command}/1", **dataclasses.asdict(self.move)}


def init_repo(configs: Configs, ctx: Context, options: InitOptions | None = None) -> InitResult:
    """See `Repo.init`."""
    options = options or InitOptions()
    with Repo.init(configs, stripe_size=options.stripe_size, replicas=options.replicas, ctx=ctx) as repo:
        names = {member.id: member.name for member in repo.members}
        return InitResult(repo.id, repo.format.stripe_size, repo.format.replicas, names)


def repo_status(configs: Configs, ctx: Context) -> StatusResult:
    """Members, what is at risk, what cannot be read. Works with members down."""
    with Repo.open(configs, ctx, allow_extras=True) as repo:
        return status(repo)


def repo_stats(configs: Configs, ctx: Context) -> StatsResult:
    with Repo.open(configs, ctx) as repo:
        return stats(repo)


def check_repo(configs: Configs, ctx: Context, options: CheckOptions | None = None) -> CheckResult:
    """Looks, changes nothing. Problems are in the result, not raised."""
    options = options or CheckOptions()
    with Repo.open(configs, ctx) as repo:
        return check(repo, read_data=options.read_data)


def repair_repo(configs: Configs, ctx: Context, options: RepairOptions | None = None) -> RepairReport:
    """Replace dead members, then missing and damaged copies. Chunks without any good copy are in the result."""
    options = options or RepairOptions()
    with Repo.open(configs, ctx, allow_extras=True) as repo:
        if options.dry_run:
            plans = tuple(_plan(repo, old) for old, _ in options.replace)
            return RepairReport(plans, maintain.repair(repo, read_data=options.read_data, dry_run=True))
        moves = tuple(maintain.replace_member(repo, old, new) for old, new in options.replace)
        return RepairReport(moves, maintain.repair(repo, read_data=options.read_data))


def _plan(repo: Repo, old: str) -> MoveResult:
    copies = plan_replacement(repo, maintain.find_member(repo, old))
    return MoveResult(repo.format.epoch.number + 1, copies, SyncResult(), CopyResult())


def rebalance_repo(configs: Configs, ctx: Context) -> MoveReport:
    """Stores in `configs` that are no members yet are added; then everything moves to its places."""
    with Repo.open(configs, ctx, allow_extras=True) as repo:
        return MoveReport("rebalance", maintain.rebalance(repo))


def drain_member(configs: Configs, ctx: Context, member: str) -> MoveReport:
    """Move everything off `member` (name, URL or id), drop it from the repo, empty its store."""
    with Repo.open(configs, ctx, allow_extras=True) as repo:
        return MoveReport("drain", maintain.drain(repo, member))


def gc_repo(configs: Configs, ctx: Context, options: GcOptions | None = None) -> GcResult:
    """See `run_gc`."""
    with Repo.open(configs, ctx) as repo:
        return run_gc(repo, options)


def require_ok(result: CheckResult) -> None:
    """For callers that need an exit code: raises IntegrityError when something is lost or wrong, PartialError when
    only replicas or copies are missing.
    """
    if not result.ok:
        first = result.problems[0]
        kind = IntegrityError if result.damaged else PartialError
        raise kind(
            f"the check found {len(result.problems)} problems",
            cause=f"{first.kind}: {first.key} {first.member}: {first.detail}",
            hint="`kvctl repo repair` mends what has a good copy",
        )
