"""What an operator asks of sessions: list, inspect, compare. Reads metadata and packs' headers, never KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import NotFoundError, UsageError
from kvctl.kv import sessions
from kvctl.kv.access import read_descriptor
from kvctl.kv.catalog import Catalog, Entry, Filter, Stale
from kvctl.kv.geometry import bytes_per_token
from kvctl.kv.identity import Descriptor, Difference, compare
from kvctl.kv.manifest import SessionManifest
from kvctl.kv.names import SessionAddress, parse_session
from kvctl.kv.reading import StoredSession
from kvctl.repo.layout import LEASES
from kvctl.repo.leases import read_holds
from kvctl.repo.repo import Repo

LIST_SCHEMA: Final = "kvctl.kv-sessions/1"
INSPECT_SCHEMA: Final = "kvctl.kv-session/1"
DIFF_SCHEMA: Final = "kvctl.kv-diff/1"
SORTS: Final = ("name", "age", "used", "tokens", "bytes", "unique")


@dataclass(frozen=True, slots=True)
class SessionList:
    """`at`: the store's time, which ages count from. Bytes of all that is listed, each chunk once."""

    entries: tuple[Entry, ...]
    at: datetime
    bytes: int

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": LIST_SCHEMA,
            "at": self.at.isoformat(timespec="seconds"),
            "bytes": self.bytes,
            "sessions": [entry.to_json(self.at) for entry in self.entries],
        }


def list_sessions(
    repo: Sequence[StoreConfig],
    ctx: Context,
    patterns: Sequence[str] = (),
    *,
    chosen: Filter | None = None,
    sort: str = "name",
    allow_empty: bool = False,
) -> SessionList:
    """Every generation that a pattern names (none: all) and the filter lets through; largest, oldest, longest unused
    first when sorted so. Raises NotFoundError for a pattern that names nothing, unless `allow_empty`.
    """
    if sort not in SORTS:
        raise UsageError(f"sessions cannot be sorted by {sort!r}", hint=f"use {', '.join(SORTS)}")
    with Repo.open(repo, ctx) as opened:
        catalog = Catalog.load(opened)
        entries = catalog.select(opened, patterns, chosen or Filter(), allow_empty=allow_empty)
    sizes = {name: size for entry in entries for name, size in entry.chunks.items()}
    return SessionList(tuple(_sorted(entries, sort)), catalog.at, sum(sizes.values()))


