"""The members of a repo as a client reaches them: opening, recognising by id, standing in for absent ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NoReturn, TypeVar

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import (
    AuthError,
    ConfigError,
    EnvError,
    FormatError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    TransientError,
    UsageError,
)
from kvctl.repo.format import MemberFile, RepoFormat, parse_member, parse_repo
from kvctl.repo.layout import LOCKS, MEMBER, OURS, REPO
from kvctl.repo.locking import SETTLE, LockingStore
from kvctl.transfer.lanes import Member
from kvctl.transports.api import ObjectInfo, Store, StoreCapabilities, UploadInfo
from kvctl.transports.registry import open_store
from kvctl.transports.retry import RetryStore

A = TypeVar("A")
B = TypeVar("B")
Opener = Callable[[StoreConfig], Store]

# Finding out that a member is down must not take as long as getting a load through.
_PROBE_ATTEMPTS = 3
_WORKERS = 16


@dataclass(frozen=True, slots=True)
class RepoMember(Member):
    """A member by its id. `down` says why it cannot be used, None when it answers."""

    id: str = ""
    down: KvctlError | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a configured store showed when it was opened. `damaged`: what is wrong with its `repo.json`; others may have
    a good one.
    """

    config: StoreConfig
    store: Store
    member: MemberFile | None = None
    format: RepoFormat | None = None
    error: KvctlError | None = None
    damaged: FormatError | None = None


class AbsentStore:
    """Stands for a member that cannot be reached: every call raises MemberDownError with the reason."""

    capabilities = StoreCapabilities()

    def __init__(self, url: str, error: KvctlError) -> None:
        self.url = url
        self._error = error

    def _fail(self) -> NoReturn:
        raise self._error

    def stat(self, key: str) -> ObjectInfo:
        self._fail()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._fail()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._fail()

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        self._fail()

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        self._fail()

    def now(self) -> datetime:
        self._fail()

    def uploads(self) -> Iterator[UploadInfo]:
        self._fail()

    def abort(self, upload: UploadInfo) -> None:
        self._fail()

    def close(self) -> None:
        return


def fan_out(function: Callable[[A], B], items: Sequence[A], *, workers: int = _WORKERS) -> list[B]:
    """`function` of every item, in order, on threads; the first error in order is raised after all have ended."""
    if len(items) < 2 or workers < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(workers, len(items)), thread_name_prefix="kvctl-repo") as pool:
        return [future.result() for future in [pool.submit(function, item) for item in items]]


def wrap(store: Store, ctx: Context, *, attempts: int | None = None, settle: float = SETTLE) -> Store:
    """The store with retries, and with a lock where it lacks atomic conditional puts."""
    policy = ctx.retry if attempts is None else replace(ctx.retry, attempts=min(attempts, ctx.retry.attempts))
    return LockingStore(RetryStore(store, policy, cancel=ctx.cancel), settle=settle)


