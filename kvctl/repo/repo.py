"""`Repo`: an open repo. Members, where chunks live, and metadata by the rules of `kvctl.repo.metadata`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import (
    EnvError,
    FormatError,
    IncompatibleError,
    MemberDownError,
    NotFoundError,
    TransientError,
    UsageError,
)
from kvctl.repo import metadata, placement
from kvctl.repo.format import STRIPE, RepoFormat, parse_repo
from kvctl.repo.layout import REPO
from kvctl.repo.locking import SETTLE
from kvctl.repo.members import Found, Opener, RepoMember, fan_out, look, match
from kvctl.transports.api import ObjectInfo
from kvctl.transports.registry import open_store

A = TypeVar("A")
B = TypeVar("B")


class Repo:
    """Thread-safe for reads and commits. `members` are in stored order; `up` are those that answer.

    Close it, or use it in a `with` block.
    """

    def __init__(
        self,
        fmt: RepoFormat,
        members: Sequence[RepoMember],
        ctx: Context,
        *,
        opener: Opener = open_store,
        workers: int = 16,
    ) -> None:
        self.format = fmt
        self.members = list(members)
        self.ctx = ctx
        self.opener = opener
        self.uneven = False  # a member shows an older repo.json: a change of members is not everywhere yet
        self.extras: list[Found] = []  # configured stores that are no members
        self._workers = workers

    @classmethod
    def init(
        cls,
        configs: Sequence[StoreConfig],
        *,
        ctx: Context,
        stripe_size: int = STRIPE,
        replicas: int = 1,
        opener: Opener = open_store,
        settle: float = SETTLE,
    ) -> Repo:
        """Make a repo over the stores and open it. An init that was interrupted is finished by running it again.

        Raises UsageError when a repo is there already, ConfigError for two stores at one place, endpoints that
        lead to different stores, a member of another repo, or impossible numbers.
        """
        from kvctl.repo.init import init_stores

        init_stores(configs, stripe_size=stripe_size, replicas=replicas, ctx=ctx, opener=opener, settle=settle)
        return cls.open(configs, ctx, opener=opener, settle=settle)

    @classmethod
    def open(
        cls,
        configs: Sequence[StoreConfig],
        ctx: Context,
        *,
        opener: Opener = open_store,
        workers: int = 16,
        settle: float = SETTLE,
        allow_extras: bool = False,
    ) -> Repo:
        """The repo that the stores are members of. Members that do not answer are `down`; the newest repo.json
        counts. `allow_extras`: stores that are no members (to be added, or drained before) are `extras`.

        Raises NotFoundError when there is no repo, MemberDownError when no store answers, IncompatibleError
        when the stores belong to different repos or to one that this kvctl cannot read, ConfigError when the
        list of stores does not fit the repo.
        """
        if not configs:
            raise UsageError("a repo needs at least one store", hint="name one with --repo")
        found = fan_out(lambda config: look(config, ctx, opener, settle), configs, workers=workers)
        try:
            fmt = newest(found)
            extras: list[Found] = []
            members = match(found, fmt, extras if allow_extras else None)
        except BaseException:
            for item in found:
                item.store.close()
            raise
        repo = cls(fmt, members, ctx, opener=opener, workers=workers)
        repo.extras = extras
        behind = {item.member.member for item in found if item.member and _generation(item) < fmt.generation}
        repo.uneven = not behind.isdisjoint(fmt.live)
        return repo

    @property
    def id(self) -> str:
        return self.format.id

    @property
    def up(self) -> list[RepoMember]:
        return [member for member in self.members if member.down is None]

    @property
    def down(self) -> list[RepoMember]:
        return [member for member in self.members if member.down is not None]

    def member(self, member_id: str) -> RepoMember:
        for member in self.members:
            if member.id == member_id:
                return member
        raise MemberDownError(
            f"member {self.format.name(member_id)} joined repo {self.id[:8]} meanwhile",
            hint="list its store with the others and run it again",
        )

    def each(self, function: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """`function` of every item, on threads where there are several."""
        return fan_out(function, items, workers=self._workers)

    def places(self, digest: str) -> list[RepoMember]:
        """The members that must hold the chunk, best first."""
        ids = placement.places(self.format.epoch.members, digest, self.format.replicas)
        return [self.member(member) for member in ids]

    def locate(self, digest: str) -> list[RepoMember]:
        """Where to look for a chunk: its places, then those of earlier epochs; members that answer first. Where
        none of them has it, `refresh` and ask again: it may have moved.
        """
        ids = placement.places(self.format.epoch.members, digest, self.format.replicas)
        for epoch in reversed(self.format.earlier):
            ids += placement.places(epoch.members, digest, self.format.replicas)
        known = {member.id: member for member in self.members}
        members = [known[member] for member in dict.fromkeys(ids) if member in known]
        if not members:
            self.member(ids[0])  # raises: it joined after we opened the repo
        return sorted(members, key=lambda member: member.down is not None)

    def read_meta(self, key: str) -> bytes:
        """See `metadata.read`."""
        return metadata.read(self, key)

    def read_meta_versioned(self, key: str) -> tuple[bytes, str]:
        """See `metadata.read_versioned`."""
        return metadata.read_versioned(self, key)

    def commit_meta(
        self, key: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        """See `metadata.commit`."""
        return metadata.commit(self, key, data, if_absent=if_absent, if_version=if_version)

    def delete_meta(self, key: str) -> None:
        """See `metadata.delete`."""
        metadata.delete(self, key)

    def list_meta(self, prefix: str) -> list[ObjectInfo]:
        """See `metadata.listing`."""
        return metadata.listing(self, prefix)

    def require_all(self, doing: str) -> None:
        """Raises MemberDownError unless every member answers."""
        if self.down:
            first = self.down[0]
            raise MemberDownError(
                f"cannot {doing}: member {first.name} is down, and this needs all members",
                cause=str(first.down),
                hint="bring it back, or replace it with `kvctl repo repair --replace`",
            )

    def refresh(self) -> None:
        """Read `repo.json` again from the members that answer; the newest one counts from now on."""
        seen = []
        for member in self.up:
            try:
                fmt = parse_repo(member.store.get(REPO), f"{member.name}/{REPO}")
            except (NotFoundError, FormatError):
                seen.append(0)
                continue
            except (TransientError, EnvError):
                continue
            seen.append(fmt.generation)
            if fmt.id == self.id and fmt.generation > self.format.generation:
                self.format = fmt
        self.uneven = any(generation < self.format.generation for generation in seen)

    def close(self) -> None:
        for member in self.members:
            member.store.close()
        for item in self.extras:
            item.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _generation(item: Found) -> int:
    return item.format.generation if item.format is not None else 0


def newest(found: Sequence[Found]) -> RepoFormat:
    """The `repo.json` that counts among those that the stores show. Raises as `Repo.open` says."""
    shown = [item for item in found if item.format is not None]
    if not shown:
        for item in found:
            if item.damaged is not None:
                raise item.damaged
        silent = [item for item in found if item.error is not None]
        for item in silent:
            assert item.error is not None
            if not isinstance(item.error, TransientError):
                raise item.error  # credentials, TLS: say that, not that it is down
            raise MemberDownError(
                f"no repo is reachable: {item.config.url} does not answer",
                cause=str(item.error),
                hint=item.error.hint,
            ) from item.error
        unfinished = any(item.member is not None for item in found)
        raise NotFoundError(
            f"no repo at {', '.join(item.config.url for item in found)}",
            cause="its init was interrupted" if unfinished else None,
            hint="run `kvctl repo init` again" if unfinished else "make one with `kvctl repo init`",
        )
    best = max((item.format for item in shown if item.format is not None), key=lambda fmt: fmt.generation)
    for item in shown:
        fmt = item.format
        assert fmt is not None
        if fmt.id != best.id:
            first = next(other for other in shown if other.format is not None and other.format.id == best.id)
            raise IncompatibleError(
                "the stores belong to different repos",
                cause=f"{first.config.url} is of repo {best.id}, {item.config.url} of repo {fmt.id}",
                hint="list the stores of one repo",
            )
        if fmt.generation == best.generation and fmt != best:
            raise IncompatibleError(
                f"the members of repo {best.id[:8]} disagree on generation {best.generation} of repo.json",
                cause=f"{item.config.url} differs",
                hint="two changes of its members ran at once; keep the repo.json that is right and remove the other",
            )
    return best