def _sorted(entries: Sequence[Entry], sort: str) -> list[Entry]:
    def tokens(entry: Entry) -> int:
        return entry.manifest.tokens if entry.manifest is not None else 0

    if sort == "age":
        return sorted(entries, key=lambda entry: entry.found.modified)
    if sort == "used":
        return sorted(entries, key=lambda entry: entry.used)
    if sort == "tokens":
        return sorted(entries, key=tokens, reverse=True)
    if sort == "bytes":
        return sorted(entries, key=lambda entry: entry.bytes, reverse=True)
    if sort == "unique":
        return sorted(entries, key=lambda entry: entry.unique_bytes, reverse=True)
    return list(entries)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One layer group as it is stored. Bytes of packs, and of one token while nothing leaves a window."""

    kind: str
    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None
    first: int
    end: int
    packs: int
    bytes: int

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class SessionDetails:
    """Everything known of one generation. `compatible`: None when no descriptor was given to compare with; else whether
    one may read the other's KV, by `differences`. `stale`: None when it was not asked.
    """

    entry: Entry
    at: datetime
    descriptor: Descriptor
    groups: tuple[GroupFacts, ...]
    generations: tuple[int, ...]
    bytes_per_token: int
    leases: tuple[str, ...] = ()
    keyed: bool = False
    shared_with: tuple[str, ...] = ()
    compatible: bool | None = None
    differences: tuple[Difference, ...] = ()
    stale: bool | None = None

    @property
    def manifest(self) -> SessionManifest:
        assert self.entry.manifest is not None
        return self.entry.manifest

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        manifest = self.manifest
        return {
            "schema": INSPECT_SCHEMA,
            **self.entry.to_json(self.at),
            "parent": manifest.parent,
            "generations": list(self.generations),
            "bytes_per_token": self.bytes_per_token,
            "layers": self.descriptor.layers,
            "groups": [group.to_json() for group in self.groups],
            "codecs": list(manifest.codecs),
            "index_nodes": len(manifest.index),
            "objects": len(manifest.chunks) + len(manifest.index) + 1,
            "tokens_stored": manifest.tokens_chunk is not None,
            "keyed": self.keyed,
            "salted": self.descriptor.salt is not None,
            "identity": self.descriptor.to_json(),
            "leases": list(self.leases),
            "shared_with": list(self.shared_with),
            "compatible": self.compatible,
            "differences": [
                {"field": item.field, "ours": item.ours, "theirs": item.theirs} for item in self.differences
            ],
            "stale": self.stale,
        }


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """`descriptor`: of a run that wants to read the session, to compare with. `weights`: the digest of a model's
    weights as they are now; a session of other ones is stale.
    """

    repo: tuple[StoreConfig, ...]
    address: str
    descriptor: Descriptor | None = None
    weights: str | None = None


def inspect_session(request: InspectRequest, ctx: Context) -> SessionDetails:
    """Raises NotFoundError, FormatError; reads every manifest of the repo, to tell what is shared."""
    with Repo.open(request.repo, ctx) as repo:
        found = sessions.resolve(repo, parse_session(request.address))
        catalog = Catalog.load(repo)
        entry = next((item for item in catalog.entries if item.found == found), None)
        if entry is None:
            raise NotFoundError(f"{found} was evicted just now")
        manifest = entry.manifest or sessions.read_session(repo, found.key)
        meaning = entry.descriptor or read_descriptor(repo, manifest.ns)
        names = set(entry.chunks)
        holds = [hold for hold in read_holds(repo, LEASES) if hold.open and not hold.over() and hold.names & names]
        differences = tuple(compare(request.descriptor, meaning)) if request.descriptor is not None else ()
        return SessionDetails(
            entry,
            catalog.at,
            meaning,
            tuple(_group_facts(meaning, manifest, number) for number in range(len(meaning.groups))),
            tuple(item.found.generation for item in catalog.entries if item.found.session == found.session),
            bytes_per_token(meaning.groups, meaning.dtype),
            tuple(sorted(hold.label for hold in holds)),
            repo.format.key_id is not None,
            tuple(str(item.found) for item in catalog.entries if item is not entry and names & item.chunks.keys()),
            None if request.descriptor is None else not differences,
            differences,
            None if request.weights is None else Stale(request.weights).hits(entry),
        )


def _group_facts(meaning: Descriptor, manifest: SessionManifest, number: int) -> GroupFacts:
    group = meaning.groups[number]
    rows = manifest.packs_of(number)
    return GroupFacts(
        group.kind,
        len(group.layers),
        group.kv_heads,
        group.k_dim,
        group.v_dim,
        group.window,
        rows[0].first if rows else manifest.tokens,
        rows[-1].end if rows else manifest.tokens,
        len(rows),
        sum(manifest.chunks[row.chunk][1] for row in rows),
    )


@dataclass(frozen=True, slots=True)
class SessionDiff:
    """Two generations side by side. `common_tokens`: length of the prefix whose block keys are equal (None: they are of
    different namespaces, and nothing is). Bytes of packs that both name, and that only one names.
    """

    a: str
    b: str
    a_tokens: int
    b_tokens: int
    common_tokens: int | None
    common_bytes: int
    a_bytes: int
    b_bytes: int
    identity: tuple[Difference, ...] = ()
    producer: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    requests: int = 0

    @property
    def same(self) -> bool:
        return not self.identity and self.common_tokens == self.a_tokens == self.b_tokens

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": DIFF_SCHEMA,
            "a": self.a,
            "b": self.b,
            "same": self.same,
            "a_tokens": self.a_tokens,
            "b_tokens": self.b_tokens,
            "common_tokens": self.common_tokens,
            "common_bytes": self.common_bytes,
            "a_bytes": self.a_bytes,
            "b_bytes": self.b_bytes,
            "identity": [{"field": item.field, "a": item.ours, "b": item.theirs} for item in self.identity],
            "producer": {name: list(values) for name, values in self.producer.items()},
        }


def diff_sessions(
    repo_a: Sequence[StoreConfig], a: str, repo_b: Sequence[StoreConfig], b: str, ctx: Context
) -> SessionDiff:
    """Two generations of one repo or two: identities, producers, and the common prefix, found by bisecting over packs'
    headers. Between repos of different keys nothing is common. Raises NotFoundError.
    """
    with (
        Repo.open(repo_a, ctx) as one,
        Repo.open(repo_b, ctx) as two,
        _opened(one, parse_session(a), ctx) as left,
        _opened(two, parse_session(b), ctx) as right,
    ):
        mine, theirs = left.manifest, right.manifest
        identity = tuple(compare(left.descriptor, right.descriptor))
        common = None if identity else _common(left, right)
        digests = {name[:64]: size for name, size in mine.chunks}
        others = {name[:64]: size for name, size in theirs.chunks}
        names = sorted(mine.producer.keys() | theirs.producer.keys())
        return SessionDiff(
            str(left.found),
            str(right.found),
            mine.tokens,
            theirs.tokens,
            common,
            sum(size for digest, size in digests.items() if digest in others),
            sum(size for digest, size in digests.items() if digest not in others),
            sum(size for digest, size in others.items() if digest not in digests),
            identity,
            {
                name: (mine.producer.get(name, ""), theirs.producer.get(name, ""))
                for name in names
                if mine.producer.get(name) != theirs.producer.get(name)
            },
            left.requests + right.requests,
        )


def _opened(repo: Repo, address: SessionAddress, ctx: Context) -> StoredSession:
    return StoredSession.open(repo, address, ctx)


def _common(left: StoredSession, right: StoredSession) -> int:
    """A block's key stands for all tokens before it, so the last equal one is found by bisecting."""
    group = _token_group(left.descriptor)
    if group is None:
        return left.manifest.tokens if left.manifest.token_hmac == right.manifest.token_hmac else 0
    size = left.descriptor.block_tokens
    low = max(left.manifest.packs_of(group)[0].first, right.manifest.packs_of(group)[0].first)
    first = -(-low // size)
    end = min(left.manifest.tokens, right.manifest.tokens)
    same, other = first - 1, end // size
    while other > same:
        middle = (same + other + 1) // 2
        if _key(left, group, middle, size) == _key(right, group, middle, size):
            same = middle
        else:
            other = middle - 1
    if same < first:
        return 0
    tokens = min(same * size + size, end)
    whole = left.manifest.tokens == right.manifest.tokens and left.manifest.token_hmac == right.manifest.token_hmac
    return left.manifest.tokens if whole else tokens // size * size


def _token_group(descriptor: Descriptor) -> int | None:
    """A group whose packs have all block keys, or the best there is."""
    kinds = [group.kind for group in descriptor.groups]
    for number, kind in enumerate(kinds):
        if kind not in {"sliding", "recurrent"}:
            return number
    return kinds.index("sliding") if "sliding" in kinds else None


def _key(session: StoredSession, group: int, block: int, size: int) -> bytes | str:
    """The key of block number `block`; what makes it unequal to any where it cannot be read."""
    for row in session.manifest.packs_of(group):
        if row.first // size <= block < row.first // size + row.blocks:
            session.read_headers([row])
            header = session.headers.get(row)
            return f"damaged {id(session)}" if header is None else header.blocks[block - row.first // size].key
    return f"missing {id(session)} {block}"