def read_optional(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NotFoundError:
        return None


def look(config: StoreConfig, ctx: Context, opener: Opener = open_store, settle: float = SETTLE) -> Found:
    """What is behind one configured store. A store that does not answer, or whose `member.json` is damaged, is `error`,
    not an exception.

    Raises ConfigError when its endpoints show different members.
    """
    try:
        inner = opener(config)
    except (TransientError, AuthError, NotFoundError) as problem:
        return Found(config, AbsentStore(config.url, problem), error=problem)
    store = wrap(inner, ctx, settle=settle)
    probe = wrap(inner, ctx, attempts=_PROBE_ATTEMPTS, settle=settle)
    damaged: FormatError | None = None
    try:
        data = read_optional(probe, MEMBER)
        member = None if data is None else parse_member(data, f"{config.url}/{MEMBER}")
        data = read_optional(probe, REPO)
        try:
            fmt = None if data is None else parse_repo(data, f"{config.url}/{REPO}")
        except FormatError as problem:
            fmt, damaged = None, problem
            ctx.progress.note(f"{problem}; `kvctl repo repair` writes it anew")
    except (TransientError, AuthError, EnvError, FormatError) as problem:
        return Found(config, store, error=problem)
    except BaseException:
        store.close()
        raise
    if member is not None:
        check_endpoints(config, member, ctx, opener)
    return Found(config, store, member, fmt, damaged=damaged)


def check_vacant(found: Found) -> None:
    """Before a store becomes a member: nothing may lie where a repo keeps its own, since from then on that is read,
    swept and, when the member leaves, erased as the repo's. Raises UsageError.
    """
    tickets = (f"{LOCKS}{MEMBER}/", f"{LOCKS}{REPO}/")  # of others that make a repo here, perhaps dead ones
    for prefix in OURS:
        first = next((item for item in found.store.list(prefix) if not item.key.startswith(tickets)), None)
        if first is not None:
            raise UsageError(
                f"{found.config.url} is not empty: {prefix} is where a repo keeps its own",
                cause=f"{first.key} is there, and no {MEMBER} says that it is of a repo",
                hint="choose an empty place, such as a new folder or prefix",
            )


def check_endpoints(config: StoreConfig, member: MemberFile, ctx: Context, opener: Opener) -> None:
    """Every endpoint of a store must lead to the same member; one that does not answer is only noted."""
    if len(config.endpoints) < 2:
        return

    def ask(endpoint: str) -> MemberFile | None:
        store = opener(StoreConfig(config.url, (endpoint,), config.options))
        try:
            data = read_optional(wrap(store, ctx, attempts=_PROBE_ATTEMPTS), MEMBER)
        except (TransientError, EnvError) as problem:
            ctx.progress.note(f"endpoint {endpoint} of {config.url} does not answer: {problem}")
            return member
        finally:
            store.close()
        return None if data is None else parse_member(data, f"{config.url}/{MEMBER} at {endpoint}")

    for endpoint, seen in zip(config.endpoints, fan_out(ask, config.endpoints), strict=True):
        if seen != member:
            shown = "no member" if seen is None else f"member {seen.member} of repo {seen.repo}"
            raise ConfigError(
                f"the endpoints of {config.url} lead to different stores",
                cause=f"{endpoint} shows {shown}, another one shows member {member.member} of repo {member.repo}",
                hint="endpoints are ways to one and the same store; list different stores as members of their own",
            )


def match(found: Sequence[Found], fmt: RepoFormat, extras: list[Found] | None = None) -> list[RepoMember]:
    """The repo's live members, in stored order, each with the configured store that shows its id.

    A member that none of the stores shows is down. A store that is no member (empty, or once was one) goes to
    `extras` where that is given. Raises ConfigError for any other store that is no member, or for two that are
    the same one.
    """
    by_id: dict[str, Found] = {}
    silent: list[Found] = []
    for item in found:
        if item.error is not None or item.member is None:
            silent.append(item)
        elif extras is not None and item.member.repo == fmt.id and item.member.member not in fmt.live:
            extras.append(item)
        elif item.member.repo != fmt.id or item.member.member not in fmt.live:
            raise ConfigError(
                f"{item.config.url} is not a member of repo {fmt.id[:8]}",
                cause=f"it is member {item.member.member[:8]} of repo {item.member.repo[:8]}"
                + (", which has been replaced or drained" if item.member.repo == fmt.id else ""),
                hint="correct the list of stores; `kvctl repo status` shows the members",
            )
        elif item.member.member in by_id:
            raise ConfigError(
                "two of the stores are one and the same member",
                cause=f"{by_id[item.member.member].config.url} and {item.config.url} both show {item.member.member}",
                hint="list each store once; several ways to one store are its endpoints",
            )
        else:
            by_id[item.member.member] = item
    missing = [member for member in fmt.live if member not in by_id]
    # a store that shows nothing is the missing member of that name, else any missing one
    silent.sort(key=lambda item: item.config.url not in [fmt.name(member) for member in missing])
    assigned: dict[str, Found] = {}
    for item in silent:
        free = [member for member in missing if member not in assigned]
        if not free and extras is not None and item.error is None:
            extras.append(item)
            continue
        if not free:
            raise ConfigError(
                f"{item.config.url} is not a member of repo {fmt.id[:8]}",
                cause=str(item.error) if item.error else f"all {len(fmt.live)} members are other stores",
                hint="correct the list of stores; `kvctl repo rebalance` adds one",
            )
        assigned[next((m for m in free if fmt.name(m) == item.config.url), free[0])] = item
    urls = Counter(item.config.url for item in found)
    return [
        _member(index, member, by_id.get(member), assigned.get(member), fmt, urls)
        for index, member in enumerate(fmt.live)
    ]


def _member(
    index: int, member: str, seen: Found | None, silent: Found | None, fmt: RepoFormat, urls: Mapping[str, int]
) -> RepoMember:
    name = fmt.name(member)
    item = seen or silent
    if item is not None and urls[item.config.url] > 1 and item.config.endpoints:
        name = f"{name} at {item.config.endpoints[0]}"  # the same bucket on several servers: the URL tells nothing
    if seen is not None:
        return RepoMember(name, index, seen.config, seen.store, member)
    if silent is None:
        error = MemberDownError(
            f"member {name} of repo {fmt.id[:8]} is not among the stores given",
            cause=f"the repo has {len(fmt.live)} members",
            hint="list all of its stores (see `kvctl repo status`)",
        )
        return RepoMember(name, index, StoreConfig(name), AbsentStore(name, error), member, error)
    if silent.error is None:
        error = MemberDownError(
            f"member {name} is not there",
            cause=f"{silent.config.url} is empty or not mounted: it shows no {MEMBER}",
            hint="mount it, or replace it with `kvctl repo repair --replace`",
        )
    else:
        error = MemberDownError(f"member {name} does not answer", cause=str(silent.error), hint=silent.error.hint)
    silent.store.close()
    return RepoMember(name, index, silent.config, AbsentStore(silent.config.url, error), member, error)
