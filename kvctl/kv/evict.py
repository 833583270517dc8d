"""`kv evict`: a plan first, then index nodes and manifests go, the longest generation of a chain first; chunks follow
by gc. Leased generations are skipped and said, pinned ones are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import CapacityError, UsageError
from kvctl.kv import sessions
from kvctl.kv.catalog import Catalog, Entry, Filter
from kvctl.kv.index import remove_nodes
from kvctl.kv.names import Pattern, SessionName
from kvctl.repo.gc import GRACE
from kvctl.repo.layout import LEASES
from kvctl.repo.leases import HoldInfo, read_holds
from kvctl.repo.repo import Repo

SCHEMA: Final = "kvctl.kv-evicted/1"


@dataclass(frozen=True, slots=True)
class EvictRequest:
    """`patterns`: TENANT/NAME[@GENERATION], globs. `max_bytes`: evict the least recently used of what is chosen until
    all that is chosen takes no more. `limit_bytes`: free no more than this in one run. `spare`: generations
    (TENANT/NAME@GENERATION) that are kept as if they were pinned. `used`: when chunks were used, by name, where the
    caller knows of later uses than the repo.
    """

    repo: tuple[StoreConfig, ...]
    patterns: tuple[str, ...] = ()
    filter: Filter = field(default_factory=Filter)
    max_bytes: int | None = None
    limit_bytes: int | None = None
    allow_empty: bool = False
    dry_run: bool = False
    spare: Collection[str] = ()
    used: Mapping[str, datetime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Eviction:
    """What goes, what stays and why. `freed_bytes`: chunks that nobody else names, deleted by gc when they have been
    garbage for its grace period, not before `due`. `repack_bytes`: parts of shared packs that only these used: freed by
    `repo gc` with repacking. `limited`: `limit_bytes` left some of it out. Not `evicted`: only a plan.
    """

    evict: tuple[Entry, ...]
    leased: tuple[Entry, ...]
    pinned: tuple[Entry, ...]
    freed_bytes: int
    repack_bytes: int
    due: str
    limited: bool = False
    evicted: bool = False
    nodes: int = 0

    @property
    def tokens(self) -> int:
        return sum(entry.manifest.tokens for entry in self.evict if entry.manifest is not None)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": SCHEMA,
            "sessions": [str(entry.found) for entry in self.evict],
            "leased": [str(entry.found) for entry in self.leased],
            "pinned": [str(entry.found) for entry in self.pinned],
            "tokens": self.tokens,
            "freed_bytes": self.freed_bytes,
            "freed_now_bytes": 0,
            "repack_bytes": self.repack_bytes,
            "due": self.due,
            "limited": self.limited,
            "evicted": self.evicted,
            "index_nodes": self.nodes,
        }


def evict_sessions(
    request: EvictRequest, ctx: Context, *, confirm: Callable[[Eviction], None] | None = None
) -> Eviction:
    """`confirm` sees the plan before anything goes and may raise. Raises UsageError when nothing says what to evict,
    NotFoundError for a pattern that names nothing, IncompatibleError when staleness cannot be told. A policy that finds
    nothing to do is no error.
    """
    if not request.patterns and request.filter.empty and request.max_bytes is None:
        raise UsageError(
            "nothing says what to evict", hint="name sessions ('alice/*'), an age, a model, or a size to keep"
        )
    with Repo.open(request.repo, ctx) as repo:
        catalog = Catalog.load(repo)
        plan = make_plan(request, repo, catalog)
        if request.dry_run or not plan.evict:
            return plan
        if confirm is not None:
            confirm(plan)
        return _carry_out(plan, repo, catalog, ctx)


def make_plan(request: EvictRequest, repo: Repo, catalog: Catalog) -> Eviction:
    chosen = catalog.select(repo, request.patterns, request.filter, allow_empty=request.allow_empty)
    leases = [hold for hold in read_holds(repo, LEASES) if hold.open and not hold.over()]
    pinned = [entry for entry in chosen if entry.pinned or str(entry.found) in request.spare]
    kept = {entry.found.key for entry in pinned}
    leased = [entry for entry in chosen if entry.found.key not in kept and is_leased(entry, leases)]
    kept |= {entry.found.key for entry in leased}
    free = [entry for entry in chosen if entry.found.key not in kept]
    if request.max_bytes is not None:
        free = _over_budget(free, chosen, request.max_bytes, request.used)
        pinned, leased = (pinned, leased) if free else ([], [])
    evict: list[Entry] = []
    limited = False
    for entry in sorted(free, key=_suffix_first):
        if request.limit_bytes is not None and freed_by([*evict, entry], catalog)[0] > request.limit_bytes:
            limited = True
            continue
        evict.append(entry)
    freed, repack = freed_by(evict, catalog)
    due = (catalog.at + timedelta(seconds=GRACE)).isoformat(timespec="seconds")
    return Eviction(tuple(evict), tuple(leased), tuple(pinned), freed, repack, due if freed else "", limited)


def _suffix_first(entry: Entry) -> tuple[str, int, int]:
    """Of a session the longest generation first."""
    tokens = entry.manifest.tokens if entry.manifest is not None else 0
    return str(entry.found.session), -tokens, -entry.found.generation


def is_leased(entry: Entry, leases: Iterable[HoldInfo]) -> bool:
    """Whether a reader holds this very generation: all of its chunks, under its name where the lease says a name."""
    names = set(entry.chunks)
    for hold in leases:
        where = hold.label.rpartition(" ")[2]
        if names and names <= hold.names and ("@" not in where or where == str(entry.found)):
            return True
    return False


def freed_by(evict: Sequence[Entry], catalog: Catalog) -> tuple[int, int]:
    """(bytes of chunks that nobody else names, bytes in shared packs that nobody else uses)."""
    gone: Counter[str] = Counter(name for entry in evict for name in entry.chunks)
    sizes = {name: size for entry in evict for name, size in entry.chunks.items()}
    freed = sum(sizes[name] for name, count in gone.items() if count == catalog.owners[name])
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    totals: dict[str, int] = {}
    doomed = {entry.found.key for entry in evict}
    for entry in catalog.entries:
        for row in entry.manifest.packs if entry.manifest is not None else ():
            assert entry.manifest is not None
            name = entry.manifest.chunks[row.chunk][0]
            if name not in gone or gone[name] == catalog.owners[name]:
                continue
            totals[name] = row.total
            before[name] = max(before.get(name, 0), row.blocks)
            if entry.found.key not in doomed:
                after[name] = max(after.get(name, 0), row.blocks)
    repack = sum(sizes[name] * (before[name] - after.get(name, 0)) // totals[name] for name in before)
    return freed, repack


def _over_budget(
    free: Sequence[Entry], chosen: Sequence[Entry], budget: int, used: Mapping[str, datetime]
) -> list[Entry]:
    """The least recently used of `free` that must go so that `chosen` takes no more than `budget` bytes."""
    owners: Counter[str] = Counter(name for entry in chosen for name in entry.chunks)
    sizes = {name: size for entry in chosen for name, size in entry.chunks.items()}
    total = sum(sizes.values())
    evict: list[Entry] = []

    def order(entry: Entry) -> tuple[datetime, tuple[str, int, int]]:
        return max((entry.used, *(used[name] for name in entry.chunks if name in used))), _suffix_first(entry)

    for entry in sorted(free, key=order):
        if total <= budget:
            break
        evict.append(entry)
        for name in entry.chunks:
            owners[name] -= 1
            total -= 0 if owners[name] else sizes[name]
    return evict


def _carry_out(plan: Eviction, repo: Repo, catalog: Catalog, ctx: Context) -> Eviction:
    """What is leased by now stays. Interrupted anywhere, running it again goes on."""
    leases = [hold for hold in read_holds(repo, LEASES) if hold.open and not hold.over()]
    late = [entry for entry in plan.evict if is_leased(entry, leases)]
    going = [entry for entry in plan.evict if entry not in late]
    gone: Counter[str] = Counter(name for entry in going for name in entry.chunks)
    doomed = {name for name, count in gone.items() if count == catalog.owners[name]}
    nodes = 0
    numbers: dict[SessionName, list[int]] = {}
    for entry in going:
        numbers.setdefault(entry.found.session, []).append(entry.found.generation)
    for session, evicted in numbers.items():
        sessions.reserve(repo, session, max(evicted))
    for entry in going:
        ctx.cancel.check("evicting")
        if entry.manifest is not None:
            keys = [bytes.fromhex(key) for key in entry.manifest.index]
            nodes += remove_nodes(repo, entry.manifest.ns, keys, lambda ref: ref.name in doomed)
        repo.delete_meta(entry.found.key)
    for session, evicted in numbers.items():
        sessions.forget(repo, session, evicted)
    freed, repack = freed_by(going, catalog)
    return replace(
        plan,
        evict=tuple(going),
        leased=(*plan.leased, *late),
        freed_bytes=freed,
        repack_bytes=repack,
        evicted=True,
        nodes=nodes,
    )


@dataclass(frozen=True, slots=True)
class Pinned:
    """Sessions that were pinned or unpinned, and the bytes that all pins of the repo keep now."""

    sessions: tuple[str, ...]
    pinned: bool
    bytes: int

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": "kvctl.kv-pinned/1",
            "sessions": list(self.sessions),
            "pinned": self.pinned,
            "bytes": self.bytes,
        }


def pin_sessions(
    repo: Sequence[StoreConfig],
    patterns: Sequence[str],
    ctx: Context,
    *,
    budget: int | None = None,
    allow_empty: bool = False,
) -> Pinned:
    """Pin what the patterns name: whole sessions, or (with @GENERATION) generations. Raises CapacityError, and pins
    nothing, when all pins of a tenant together would keep more than `budget` bytes.
    """
    with Repo.open(repo, ctx) as opened:
        catalog = Catalog.load(opened)
        chosen = catalog.select(opened, patterns, Filter(), allow_empty=allow_empty)
        for tenant in sorted({entry.found.session.tenant for entry in chosen}):
            size = _pinned_bytes(catalog, chosen, tenant)
            if budget is not None and size > budget:
                raise CapacityError(
                    f"the pins of {tenant} would keep {size} bytes", cause=f"its budget is {budget} bytes",
                    hint="unpin others first, or raise the budget",
                )  # fmt: skip
        for session, generation in _targets(chosen, patterns):
            sessions.pin(opened, session, generation)
        return Pinned(tuple(str(entry.found) for entry in chosen), True, _pinned_bytes(catalog, chosen, None))


def unpin_sessions(
    repo: Sequence[StoreConfig], patterns: Sequence[str], ctx: Context, *, allow_empty: bool = False
) -> Pinned:
    with Repo.open(repo, ctx) as opened:
        catalog = Catalog.load(opened)
        chosen = catalog.select(opened, patterns, Filter(), allow_empty=allow_empty)
        for session, generation in _targets(chosen, patterns):
            sessions.pin(opened, session, generation, on=False)
        catalog = Catalog.load(opened)
        return Pinned(tuple(str(entry.found) for entry in chosen), False, _pinned_bytes(catalog, (), None))


def _targets(chosen: Sequence[Entry], patterns: Sequence[str]) -> Sequence[tuple[SessionName, int | None]]:
    """Sessions, or generations where the pattern names some."""
    found: dict[tuple[SessionName, int | None], None] = {}
    wanted = [Pattern.parse(text) for text in patterns]
    for entry in chosen:
        whole = any(
            item.matches(entry.found.session, entry.found.generation) and not item.generation for item in wanted
        )
        found[entry.found.session, None if whole else entry.found.generation] = None
    return list(found)


def _pinned_bytes(catalog: Catalog, more: Sequence[Entry], tenant: str | None) -> int:
    """Bytes that pins keep, each chunk once: those that are pinned, and `more`."""
    keys = {entry.found.key for entry in more}
    kept: dict[str, int] = {}
    for entry in catalog.entries:
        mine = tenant is None or entry.found.session.tenant == tenant
        if mine and (entry.pinned or entry.found.key in keys):
            kept.update(entry.chunks)
    return sum(kept.values())
