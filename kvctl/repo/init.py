"""Making a repo: a `member.json` on every store, then `repo.json` on every store, first store by URL first.

The first `repo.json` is the commit: an init that was interrupted before it leaves stores with a `member.json`
that the next run takes over, one interrupted after it is finished by the next run.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import ConfigError, ConflictError, KvctlError, UsageError
from kvctl.repo.format import Epoch, MemberFile, RepoFormat, check_shape, parse_member, parse_repo
from kvctl.repo.layout import MEMBER, REPO
from kvctl.repo.members import Found, Opener, check_endpoints, check_vacant, fan_out, look


def init_stores(
    configs: Sequence[StoreConfig], *, stripe_size: int, replicas: int, ctx: Context, opener: Opener, settle: float
) -> None:
    """See `Repo.init`."""
    check_shape(stripe_size, replicas, len(configs))
    found = fan_out(lambda config: look(config, ctx, opener, settle), configs)
    try:
        for item in found:
            if item.error is not None:
                raise item.error
            if item.damaged is not None:
                raise item.damaged
        _init(
            sorted(found, key=lambda item: (item.config.url, item.config.endpoints)), stripe_size, replicas, ctx, opener
        )
    finally:
        for item in found:
            item.store.close()


def _init(found: Sequence[Found], stripe_size: int, replicas: int, ctx: Context, opener: Opener) -> None:
    begun = _begun(found)
    if begun is not None and all(item.format is not None for item in found):
        raise UsageError(
            f"{found[0].config.url} holds a repo already",
            cause=f"repo {begun.id}, {len(begun.live)} members",
            hint="use it as it is, or choose another place",
        )
    ids = _write_members(found, begun.id if begun else _repo_id(found), ctx, opener)
    if begun is None:
        begun = RepoFormat(
            id=ids[0].repo,
            members=tuple(item.member for item in ids),
            epoch=Epoch(1, tuple(item.member for item in ids)),
            replicas=replicas,
            stripe_size=stripe_size,
            names={mine.member: item.config.url for mine, item in zip(ids, found, strict=True)},
        )
    elif (
        {item.member for item in ids} != set(begun.members)
        or (begun.stripe_size, begun.replicas) != (stripe_size, replicas)
        or begun.generation != 1
    ):
        raise UsageError(
            f"repo {begun.id[:8]} exists already and is not what is asked for",
            cause=f"it has {len(begun.members)} members, stripes of {begun.stripe_size} bytes, "
            f"{begun.replicas} replicas; asked for {len(ids)}, {stripe_size}, {replicas}",
            hint="use the same stores and numbers to finish its init, or choose another place",
        )
    begun = parse_repo(begun.to_bytes(), REPO)  # as it reads back: equal to what another run finds
    for item in found:
        _put_repo(item, begun)


def _begun(found: Sequence[Found]) -> RepoFormat | None:
    """The `repo.json` that an earlier init wrote on some of the stores."""
    for item in found:
        if item.format is not None:
            return item.format
    return None


def _repo_id(found: Sequence[Found]) -> str:
    for item in found:
        if item.member is not None:
            return item.member.repo
    return secrets.token_hex(16)


def _write_members(found: Sequence[Found], repo_id: str, ctx: Context, opener: Opener) -> list[MemberFile]:
    """A member file on every store; what was written is taken away again when a store is refused."""
    seen: dict[str, Found] = {}
    written: list[Found] = []
    members: list[MemberFile] = []
    try:
        for item in found:
            mine = _write_member(item, repo_id, written)
            if mine.member in seen:
                other = seen[mine.member]
                raise ConfigError(
                    "two of the stores are at one place",
                    cause=f"{other.config.url} and {item.config.url} show the same member {mine.member}",
                    hint="list each store once; several ways to one store are its endpoints",
                )
            if mine.repo != repo_id or (item.format is not None and item.format.id != repo_id):
                raise ConfigError(
                    f"{item.config.url} is a member of another repo",
                    cause=f"it shows repo {mine.repo}, the others repo {repo_id}",
                    hint="choose another place, or empty it if that repo is gone",
                )
            seen[mine.member] = item
            check_endpoints(item.config, mine, ctx, opener)
            members.append(mine)
    except KvctlError:
        for item in written:
            with contextlib.suppress(KvctlError):
                item.store.delete([MEMBER])
        raise
    return members


def _write_member(item: Found, repo_id: str, written: list[Found]) -> MemberFile:
    if item.member is not None:
        return item.member
    check_vacant(item)
    mine = MemberFile(repo_id, secrets.token_hex(16))
    try:
        item.store.put(MEMBER, mine.to_bytes(), if_absent=True)
    except ConflictError:
        return parse_member(item.store.get(MEMBER), f"{item.config.url}/{MEMBER}")
    written.append(item)
    return mine


def _put_repo(item: Found, fmt: RepoFormat) -> None:
    try:
        item.store.put(REPO, fmt.to_bytes(), if_absent=True)
    except ConflictError as problem:
        other = parse_repo(item.store.get(REPO), f"{item.config.url}/{REPO}")
        if other.id != fmt.id:
            raise ConfigError(
                f"{item.config.url} became a member of another repo meanwhile", cause=f"repo {other.id}"
            ) from problem
        if other.generation == fmt.generation and other != fmt:
            raise ConflictError(
                "another init ran at the same time", cause=str(problem), hint="run it again"
            ) from problem
